"""`harness.agree`: how far apart two precisions of one model are, token by token, and which layers cause it.

Asked where a rollout runs in another precision than the training: policy gradients take the log-probabilities of both for one. The
gap is held against that of each model with itself, run again and with the batch in halves, since kernels sum in another order there.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8core import CastInput, Float8Tensor
from harness.store.case import Arm, Case
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.training.stored import store_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import pandas as pd

SUITE = "agree"
_ROWS = 256  # tokens whose distributions are held in float64 at once


class Gap(NamedTuple):
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


class PatchedLayers(NamedTuple):
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
    causes: tuple[PatchedLayers, ...]
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

        return pd.DataFrame([self.gap, self.floor], ["gap", "floor"])

    def lines(self) -> list[str]:
        """Remarks beside the figures."""
        found = [
            f"log-probability of the {self.judged}; floor: each model with itself, run again and in halves"
        ]
        if not math.isfinite(self.gap.kl_mean + self.floor.kl_mean):
            found.append("the predictions are not finite: nothing can be said of them")
        elif self.gap.kl_max == self.gap.logprob_max == 0:
            found.append(
                "the predictions are equal: one model twice, or no layer of b is in another precision"
            )
        elif not self.above_floor:
            found.append("by the mean KL divergence not further apart than a model from itself")
        for cause in self.causes[:5]:
            part = 1 - cause.kl_left / self.kl_first
            found.append(f"{part:.0%} of the gap is gone where b takes from a: {', '.join(cause.layers)}")
        return [*found, *filter(None, [self.note])]

    def __str__(self) -> str:
        return "\n".join([self.to_frame().to_string(float_format=lambda x: f"{x:.3g}"), *self.lines()])

    def _repr_html_(self) -> str:
        table = self.to_frame().to_html(float_format=lambda x: f"{x:.3g}")
        return table + "".join(f"<p>{html.escape(line)}</p>" for line in self.lines())

    def save(self, model: str, results_dir: str | Path = "results") -> Path:
        """Writes the figures as a run, which `report` shows; returns its folder."""
        case = Case.of(SUITE, {"model": model, "tokens": self.gap.tokens, "judged": self.judged})
        rows = [
            _row(case, arm, part, metric, getattr(gap, field))
            for arm, gap in (("b", self.gap), ("floor", self.floor))
            for metric, part, field in _STORED
        ]
        rows += [
            _row(case, "b", ", ".join(each.layers), "kl_left_nats", each.kl_left) for each in self.causes
        ]
        about = {
            "made_by": "agree",
            "command": "harness.agree in code of the user's own",
            "answer": self.lines(),
        }
        return store_run(SUITE, model, results_dir, self.device, rows, about)


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
        for module in {*a.modules(), *b.modules()}:
            stack.callback(setattr, module, "training", module.training)
        a.eval(), b.eval()
        ours, own, first = list[Tensor](), [list[Tensor]() for _ in range(4)], None
        judged = set()
        for batch in (dict(each) if isinstance(each, Mapping) else each for each in batches):
            at_a, at_b = _logits(a, batch), _logits(b, batch)
            targets, kept = _targets(batch, at_a)
            judged.add("top token of a" if targets is None else "next token")
            ours.append(_tokens(at_a, at_b, targets, kept))
            if first is None:
                first = batch, at_a, targets, kept, _gap(ours).kl_mean
            for found, model, seen, again in zip(
                own, (a, a, b, b), (at_a, at_a, at_b, at_b), (_logits, _halved) * 2, strict=True
            ):
                found.append(_tokens(seen, again(model, batch), targets, kept))
        if first is None:
            raise UsageError("batches is empty: expected one or more")
        gap, floor = _gap(ours), Gap(*map(max, zip(*map(_gap, own), strict=True)))
        is_above = not gap.kl_mean <= floor.kl_mean  # NaN is
        causes, note = _causes(a, b, first, passes) if is_above else ((), "")
    return Agreement(gap, floor, causes, first[-1], " or ".join(sorted(judged)), at_a.device.type, note)


def _tokens(p: Tensor, q: Tensor, targets: Tensor | None, kept: Tensor) -> Tensor:
    """KL divergence, |difference of the log-probability| and whether the top token differs, float64 [tokens, 3].

    Args:
        p: logits [B, T, V] of the reference.
        q: of the other, likewise.
        targets: [B, T] token ids whose log-probability counts; None: the top one of `p`.
        kept: [B, T] whether a token counts.
    """
    if p.shape != q.shape:
        raise UsageError(f"logits {tuple(p.shape)} and {tuple(q.shape)}: expected two of one shape [B, T, V]")
    rows, wanted, found = p[kept], (p.argmax(-1) if targets is None else targets)[kept], []
    for ours, others, ids in zip(
        rows.split(_ROWS), q.to(p.device)[kept].split(_ROWS), wanted.split(_ROWS), strict=True
    ):
        log_p, log_q = (x.double().log_softmax(-1) for x in (ours, others))
        difference = log_p - log_q
        # 0 x inf of a token that cannot come is 0
        kl = (log_p.exp() * difference).where(log_p != -math.inf, 0.0).sum(-1)
        gap = difference.gather(-1, ids[:, None])[:, 0].abs()
        found.append(torch.stack([kl, gap, (log_p.argmax(-1) != log_q.argmax(-1)).double()], -1).cpu())
    return torch.cat(found)


def _gap(tokens: list[Tensor]) -> Gap:
    """The figures over all tokens."""
    kl, logprob, flips = torch.cat(tokens).unbind(-1)
    if not len(kl):
        raise UsageError("no token is left to compare: expected sequences of two tokens or more")
    p99 = math.ceil(0.99 * len(kl))  # quantile() takes no more than 16 million

    def spread(x: Tensor) -> tuple[float, float, float]:
        return float(x.mean()), float(x.kthvalue(p99)[0]), float(x.max())

    return Gap(*spread(kl), *spread(logprob), float(flips.mean()), len(kl))


def _logits(model: nn.Module, batch: Any) -> Tensor:
    if not isinstance(batch, Tensor | dict):
        raise UsageError(
            f"a batch is a {type(batch).__name__}; expected token ids [B, T] or a mapping: of a loader's pairs, hand in the first"
        )
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    logits = getattr(out, "logits", out)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise UsageError(f"the model returned {type(out).__name__}; expected logits [B, T, V], or .logits")
    return logits


def _halved(model: nn.Module, batch: Any) -> Tensor:
    """Logits of a batch in two calls; in one where it has one sequence."""
    size = next(len(x) for x in tree_leaves(batch) if isinstance(x, Tensor))
    cuts = [slice(size // 2), slice(size // 2, size)] if size > 1 else [slice(size)]

    def cut(rows: slice) -> Any:
        return tree_map_only(Tensor, lambda x: x[rows] if x.shape[:1] == (size,) else x, batch)

    return torch.cat([_logits(model, cut(rows)) for rows in cuts])


def _targets(batch: Any, logits: Tensor) -> tuple[Tensor | None, Tensor]:
    """The token that follows each position, and which positions count; None where there are no token ids."""
    named = batch if isinstance(batch, dict) else {"input_ids": batch}
    ids, mask = named.get("input_ids"), named.get("attention_mask")
    kept = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    if mask is not None and mask.shape == kept.shape:
        kept &= mask.bool()
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.shape != kept.shape:
        return None, kept
    kept = kept & kept.roll(-1, 1)
    kept[:, -1] = False
    return ids.roll(-1, 1).to(logits.device), kept


def _causes(
    a: nn.Module, b: nn.Module, first: tuple[Any, ...], passes: int
) -> tuple[tuple[PatchedLayers, ...], str]:
    batch, at_a, targets, kept, kl_first = first
    of_a, of_b = dict(a.named_modules()), dict(b.named_modules())
    names = [name for name, layer in of_b.items() if _differ(of_a.get(name), layer)]
    why_not = {
        "the first batch shows no gap": kl_first == 0,
        "the models share no layer's name that differs": not names,
        "passes=0": not passes,
    }
    if why := next((why for why, holds in why_not.items() if holds), ""):
        return (), f"no layer was looked into: {why}"
    size, found = math.ceil(len(names) / passes), []
    for group in (names[i : i + size] for i in range(0, len(names), size)):
        with ExitStack() as stack:
            for name in group:
                stack.callback(of_b[name].register_forward_hook(_instead(of_a[name])).remove)
            left = _gap([_tokens(at_a, _logits(b, batch), targets, kept)])
        found.append(PatchedLayers(tuple(group), left.kl_mean))
    return tuple(sorted(found, key=lambda each: each.kl_left)), ""


def _differ(of_a: nn.Module | None, of_b: nn.Module) -> bool:
    """Whether two layers with weights of their own are of another kind, or hold other numbers."""
    ours = dict(of_b.named_parameters(recurse=False))
    if of_a is None or not ours:
        return False
    others = dict(of_a.named_parameters(recurse=False))
    return (type(of_a), ours.keys()) != (type(of_b), others.keys()) or not all(
        torch.equal(x, others[name].to(x.device, x.dtype)) for name, x in ours.items()
    )


def _instead(layer: nn.Module) -> Callable[..., Any]:
    """A forward hook: what another layer makes of the same input."""
    like = next(layer.parameters())

    def moved(x: Any) -> Any:
        x = _plain(x) if isinstance(x, CastInput) else x
        is_tensor = isinstance(x, Tensor)
        return x.to(like.device, like.dtype if x.is_floating_point() else None) if is_tensor else x

    def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        made = layer(*map(moved, args))
        return made.to(out.device, out.dtype) if isinstance(out, Tensor) else made

    return hook


def _plain(x: CastInput) -> Tensor:
    """The tensor behind casts that several layers share; of one whose producer wrote codes alone, what the codes say."""
    if not x.codes_only:
        return x.hp
    assert isinstance(x.for_output, Float8Tensor)
    return x.for_output.dequantize().view(x.hp.shape)
