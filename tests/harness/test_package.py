"""What is built for a package index. Oracles: the files that git holds, CommonMark by markdown-it-py, the metadata as built."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
