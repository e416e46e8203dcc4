"""`harness.agree`: how far apart two precisions of one model are, token by token, and which layers cause it.

Asked where a rollout runs in another precision than the training: policy gradients take the log-probabilities of both for one. The
gap is held against that of each model with itself, run again and with the batch in halves, since kernels sum in another order there.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fp8core import CastInput, Float8Tensor
from harness.machine import environment
from harness.store import RunWriter, new_run_id
from harness.store.arm import Arm
from harness.store.case import Case
from harness.store.errors import UsageError
from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pandas as pd
    from torch import Tensor

SUITE = "agree"
_ROWS = 256  # tokens whose distributions are held in float64 at once


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two sets of predictions are apart: KL divergence of a token and |difference of its log-probability| in nats.

    `flips` is the share of tokens whose most probable successor differs, `tokens` how many were compared.
    """

    kl_mean: float
    kl_p99: float
    kl_max: float
    logprob_mean: float
    logprob_p99: float
    logprob_max: float
    flips: float
    tokens: int


class Cause(NamedTuple):
    """Layers of b, and the mean KL divergence in nats that is left where a's stand in their place, on the first batch."""

    layers: tuple[str, ...]
    kl_left: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """What `agree` found.

    Attributes:
        gap: of a and b.
        floor: the largest of each figure between a model and itself.
        causes: the layers that leave the least gap first; () where the gap is not above the floor.
        kl_first: mean KL divergence of a and b on the first batch, which `causes` are held against.
        judged: whose log-probability: "next token", or "top token of a" where batches hold no token ids.
        device: "cpu" or "cuda".
        note: what was not looked into; "" for nothing.
    """

    gap: Gap
    floor: Gap
    causes: tuple[Cause, ...]
    kl_first: float
    judged: str
    device: str
    note: str = ""

    @property
    def above_floor(self) -> bool:
        """Whether a and b are further apart than a model from itself, by the mean KL divergence; NaN is."""
        return not self.gap.kl_mean <= self.floor.kl_mean

    def to_frame(self) -> pd.DataFrame:
        """A row "gap" and a row "floor"."""
        import pandas as pd

        names = Gap.__slots__
        return pd.DataFrame(
            [[getattr(each, name) for name in names] for each in (self.gap, self.floor)],
            ["gap", "floor"],
            names,
        )

    def lines(self) -> list[str]:
        """What is to be said beside the figures."""
        said = [
            f"log-probability of the {self.judged}; floor: each model with itself, run again and in halves"
        ]
        if not self.above_floor:
            said.append("by the mean KL divergence not further apart than a model from itself")
        for cause in self.causes[:5]:
            part = 1 - cause.kl_left / self.kl_first
            said.append(f"{part:.0%} of the gap leaves with {', '.join(cause.layers)}")
        return [*said, *filter(None, [self.note])]

    def __str__(self) -> str:
        return "\n".join([self.to_frame().to_string(float_format=lambda x: f"{x:.3g}"), *self.lines()])

    def _repr_html_(self) -> str:
        table = self.to_frame().to_html(float_format=lambda x: f"{x:.3g}")
        return table + "".join(f"<p>{html.escape(line)}</p>" for line in self.lines())

    def save(self, model: str, results_dir: str | Path = "results") -> Path:
        """Writes the figures as a run, which `report` shows; returns its folder."""
        facts = environment.fingerprint(self.device)
        run_id = new_run_id(facts, SUITE, model)
        case = Case.of(SUITE, {"model": model, "tokens": self.gap.tokens, "judged": self.judged})
        writer = RunWriter(
            Path(results_dir) / SUITE / run_id, run_id=run_id, sweep=SUITE,
            env_id=environment.env_id(facts), env=facts,
            about={"made_by": "agree", "command": "harness.agree in code of the user's own", "answer": self.lines()},
        )  # fmt: skip
        rows = [
            _row(case, arm, part, metric, getattr(gap, field))
            for arm, gap in (("b", self.gap), ("floor", self.floor))
            for metric, part, field in _STORED
        ]
        rows += [
            _row(case, "b", ", ".join(each.layers), "kl_left_nats", each.kl_left) for each in self.causes
        ]
        writer.append(rows)
        writer.close("finished")
        return writer.folder


_STORED = [
    (metric, part, f"{figure}_{part}")
    for metric, figure in (("kl_nats", "kl"), ("logprob_gap_nats", "logprob"))
    for part in ("mean", "p99", "max")
] + [("top1_flips", "", "flips")]


