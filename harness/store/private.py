"""Private: what nothing that is stored may tell: who measured, on which host, and where on it.

A path is stored as `$PWD/...`, `$TMPDIR/...` or `~/...`, of any other place as `.../` and its last part. The name of a host is
stored as a hash by the salt of its results folder: equal within it, and nobody outside can try names.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import math
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.store import run_files
from harness.store.outside import read_bytes

CUT = "..."
_ELSEWHERE = re.compile(
    r"(?<![\w./~$-])/(?!(?:bin|dev|etc|lib|lib64|opt|proc|sys|usr)/)(?:[^\s/'\"<>|:;,*()\[\]{}]+/)+"
)


def public(value: Any) -> Any:
    """A value as it may be stored as JSON; infinities and NaN, which JSON lacks, become the strings "inf", "-inf" and "nan"."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {_text(str(k)): public(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [public(v) for v in value]
    return value


def found_again(path: str) -> str:
    """A path as `public` has it, on this machine and from this folder."""
    name, _, rest = path.partition("/")
    place = {"$PWD": ".", "$TMPDIR": _temporary(), "~": str(Path.home())}.get(name)
    return path if place is None else str(Path(place).absolute() / rest)


def salt_file(results_dir: Path) -> Path:
    """Where a results folder keeps its salt."""
    return results_dir / run_files.SALT


def salt(results_dir: Path) -> bytes:
    """What only this results folder knows; made where it is missing."""
    path = salt_file(results_dir)
    with suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb", buffering=0) as file:
            file.write(secrets.token_bytes(32))
    return read_bytes(path)


def hashed(text: str) -> str:
    """Twelve hexadecimal digits for a name that is not stored."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def of_run(env: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """An environment as the rows of a run have it, whose folder lies in its results folder as `SWEEP/RUN`."""
    host = env.get("host_hash")
    key = salt(run.parent.parent) if host else b""
    return {
        **env,
        **({"host_hash": hmac.new(key, str(host).encode(), "sha256").hexdigest()[:12]} if host else {}),
    }


def _text(text: str) -> str:
    if (
        not text.isascii()
    ):  # half of a surrogate pair, as in names of files that are no UTF-8, cannot be written
        text = text.encode("utf-8", "backslashreplace").decode()
    if "/" in text:
        places, user = _places(_folder(), str(Path.home()), _temporary())
        text = user.sub("~", places[0].sub(lambda m: places[1][m[1]], text))
        text = _ELSEWHERE.sub(f"{CUT}/", text)
    return _host().sub("this host", text) if " " in text else text  # in prose: a name may be any word


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it is gone
        return ""


def _temporary() -> str:
    return os.environ.get("TMPDIR", "/tmp")


@lru_cache
def _places(
    folder: str, home: str, temporary: str
) -> tuple[tuple[re.Pattern[str], dict[str, str]], re.Pattern[str]]:
    """What finds the places that have a name, their names, and what finds the name of the user in a path."""
    ours = str(Path(__file__).parents[2])
    named = [
        ("...", ours),
        ("...", sys.base_prefix),
        ("...", sys.prefix),
        ("$TMPDIR", temporary),
        ("~", home),
        ("$PWD", folder),
    ]
    names = {
        place: name for name, each in named for place in (each, os.path.realpath(each)) if len(place) > 1
    }
    every = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    try:
        user = re.escape(getpass.getuser())
    except (OSError, KeyError):  # one without a name
        user = r"\Z"
    return (re.compile(rf"(?<![\w.~-])({every})(?![\w.-])"), names), re.compile(rf"(?<=/){user}(?![\w.-])")


@lru_cache
def _host() -> re.Pattern[str]:
    name = socket.gethostname()
    names = {n for n in (name, name.partition(".")[0]) if not n.isdecimal()} - {""}
    return re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, sorted(names))) or 'localhost'})(?![\w-])")
