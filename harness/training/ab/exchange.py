"""What ranks tell each other once a round, through torch.distributed's key-value store: no collective that could hang.

Rank 0 gathers and answers, so that every rank decides by the same facts. A rank that does not answer in time is named.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping

_TRIALS = itertools.count()
_SLICE_S = 1.0  # between looks at what ranks that ended have told


class Exchange:
    """Messages of one trial among all ranks; alone, a rank hears itself."""

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = 0, 1, timeout_s
        self._store: Any = None
        self._calls = itertools.count()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._store = dist.distributed_c10d._get_default_store()
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._prefix = f"harness/ab/{next(_TRIALS)}"

    def all_of(self, mine: Any) -> tuple[list[Any], str]:
        """The messages of all ranks in order, and why there are none, "" if there are; all ranks must ask equally often.

        Args:
            mine: a JSON value.
        """
        if self._store is None:
            return [mine], ""
        key = f"{self._prefix}/{next(self._calls)}"
        self._store.set(f"{key}/{self.rank}", json.dumps(mine))
        if self.rank == 0:
            texts: list[str | None] = []
            for rank in range(self.size):
                texts.append(self._get(f"{key}/{rank}", 0.1 if None in texts else self.timeout_s))
            self._store.set(f"{key}/all", json.dumps(texts))
        # Rank 0 may wait for its whole time before it answers; where it does not, it is the silent one
        told = json.loads(self._get(f"{key}/all", 2 * self.timeout_s) or "[null]")
        if None not in told:
            return [json.loads(text) for text in told], ""
        silent = ", ".join(str(rank) for rank, text in enumerate(told) if text is None)
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
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, and the others with it
                self._store.set(f"{self._prefix}/raised", f"rank {self.rank}: {what}")

    def fault_of_others(self) -> str:
        """What a rank that ended has told; "" if none has. Never waits."""
        if self._store is None or not self._store.check([f"{self._prefix}/raised"]):
            return ""
        return str(self._store.get(f"{self._prefix}/raised").decode())

    def _get(self, key: str, timeout_s: float) -> str | None:
        """A value once it is there; None when the time is up, or when a rank has told that it ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                self._store.wait([key], timedelta(seconds=max(min(left, _SLICE_S), 0.01)))
                return str(self._store.get(key).decode())
            except (RuntimeError, dist.DistStoreError):
                if left <= _SLICE_S or self.fault_of_others():
                    return None
