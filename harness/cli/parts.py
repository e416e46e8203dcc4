"""A sweep whose parts are sweeps: each is a run of its own, one after another by priority, within a time budget.

    results/<sweep>/<run_id>/_run.json              the whole, with what has become of each part
    results/<sweep>/<run_id>/<its sweep>/<run_id>-<part>/   the run of a part
    <reports_dir>/<run_id>.parquet, .html, .md      all rows so far, written anew after each part; the report

One command is one slot of `budget_s`; resume= is the next one, which starts what is left, each part `TRIES` times. A part that
crashes, hangs or is refused costs that part alone, and one that is cut off keeps its finished rounds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import report, store
from harness.cli import process_end
from harness.cli.config import command_line, load
from harness.engine import places, run_folder, runlog
from harness.machine import device_lock, environment, raw_output
from harness.machine.processes import interruptible
from harness.report import summary
from harness.store.cause import Cause
from harness.store.errors import UsageError
from harness.training.data import corpus, shakespeare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pandas as pd

    from harness.cli.config import Request

REHEARSAL = "rehearsal on a CPU in tiny sizes: it proves the command, and nothing in it is a GPU's figure"
PATIENCE = 1.4  # a part may take so many times its estimate
TRIES = 3  # slots in which a part is started
LEAST_ROUNDS = 3  # an interval needs them
RESERVE_S = 5.0  # of a slot, to store what there is
REHEARSED_S = 240.0  # of a part of a rehearsal: a CPU may be busy
CUT = 124  # exit code of a part that was cut off, as timeout(1) has it
# Keys of a command line that every part is given as they stand; others belong to the whole, or differ by part.
PASSED_ON = {
    "seed", "rounds", "timing", "control", "warm_compile", "isolate", "devices", "workers", "case_timeout_s", "case_wall_s",
    "case_memory_gib", "resume_anyway", "quiet", "log_level", "config_dir",
}  # fmt: skip
OF_THE_WHOLE = {
    "sweep", "device", "parts", "overrides", "small", "data_path", "budget_s", "resume", "run_id", "results_dir",
    "reports_dir", "report", "dry_run",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """One part, see `harness.cli.config.PartConfig`; overrides are flat: `axes.M`, not a mapping in a mapping."""

    name: str
    sweep: str
    about: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    small: Mapping[str, Any] = field(default_factory=dict, hash=False)
    priority: int = 0
    estimate_s: float | None = None

    def seconds(self, room: float, rehearsed: bool = False) -> float | None:
        """After so many it is cut off; None where a slot has too little room for it."""
        least, most = 0.95 * (self.estimate_s or 0.0), PATIENCE * (self.estimate_s or math.inf)
        if rehearsed:
            least, most = 0.0, REHEARSED_S
        return min(room, most) if room > 0 and room >= least else None

    def words(self, tries: int = 0, rehearsed: bool = False) -> list[str]:
        """The command line of its sweep; its rounds are halved with each slot in which it was started before (`tries`)."""
        chosen = {"sweep": self.sweep, **self.overrides}
        if isinstance(rounds := chosen.get("rounds"), int):
            chosen["rounds"] = max(min(LEAST_ROUNDS, rounds), rounds >> tries)
        chosen |= self.small if rehearsed else {}
        return [f"{key}={_word(value)}" for key, value in chosen.items()]


@dataclass(slots=True)
class Progress:
    """What has become of a part; stored in `_run.json` of the sweep.

    Attributes:
        done: nothing is left to measure.
        ok: done, something was measured, and nothing failed.
        tries: slots in which it was started, also those that were killed; a refusal is none.
        seconds: that it has taken.
        exit: code of its sweep the last time; None where it was not started, or interrupted.
        cause: why it is not ok.
        reason: the same in words, for people.
        statuses: its rows by status.
    """

    done: bool = False
    ok: bool = False
    tries: int = 0
    seconds: float = 0.0
    exit: int | None = None
    cause: Cause = Cause.NONE
    reason: str = ""
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether there is something left to do, and a try to do it in."""
        return not self.done and self.tries < TRIES

    def as_json_dict(self) -> dict[str, Any]:
        """For `_run.json`."""
        return {**dataclasses.asdict(self), "cause": str(self.cause)}

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> Progress:
        """What `as_json_dict` made."""
        known = {f.name: stored[f.name] for f in dataclasses.fields(cls) if f.name in stored}
        return cls(**{**known, "cause": Cause(known.get("cause", ""))})

    def settle(self, frame: pd.DataFrame | None) -> None:
        """Sets what has become of it, from its rows (None: it has stored none) and the exit code of its sweep."""
        self.done = self.ok = False
        early = {None: Cause.INTERRUPTED, CUT: Cause.BUDGET}.get(self.exit, Cause.ERROR)
        self.cause, self.reason = early, "it ended early; see what it printed"
        if frame is None:
            return
        self.statuses = dict(Counter(frame["status"]))
        left = frame["retryable"] | (frame["status"] == "partial")  # resume= would measure it
        failed = frame["status"] == "failed"
        self.done = self.exit in (0, 1) and not left.any()
        self.ok = self.done and self.exit == 0 and not failed.any() and self.statuses.get("ok", 0) > 0
        told = frame[failed & ~left]  # a failure that no resume= would measure again is its cause
        if told.empty and self.exit == 0:
            told = frame[left] if left.any() else frame
        if self.ok:
            self.cause, self.reason = Cause.NONE, ""
        elif len(told):
            row = told.sort_values("status", kind="stable").iloc[0]  # a failed one before a skipped one
            self.cause, self.reason = Cause(row["cause"] or Cause.ERROR), str(row["reason"])


