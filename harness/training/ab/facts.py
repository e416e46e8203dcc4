"""What a trial knows of its steps beside their times: tokens, FLOPs, memory, ranks that are slower."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from fp8core.dtensors import is_dtensor
from harness.training.ab.plan import BASE, FP8
from harness.training.models.tokens import common_rows
from harness.training.steps import facts_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from fp8core.verify import Proof

_STANDS_OUT = 1.1  # a rank whose median step is so much longer than the median rank's


@dataclass
class Known:
    """Collected while a trial runs.

    Attributes:
        tokens: rows of a step that the Linear layers of one rank multiply; None under tensor parallelism.
        flops: of a step of one rank by dtype, for "base" and "fp8", counted once on a real batch.
        peak_bytes: most memory of a timed step of any rank, by arm.
        resolved: the proof's facts, for the store.
    """

    tokens: float | None = None
    flops: dict[str, dict[str, float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    resolved: dict[str, object] = field(default_factory=dict)
    _by_rank: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, proof: Proof, model: nn.Module) -> Known:
        """What the compared step of a proof shows."""
        fp8 = proof.matmuls.by_dtype()
        high = {dtype: amount for dtype, amount in fp8.items() if dtype not in ("e4m3", "e5m2", "emulated")}
        # What FP8 multiplies, bf16 multiplies in the dtype of the other products of the step
        main = max(high, key=lambda dtype: high[dtype], default="bf16")
        base = {**high, main: high.get(main, 0.0) + sum(fp8.values()) - sum(high.values())}
        return cls(_tokens(proof, model), {BASE: base, FP8: dict(fp8)}, resolved=facts_of(proof))

    def add_round(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """What a round of all ranks adds."""
        for rank, message in enumerate(messages):
            self._by_rank[rank] += [t for arm in (BASE, FP8) for t in message["times_ms"].get(arm, ())]
            for arm, peak in message.get("peaks", {}).items():
                self.peak_bytes[arm] = max(peak, self.peak_bytes.get(arm, 0))

    def slow_rank(self) -> str:
        """The rank that the others wait for; "" if none stands out."""
        medians = {rank: statistics.median(times) for rank, times in self._by_rank.items() if times}
        if len(medians) < 2:
            return ""
        middle = statistics.median_low(medians.values())
        rank = max(medians, key=lambda r: medians[r])
        if medians[rank] < _STANDS_OUT * middle:
            return ""
        return f"rank {rank} takes {medians[rank] / middle - 1:.0%} longer a step than the median rank: all wait for it"


def _tokens(proof: Proof, model: nn.Module) -> float | None:
    """Rows of the layers that do most of the work; None where weights are cut by columns or rows."""
    weights = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}
    cut = [p for p in weights.values() if is_dtensor(p)]
    if cut and (
        not is_sharded_by_fsdp(model) or any(sum(q.is_shard() for q in p.placements) > 1 for p in cut)
    ):
        return None
    rows: defaultdict[str, float] = defaultdict(float)
    for product in proof.matmuls.matmuls:
        name = product.owner.replace("_orig_mod.", "")
        if product.phase == "forward" and product.role == "weight" and name in weights:
            rows[name] += product.flops / (2 * weights[name].numel())
    found = common_rows((round(count), weights[name].numel()) for name, count in rows.items())
    return float(found) or None
