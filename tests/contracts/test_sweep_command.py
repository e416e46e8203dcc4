"""`python -m harness sweep=NAME`: exit codes, files, last lines, overrides. Oracle: the contract, as users rely on it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import forked
import psutil
import pytest
from command_line import CAST, HERE, QUICKLY, TRAIN, Ended, files, rows, run, with_model


def ids(ended: Ended) -> list[str]:
    """Case ids that a dry run lists."""
    return [m[1] for line in ended.out if (m := re.match(r"  ([0-9a-f]{12}) ", line))]


def test_a_whole_sweep_is_exit_0_and_its_last_lines_name_rows_and_report(measured: Ended) -> None:
    assert measured.code == 0
    assert [line.split()[0] for line in measured.out[-2:]] == ["results", "report"]
    folder, page = measured.path("results"), measured.path("report")
    assert folder.parent == measured.folder / "results" / "cast"
    assert page == measured.folder / "reports" / f"{folder.name}.html"
    assert set(rows(folder)["status"]) == {"ok"}


def test_the_files_of_a_run(measured: Ended) -> None:
    folder, page = measured.path("results"), measured.path("report")
    assert {re.sub(r"-.*", "", path.name) for path in folder.iterdir()} == {
        "rows",
        "_run.json",
        "_run.log",
        "_progress.json",
    }
    about = json.loads((folder / "_run.json").read_text())
    assert about["command"].startswith("python -m harness sweep=cast ")
    assert (about["run_id"], about["sweep"], about["state"]) == (folder.name, "cast", "finished")
    assert about["config"]["axes"]["M"] == [16, 32]
    assert {"started_at", "ended_at", "question"} <= about.keys()
    assert json.loads((folder / "_progress.json").read_text())["state"] == "finished"
    assert page.read_text().startswith("<!doctype html>")
    twin = page.with_suffix(".md").read_text()
    assert twin.startswith("# ")
    assert "CPU" in twin.split("\n## ")[0]  # a CPU's report says so at its head


def test_the_command_of_a_run_repeats_it(measured: Ended) -> None:
    about = json.loads((measured.path("results") / "_run.json").read_text())
    assert about["command"].split()[3:] == [*CAST, *QUICKLY] or "'" in about["command"]


def test_a_failed_case_is_exit_1_with_a_reason_and_the_others_are_measured(partly_failed: Ended) -> None:
    assert partly_failed.code == 1
    assert [line.split()[0] for line in partly_failed.out[-2:]] == ["results", "report"]
    frame = rows(partly_failed.path("results"))
    bad, good = frame[frame["status"] == "failed"], frame[frame["status"] == "ok"]
    assert {json.loads(axes)["batch"] for axes in bad["axes"]} == {3}
    assert {json.loads(axes)["batch"] for axes in good["axes"]} == {2}
    assert bad["reason"].str.contains("three is too many").all()
    assert bad["value"].isna().all()
    assert all(len(samples) == 0 for samples in bad["samples"])
    assert {"bf16_eager", "tensorwise_eager"} <= set(bad["arm"]) & set(good["arm"])


def test_an_arm_that_this_device_lacks_is_a_skipped_row_and_exit_0(partly_skipped: Ended) -> None:
    assert partly_skipped.code == 0
    frame = rows(partly_skipped.path("results"))
    skipped = frame[frame["status"] == "skipped"]
    assert set(skipped["arm"]) == {"tensorwise_fast_eager"}
    assert (skipped["reason"] != "").all()
    assert set(frame["arm"]) >= {"bf16_eager", "tensorwise_eager", "tensorwise_fast_eager"}


def test_each_row_that_was_left_out_is_counted_beside_its_reason(tmp_path: Path) -> None:
    ended = run(
        tmp_path, "sweep=gemm", "axes.M=128", "axes.K=[128,192]", "axes.N=128", *QUICKLY, "budget_s=0"
    )
    counted = re.search(r"(\d+) skipped", "\n".join(ended.out))
    told = [int(line.split()[0]) for line in ended.out if re.match(r"  \d+ skipped", line)]
    frame = rows(ended.path("results"))
    assert counted
    assert int(counted[1]) == sum(told) == (frame["status"] == "skipped").sum()
    assert any("time budget of 0 s" in line for line in ended.out)
    assert any(line.startswith("budget_s=0:") for line in (*ended.out, *ended.err))  # said before it starts


def test_a_dry_run_lists_the_cases_that_are_then_measured_and_writes_nothing(
    tmp_path: Path, measured: Ended
) -> None:
    ended = run(tmp_path, *CAST, *QUICKLY, "dry_run=true")
    assert ended.code == 0
    assert ended.err == []
    assert re.match(r"cast: 1 x 1 x 1 x 2 x 1 = 2 cases x 1 arms", ended.out[0])
    assert set(ids(ended)) == set(rows(measured.path("results"))["case_id"])
    assert len(ids(ended)) == 2
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["sweep=no_such_sweep"],
        ["sweep=cast", "axes.no_such_axis=1"],
        ["sweep=cast", "axes.M=0"],
        ["sweep=cast", "axes.dtype=fp7"],
        ["sweep=cast", "arms=[no_such_arm]"],
        ["sweep=cast", "device=tpu"],
        ["sweep=cast", "no_such_key=1"],
        ["sweep=cast", "rounds=many"],
        ["sweep=cast", "rounds=0"],
        ["sweep=cast", "seed=x"],
        ["sweep=cast", "M=512"],
        ["sweep=cast", "resume=no-such-run"],
        ["sweep=cast", "shard=4/4"],
        ["sweep=cast", "sweep=gemm"],
        [
            "sweep=linear",
            "axes.M=16",
            "axes.K=40",
            "axes.N=16",
            "arms=[bf16_eager,rowwise_eager]",
            "device=cpu",
        ],
        ["sweep=gemm", "shapes=from_model", "model._target_=no_such_module.build"],
        ["-m", "sweep=cast", "shard=0/2,1/2", "hydra/launcher=no_such_launcher"],
        ["report"],
        ["report", "no/such/run"],
        ["diff", "one"],
        ["fleet", "no/such/run"],
        ["import", "no-such-file.json"],
        ["doctor", "device=tpu"],
        ["advise", "model=no_such_model"],
        ["gate"],
        ["gate", "--candidate", "x"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_exit_2_one_line_and_nothing_written(words: list[str], tmp_path: Path) -> None:
    assert run(tmp_path, *words).refused()
    assert files(tmp_path) == []


def test_a_mistyped_name_comes_with_the_nearest_one(tmp_path: Path) -> None:
    assert "nearest: gate" in run(tmp_path, "gat").refused()
    assert "gemm" in run(tmp_path, "sweep=gem").refused()
    assert "dtype" in run(tmp_path, "sweep=cast", "axes.dtyp=e4m3fn").refused()
    assert "eager" in run(tmp_path, "sweep=cast", "arms=[eagr]").refused()


def test_a_seed_that_cannot_be_stored_is_exit_2(tmp_path: Path) -> None:
    assert run(tmp_path, *CAST, *QUICKLY, HERE, "seed=99999999999999999999").code == 2


def test_folders_rounds_and_seed_are_taken(measured_again: Ended) -> None:
    assert measured_again.code == 0
    folder, page = measured_again.path("results"), measured_again.path("report")
    assert folder.parent == measured_again.folder / "kept" / "rows" / "cast"
    assert page.parent == measured_again.folder / "kept" / "pages"
    assert {path.name for path in measured_again.folder.iterdir() if path.name != "__pycache__"} == {"kept"}
    frame = rows(folder)
    times = frame[frame["metric"] == "time_ms"]
    assert set(frame["seed"]) == {7}
    assert {frozenset(rounds) for rounds in times["rounds"]} == {frozenset({0, 1, 2})}


def test_another_seed_is_another_case(measured: Ended, measured_again: Ended) -> None:
    one, other = (set(rows(ended.path("results"))["case_id"]) for ended in (measured, measured_again))
    assert len(one) == len(other) == 2
    assert not one & other


@pytest.mark.parametrize(
    ("words", "cases"),
    [
        (["axes.M=512"], 1),
        (["axes.M=[512]"], 1),
        (["axes.M=[512,1024]"], 2),
        (["++axes.M=[512,1024]", "axes.K=[64,128]"], 4),
        (["axes.dtype=[e4m3fn,e5m2]", "axes.M=64"], 2),
    ],
)
def test_axes_are_crossed_values_or_lists(words: list[str], cases: int, tmp_path: Path) -> None:
    base = [word for word in CAST if word.split("=")[0] not in {w.lstrip("+").split("=")[0] for w in words}]
    base = [word for word in base if not (word.startswith("axes.M=") and any("axes.M" in w for w in words))]
    ended = run(tmp_path, *base, *words, "dry_run=true")
    assert ended.code == 0
    assert len(ids(ended)) == cases


@pytest.mark.parametrize(
    "word",
    [
        "+axes.K=64",
        "axes.src='bf16'",
        "results_dir='a b'",
        "results_dir=a b=c,d",
        "budget_s=null",
        "timing.max_rounds=400",
        "arms=[]",
        "quiet=true",
        "--quiet",
        "log_level=DEBUG",
        "device=auto",
    ],
)
def test_what_hydra_users_write_is_taken(word: str, tmp_path: Path) -> None:
    key = word.lstrip("+").partition("=")[0]
    words = [*(w for w in CAST if not w.startswith(f"{key}=")), word, "dry_run=true"]
    ended = run(tmp_path, *words)
    assert (ended.code, len(ids(ended))) == (0, 2), ended.err


def test_cases_can_be_chosen_by_id(tmp_path: Path) -> None:
    every = ids(run(tmp_path, *CAST, "dry_run=true"))
    assert ids(run(tmp_path, *CAST, f"cases=[{every[1]}]", "dry_run=true")) == [every[1]]


def test_resume_runs_only_what_a_run_lacks(tmp_path: Path) -> None:
    first = run(tmp_path, *CAST, *QUICKLY, HERE, "budget_s=0", "report=false")
    assert first.code == 0
    folder = first.path("results")
    assert set(rows(folder)["status"]) == {"skipped"}
    again = run(tmp_path, *CAST, *QUICKLY, HERE, f"resume={folder.name}")
    assert again.code == 0
    assert again.path("results") == folder
    frame = rows(folder)
    assert set(frame["status"]) == {"ok"}
    assert frame["case_id"].nunique() == 2
    stored = files(folder)
    nothing = run(tmp_path, *CAST, *QUICKLY, HERE, f"resume={folder.name}", "report=false")
    assert nothing.code == 0
    assert [p for p in files(folder) if p.suffix == ".parquet"] == [
        p for p in stored if p.suffix == ".parquet"
    ]
    assert rows(folder).equals(frame)
    other = run(tmp_path, *CAST, "axes.M=[64]", f"resume={folder.name}").refused()
    assert folder.name in other


def test_a_killed_run_loses_at_most_the_case_under_way_and_resume_ends_it(tmp_path: Path) -> None:
    folder = with_model(tmp_path) / "results" / "train" / "killed"
    (tmp_path / "hang").touch()
    process = forked.start(["-m", "harness", *TRAIN, "run_id=killed"], tmp_path)
    deadline = time.monotonic() + 300
    while not (tmp_path / "hanging").exists():  # the second case
        assert process.is_alive(), process.exitcode
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    assert children
    assert not psutil.wait_procs(children, timeout=60)[1]
    before = rows(folder)
    whole = before[before["status"] != "partial"]
    assert {json.loads(axes)["batch"] for axes in whole["axes"]} == {2}
    assert set(whole["arm"]) >= {"bf16_eager", "tensorwise_eager"}
    assert not list(folder.glob("*.tmp"))
    (tmp_path / "hang").unlink()
    ended = run(tmp_path, *TRAIN, HERE, "resume=killed", "resume_anyway=true")
    assert ended.code == 1  # the case that never returned fails now
    after = rows(folder)
    assert set(after["case_id"]) > set(whole["case_id"])
    kept = after[after["case_id"].isin(whole["case_id"])].reset_index(drop=True)
    assert kept["value"].equals(whole["value"].reset_index(drop=True))
    assert after.loc[after["status"] == "failed", "reason"].str.contains("three is too many").any()


def test_shards_share_a_run_and_hold_each_case_once(tmp_path: Path) -> None:
    ended = [run(tmp_path, *CAST, *QUICKLY, HERE, f"shard={i}/2", "run_id=spread") for i in range(2)]
    assert [e.code for e in ended] == [0, 0]
    folder = tmp_path / "results" / "cast" / "spread"
    assert [e.path("results") for e in ended] == [folder / f"shard-{i}-of-2" for i in range(2)]
    frame = rows(folder)
    assert set(frame["run_id"]) == {"spread"}
    parts = [set(rows(e.path("results"))["case_id"]) for e in ended]
    assert [len(part) for part in parts] == [1, 1]
    assert not parts[0] & parts[1]
    assert run(tmp_path, "report", str(folder), "-o", "both.html").code == 0


def test_a_multirun_lists_the_cases_of_each_shard(tmp_path: Path) -> None:
    ended = run(tmp_path, "-m", *CAST, "shard=0/2,1/2", "dry_run=true")
    assert ended.code == 0
    assert sorted(ids(ended)) == sorted(ids(run(tmp_path, *CAST, "dry_run=true")))
    assert [line for line in ended.out if line.startswith("shard ")] == ["shard 0/2", "shard 1/2"]
    assert files(tmp_path) == []


@pytest.mark.slow
def test_a_multirun_measures_every_shard_reports_them_as_one_and_refuses_other_arms(tmp_path: Path) -> None:
    """Hydra's own launcher: one command after the other; the rest differ in where they start it."""
    spread = ["-m", *CAST, *QUICKLY, "run_id=twice", "shard=0/2,1/2", "hydra/launcher=basic", HERE]
    done = forked.run(["-m", "harness", *spread, "arms=[eager]"], tmp_path)
    assert done.returncode == 0, done.stderr
    ended = Ended(0, done.stdout.splitlines(), done.stderr.splitlines(), tmp_path)
    frame = rows(ended.path("results"))
    assert frame["run_id"].nunique() == 1
    assert frame["case_id"].nunique() == 2
    assert ended.path("report").exists()
    assert not list(ended.path("results").glob("_launch"))  # it names the user's folders
    # Shards that are refused did not finish, though those of the command before did
    again = run(tmp_path, *spread, "arms=[eager,copy]")
    assert again.code == 2
    assert "shards 0/2" in again.err[-1]
