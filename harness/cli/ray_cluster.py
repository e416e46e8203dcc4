"""A Ray that already runs, which `hydra/launcher=ray` is to use: whether it is there, and what its launcher must be told."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING

from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

INIT = "hydra.launcher.ray.init"
ANSWER_S = 10.0  # for a head to accept a connection; Ray itself waits for one that is not there for minutes


def words(own: Sequence[str]) -> list[str]:
    """What is to be added to the words for Hydra.

    The launcher names a size of the object store, which a Ray that already runs refuses.
    """
    size = f"{INIT}.object_store_memory"
    return [f"+{size}=null"] if _address(own) and size not in _given(own) else []


def refuse_absent(own: Sequence[str]) -> None:
    """Refuses an address where nothing listens.

    Raises:
        UsageError: names it and the ways out.
    """
    address = _address(own)
    found = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d{1,5})", address)
    if found is None or int(found[2]) > 65535:  # "auto" and what else only Ray can find
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=ANSWER_S).close()
    except OSError as error:
        raise UsageError(
            f"{INIT}.address={address}: no Ray answers there ({error.strerror or error}); expected the HOST:PORT that "
            "`ray start --head` has named, or auto on a machine of the cluster"
        ) from error


def _address(own: Sequence[str]) -> str:
    """Where the Ray is that is to be used; "" where one is to be started."""
    named = _given(own).get(f"{INIT}.address", os.environ.get("RAY_ADDRESS", ""))
    return "" if named in ("null", "local") else named


def _given(own: Sequence[str]) -> dict[str, str]:
    return {key: value for key, _, value in (word.lstrip("+").partition("=") for word in own)}
