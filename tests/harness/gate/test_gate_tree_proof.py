"""Proof of the tree. Oracle: files put in place by hand, and what an interpreter itself says that it imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.gate import tree_proof
from harness.gate.command import recording
from harness.gate.options import Exit, GateError
from harness.gate.tree_proof import Proof, Trees, read_modules


def recorded(scratch: Path, *words: str, **env: str) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """Names of the modules that a Python process reported."""
    (scratch / "modules").mkdir(parents=True)
    environment = {**recording(scratch, scratch / "modules"), **env}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=environment
    )
    return {name for name, _ in read_modules(scratch / "modules")}, done


def test_a_process_reports_its_modules_and_so_do_those_that_it_starts(tmp_path: Path) -> None:
    inner = "import subprocess, sys, colorsys; subprocess.run([sys.executable, '-c', 'import cmd'])"
    names, done = recorded(tmp_path, "-c", inner)
    assert {"colorsys", "cmd"} <= names, done.stderr
    assert "sitecustomize" not in names


def test_the_users_own_sitecustomize_runs_as_without_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        without = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        names, done = recorded(tmp_path / message, "-c", program)
        assert (done.stdout, done.returncode) == (without.stdout, without.returncode)
        assert message in done.stderr
        assert message in without.stderr
        assert "site" in names


def test_isolated_processes_report_nothing(tmp_path: Path) -> None:
    assert not recorded(tmp_path, "-I", "-c", "pass")[0]


class Sides:
    """Two trees and a checkout with the same files."""

    def __init__(self, tmp: Path, *files: str) -> None:
        self.checkout, self.own, self.other = (tmp / n for n in ("checkout", "candidate", "baseline"))
        names = frozenset(files)
        for tree in (self.checkout, self.own, self.other):
            for name in names:
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_text('[project]\nname = "My-Pkg"\n' if name == "pyproject.toml" else "")
        trees = {"baseline": self.other, "candidate": self.own}
        self.proof = Trees(trees, self.checkout, {"baseline": names, "candidate": names, "original": names})

    def check(self, *modules: tuple[str, Path]) -> Proof:
        return self.proof.check("candidate", modules)


def test_modules_of_the_own_tree_are_counted_and_others_pass(tmp_path: Path) -> None:
    sides = Sides(tmp_path, "src/pkg/__init__.py", "types.py", "bench/test_a.py", "tools/yaml.py")
    venv = sides.checkout / ".venv" / "lib" / "python3.11" / "site-packages"
    modules = [
        ("pkg", sides.own / "src/pkg/__init__.py"),
        ("test_a", sides.own / "bench/test_a.py"),
        ("numpy", venv / "numpy/__init__.py"),  # an environment within the checkout
        ("types", Path("/usr/lib/python3.11/types.py")),  # the standard library's, whatever the tree holds
        ("yaml", venv / "yaml.py"),  # tools is no folder that packages are imported from
        ("numpy2", sides.own / ".venv/lib/python3.11/site-packages/numpy2/__init__.py"),
    ]
    assert sides.check(*modules) == Proof(1, ("pkg",), ("test_a",))


@pytest.mark.parametrize(
    ("place", "file", "module", "words"),
    [
        ("checkout", "src/pkg/__init__.py", "pkg", "original checkout"),
        ("checkout", "src/pkg/fast.cpython-311-x86_64-linux-gnu.so", "pkg.fast", "original checkout"),
        ("checkout", "bench/test_a.py", "__main__", "original checkout"),
        ("other", "src/pkg/__init__.py", "pkg", "work tree of the baseline"),
        ("other", ".venv/lib/site-packages/numpy.py", "numpy", "work tree of the baseline"),
        ("", "site-packages/pkg/__init__.py", "pkg", "neither work tree"),
        ("", "site-packages/pkg/sub/deep.py", "pkg.sub.deep", "neither work tree"),
        ("", "site-packages/my_pkg.abi3.so", "my_pkg", "neither work tree"),
        ("", "site-packages/inner/__init__.py", "inner", "neither work tree"),
        ("", "site-packages/far/core.py", "far.core", "neither work tree"),
    ],
)
def test_modules_of_elsewhere_are_refused(
    tmp_path: Path, place: str, file: str, module: str, words: str
) -> None:
    """The last three: an extension named after the project, and packages of a project and of no project within the repository."""
    sides = Sides(
        tmp_path, "pyproject.toml", "src/pkg/__init__.py", "src/pkg/sub/deep.py", "bench/test_a.py",
        "projects/one/setup.py", "projects/one/src/inner/__init__.py", "backend/far/core.py",
    )  # fmt: skip
    where = {"checkout": sides.checkout, "other": sides.other, "": tmp_path / "usr"}[place]
    with pytest.raises(GateError, match=words) as caught:
        sides.check(("test_a", sides.own / "bench/test_a.py"), (module, where / file))
    assert caught.value.code is Exit.INVALID
    if place == "checkout" and module == "pkg":
        assert "PYTHONPATH=src:$PYTHONPATH" in str(caught.value)


def test_a_test_file_alone_proves_nothing(tmp_path: Path) -> None:
    """Rust sources and their installed extension: nothing but the test comes from the tree, so main ran against main."""
    sides = Sides(tmp_path, "pyproject.toml", "src/lib.rs", "tests/__init__.py", "tests/bench/test_x.py")
    site = tmp_path / "venv" / "site-packages"
    modules = [
        ("fastjson", site / "fastjson.abi3.so"),
        ("tests", sides.own / "tests/__init__.py"),
        ("tests.bench.test_x", sides.own / "tests/bench/test_x.py"),
    ]
    proof = sides.check(*modules)
    assert proof == Proof(0, (), ("tests", "tests.bench.test_x"))
    error = tree_proof.unproven(["baseline"], proof.tests)
    assert error.code is Exit.INCONCLUSIVE


def test_what_an_installation_lists_under_the_projects_name_is_the_projects(tmp_path: Path) -> None:
    """The module has another name than the project, which only the installer's RECORD connects."""
    sides = Sides(tmp_path, "pyproject.toml", "src/lib.rs", "bench/run.py")

    def installed(root: Path) -> tuple[str, Path]:
        site = root / "lib" / "site-packages"
        (site / "my_pkg-1.0.dist-info").mkdir(parents=True)
        (site / "my_pkg-1.0.dist-info" / "RECORD").write_text("fastjson.abi3.so,sha256=x,9\n")
        return "fastjson", site / "fastjson.abi3.so"

    script = ("__main__", sides.own / "bench/run.py")
    with pytest.raises(GateError, match="in neither work tree"):
        sides.check(script, installed(tmp_path / "shared"))
    assert sides.check(script, installed(sides.own / ".venv")) == Proof(2, ("bench/run.py", "fastjson"))


