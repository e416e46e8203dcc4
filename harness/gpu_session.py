"""`python -m harness gpu`: everything that is worth measuring on a GPU, in slots that can be cut and continued.

A lent or pre-empted GPU gives minutes, not hours. One call is one slot: it works through the stages until its
minutes are spent, packs what there is into at most eight files, and the next call goes on where it stopped.
Stage order is by what a reader misses most if the time runs out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness import environment, gpu_summary, store
from harness.errors import UsageError, unknown
from harness.measurement import BUDGET
from harness.report import write_report

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


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the session.

    Attributes:
        name: of the stage; "tests", or its sweep where `words` name none.
        minutes: that it may take over all slots.
        words: of the command line, beside those that every sweep gets.
        whole: one case, of which nothing is left if it is cut: it begins only in a slot that has all its minutes.
        file: that its rows are packed into, without ending; stages may share one.
    """

    name: str
    minutes: float
    words: tuple[str, ...] = ()
    whole: bool = False
    file: str = ""

    @property
    def packed(self) -> str:
        """Name of the file of its rows."""
        return f"{self.file or self.name}.parquet"


def _train(name: str, minutes: float, model: str, *words: str) -> Stage:
    """One case of sweep=train in blocks long enough for the energy meter, which moves ten times a second."""
    metered = ("timing.block_ms=2500", "timing.max_block_samples=250", "timing.max_seconds=60", "rounds=5")
    return Stage(name, minutes, ("sweep=train", f"model={model}", *words, *metered), whole=True, file="train")


_EAGER = "arms=[bf16_eager,tensorwise_eager,rowwise_eager,torchao_tensorwise_eager"
# 25 minutes in all, in three slots of 8.5 (tests to codes; accumulation, linear, peers and GPT-2; the Llamas). Arms of a training step are
# timed for 5 blocks of 2.5 s each, the baselines twice: 9 arms take two and a half minutes, compiling and checking them the rest.
STAGES = (
    Stage("tests", 2),
    Stage("ceilings", 1.5, file="kernels"),
    Stage("cast", 2, file="kernels"),
    Stage("gemm", 2.5, file="kernels"),
    Stage("codes", 0.5, file="kernels"),
    Stage("accumulation", 0.5, file="kernels"),
    Stage("linear", 3.5),
    Stage("peers", 2),
    _train(
        "train_llama3_8b", 6.5, "llama3_8b", "axes.layers=4", "axes.batch=4", "axes.seq=4096",
        "axes.compute=bf16",  # weights and activations, as FSDP's mixed precision computes; nocompile takes no other
        "arms=[bf16_eager,bf16_compile,bf16_fused_eager,tensorwise_eager,tensorwise_compile,tensorwise_fused_eager,"
        "torchao_tensorwise_eager,torchao_tensorwise_compile,nocompile_tensorwise_eager]",
    ),
    _train("train_llama3_1b", 2, "llama3_1b", "axes.batch=8", "axes.seq=2048", "axes.compute=bf16",
        f"{_EAGER},bf16_fused_eager,delayed_fused_eager]"),
    _train("train_gpt2", 2, "gpt2", "axes.batch=16", "axes.seq=1024", f"{_EAGER}]"),
)  # fmt: skip

Runner = Callable[[Sequence[str], float], tuple[int, str]]


