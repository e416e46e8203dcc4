"""Steps of a trial that a framework's hooks begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class UnfinishedStepError(RuntimeError):
    """The loop went on, or ended, inside of a step that a hook had begun."""


class HookedSteps:
    """`Trial.step` in two halves, for loops that are not one's own."""

    _hooked: AbstractContextManager[None] | None = None
    step: Any
    done: bool

    @property
    def in_hooked_step(self) -> bool:
        """Whether `begin_step` has begun a step that is still open."""
        return self._hooked is not None

    def begin_step(self, batch: object = None) -> None:
        """Begins a step, as entering `step(batch)` does. After the trial's end it does nothing.

        A step that is still open counts for nothing, and the trial ends without an answer.
        """
        self.end_step(UnfinishedStepError("left before its end: another one began"))
        if self.done:
            with self.step():  # as a step that is not the trial's
                return
        else:
            hooked = self.step(batch)
            hooked.__enter__()
            self._hooked = hooked

    def end_step(self, error: BaseException | None = None) -> None:
        """Ends the step that `begin_step` began; without one it does nothing.

        Args:
            error: what the step raised: the trial then ends and restores. `with trial:` around the framework's call does this
                for a framework that tells its hooks of no exception. The error is not raised here.
        """
        hooked, self._hooked = self._hooked, None
        if hooked is None:
            return
        if error is None:
            hooked.__exit__(None, None, None)
        else:
            hooked.__exit__(type(error), error, error.__traceback__)
