"""`python -m harness sweep=NAME ...`: compose, plan, measure, store, report."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from harness import culprits, diagnosis, environment, report, store, verdict
from harness.config import Request, command_line, load
from harness.diagnosis.finding import few
from harness.errors import UsageError
from harness.executor import Executor, Outcome
from harness.plan import Plan, describe, make_plan
from harness.progress import Progress
from harness.resume import stored_arms, stored_cases
from harness.rows import is_trial
from harness.suites import SUITES
from harness.timing import timer_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

TOLD = 5  # reasons of one kind that the end of a run names; the report has all


def run_sweep(overrides: Sequence[str]) -> int:
    """Runs one sweep from its command line; returns the exit code of the contract (0, 1 or 2).

    Raises:
        UsageError: the request is refused; nothing was written.
    """
    request = load(overrides, environment.device_kind)
    config = request.config
    plan = make_plan(config, SUITES)
    lanes = _lanes(config)
    console = Console(stderr=True)
    if config["bisect"] is not None:
        culprits.check(plan, config["bisect"], config["resume"])
    if config["dry_run"]:
        said = [*describe(plan), *(_left_to_run(config, plan) if config["resume"] else ())]
        sys.stdout.write("\n".join(said) + "\n")
        return 0

    if config["bisect"] is not None:
        for line in culprits.find(plan, config["bisect"], config["device"], console.print):
            sys.stdout.write(line + "\n")
        return 0

    fingerprint = environment.fingerprint(config["device"])
    env_id = environment.env_id(fingerprint)
    run_id, folder = _folder(config, fingerprint)
    done, done_arms = _stored(config, plan, folder, fingerprint)
    for key in ("results_dir", "reports_dir"):
        _writable(Path(config[key]), key)
    writer = store.RunWriter(
        folder,
        run_id=run_id,
        sweep=config["name"],
        env_id=env_id,
        env=fingerprint,
        about={"command": command_line(request.overrides), "config": config, "question": config["question"]},
    )
    started = time.perf_counter()
    with _interruptible():
        outcome = _measure(request, plan, writer, done, done_arms, lanes, console)
        writer.close(outcome.state)
        html = Path(config["reports_dir"]) / f"{run_id}.html"
        return _finish(outcome, plan, folder, html, time.perf_counter() - started)


def _stored(
    config: dict[str, Any], plan: Plan, folder: Path, fingerprint: dict[str, Any]
) -> tuple[set[str], set[tuple[str, str]]]:
    """What resume= finds in a run: ids of whole cases, and (case id, arm) of runs of others."""
    if not config["resume"]:
        return set(), set()
    done = stored_cases(folder, environment.env_id(fingerprint), fingerprint.get("git_commit"), plan)
    return done, stored_arms(folder, plan, done)


def _left_to_run(config: dict[str, Any], plan: Plan) -> Iterator[str]:
    """For dry_run=true: what resume= would still run, after all that it refuses."""
    fingerprint = environment.fingerprint(config["device"])
    run_id, folder = _folder(config, fingerprint)
    done, done_arms = _stored(config, plan, folder, fingerprint)
    left = _units(plan, done, done_arms)
    yield f"{run_id} holds {_units(plan, set(), set()) - left} of these measurements, {left} are left"


def _measure(
    request: Request,
    plan: Plan,
    writer: store.RunWriter,
    done: set[str],
    done_arms: set[tuple[str, str]],
    lanes: int,
    console: Console,
) -> Outcome:
    config = request.config
    with (
        environment.monitor_for(config["device"]) as monitor,
        Progress.on(console, _units(plan, done, done_arms)) as progress,
    ):
        executor = Executor(
            device=config["device"],
            timer=timer_for(config["device"]),
            timing=request.timing,
            seed=config["seed"],
            control=config["control"],
            monitor=monitor,
            budget_s=config["budget_s"],
            folder=writer.folder,
            lanes=lanes,
            on_case=progress.case,
            on_step=progress.step,
        )
        return executor.run(plan, writer, done, done_arms)


def _units(plan: Plan, done: set[str], done_arms: set[tuple[str, str]]) -> int:
    """What a progress bar counts: a case that is timed, or a run of a trial suite."""
    waiting = [c for c in plan.cases if c.case.case_id not in done]
    return sum(
        sum((c.case.case_id, arm) not in done_arms for arm in c.runnable) if is_trial(c) else 1
        for c in waiting
    )


def _lanes(config: dict[str, Any]) -> int:
    """Training runs at once; each computes on one core of a CPU, and a GPU is not shared."""
    if config["workers"] is not None:
        if config["workers"] < 1:
            raise UsageError(f"workers={config['workers']}: expected an integer of at least 1")
        return int(config["workers"])
    return len(os.sched_getaffinity(0)) if config["device"] == "cpu" else 1


def _finish(outcome: Outcome, plan: Plan, folder: Path, html: Path, seconds: float) -> int:
    """Writes the report and prints where everything lies; the last lines name both paths."""
    counts = (
        ", ".join(f"{count} {status}" for status, count in sorted(outcome.statuses.items())) or "nothing new"
    )
    out = sys.stdout
    out.write(f"{outcome.state} in {seconds:.0f} s: {counts}\n")
    for reason in outcome.reasons[:TOLD]:
        out.write(f"  failed: {reason}\n")
    for arms, reason in _unsupported(plan)[:TOLD]:
        out.write(f"  skipped: {', '.join(few(arms))}: {reason}\n")
    try:
        _tell(folder)
    except (UsageError, OSError) as error:
        out.write(f"no verdict: {error}\n")
    out.write(f"results  {folder}\n")
    out.flush()  # whatever becomes of the report, the reader knows where the rows are
    try:
        written = report.write_report([folder], html)
        out.write(f"report   {written.html}\n")
    except (UsageError, OSError, ImportError) as error:
        outcome.message = outcome.message or f"no report: {error}; python -m harness report {folder} makes it"
    except KeyboardInterrupt:
        outcome.message = f"interrupted; python -m harness report {folder} makes the report"
    if outcome.message:
        sys.stderr.write(f"error: {outcome.message}\n")
    if outcome.message:
        return 2
    return 1 if outcome.statuses["failed"] else 0


def _unsupported(plan: Plan) -> list[tuple[list[str], str]]:
    """What this device or these shapes left out: arms by reason."""
    arms: dict[str, dict[str, None]] = {}
    for planned in plan.cases:
        for arm, why in planned.unsupported.items():
            arms.setdefault(why.reason, {})[arm] = None
    return [(list(names), reason) for reason, names in arms.items()]


def _tell(folder: Path) -> None:
    """Prints what the rows say beside their numbers: the verdicts on training runs, and what is probably wrong."""
    frame = store.read(folder)
    judged = verdict.judge(frame)
    for line in (*verdict.lines(judged), *diagnosis.lines(diagnosis.findings(frame, judged))):
        sys.stdout.write(line + "\n")


def _folder(config: dict[str, Any], fingerprint: dict[str, Any]) -> tuple[str, Path]:
    results = Path(config["results_dir"])
    if not config["resume"]:
        run_id = store.new_run_id(fingerprint.get("git_commit"))
        return run_id, results / config["name"] / run_id
    folder = store.find_run(config["resume"], results)
    about = store.read_about(folder)
    if about.get("sweep", config["name"]) != config["name"]:
        raise UsageError(f"run {config['resume']} is of sweep {about['sweep']!r}, not {config['name']!r}")
    _refuse_other_settings(folder.name, about, config)
    return folder.name, folder


# What decides which cases and arms there are, and how they train
_SETTINGS = (
    "suite",
    "axes",
    "shapes",
    "arms",
    "cases",
    "parts",
    "model",
    "data",
    "schedule",
    "ranks",
    "train",
    "seed",
)


def _refuse_other_settings(run_id: str, about: dict[str, Any], config: dict[str, Any]) -> None:
    """A run holds one experiment, and its command must stay the one that made it."""
    stored = about.get("config", {})
    differs = [
        key for key in _SETTINGS if key in stored and stored[key] != json.loads(json.dumps(config[key]))
    ]
    if differs:
        raise UsageError(
            f"{run_id} was made with another {' and '.join(differs)}; repeat its command with resume={run_id} added: "
            f"{about.get('command', '')}"
        )


def _writable(folder: Path, key: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder} ({error.strerror}); choose another folder with {key}=DIR"
        ) from error


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, as a scheduler sends it, ends the run as Ctrl-C does: cleanly."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
