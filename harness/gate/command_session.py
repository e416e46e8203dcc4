"""Command session: rounds of a user's benchmark command in two work trees, one fresh process after the other.

The command is a shell line. Where it holds `{out}`, it writes pytest-benchmark JSON there and each benchmark is a unit by
its fullname; without `{out}` its wall time is the only unit. A round runs the command once a side, in random order, so the
round is the datum, as in `harness.gate.session`. Each run has to prove which tree it ran (`harness.gate.tree_proof`).
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.gate.benchmark_files import ARM, SUITE, environment_of, read_document, row_of
from harness.gate.codes import Exit, GateError
from harness.gate.session import OutOfTimeError, Session, SideError
from harness.gate.tree_proof import RECORDER, VARIABLE, Trees, read_modules, unproven
from harness.machine.environment import env_id
from harness.machine.processes import MARK, interruptible, marked
from harness.store.arm import Arm
from harness.store.case import Case
from harness.store.errors import UsageError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

    from harness.gate.collect import Collected
    from harness.gate.session import Tell

OUT = "{out}"
WALL = "wall time"
NAMED = 5  # benchmarks that a message names
KILLER = "import sys\nfrom harness.machine.processes import kill_marked\nsys.stdin.read()\nkill_marked(sys.argv[1])\n"


@dataclass(frozen=True)
class BenchmarkCommand:
    """What a user measures.

    Attributes:
        line: the shell line, with or without `{out}`.
        trees: the work trees, and what proves that each was run.
        inside: folder below a tree that is current while the command runs.
        scratch: temporary folder for what the command writes.
        commits: commit of each tree, as a fingerprint names it.
        unproven_ok: a side need not prove that it ran its own tree.
    """

    line: str
    trees: Trees
    inside: str
    scratch: Path
    commits: Mapping[str, Mapping[str, Any]]
    unproven_ok: bool = False

    @property
    def writes_json(self) -> bool:
        """Whether the command writes pytest-benchmark JSON."""
        return OUT in self.line


@dataclass(frozen=True)
class Run:
    """One run of the command on one side. `fault` is "" where it worked."""

    seconds: float
    fault: str = ""
    document: dict[str, Any] = field(default_factory=dict)
    out: Path = Path()


@dataclass(slots=True)
class CommandSession(Session):
    """A session whose rounds are runs of a command."""

    benchmark: BenchmarkCommand = None  # type: ignore[assignment] # always given; the base class has defaults
    proven: dict[str, int] = field(
        default_factory=dict
    )  # modules of its own tree that a side imported, the fewest
    written: dict[str, frozenset[str]] = field(default_factory=dict)  # names of the benchmarks of a side
    runs: int = 0  # complete rounds
    warm: bool = False

    def stage(
        self,
        number: int,
        pairs: int,
        only: Sequence[str] = (),
        ends: float = math.inf,
        least: int = 1,
        reserve: int = 0,
    ) -> int:
        """Measures one stage. Where the wall time is judged, each tree is run once before: it writes its byte code then."""
        self._ends = ends
        if not self.benchmark.writes_json and not self.warm:
            try:
                self._check_faults({side: self._run(side) for side in sorted(self.trees)})
            except OutOfTimeError:
                return 0
        self.warm = True
        return Session.stage(self, number, pairs, only, ends, least, reserve)  # slots: no super()

    def measure_round(
        self,
        index: int,
        sides: Sequence[str],
        collected: dict[str, Collected],
        only: set[str],
        order: random.Random,
    ) -> None:
        """Runs the command once on each side.

        Raises:
            SideError: it fails on one side in the first round.
            GateError: it fails on both, or on one that had worked; or a side did not run its own tree.
            OutOfTimeError: the time is over.
        """
        results = {side: self._run(side) for side in sides}
        self._check_faults(results)
        rows = {side: self._rows(run) for side, run in results.items()}
        if not set(rows["baseline"]) & set(rows["candidate"]):
            only_on = "; ".join(f"only on the {s}: {_some(list(rows[s]))}" for s in ("baseline", "candidate"))
            raise GateError(Exit.NO_BASELINE, f"the two sides have no benchmark in common, {only_on}")
        for side in sides:
            names = frozenset(rows[side])
            if odd := self.written.setdefault(side, names) ^ names:
                raise GateError(
                    Exit.INCONCLUSIVE,
                    f"the {side} does not write the same benchmarks each time, so rounds are no repetitions: "
                    f"{_some(sorted(odd))}",
                )
        for side, run in results.items():
            here = collected[side]
            here.env = self._env(side, run)
            here.env_id = env_id(here.env)
            for row in rows[side].values():
                if not only or row["case_id"] in only:
                    here.take(index, [row])
        self.runs += 1

    def notes(self) -> list[str]:
        """What the verdict has to say about how the command was run."""
        lines = [f"the command, in fresh processes, one side after the other: {self.benchmark.line}"]
        if self.proven and min(self.proven.values()) > 0:
            counted = ", ".join(f"{side} {self.proven[side]}" for side in sorted(self.proven))
            lines.append(f"each side imported modules of its own work tree ({counted}) and none of another")
        else:
            lines.append("not proven that each side ran its own tree (--unproven-tree ok)")
        before, after = (self.written.get(side, frozenset()) for side in ("baseline", "candidate"))
        for side, names in (("baseline", before - after), ("candidate", after - before)):
            if names:
                judged = "lost" if side == "baseline" else "new, and not judged"
                lines.append(f"only on the {side} ({judged}): {_some(sorted(names))}")
        return lines

    def _run(self, side: str) -> Run:
        """One run of the command in a side's tree, and the proof of what it ran."""
        folder = self.benchmark.scratch / f"{side}-{time.monotonic_ns()}"
        (folder / "modules").mkdir(parents=True)
        out = folder / "benchmarks.json"
        line = self.benchmark.line.replace(OUT, shlex.quote(str(out)))
        env = recording(self.benchmark.scratch, folder / "modules")
        try:
            seconds, fault = run_shell(
                line,
                self.trees[side] / self.benchmark.inside,
                self._ends - self.clock(),
                folder / "output",
                env,
            )
        except subprocess.TimeoutExpired as error:
            raise OutOfTimeError from error
        modules = read_modules(folder / "modules")
        proven = self.benchmark.trees.check(side, modules)
        if not fault:
            self.proven[side] = min(proven, self.proven.get(side, proven))
        document: dict[str, Any] = {}
        if self.benchmark.writes_json:
            try:
                document = read_document(out)
            except UsageError as error:
                what = "it wrote no benchmark to {out}" if not out.exists() else str(error)
                fault = fault or f"{what}; {_last_line(folder / 'output')}"
        shutil.rmtree(folder / "modules")
        return Run(seconds, fault, document, out)

    def _check_faults(self, results: dict[str, Run]) -> None:
        """Refuses a round in which the command failed, or a side did not run its tree."""
        bad = {side: run.fault for side, run in results.items() if run.fault}
        if len(bad) == len(results):
            reasons = "; ".join(f"{side}: {fault}" for side, fault in sorted(bad.items()))
            raise GateError(
                Exit.USAGE, f"the command works on neither side ({reasons}): {self.benchmark.line}"
            )
        idle = [side for side, run in results.items() if not run.fault and not self.proven.get(side)]
        if idle and not self.benchmark.unproven_ok:
            raise unproven(sorted(idle))
        for side, fault in bad.items():
            if self.runs:
                raise GateError(
                    Exit.INCONCLUSIVE,
                    f"the command failed on the {side} after {self.runs} rounds in which it worked: {fault}",
                )
            raise SideError(side, fault)

    def _rows(self, run: Run) -> dict[str, dict[str, Any]]:
        """Rows by benchmark, as `Collected.take` reads them."""
        if not self.benchmark.writes_json:
            return {WALL: _row(WALL, (1e3 * run.seconds,), {"timed": "the whole command"})}
        rows: dict[str, dict[str, Any]] = {}
        for test in run.document["benchmarks"]:
            measured = row_of(test, run.out)
            name = str(test["fullname"])
            if name in rows:
                raise GateError(
                    Exit.USAGE, f"two benchmarks are named {name}; a name decides which ones are compared"
                )
            rows[name] = _row(name, measured.samples, measured.resolved)
        return rows

    def _env(self, side: str, run: Run) -> dict[str, Any]:
        """The environment as the benchmark file states it, with the commit of the work tree."""
        here = {
            "machine_info": {
                "machine": platform.machine(), "system": platform.system(), "release": platform.release(),
                "node": platform.node(), "cpu": {"count": os.cpu_count()},
            }
        }  # fmt: skip
        env = environment_of(run.document or here)
        return {**env, **self.benchmark.commits[side], "imported_from": None}


