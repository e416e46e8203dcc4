"""What a trial knows of its steps beside their times: tokens, FLOPs, memory, ranks that are slower."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from fp8core.dtensors import is_dtensor
from harness.training.ab import waits
from harness.training.ab.plan import BASE, WITH_GATHER
from harness.training.models.tokens import common_rows
from harness.training.steps import facts_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from fp8core.verify import Proof
    from harness.training.ab.plan import Plan
    from harness.training.ab.seen import Extent


@dataclass
class Known:
    """Collected while a trial runs.

    Attributes:
        tokens: rows of a step that the Linear layers of one rank multiply; None under tensor parallelism.
        flops: of the model in a step of one rank by dtype, for "base" and each FP8 arm, counted once on a real batch; what
            bf16 steps multiply the FP8 products in is "unknown" where the step had no other product.
        peak_bytes: most memory of a timed step of any rank, by arm.
        joules: (round, joules of a step with what runs between steps, mean of all ranks), by arm; of blocks that every rank
            could read.
        resolved: the proof's facts, by FP8 arm, for the store.
        gpu: name and memory in GiB of the model's GPU; None on another device.
    """

    tokens: float | None = None
    flops: dict[str, dict[str, float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    joules: defaultdict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    resolved: dict[str, dict[str, object]] = field(default_factory=dict)
    gpu: tuple[str, float] | None = None
    # Of each round a median for each rank: the own part of profiled steps, timed steps, the time between them
    _own: list[list[float]] = field(default_factory=list)
    _whole: list[list[float]] = field(default_factory=list)
    _gaps: list[list[float]] = field(default_factory=list)

    def add_proof(self, arm: str, proof: Proof, model: nn.Module) -> None:
        """What the compared step of a proof shows."""
        fp8 = proof.matmuls.by_dtype()
        high = {dtype: amount for dtype, amount in fp8.items() if dtype not in ("e4m3", "e5m2", "emulated")}
        # What FP8 multiplies, bf16 multiplies in the dtype of the other products of the step
        main = max(high, key=lambda dtype: high[dtype], default="unknown")
        self.flops[BASE] = {**high, main: high.get(main, 0.0) + sum(fp8.values()) - sum(high.values())}
        self.flops[arm] = dict(fp8)
        device = next(model.parameters()).device
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.gpu = properties.name, properties.total_memory / 2**30
        self.tokens, self.resolved[arm] = _tokens(proof, model), facts_of(proof)

    def add_round(self, index: int, messages: Sequence[Mapping[str, Any]]) -> None:
        """What a round of all ranks adds; a block that is left out for a fault on any rank adds nothing.

        Args:
            index: of the round.
            messages: of all ranks (`harness.training.ab.seen.told`).
        """
        arms = [
            arm for arm in WITH_GATHER if not any(arm in message.get("faults", {}) for message in messages)
        ]
        for message in messages:
            for arm, peak in message.get("peaks", {}).items():
                if arm in arms:
                    self.peak_bytes[arm] = max(peak, self.peak_bytes.get(arm, 0))
        for arm in arms:
            read = [message["joules"][arm] for message in messages if arm in message.get("joules", {})]
            if len(read) == len(messages):
                self.joules[arm].append((index, statistics.fmean(read)))
        for rows, values in (
            (self._own, [_of_arms(arms, message.get("own_ms", {})) for message in messages]),
            (self._whole, [_of_arms(arms, message["times_ms"]) for message in messages]),
            (self._gaps, [_of_arms(arms, message.get("gaps_ms", {})) for message in messages]),
        ):
            if all(values):
                rows.append([statistics.median(of_rank) for of_rank in values])

    def slow_rank(self) -> str:
        """The rank that the others wait for; "" if none stands out."""
        if not self._whole:
            return ""
        step_ms = statistics.median([max(of_ranks) for of_ranks in self._whole])
        costs: list[tuple[float, str]] = []
        if found := waits.slowest(self._own or self._whole, step_ms):
            rank, ratio, ms = found
            part = "for its own part of a step" if self._own else "a step"
            costs.append((ms, f"rank {rank} takes about {100 * (ratio - 1):.0f} % longer {part}"))
        if late := waits.latest(self._gaps, step_ms):
            rank, ms = late
            costs.append(
                (ms, f"rank {rank} spends about {ms:.3g} ms more between steps (data loader, logging)")
            )
        if costs:
            return f"{max(costs)[1]} than the other ranks: all wait for it"
        return ""


def unseen(extent: Extent, plan: Plan, ranks: int) -> tuple[str, ...]:
    """What could not be watched in a trial whose steps train on `extent`."""
    found = []
    if not extent.shapes:
        found.append("shapes of batches were not seen: tell them by trial.step(batch)")
    if not extent.updates:
        found.append("no optimizer step was seen inside trial.step()")
    if ranks > 1 and not plan.lead:
        found.append("which rank the others wait for was not looked at: lead=0")
    if plan.block == 1 and (plan.lead == 0 or (plan.lead == 1 and ranks > 1)):
        found.append("time between steps was not seen: block=2 or more gives it")
    return tuple(found)


def _of_arms(arms: Sequence[str], values: Mapping[str, Sequence[float]]) -> list[float]:
    return [value for arm in arms for value in values.get(arm, ())]


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
