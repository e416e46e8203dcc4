"""`python -m harness gpu`: everything that is worth measuring on a GPU, in slots that can be cut and continued.

A lent or pre-empted GPU gives minutes, not hours. One call is one slot: it works through the stages (`harness.gpu_stages`)
until its minutes are spent, packs what there is into at most eight files, and the next call goes on where it stopped.
Each stage has the id of its run before it starts, so that nothing but the case under way is lost, whatever ends a slot.

With device=cpu it is a rehearsal: the same session in tiny sizes, in results of its own, to prove the command itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness import environment, gpu_summary, store
from harness.advise.measured import Check, layers
from harness.advise.rates import rates_of
from harness.advise.recipes import candidates
from harness.ceilings import ceilings
from harness.data import corpus, shakespeare
from harness.errors import UsageError, unknown
from harness.gpu_stages import STAGES, Stage
from harness.hardware import lookup
from harness.measurement import BUDGET
from harness.processes import interruptible
from harness.report import write_report

if TYPE_CHECKING:
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
REHEARSED_MINUTES = 4.0
REHEARSAL = "rehearsal on a CPU in tiny sizes: it proves the command, and nothing in it is a GPU's figure"


Runner = Callable[[Sequence[str], float], tuple[int, str]]


# The kernel sends SIGTERM to what it becomes when the session has ended, also one that was killed: it leaves no sweep
# behind. 1 is PR_SET_PDEATHSIG (linux/prctl.h), which outlives exec; a preexec_fn would fork beside threads.
_ENDS_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
)


def run_command(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Runs a command, shows its output as it comes, and returns exit code and output; 124 when it ran too long.

    It ends when this process is told to end or is killed; KeyboardInterrupt goes on once it has.
    """
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", _ENDS_WITH_PARENT, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        # A sweep ends cleanly on SIGTERM and keeps its rows; the timer works while the command is silent too.
        deadline = threading.Timer(timeout_s, process.terminate)
        last = threading.Timer(
            timeout_s + 20, process.kill
        )  # a call that hangs in the driver hears no SIGTERM
        deadline.start()
        last.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                lines.append(line)
            code = process.wait()
            too_long = not deadline.is_alive()
        except KeyboardInterrupt:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
        finally:
            deadline.cancel()
            last.cancel()
    return (124 if too_long else code), "".join(lines)