def run_command(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Runs a command, shows its output as it comes, and returns exit code and output; 124 when it ran too long."""
    lines: list[str] = []
    with subprocess.Popen(
        command,
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
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
        code = process.wait()
        too_long = not deadline.is_alive()
        deadline.cancel()
        last.cancel()
    return (124 if too_long else code), "".join(lines)


class Session:
    """The state of a GPU session, kept in a file so that the next slot continues it.

    Args:
        results_dir: where runs and the session's state lie.
        out: the folder of the packed files.
        runner: runs a command; replaced in tests.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        results_dir: Path,
        out: Path,
        runner: Runner = run_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.results_dir, self.out, self._run, self._clock = results_dir, out, runner, clock
        self._path = results_dir / "gpu-session.json"
        self.state: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def slot(self, minutes: float) -> list[str]:
        """Works for at most `minutes`; returns the names of the stages that are left."""
        ends = self._clock() + minutes * 60
        for stage in STAGES:
            entry = self.state.setdefault(stage.name, {"done": False, "seconds": 0.0})
            # A stage that has spent its share makes room for the next; what it lacks stays named in its rows.
            left = min(ends - self._clock(), stage.minutes * 60 - entry["seconds"])
            enough = stage.minutes * 60 - entry["seconds"] if stage.whole else 20
            if entry["done"] or left < enough or left < 20:
                continue
            started = self._clock()
            (self._tests if stage.name == "tests" else self._sweep)(stage, entry, left)
            entry["seconds"] += self._clock() - started
            self._save()
            self.pack()  # whatever ends the slot, what is done so far is packed
        return [stage.name for stage in STAGES if not self.state.get(stage.name, {}).get("done")]

    def _tests(self, stage: Stage, entry: dict[str, Any], seconds: float) -> None:
        # Untested versions may warn, and a test file may lack a package: neither may cost the other tests.
        lenient = ["-W", "default", "--continue-on-collection-errors", "-rs"]
        code, output = self._run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", *lenient], seconds)
        entry.update(done=code != 124, exit=code, output=output[-200_000:])

    def _sweep(self, stage: Stage, entry: dict[str, Any], seconds: float) -> None:
        # The last case started inside the budget may run on for a while, hence the margin.
        named = stage.words or (f"sweep={stage.name}",)
        words = [
            *named,
            "device=cuda",
            f"budget_s={max(seconds - 30, 10):.0f}",
            f"results_dir={self.results_dir}",
        ]
        if entry.get("run"):
            words.append(f"resume={Path(entry['run']).name}")
        code, output = self._run([sys.executable, "-m", "harness", *words], seconds)
        found = re.findall(r"^results\s+(\S+)$", output, re.MULTILINE)
        if found:
            entry["run"] = found[-1]
        entry.update(exit=code, done=bool(found) and code in (0, 1) and not self._unmeasured(Path(found[-1])))

    def _unmeasured(self, run: Path) -> bool:
        return bool(store.read(run)["reason"].str.startswith(BUDGET).any())

    def _save(self) -> None:
        self.results_dir.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.state, indent=1))
        temporary.replace(self._path)

    def summary(self) -> list[str]:
        """What was measured so far, in at most 20 lines."""
        runs = [Path(entry["run"]) for entry in self.state.values() if entry.get("run")]
        tests = str(self.state.get("tests", {}).get("output", ""))
        return gpu_summary.lines(store.read(runs), tests) if runs else gpu_summary.of_tests(tests)

    def pack(self) -> list[Path]:
        """Gathers the session into at most eight files of at most 16 MiB each."""
        self.out.mkdir(parents=True, exist_ok=True)
        files: list[Path] = []
        runs: dict[str, list[Path]] = {}
        for stage in STAGES:
            if self.state.get(stage.name, {}).get("run"):
                runs.setdefault(stage.packed, []).append(Path(self.state[stage.name]["run"]))
        for name, members in runs.items():
            target = self.out / name
            frame = store.read(members)
            pq.write_table(pa.Table.from_pandas(frame, schema=store.SCHEMA, preserve_index=False), target)
            files.append(target)
        if runs:
            written = write_report(
                [run for members in runs.values() for run in members], self.out / "report.html"
            )
            files += [written.html, written.markdown]
        log = self.out / "tests.txt"
        log.write_text(self.state.get("tests", {}).get("output", "the tests did not run\n"))
        files.append(log)
        for path in files:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise UsageError(
                    f"{path} is {path.stat().st_size / 2**20:.1f} MiB, over 16 MiB; run fewer shapes"
                )
        return files


def main(argv: Sequence[str]) -> int:
    """Runs one slot; exit 0 when the tests passed so far and no case failed, else 1.

    Raises:
        UsageError: no GPU, or an unknown key.
    """
    options = {"minutes": "8.5", "out": "", "results_dir": "results"}
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
    environment.device_kind("cuda")
    results = Path(options["results_dir"])
    session = Session(results, Path(options["out"] or results / "gpu"))
    left = session.slot(minutes)
    files = session.pack()
    out = sys.stdout
    for stage in STAGES:
        entry = session.state.get(stage.name, {})
        state = "done" if entry.get("done") else "unfinished" if entry.get("seconds") else "not started"
        out.write(
            f"{stage.name:<15} {state:<12} exit {entry.get('exit', '-')}  {entry.get('seconds', 0):.0f} s\n"
        )
    for path in files:
        out.write(f"{path}  {path.stat().st_size / 2**20:.2f} MiB\n")
    if left:
        out.write(f"left: {', '.join(left)}; run the same command again to go on\n")
    for line in session.summary():
        out.write(line + "\n")
    bad = [name for name, entry in session.state.items() if entry.get("exit") not in (0, None, 124)]
    return 1 if bad else 0
