"""A planned sweep is measured, stored and reported. Imported where something is to be measured: a dry run needs none of it."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from harness import store
from harness.cli.config import command_line
from harness.engine import arms, executor, places, run_folder, runlog
from harness.engine.arms import TimeLimits, silence_s
from harness.engine.bench import Setting
from harness.engine.plan import Task, nothing_compared
from harness.engine.progress import Progress
from harness.engine.stages import Mark, Stage, Steps
from harness.engine.turns import Turns, with_control
from harness.judge import diagnosis
from harness.judge.diagnosis import few
from harness.machine import device_lock, environment, raw_output
from harness.machine.processes import interruptible, marked
from harness.report import write_report
from harness.store import printer
from harness.store.errors import UsageError
from harness.store.private import public
from harness.store.text import duration
from harness.timing.workload import least_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from harness.cli.config import Request
    from harness.engine.executor import Place, RunOutcome, What
    from harness.engine.places import Gpu
    from harness.engine.plan import SweepPlan
    from harness.engine.settings import SweepConfig
    from harness.engine.shards import Shard

WORTH_SAYING_S = 60.0
NO_SPEED = "on a CPU this run tells numerics, memory and mechanisms, and nothing of FP8's speed on a GPU, for which advise answers"
TOLD = 5  # reasons of one kind that the end of a run names; the report has all


def run_plan(request: Request, plan: SweepPlan, gpus: Sequence[Gpu], shard: Shard | None) -> int:
    """Measures a plan, on devices that this process has to itself; returns the exit code.

    Raises:
        UsageError: the request is refused; nothing was written.
    """
    config, console = request.config, Console(file=raw_output.stream())
    in_turns = config.turns is not None  # with another sweep on the same device
    plan = with_control(plan) if in_turns else plan
    with device_lock.held([] if in_turns else [gpu.uuid for gpu in gpus], waits=shard is not None):
        cases = [c.case for c in plan.cases if c.runnable]
        if any("data_path" in dict(case.axes) for case in cases):
            from harness.training.batches import fetch  # models

            fetch(cases)
        if config.isolate:
            modes = {c.suite.ARMS[arm].record(arm).mode for c in plan.cases for arm in c.runnable}
            arms.start_server([c.suite for c in plan.cases], compiles="compile" in modes)
        work = _Work.of(config, plan, gpus, shard)
        for key in ("results_dir", "reports_dir"):
            run_folder.refuse_unwritable(Path(getattr(config, key)), key)
        with (
            interruptible(),
            run_folder.owned(work.folder, shard),
            marked(),
            runlog.log_to(work.folder, logging.getLevelNamesMapping()[config.log_level.upper()]),
            runlog.RawOutput.logged() as raw,
        ):
            return _run(request, plan, work, shard, console, raw)


def _run(
    request: Request,
    plan: SweepPlan,
    work: _Work,
    shard: Shard | None,
    console: Console,
    raw: runlog.RawOutput,
) -> int:
    """The part of a sweep that has the folder of its run to itself."""
    config, started = request.config, time.perf_counter()
    env_id, env = work.conditions[0]
    about = {
        "made_by": "sweep",
        # The command of a whole sweep, which any machine can repeat
        "command": command_line(
            [w for w in request.overrides if w.partition("=")[0] not in ("shard", "run_id")]
        ),
        "config": config.plain(),
        "mark": run_folder.mark(Path(config.results_dir), work.run_id, public(config.plain())),
        "question": config.question,
        "resumed_despite": work.changed,
    }
    writer = runlog.LoggingWriter(
        work.folder, run_id=work.run_id, sweep=config.name, env_id=env_id, env=env, about=about
    )
    notes = [f"resumed although changed: {change}" for change in work.changed]
    if not config.quiet and config.run_id is None and config.resume is None:
        notes.insert(0, run_folder.opening(work.run_id))  # a killed run ends silently
    if config.budget_s is not None and not config.quiet:
        notes.append(f"budget_s={config.budget_s:g}: no case starts after {duration(config.budget_s)}")
    timed = (c.suite.ARMS[arm] for c in plan.cases if not c.is_trial for arm in c.runnable)
    if config.device == "cpu" and not config.quiet and any(arm.recipe for arm in timed):
        notes.append(NO_SPEED)
        if config.budget_s is None and (least := _least_s(plan, work)) >= WORTH_SAYING_S:
            notes.append(
                f"it takes {duration(least)} or more, at the rate at which this CPU multiplies now; fewer arms= take less"
            )
    for line in notes:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    note = runlog.ProgressFile(writer)
    with runlog.recorded(writer, note):
        outcome = _measure(request, plan, writer, work, console, note, raw)
        writer.close(outcome.state)
    whole = {"share": 1.0} if outcome.state == "finished" else {}
    note.write(state=outcome.state, message=outcome.message, **whole)
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(outcome.statuses.items()))
    seconds = time.perf_counter() - started
    ended = f"{outcome.state} in {seconds:.0f} s: {statuses or 'nothing new'}\n"
    kept = 0
    if shard is None:
        try:
            kept = _finish(config, outcome, plan, work.folder, ended)
        except KeyboardInterrupt:
            outcome.message = f"interrupted; python -m harness report {work.folder} makes the report"
    else:
        sys.stdout.write(f"shard {shard} {ended}results  {work.folder}\n")
        sys.stdout.write(
            f"report   python -m harness report {work.folder.parent}, once all shards have ended\n"
        )
    if outcome.message:
        again = f": resume={work.run_id} continues it" if outcome.state == "interrupted" else ""
        raw_output.refuse(f"{outcome.message}{again}")
        return 2
    return 1 if outcome.statuses["failed"] or kept else 0


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
    def of(cls, config: SweepConfig, plan: SweepPlan, gpus: Sequence[Gpu], shard: Shard | None) -> _Work:
        """Reads the machine and, where a run is resumed, what that run holds."""
        facts = environment.fingerprint(config.device)
        lanes = _lanes(config, plan, len(gpus))
        where = places.places_for(config, gpus, facts, lanes)
        own = environment.env_id(facts), facts
        conditions: list[tuple[str, Mapping[str, Any]]]
        conditions = [(p.env_id, p.env) for p in where if p.env_id is not None] or [own]
        run_id, folder, kept = run_folder.chosen(config, facts, shard)
        if kept is None:
            return cls(run_id, folder, where, lanes, conditions, [], set(), set())
        from harness.engine.resume import changes, refuse, stored_arms, stored_cases  # models, FP8: a second
        from harness.judge.fleet import refuse_another_card

        refuse_another_card(config.suites, kept, conditions[0][1])
        changed = changes(kept, conditions)
        if not config.resume_anyway:
            refuse(run_id, changed)
        done = stored_cases(kept, plan)
        # The arms of a case are compared with one another: under other conditions all of them are run again.
        arms = set() if changed else stored_arms(kept, plan, done)
        return cls(run_id, folder, where, lanes, conditions, changed, done, arms)


def left_to_run(
    config: SweepConfig, plan: SweepPlan, gpus: Sequence[Gpu], shard: Shard | None
) -> Iterator[str]:
    """For dry_run=true: what resume= would still run, after all that it refuses."""
    work = _Work.of(config, plan, gpus, shard)
    left = len([*plan.tasks(work.done, work.done_arms)])
    yield f"{work.run_id} holds {len([*plan.tasks()]) - left} of these measurements, {left} are left"


def _measure(
    request: Request,
    plan: SweepPlan,
    writer: runlog.LoggingWriter,
    work: _Work,
    console: Console,
    note: runlog.ProgressFile,
    raw: runlog.RawOutput,
) -> RunOutcome:
    config, units = request.config, [*plan.tasks(work.done, work.done_arms)]
    note.write(state="running", total=len(units), share=0.0 if units else 1.0)
    with Progress.on(console, units, note, config.quiet) as progress:

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

        return executor.run(
            plan,
            writer,
            Setting(
                config.device,
                request.timing,
                config.seed,
                config.control,
                writer.folder.absolute(),
                config.warm_compile,
                in_turns=config.turns is not None,
            ),
            places=work.places,
            lanes=work.lanes,
            limits=TimeLimits(
                config.case_timeout_s or silence_s(request.timing),
                config.case_wall_s or math.inf,
                math.inf if config.budget_s is None else config.budget_s,
            ),
            notify=take,
            done=work.done,
            done_arms=work.done_arms,
            turns=None if config.turns is None else Turns(config.turns, config.device),
        )


def _least_s(plan: SweepPlan, work: _Work) -> float:
    """What is left of a plan takes at the least, by a tenth of a second each of float32 and bfloat16 products here and now."""
    import torch

    rate = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 768, dtype=dtype), torch.ones(768, 3072, dtype=dtype)
        began, calls = time.perf_counter(), 0
        while (seconds := time.perf_counter() - began) < 0.1:
            a @ b
            calls += 1
        rate = max(rate, calls * 2 * 512 * 768 * 3072 / seconds)
    arms = {
        c.case.case_id: [a for a in c.runnable if (c.case.case_id, a) not in work.done_arms]
        for c in plan.cases
    }
    left = [c for c in plan.cases if c.case.case_id not in work.done and arms[c.case.case_id]]
    return sum(least_seconds(c.suite, c.case, arms[c.case.case_id], rate) for c in left)


def _lanes(config: SweepConfig, plan: SweepPlan, gpus: int) -> int:
    """Training runs at once, no more than there are; each computes on one core of a CPU, and a GPU is not shared."""
    if not config.isolate:
        return 1
    cores = len(os.sched_getaffinity(0)) if config.device == "cpu" else gpus
    wanted = cores if config.workers is None else int(config.workers)
    return max(1, min(wanted, sum(len(c.runnable) for c in plan.cases if c.is_trial)))


def _finish(config: SweepConfig, outcome: RunOutcome, plan: SweepPlan, folder: Path, ended: str) -> int:
    """Prints what the rows say and where everything lies, writes the report where one is wanted; how many rows had failed
    before this command. The last lines name both paths.
    """
    out, kept = sys.stdout.write, 0
    out(ended)
    for status in ("failed", "skipped"):
        reasons = [(reason, of) for (what, reason), of in outcome.reasons.items() if what == status]
        reasons.sort(key=lambda entry: -len(entry[1]))
        for reason, of in reasons[:TOLD]:
            out(f"  {len(of)} {status}: {', '.join(few(of))}: {reason}\n")
        if left := sum(len(of) for _, of in reasons[TOLD:]):
            out(f"  {left} {status} for other reasons, which the report names\n")
    for line in nothing_compared(plan):
        out(f"  {line}\n")
    try:
        kept = max(0, _print_findings(folder, config.train.judge is not False) - outcome.statuses["failed"])
    except (UsageError, OSError) as error:
        out(f"no verdict: {error}\n")
    if kept:
        out(f"  failed before, and not measured again: {kept} rows\n")
    out(f"results  {folder}\n")
    sys.stdout.flush()  # whatever becomes of the report, the reader knows where the rows are
    if not config.report:
        return kept
    try:
        page = write_report([folder], Path(config.reports_dir) / f"{folder.name}.html")
        out(f"report   {page.html}\n")
    except (UsageError, OSError, ImportError) as error:
        outcome.message = outcome.message or f"no report: {error}; python -m harness report {folder} makes it"
    return kept


def _print_findings(folder: Path, judged: bool = True) -> int:
    """Prints what the rows say beside their numbers: the verdicts on training runs, and what is probably wrong; returns how
    many rows of the run have failed.
    """
    frame = store.open_run(folder)
    problems = [f"not read: {problem}" for problem in frame.attrs["problems"]]
    sys.stdout.write("".join(f"warning: {problem}\n" for problem in problems))
    verdicts = None
    if "divergence" in set(frame["suite"]):
        from harness.judge import verdict

        verdicts = verdict.judge(frame)
        answer = printer.as_text(verdict.StoredVerdicts(verdicts))
        sys.stdout.write(answer if judged else "not judged: train.judge=false\n")
    if found := diagnosis.findings(frame, verdicts):
        sys.stdout.write(printer.as_text(diagnosis.Diagnosis(found)))
    return int((frame["status"] == "failed").sum())
