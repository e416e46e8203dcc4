"""The reference job's command line, its prediction, and the table that sets it beside what was measured.

Oracle: `sweeps/reference_7b.yaml` for the recipe, suite `scale` of that sweep for the prediction, arithmetic for the table.
The job itself runs in tests/cluster/test_reference_job.py, a run of ranks in tests/harness/training/test_sharded_runs.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from harness import store
from harness.__main__ import main
from harness.cli import reference_facts, reference_job
from harness.cli import reference_prediction as prediction
from harness.cli.reference_settings import SWEEP, read
from harness.machine import torchrun
from harness.store.arm import Arm
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.suites import scale

ROOT = Path(__file__).parents[3]


def test_the_recipe_is_the_sweeps() -> None:
    axes = yaml.safe_load((ROOT / "sweeps" / f"{SWEEP}.yaml").read_text())["axes"]
    settings = read(["run_id=a"])
    for name in ("model", "batch", "seq", "accumulation", "checkpointing", "weights"):
        assert getattr(settings, name) == axes[name][0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["steps=x"], "steps=x: expected an integer"),
        (["seeds=3,4"], "seeds=3,4: expected integers in brackets, [0,1,2]"),
        (["stps=3"], "unknown key 'stps' (nearest: steps)"),
        (["batch=0"], "batch=0: expected an integer of at least 1"),
        (["weights=fp16"], "unknown weights 'fp16'"),
        (["tiny"], "'tiny' is not key=value"),
        ([], "run_id is not given"),
        (["seeds=[0"], "seeds=[0: expected integers in brackets, [0,1,2]"),
        (["seeds=[-1]"], "seeds=[-1]: expected one or more different integers of at least 0"),
        (["run_id=../x"], "run_id=../x: expected letters, digits"),
        (["lr=.nan"], "lr=nan: expected a finite number above 0"),
        (["lr=0"], "lr=0.0: expected a finite number above 0"),
        (["checkpoint_s=-1"], "checkpoint_s=-1.0: expected a finite number above 0"),
        (["eval_batches=-1"], "eval_batches=-1: expected an integer of at least 0"),
        (["lr_warmup=-1"], "lr_warmup=-1: expected an integer of at least 0"),
        (["steps=5", "lr_warmup=5"], "lr_warmup=5: expected an integer from 0 to steps - 1 = 4"),
    ],
)
def test_bad_settings_are_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read([*(["run_id=a"] if words else []), *words])
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("MASTER_PORT", "abc", "from 0 to 65535"), ("WORLD_SIZE", "x", "of at least 1"), ("RANK", "2", "from 0 to 1")],
)  # fmt: skip
def test_a_launcher_that_sets_nonsense_is_one_line(
    name: str, value: str, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for key, text in (good | {name: value}).items():
        monkeypatch.setenv(key, text)
    if name == "RANK":
        with pytest.raises(UsageError, match=said):
            torchrun.started()
        return
    assert reference_job.main(["run_id=a"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {name}={value}: expected an integer {said}")


def test_a_rank_without_a_gpu_of_its_own_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 says it itself: no group is there yet in which rank 0 could hear of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for key, text in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, text)
    for local, said in ((None, "not set"), ("1", "1")):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local is not None:
            monkeypatch.setenv("LOCAL_RANK", local)
        assert reference_job.main(["run_id=a"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(
            f"error: LOCAL_RANK={said}: expected the number of a GPU of this host, below 1"
        )


def test_another_torch_or_gpu_is_refused_and_told_of_if_taken_anyway() -> None:
    first = {"device": "cuda", "GPU": "A", "torch": "2.13.0"}
    about = reference_facts.continued_with({}, first, anyway=False)
    assert about == {"made_with": first}
    assert reference_facts.continued_with(about, first, anyway=False) == about
    second = first | {"torch": "2.14.0"}
    with pytest.raises(UsageError, match=r"made with torch 2.13.0, here it is 2.14.0: .* resume_anyway=true"):
        reference_facts.continued_with(about, second, anyway=False)
    taken = reference_facts.continued_with(about, second, anyway=True)
    assert taken == {"made_with": second, "continued_with_other": [{"torch": ["2.13.0", "2.14.0"]}]}
    assert reference_facts.continued_with(taken, second, anyway=False) == taken


def test_the_lock_of_a_node_that_died_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A requeued job starts within the time in which the lock of its first start may still look alive."""
    seen: list[float] = []

    def held(folder: Path, role: str = "rows", patience_s: float = 0.0) -> None:
        seen.append(patience_s)
        raise UsageError("enough")

    for name in ("together", "refuse_other_facts", "refuse_unshared"):
        monkeypatch.setattr(reference_job, name, lambda *args: None)
    monkeypatch.setattr(reference_job, "from_first", lambda fn: fn())
    monkeypatch.setattr(reference_job.run_lock, "held", held)
    job = object.__new__(reference_job.ReferenceJob)
    job.settings = read(["run_id=a", f"reports_dir={tmp_path}"])
    job.device, job.folder, job.text = "cpu", tmp_path, None
    with pytest.raises(UsageError, match="enough"):
        job.run()
    assert seen == [reference_job.run_lock.PATIENCE_S]


