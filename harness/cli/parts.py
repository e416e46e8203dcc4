"""A sweep whose parts are sweeps: a list of runs, one after another by priority, within a time budget.

    results/<sweep>/<run_id>/_run.json              the whole, with what has become of each part
    results/<sweep>/<run_id>/<its sweep>/<run_id>-<part>/   the run of a part

One command is one slot of `budget_s`; resume= is the next one, which starts what is left, each part `TRIES` times. A part that
crashes, hangs or is refused costs that part alone, and one that is cut off keeps its finished rounds.
"""

from __future__ import annotations

import json
import math
import re
import signal
import sys
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
from harness.store.errors import UsageError
from harness.store.private import public
from harness.training.data import extent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pandas as pd

    from harness.cli.config import Request

REHEARSAL = "rehearsal on a CPU in tiny sizes: it proves the command, and nothing in it is a GPU's figure"
PATIENCE = 1.4  # a part may take so many times its estimate
TRIES = 3  # slots in which a part is started
RESERVE_S = 5.0  # of a slot, to store what there is
REHEARSED_S = 240.0  # of a part of a rehearsal: a CPU may be busy
CUT = 124  # exit code of a part that was cut off, as timeout(1) has it
LONGEST_S = 1e8  # that a timer takes
# Keys of a command line that belong to the whole; every part is given all others.
OF_THE_WHOLE = {
    "sweep", "device", "parts", "overrides", "small", "data_path", "budget_s", "resume", "run_id", "results_dir",
    "reports_dir", "report", "dry_run",
}  # fmt: skip
OF_ONE_SWEEP = ("shard",)  # a share of each part would pass for the whole