def _row(case: Case, arm: str, part: str, metric: str, value: float) -> Measurement:
    sound = math.isfinite(value)
    return Measurement(
        suite=SUITE, case_id=case.case_id, arm=arm, arm_fields=Arm(variant=arm), axes=case.axes_json, metric=metric, part=part,
        status="ok" if sound else "failed", samples=(value,) * sound, reason="" if sound else f"{metric} is {value}",
    )  # fmt: skip


def agree(a: nn.Module, b: nn.Module, batches: Iterable[Any], *, passes: int = 32) -> Agreement:
    """Compares what two models predict, and looks for the layers of `b` that cause the difference.

    Args:
        a: the reference, such as the model in bf16.
        b: the other one: in FP8, or as it was exported; both are run in eval mode, without gradients, and left as they were.
        batches: what the models are called with: token ids [B, T], or a mapping of keyword arguments with "input_ids" and, if
            there is padding, "attention_mask"; another tensor is taken as it is. The models return logits [B, T, V], or an
            object that has them as `.logits`.
        passes: forward passes of `b` that the search for layers may take. A layer of `b` is replaced by that of `a` with the
            same name; where there are more layers than passes, neighbours are replaced together.

    Returns:
        Agreement.

    Raises:
        UsageError: no batch, logits of different shapes or none, passes below 0.
    """
    if passes < 0:
        raise UsageError(f"passes={passes}: expected 0 or more")
    with ExitStack() as stack, torch.no_grad():
        for model in {id(a): a, id(b): b}.values():
            stack.enter_context(_evaluated(model))
        ours = _Figures()
        own = [_Figures() for _ in range(4)]
        first, judged = None, set()
        for batch in batches:
            at_a, at_b = _logits(a, batch), _logits(b, batch)
            targets, kept = _targets(batch, at_a)
            judged.add("top token of a" if targets is None else "next token")
            ours.add(at_a, at_b, targets, kept)
            if first is None:
                first = batch, at_a, targets, kept, ours.gap().kl_mean
            for figures, model, seen, again in zip(
                own, (a, a, b, b), (at_a, at_a, at_b, at_b), (_logits, _halved) * 2, strict=True
            ):
                figures.add(seen, again(model, batch), targets, kept)
        if first is None:
            raise UsageError("batches is empty: expected one or more")
        gap = ours.gap()
        floor = Gap(*(max(getattr(each.gap(), name) for each in own) for name in Gap.__slots__))
        device = at_a.device.type
        said = " or ".join(sorted(judged))
        if gap.kl_mean <= floor.kl_mean:
            return Agreement(gap, floor, (), first[-1], said, device)
        causes, note = _causes(a, b, first, passes)
    return Agreement(gap, floor, causes, first[-1], said, device, note)


class _Figures:
    """Gathers both gaps of each token."""

    def __init__(self) -> None:
        self.kl: list[Tensor] = []
        self.logprob: list[Tensor] = []
        self.flips = 0

    def add(self, p: Tensor, q: Tensor, targets: Tensor | None, kept: Tensor) -> None:
        """Adds tokens.

        Args:
            p: logits [B, T, V] of the reference.
            q: of the other, likewise.
            targets: [B, T] token ids whose log-probability counts; None: the top one of `p`.
            kept: [B, T] whether a token counts.
        """
        if p.shape != q.shape:
            raise UsageError(
                f"logits {tuple(p.shape)} and {tuple(q.shape)}: expected two of one shape [B, T, V]"
            )
        rows, others = p[kept], q.to(p.device)[kept]
        wanted = rows.argmax(-1) if targets is None else targets[kept]
        for i in range(0, len(rows), _ROWS):
            log_p, log_q = (x[i : i + _ROWS].double().log_softmax(-1) for x in (rows, others))
            difference = log_p - log_q
            # 0 x inf of a token that cannot come is 0
            self.kl.append((log_p.exp() * difference).where(log_p > -math.inf, 0.0).sum(-1).cpu())
            self.logprob.append(difference.gather(-1, wanted[i : i + _ROWS, None])[:, 0].abs().cpu())
            self.flips += int((log_p.argmax(-1) != log_q.argmax(-1)).sum())

    def gap(self) -> Gap:
        """The figures over all tokens so far."""
        if not self.kl:
            raise UsageError("no token is left to compare: expected sequences of two tokens or more")
        kl, logprob = torch.cat(self.kl), torch.cat(self.logprob)
        return Gap(*_spread(kl), *_spread(logprob), self.flips / len(kl), len(kl))