def trained(arm: str = "tensorwise", **facts: object) -> Measurement:
    return Measurement(
        suite="divergence", arm=arm, arm_fields=Arm(arm), metric="elapsed_s", status="ok", axes="{}",
        case_id="c", samples=(1.0, 3.0), rounds=(0, 1), flops={"bf16": 989.4e12},
        resolved={"tokens_per_step": 100.0, **facts},
    )  # fmt: skip


def test_a_run_that_was_stopped_and_one_on_another_gpu(tmp_path: Path) -> None:
    """By hand: an H100's second of bf16 at its peak, in steps of 2 s; a B200 has 2250 TFLOP/s for the same."""
    predicted = prediction.rows(prediction.case_of(read(["run_id=a"]), 2, "cpu"), "tensorwise", "")
    gpus = {"e": ("NVIDIA H100 80GB HBM3", 79.2), "f": ("NVIDIA B200", 178.4)}
    for env_id, (gpu, memory) in gpus.items():
        env = {"gpu": gpu, "gpu_memory_gib": memory, "device": "cuda"}
        changes = [{"GPU": ["NVIDIA H100 80GB HBM3", "NVIDIA B200"]}]
        about = {"made_with": {}, "continued_with_other": changes, "ranks": 2, "hosts": ["n"]}
        writer = store.RunWriter(tmp_path / "r", run_id="r", sweep=SWEEP, env_id=env_id, env=env, about=about)
        stopped = {"stopped": "loss is nan at step 2"} if env_id == "f" else {"stopped": ""}
        arm = "bf16" if env_id == "e" else "tensorwise"
        writer.append([*(predicted if env_id == "e" else []), trained(arm, **stopped)])
        writer.close("finished")
    frame = store.read(tmp_path / "r")
    assert reference_facts.stopped(frame) == [
        "the training run in tensorwise was stopped: loss is nan at step 2"
    ]


