"""`python -m harness gpu`: everything that is worth measuring on a GPU, in slots that can be cut and continued.

A lent or pre-empted GPU gives minutes, not hours. One call is one slot: it works through the parts (`harness.cli.gpu.gpu_stages`)
until its minutes are spent, packs what there is into at most eight files, and the next call continues where it stopped
(`harness.cli.gpu.gpu_schedule`). Each part has the id of its run before it starts, and each finished round is stored, so that
only the current round is lost, however a slot ends.

With device=cpu it is a rehearsal: the same session in tiny sizes, in results of its own, to prove the command itself.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness import store
from harness.advise.measured import Check, layers
from harness.advise.rates import rates_of
from harness.advise.recipes import candidates
from harness.cli.gpu import gpu_schedule, gpu_smoke, gpu_summary
from harness.cli.gpu.gpu_commands import CUT, Runner, run_command, run_words
from harness.cli.gpu.gpu_stages import BUILD_S, STAGES, TRIES, Stage
from harness.machine import environment
from harness.machine.ceilings import ceilings
from harness.machine.hardware import lookup
from harness.machine.processes import interruptible
from harness.report import write_report
from harness.store.cause import Cause
from harness.store.errors import UsageError, unknown
from harness.store.json_columns import parse
from harness.training.data import corpus, shakespeare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd

NEEDED = (
    "hydra",
    "omegaconf",
    "yaml",
    "pandas",
    "pyarrow",
    "jinja2",
    "matplotlib",
    "itables",
    "rich",
    "psutil",
)
MAX_FILE_BYTES = 16 * 2**20
REHEARSAL = "rehearsal on a CPU in tiny sizes: it proves the command, and nothing in it is a GPU's figure"


class Session:
    """The state of a GPU session, kept in a file so that the next slot continues it.

    Args:
        results_dir: where runs and the session's state lie.
        out: the folder of the packed files.
        device: "cuda"; "cpu" rehearses.
        text: nanoGPT's text; None where there is none, and the parts that train on it are skipped.
        runner: runs a command; replaced in tests.
        sweeper: runs the words of a sweep; replaced in tests.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        results_dir: Path,
        out: Path,
        device: str = "cuda",
        text: Path | None = None,
        runner: Runner = run_command,
        sweeper: Runner = run_words,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.results_dir, self.out, self.device, self.text = results_dir, out, device, text
        self._run, self._sweep_words, self._clock = runner, sweeper, clock
        self._path = results_dir / "gpu-session.json"
        self.state: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def slot(self, minutes: float) -> list[str]:
        """Works for at most `minutes`; returns the names of the parts that another slot would continue.

        Raises:
            KeyboardInterrupt: it was interrupted; finished work is stored and packed.
        """
        ends, had = self._clock() + minutes * 60, list[str]()
        passed_over = {stage.name for stage in STAGES if self.passed_over(stage)}
        while turn := gpu_schedule.next_turn(self.state, ends - self._clock(), had, passed_over, self.device):
            stage, started = turn.stage, self._clock()
            had.append(stage.name)
            entry = self.state.setdefault(stage.name, {"done": False, "seconds": 0.0, "tries": 0})
            try:
                (self._tests if stage.name == "tests" else self._sweep)(stage, entry, turn.seconds)
                entry["tries"] += 1
            finally:  # whatever ends the slot, what is done so far is packed
                entry["seconds"] += self._clock() - started
                self._save()
                self.pack_rows()
        return [stage.name for stage in STAGES if self._open(stage)]

    def _open(self, stage: Stage) -> bool:
        """Whether another slot would begin it."""
        return gpu_schedule.is_open(stage, self.state) and not self.passed_over(stage)

    def passed_over(self, stage: Stage) -> str:
        """Why a part cannot be had here, and what it wants; "" if it can."""
        if not stage.reads_text or self.text is not None:
            return ""
        return (
            f"no text here: copy nanoGPT's input.txt ({shakespeare.ADDRESS}) into this folder, not ignored by git, and "
            "give text=input.txt"
        )

    def told(self, stage: Stage) -> str:
        """State of a part."""
        entry = self.state.get(stage.name, {})
        left_out = ", ".join(f"{arm} left out ({why})" for arm, why in entry.get("left_out", {}).items())
        if entry.get("done"):
            return f"done{f'; {left_out}' if left_out else ''}"
        if why := self.passed_over(stage):
            return f"skipped: {why}"
        if not entry.get("seconds"):
            return "not started"
        if entry.get("exit") == 2:
            return "refused or interrupted: see what it printed"
        if self._open(stage):
            return f"unfinished: {entry.get('kept', 'nothing stored yet')}"
        return f"cut off {TRIES} times: {entry.get('kept', 'nothing stored')}"

    def _tests(self, stage: Stage, entry: dict[str, Any], seconds: float) -> None:
        # Untested versions may warn, and a test file may lack a package: neither may cost the other tests.
        lenient = ["-W", "default", "--continue-on-collection-errors", "-rs", "-rf"]
        some = stage.small if self.device == "cpu" else stage.words  # by path: collecting all takes a minute
        # Nearly all of their time is that of Triton's compiler, which has the cores of the machine to itself.
        several = importlib.util.find_spec("xdist") is not None and self.device == "cuda"
        spread = ["-n", "8", "--dist", "worksteal"] if several else []
        which = "gpu and not alone" if several else "gpu"
        code, output = self._run(
            [sys.executable, "-m", "pytest", "-v", "-m", which, *spread, *lenient, *some], seconds
        )
        entry.update(done=code != CUT, exit=code, output=output[-200_000:])

    def _sweep(self, stage: Stage, entry: dict[str, Any], seconds: float) -> None:
        if "run_id" not in entry:
            entry["run_id"] = store.new_run_id(environment.commit_here())
            self._save()  # before it starts: a session that is killed goes on with that run
        bad = gpu_smoke.left_out(stage, self._frame_of("start", "smoke"))
        entry["left_out"] = bad
        if bad and set(stage.arms) <= set(bad):
            entry.update(done=True, exit=1)
            return
        words = [
            *stage.command(self.device, entry["tries"], tuple(bad)),
            f"device={self.device}",
            f"budget_s={max(seconds - stage.last_start_s, 10):.0f}",
            f"case_timeout_s={BUILD_S}",
            f"results_dir={self.results_dir}",
            f"reports_dir={self.results_dir / 'reports'}",
            "report=false",
            f"run_id={entry['run_id']}",
            *([f"data_path={self.text}"] if stage.reads_text else []),
            *self._rates(stage),
        ]
        code, _ = self._sweep_words(words, seconds)
        run = self._run_of(stage)
        frame = None if run is None else store.read(run)
        entry.update(exit=code, kept=gpu_smoke.kept(frame))
        entry["done"] = frame is not None and code in (0, 1) and not _unmeasured(frame)

    def _frame_of(self, *names: str) -> pd.DataFrame | None:
        """The rows of some parts; None where there are none."""
        runs = [run for stage in STAGES if stage.name in names and (run := self._run_of(stage))]
        return store.read(runs) if runs else None

    def _rates(self, stage: Stage) -> list[str]:
        """Where a part finds rates measured here; without them it takes published ones. A CPU is advised nothing."""
        measured = next((self._run_of(s) for s in STAGES if s.name == "ceilings"), None)
        wanted = stage.reads_ceilings and self.device == "cuda"
        return [f"ceilings={measured}"] if wanted and measured is not None else []

    def _run_of(self, stage: Stage) -> Path | None:
        """The folder of a part's run, if it has rows."""
        run_id = self.state.get(stage.name, {}).get("run_id")
        folder = self.results_dir / stage.sweep / run_id if run_id else None
        return folder if folder is not None and any(folder.rglob("*.parquet")) else None

    def _save(self) -> None:
        self.results_dir.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.state, indent=1))
        temporary.replace(self._path)

    def _runs(self) -> dict[str, list[Path]]:
        """The runs so far by the file that they are packed into."""
        found: dict[str, list[Path]] = {}
        for stage in STAGES:
            if (run := self._run_of(stage)) is not None:
                found.setdefault(stage.packed, []).append(run)
        return found

    def summary(self) -> list[str]:
        """What was measured so far, in at most 20 lines."""
        runs = [run for members in self._runs().values() for run in members]
        tests = str(self.state.get("tests", {}).get("output", ""))
        if not runs:
            return gpu_summary.of_tests(tests)
        frame = store.read(runs)
        return gpu_summary.lines(frame, tests, predicted_layers(frame))

    def pack_rows(self) -> list[Path]:
        """Gathers rows and what the tests printed; quick enough to be done after each part."""
        self.out.mkdir(parents=True, exist_ok=True)
        files: list[Path] = []
        for name, members in self._runs().items():
            files.append(self.out / name)
            frame = store.read(members)
            # Replaced at once: a process killed here, or a reader of the folder, must not meet half a file.
            whole = files[-1].with_suffix(".tmp")
            pq.write_table(pa.Table.from_pandas(frame, schema=store.SCHEMA, preserve_index=False), whole)
            whole.replace(files[-1])
        files.append(self.out / "tests.txt")
        files[-1].write_text(self.state.get("tests", {}).get("output", "the tests did not run\n"))
        return files

    def pack(self) -> list[Path]:
        """Gathers the session into at most eight files of at most 16 MiB each."""
        files = self.pack_rows()
        if runs := [run for members in self._runs().values() for run in members]:
            written = write_report(runs, self.out / "report.html")
            files += [written.html, written.markdown]
        for path in files:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise UsageError(
                    f"{path} is {path.stat().st_size / 2**20:.1f} MiB, over 16 MiB; run fewer shapes"
                )
        return files