def _spread(x: Tensor) -> tuple[float, float, float]:
    p99 = x.kthvalue(math.ceil(0.99 * len(x))).values  # quantile() takes no more than 16 million
    return float(x.mean()), float(p99), float(x.max())


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was


def _logits(model: nn.Module, batch: Any) -> Tensor:
    out = model(**batch) if isinstance(batch, Mapping) else model(batch)
    logits = getattr(out, "logits", out)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        raise UsageError(f"the model returned {type(out).__name__}; expected logits [B, T, V], or .logits")
    return logits


def _halved(model: nn.Module, batch: Any) -> Tensor:
    """Logits of a batch in two calls; in one where it has one sequence."""
    tensors = batch if isinstance(batch, Mapping) else {"": batch}
    size = next(len(x) for x in tensors.values() if isinstance(x, torch.Tensor))
    if size < 2:
        return _logits(model, batch)
    parts = []
    for rows in (slice(0, size // 2), slice(size // 2, size)):
        cut = {
            k: x[rows] if isinstance(x, torch.Tensor) and len(x) == size else x for k, x in tensors.items()
        }
        parts.append(_logits(model, cut if isinstance(batch, Mapping) else cut[""]))
    return torch.cat(parts)


def _targets(batch: Any, logits: Tensor) -> tuple[Tensor | None, Tensor]:
    """The token that follows each position, and which positions count; None where there are no token ids."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    kept = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is not None and mask.shape == kept.shape:
        kept &= mask.bool()
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.shape != kept.shape:
        return None, kept
    kept = kept & kept.roll(-1, 1)
    kept[:, -1] = False
    return ids.roll(-1, 1).to(logits.device), kept


def _causes(a: nn.Module, b: nn.Module, first: Sequence[Any], passes: int) -> tuple[tuple[Cause, ...], str]:
    batch, at_a, targets, kept, kl_first = first
    if kl_first == 0:
        return (), "no layer was looked into: the first batch shows no gap"
    of_a = dict(a.named_modules())
    names = [name for name, layer in b.named_modules() if _differ(of_a.get(name), layer)]
    if not (names and passes):
        return (), "no layer was looked into: " + (
            "passes=0" if names else "the models share no layer's name that differs"
        )
    size = math.ceil(len(names) / passes)
    of_b, found = dict(b.named_modules()), []
    for group in (names[i : i + size] for i in range(0, len(names), size)):
        with ExitStack() as stack:
            for name in group:
                hook = of_b[name].register_forward_hook(_Instead(of_a[name]))
                stack.callback(hook.remove)
            figures = _Figures()
            figures.add(at_a, _logits(b, batch), targets, kept)
        found.append(Cause(tuple(group), figures.gap().kl_mean))
    return tuple(sorted(found, key=lambda each: each.kl_left)), ""


def _differ(of_a: nn.Module | None, of_b: nn.Module) -> bool:
    """Whether two layers with weights of their own are of another kind, or hold other numbers."""
    ours, others = dict(of_b.named_parameters(recurse=False)), {}
    if of_a is None or not ours:
        return False
    others = dict(of_a.named_parameters(recurse=False))
    if type(of_a) is not type(of_b) or ours.keys() != others.keys():
        return True
    return any(
        x.shape != others[k].shape or not torch.equal(x, others[k].to(x.device, x.dtype))
        for k, x in ours.items()
    )


class _Instead:
    """A forward hook: what another layer makes of the same input."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._like = next(layer.parameters())

    def __call__(self, _: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        plain = [_plain(x) if isinstance(x, CastInput) else x for x in args]
        given = [
            x.to(self._like.device, self._like.dtype if x.is_floating_point() else None)
            if isinstance(x, torch.Tensor)
            else x
            for x in plain
        ]
        made = self._layer(*given)
        return made.to(out.device, out.dtype) if isinstance(out, torch.Tensor) else made


def _plain(x: CastInput) -> Tensor:
    """The tensor behind casts that several layers share; of one whose producer wrote codes alone, what the codes say."""
    if not x.codes_only:
        return x.hp
    assert isinstance(x.for_output, Float8Tensor)
    return x.for_output.dequantize().view(x.hp.shape)
