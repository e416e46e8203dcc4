"""A sweep whose parts are sweeps: each part is a run of its own within the folder of the whole (`harness.engine.parts`).

    results/<sweep>/<run_id>/_run.json              the whole, with what has become of each part
    results/<sweep>/<run_id>/<its sweep>/<run_id>-<part>/   the run of a part
    <reports_dir>/<run_id>.parquet, .html, .md      all rows so far, written anew after each part; the report

A part that crashes, hangs or is refused costs that part alone. Its run has a name that is known before it starts, and each
finished round is stored, so that nothing but the round under way is lost, whatever ends a slot.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import report, store
from harness.advise.measured import Check, layers
from harness.advise.rates import rates_of
from harness.cli import internal_error
from harness.cli.config import command_line
from harness.cli.part_outcome import settle, unchecked
from harness.cli.part_words import refuse_unusable
from harness.engine import parts as schedule
from harness.engine import places, run_folder, runlog
from harness.engine.parts import CUT, TRIES, Part, Progress, State
from harness.judge.smoke import left_out
from harness.machine import device_lock, environment, raw_output
from harness.machine.ceilings import ceilings
from harness.machine.hardware import of_env
from harness.machine.processes import interruptible
from harness.report import summary
from harness.store.cause import Cause
from harness.store.errors import UsageError
from harness.store.json_columns import parse
from harness.training.data import corpus, shakespeare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd

    from harness.cli.config import Request

REHEARSAL = "rehearsal on a CPU in tiny sizes: it proves the command, and nothing in it is a GPU's figure"
# Keys of a command line that every part is given as they stand; others belong to the whole, or differ by part.
PASSED_ON = (
    "seed", "rounds", "timing", "control", "warm_compile", "isolate", "devices", "workers", "case_timeout_s", "case_wall_s",
    "case_memory_gib", "resume_anyway", "quiet", "log_level", "config_dir",
)  # fmt: skip
OF_THE_WHOLE = (
    "sweep", "device", "parts", "overrides", "small", "data_path", "budget_s", "resume", "run_id", "results_dir",
    "reports_dir", "report", "dry_run",
)  # fmt: skip


def passed_on(words: Sequence[str]) -> list[str]:
    """The words of a command line that every part is given."""
    return [word for word in words if word.lstrip("+").partition("=")[0].split(".")[0] in PASSED_ON]


class Whole:
    """A sweep of parts under way; `measure` runs the words of one for at most so many seconds and returns its exit code."""

    def __init__(
        self,
        request: Request,
        folder: Path,
        writer: store.RunWriter,
        measure: Callable[[Sequence[str], float], int],
        clock: Callable[[], float] = time.monotonic,
        note: Callable[..., None] = lambda **_: None,
    ) -> None:
        self.config, self.folder = request.config, folder
        self.parts = schedule.parts_of(self.config, NEEDS)
        self.passed_on = passed_on(request.overrides)
        self._writer, self._measure, self._clock, self._note = writer, measure, clock, note
        stored = store.read_about(folder).get("parts", {})
        self.state: State = {p.name: Progress.of_json(stored.get(p.name, {})) for p in self.parts}
        self.missing = missing(self.config, self.parts)
        self._turns = [name for name, mine in self.state.items() if not mine.done]

    def slot(self) -> list[str]:
        """Starts what the time budget has room for; returns `left`.

        Raises:
            KeyboardInterrupt: it was told to end; what is done is stored.
        """
        budget = self.config["budget_s"]
        seconds = float("inf") if budget is None else budget
        try:
            schedule.run_slot(
                self.parts, self.state, seconds, self.missing, self._one, self._clock, rehearsed(self.config)
            )
        finally:
            self._save()
        return self.left()

    def left(self) -> list[str]:
        """Names of the parts that another slot would start."""
        return [p.name for p in self.parts if self.state[p.name].open and not self.barred(p)]

    def barred(self, part: Part) -> tuple[Cause, str] | None:
        """See `schedule.barred`."""
        return schedule.barred(part, self.state, self.missing)

    def lost(self) -> list[str]:
        """Names of the parts that were given up."""
        return [
            p.name
            for p in self.parts
            if not (m := self.state[p.name]).done and not m.open and not self.barred(p)
        ]

    def _one(self, part: Part, mine: Progress, seconds: float) -> None:
        started = self._clock()
        try:
            checks = [run for name in part.checked_by if (run := self.run_of(name))]
            arms = tuple(part.overrides.get("arms", ()))
            mine.unchecked = unchecked(part, self.state)
            mine.left_out = left_out(arms, part.kernels, store.read(checks)) if checks else {}
            if arms and set(arms) <= set(mine.left_out):
                mine.cause, mine.reason = Cause.NUMERICS, "each of its arms failed its check"
                if not any(self.state[name].open for name in part.checked_by):  # else the check is made again
                    mine.done, mine.exit, mine.tries = True, 1, mine.tries + 1
                return
            words, before = self.words(part, mine, seconds), self._files(part)
            mine.tries, mine.exit = mine.tries + 1, None
            mine.cause, mine.reason = Cause.INTERRUPTED, "its process ended without a word"
            self._save(part.name)  # it has had this try, whatever becomes of this process
            try:
                mine.exit = self._measure(words, seconds)
            except KeyboardInterrupt:
                self._settle(part, mine)
                raise
            if mine.exit == 2 and self._files(part) == before:
                mine.tries -= 1
                mine.cause, mine.reason = Cause.REFUSED, "it has stored nothing; see what it printed"
            else:
                self._settle(part, mine)
        finally:  # whatever ends the slot, what is done so far is stored and gathered
            mine.seconds += self._clock() - started
            self._save()
            self.gather()

    def words(self, part: Part, mine: Progress, seconds: float) -> list[str]:
        """The command line of a part."""
        others = {} if rehearsed(self.config) else part.runs
        keys = {
            **{key: run for key, other in others.items() if (run := self.run_of(other)) is not None},
            "device": self.config["device"],
            "results_dir": self.folder,
            "reports_dir": self.folder,
            "report": "false",
            "run_id": self.run_id_of(part.name),
        }
        if seconds < float("inf"):
            keys["budget_s"] = f"{max(seconds - part.last_start_s, min(10, seconds)):g}"
        if "text" in part.needs:
            keys["data_path"] = _text(self.config)
        own = part.words(mine.tries, mine.left_out, rehearsed(self.config))
        return [*own, *(f"{key}={value}" for key, value in keys.items()), *self.passed_on]

    def _settle(self, part: Part, mine: Progress) -> None:
        run = self.run_of(part.name)
        settle(mine, None if run is None else store.read(run))

    def run_id_of(self, name: str) -> str:
        """The run id of a part."""
        return f"{self.folder.name}-{name}"

    def run_of(self, name: str) -> Path | None:
        """The folder of a part's run, if it has rows."""
        sweep = next(p.sweep for p in self.parts if p.name == name)
        run = self.folder / sweep / self.run_id_of(name)
        return run if any(run.rglob("*.parquet")) else None

    def _files(self, part: Part) -> set[Path]:
        return set((self.folder / part.sweep / self.run_id_of(part.name)).rglob("*.parquet"))

    def _save(self, under_way: str = "") -> None:
        self._writer.record(parts={name: mine.as_json_dict() for name, mine in self.state.items()})
        done = [name for name in self._turns if self.state[name].done]
        self._note(
            total=len(self._turns),
            share=len(done) / len(self._turns) if self._turns else 1.0,
            statuses=dict(sum((Counter(mine.statuses) for mine in self.state.values()), Counter())),
            text=f"{under_way or 'no part'} is under way; done: {', '.join(done) or 'none'}",
        )

    def gather(self) -> Path | None:
        """All rows so far in one file; quick enough to be done after each part."""
        if not any(self.folder.rglob("*.parquet")):
            return None
        target = Path(self.config["reports_dir"]) / f"{self.folder.name}.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        store.gather(self.folder, target)
        return target

    def line(self, part: Part) -> str:
        """A line about a part."""
        mine = self.state[part.name]
        why = self.barred(part)
        ended = "" if mine.exit is None else f"exit {mine.exit}, "
        took = f"{ended}{mine.seconds:.0f} s, " if mine.tries or ended else ""
        rows = ", ".join(f"{count} {status}" for status, count in sorted(mine.statuses.items()))
        if mine.done:
            outcome = f"done{'' if mine.ok else f', {mine.cause}: {mine.reason}'}"
        elif not mine.tries:
            outcome = f"skipped, {why[0]}: {why[1]}" if why else f"not started, {mine.cause}: {mine.reason}"
        else:
            outcome = f"{'unfinished' if mine.open else f'given up after {TRIES} tries'}, {mine.cause}: {mine.reason}"
        out = "".join(f"; {arm} left out ({reason})" for arm, reason in mine.left_out.items())
        open_checks = ", ".join(f"{name} {reason}" for name, reason in mine.unchecked.items())
        out += f"; unchecked: {open_checks}" if mine.tries and open_checks else ""
        return f"{part.name:<17}{took}{outcome}{f' ({rows})' if rows else ''}{out}"


