"""What Hydra's users type. Oracle: Hydra's own documentation of its flags, and the runs that come of them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.__main__ import main
from harness.cli import habits
from harness.store.errors import UsageError
from harness.suites import train

OURS = """\
# Which question does this one ask?
suite: cast
axes: {M: [32], K: [64], dtype: [e4m3fn], granularity: [tensorwise, rowwise]}
arms: [eager]
rounds: 2
timing: {warmup_min_seconds: 0.0, min_seconds: 0.0, max_seconds: 0.1}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a folder of sweeps elsewhere."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my sweeps"
    folder.mkdir()
    (folder / "ours.yaml").write_text(OURS)
    return folder


PATHS = [
    lambda folder: [f"sweep={folder}/ours.yaml"],
    lambda folder: ["sweep=./my sweeps/ours.yaml"],
    lambda folder: ["--config-dir", str(folder), "sweep=ours"],
    lambda folder: [f"--config-dir={folder}", "sweep=ours"],
    lambda folder: ["-cd", "my sweeps", "sweep=ours"],
]


@pytest.mark.parametrize("words", PATHS)
def test_a_sweep_from_outside_the_tree_is_planned(words, own, capsys) -> None:
    assert main([*words(own), "dry_run=true"]) == 0
    text = capsys.readouterr().out
    assert "2 cases" in text
    assert "rowwise" in text


def test_a_sweep_from_outside_runs_and_is_resumed_by_its_id_alone(own, capsys) -> None:
    words = ["isolate=false", "report=false", "quiet=true"]
    assert main([f"sweep={own}/ours.yaml", "run_id=r", "axes.granularity=tensorwise", *words]) == 0
    about = json.loads(Path("results/ours/r/_run.json").read_text())
    assert about["config"]["config_dir"] == f"$PWD/{own.name}"
    (own / "more.yaml").write_text("# Another?\nsuite: cast\n")
    assert main(["resume=r", *words]) == 0, capsys.readouterr().err
    moved = own.rename(own.with_name("moved"))
    assert main(["resume=r", *words]) == 2
    assert "its sweep file is gone" in capsys.readouterr().err
    assert main(["resume=r", f"config_dir={moved}", *words]) == 0, capsys.readouterr().err


def test_cfg_job_prints_what_is_composed(capsys) -> None:
    assert main(["sweep=cast", "axes.M=[7]", "--cfg", "job"]) == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert shown.axes.M == [7]
    assert shown.name == "cast"


def test_an_axis_can_be_left_out_and_added(capsys) -> None:
    assert main(["sweep=cast", "~axes.granularity", "+axes.K=[64]", "dry_run=true"]) == 0
    assert "rowwise" not in capsys.readouterr().out  # tensorwise is the suite's default


def test_a_multirun_runs_each_and_keeps_the_worst_exit_code(capsys) -> None:
    ran: list[list[str]] = []

    def run(words: list[str]) -> int:
        ran.append(words)
        return 1 if "seed=1" in words else 0

    assert habits.run_several(["sweep=cast", "seed=0,1,2"], run) == 1
    assert ran == [["sweep=cast", f"seed={s}"] for s in (0, 1, 2)]
    assert "run 2 of 3: sweep=cast seed=1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["sweep=cast,gem"], ["sweep=cast,gemm", "axes.K=64"], ["sweep=cast", "axes.fmtx=1,2"]],
    ids=" ".join,
)
def test_a_multirun_is_planned_whole_before_anything_runs(words, capsys) -> None:
    ran: list[list[str]] = []
    with pytest.raises(UsageError, match=r"run \d of \d \(sweep="):
        habits.run_several(words, lambda line: ran.append(line) or 0)
    assert ran == []
    assert capsys.readouterr().out == ""


def test_a_run_that_is_refused_late_does_not_end_the_others(capsys) -> None:
    ran: list[list[str]] = []

    def run(words: list[str]) -> int:
        ran.append(words)
        if len(ran) == 1:
            raise UsageError("the disk is full")
        return 0

    assert habits.run_several(["sweep=cast", "seed=0,1"], run) == 2
    assert len(ran) == 2
    assert capsys.readouterr().err == "error: run 1 of 2: the disk is full\n"


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """A shell's "&" hands SIGINT down as ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_an_interrupt_ends_the_whole_multirun(capsys) -> None:
    """Ctrl-C: the run under way records how it ended, and no other begins."""
    ran: list[list[str]] = []

    def run(words: list[str]) -> int:
        ran.append(words)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return 2

    assert habits.run_several(["sweep=cast", "seed=0,1,2"], run) == 2
    assert len(ran) == 1
    assert capsys.readouterr().err == "error: interrupted; 0 of 3 runs were carried out\n"


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_flag_of_a_multirun_stands_anywhere(flag, is_first, capsys) -> None:
    words = ["sweep='cast','gemm'", "dry_run=true"]
    assert main([flag, *words] if is_first else [*words, flag]) == 0
    assert "run 2 of 2: sweep=gemm" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["sweep=./nowhere.yaml"],
        ["sweep=cast", "--config-dir", "nowhere"],
        ["sweep=cast", "--cfg", "hydra"],
        ["sweep=cast", "~arms"],
        ["sweep=cast", "~axes.nothing"],
        ["-m", "sweep=cast"],
        ["-m", "sweep=cast,gemm", "run_id=a"],
        ["-m", "sweep=cast", "hydra/launcher=joblib", "axes.M=1,2"],
        ["-m", "sweep=cast", "seed=interval(1,2)"],
        ["sweep=cast", "--quiet=perhaps"],
        ["--config-dir", ".", "--config-dir", "..", "sweep=cast"],
        ["sweep=cast,gemm"],
        ["sweep=cast", "--config-name", "x"],
    ],
)
def test_bad_words_are_one_line(words, capsys) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["null", "x(1)", "my sweep"])
def test_a_file_whose_name_is_no_name_is_refused_in_one_line(name, own, capsys) -> None:
    (own / f"{name}.yaml").write_text(OURS)
    assert main([f"sweep={own}/{name}.yaml", "dry_run=true"]) == 2
    error = capsys.readouterr().err
    assert "rename it" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("seconds", "is_said"), [(59.0, False), (3725.0, True)])
def test_a_sweep_on_a_cpu_says_before_it_starts_how_long_it_takes(
    seconds: float,
    is_said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Oracle: what the suite says of its case; below a minute nothing is said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "least_seconds", lambda case, arms, rate: seconds)
    words = "sweep=train device=cpu model=nano arms=[bf16_eager,tensorwise_eager] rounds=1 isolate=false report=false"
    assert main([*words.split(), "control=false"]) == 0
    said = capfd.readouterr().err
    assert ("1:02:05" in said.partition("[1/1]")[0]) == is_said
