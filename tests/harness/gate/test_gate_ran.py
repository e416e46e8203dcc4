"""What the processes of a command read. Oracle: programs that a test writes, and what an interpreter does without the recorder.

What it says of a change: tests/assurance/command_situations.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_situations import HONEST, Planted

from harness.gate.command import recording
from harness.gate.ran import FilesRan, SideFiles
from harness.gate.trees import walk


def recorded(
    scratch: Path, tree: Path, *words: str, **env: str
) -> tuple[SideFiles, subprocess.CompletedProcess[str], set[int]]:
    """What a Python process in a tree was seen to do."""
    lines = scratch / "lines"
    lines.mkdir(parents=True)
    side = SideFiles(tree, walk(tree))
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, cwd=tree,
        env={**recording(scratch, lines, tree), **env},
    )  # fmt: skip
    file = lines / "lines"
    return side, done, side.add_record(file.read_text().splitlines() if file.exists() else [], [])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files that read one another in every way."""
    tree = tmp_path / "tree"
    files = {
        "perf.py": "import pkg, json\njson.load(open('sizes.json'))\n",
        "sizes.json": "1",
        "pkg/__init__.py": "import os, subprocess, sys\nfrom pkg import late\nopen(__file__.replace('__init__.py', 'data.txt')).read()\n"
        "open('written.txt', 'w').close()\n",
        "pkg/__main__.py": "import pkg.late\n",
        "pkg/late.py": "",
        "pkg/data.txt": "x",
        "pkg/unread.py": "",
        "text.md": "A = 1\n",
        "runs.py": "import runpy\nrunpy.run_path('perf.py')\nexec(open('text.md').read())\n",
        "forks.py": "import os\nif os.fork() == 0:\n    import pkg.late\n    os._exit(0)\nos.wait()\n",
        "starts.py": "import subprocess, sys\nsubprocess.run([sys.executable, 'perf.py'])\n",
        "fails.py": "import pkg.late\ndef f(): raise KeyError\nf()\n",
    }
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    return tree.resolve()


PACKAGE = {"pkg/__init__.py", "pkg/late.py"}


@pytest.mark.parametrize(
    ("words", "judges", "code"),
    [
        (["perf.py"], {"perf.py", "sizes.json"}, PACKAGE),
        (["-m", "pkg"], {"pkg/__main__.py"}, PACKAGE),
        (["runs.py"], {"runs.py"}, {*PACKAGE, "perf.py"}),
        (["forks.py"], {"forks.py"}, PACKAGE),
        (["starts.py"], {"starts.py"}, {*PACKAGE, "perf.py"}),
        (["-c", "import pkg"], set(), PACKAGE),
    ],
)
def test_what_is_started_and_what_that_opens_is_the_benchmark_and_what_is_imported_is_code(
    tmp_path: Path, tree: Path, words: list[str], judges: set[str], code: set[str]
) -> None:
    for turn in "12":  # with and without byte code that is there
        side, done, _ = recorded(tmp_path / turn, tree, *words, PYTHONPATH=f"{tmp_path / turn / 'site'}:.")
        assert (side.benchmark(), side.code) == (judges, code), done.stderr
        assert "pkg/data.txt" in side.read()
        assert not {"written.txt", "pkg/unread.py"} & side.read()


def test_a_text_that_is_executed_is_no_data_of_the_benchmark(tmp_path: Path, tree: Path) -> None:
    side, *_ = recorded(tmp_path, tree, "runs.py")
    assert "text.md" in side.read() - side.benchmark()


def test_how_a_process_ended_is_seen_and_not_the_files_of_its_traceback(tmp_path: Path, tree: Path) -> None:
    side, *_ = recorded(tmp_path / "1", tree, "fails.py")
    assert (side.ended, side.started) == ({"KeyError"}, {"fails.py"})
    side, *_ = recorded(tmp_path / "2", tree, "-c", "import sys; sys.exit(3)")
    assert side.ended == {"sys.exit(3)"}


def test_a_process_is_recorded_with_those_that_it_starts_and_an_isolated_one_is_not(
    tmp_path: Path, tree: Path
) -> None:
    assert len(recorded(tmp_path / "1", tree, "starts.py")[2]) == 2
    assert len(recorded(tmp_path / "2", tree, "forks.py")[2]) == 2
    assert not recorded(tmp_path / "3", tree, "-I", "perf.py")[2]


def test_the_users_own_sitecustomize_runs_as_without_the_recorder(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(own))
    program = "import sys; print(sys.modules['sitecustomize'].__file__, *sys.path)"
    for text, message in (
        ("print('mine')", ""),
        ("import no_such", "no_such"),
        ("raise ValueError('odd')", "odd"),
    ):
        (own / "sitecustomize.py").write_text(text + "\n")
        without = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tree
        )
        _, done, numbers = recorded(tmp_path / f"as {message}", tree, "-c", program)
        assert (done.stdout, done.returncode) == (without.stdout, without.returncode)
        assert message in done.stderr
        assert message in without.stderr
        assert numbers


@pytest.mark.parametrize("held", ["tools/utils.py", "src/pkg/numpy/__init__.py"])
def test_another_file_of_the_same_name_is_no_copy(tmp_path: Path, held: str) -> None:
    """A library's file that is named as one that changed, and the changed one was read or is of another folder."""
    site = tmp_path / "site-packages" / ("numpy" if "numpy" in held else "")
    site.mkdir(parents=True)
    file = site / Path(held).name
    file.write_text("of a library")
    sides = {}
    for name in ("baseline", "candidate"):
        (tmp_path / name / held).parent.mkdir(parents=True)
        (tmp_path / name / held).write_text(name)
        sides[name] = SideFiles(tmp_path / name, walk(tmp_path / name))
        sides[name].add_record(
            [f"code\t\t{path}" for path in (file, tmp_path / name / held) if "numpy" in held or path == file],
            [],
        )
    FilesRan(sides, tmp_path / "checkout").check()


@pytest.mark.parametrize("case", HONEST.values(), ids=HONEST)
def test_an_honest_change_passes_and_a_slow_one_does_not(case: Planted, tmp_path: Path) -> None:
    code, said = case.gate(tmp_path)
    assert code == case.code, said