def prepare_trees(command: str, benchmark: BenchmarkCommand, tell: Tell) -> None:
    """Runs a set-up command once in each tree.

    Raises:
        SideError: it fails on one side.
        GateError: it fails on both (exit 2).
    """
    faults = {}
    for side, tree in sorted(benchmark.trees.trees.items()):
        folder = tree / benchmark.inside
        output = benchmark.scratch / f"setup-{side}"
        seconds, fault = run_shell(command, folder, None, output, dict(os.environ))
        tell(f"set up the {side} in {seconds:.0f} s")
        if fault:
            faults[side] = f"--setup: {fault}"
    if len(faults) > 1:
        raise GateError(Exit.USAGE, f"the set-up fails on both sides ({faults['candidate']}): {command}")
    for side, fault in faults.items():
        raise SideError(side, fault)


def recording(scratch: Path, folder: Path) -> dict[str, str]:
    """The environment in which Python processes record into `folder` what they imported."""
    site = scratch / "site"
    if not site.exists():
        site.mkdir()
        shutil.copy(RECORDER, site / "sitecustomize.py")
    path = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        VARIABLE: str(folder),
        "PYTHONPATH": f"{site}{os.pathsep}{path}" if path else str(site),
    }


def run_shell(
    line: str, folder: Path, timeout_s: float | None, output: Path, env: dict[str, str]
) -> tuple[float, str]:
    """Runs a shell line in a group of its own; returns its seconds and its fault, "" where it worked.

    Raises:
        subprocess.TimeoutExpired: it was ended as the time was over.
    """
    if not folder.is_dir():
        return 0.0, f"the commit has no folder {folder.name}"
    if timeout_s is not None and timeout_s <= 0:
        raise subprocess.TimeoutExpired(line, timeout_s)
    with output.open("wb") as file:
        begun = time.perf_counter()
        process = subprocess.Popen(
            line, shell=True, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(None if timeout_s is None or math.isinf(timeout_s) else timeout_s)
            seconds = time.perf_counter() - begun
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return seconds, "" if code == 0 else f"exit code {code}; {_last_line(output)}"


@contextmanager
def contained() -> Iterator[None]:
    """Ends all processes that are started within when it is left, and also where this process is killed outright.

    A process of its own waits for the end of this one, and ends what carries its mark.
    """
    root = Path(__file__).resolve().parents[2]
    with interruptible(), marked():
        env = {n: v for n, v in os.environ.items() if n != MARK} | {"PYTHONPATH": str(root)}
        killer = subprocess.Popen(
            [sys.executable, "-c", KILLER, os.environ[MARK]],
            stdin=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        try:
            yield
        finally:
            assert killer.stdin is not None
            killer.stdin.close()
            killer.wait()


def _row(name: str, samples: tuple[float, ...], resolved: Any) -> dict[str, Any]:
    case = Case.of(SUITE, {"test": name})
    return {
        "suite": SUITE, "case_id": case.case_id, "axes": case.axes_json, "seed": case.seed, "arm": ARM, "baseline": "",
        "arm_fields": Arm(variant=ARM).as_json, "metric": "time_ms", "status": "ok", "samples": samples,
        "resolved": resolved,
    }  # fmt: skip


def _last_line(output: Path) -> str:
    """What a command said last that says something; pytest's own summary line comes after its reason."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("E  ") or "Error" in line]
    return (telling or lines or ["no output"])[-1][:300]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
