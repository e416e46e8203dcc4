"""What is noted of each layer and each of its GEMMs while a step runs: plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fp8core.proof.verify.products import Difference

MOST_FAULTS = 3  # of one layer in the message
UNJUDGED = "its gradients cannot be judged: the loss does not depend on it"


@dataclass
class GemmProof:
    """One of the three GEMMs of a layer, over all of its calls in a step.

    Attributes:
        fp8: the recipe casts its operands.
        asked: the casts of the recipe, as text.
        received: role -> (format, granularity, accumulation, backend) of the codes that came to it, of calls that differ each.
        calls: how often its result was compared.
        telling: in how many of these calls the product had a finite element other than 0; without any, wrong code agrees too.
        operands: how many operands were compared, code by code, with an independent cast.
        sqnr_db: lowest, against the product of the operands in high precision.
        expected_db: what the casts of the same operands imply, of that call.
        row_db: lowest SQNR of a row.
        agreement_db: lowest, against the product of independently cast operands.
    """

    fp8: bool
    asked: tuple[str, str] = ("high precision", "high precision")
    received: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    calls: int = 0
    telling: int = 0
    operands: int = 0
    sqnr_db: float = math.inf
    expected_db: float = math.inf
    row_db: float = math.inf
    agreement_db: float = math.inf

    def receive(self, role: str, *seen: str) -> None:
        """Notes what came, what was alike in several calls once."""
        known = self.received.setdefault(role, [])
        if seen not in known:
            known.append(seen)

    def add(self, found: Difference) -> None:
        """Takes in a call."""
        self.calls += 1
        self.telling += found.signal > 0
        if found.sqnr_db < self.sqnr_db:
            self.sqnr_db, self.expected_db = found.sqnr_db, found.expected_db
        self.row_db = min(self.row_db, found.row_db)
        self.agreement_db = min(self.agreement_db, found.agreement_db)


@dataclass
class LayerProof:
    """One Linear, or the product of one module of experts.

    Attributes:
        fqn, recipe, reason, all_gather: as `fp8core.LayerAudit`; of experts, the name of their `GroupedMatmul`.
        calls: forward passes of one step, and how many of them recomputed.
        few_tokens: of the calls those that `min_tokens` of the recipe runs in high precision.
        predicted: FP8 GEMMs of one step.
        agreement_db: lowest agreement of its output with the product of independently cast operands; None before it is
            called.
        saturated, underflowed: of each operand, the largest share of elements in any call; not of a weight that FSDP2
            gathered in FP8, as it arrives in codes; not of experts.
        of_experts: it is such a product, not a Linear.
        gemms: by name; empty if it is not converted.
        faults: what differs from the recipe.
        not_checked: what could not be compared, and why.
        in_threads: calls in threads whose operators cannot be seen.
        grad_bias: the gradient of its bias was compared.
        gradient: its output had one in some call that was not all 0.
        backward: GEMMs of its backward passes that a call led to, and that a backward pass reached.
    """

    fqn: str
    recipe: str
    reason: str
    all_gather: str = ""
    calls: int = 0
    recomputed: int = 0
    few_tokens: int = 0
    predicted: int = 0
    agreement_db: float | None = None
    saturated: dict[str, float] = field(default_factory=dict)
    underflowed: dict[str, float] = field(default_factory=dict)
    of_experts: bool = False
    gemms: dict[str, GemmProof] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    in_threads: int = 0
    grad_bias: bool = False
    gradient: bool = False
    backward: tuple[int, int] = (0, 0)

    @property
    def unjudged(self) -> bool:
        """The loss does not depend on it: no gradient came, or nothing but zeros, so that its gradients show nothing."""
        led_to, reached = self.backward
        right = self.gemms and not (self.faults or self.not_checked) and self.gemms["output"].telling
        return bool(right) and led_to > 0 and not (reached and self.gradient)

    def compared(self, gemm: str, found: Difference) -> None:
        """Takes in what a GEMM's result came to."""
        self.gemms[gemm].add(found)
        if gemm == "output":
            known = math.inf if self.agreement_db is None else self.agreement_db
            self.agreement_db = min(known, found.agreement_db)
        if found.fault:
            self.fault(f"{gemm} is not the recipe's: {found.fault}")
        elif found.inconclusive:
            self.unchecked(f"{gemm}: {found.inconclusive}")

    def fault(self, text: str) -> None:
        """Notes what is wrong, each thing once."""
        if text not in self.faults:
            self.faults.append(text)

    def unchecked(self, text: str) -> None:
        """Notes what could not be compared, each thing once."""
        if text not in self.not_checked:
            self.not_checked.append(text)

    def problems(self) -> list[str]:
        """What is wrong, with the layer's name."""
        shown, more = self.faults[:MOST_FAULTS], len(self.faults) - MOST_FAULTS
        shown += [f"{more} more faults"] * (more > 0)
        return [f"{self.fqn or 'the model'}: {text}" for text in shown]


def inconclusive(proofs: Iterable[LayerProof]) -> Iterator[str]:
    """GEMMs of which a layer's step showed nothing: all products were 0 or NaN; or no layer ran one in a backward pass."""
    converted = [proof for proof in proofs if proof.gemms]
    few = 2 * sum(proof.unjudged for proof in converted) < len(converted)
    for proof in converted:
        if proof.in_threads or (few and proof.unjudged):
            continue
        idle = [name for name, gemm in proof.gemms.items() if gemm.calls and not gemm.telling]
        if (
            proof.calls > proof.few_tokens
            and not proof.gemms["output"].calls
            and any(g.fp8 for g in proof.gemms.values())
        ):
            idle.append("output")  # experts without tokens: nothing to compare
        if proof.unjudged and not idle:
            yield f"{proof.fqn}: {UNJUDGED}"
        elif idle:
            yield (
                f"{proof.fqn}: {', '.join(idle)}: every product of the step is 0, NaN or empty, so that wrong code agrees with "
                "it too; verify a step whose loss is finite, with tokens, and after a first update where weights begin at 0"
            )
    ran = {name for proof in converted for name, gemm in proof.gemms.items() if gemm.calls}
    if ran == {"output"}:
        yield (
            "no converted layer took part in a backward pass: a training step computes gradients (no_grad? inference_mode? "
            "all frozen?)"
        )
