"""What ranks tell each other through the key-value store of torch.distributed, which no stuck collective can block."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class Messages:
    """JSON values by key, of one numbered matter that all ranks begin equally often; a rank alone has nobody to tell.

    Args:
        matter: whose messages these are.

    Attributes:
        rank, size: of the process group at that time.
        alone: there is no other rank.
    """

    def __init__(self, matter: str) -> None:
        self.rank, self.size = 0, 1
        self._store: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._store = dist.distributed_c10d._get_default_store()
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._prefix = f"{matter}/{next(_numbers[matter])}"
        self.alone = self._store is None

    def publish(self, key: str, value: Any) -> None:
        """Sets what other ranks may read."""
        if not self.alone:
            self._store.set(f"{self._prefix}/{key}", json.dumps(value))

    def is_published(self, key: str) -> bool:
        """Whether a rank has set it; never waits."""
        return not self.alone and bool(self._store.check([f"{self._prefix}/{key}"]))

    def heard(self, key: str, timeout_s: float) -> Any:
        """A value once it is there; None when the time is up."""
        try:
            self._store.wait([f"{self._prefix}/{key}"], timedelta(seconds=timeout_s))
            return json.loads(self._store.get(f"{self._prefix}/{key}"))
        except (RuntimeError, dist.DistStoreError):
            return None
