"""The proof of a training loop that goes on: two of its own steps take the place of a function that is run three times."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from fp8core.arguments import check_type
from fp8core.config import as_recipe
from fp8core.verify.passes import Passes, PassResults, conclude
from fp8core.verify.ranks import RANK_TIMEOUT_S, Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8core.config import Float8LinearConfig
    from fp8core.recipe import Recipe
    from fp8core.verify.proof import Proof


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
        """Both steps have been seen."""
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

        def see() -> PassResults:
            seen = self._passes.seen()
            if not self.complete:
                seen.problems.append(f"{self._through} of the 2 steps that a proof needs were seen")
            return seen

        proof = conclude(
            see,
            self._model,
            Ranks(),
            recipe=self._recipe,
            fp8_all_gather=self._fp8_all_gather,
            rank_timeout_s=rank_timeout_s,
        )
        if announce:
            sys.stdout.write(proof.line + "\n")
        return proof