@dataclass(slots=True)
class Part:
    """One part, see `harness.cli.config.PartConfig`, and what has become of it, which `_run.json` of the whole keeps.

    Attributes:
        words: the command line of its sweep.
        done: nothing is left to measure.
        ok: done, something was measured, and nothing failed.
        tries: slots in which it was started, also those that were killed; a refusal is none.
        seconds: that it has taken.
        exit: code of its sweep the last time; None where it was not started, or interrupted.
        statuses: its rows by status.
    """

    name: str
    sweep: str
    about: str = ""
    priority: int = 0
    estimate_s: float | None = None
    rehearsed: bool = False
    words: list[str] = field(default_factory=list)
    done: bool = False
    ok: bool = False
    tries: int = 0
    seconds: float = 0.0
    exit: int | None = None
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether there is something left to do, and a try to do it in."""
        return not self.done and self.tries < TRIES

    def limit(self, room: float) -> float | None:
        """Seconds after which it is cut off; None where a slot has too little room for it."""
        least, most = 0.95 * (self.estimate_s or 0.0), PATIENCE * (self.estimate_s or math.inf)
        if self.rehearsed:
            least, most = 0.0, REHEARSED_S
        return min(room, most) if room > 0 and room >= least else None

    def settle(self, rows: pd.DataFrame) -> None:
        """Takes in what its rows say, beside the exit code of its sweep."""
        self.statuses = dict(Counter(rows["status"]))
        left = rows["retryable"] | (rows["status"] == "partial")  # resume= would measure it
        self.done = self.exit in (0, 1) and not left.any()
        self.ok = self.done and self.exit == 0 and "failed" not in self.statuses and "ok" in self.statuses

    def __str__(self) -> str:
        ended = "cut off" if self.exit == CUT else "interrupted" if self.exit is None else f"exit {self.exit}"
        state = "done" if self.done else "unfinished" if self.open else f"given up after {TRIES} tries"
        rows = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        begun = f"{ended}, {self.seconds:.0f} s" if self.tries or self.seconds else "not started"
        return f"{self.name:<17}{begun}, {state}{f': {rows}' * bool(rows)}"


KEPT = {"done", "ok", "tries", "seconds", "exit", "statuses"}


def parts_of(config: Mapping[str, Any]) -> list[Part]:
    """The parts of a composed configuration in the order in which they are started; none where its parts are suites.

    Raises:
        UsageError: some parts are sweeps and others suites, or an estimate is no time.
    """
    named: dict[str, Any] = config["parts"]
    if not any(part["sweep"] for part in named.values()):
        return []
    rehearsed = config["device"] == "cpu" and any(each["small"] for each in (config, *named.values()))
    found = []
    for name, part in named.items():
        if not part["sweep"] or any(
            part[key] not in ("???", [], {}) for key in ("suite", "axes", "shapes", "arms")
        ):
            raise UsageError(
                f"part {name} is to be a sweep, as others are: parts.{name}.sweep=NAME, overrides.KEY=VALUE"
            )
        seconds = part["estimate_s"]
        if seconds is not None and not 0 < seconds < math.inf:
            raise UsageError(f"parts.{name}.estimate_s={seconds:g}: expected a finite number above 0")
        given: dict[str, Any] = {"sweep": part["sweep"]}
        for key in ["overrides"] + ["small"] * rehearsed:
            given |= _flat(_flat(config[key]) | _flat(part[key]))
        if config["data_path"] and "data" in given:
            given["data_path"] = config["data_path"]
        own = {key: part[key] for key in ("sweep", "about", "priority", "estimate_s")}
        # A path stands as it is: JSON would escape what it holds
        words = [f"{key}={value if key == 'data_path' else _word(value)}" for key, value in given.items()]
        found.append(Part(name, **own, rehearsed=rehearsed, words=words))
    return sorted(found, key=lambda part: part.priority)


def timetable(parts: Sequence[Part], slot_s: float) -> Iterator[tuple[int, float, Part]]:
    """Slot and begin of each part, if every one took its estimate; slot 0: none has room for it."""
    left, slot = list(parts), 1
    while left:
        now, before = 0.0, len(left)
        for part in tuple(left):
            if part.limit(slot_s - now - RESERVE_S) is not None:
                yield slot, now, part
                now += part.estimate_s or 0.0
                left.remove(part)
        if len(left) == before:
            yield from ((0, 0.0, part) for part in left)
            return
        slot += 1


def within(seconds: float, work: Callable[[], int]) -> int:
    """Does work in this process and returns its exit code; `CUT` where it was interrupted because it took too long.

    Raises:
        KeyboardInterrupt: this process was told to end meanwhile.
    """
    late, code = [], CUT
    with interruptible() as interrupts:

        def cut(*_: object) -> None:
            late.append(True)
            if not interrupts.heard:  # else it records already how it ended
                interrupts.interrupt()

        before = signal.signal(signal.SIGALRM, cut)
        try:
            signal.setitimer(signal.ITIMER_REAL, min(max(seconds, 1e-3), LONGEST_S))
            code = work()
        except KeyboardInterrupt:
            if not late:
                raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if interrupts.heard:  # the sweep has recorded how it ended; so must the whole
            raise KeyboardInterrupt
        interrupts.rearm()
    return CUT if late else code


def run_parts(request: Request, run_sweep: Callable[[Sequence[str]], int]) -> int:
    """Runs one slot; the exit code: 0 where no case failed and no part was given up so far, 2 where it was told to end, else 1.

    Raises:
        UsageError: the request is refused; nothing was written.
    """
    config, parts = request.config, parts_of(request.config)
    for key in OF_ONE_SWEEP:
        if config[key] is not None:
            raise UsageError(
                f"{key}={config[key]}: sweep {config['name']!r} is made of sweeps; name one of them"
            )
    passed_on = [w for w in request.overrides if re.split(r"[.=]", w.lstrip("+~"))[0] not in OF_THE_WHOLE]
    for part in parts:  # 0.1 s each, before the first one is started
        part.words += [f"device={config['device']}", *passed_on]
        try:
            own = load(part.words, lambda device: device).config
            if own["data"] and own["data_path"] and own["data"] != "bin":  # that needs the model too
                extent(own["data"], own["data_path"])  # refused here, not after minutes
        except UsageError as error:
            raise UsageError(f"part {part.name}: {error}") from error
    slot_s = math.inf if config["budget_s"] is None else config["budget_s"]
    if config["dry_run"]:
        sys.stdout.write("slot  begins  seconds  part\n")
        for slot, begins, part in timetable(parts, slot_s):
            clock = f"{int(begins) // 60}:{int(begins) % 60:02d}" if slot else "-"
            why = part.about if slot else f"skipped: slots of {slot_s:g} s are too short"
            sys.stdout.write(
                f"{slot or '-':>4}  {clock:>6}  {part.estimate_s or 0:>7.0f}  {part.name:<17}{why}\n"
            )
        sys.stdout.write("nothing was measured (dry_run=true)\n")
        return 0
    from harness.engine.resume import changes, refuse  # torch

    facts = environment.fingerprint(config["device"])
    conditions = environment.env_id(facts), facts
    run_id, folder, kept = run_folder.chosen(config, facts, None)
    changed = changes(kept, [conditions]) if kept is not None and any(kept.rglob("*.parquet")) else []
    if not config["resume_anyway"]:
        refuse(run_id, changed)
    for key in ("results_dir", "reports_dir"):
        run_folder.refuse_unwritable(Path(config[key]), key)
    with (
        device_lock.held([gpu.uuid for gpu in places.of_command(config)]),
        interruptible(),
        run_folder.owned(folder, None),
    ):
        about: dict[str, Any] = {
            "made_by": "sweep",
            "command": command_line(request.overrides),
            "config": config,
            "mark": run_folder.mark(Path(config["results_dir"]), run_id, public(config)),
            "question": config["question"],
            "resumed_despite": changed,
            "parts": store.read_about(folder).get("parts", {}),
        }
        for part in parts:
            for key in KEPT & about["parts"].get(part.name, {}).keys():
                setattr(part, key, about["parts"][part.name][key])
        writer = runlog.LoggingWriter(
            folder, run_id=run_id, sweep=config["name"], env_id=conditions[0], env=facts, about=about
        )
        note = runlog.ProgressFile(writer)
        with runlog.recorded(writer, note):
            return _slot(config, parts, writer, note, time.monotonic() + slot_s, run_sweep)


def _slot(
    config: Mapping[str, Any],
    parts: Sequence[Part],
    writer: runlog.LoggingWriter,
    note: runlog.ProgressFile,
    ends: float,
    run_sweep: Callable[[Sequence[str]], int],
) -> int:
    """Starts what there is time for, then reports all that is stored."""
    whole, told = writer.folder, False
    banner = f"{REHEARSAL}\n" * any(part.rehearsed for part in parts)
    folders = {part.name: whole / part.sweep / f"{whole.name}-{part.name}" for part in parts}

    def save(under_way: str = "no part") -> None:
        writer.record(parts={p.name: {key: getattr(p, key) for key in KEPT} for p in parts})
        done = [part.name for part in parts if part.done]
        text = f"{under_way} is under way; done: {', '.join(done) or 'none'}"
        rows = dict(sum((Counter(part.statuses) for part in parts), Counter()))
        note.write(state="running", total=len(parts), share=len(done) / len(parts), statuses=rows, text=text)

    sys.stdout.write(banner)
    if config["run_id"] is None and config["resume"] is None:
        raw_output.say(run_folder.opening(whole.name) + "\n")
    save()
    try:
        for part in parts:
            limit = part.limit(ends - time.monotonic() - RESERVE_S)
            if not part.open or limit is None:
                continue
            folder, started = folders[part.name], time.monotonic()
            # It has had this try, whatever becomes of this process
            part.tries, part.exit = part.tries + 1, None
            save(part.name)
            words = [
                *part.words,
                f"results_dir={whole}",
                f"reports_dir={whole}",
                f"run_id={folder.name}",
                "report=false",
            ]
            if limit < math.inf:
                words.append(f"budget_s={0.9 * limit:g}")  # no case is started that would be cut off at once
            try:
                part.exit = within(limit, lambda words=words: run_sweep(words))  # type: ignore[misc]
            except UsageError as error:
                raw_output.refuse(error)
                part.exit, part.tries = 2, part.tries - 1
            except Exception as error:  # noqa: BLE001 - the other parts go on
                part.exit = process_end.internal_error(error)
            finally:  # whatever ends the slot, what is done so far is stored
                part.seconds += time.monotonic() - started
                if any(folder.rglob("*.parquet")):
                    part.settle(store.read(folder))
                save()
    except KeyboardInterrupt:
        told = True
    left = [part.name for part in parts if part.open]
    lost = [part.name for part in parts if not part.done and not part.open]
    state = "interrupted" if told or left or lost else "finished"
    writer.close(state)
    note.write(
        state=state, message=f"left: {', '.join(left) or 'none'}; given up: {', '.join(lost) or 'none'}"
    )
    sys.stdout.write("".join(f"{part}\n" for part in parts) + f"results  {whole}\n")
    # In order, as the summary has them
    if runs := [run for run in folders.values() if any(run.rglob("*.parquet"))]:
        if config["report"]:
            page = report.write_report(runs, Path(config["reports_dir"]) / f"{whole.name}.html")
            sys.stdout.write(f"report   {page.html}\n")
        sys.stdout.write("".join(f"{line}\n" for line in summary.lines(store.read(runs))))
    nothing = "what is left was given up: see above" if lost else "nothing is left"
    goes_on = f"left: {', '.join(left)}; resume={whole.name} continues"
    sys.stdout.write(
        f"{goes_on if left else f'{nothing}; run_id=NAME in place of resume= starts another run'}\n{banner}"
    )
    wrong = bool(lost) or any(p.exit not in (0, None, CUT) or "failed" in p.statuses for p in parts)
    return 2 if told else int(wrong)


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