def run_parts(request: Request, run_sweep: Callable[[Sequence[str]], int]) -> int:
    """Runs one slot; the exit code: 0 where no case failed and no part was given up so far, 2 where it was told to end, else 1.

    Raises:
        UsageError: the request is refused; nothing was written.
    """
    config = request.config
    for word in request.overrides:
        key = word.lstrip("+").partition("=")[0].split(".")[0]
        if key not in (*PASSED_ON, *OF_THE_WHOLE):
            raise UsageError(
                f"{word}: sweep {config['name']!r} is made of sweeps; write parts.NAME.overrides.{word}"
            )
    parts, out = schedule.parts_of(config, NEEDS), sys.stdout
    refuse_unusable(parts, config["device"], passed_on(request.overrides), rehearsed(config))
    lacking = missing(config, parts)
    if config["dry_run"]:
        slot_s = float("inf") if config["budget_s"] is None else config["budget_s"]
        out.write("\n".join(schedule.describe(parts, slot_s, lacking)) + "\n")
        return 0
    from harness.engine.resume import changes, refuse  # torch

    facts = environment.fingerprint(config["device"])
    conditions = environment.env_id(facts), facts
    run_id, folder, kept = run_folder.chosen(config, facts.get("git_commit"), None)
    changed = changes(kept, [conditions]) if kept is not None and any(kept.rglob("*.parquet")) else []
    if not config["resume_anyway"]:
        refuse(run_id, changed)
    for key in ("results_dir", "reports_dir"):
        run_folder.refuse_unwritable(Path(config[key]), key)

    def measure(words: Sequence[str], seconds: float) -> int:
        return schedule.within(seconds, lambda: _isolated(run_sweep, words))

    visible = places.gpus() if config["device"] == "cuda" else ()
    gpus = places.chosen(config["devices"], config["device"], visible)
    with device_lock.held([gpu.uuid for gpu in gpus]), interruptible(), run_folder.owned(folder, None):
        about = {
            "made_by": "sweep",
            "command": command_line(request.overrides),
            "config": config,
            "question": config["question"],
            "resumed_despite": changed,
            "parts": store.read_about(folder).get("parts", {}),
        }
        writer = runlog.LoggingWriter(
            folder, run_id=run_id, sweep=config["name"], env_id=conditions[0], env=facts, about=about
        )
        note = runlog.ProgressFile(writer)
        with runlog.recorded(writer, note):
            note.write(state="running", total=len(parts), share=0.0)
            return _run_and_report(Whole(request, folder, writer, measure, note=note.write), writer, note)


