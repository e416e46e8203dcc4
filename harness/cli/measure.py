"""A planned sweep is measured, stored and reported. Imported where something is to be measured: a dry run needs none of it."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from harness import report, store
from harness.cli.config import command_line
from harness.engine import arms, executor, places, run_folder, runlog
from harness.engine.arms import Limits, silence_s
from harness.engine.bench import Setting
from harness.engine.progress import Progress
from harness.engine.rows import is_trial
from harness.engine.stages import Mark, Stage, Steps
from harness.engine.tasks import Task
from harness.judge import diagnosis, verdict
from harness.judge.diagnosis import few
from harness.judge.fleet.request import refuse_another_card
from harness.machine import device_lock, environment, raw_output
from harness.machine.processes import interruptible, marked
from harness.store.errors import UsageError
from harness.training.batches import fetch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from harness.cli.config import Request
    from harness.engine.executor import Outcome, Place, What
    from harness.engine.places import Gpu
    from harness.engine.plan import Plan
    from harness.engine.shards import Shard

_log = logging.getLogger("harness.cli.measure")

TOLD = 5  # reasons of one kind that the end of a run names; the report has all


def run_plan(request: Request, plan: Plan, gpus: Sequence[Gpu], shard: Shard | None) -> int:
    """Measures a plan, on devices that this process has to itself; returns the exit code.

    Raises:
        UsageError: the request is refused; nothing was written.
    """
    config, console = request.config, Console(file=raw_output.stream())
    with device_lock.held([gpu.uuid for gpu in gpus], waits=shard is not None):
        if config["bisect"] is not None:
            from harness.cli import bisection  # it trains: not needed by any other command

            for line in bisection.run(plan, config["bisect"], config["device"], console.print):
                sys.stdout.write(line + "\n")
            return 0
        return _run(request, plan, gpus, shard, console)


def _run(request: Request, plan: Plan, gpus: Sequence[Gpu], shard: Shard | None, console: Console) -> int:
    """The part of a sweep that has the devices to itself."""
    config = request.config
    fetch(c.case for c in plan.cases if c.runnable)
    if config["isolate"]:
        modes = {c.suite.ARMS[arm].record(arm).mode for c in plan.cases for arm in c.runnable}
        arms.start_server([c.suite for c in plan.cases], compiles="compile" in modes)
    work = _Work.of(config, plan, gpus, shard)
    for key in ("results_dir", "reports_dir"):
        run_folder.refuse_unwritable(Path(config[key]), key)
    with (
        interruptible(),
        run_folder.owned(work.folder, shard),
        marked(),
        runlog.log_to(work.folder, logging.getLevelNamesMapping()[config["log_level"].upper()]),
        runlog.RawOutput.logged() as raw,
    ):
        return _run_owned(request, plan, work, shard, console, raw)


def _run_owned(
    request: Request, plan: Plan, work: _Work, shard: Shard | None, console: Console, raw: runlog.RawOutput
) -> int:
    """The part of a sweep that has the folder of its run to itself."""
    config = request.config
    env_id, env = work.conditions[0]
    writer = runlog.LoggingWriter(
        work.folder,
        run_id=work.run_id,
        sweep=config["name"],
        env_id=env_id,
        env=env,
        about={
            "made_by": "sweep",
            "command": command_line(_of_all_shards(request.overrides)),
            "config": config,
            "question": config["question"],
            "resumed_despite": work.changed,
        },
    )
    if (
        not config["quiet"] and config["run_id"] is None and config["resume"] is None
    ):  # a killed run ends silently
        console.print(run_folder.opening(work.run_id), highlight=False, markup=False, soft_wrap=True)
    for change in work.changed:
        console.print(f"resumed although changed: {change}", highlight=False, markup=False)
    started = time.perf_counter()
    note = runlog.ProgressFile(writer)
    with runlog.recorded(writer, note):
        outcome = _measure(request, plan, writer, work, console, note, raw)
        writer.close(outcome.state)
    note.write(
        state=outcome.state,
        message=outcome.message,
        **({"share": 1.0} if outcome.state == "finished" else {}),
    )
    seconds = time.perf_counter() - started
    if shard is not None:
        return _finish_shard(outcome, shard, work.folder, seconds)
    html = Path(config["reports_dir"]) / f"{work.run_id}.html" if config["report"] else None
    judged = config["train"].get("judge") is not False
    return _finish(outcome, plan, work.folder, html, seconds, judged)


@dataclass(frozen=True, slots=True)
class _Work:
    """A request resolved for this machine.

    Attributes:
        run_id: of the run.
        folder: where its rows go, of a shard one within the run's.
        places: where workers compute; none: here.
        lanes: training runs at once.
        conditions: (env_id, environment) of each place.
        changed: what resume_anyway=true passes over.
        done: ids of whole cases that need nothing.
        done_arms: (case id, arm) of runs of others that need nothing.
    """

    run_id: str
    folder: Path
    places: list[Place]
    lanes: int
    conditions: list[tuple[str, Mapping[str, Any]]]
    changed: list[str]
    done: set[str]
    done_arms: set[tuple[str, str]]

    @classmethod
    def of(cls, config: dict[str, Any], plan: Plan, gpus: Sequence[Gpu], shard: Shard | None) -> _Work:
        """Reads the machine and, where a run is resumed, what that run holds."""
        facts = environment.fingerprint(config["device"])
        lanes = _lanes(config, plan, len(gpus))
        where = places.places_for(config, gpus, facts, lanes)
        own = environment.env_id(facts), facts
        conditions: list[tuple[str, Mapping[str, Any]]]
        conditions = [(p.env_id, p.env) for p in where if p.env_id is not None] or [own]
        run_id, folder, kept = run_folder.chosen(config, facts.get("git_commit"), shard)
        if kept is None:
            return cls(run_id, folder, where, lanes, conditions, [], set(), set())
        from harness.engine.resume import changes, refuse, stored_arms, stored_cases  # models, FP8: a second

        refuse_another_card(config, kept, conditions[0][1])
        changed = changes(kept, conditions)
        if not config["resume_anyway"]:
            refuse(run_id, changed)
        done = stored_cases(kept, plan)
        # The arms of a case are compared with one another: under other conditions all of them are run again.
        arms = set() if changed else stored_arms(kept, plan, done)
        return cls(run_id, folder, where, lanes, conditions, changed, done, arms)


def left_to_run(
    config: dict[str, Any], plan: Plan, gpus: Sequence[Gpu], shard: Shard | None
) -> Iterator[str]:
    """For dry_run=true: what resume= would still run, after all that it refuses."""
    work = _Work.of(config, plan, gpus, shard)
    left = len(_units(plan, work.done, work.done_arms))
    yield f"{work.run_id} holds {len(_units(plan, set(), set())) - left} of these measurements, {left} are left"


def _measure(
    request: Request,
    plan: Plan,
    writer: runlog.LoggingWriter,
    work: _Work,
    console: Console,
    note: runlog.ProgressFile,
    raw: runlog.RawOutput,
) -> Outcome:
    config, units = request.config, _units(plan, work.done, work.done_arms)
    note.write(state="running", total=len(units), share=0.0 if units else 1.0)
    alone = len(work.places) < 2 and work.lanes == 1
    so_far = _ReportSoFar(config, writer, units if alone else [])
    with Progress.on(console, len(units), note, config["quiet"]) as progress:

        def take(task: Task | None, what: What) -> None:
            if isinstance(what, list):
                # Without the arm of a case: when a line is read, another one may be under way
                raw.printed("" if task is None else str(task), what)
            elif task is not None:
                if not isinstance(what, Steps):
                    raw.at(
                        ""
                        if what is Mark.ENDED
                        else f"{task} {what if isinstance(what, Stage) else ''}".rstrip()
                    )
                progress.take(task, what)
                if what is Mark.ENDED:
                    so_far.end(task)

        return executor.run(
            plan,
            writer,
            Setting(
                config["device"],
                request.timing,
                config["seed"],
                config["control"],
                writer.folder.absolute(),
                config["warm_compile"],
            ),
            places=work.places,
            lanes=work.lanes,
            limits=Limits(
                config["case_timeout_s"] or silence_s(request.timing),
                config["case_wall_s"] or math.inf,
                math.inf if config["budget_s"] is None else config["budget_s"],
            ),
            tell=take,
            done=work.done,
            done_arms=work.done_arms,
        )


class _ReportSoFar:
    """Writes the report after each part of a sweep but the last, while nothing is measured.

    Args:
        config: of the command line.
        writer: of the rows.
        units: that will be measured one after the other; none where several are under way at once.
    """

    def __init__(self, config: dict[str, Any], writer: runlog.LoggingWriter, units: Sequence[Task]) -> None:
        wanted = config["report"] and config["shard"] is None
        self._html = Path(config["reports_dir"]) / f"{writer.folder.name}.html"
        self._writer = writer
        self._left = Counter(unit.planned.part for unit in units if wanted)
        self._total, self._done = len(self._left), list[str]()

    def end(self, task: Task) -> None:
        """A case or run is stored."""
        part = task.planned.part
        self._left[part] -= 1
        if self._left[part] != 0 or self._total < 2:
            return
        self._done.append(part)
        if len(self._done) == self._total:
            return
        try:  # the report at the end says what is wrong; the rows are what counts
            self._writer.record(parts_done=self._done, parts_total=self._total)
            report.write_report([self._writer.folder], self._html)
        except Exception:  # noqa: BLE001 - whatever a page cannot show costs no row
            _log.warning("no report after part %s", part, exc_info=True)


def _units(plan: Plan, done: set[str], done_arms: set[tuple[str, str]]) -> list[Task]:
    """What a progress bar counts: a case that is timed, or a run of a trial suite."""
    waiting = [c for c in plan.cases if c.case.case_id not in done]
    return [
        Task(c, arm)
        for c in waiting
        for arm in (c.runnable if is_trial(c) else ("",))
        if (c.case.case_id, arm) not in done_arms
    ]


def _lanes(config: dict[str, Any], plan: Plan, gpus: int) -> int:
    """Training runs at once, no more than there are; each computes on one core of a CPU, and a GPU is not shared."""
    if not config["isolate"]:
        return 1
    cores = len(os.sched_getaffinity(0)) if config["device"] == "cpu" else gpus
    wanted = cores if config["workers"] is None else int(config["workers"])
    return max(1, min(wanted, sum(len(c.runnable) for c in plan.cases if is_trial(c))))


def _finish(
    outcome: Outcome, plan: Plan, folder: Path, html: Path | None, seconds: float, judged: bool
) -> int:
    """Writes the report, where one is wanted, and prints where everything lies; the last lines name both paths."""
    counts = (
        ", ".join(f"{count} {status}" for status, count in sorted(outcome.statuses.items())) or "nothing new"
    )
    out = sys.stdout
    out.write(f"{outcome.state} in {seconds:.0f} s: {counts}\n")
    for reason in list(outcome.reasons)[:TOLD]:
        out.write(f"  failed: {reason}\n")
    for names, reason in _unsupported(plan)[:TOLD]:
        out.write(f"  skipped: {', '.join(few(names))}: {reason}\n")
    kept = 0
    try:
        kept = max(0, _tell(folder, judged) - outcome.statuses["failed"])
    except (UsageError, OSError) as error:
        out.write(f"no verdict: {error}\n")
    if kept:
        out.write(f"  failed before, and not measured again: {kept} rows\n")
    out.write(f"results  {folder}\n")
    out.flush()  # whatever becomes of the report, the reader knows where the rows are
    try:
        if html is None:
            return _exit_code(outcome, kept)
        written = report.write_report([folder], html)
        out.write(f"report   {written.html}\n")
    except (UsageError, OSError, ImportError) as error:
        outcome.message = outcome.message or f"no report: {error}; python -m harness report {folder} makes it"
    except KeyboardInterrupt:
        outcome.message = f"interrupted; python -m harness report {folder} makes the report"
    return _exit_code(outcome, kept)


def _exit_code(outcome: Outcome, kept: int) -> int:
    """The exit code of the contract; `kept`: failed rows that the run held before."""
    if outcome.message:
        raw_output.say(f"error: {outcome.message}\n")
        return 2
    return 1 if outcome.statuses["failed"] or kept else 0


def _finish_shard(outcome: Outcome, shard: Shard, folder: Path, seconds: float) -> int:
    """Prints where the rows of a shard lie; the report is made of all shards together."""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(outcome.statuses.items()))
    sys.stdout.write(f"shard {shard} {outcome.state} in {seconds:.0f} s: {counts or 'nothing new'}\n")
    sys.stdout.write(f"results  {folder}\n")
    sys.stdout.write(f"report   python -m harness report {folder.parent}, once all shards have ended\n")
    if outcome.message:
        raw_output.say(f"error: {outcome.message}\n")
        return 2
    return 1 if outcome.statuses["failed"] else 0


def _unsupported(plan: Plan) -> list[tuple[list[str], str]]:
    """Arms that this device or these shapes leave out, by reason."""
    arms: dict[str, dict[str, None]] = {}
    for planned in plan.cases:
        for arm, why in ((a, w) for a, w in planned.unsupported.items() if w.status == "skipped"):
            arms.setdefault(why.reason, {})[arm] = None
    return [(list(names), reason) for reason, names in arms.items()]


def _tell(folder: Path, judged: bool = True) -> int:
    """Prints what the rows say beside their numbers: the verdicts on training runs, and what is probably wrong; returns how
    many rows of the run have failed.
    """
    frame, others = store.read_quietly(folder)
    for problem in (*frame.attrs["problems"], *others):
        sys.stdout.write(
            f"warning: not read: {problem}\n"
            if problem in frame.attrs["problems"]
            else f"warning: {problem}\n"
        )
    verdicts = verdict.judge(frame)
    said = verdict.lines(verdicts) if judged else ["not judged: train.judge=false"]
    for line in (*said, *diagnosis.lines(diagnosis.findings(frame, verdicts))):
        sys.stdout.write(line + "\n")
    return int((frame["status"] == "failed").sum())


def _of_all_shards(words: Sequence[str]) -> list[str]:
    """The command of a whole sweep, which any machine can repeat."""
    return [word for word in words if word.partition("=")[0] not in ("shard", "run_id")]
