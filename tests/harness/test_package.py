"""What is built for a package index. Oracles: the files that git holds, CommonMark by markdown-it-py, the metadata as built."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from wheel_alone import closure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "PACKAGE.md").read_text()


def committed() -> set[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}
    if not names:
        pytest.skip("no git checkout: there is nothing to compare the sdist with")
    return names


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of what git holds, made by the build backend that is installed; no network is asked."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in sorted(
        name for name in committed() if not name.startswith(("tests/", "results/", "reports/"))
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / "results").mkdir()  # a local run must not travel
    (tree / "results" / "rows.parquet").write_text("local")
    code = f"from setuptools import build_meta as b; b.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_the_wheel_has_the_packages_and_the_sweeps_and_no_test(built: zipfile.ZipFile) -> None:
    inside = {name for name in built.namelist() if ".dist-info/" not in name}
    sources = {
        n for n in committed() if n.startswith(("fp8core/", "harness/")) and not n.endswith("README.md")
    }
    sweeps = {f"harness/{name}" for name in committed() if re.fullmatch(r"sweeps/\w+\.yaml", name)}
    assert inside == sources | sweeps


def test_the_metadata_of_the_wheel(built: zipfile.ZipFile) -> None:
    (name,) = [n for n in built.namelist() if n.endswith("/METADATA")]
    about = email.message_from_bytes(built.read(name))
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload().strip() == PAGE.strip()
    assert about["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in (about.get_all("Classifier") or [])
    assert not [c for c in about.get_all("Classifier") or [] if c.startswith("License ::")], (
        "the expression says it"
    )
    assert about.get_all("Project-URL") is None, (
        "an address that exists goes here, and this test checks that it is https"
    )
    (entries,) = [n for n in built.namelist() if n.endswith("/entry_points.txt")]
    assert "fp8-harness = harness.__main__:console" in built.read(entries).decode()


ALONE = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder
absent = frozenset(json.loads(sys.argv[1]))
class Declared(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Declared
from harness.__main__ import main
said = {}
for words in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    said[" ".join(words)] = code, out.getvalue() + err.getvalue()
import harness
print(json.dumps([harness.__file__, said]))
"""


def test_the_wheel_alone_lists_plans_and_advises(built: zipfile.ZipFile, tmp_path: Path) -> None:
    """In an empty folder, with nothing but what it declares; tests/studies/wheel_alone.py runs every command so."""
    built.extractall(tmp_path / "site")
    (tmp_path / "work").mkdir()
    needed = set(closure(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]))
    absent = sorted(
        module
        for module, own in packages_distributions().items()
        if module not in ("harness", "fp8core")
        and not {re.sub(r"[-_.]+", "-", each).lower() for each in own} & needed
    )
    assert {"torchao", "pytest", "scipy"} & {*absent}
    asked = [
        ["list", "sweeps"],
        ["sweep=peers", "dry_run=true", "device=cpu"],
        ["advise", "model=llama3_8b", "gpu=h200"],
    ]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(absent), json.dumps(asked)],
        cwd=tmp_path / "work", env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    where, said = json.loads(done.stdout)
    assert Path(where).is_relative_to(tmp_path / "site")
    assert [code for code, _ in said.values()] == [0] * len(asked), said
    listed, planned, advised = (text for _, text in said.values())
    assert {path.stem for path in (ROOT / "sweeps").glob("*.yaml")} <= {
        line.split(" ")[0] for line in listed.splitlines()
    }
    assert "nothing was measured" in planned
    assert "torchao is not installed: pip install" in planned
    assert "on H200" in advised
    assert not list((tmp_path / "work").iterdir())