def _run_and_report(whole: Whole, writer: store.RunWriter, note: runlog.ProgressFile) -> int:
    out, config, is_interrupted = sys.stdout, whole.config, False
    banner = REHEARSAL + "\n" if rehearsed(config) else ""
    out.write(banner)
    if config["run_id"] is None and config["resume"] is None:
        raw_output.say(run_folder.opening(whole.folder.name) + "\n")
    nothing_open = not whole.left()
    try:
        whole.slot()
    except KeyboardInterrupt:
        is_interrupted = True
    left, lost = whole.left(), whole.lost()
    state = "interrupted" if is_interrupted or left or lost else "finished"
    writer.close(state)
    open_parts = [f"left: {', '.join(left)}"] * bool(left) + [f"given up: {', '.join(lost)}"] * bool(lost)
    note.write(state=state, message="; ".join(open_parts) or "nothing is left to start")
    for part in whole.parts:
        out.write(whole.line(part) + "\n")
    out.write(f"results  {whole.folder}\n")
    rows = whole.gather()
    if rows is not None:
        runs = [
            run for part in whole.parts if (run := whole.run_of(part.name))
        ]  # in order, as the summary has them
        out.write(f"rows     {rows}\n")
        if config["report"]:
            out.write(f"report   {report.write_report(runs, rows.with_suffix('.html')).html}\n")
        frame = store.read(runs)
        for line in summary.lines(frame, predicted_layers(frame)):
            out.write(line + "\n")
    if left:
        out.write(f"left: {', '.join(left)}; resume={whole.folder.name} continues\n")
    if nothing_open:
        done = all(mine.done for mine in whole.state.values())
        why = "is complete" if done else "has no part left to start"
        out.write(f"nothing was started: run {whole.folder.name} {why}; run_id=NAME starts a new one\n")
    out.write(banner)
    if is_interrupted:
        return 2
    is_failed = any(
        mine.exit not in (0, None, CUT) or mine.statuses.get("failed") for mine in whole.state.values()
    )
    return 1 if lost or is_failed else 0


