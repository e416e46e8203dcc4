"""What the packages import is what pyproject.toml declares. Oracle: the import statements, parsed from the sources."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"fp8core", "harness"}
ANY = {"sitecustomize"}  # of the process that the gate records, whoever wrote it
# Names of the package index for modules of another name
NAMED = {"yaml": "pyyaml", "hydra": "hydra-core", "pynvml": "nvidia-ml-py"}
# Measured beside our own code where somebody has installed them; no extra could bring them all.
OPTIONAL = {"triton", "torchao", "transformers", "lightning", "tensorboard"}
PEERS = {
    "aiter",
    "deep_gemm",
    "transformer_engine",
    "torchtitan",
    "fbgemm_gpu",
    "cutlass",
    "flashinfer",
    "sgl_kernel",
}


@functools.cache
def _imported() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in (p for package in OWN for p in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(str(path.relative_to(ROOT)))
    return {name: files for name, files in found.items() if name not in sys.stdlib_module_names | OWN | ANY}


def _declared(lines: list[str]) -> set[str]:
    return {re.split(r"[<>=!~; \[]", line)[0].lower() for line in lines}


def test_every_import_is_declared() -> None:
    known = _declared(PROJECT["dependencies"]) | OPTIONAL | PEERS
    missing = {
        name: sorted(files)[:3]
        for name, files in _imported().items()
        if NAMED.get(name, name).lower() not in known
    }
    assert missing == {}


def test_what_is_optional_is_in_an_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    lines = [
        line for name in ("interpreter", "peers", "clients", "slurm", "tensorboard") for line in extras[name]
    ]
    assert _declared(lines) >= OPTIONAL


def test_every_dependency_is_imported() -> None:
    imported = {NAMED.get(name, name).lower() for name in _imported()}
    assert _declared(PROJECT["dependencies"]) - imported == set()


def test_triton_is_no_dependency_of_a_machine_without_a_gpu() -> None:
    """1 GB; the CUDA builds of torch bring it."""
    assert "triton" not in _declared(PROJECT["dependencies"])
    assert "triton" in _declared(PROJECT["optional-dependencies"]["interpreter"])


@pytest.mark.slow
def test_everything_but_kernels_works_without_triton() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name="triton")
sys.meta_path.insert(0, Absent())
import torch, fp8core, harness.suites
for name in harness.suites.NAMES:
    harness.suites.SUITES[name]
for recipe in fp8core.RECIPES:
    if recipe in ("blockwise", "mxfp8"):
        continue  # kernels of a GPU alone
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    fp8core.convert_to_float8_training(model, config=recipe)
    model(torch.randn(16, 64, requires_grad=True)).sum().backward()
assert "triton" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_command_that_needs_torch_says_so_where_there_is_none() -> None:
    code = """
import sys
sys.modules["torch"] = None
from harness.__main__ import main
for words in ("advise model=llama3_8b gpu=h100", "list models", "doctor", "sweep=cast"):
    assert main(words.split()) == 2, words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 4
    assert all("pip install torch" in line for line in said)
