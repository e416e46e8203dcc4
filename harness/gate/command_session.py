"""Command session: rounds of a user's benchmark command in two work trees, one fresh process after the other.

The command is a shell line. Where it holds `{out}`, it writes pytest-benchmark JSON there and each benchmark is a unit by
its fullname; without `{out}` its wall time is the only unit. A round runs the command once a side, in random order, so the
round is the datum, as in `harness.gate.session`. Each run has to prove which tree it ran (`harness.gate.tree_proof`).
"""

from __future__ import annotations

import math
import os
import platform
import posixpath
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.gate.against import restore
from harness.gate.benchmark_files import ARM, SUITE, environment_of, read_document, row_of
from harness.gate.exit_code import Exit, GateError
from harness.gate.session import OutOfTimeError, PairedMeasurement, SideError
from harness.gate.shell import Fault, Kind, Ran, last_line, run_shell
from harness.gate.tree_proof import RECORDER, VARIABLE, Proof, Trees, read_modules, unproven
from harness.machine.environment import env_id
from harness.store.arm import Arm
from harness.store.case import Case
from harness.store.errors import UsageError

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from harness.gate.collect import Collected
    from harness.gate.session import Report

OUT = "{out}"
WALL = "wall time"
NAMED = 5  # benchmarks that a message names


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

    @property
    def new_path(self) -> str:
        """The first path that the command names and only the candidate's tree has; "" where there is none."""
        try:
            words = shlex.split(self.line)
        except ValueError:
            words = self.line.split()
        for name in (name for word in words for name in re.split("[=:]+", word)):
            path = posixpath.normpath(posixpath.join(self.inside, name))
            if name and path != "." and self._has("candidate", path) and not self._has("baseline", path):
                return name
        return ""

    def _has(self, side: str, path: str) -> bool:
        files = self.trees.files[side]
        return path in files or any(file.startswith(path + "/") for file in files)


@dataclass(frozen=True)
class Run:
    """One run of the command on one side. `fault` is None where it worked."""

    seconds: float
    fault: Fault | None = None
    document: dict[str, Any] = field(default_factory=dict)
    out: Path = Path()


@dataclass(slots=True)
class CommandSession(PairedMeasurement):
    """A session whose rounds are runs of a command."""

    benchmark: BenchmarkCommand = None  # type: ignore[assignment] # always given; the base class has defaults
    proven: dict[str, Proof] = field(default_factory=dict)  # of the run of a side that shows the least
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
        return PairedMeasurement.stage(self, number, pairs, only, ends, least, reserve)  # slots: no super()

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
        lines.append(self._proof_note())
        before, after = (self.written.get(side, frozenset()) for side in ("baseline", "candidate"))
        for side, names in (("baseline", before - after), ("candidate", after - before)):
            if names:
                judged = "lost" if side == "baseline" else "new, and not judged"
                lines.append(f"only on the {side} ({judged}): {_some(sorted(names))}")
        return lines

    def require_works(self, side: str, why: str, ends: float) -> None:
        """Runs the command once on one side, for a verdict on which no time is judged.

        Args:
            side: that is said to work.
            why: it is the only one: what fails on the other.
            ends: when it has to be over.

        Raises:
            GateError: it fails (exit 2), it does not end in time or is not proven to run its own tree (6).
        """
        self._ends = ends
        try:
            run = self._run(side)
        except OutOfTimeError as error:
            late = f"{why}, and the command did not end in time on the {side}"
            raise GateError(Exit.INCONCLUSIVE, late) from error
        if run.fault is not None:
            raise GateError(
                Exit.USAGE, f"neither side works ({why}; {side}: {run.fault}): {self.benchmark.line}"
            )
        self._require_proof([side])

    def _proof_note(self) -> str:
        if not self.proven or not all(proof.count for proof in self.proven.values()):
            only = any(proof.tests for proof in self.proven.values())
            seen = "; of its tree only tests were seen" if only else ""
            return f"not proven that each side ran its own tree (--unproven-tree ok){seen}"
        counted = "; ".join(
            f"{side} {proof.count}: {_some(proof.names)}" for side, proof in sorted(self.proven.items())
        )
        sides = "each side" if len(self.proven) > 1 else f"the {next(iter(self.proven))}"
        return f"{sides} imported modules of its own work tree ({counted}) and none of another"

    def _require_proof(self, sides: Sequence[str]) -> None:
        idle = {s: self.proven.get(s, Proof()) for s in sides if not self.proven.get(s, Proof()).count}
        if idle and not self.benchmark.unproven_ok:
            raise unproven(sorted(idle), sorted({test for proof in idle.values() for test in proof.tests}))

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
        document: dict[str, Any] = {}
        if self.benchmark.writes_json:
            try:
                document = read_document(out)
            except UsageError as error:
                what = "it wrote no benchmark to {out}" if not out.exists() else str(error)
                fault = fault or Fault(f"{what}; {last_line(folder / 'output')}")
        if fault is None:
            self.proven[side] = min(proven, self.proven.get(side, proven), key=lambda proof: proof.count)
        shutil.rmtree(folder / "modules")
        return Run(seconds, fault, document, out)

    def _check_faults(self, results: dict[str, Run]) -> None:
        """Refuses a round in which the command failed, or a side did not run its tree."""
        bad = {side: run.fault for side, run in results.items() if run.fault is not None}
        if len(bad) == len(results):
            reasons = "; ".join(f"{side}: {fault}" for side, fault in sorted(bad.items()))
            raise GateError(
                Exit.USAGE, f"the command works on neither side ({reasons}): {self.benchmark.line}"
            )
        self._require_proof([side for side in results if side not in bad])
        for side, fault in bad.items():
            if side in self.proven:  # it worked before: in a round, or when it was run to fill the caches
                raise GateError(
                    Exit.INCONCLUSIVE,
                    f"the command failed on the {side} after it had worked there ({self.runs} rounds): {fault}",
                )
            require_own_fault(side, fault, self.benchmark)
            if side == "baseline":  # a pass would rest on this one run
                again = self._run(side).fault
                if again is None:
                    raise GateError(
                        Exit.INCONCLUSIVE,
                        f"the command failed on the baseline and worked there when it was run again: {fault}",
                    )
                require_own_fault(side, again, self.benchmark)
            raise SideError(side, str(fault))

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


