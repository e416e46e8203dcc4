"""A plugin of pytest for torchao's own tests: `torchao.float8` is fp8core's, and the CPU is the accelerator where there is no other.

Writes a JSON list [name, outcome, whether code of fp8core ran, message] to the file that `TORCHAO_OUTCOMES` names.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fp8core
from fp8core import torchao_compat

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS = str(Path(fp8core.__file__).parent)
if not torch.accelerator.is_available():
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)  # as on the GPUs that the tests are written for
torchao_compat.install(beside_torchao=True)
# A helper of the tests in torchao's own package, whose modules keep torchao's names
helper: Any = importlib.import_module("torchao.testing.training.test_utils")
helper.CastConfig, helper.Float8LinearConfig = fp8core.CastConfig, fp8core.Float8LinearConfig

_entered: set[str] = set()
_outcomes: list[tuple[str, str, bool, str]] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    def look(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            _entered.add(item.nodeid)

    sys.setprofile(look)
    try:
        return (yield)
    finally:
        sys.setprofile(None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        message = str(report.longrepr).strip().rpartition("\n")[2]
        name = report.nodeid.rpartition("/")[2]
        _outcomes.append((name, report.outcome, report.nodeid in _entered, message))


def pytest_sessionfinish() -> None:
    Path(os.environ["TORCHAO_OUTCOMES"]).write_text(json.dumps(_outcomes))
