"""Proof: what `verify` found, as data, a line and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fp8core.proof.flops import MatmulCount
from fp8core.recipe import GEMMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8core.proof.verify.records import LayerProof


SHOWN = 3  # of a list in the line


def _few(texts: Sequence[str], between: str = ", ") -> str:
    """The first ones, and how many more."""
    more = len(texts) - SHOWN
    return between.join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Proof:
    """What `verify` found.

    Attributes:
        problems: what is wrong; empty if ok.
        warnings: what a user should look at although FP8 runs.
        layers: every Linear of the model.
        experts: the product of every module of experts that is converted.
        predicted, counted: FP8 GEMMs of one step.
        device: of the first converted layer, "" if there is none.
        fp8_kernel_share: of the GEMM kernels' time, in kernels of an FP8 type by their names; None off CUDA.
        all_gathers: dtype -> bytes that this rank gave to the all-gathers of one step; FP8 codes travel as uint8, and so
            does whatever shares an all-gather with them. Empty where nothing is sharded.
        emulated_in: the precision in which the device multiplies FP8 codes, where it has no FP8 matrix units (a CPU,
            with any backend); "" on others.
        not_checked: what could not be compared, and why; empty if ok.
        probed: recipes that were tested with operands of our own, see `fp8core.proof.verify.probe`.
        compiled: of the counted GEMMs those that ran in compiled code; what was compared is the same step in eager mode.
        unjudged: converted layers whose gradients cannot be judged, as the loss does not depend on them; no proof where
            they are half of all, or more.
        shared_weights: layers whose weight was found the same on all ranks of their DDP or FSDP2 group.
        matmuls: every matrix product of the step by owner, which of them ran in FP8, and their shares of its FLOPs.
    """

    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    layers: tuple[LayerProof, ...]
    predicted: int
    counted: int
    device: str
    fp8_kernel_share: float | None
    all_gathers: dict[str, int]
    emulated_in: str = ""
    experts: tuple[LayerProof, ...] = ()
    not_checked: tuple[str, ...] = ()
    probed: tuple[str, ...] = ()
    compiled: int = 0
    unjudged: tuple[str, ...] = ()
    shared_weights: int = 0
    matmuls: MatmulCount = field(default_factory=lambda: MatmulCount(()))

    @property
    def ok(self) -> bool:
        """FP8 runs as asked, and all of it was compared."""
        return not (self.problems or self.not_checked)

    @property
    def exit_code(self) -> int:
        """For a process: 0 FP8 runs as asked, 1 it doesn't, or not all of it could be compared."""
        return 0 if self.ok else 1

    def __str__(self) -> str:
        return self.line

    @property
    def line(self) -> str:
        """One line; it starts with "FP8 verified" only if `ok`."""
        if self.problems:
            return "FP8 NOT verified: " + "; ".join(self.problems)
        gathered = (
            sum(layer.all_gather == "fp8" for layer in self._converted)
            if self.all_gathers.get("uint8")
            else 0
        )
        line = f"FP8 verified{' in eager mode' if self.compiled else ''}"
        if not self.ok:
            line = f"FP8 NOT verified: not checked: {'; '.join(self.not_checked)}; nothing wrong found in the rest"
        if self.unjudged:
            line += (
                f", but for gradients of {len(self.unjudged)} of {len(self._converted) + len(self.experts)} layers, which cannot "
                f"be judged, since the loss does not depend on them ({_few(self.unjudged)})"
            )
        line += f": {self._what_ran}"
        if gathered:
            line += f", {gathered} weights gathered in FP8"
        counts = ", ".join(f"{name} {count}" for name, count in self.compared.items() if count)
        line += f"; compared, as autograd hands it out: {counts}"
        if self.compiled:
            line += f"; of {self.counted} counted GEMMs {self.compiled} ran in compiled code, whose results were not compared"
        if self.emulated_in:
            line += (
                f", whose arithmetic is emulated: it multiplies FP8 codes in {self.emulated_in}. Casts and calls are "
                "FP8's, speed is not"
            )
        left: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.reason:
                left.setdefault(layer.reason.partition("; ")[0], []).append(layer.fqn)
        if left:
            line += "; not converted: " + ", ".join(f"{_few(names)}: {why}" for why, names in left.items())
        if self.warnings:
            line += f"; {len(self.warnings)} warnings: {_few(self.warnings, '; ')}"
        return line

    @property
    def _converted(self) -> list[LayerProof]:
        return [layer for layer in self.layers if layer.recipe]

    @property
    def compared(self) -> dict[str, int]:
        """How many layers each result was compared of; what hooks, reductions over ranks and optimizers make of it is beyond."""
        layers = [*self._converted, *self.experts]
        counts = {name: sum(layer.gemms[name].calls > 0 for layer in layers) for name in GEMMS}
        counts["grad_bias"] = sum(layer.grad_bias for layer in layers)
        return counts | {"shared_weights": self.shared_weights}

    @property
    def _what_ran(self) -> str:
        experts = f" and {len(self.experts)} modules of experts" if self.experts else ""
        recipes = ", ".join(sorted({layer.recipe for layer in (*self._converted, *self.experts)}))
        ran = sum(any(gemm.fp8 and gemm.calls for gemm in layer.gemms.values()) for layer in self._converted)
        share = "" if self.fp8_kernel_share is None else f", {100 * self.fp8_kernel_share:.0f} % of GEMM time"
        return (
            f"{ran} of {len(self.layers)} Linear layers{experts}, {self.counted} FP8 GEMMs a step as "
            f"predicted, {self.matmuls.text}; recipe {recipes}, on {self.device}{share}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain types only."""
        shares = {"fp8_flop_share": self.matmuls.fp8_share, "not_in_fp8": self.matmuls.not_in_fp8}
        words = {"ok": self.ok, "exit_code": self.exit_code, "line": self.line, "compared": self.compared}
        return {**words, **shares, **asdict(self)}

    def to_json(self) -> str:
        """`to_dict` as JSON; numbers that are not finite as null."""
        plain = json.loads(json.dumps(self.to_dict()), parse_constant=lambda _: None)
        return json.dumps(plain, indent=2)