def _unmeasured(frame: pd.DataFrame) -> bool:
    """Return whether a case was cut off or never started."""
    return bool(((frame["cause"] == Cause.BUDGET) | (frame["status"] == "partial")).any())


def predicted_layers(frame: pd.DataFrame) -> list[Check]:
    """The prediction of `advise` beside each layer that was measured; none where the peak of the GPU is not known."""
    env = parse(frame["env"].iloc[0])
    name, memory = env.get("gpu"), env.get("gpu_memory_gib")
    device = lookup(name, memory, env.get("power_limit_w")) if name and memory else None
    if device is None:
        return []
    rates = rates_of(device, ceilings(frame))
    return layers(frame, rates, lambda recipe, compiled: candidates(compiled).get(recipe))


def main(argv: Sequence[str]) -> int:
    """Run one slot; exit 0 when the tests passed so far and no case failed, 2 when it was interrupted, else 1.

    Raises:
        UsageError: no GPU, another text than nanoGPT's, or an unknown key.
    """
    options = {
        "minutes": "8.5",
        "out": "",
        "results_dir": "",
        "text": "",
        "device": "cuda",
        "dry_run": "false",
    }
    for word in argv:
        key, _, value = word.partition("=")
        if key not in options:
            raise unknown("key", key, options)
        options[key] = value
    try:
        minutes = float(options["minutes"])
    except ValueError:
        raise UsageError(f"minutes={options['minutes']!r} is no number") from None
    if not (math.isfinite(minutes) and minutes > 0):
        raise UsageError(f"minutes={options['minutes']}: expected a finite number above 0, such as 8.5")
    if options["dry_run"] not in ("true", "false"):
        raise UsageError(f"dry_run={options['dry_run']!r}: expected true or false")
    if options["dry_run"] == "true":
        return _dry_run(minutes, options)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"not installed: {', '.join(missing)}; where there is no network, `make wheels` elsewhere and here "
            "`make PY=python3 WHEELS=wheels gpu`"
        )
    device = options["device"]
    if device not in ("cuda", "cpu"):
        raise UsageError(f"device={device!r}: expected cuda, or cpu for a rehearsal in tiny sizes")
    try:
        environment.device_kind(device)
    except UsageError as error:
        raise UsageError(f"{error}; for this command device=cpu is a rehearsal in tiny sizes") from error
    results = Path(options["results_dir"] or ("results" if device == "cuda" else "results/rehearsal"))
    session = Session(results, Path(options["out"] or results / "gpu"), device, text_of(options["text"]))
    out = sys.stdout
    if device == "cpu":
        out.write(REHEARSAL + "\n")
    told_to_end, left = False, [stage.name for stage in STAGES]
    with interruptible():
        try:
            left = session.slot(minutes)
        except KeyboardInterrupt:
            told_to_end = True
    files = session.pack()
    for stage in STAGES:
        entry = session.state.get(stage.name, {})
        seconds = f"exit {entry.get('exit', '-')}, {entry['seconds']:.0f} s, " if entry.get("seconds") else ""
        out.write(f"{stage.name:<17}{seconds}{session.told(stage)}\n")
    for path in files:
        out.write(f"{path}  {path.stat().st_size / 2**20:.2f} MiB\n")
    if told_to_end:
        out.write("interrupted; run the same command again to continue\n")
    elif left:
        out.write(f"left: {', '.join(left)}; run the same command again to continue\n")
    for line in session.summary():
        out.write(line + "\n")
    if device == "cpu":
        out.write(REHEARSAL + "\n")
    if told_to_end:
        return 2
    bad = [name for name, entry in session.state.items() if entry.get("exit") not in (0, None, 124)]
    return 1 if bad else 0


def _dry_run(minutes: float, options: dict[str, str]) -> int:
    """Prints the timetable of a whole session; needs no GPU."""
    here = Session(Path(), Path(), options["device"], text_of(options["text"]))
    skipped = {stage.name: why for stage in STAGES if (why := here.passed_over(stage))}
    sys.stdout.write("\n".join(gpu_schedule.describe(minutes, skipped)) + "\n")
    return 0


def text_of(path: str) -> Path | None:
    """The file that `text=` names, else the copy in the cache; None where there is neither.

    Raises:
        UsageError: the file is missing, or is not nanoGPT's text.
    """
    if path:
        corpus("shakespeare", path)  # refused here, not after minutes
        return Path(path)
    kept = shakespeare.kept()
    return kept if kept.is_file() else None
