"""What the ranks of a trial tell each other once a round, with no collective that could hang.

Rank 0 gathers and answers, so that every rank decides by the same facts. A rank that does not answer in time is named.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

from fp8core.distributed.messages import Messages

if TYPE_CHECKING:
    from collections.abc import Mapping

_SLICE_S = 1.0  # between looks at what ranks that ended have told


class Exchange(Messages):
    """Messages of one trial among all ranks; alone, a rank hears itself."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__("harness/ab")
        self.timeout_s, self._calls = timeout_s, itertools.count()

    def all_of(self, mine: Any) -> tuple[list[Any], str]:
        """The messages of all ranks in order, and why there are none, "" if there are; all ranks must ask equally often.

        Args:
            mine: a JSON value other than None.
        """
        if self.alone:
            return [mine], ""
        call = next(self._calls)
        self.publish(f"{call}/{self.rank}", mine)
        if self.rank == 0:
            every: list[Any] = []
            for rank in range(self.size):
                every.append(self._awaited(f"{call}/{rank}", 0.1 if None in every else self.timeout_s))
            self.publish(f"{call}/all", every)
        # Rank 0 may wait for its whole time before it answers; where it does not, it is the silent one
        every_message: list[Any] = self._awaited(f"{call}/all", 2 * self.timeout_s) or [None]
        if None not in every_message:
            return every_message, ""
        silent = ", ".join(str(rank) for rank, text in enumerate(every_message) if text is None)
        return [], self.fault_of_others() or (
            f"rank {silent} did not answer within {self.timeout_s:g} s: all ranks must take the same steps through the trial"
        )

    def disagreement(self, mine: Mapping[str, Any]) -> str:
        """Why the ranks are not in one trial; "" if they are. All ranks must ask, before their first step.

        Ranks that were given other trials would switch at other steps: collectives could hang, and times prove nothing.

        Args:
            mine: what all must have been given alike, as JSON values by the name that a difference is told with.
        """
        messages, problem = self.all_of(mine)
        for rank, theirs in enumerate(messages):
            differ = [name for name in mine if theirs[name] != messages[0][name]]
            if differ:
                has, ours = (
                    ", ".join(f"{name}={of[name]!r}" for name in differ) for of in (theirs, messages[0])
                )
                return f"the ranks are not in one trial: rank {rank} has {has}, rank 0 {ours}"
        return problem

    def raised(self, what: str) -> None:
        """Tells all ranks at once that this one has ended."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and the others with it
            self.publish("raised", f"rank {self.rank}: {what}")

    def fault_of_others(self) -> str:
        """What a rank that ended has told; "" if none has. Never waits."""
        return str(self.heard("raised", _SLICE_S)) if self.is_published("raised") else ""

    def _awaited(self, key: str, timeout_s: float) -> Any:
        """A value once it is there; None when the time is up, or when a rank has told that it ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            found = self.heard(key, max(min(left, _SLICE_S), 0.01))
            if found is not None or left <= _SLICE_S or self.fault_of_others():
                return found