class Session:
    """The state of a GPU session, kept in a file so that the next slot continues it.

    Args:
        results_dir: where runs and the session's state lie.
        out: the folder of the packed files.
        device: "cuda"; "cpu" rehearses.
        text: nanoGPT's text; None where there is none, and the stages that train on it are passed over.
        runner: runs a command; replaced in tests.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        results_dir: Path,
        out: Path,
        device: str = "cuda",
        text: Path | None = None,
        runner: Runner = run_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.results_dir, self.out, self.device, self.text = results_dir, out, device, text
        self._run, self._clock = runner, clock
        self._path = results_dir / "gpu-session.json"
        self.state: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def slot(self, minutes: float) -> list[str]:
        """Works for at most `minutes`; returns the names of the stages that another slot would go on with.

        Raises:
            KeyboardInterrupt: it was told to end; what is done is stored and packed.
        """
        ends = self._clock() + minutes * 60
        for stage in STAGES:
            entry = self.state.setdefault(stage.name, {"done": False, "seconds": 0.0})
            own, rest = self._seconds(stage) - entry["seconds"], ends - self._clock()
            # A stage that has spent its share makes room for the next; what it lacks stays named in its rows.
            whole = stage.whole and self.device == "cuda"  # in a rehearsal each takes seconds
            left = rest if whole else min(rest, own)
            # With less than that a stage would start one case, if any.
            least = own if whole else min(own, stage.last_start_s + 20)
            if not self._open(stage) or left < max(least, 20):
                continue
            started = self._clock()
            try:
                (self._tests if stage.name == "tests" else self._sweep)(stage, entry, left)
            finally:  # whatever ends the slot, what is done so far is packed
                entry["seconds"] += self._clock() - started
                self._save()
                self.pack_rows()
        return [stage.name for stage in STAGES if self._open(stage)]

    def _seconds(self, stage: Stage) -> float:
        """That a stage may take over all slots; of a rehearsal no minute is dear, and a CPU may be busy."""
        return 60 * (stage.minutes if self.device == "cuda" else max(stage.minutes, REHEARSED_MINUTES))

    def _open(self, stage: Stage) -> bool:
        """Whether there is something to do, and time of its own to do it in."""
        entry = self.state.get(stage.name, {"done": False, "seconds": 0.0})
        return not (entry["done"] or self.passed_over(stage) or self._seconds(stage) - entry["seconds"] < 20)

    def passed_over(self, stage: Stage) -> str:
        """Why a stage cannot be had here, and what it wants; "" if it can."""
        if not stage.reads_text or self.text is not None:
            return ""
        return (
            f"no text here: copy nanoGPT's input.txt ({shakespeare.ADDRESS}) into this folder, not ignored by git, and "
            "give text=input.txt"
        )

    def told(self, stage: Stage) -> str:
        """What has become of a stage."""
        entry = self.state.get(stage.name, {})
        if entry.get("done"):
            return "done"
        if why := self.passed_over(stage):
            return f"passed over: {why}"
        if not entry.get("seconds"):
            return "not started"
        return "unfinished" if self._open(stage) else "cut: its minutes are spent"

    def _tests(self, stage: Stage, entry: dict[str, Any], seconds: float) -> None:
        # Untested versions may warn, and a test file may lack a package: neither may cost the other tests.
        lenient = ["-W", "default", "--continue-on-collection-errors", "-rs"]
        some = stage.small if self.device == "cpu" else ()
        # Nearly all of their time is that of Triton's compiler, which has the cores of the machine to itself.
        several = importlib.util.find_spec("xdist") is not None and self.device == "cuda"
        spread = ["-n", "8", "--dist", "worksteal"] if several else []
        which = "gpu and not alone" if several else "gpu"
        code, output = self._run(
            [sys.executable, "-m", "pytest", "-q", "-m", which, *spread, *lenient, *some], seconds
        )
        entry.update(done=code != 124, exit=code, output=output[-200_000:])

    def _sweep(self, stage: Stage, entry: dict[str, Any], seconds: float) -> None:
        if "run_id" not in entry:
            entry["run_id"] = store.new_run_id(environment.commit_here())
            self._save()  # before it starts: a session that is killed goes on with that run
        words = [
            *stage.command(self.device),
            f"device={self.device}",
            f"budget_s={max(seconds - stage.last_start_s, 10):.0f}",
            f"results_dir={self.results_dir}",
            f"reports_dir={self.results_dir / 'reports'}",
            f"run_id={entry['run_id']}",
            *([f"data_path={self.text}"] if stage.reads_text else []),
            *self._rates(stage),
        ]
        code, _ = self._run([sys.executable, "-m", "harness", *words], seconds)
        run = self._run_of(stage)
        entry.update(exit=code, done=run is not None and code in (0, 1) and not self._unmeasured(run))

    def _rates(self, stage: Stage) -> list[str]:
        """Where a stage finds rates measured here; without them it takes published ones. A CPU is advised nothing."""
        measured = next((self._run_of(s) for s in STAGES if s.name == "ceilings"), None)
        wanted = stage.reads_ceilings and self.device == "cuda"
        return [f"ceilings={measured}"] if wanted and measured is not None else []

    def _run_of(self, stage: Stage) -> Path | None:
        """The folder of a stage's run, if it has rows."""
        run_id = self.state.get(stage.name, {}).get("run_id")
        folder = self.results_dir / stage.sweep / run_id if run_id else None
        return folder if folder is not None and any(folder.rglob("*.parquet")) else None

    def _unmeasured(self, run: Path) -> bool:
        return bool(store.read(run)["reason"].str.startswith(BUDGET).any())

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
        """Gathers rows and what the tests printed; quick enough to be done after each stage."""
        self.out.mkdir(parents=True, exist_ok=True)
        files: list[Path] = []
        for name, members in self._runs().items():
            files.append(self.out / name)
            frame = store.read(members)
            pq.write_table(pa.Table.from_pandas(frame, schema=store.SCHEMA, preserve_index=False), files[-1])
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


def predicted_layers(frame: pd.DataFrame) -> list[Check]:
    """The prediction of `advise` beside each layer that was measured; none where the peak of the GPU is not known."""
    env = json.loads(frame["env"].iloc[0] or "{}")
    name, memory = env.get("gpu"), env.get("gpu_memory_gib")
    device = lookup(name, memory, env.get("power_limit_w")) if name and memory else None
    if device is None:
        return []
    rates = rates_of(device, ceilings(frame))
    return layers(frame, rates, lambda recipe, compiled: candidates(compiled).get(recipe))


def main(argv: Sequence[str]) -> int:
    """Runs one slot; exit 0 when the tests passed so far and no case failed, 2 when it was told to end, else 1.

    Raises:
        UsageError: no GPU, another text than nanoGPT's, or an unknown key.
    """
    options = {"minutes": "8.5", "out": "", "results_dir": "", "text": "", "device": "cuda"}
    for word in argv:
        key, _, value = word.partition("=")
        if key not in options:
            raise unknown("key", key, options)
        options[key] = value
    try:
        minutes = float(options["minutes"])
    except ValueError:
        raise UsageError(f"minutes={options['minutes']!r} is no number") from None
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
        out.write(f"{stage.name:<15} {seconds}{session.told(stage)}\n")
    for path in files:
        out.write(f"{path}  {path.stat().st_size / 2**20:.2f} MiB\n")
    if told_to_end:
        out.write("told to end; run the same command again to go on\n")
    elif left:
        out.write(f"left: {', '.join(left)}; run the same command again to go on\n")
    for line in session.summary():
        out.write(line + "\n")
    if device == "cpu":
        out.write(REHEARSAL + "\n")
    if told_to_end:
        return 2
    bad = [name for name, entry in session.state.items() if entry.get("exit") not in (0, None, 124)]
    return 1 if bad else 0


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