def prepare_trees(command: str, benchmark: BenchmarkCommand, tell: Report) -> None:
    """Runs a set-up command once in each tree; once more in a fresh tree where it fails on the baseline alone.

    Raises:
        SideError: it fails on one side.
        GateError: it fails on both (exit 2), or it is not known that the side's code is why; see `require_own_fault`.
    """
    ended = {side: _set_up(command, side, benchmark, tell) for side in sorted(benchmark.trees.trees)}
    faults = {side: fault for side, fault in ended.items() if fault is not None}
    if len(faults) > 1:
        raise GateError(Exit.USAGE, f"the set-up fails on both sides ({faults['candidate']}): {command}")
    for side, fault in faults.items():
        require_own_fault(side, fault, benchmark)
        if side == "baseline":
            restore(benchmark.trees.trees[side])
            again = _set_up(command, side, benchmark, tell)
            if again is None:
                return
            require_own_fault(side, again, benchmark)
        raise SideError(side, str(fault))


def _set_up(command: str, side: str, benchmark: BenchmarkCommand, tell: Report) -> Fault | None:
    folder = benchmark.trees.trees[side] / benchmark.inside
    output = benchmark.scratch / f"setup-{side}"
    seconds, fault = run_shell(command, folder, None, output, dict(os.environ), Ran.SET_UP)
    tell(f"set up the {side} in {seconds:.0f} s" + ("" if fault is None else f": {fault}"))
    return fault


def require_own_fault(side: str, fault: Fault, benchmark: BenchmarkCommand) -> None:
    """Refuses a fault that does not say that a side's code is broken.

    Raises:
        GateError: the run was ended by a signal or could not be started (exit 6); or what the command names is not in
            the base commit (5).
    """
    if fault.kind is Kind.ENDED:
        what = f"the {fault.ran} on the {side}: {fault.reason}"
        raise GateError(
            Exit.INCONCLUSIVE,
            f"{what}; ended by a signal or not started (126, 127 and above), which need not be its code's doing",
        )
    if side == "baseline" and fault.kind is Kind.NO_FOLDER:
        raise _not_in_base(benchmark.inside, str(fault))
    if side == "baseline" and fault.ran is Ran.COMMAND:
        require_base_paths(benchmark, str(fault))


def require_base_paths(benchmark: BenchmarkCommand, reason: str) -> None:
    """Refuses a command that names what is new in the change: no baseline could have run it.

    Raises:
        GateError: exit 5.
    """
    if path := benchmark.new_path:
        raise _not_in_base(path, reason)


def _not_in_base(path: str, reason: str) -> GateError:
    return GateError(
        Exit.NO_BASELINE, f"{path} is not in the base commit, so there is nothing to compare with: {reason}"
    )


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


def _row(name: str, samples: tuple[float, ...], resolved: Any) -> dict[str, Any]:
    case = Case.of(SUITE, {"test": name})
    return {
        "suite": SUITE, "case_id": case.case_id, "axes": case.axes_json, "seed": case.seed, "arm": ARM, "baseline": "",
        "arm_fields": Arm(variant=ARM).as_json, "metric": "time_ms", "status": "ok", "samples": samples,
        "resolved": resolved,
    }  # fmt: skip


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
