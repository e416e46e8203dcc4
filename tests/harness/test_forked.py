"""Programs that tests fork. Oracle: an interpreter of its own, which is given the same words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

SAYS = """\
import atexit, multiprocessing, os, sys, tempfile, threading
atexit.register(print, "last")
print(sys.argv, sys.path, __name__, os.getcwd(), sorted(os.environ.items()), multiprocessing.parent_process())
print(multiprocessing.current_process().name, threading.active_count(), tempfile.gettempdir(), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["-c", SAYS + "sys.exit(3)", "a"],
        ["said.py", "a", "b"],
        ["-m", "said"],
        ["-c", "import os; os.kill(os.getpid(), 9)"],
        ["-c", "import sys; sys.exit('no')"],
    ],
)
def test_a_forked_program_does_what_one_of_its_own_interpreter_does(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text(SAYS)
    (tmp_path / "tmp").mkdir()
    env = {"PYTHONPATH": "/nowhere", "A": "b", "LC_CTYPE": "C.UTF-8", "TMPDIR": str(tmp_path / "tmp")}
    real = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    done = forked.run(words, tmp_path, env)
    assert (done.returncode, done.stdout, done.stderr) == (real.returncode, real.stdout, real.stderr)


def test_a_program_that_raises_says_where_and_ends_by_1(tmp_path: Path) -> None:
    done = forked.run(["-c", "raise ValueError('planted')"], tmp_path, dict(os.environ))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ValueError: planted")
