"""A sweep of sweeps whose parts are scripts: what each stores and how it ends, slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import store
from harness.cli import parts as whole_module
from harness.cli.config import load
from harness.cli.parts import Whole
from harness.engine import run_folder, runlog
from harness.engine.parts import CUT
from harness.judge.smoke import LAYERS
from harness.store.cause import Cause
from harness.store.errors import UsageError
from harness.store.measurement import Measurement

MINE = """# Mine?
parts:
  checks: {sweep: smoke}
  steps: {sweep: train, checked_by: [checks], overrides: {model: nano, arms: [bf16_eager, tensorwise_eager], rounds: 8}}
"""
Script = Callable[[Sequence[str], store.RunWriter], int]


def said(words: Sequence[str], key: str) -> str:
    return next((word.partition("=")[2] for word in reversed(words) if word.startswith(f"{key}=")), "")


def timed(arm: str, status: Any = "ok", cause: Cause = Cause.NONE) -> Measurement:
    return Measurement(
        "train", "c1", arm, '{"model": "nano"}', "time_ms", status, reason="" if status == "ok" else f"is {status} {cause}", regime="isolated", cause=cause,
        samples=(1.0,) if status in ("ok", "partial") else (), rounds=(0,) if status in ("ok", "partial") else (),
    )  # fmt: skip


def checked(status: Any = "ok", cause: Cause = Cause.NONE) -> Measurement:
    return Measurement(LAYERS, "l", "tensorwise", "{}", "sqnr_db", status, reason=str(cause), cause=cause,
                       samples=(28.0,) if status == "ok" else ())  # fmt: skip


class Slots:
    """Slots of one sweep, each a command of its own; a part does what its script says, as its own sweep would."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = tmp_path
        (tmp_path / "sweeps").mkdir()
        (tmp_path / "sweeps" / "mine.yaml").write_text(MINE)
        monkeypatch.chdir(tmp_path)
        self.begun: list[str] = []
        self.folder = tmp_path / "results" / "mine" / "r"

    def slot(self, **scripts: Script) -> Whole:
        """A command that runs one slot."""
        whole = self.whole(**scripts)
        whole.slot()
        return whole

    def whole(self, **scripts: Script) -> Whole:
        """A command that is about to run a slot."""

        def measure(words: Sequence[str], seconds: float) -> int:
            name = said(words, "run_id").removeprefix("r-")
            self.begun.append(name)
            return whole_module._isolated(lambda words: self.run(words, scripts[name]), words)

        about = {"parts": store.read_about(self.folder).get("parts", {})}
        writer = store.RunWriter(self.folder, run_id="r", sweep="mine", env_id="e", env={}, about=about)
        return Whole(load(["sweep=mine"], lambda device: "cpu"), self.folder, writer, measure)

    @staticmethod
    def run(words: Sequence[str], script: Script) -> int:
        config = load(words, lambda device: "cpu").config
        run_id, folder, _ = run_folder.chosen(config, None, None)  # refuses what it would refuse
        about = {"config": config, "command": ""}
        return script(
            words,
            store.RunWriter(folder, run_id=run_id, sweep=config["name"], env_id="e", env={}, about=about),
        )

    def about(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = store.read_about(self.folder)["parts"][name]
        return found


def stores(*rows: Measurement, exit_code: int = 0) -> Script:
    def script(words: Sequence[str], writer: store.RunWriter) -> int:
        writer.append(rows)
        return exit_code

    return script


def cut(words: Sequence[str], writer: store.RunWriter) -> int:
    """A round of each arm, then the time is over."""
    writer.checkpoint([timed("bf16_eager", "partial"), timed("tensorwise_eager", "partial")])
    return CUT


def refused(words: Sequence[str], writer: store.RunWriter) -> int:
    raise UsageError("the GPU is in use by another sweep")


BOTH = stores(timed("bf16_eager"), timed("tensorwise_eager"))


def ended(
    whole: Whole,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    slot: Callable[[], list[str]] = list,
) -> tuple[int, str]:
    """Exit code and text of a slot in which no part is run any more."""
    writer: Any = whole._writer
    whole.config["report"] = False
    monkeypatch.setattr(whole, "slot", slot)
    monkeypatch.setattr(writer, "statuses", {}, raising=False)
    note = runlog.ProgressFile(writer)
    return whole_module._run_and_report(whole, writer, note), capsys.readouterr().out
