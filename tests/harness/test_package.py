"""What is built for a package index. Oracles: the files that git holds, CommonMark by markdown-it-py, the metadata as built."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from wheel_alone import closure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "PACKAGE.md").read_text()
# A local run and a build must not travel; a planted file of each kind shows that they do not.
LOCAL = ("results/gemm/run/rows.parquet", "reports/run.html", "tests/__pycache__/x.cpython-311.pyc")


def committed() -> set[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}
    if not names:
        pytest.skip("no git checkout: there is nothing to compare the sdist with")
    return names


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[tarfile.TarFile, zipfile.ZipFile]:
    """sdist and wheel of what git holds, made by the build backend that is installed; no network is asked."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in sorted(committed()):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    for name in LOCAL:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("local")
    code = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return tarfile.open(sdist), zipfile.ZipFile(wheel)


def test_the_sdist_is_the_tree_that_git_holds(built: tuple[tarfile.TarFile, zipfile.ZipFile]) -> None:
    inside = {m.name.partition("/")[2] for m in built[0].getmembers() if m.isfile()}
    made = {name for name in inside if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert inside - made == committed()
    assert not inside & set(LOCAL)


def test_the_wheel_has_the_packages_and_the_sweeps_and_no_test(
    built: tuple[tarfile.TarFile, zipfile.ZipFile],
) -> None:
    inside = {name for name in built[1].namelist() if ".dist-info/" not in name}
    sources = {
        n for n in committed() if n.startswith(("fp8core/", "harness/")) and not n.endswith("README.md")
    }
    sweeps = {f"harness/{name}" for name in committed() if re.fullmatch(r"sweeps/\w+\.yaml", name)}
    assert inside == sources | sweeps


def test_the_metadata_of_the_wheel(built: tuple[tarfile.TarFile, zipfile.ZipFile]) -> None:
    (name,) = [n for n in built[1].namelist() if n.endswith("/METADATA")]
    about = email.message_from_bytes(built[1].read(name))
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
    (entries,) = [n for n in built[1].namelist() if n.endswith("/entry_points.txt")]
    assert "fp8-harness = harness.__main__:console" in built[1].read(entries).decode()


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


def test_the_wheel_alone_lists_plans_advises_and_says_what_it_lacks(
    built: tuple[tarfile.TarFile, zipfile.ZipFile], tmp_path: Path
) -> None:
    """In an empty folder, with nothing but what it declares; tests/studies/wheel_alone.py runs every command so."""
    built[1].extractall(tmp_path / "site")
    (tmp_path / "work").mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = set(closure(project["dependencies"]))
    absent = [
        module
        for module, own in packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", each).lower() for each in own} & needed
    ]
    assert {"torchao", "pytest", "scipy"} <= set(absent)
    absent = sorted(set(absent) - {"harness", "fp8core"})
    page = [
        line.split("#")[0].split()[3:] for line in PAGE.splitlines() if line.startswith("python -m harness")
    ]
    assert page.pop(0) == ["doctor"], "it has tests of its own, and takes seconds"
    dry = ["dry_run=true", "device=cpu"]
    asked = [
        [*words, *(dry if "sweep" in words[0] else [])]
        for words in (["list", "sweeps"], ["sweep=peers"], *page)
    ]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(absent), json.dumps(asked)],
        cwd=tmp_path / "work",
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(tmp_path / "site"),
            "HOME": str(tmp_path / "home"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    where, said = json.loads(done.stdout)
    assert Path(where).is_relative_to(tmp_path / "site")
    assert [code for code, _ in said.values()] == [0] * len(asked), said
    listed, peers, planned, advised, helped = (text for _, text in said.values())
    assert {path.stem for path in (ROOT / "sweeps").glob("*.yaml")} <= {
        line.split(" ")[0] for line in listed.splitlines()
    }
    assert "nothing was measured" in planned
    assert "on H200" in advised
    assert helped.startswith("usage: python -m harness")
    assert "torchao is not installed: pip install" in peers
    assert not list((tmp_path / "work").iterdir())


def test_the_page_for_the_index_has_nothing_that_breaks_there() -> None:
    """An index has no tree beside the page: no relative link or picture, and it drops HTML."""
    tokens = [
        t
        for block in MarkdownIt("commonmark").enable("table").parse(PAGE)
        for t in (block, *(block.children or []))
    ]
    addresses = [
        t.attrs.get("href") or t.attrs.get("src") for t in tokens if t.type in ("link_open", "image")
    ]
    assert [a for a in addresses if not str(a).startswith("https://")] == []
    assert [t.content for t in tokens if t.type in ("html_block", "html_inline")] == []
    headings = [t.tag for t in tokens if t.type == "heading_open"]
    assert headings.count("h1") == 1


def test_what_the_page_names_is_there() -> None:
    for name in re.findall(r"`((?:docs|tests|results)/[\w./-]*|README\.md)`", PAGE):
        assert (ROOT / name).exists(), name


def test_the_code_of_the_page_converts(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    exec(compile(code, "PACKAGE.md", "exec"), {})
    assert "2 of 2" in capsys.readouterr().out
