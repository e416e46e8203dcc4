"""Differences: in which fields two environments, or more, are not the same. One list, whoever asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

GENERATED = "generated_by"  # what made rows that nothing measured; they compare with no measurement
# Two runs may be compared number by number when these agree. Left out on purpose: the git commit (what a
# gate compares), host name, GPU UUID and free memory (a fleet of one kind stays comparable; chips of one
# kind differ by some 5 %, which `gpu_uuid_hash` lets a reader see), numpy and OS (not on the timed path).
LATER = (
    "deep_gemm",
    "aiter",
    GENERATED,
)  # fields that the first ids lack: they count where there is something to count
ENV_ID_FIELDS = (
    "device",
    "gpu",
    "gpu_memory_gib",
    "power_limit_w",
    "ecc",
    "mig",
    "driver",
    "cuda",
    "hip",
    "cublas",
    "cudnn",
    "torch",
    "triton",
    "torchao",
    "transformer_engine",
    "python",
    "cpu",
    "isa",
    "cpu_cores",
    "threads",
    *LATER,
)
# What tells two machines or commits apart, and no time depends on
IDENTITY = frozenset({"git_commit", "git_dirty", "host_hash", "gpu_uuid_hash"})


def differences(
    envs: Sequence[Mapping[str, Any]], fields: Collection[str] | None = None
) -> dict[str, tuple[Any, ...]]:
    """The fields in which environments differ, each with its value in every one of them; None where one lacks it.

    Fields that a time depends on come first (`ENV_ID_FIELDS`), then the others by name.

    Args:
        envs: environments as rows store them.
        fields: look at these alone, in this order; by default at all.
    """
    if fields is None:
        known = dict.fromkeys(name for env in envs for name in env)
        fields = [*(n for n in ENV_ID_FIELDS if n in known), *sorted(known.keys() - set(ENV_ID_FIELDS))]
    values = {name: tuple(env.get(name) for env in envs) for name in fields}
    return {name: seen for name, seen in values.items() if any(value != seen[0] for value in seen[1:])}


def comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The differences that keep times from being compared number by number: those of `ENV_ID_FIELDS`."""
    return differences((one, other), ENV_ID_FIELDS)


def in_words(found: Mapping[str, tuple[Any, ...]], sign: str = " != ", most: int | None = None) -> str:
    """Differences in one line: "driver: 570.1 != 575.3, torch: 2.12 != 2.13 and 3 more"; "" where there are none."""
    lines = [f"{name}: {sign.join(map(str, values))}" for name, values in found.items()]
    shown = lines if most is None else lines[:most]
    return ", ".join(shown) + (f" and {len(lines) - len(shown)} more" if len(lines) > len(shown) else "")