def _isolated(run_sweep: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Runs a sweep; whatever it raises is the end of that sweep alone."""
    try:
        return run_sweep(words)
    except UsageError as error:
        raw_output.say(f"error: {error}\n")
        return 2
    except Exception as error:  # noqa: BLE001 - the other parts go on
        return internal_error.report(error)


def predicted_layers(frame: pd.DataFrame) -> list[Check]:
    """The prediction of `advise` beside each layer that was measured; none where the peak of the GPU is not known."""
    env = parse(frame["env"].iloc[0])
    device = of_env(env)
    if device is None:
        return []
    from harness.advise.recipes import candidates  # torch

    rates = rates_of(device, ceilings(frame))
    return layers(frame, rates, lambda recipe, compiled: candidates(compiled).get(recipe))


def rehearsed(config: Mapping[str, Any]) -> bool:
    """Whether the parts run in their small sizes: on a CPU, where they have some."""
    sizes = [config["small"], *(part["small"] for part in config["parts"].values())]
    return config["device"] == "cpu" and any(sizes)


def missing(config: Mapping[str, Any], parts: Sequence[Part]) -> dict[str, str]:
    """What some part needs and cannot be had here, with the reason.

    Raises:
        UsageError: a file is named that is missing, or is not nanoGPT's text.
    """
    needed = {need for part in parts for need in part.needs} & NEEDS.keys()
    return {need: why for need in sorted(needed) if (why := NEEDS[need](config))}


def _text(config: Mapping[str, Any]) -> str:
    """The file of nanoGPT's text: the one that is named, else the copy in the cache; "" where there is neither."""
    if config["data_path"]:
        corpus("shakespeare", config["data_path"])  # refused here, not after minutes
        return str(config["data_path"])
    return str(shakespeare.kept()) if shakespeare.kept().is_file() else ""


def _no_text(config: Mapping[str, Any]) -> str:
    if _text(config):
        return ""
    return (
        f"no text here: copy nanoGPT's input.txt ({shakespeare.ADDRESS}) into this folder, not ignored by git, and "
        "give `gpu` text=input.txt, or sweep=NAME data_path=input.txt"
    )


def _no_gpu(config: Mapping[str, Any]) -> str:
    return "" if config["device"] == "cuda" else "needs a GPU"


NEEDS: dict[str, Callable[[Mapping[str, Any]], str]] = {"text": _no_text, "gpu": _no_gpu}
