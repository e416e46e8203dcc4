"""Verdicts of all ranks, through the key-value store of torch.distributed, which no stuck collective can block.

Each rank writes its verdict, also where its step raised, and waits for the others'. One that does not answer in time is
named. Calls are numbered, so all ranks must call `verify` equally often; one that skips a call is named in the next:

- who waits in vain says so in its own place, where the late rank finds it instead of a verdict;
- beside its verdict each rank writes how many collectives of the default group it had begun. Those of one step agree.
  A program without such collectives shows nothing by them.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_CALLS = itertools.count()


class Ranks:
    """One call of `verify` among those of all ranks."""

    def __init__(self) -> None:
        self.store: Any = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.store = dist.distributed_c10d._get_default_store()
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.prefix = f"fp8core/verify/{next(_CALLS)}/"
            self.collectives = _collectives()

    def answer(self, verdict: str) -> None:
        """Writes this rank's verdict: "" for none against it, else a line."""
        if self.store is not None:
            self.store.set(f"{self.prefix}{self.rank}", f"{self.collectives} {verdict or 'ok'}")

    def problems(self, timeout_s: float) -> list[str]:
        """What the other ranks have against it, and which did not answer."""
        found: list[str] = []
        silent: list[int] = []
        for rank in range(self.size):
            if rank == self.rank:
                continue
            key = f"{self.prefix}{rank}"
            try:
                # Whoever is silent is waited for once
                self.store.wait([key], timedelta(seconds=timeout_s if not silent else 0.1))
                collectives, _, verdict = self.store.get(key).decode().partition(" ")
            except (RuntimeError, dist.DistStoreError):
                silent.append(rank)
            else:
                if collectives != str(self.collectives):
                    found.append(
                        f"rank {rank}: called verify at another step, after {collectives} collectives of the default group "
                        f"against {self.collectives} here; all ranks must call it equally often"
                    )
                if verdict != "ok":
                    found.append(f"rank {rank}: {verdict}")
        if silent:
            missing = ", ".join(map(str, silent))
            self.answer(f"ended this call without rank {missing}; all ranks must call verify equally often")
            found.append(f"rank {missing} did not answer within {timeout_s:g} s")
        return found


def _collectives() -> int:
    """Number of collectives that this rank has begun in the default group; 0 where its backend does not count."""
    try:
        group: Any = dist.group.WORLD
        return int(group._get_sequence_number_for_group()) if group is not None else 0
    except RuntimeError:
        return 0
