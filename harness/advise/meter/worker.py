"""`python -m harness.advise.meter.worker CACHE CAPABILITY < launches.json`: a line of JSON for each launch, its facts or why
there are none. A process of its own, because another Triton lies ahead on its PYTHONPATH.

Facts are kept in the folder CACHE by what they depend on: the kernel's source, how it is compiled and called, the
version of Triton, and the sources of the meter.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from harness.advise.meter.build import BuildError, build
from harness.advise.meter.facts import Facts, read
from harness.advise.meter.launches import Launch
from harness.advise.meter.sass import UnreadableCodeError


def main() -> None:
    """Reads launches from standard input, writes answers to standard output."""
    cache, capability = Path(sys.argv[1]), int(sys.argv[2])
    cache.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    for data in json.load(sys.stdin):
        launch = Launch.from_json(data)
        print(json.dumps(_answer(launch, capability, cache)), flush=True)  # noqa: T201 - the answer


def _answer(launch: Launch, capability: int, cache: Path) -> dict[str, Any]:
    import triton

    kernel = launch.load()
    parts = [kernel.cache_key, triton.__version__, launch.to_json(), capability, _meter()]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    path = cache / f"{key}.json"
    if path.is_file():
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept
    answer = _metered(launch, capability, kernel)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(answer))
    partial.replace(path)
    return answer


def _metered(launch: Launch, capability: int, kernel: Any) -> dict[str, Any]:
    try:
        facts = meter(launch, capability, kernel)
    except (BuildError, UnreadableCodeError) as error:
        return {"error": str(error)}
    return facts.to_json()


def meter(launch: Launch, capability: int, kernel: Any = None) -> Facts:
    """Compiles a launch with the installed Triton and reads it.

    Raises:
        BuildError: it cannot be compiled.
        UnreadableCodeError: its machine code cannot be followed.
    """
    kernel = kernel if kernel is not None else launch.load()
    built = build(kernel, launch.signature, launch.constants, launch.aligned, launch.options, capability)
    return read(built, launch, capability)


def _meter() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    main()
