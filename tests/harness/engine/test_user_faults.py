"""What a suite, a model or an exception of the user does wrong is a row or one line. Oracle: exit codes and rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from toy import ToySuite, nothing, offered

from harness import store
from harness.__main__ import main
from harness.timing.workload import Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from harness.store.case import Case

WORDS = ["sweep=toy", "device=cpu", "run_id=r1"]


class UnwritableError(RuntimeError):
    """An exception as a library may have: it cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToySuite:
    return offered([1, 2], tmp_path, monkeypatch)


def times() -> dict[str, list[str]]:
    frame = store.read(Path("results"))
    frame = frame[frame["metric"] == "time_ms"]
    return {arm: rows["reason"].tolist() for arm, rows in frame[frame["status"] == "failed"].groupby("arm")}


@pytest.mark.parametrize("stage", ["build", "check", "run"])
def test_an_exception_without_a_text_fails_its_arm(stage: str, toy: ToySuite) -> None:
    def fail() -> Any:
        raise UnwritableError

    def build(case: Case) -> Workload:
        if stage == "build":
            fail()
        check = fail if stage == "check" else lambda: Numerics({"sqnr_db": 28.5})
        return Workload(run=fail if stage == "run" else nothing, check=check)

    toy.behaviour = {"other": build}
    assert main(WORDS) == 1
    assert times() == {"other": ["UnwritableError: its text cannot be read: str() raised ValueError"] * 2}


def _ends(*_: object) -> Any:
    raise SystemExit("no licence")


def _recurs(*given: object) -> Any:
    return _recurs(*given)


def _lacks(*_: object) -> Any:
    raise KeyError("shape")


@pytest.mark.parametrize("fault", [_ends, _recurs, _lacks])
@pytest.mark.parametrize("call", ["points", "work", "check_request"])
def test_what_a_suite_raises_while_it_is_planned_is_one_line_that_names_it(
    call: str, fault: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ToySuite, call, fault, raising=False)
    assert main([*WORDS, "shard=0/2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = {_ends: "SystemExit: no licence", _recurs: "RecursionError", _lacks: "KeyError: 'shape'"}[fault]
    assert line.startswith(f"error: suite toy: {call}() raised {name}")
    assert not Path("results").exists()


def test_an_arm_whose_support_ends_the_interpreter_fails_alone(
    toy: ToySuite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(self: ToySuite, case: Case, arm: str, device: str) -> Unsupported | None:
        return _ends() if arm == "other" else None

    monkeypatch.setattr(ToySuite, "unsupported", unsupported)
    assert main([*WORDS, "dry_run=true"]) == 0
    assert "could not tell whether it can run here: SystemExit: no licence" in capsys.readouterr().out


def test_a_dry_run_says_that_it_calls_the_users_code(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "sweep=gemm",
        "device=cpu",
        "shapes=from_model",
        "axes.tokens=[32]",
        "model._target_=model_for_tests.mlp",
    ]
    assert main([*words, "model.width=32", "model.blocks=1", "dry_run=true"]) == 0
    assert "imports and calls model._target_=model_for_tests.mlp" in capsys.readouterr().out
