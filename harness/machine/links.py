"""Links: who can send to whom, by what kind of link, and how fast a message went, as nccl-tests counts it.

Of an operation on S bytes by n ranks that takes t seconds, the algorithm bandwidth is S / t, and the bus bandwidth that times
a factor, after which it can be set beside what the hardware's links can do, for any n (NVIDIA/nccl-tests,
doc/PERFORMANCE.md, read 2026-11-24). S is what each rank holds of an all-reduce or a message, what is gathered of an
all-gather, what is reduced of a reduce-scatter. 1 GB/s is 1e9 bytes/s. Pure functions; no torch.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND = "all_reduce", "all_gather", "reduce_scatter", "send"
# Bus bandwidth over algorithm bandwidth, by number of ranks
FACTORS: Mapping[str, Callable[[int], float]] = {
    ALL_REDUCE: lambda n: 2 * (n - 1) / n,
    ALL_GATHER: lambda n: (n - 1) / n,
    REDUCE_SCATTER: lambda n: (n - 1) / n,
    SEND: lambda n: 1.0,
}
ELEMENT = 4  # bytes: messages are of float32
SUITE, METRIC = "links", "link_s"

# Kinds of link, of which only equal ones are compared
HOSTS = "between hosts"
NETWORKS = (
    "between networks of a host"  # containers or namespaces, which share the machine and not its interfaces
)
MEMORY = "within a host"
NVLINK, PCIE, UNKNOWN = "NVLink", "PCIe", "NVLink or PCIe"


@dataclass(frozen=True, slots=True)
class End:
    """One rank and where it is.

    Attributes:
        rank: of the group that was measured.
        node: its place among the nodes that the launcher started; 0 where there is one.
        host: hash of the host's name and of its boot.
        network: hash of the host and of the network namespace that it is in.
        device: "cpu" or "cuda:i".
        gpu: hash of its UUID; "" without one.
        nvlinked: hashes of the UUIDs of the GPUs to which it has NVLink; None where that could not be read.
        model: of the GPU; "" without one, and in rows of before it was kept.
        paths: by hash of another GPU's UUID, what PCIe passes on the way to it, as NVML's common ancestor; None likewise.
        machine: hash of the host's name alone, which stays when it starts anew; "" in rows of before it was kept.
    """

    rank: int
    node: int
    host: str
    network: str
    device: str
    gpu: str = ""
    nvlinked: tuple[str, ...] | None = None
    model: str = ""
    paths: tuple[tuple[str, str], ...] | None = None
    machine: str = ""

    @property
    def name(self) -> str:
        """Rank, device, node and host."""
        device = f"{self.device} {self.gpu[:8]}".strip()
        return f"rank {self.rank} ({device}, node {self.node}, host {self.host[:8]})"

    @property
    def place(self) -> tuple[str, ...]:
        """What is the same when it is measured again: the GPU, or the rank of a node's CPU."""
        return (self.gpu,) if self.gpu else (self.host, str(self.node), str(self.rank))

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> End:
        """The inverse of `as_dict`, after JSON.

        Raises:
            ValueError: a field is missing, unknown or of another type.
        """
        if not isinstance(values, dict):
            raise ValueError(f"an end is {values!r}; expected its fields")
        lacking = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        unknown = sorted(values.keys() - {f.name for f in fields(cls)})
        if lacking or unknown:
            raise ValueError(f"field {(lacking + unknown)[0]!r} is {'missing' if lacking else 'unknown'}")
        for name, value in values.items():
            fits, expected = _FIELDS[name]
            if not fits(value):
                raise ValueError(f"{name}={value!r}: expected {expected}")
        linked, paths = values.get("nvlinked"), values.get("paths")
        return cls(
            **{
                **values,
                "nvlinked": None if linked is None else tuple(linked),
                "paths": None if paths is None else tuple((gpu, path) for gpu, path in paths),
            }
        )


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value from JSON is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_text, value))


def _are_pairs(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(_are_texts(pair) and len(pair) == 2 for pair in value)


_COUNT = (is_count, "a whole number from 0 on")
_TEXT = (_is_text, "a text")
# Of each field of an end, after JSON: whether a value fits, and what would
_FIELDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "rank": _COUNT,
    "node": _COUNT,
    "host": _TEXT,
    "network": _TEXT,
    "device": _TEXT,
    "gpu": _TEXT,
    "nvlinked": (lambda value: value is None or _are_texts(value), "a list of texts, or null"),
    "model": _TEXT,
    "paths": (lambda value: value is None or _are_pairs(value), "a list of pairs of texts, or null"),
    "machine": _TEXT,
}


def kind(one: End, other: End) -> str:
    """What joins two ends."""
    if one.host != other.host:
        return HOSTS
    if one.network != other.network:
        return NETWORKS
    if not (one.gpu and other.gpu):
        return MEMORY
    if one.nvlinked is None or other.nvlinked is None:
        return UNKNOWN
    if has_nvlink(one, other):
        return NVLINK
    paths = {dict(a.paths or ()).get(b.gpu, "") for a, b in ((one, other), (other, one))}
    path = paths.pop() if len(paths) == 1 else ""
    return f"{PCIE}, {path}" if path else PCIE


def has_nvlink(one: End, other: End) -> bool:
    """Both ends say so."""
    return other.gpu in (one.nvlinked or ()) and one.gpu in (other.nvlinked or ())


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks that take part in an operation, as column `part` of a row writes them.

    >>> str(Members((0, 1), directed=True)), str(Members((0, 1))), str(Members((0, 1, 2)))
    ('0>1', '0-1', '0-1-2')
    """

    ranks: tuple[int, ...]
    directed: bool = False

    def __str__(self) -> str:
        return (">" if self.directed else "-").join(map(str, self.ranks))

    @classmethod
    def of(cls, part: str) -> Members:
        """The inverse of `str`.

        >>> Members.of("0>1")
        Members(ranks=(0, 1), directed=True)
        """
        return cls(tuple(int(rank) for rank in part.replace(">", "-").split("-")), ">" in part)


def groups(operation: str, world: int) -> list[Members]:
    """Who measures an operation, one after the other: each pair, in both directions of a message, and all at once."""
    if operation == SEND:
        return [Members(pair, directed=True) for pair in permutations(range(world), 2)]
    pairs = [Members(pair) for pair in combinations(range(world), 2)]
    return pairs if world == 2 else [*pairs, Members(tuple(range(world)))]


def undivided(operation: str, size: int, ranks: int) -> str:
    """Why so many bytes cannot be dealt to so many ranks, with the nearest size; "" where they can."""
    if operation in (ALL_REDUCE, SEND) or size % (ELEMENT * ranks) == 0:
        return ""
    # The largest number of KiB below that does, or the smallest that any does
    step = next(kib for kib in range(1, ranks + 1) if kib * 1024 % (ELEMENT * ranks) == 0)
    near = max(1, size // 1024 // step) * step
    return f"{operation} of {size:,} bytes over {ranks} ranks: they do not divide into equal float32 shards; nearest: axes.kib={near}"


def bandwidths(operation: str, size: int, ranks: int, seconds: float) -> tuple[float, float]:
    """Algorithm and bus bandwidth in GB/s.

    >>> bandwidths("all_reduce", 10**9, 4, 0.5)
    (2.0, 3.0)
    """
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * FACTORS[operation](ranks)
