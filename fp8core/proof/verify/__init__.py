"""verify: a proof, read by machines, that a training step runs in FP8 and computes what its recipe says.

The step runs three times and leaves no trace (`fp8core.proof.verify.state`). The first time, in eager mode whatever was
compiled, hooks and a dispatch mode see each call of each Float8Linear and of each product of experts (`.calls`):

    operands   codes and scales that each FP8 GEMM received, against an independent cast                `.oracle`
    products   output, grad_input and grad_weight, against products of the same operands in float64, in high
               precision and cast independently: the SQNR must be the one that these operands imply    `.products`
    sums       gradients that add up over microbatches                                                      `.sums`

The second time it runs as is, so that what is compiled compiles; the third time a profiler counts the FP8 GEMMs that
ran. What must follow, of each call:

    output        once; again for each recomputation in a backward pass
    grad_input    where the input needs a gradient
    grad_weight   where the weight does

each only if the recipe casts it. Last, each recipe that the model runs is tested with operands that hold what the step
may not: NaN, subnormal codes, ties, a largest element that is negative (`.probe`).

The proof fails on every way of not running FP8 that looks like running it: nothing converted (a filter that matches
nothing), a layer that is never called, emulation, another recipe than the one asked for, hardware without FP8, a count
other than the prediction, no FP8 kernel by name on CUDA, delayed scales that never move, an all-gather in high precision
where an FP8 one is asked for, another rank that disproves it or does not answer. What could not be compared is named,
and then it is no proof either. What is no fault but no FP8 arithmetic either, a CPU that multiplies FP8 codes in
float32, is said in the line. docs/verify.md lists planted faults and what catches them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from fp8core.arguments import check_type
from fp8core.config import as_recipe
from fp8core.proof.flops.counter import check_step
from fp8core.proof.verify.census import Census, census
from fp8core.proof.verify.passes import Passes, conclude
from fp8core.proof.verify.proof import Proof
from fp8core.proof.verify.ranks import RANK_TIMEOUT_S
from fp8core.proof.verify.records import GemmProof, LayerProof
from fp8core.proof.verify.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fp8core.config import Float8LinearConfig
    from fp8core.recipe import Recipe

__all__ = ["Census", "GemmProof", "LayerProof", "Proof", "StepProof", "census", "verify"]


def verify(
    step_fn: Callable[[], object],
    model: nn.Module,
    *,
    recipe: Float8LinearConfig | Recipe | str | None = None,
    fp8_all_gather: bool = False,
    announce: bool = True,
    rank_timeout_s: float = RANK_TIMEOUT_S,
) -> Proof:
    """Runs a training step three times and proves, or disproves, that it runs in FP8; the model stays as it is.

    Args:
        step_fn: one whole training step: forward and backward passes, the optimizer if there is one (it will find no
            gradients). Weights, buffers, gradients, optimizer states and random numbers are afterwards what they were.
        model: that it trains; compiled or not.
        recipe: what every converted Linear must run (as for `convert_to_float8_training`); None: whatever it runs.
            Experts run what they were converted to.
        fp8_all_gather: the sharded weights of all converted layers must be gathered in one byte an element.
        announce: write `Proof.line` to stdout.
        rank_timeout_s: how long to wait for the verdicts of other ranks. All ranks must call `verify`.

    Returns:
        Proof. An exception of step_fn passes through, once the other ranks know of it and the model is as it was.

    Raises:
        TypeError: step_fn can't be called, the model is no module, or the recipe none.
        ValueError: an unknown recipe. All of these before step_fn is called.
    """
    check_type("model", model, nn.Module, "verify(step_fn, model)")
    check_step(step_fn)
    wanted = None if recipe is None else as_recipe(recipe)

    def see() -> Passes:
        """The three passes; the model is as it was before and after each of them."""
        state = State(model)
        passes = Passes(model, state.about_to_write)
        with state.kept():
            with passes.compare():
                step_fn()
            state.restore()
            step_fn()
            passes.look_at_scales()
            lost = state.unrestorable()
            state.restore()
            with passes.count():
                step_fn()
            lost = max(lost, state.unrestorable())
        if lost:
            passes.problems.append(
                f"a later pass wrote {lost} tensors of the model that the first did not: they could not be put back; "
                "step_fn must do the same in each call"
            )
        return passes

    return conclude(see, wanted, fp8_all_gather, rank_timeout_s, announce)


class StepProof:
    """Proves FP8 on steps that train, where `verify` would have to run one step three times.

        proof = StepProof(model)
        for batch in loader:
            with proof.step():
                ... forward, backward, optimizer, update_scales ...
            if proof.complete: break
        print(proof.conclude().line)

    The first step runs in eager mode and is compared, the second runs as it is and its FP8 GEMMs are counted. Nothing is
    put back: both train. What was compiled should have been run before, or the second step compiles. The two steps must
    have as many forward passes: another number of GEMMs is a problem, not a proof.

    Args:
        model: that the loop trains, already converted; compiled or not.
        recipe: what every converted Linear must run; None: whatever it runs.
        fp8_all_gather: the sharded weights of all converted layers must be gathered in one byte an element.

    Raises:
        TypeError: the model is no module, or the recipe none.
        ValueError: an unknown recipe.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        recipe: Float8LinearConfig | Recipe | str | None = None,
        fp8_all_gather: bool = False,
    ) -> None:
        check_type("model", model, nn.Module, "StepProof(model)")
        self._model = model
        self._recipe = None if recipe is None else as_recipe(recipe)
        self._fp8_all_gather = fp8_all_gather
        self._passes = Passes(model)
        self._through = 0

    @property
    def complete(self) -> bool:
        """Whether both steps have been seen."""
        return self._through == 2

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one whole training step; after a step that raises the proof begins anew.

        Raises:
            RuntimeError: both steps were seen already.
        """
        if self.complete:
            raise RuntimeError("both steps of this proof were seen; make another StepProof(model)")
        try:
            with self._passes.compare() if self._through == 0 else self._passes.count():
                yield
        except BaseException:
            self._passes, self._through = Passes(self._model), 0  # what it saw is half a step
            raise
        self._through += 1

    def conclude(self, *, announce: bool = False, rank_timeout_s: float = RANK_TIMEOUT_S) -> Proof:
        """The proof; all ranks must ask for it. Before both steps were seen it is none, and says so.

        Args:
            announce: write `Proof.line` to stdout.
            rank_timeout_s: how long to wait for the verdicts of other ranks.
        """

        def see() -> Passes:
            text = f"{self._through} of the 2 steps that a proof needs were seen"
            self._passes.problems = [] if self.complete else [text]
            return self._passes

        return conclude(see, self._recipe, self._fp8_all_gather, rank_timeout_s, announce)