def parts_of(config: Mapping[str, Any]) -> list[Part]:
    """The parts of a composed configuration in the order in which they are started; none where its parts are suites.

    Raises:
        UsageError: some parts are sweeps and others suites, or an estimate is no time.
    """
    named: dict[str, Any] = config["parts"]
    if not any(part["sweep"] for part in named.values()):
        return []
    found = []
    for name, part in named.items():
        if not part["sweep"] or any(
            part[key] not in ("???", [], {}) for key in ("suite", "axes", "shapes", "arms")
        ):
            raise UsageError(
                f"part {name} is to be a sweep, as others are: parts.{name}.sweep=NAME, overrides.KEY=VALUE"
            )
        seconds = part["estimate_s"]
        if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"parts.{name}.estimate_s={seconds:g}: expected a finite number above 0")
        own = {key: part[key] for key in ("sweep", "about", "priority", "estimate_s")}
        own |= {key: _flat({**_flat(config[key]), **_flat(part[key])}) for key in ("overrides", "small")}
        found.append(Part(name, **own))
    return sorted(found, key=lambda part: part.priority)


def timetable(parts: Sequence[Part], slot_s: float) -> Iterator[tuple[int, float, Part]]:
    """Slot and begin of each part, if every one took its estimate; those that no slot has room for are left out."""
    left, slot, started = list(parts), 0, True
    while started:
        slot, now, started = slot + 1, 0.0, False
        for part in tuple(left):
            if part.seconds(slot_s - now - RESERVE_S) is not None:
                yield slot, now, part
                now, started = now + (part.estimate_s or 0.0), True
                left.remove(part)


def describe(parts: Sequence[Part], slot_s: float, missing: Mapping[str, str]) -> Iterator[str]:
    """The lines that `dry_run=true` prints."""
    yield "slot  begins  seconds  part"
    left = {part.name: missing.get(part.name) or f"slots of {slot_s:g} s are too short" for part in parts}
    for slot, begins, part in timetable([part for part in parts if part.name not in missing], slot_s):
        clock = f"{int(begins) // 60}:{int(begins) % 60:02d}"
        yield f"{slot:>4}  {clock:>6}  {part.estimate_s or 0:>7.0f}  {part.name:<17}{part.about}"
        del left[part.name]
    yield from (f"   -       -        -  {name:<17}skipped: {why}" for name, why in left.items())
    yield "nothing was measured (dry_run=true)"


