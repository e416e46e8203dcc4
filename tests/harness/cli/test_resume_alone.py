"""`resume=RUN_ID` alone. Oracles: the run's own _run.json and rows, which a continued run adds to and never contradicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy import ToySuite, offered

from harness import store
from harness.__main__ import main

RUN = Path("results/toy/r1")
MADE = [
    "sweep=toy",
    "device=cpu",
    "axes.n=[1,2,3]",
    "arms=[base]",
    "rounds=4",
    "seed=7",
    "run_id=r1",
    "report=false",
]


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToySuite:
    return offered([1, 2], tmp_path, monkeypatch)


@pytest.fixture
def cut_off() -> None:
    assert main([*MADE, "budget_s=0"]) == 0


def about() -> dict[str, Any]:
    return json.loads((RUN / "_run.json").read_text())


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command is refused with; no file was written or changed."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    return line


def test_a_run_that_named_itself_tells_its_id_before_it_measures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ended by SIGKILL says nothing at its end: the id must have been told before."""

    def killed(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.cli.measure._measure", killed)
    words = [word for word in MADE if not word.startswith("run_id=")]
    assert main(words) == 2
    (run,) = (p.parent for p in Path("results/toy").glob("*/_run.json"))
    assert f"resume={run.name} " in capsys.readouterr().err
    assert main(MADE) == 2
    assert "resume=" not in capsys.readouterr().err.splitlines()[0], "whoever gives the id knows it"


@pytest.mark.usefixtures("cut_off")
@pytest.mark.parametrize(
    "change", [{"mark": None}, {"mark": "0" * 64}, {"run_id": "r2"}, {"config": {"model": "x"}}]
)
def test_a_run_that_was_not_made_here_asks_for_trust(
    change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    stored = about()
    stored["config"] |= {"reports_dir": "theirs", "report": True} | change.pop("config", {})
    (RUN / "_run.json").write_text(json.dumps(stored | change))
    assert "trust=true" in refused(capsys, "resume=results/toy/r1", "budget_s=null")
    assert "trust=true" in refused(capsys, "resume=results/toy/r1", "results_dir=none")
    if "model" not in stored["config"] or stored["config"]["model"] is None:
        assert main(["resume=results/toy/r1", "budget_s=null", "trust=true"]) == 0
        assert not Path("theirs").exists()
        assert list(Path("reports").glob("*.html"))
        assert main(["resume=results/toy/r1"]) == 0, "from now on it is ours"


@pytest.mark.usefixtures("cut_off")
@pytest.mark.parametrize(
    "word",
    ["axes.n=[1,2,3,4]", "axes.kind=a", "arms=[base,other]", "seed=8", "rounds=5", "timing.min_rounds=2", "control=false",
     "device=cuda", "cases=[0123456789ab]", "train.recipe=rowwise", "model=nano"],
)  # fmt: skip
def test_what_would_change_what_was_measured_is_refused_by_name(
    word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.machine.environment.device_kind", lambda asked: asked)
    key = word.partition("=")[0]
    assert f"resume=r1: {key}=" in refused(capsys, "resume=r1", word)
    own = [w for w in MADE if w.partition("=")[0] not in ("run_id", key)]
    if key not in ("device", "cases"):  # which the plan refuses
        assert f"{key}=" in refused(capsys, *own, word, "resume=r1")


@pytest.mark.usefixtures("cut_off")
@pytest.mark.parametrize(
    "words",
    [["axes.n=[1,2,3]"], ["seed=7", "sweep=toy", "axes.n=[1,2,3]", "arms=[base]", "rounds=4"], ["workers=1", "log_level=DEBUG"],
     ["reports_dir=elsewhere", "report=true", "quiet=true"], ["isolate=false", "budget_s=100"], ["results_dir=results"],
     ["dry_run=true"], ["device=cpu"], ["--quiet"]],
)  # fmt: skip
def test_what_does_not_may_be_given(words: list[str]) -> None:
    assert main(["resume=r1", *words]) == 0


def test_an_id_that_is_nowhere_or_twice_is_refused_and_a_folder_chooses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "no run 'r1' in results; newest: none" in refused(capsys, "resume=r1")
    (tmp_path / "sweeps" / "toy2.yaml").write_text((tmp_path / "sweeps" / "toy.yaml").read_text())
    for sweep in ("toy", "toy2"):
        assert main([f"sweep={sweep}", "device=cpu", "run_id=r1", "budget_s=0", "report=false"]) == 0
    line = refused(capsys, "resume=r1")
    assert "2 runs have this id: results/toy/r1, results/toy2/r1" in line
    for command in (
        "sweep=toy device=cpu resume=r1",
        "report r1",
        "export r1 -o rows.csv",
        "diff r1 r1",
        "fleet r1",
    ):
        assert "2 runs have this id: " in refused(capsys, *command.split())
    assert "newest: r1" in refused(capsys, "resume=r2")
    assert "no run '/nowhere/r1'" in refused(capsys, "resume=/nowhere/r1")
    assert main(["resume=results/toy2/r1", "budget_s=null"]) == 0
    assert set(store.read("results/toy2/r1")["status"]) == {"ok"}
    assert set(store.read("results/toy/r1")["status"]) == {"skipped"}


def test_resume_last_alone_continues_the_run_that_began_last() -> None:
    for run in ("b", "a"):
        assert main(["sweep=toy", "device=cpu", f"run_id={run}", "budget_s=0", "report=false"]) == 0
    assert main(["resume=last", "budget_s=null", "report=false"]) == 0
    assert set(store.read("results/toy/a")["status"]) == {"ok"}
    assert set(store.read("results/toy/b")["status"]) == {"skipped"}


def test_resume_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected a run id, a folder, or last" in refused(capsys, "resume=")
    assert "results/last is no run" in refused(capsys, "resume=last")
    assert "one sweep=NAME is needed" in refused(capsys, "resume=null")
    assert "one sweep=NAME is needed" in refused(capsys, "axes.n=1")


@pytest.mark.usefixtures("cut_off")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "is damaged, or another program's"),
        ({"state": 1}, "is damaged, or another program's"),
        ({"config": {}}, "holds no settings (config)"),
        ({"config": None}, "holds no settings (config)"),
        ({"config": [1]}, "holds no settings (config)"),
        ({"config": {"name": "toy"}}, "are damaged, or another version's"),  # no device
        ({"axes": [1]}, "are damaged, or another version's"),
        ({"seed": "x"}, "are damaged, or another version's"),
        ({"of_another_version": 1}, "are damaged, or another version's"),
        ({"data_path": 3}, "are damaged, or another version's"),
        ({"name": "gone"}, "are damaged, or another version's"),
    ],
)
def test_a_run_json_without_whole_settings_is_refused_in_a_line(
    change: dict[str, Any] | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = about()
    if change is None:
        (RUN / "_run.json").write_text(json.dumps(whole)[:100])
    elif change.keys() & {"config", "state"}:
        (RUN / "_run.json").write_text(json.dumps({**whole, **change}))
    else:
        (RUN / "_run.json").write_text(json.dumps({**whole, "config": {**whole["config"], **change}}))
    line = refused(capsys, "resume=r1")
    assert message in line
    assert "_run.json" in line


@pytest.mark.usefixtures("cut_off")
def test_a_sweep_file_that_is_gone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweeps" / "toy.yaml").unlink()
    assert "resume=r1: its sweep file is gone: unknown sweep 'toy'" in refused(capsys, "resume=r1")


@pytest.mark.usefixtures("cut_off")
def test_a_folder_that_is_no_run_and_a_shard_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "results/toy is no run: it holds no _run.json" in refused(capsys, "resume=results/toy")
    assert main(["sweep=toy", "device=cpu", "run_id=r2", "shard=0/2", "budget_s=0"]) == 0
    line = refused(capsys, "resume=results/toy/r2/shard-0-of-2")
    assert "is a shard; resume=results/toy/r2 continues its run" in line


def test_a_model_or_a_text_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_bytes(b"The same text again. " * 400)
    words = ["sweep=divergence", "device=cpu", "budget_s=0", "report=false", "arms=[base]", "quiet=true"]
    assert (
        main([*words, "run_id=t1", "data=bytes", "data_path=text", "axes.seed=0", "axes.eval_batches=1"]) == 0
    )
    assert main([*words, "run_id=t2", "axes.seed=0"]) == 0
    (tmp_path / "text").rename(tmp_path / "moved")
    assert "text" in refused(capsys, "resume=t1")
    assert main(["resume=t1", "data_path=moved", "dry_run=true"]) == 0
    file = Path("results/divergence/t2/_run.json")
    whole = json.loads(file.read_text())
    whole["config"]["model"] = {"_target_": "no_such_module.build", "batch": "no_such_module.batch"}
    file.write_text(json.dumps(whole))
    assert "no_such_module" in refused(capsys, "resume=t2", "trust=true")


@pytest.mark.usefixtures("cut_off")
def test_the_pipe_of_a_gate_is_of_its_own_command() -> None:
    """Whatever has that number now is no pipe to a gate."""
    stored = about()
    (RUN / "_run.json").write_text(json.dumps({**stored, "config": {**stored["config"], "turns": 99}}))
    assert main(["resume=r1", "budget_s=null", "trust=true"]) == 0
    assert set(store.read(RUN)["status"]) == {"ok"}
