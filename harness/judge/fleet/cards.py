"""Cards: what a GPU, or the host of a CPU, is called in rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

CHECKSUM = "checksum"  # the suite whose results are compared by their bits


def card_name(env: Mapping[str, Any]) -> str:
    """The short name of the GPU of an environment, or of its host where there is none."""
    host = str(env.get("host_hash") or "unknown")[:8]
    return f"{str(env['gpu_uuid_hash'])[:8]}@{host}" if env.get("gpu_uuid_hash") else f"host {host}"


def card_id(env: Mapping[str, Any]) -> str:
    """What is equal in all runs of a GPU, in any results folder; of a CPU in one."""
    return str(env.get("gpu_uuid_hash") or card_name(env))