def within(seconds: float, work: Callable[[], int]) -> int:
    """Does work in this process and returns its exit code; `CUT` where it was interrupted because it took too long.

    Raises:
        KeyboardInterrupt: this process was told to end meanwhile.
    """
    with interruptible() as interrupts:
        interrupts.forget()
        deadline = threading.Timer(min(max(seconds, 0.0), threading.TIMEOUT_MAX), interrupts.cut_off)
        deadline.daemon = True
        code = CUT
        try:
            deadline.start()
            try:
                code = work()
            finally:
                deadline.cancel()
        except KeyboardInterrupt:
            if not interrupts.cut:
                raise
        cut, heard = interrupts.cut, interrupts.heard
        interrupts.forget()
        if heard:  # the sweep has recorded how it ended; so must the whole
            raise KeyboardInterrupt
    return CUT if cut else code


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
        self.parts, self.rehearsed = parts_of(self.config), rehearsed(self.config)
        self.passed_on = _passed_on(request.overrides)
        self.missing = missing(self.config, self.parts)
        self._writer, self._measure, self._clock, self._note = writer, measure, clock, note
        stored = store.read_about(folder).get("parts", {})
        self.state = {p.name: Progress.of_json(stored.get(p.name, {})) for p in self.parts}

    def slot(self) -> list[str]:
        """Starts what the time budget has room for; returns `left`.

        Raises:
            KeyboardInterrupt: it was told to end; what is done is stored.
        """
        budget = self.config["budget_s"]
        ends = self._clock() + (math.inf if budget is None else budget)
        try:
            for part in self.parts:
                mine = self.state[part.name]
                seconds = part.seconds(ends - self._clock() - RESERVE_S, self.rehearsed)
                if part.name in self.missing:
                    mine.cause, mine.reason = Cause.MISSING, self.missing[part.name]
                elif mine.open and seconds is not None:
                    self._one(part, mine, seconds)
                elif mine.open and not mine.cause:
                    mine.cause, mine.reason = Cause.BUDGET, "the slot had no time for it; resume= starts it"
        finally:
            self._save()
        return self.left()

    def left(self) -> list[str]:
        """Names of the parts that another slot would start."""
        return [name for name, mine in self.state.items() if mine.open and name not in self.missing]

    def lost(self) -> list[str]:
        """Names of the parts that were given up."""
        return [name for name, mine in self.state.items() if not mine.done and not mine.open]

    def _one(self, part: Part, mine: Progress, seconds: float) -> None:
        started, words = self._clock(), self.words(part, mine, seconds)
        mine.tries, mine.exit = mine.tries + 1, None
        mine.cause, mine.reason = Cause.INTERRUPTED, "its process ended without a word"
        self._save(part.name)  # it has had this try, whatever becomes of this process
        before = self._files(part)
        try:
            mine.exit = self._measure(words, seconds)
        finally:  # whatever ends the slot, what is done so far is stored and gathered
            if mine.exit == 2 and self._files(part) == before:
                mine.tries -= 1
                mine.cause, mine.reason = Cause.REFUSED, "it has stored nothing; see what it printed"
            elif isinstance(sys.exception(), KeyboardInterrupt | None):
                run = self.run_of(part)
                mine.settle(None if run is None else store.read(run))
            mine.seconds += self._clock() - started
            self._save()
            self.gather()

    def words(self, part: Part, mine: Progress, seconds: float) -> list[str]:
        """The command line of a part."""
        keys = {
            "device": self.config["device"],
            "results_dir": self.folder,
            "reports_dir": self.folder,
            "report": "false",
            "run_id": self._run_of(part).name,
        }
        if seconds < math.inf:
            keys["budget_s"] = f"{0.9 * seconds:g}"  # no case is started that would be cut off at once
        if _needs_text(part):
            keys["data_path"] = _text(self.config)
        own = part.words(mine.tries, self.rehearsed)
        return [*own, *(f"{key}={value}" for key, value in keys.items()), *self.passed_on]

    def run_of(self, part: Part) -> Path | None:
        """The folder of a part's run, if it has rows."""
        return self._run_of(part) if self._files(part) else None

    def _run_of(self, part: Part) -> Path:
        return self.folder / part.sweep / f"{self.folder.name}-{part.name}"

    def _files(self, part: Part) -> set[Path]:
        return set(self._run_of(part).rglob("*.parquet"))

    def _save(self, under_way: str = "") -> None:
        self._writer.record(parts={name: mine.as_json_dict() for name, mine in self.state.items()})
        done = [name for name, mine in self.state.items() if mine.done]
        self._note(
            share=len(done) / len(self.state),
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
        took = f"exit {mine.exit}, {mine.seconds:.0f} s, " if mine.tries else ""
        rows = ", ".join(f"{count} {status}" for status, count in sorted(mine.statuses.items()))
        outcome = "done" if mine.done else "unfinished" if mine.open else f"given up after {TRIES} tries"
        why = f", {mine.cause}: {mine.reason}" if mine.cause else ""
        return f"{part.name:<17}{took}{outcome}{why}{f' ({rows})' * bool(rows)}"


def run_parts(request: Request, run_sweep: Callable[[Sequence[str]], int]) -> int:
    """Runs one slot; the exit code: 0 where no case failed and no part was given up so far, 2 where it was told to end, else 1.

    Raises:
        UsageError: the request is refused; nothing was written.
    """
    config, parts = request.config, parts_of(request.config)
    for word in request.overrides:
        if _key(word) not in PASSED_ON | OF_THE_WHOLE:
            raise UsageError(
                f"{word}: sweep {config['name']!r} is made of sweeps; write parts.NAME.overrides.{word}"
            )
    for part in parts:  # 0.1 s each, before the first one is started
        words = [*part.words(rehearsed=rehearsed(config)), *_passed_on(request.overrides)]
        try:
            load([*words, f"device={config['device']}"], lambda device: device)
        except UsageError as error:
            raise UsageError(f"part {part.name}: {error}") from error
    if config["dry_run"]:
        slot_s = math.inf if config["budget_s"] is None else config["budget_s"]
        sys.stdout.write("\n".join(describe(parts, slot_s, missing(config, parts))) + "\n")
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
        return within(seconds, lambda: _isolated(run_sweep, words))

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
    banner = REHEARSAL + "\n" if whole.rehearsed else ""
    out.write(banner)
    if config["run_id"] is None and config["resume"] is None:
        raw_output.say(run_folder.opening(whole.folder.name) + "\n")
    try:
        whole.slot()
    except KeyboardInterrupt:
        is_interrupted = True
    left, lost = whole.left(), whole.lost()
    state = "interrupted" if is_interrupted or left or lost else "finished"
    writer.close(state)
    note.write(
        state=state, message=f"left: {', '.join(left) or 'none'}; given up: {', '.join(lost) or 'none'}"
    )
    out.writelines(whole.line(part) + "\n" for part in whole.parts)
    out.write(f"results  {whole.folder}\n")
    rows = whole.gather()
    if rows is not None:
        runs = [
            run for part in whole.parts if (run := whole.run_of(part))
        ]  # in order, as the summary has them
        out.write(f"rows     {rows}\n")
        if config["report"]:
            out.write(f"report   {report.write_report(runs, rows.with_suffix('.html')).html}\n")
        out.writelines(f"{line}\n" for line in summary.lines(store.read(runs)))
    state = "what is left can't be measured here: see above" if lost or whole.missing else "nothing is left"
    nothing = f"{state}; run_id=NAME in place of resume= starts another run"
    out.write(f"left: {', '.join(left)}; resume={whole.folder.name} continues\n" if left else f"{nothing}\n")
    out.write(banner)
    if is_interrupted:
        return 2
    ended = [m.exit not in (0, None, CUT) or m.statuses.get("failed", 0) > 0 for m in whole.state.values()]
    return 1 if lost or any(ended) else 0


def _isolated(run_sweep: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Runs a sweep; whatever it raises is the end of that sweep alone."""
    try:
        return run_sweep(words)
    except UsageError as error:
        raw_output.say(f"error: {error}\n")
        return 2
    except Exception as error:  # noqa: BLE001 - the other parts go on
        return process_end.internal_error(error)


def rehearsed(config: Mapping[str, Any]) -> bool:
    """Whether the parts run in their small sizes: on a CPU, where they have some."""
    sizes = [config["small"], *(part["small"] for part in config["parts"].values())]
    return config["device"] == "cpu" and any(sizes)


def missing(config: Mapping[str, Any], parts: Sequence[Part]) -> dict[str, str]:
    """The parts that read nanoGPT's text where there is none, with the reason.

    Raises:
        UsageError: a file is named that is missing, or is not nanoGPT's text.
    """
    needing = [part.name for part in parts if _needs_text(part)]
    if not needing or _text(config):
        return {}
    return dict.fromkeys(
        needing, f"no text here: give data_path= nanoGPT's input.txt ({shakespeare.ADDRESS})"
    )


def _needs_text(part: Part) -> bool:
    return part.overrides.get("data") == "shakespeare"


def _text(config: Mapping[str, Any]) -> str:
    """The file of nanoGPT's text: the one that is named, else the copy in the cache; "" where there is neither."""
    if config["data_path"]:
        corpus("shakespeare", config["data_path"])  # refused here, not after minutes
        return str(config["data_path"])
    return str(shakespeare.kept()) if shakespeare.kept().is_file() else ""


def _passed_on(words: Sequence[str]) -> list[str]:
    return [word for word in words if _key(word) in PASSED_ON]


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].split(".")[0]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> _flat({"axes": {"M": 8}, "axes.K": 4})
    {'axes.M': 8, 'axes.K': 4}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _word(value: object) -> str:
    """A value as the command line has it.

    >>> _word([1, True, None, "a b"]), _word("bf16_eager")
    ('[1, true, null, "a b"]', 'bf16_eager')
    """
    plain = isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value)
    return str(value) if plain else json.dumps(value)