def test_without_torchrun_it_says_how_it_is_started(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert reference_job.main(["run_id=a"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: one process was started: start it with torchrun")


def test_a_run_is_continued_as_it_was() -> None:
    before = {"settings": read(["run_id=a"]).same, "ranks": 16}
    read(["run_id=a", "checkpoint_s=5", "resume_anyway=true"]).refuse_other_run(before, 16)
    with pytest.raises(UsageError, match="run a has steps=1000, asked for is 5: continue it as it was"):
        read(["run_id=a", "steps=5"]).refuse_other_run(before, 16)
    with pytest.raises(UsageError, match="run a has ranks=16, asked for is 8"):
        read(["run_id=a"]).refuse_other_run(before, 8)


def test_resume_names_the_command_that_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    about = {"settings": read(["run_id=r1"]).same, "command": "torchrun ... run_id=r1"}
    folder = tmp_path / "results" / SWEEP / "r1"
    store.RunWriter(folder, run_id="r1", sweep=SWEEP, env_id="e", env={}, about=about).close("interrupted")
    assert main(["resume=r1"]) == 2
    assert "the command that made it continues it: torchrun ... run_id=r1" in capfd.readouterr().err


def test_an_ab_block_that_is_too_short() -> None:
    with pytest.raises(
        UsageError,
        match=r"ab_steps=10: .* give ab_steps=52 or more",  # 7 + 3 * 15
    ):
        read(["run_id=a", "ab_steps=10"]).check_ab_steps(("base", "base:again", "fp8"))


def test_the_rise_of_the_learning_rate_fits_a_short_run() -> None:
    assert [read(["run_id=a", f"steps={n}"]).lr_warmup for n in (5, 20, 1000, 5000)] == [0, 2, 100, 100]


def test_the_prediction_is_the_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    """On H100s: of each arm what suite `scale` gives for the same case, and the sweep's figures but for its two reductions."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    case = prediction.case_of(read(["run_id=a"]), 16, "h100")
    rows = prediction.rows(case, "tensorwise", "h100")
    assert {row.arm for row in rows} == {"bf16", "tensorwise", "tensorwise_bf16_gather"}
    for arm in ("bf16", "tensorwise"):
        (step,) = [r for r in rows if r.arm == arm and r.metric == "predicted_step_ms" and not r.part]
        expected = scale.trial(case, arm, "cpu", Path(), lambda step, steps: None)
        assert step.samples == next(
            s.samples for s in expected.series if s.metric == "predicted_step_ms" and not s.part
        )
    assert case["reduce_each"] is True
    assert (case["world"], case["node"], case["reduce"], case["weights"]) == (16, 4, "fp32", "bf16")


def test_too_few_gpus_for_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings = read(["run_id=a", "model=llama3_70b", "batch=1"])
    with pytest.raises(
        UsageError, match=r"^2 GPUs are too few: model llama3_70b is predicted to need .* GB of 85 GB on each"
    ):
        prediction.rows(prediction.case_of(settings, 2, "h100"), "tensorwise", "h100")


def test_a_cpu_has_no_prediction() -> None:
    rows = prediction.rows(prediction.case_of(read(["run_id=a"]), 2, "cpu"), "tensorwise", "")
    assert {row.status for row in rows} == {"skipped"}
    assert {row.reason for row in rows} == {
        "no prediction for this device: a CPU is not in the table of GPUs"
    }


SMALL = ("run_id=r1", "model=llama_tiny", "batch=1", "seq=32", "accumulation=1", "checkpointing=none", "steps=4",
         "lr_warmup=1", "eval_batches=2", "ab_steps=0")  # fmt: skip


def started(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """torchrun with two ranks, in a folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_a_job_is_done_once_and_refuses_other_settings(tmp_path: Path) -> None:
    job = ("-m", reference_job.__name__, *SMALL)
    first = started(tmp_path, *job)
    assert first.returncode == 0, first.stderr
    rows = store.read(tmp_path / "results")
    again = started(tmp_path, *job)
    assert again.returncode == 0, again.stderr
    assert "verified" not in again.stdout  # nothing is trained again
    assert len(store.read(tmp_path / "results")) == len(rows)
    other = started(tmp_path, *job, "lr=1")
    (line,) = [line for line in other.stderr.splitlines() if line.startswith("error:")]
    assert "run r1 has lr=0.0003, asked for is 1.0" in line


@pytest.mark.slow
def test_an_end_asked_for_early_is_kept_and_a_run_that_diverges_is_no_success(tmp_path: Path) -> None:
    """`_end` is there before the job has opened its folder; the next start is not ended by it. lr=1e30 overflows."""
    job = ("-m", reference_job.__name__, *SMALL, "lr=1e30")
    folder = tmp_path / "results" / SWEEP / "r1"
    folder.mkdir(parents=True)
    (folder / reference_job.END).touch()
    ended = started(tmp_path, *job)
    assert ended.returncode != 0
    assert "asked to end" in ended.stderr
    assert store.read_about(folder)["state"] == "interrupted"
    assert not (folder / reference_job.END).exists()
    diverged = started(tmp_path, *job)
    assert diverged.returncode != 0
    assert "the training run in tensorwise was stopped: " in diverged.stderr
    assert store.read_about(folder)["state"] == "finished"


@pytest.mark.slow
def test_fp8_that_one_rank_does_not_run_ends_the_job(tmp_path: Path) -> None:
    """No loss of it is stored, and nothing says that FP8 is on. Recipe rowwise: its weights are gathered in bf16."""
    job = started(tmp_path, str(Path(__file__).with_name("planted_job.py")), *SMALL, "recipe=rowwise")
    assert job.returncode != 0
    assert "FP8 is not proved, so nothing was trained in it" in job.stderr
    rows = store.read(tmp_path / "results")
    (failed,) = rows[(rows["suite"] == "divergence") & (rows["arm"] == "rowwise")].to_dict("records")
    assert (failed["status"], failed["cause"]) == ("failed", "not_fp8")
    assert main(["report", str(tmp_path / "results"), "-o", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.md").read_text()
    assert "**Did FP8 really run? Yes" not in text
    assert "PASS" not in text.partition("### What the answers rest on")[0]


@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_in_the_proof_is_told_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", "memory")
    job = started(tmp_path, str(Path(__file__).with_name("planted_job.py")), *SMALL, "recipe=rowwise")
    assert job.returncode != 0
    why = "rank 1: FP8 is not proved, so nothing was trained in it: not verified: out of memory: planted"
    assert why in job.stderr.splitlines()
    rows = store.read(tmp_path / "results")
    (failed,) = rows[(rows["suite"] == "divergence") & (rows["arm"] == "rowwise")].to_dict("records")
    assert (failed["status"], failed["cause"]) == ("failed", "unproven")
    assert failed["reason"] == "rank 1: not verified: out of memory: planted"
