"""What ranks tell each other once a round, through torch.distributed's key-value store: no collective that could hang.

Rank 0 gathers and answers, so that every rank decides by the same facts. A rank that does not answer in time is named.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_TRIALS = itertools.count()
_SLICE_S = 1.0  # between looks at what ranks that ended have told


class SilentRankError(RuntimeError):
    """A rank did not answer; the message names it."""


class Exchange:
    """Messages of one trial among all ranks; alone, a rank hears itself."""

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = 0, 1, timeout_s
        self._store: Any = None
        self._turn = itertools.count()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._store = dist.distributed_c10d._get_default_store()
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._prefix = f"harness/ab/{next(_TRIALS)}"

    def all_of(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all ranks in order; every rank must call it equally often.

        Args:
            mine: JSON values.

        Raises:
            SilentRankError: on every rank that still answers.
        """
        if self._store is None:
            return [mine]
        key = f"{self._prefix}/{next(self._turn)}"
        self._store.set(f"{key}/{self.rank}", json.dumps(mine))
        if self.rank == 0:
            gathered: list[dict[str, Any]] = []
            silent: list[int] = []
            for rank in range(self.size):
                text = self._get(f"{key}/{rank}", self.timeout_s if not silent else 0.1)
                gathered.append(json.loads(text) if text is not None else {})
                if text is None:
                    silent.append(rank)
            self._store.set(f"{key}/all", json.dumps({"messages": gathered, "silent": silent}))
        # Rank 0 may wait for its whole time before it answers
        text = self._get(f"{key}/all", 2 * self.timeout_s)
        answer = json.loads(text) if text is not None else {"silent": [0], "messages": []}
        if answer["silent"] and (told := self.fault_of_others()):
            raise SilentRankError(told)
        if answer["silent"]:
            names = ", ".join(map(str, answer["silent"]))
            raise SilentRankError(
                f"rank {names} did not answer within {self.timeout_s:g} s: all ranks must take the same steps through the trial"
            )
        return list(answer["messages"])

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
