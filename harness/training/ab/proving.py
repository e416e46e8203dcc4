"""The steps before the first block: each FP8 arm is proved to run in FP8, and bf16 to run none of it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch._C._autograd import _profiler_enabled

from fp8core.verify import StepProof
from fp8core.watching import profiling
from harness.store.errors import UsageError
from harness.training.ab.exchange import SilentRankError
from harness.training.ab.plan import FP8, GATHER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from fp8core.verify import Proof
    from harness.training.ab.exchange import Exchange
    from harness.training.ab.plan import Turn
    from harness.training.ab.seen import Extent
    from harness.training.ab.switch import Switch


def is_profiled() -> bool:
    """Whether a profiler of the user's own is active, which another one would end."""
    return _profiler_enabled()


def refuse_a_profiler() -> None:
    """A trial profiles single steps itself, and PyTorch runs one profiler at a time.

    Raises:
        UsageError: one is active.
    """
    if is_profiled():
        raise UsageError(
            "a profiler is active, and the trial, which profiles steps of its own, would end it: profile before "
            "the trial's first step or once trial.done"
        )


class Proving:
    """Proofs of the FP8 arms, each from two steps of the loop.

    Attributes:
        lines: of the proofs, by arm.
        stray: FP8 that ran in a bf16 step, or layers that were in another precision than that of the step; "" for none.
        proved: all that a trial asks for, on every rank.

    Args:
        model: that the loop trains.
        switch: of its layers.
        gather: FSDP2 must gather FP8 codes in the last FP8 arm.
        both: and none in the first.
        rank_timeout_s: how long ranks wait for each other.
    """

    def __init__(
        self, model: nn.Module, switch: Switch, *, gather: bool, both: bool, rank_timeout_s: float
    ) -> None:
        self._model, self._switch, self._rank_timeout_s = model, switch, rank_timeout_s
        self._demands = {FP8: gather and not both, GATHER: True}
        self._both = both
        self._under_way: StepProof | None = None
        self._codes = 0  # bytes that the last proof's step gathered
        self.lines: dict[str, str] = {}
        self.stray, self.proved = "", False

    @contextmanager
    def around(self, turn: Turn, *, on_gpu: bool) -> Iterator[None]:
        """Watches a step of the proof; others run as they are.

        Raises:
            UsageError: a profiler of the user's own is active by now.
        """
        if turn.purpose in ("compare", "count", "none"):
            refuse_a_profiler()
        if turn.purpose == "compare":
            self._under_way = StepProof(
                self._model, recipe=self._switch.recipe(turn.arm), fp8_all_gather=self._demands[turn.arm]
            )
        if turn.purpose in ("compare", "count"):
            assert self._under_way is not None
            with self._under_way.step():
                yield
        elif turn.purpose == "none":
            with profiling(on_gpu) as seen:
                yield
            if seen.counted:
                self.stray = f"{seen.counted} FP8 GEMMs ran in a step that was to be bf16"
        else:
            yield

    def conclude(self, arm: str) -> tuple[Proof, str]:
        """The proof of an arm, and why it is none ("" if it is); all ranks must ask."""
        assert self._under_way is not None
        proof = self._under_way.conclude(rank_timeout_s=self._rank_timeout_s)
        self.lines[arm] = proof.line
        if not proof.ok:  # on every rank: verdicts are shared
            return proof, f"FP8 is not proved: {proof.line}"
        if self._both:
            self.stray = self.stray or self._mixed(arm, proof)
        return proof, ""

    def agree(self, exchange: Exchange, extent: Extent) -> str:
        """Why the proofs of all ranks together prove nothing; "" where they do. All ranks must ask.

        Args:
            exchange: among the ranks.
            extent: what this rank's step trained on.
        """
        try:
            messages = exchange.all_of({"stray": self.stray, "extent": str(extent)})
        except SilentRankError as error:
            return str(error)
        strays = [f"rank {rank}: {m['stray']}" for rank, m in enumerate(messages) if m["stray"]]
        extents = sorted({m["extent"] for m in messages})
        if strays:
            return "; ".join(strays) if len(messages) > 1 else self.stray
        if len(extents) > 1:
            return f"ranks train on other batches: {'; '.join(extents)}"
        self.proved = True
        return ""

    def _mixed(self, arm: str, proof: Proof) -> str:
        """Why the two FP8 arms do not differ in what FSDP2 gathers; "" if they do."""
        codes, before = proof.all_gathers.get("uint8", 0), self._codes
        self._codes = codes  # activations of sequence parallelism may be among them, in both arms
        named = [layer.fqn for layer in proof.layers if layer.all_gather == "fp8"]
        if arm == FP8 and named:
            return f"{named[0]} was gathered in FP8 in the arm of the high-precision all-gather ({len(named)} in all)"
        if arm == GATHER and codes <= before:
            return f"{codes} bytes of codes were gathered in the arm with FP8 all-gather, {before} in that without"
        return ""