@pytest.mark.parametrize(
    ("held", "module", "file"),
    [
        ("src/pkg/numpy/__init__.py", "numpy", "numpy/__init__.py"),
        ("src/pkg/sub/numpy/__init__.py", "numpy", "numpy/__init__.py"),
        ("tests/data/yaml/__init__.py", "yaml", "yaml/__init__.py"),
        ("tools/utils.py", "utils", "utils.py"),
        ("tools/deep/__init__.py", "deepdiff", "deepdiff/__init__.py"),
    ],
)
def test_other_modules_of_the_same_file_name_pass(tmp_path: Path, held: str, module: str, file: str) -> None:
    """A subpackage that is named like a library, data of tests, a file without its package."""
    sides = Sides(tmp_path, "src/pkg/__init__.py", held)
    imported = [("pkg", sides.own / "src/pkg/__init__.py"), (module, tmp_path / "usr/site-packages" / file)]
    assert sides.check(*imported).count == 1


def test_a_project_among_the_tests_holds_nothing(tmp_path: Path) -> None:
    sides = Sides(tmp_path, "src/pkg/__init__.py", "tests/data/pyproject.toml")
    (sides.own / "tests/data/pyproject.toml").write_text("[project]\nname = 'numpy'\n")
    imported = [
        ("pkg", sides.own / "src/pkg/__init__.py"),
        ("numpy", tmp_path / "usr/site-packages/numpy.py"),
    ]
    assert sides.check(*imported).names == ("pkg",)


@pytest.mark.parametrize("end", ["", "import sys; sys.exit(0)"], ids=["runs to its end", "exits"])
def test_a_script_is_recorded(tmp_path: Path, end: str) -> None:
    """CPython takes `__file__` from `__main__` before the end of a script that does not exit by itself."""
    (tmp_path / "bench.py").write_text(f"import os\nos.chdir('/')\n{end}\n")
    (tmp_path / "modules").mkdir()
    subprocess.run(
        [sys.executable, "bench.py"], check=True, cwd=tmp_path, env=recording(tmp_path, tmp_path / "modules")
    )
    assert ("__main__", tmp_path.resolve() / "bench.py") in read_modules(tmp_path / "modules")
