"""Command: rounds of a user's benchmark command in two work trees, one fresh process after the other.

The command is a shell line. Where it holds `{out}`, it writes pytest-benchmark JSON there and each benchmark is a unit by
its fullname; without `{out}` its wall time is the only unit. A round runs the command once a side, in random order. Each
run has to prove which tree it ran (`harness.gate.tree_proof`), that the change was in what ran, and that it left both trees
as they were. Neither tree is the user's checkout itself, so that an import from the checkout shows.

The benchmark is part of the judge: where a change touches it, the base commit's stands in both trees, unless the user
accepts that each side is judged by its own.
"""

from __future__ import annotations

import math
import os
import platform
import posixpath
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import psutil

from harness.gate.benchmark_files import ARM, SUITE, environment_of, read_document, row_of
from harness.gate.options import Exit, GateError
from harness.gate.runner import Instrument, OutOfTimeError, SideError
from harness.gate.tree_proof import RECORDER, Proof, Trees, read_modules, unproven
from harness.gate.trees import content, replace_files
from harness.machine.environment import env_id
from harness.machine.processes import MARK, interruptible, marked
from harness.store.case import Arm, Case
from harness.store.errors import UsageError
from harness.store.text import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from harness.gate.runner import Round


KILLER = "import sys\nfrom harness.machine.processes import kill_marked\nsys.stdin.read()\nkill_marked(sys.argv[1])\n"
VARIABLE, OPENED = "HARNESS_GATE_RECORD", "HARNESS_GATE_OPENED"  # of the recorder
SHELL = ("bash", "-o", "pipefail", "-c")
ENDING_S = 1.0  # for helpers, as multiprocessing's tracker, to see that their parent has ended
# Exit codes of a program's own; beyond: not executable, not found, ended by a signal
ORDINARY = range(1, 126)


class Kind(Enum):
    """Kinds of fault: only one that the program reports itself says that its code is broken."""

    FAILED = auto()  # an exit code of its own, or it wrote no benchmark
    ENDED = auto()  # by a signal, or it could not be started, or what it started had not ended


class Fault(NamedTuple):
    """Why a run did not work."""

    reason: str
    kind: Kind = Kind.FAILED


def run_shell(
    line: str, folder: Path, timeout_s: float | None, output: Path, env: dict[str, str]
) -> tuple[float, Fault | None]:
    """Runs a shell line in a group of its own; returns its seconds and its fault, None where it worked.

    Raises:
        subprocess.TimeoutExpired: it was ended as the time was over.
    """
    if not folder.is_dir():
        return 0.0, Fault(f"the commit has no folder {folder.name}")
    if timeout_s is not None and timeout_s <= 0:
        raise subprocess.TimeoutExpired(line, timeout_s)
    waited, left = 0.0, ""
    with output.open("wb") as file:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [*SHELL, line], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(None if timeout_s is None or math.isinf(timeout_s) else timeout_s)
            seconds = time.perf_counter() - begun
            if VARIABLE in env:
                waited, left = _left_behind(env[VARIABLE])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if left:
        return seconds, Fault(f"{left} still ran when the line had ended: wait for it there", Kind.ENDED)
    if code == 0:
        return seconds + waited, None
    kind = Kind.FAILED if code in ORDINARY else Kind.ENDED
    return seconds, Fault(f"exit code {code}; {last_line(output)}", kind)


def _left_behind(mark: str) -> tuple[float, str]:
    """Seconds until all of a run has ended, at most `ENDING_S`, and what has not by then; "" for nothing.

    Args:
        mark: the folder that the run's processes record into, by which they are known.
    """
    begun, waited = time.monotonic(), 0.0
    while True:
        processes = psutil.process_iter(["pid", "name", "environ"])
        left = [p.info for p in processes if (p.info["environ"] or {}).get(VARIABLE) == mark]
        if not left or waited > ENDING_S:
            return waited, f"process {left[0]['pid']} ({left[0]['name']})" if left else ""
        time.sleep(0.01)
        waited = time.monotonic() - begun


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
            killer.communicate()


def last_line(output: Path) -> str:
    """What a command said last that says something; pytest's own summary line comes after its reason."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("E  ") or "Error" in line]
    return (telling or lines or ["no output"])[-1][:300]


OUT = "{out}"
WALL = "wall time"
SET_UP, COMMAND = "set-up", "command"


@dataclass(frozen=True)
class Run:
    """One run of the command on one side. `fault` is None where it worked."""

    seconds: float
    fault: Fault | None
    document: dict[str, Any]
    out: Path


@dataclass
class Commanded(Instrument):
    """The instrument of a command.

    Attributes:
        line: the shell line, with or without `{out}`.
        proof: the work trees, and what proves that each was run.
        inside: folder below a tree that is current while the command runs.
        scratch: temporary folder for what the command writes.
        commits: commit of each tree, as a fingerprint names it.
        setup: another shell line, run once in each tree before.
        unproven_ok: a side need not prove that it ran its own tree.
        benchmark: files of the benchmark that the change touches; in both trees they are the base commit's.
        seen: files of the change that were seen to run.
        proven: of the run of a side that shows the least.
        written: names of the benchmarks of a side.
        rounds: complete ones.
        step: what is being run, and a `SideError` is about: the set-up, or the command.
    """

    line: str
    proof: Trees
    inside: str
    scratch: Path
    commits: Mapping[str, Mapping[str, Any]]
    setup: str | None = None
    unproven_ok: bool = False
    benchmark: Sequence[str] = ()
    seen: set[str] = field(default_factory=set)
    proven: dict[str, Proof] = field(default_factory=dict)
    written: dict[str, frozenset[str]] = field(default_factory=dict)
    rounds: int = 0
    step: str = COMMAND

    @property
    def cheaper(self) -> str:
        """How to have a decision in less time; what counts is named where it is installed."""
        counts = {"perf": "perf stat -e instructions:u", "valgrind": "valgrind --tool=callgrind"}
        found = next((f", or counts of instructions ({c})" for t, c in counts.items() if shutil.which(t)), "")
        return f"fewer benchmarks, longer ones{found}"

    def set_up(self, tell: Callable[[str], None]) -> None:
        """Runs the set-up once in each tree.

        Raises:
            SideError: it fails on the candidate alone.
            GateError: it fails on both (exit 2), on the baseline (5), or was ended from outside (6).
        """
        command = self.setup
        if command is None:
            return
        self.step = SET_UP
        faults = {}
        for side in sorted(self.trees):
            output, env = self.scratch / f"setup-{side}", dict(os.environ)
            with self._left_alone("set-up", side, [s for s in self.trees if s != side]):
                seconds, fault = run_shell(command, self.trees[side] / self.inside, None, output, env)
            tell(f"set up the {side} in {seconds:.0f} s" + (f": {fault.reason}" if fault else ""))
            if fault:
                faults[side] = fault
        if faults:
            self._refuse(faults, command)
        self.step = COMMAND

    def warm(self, left: Callable[[], float]) -> None:
        """Where the wall time is judged, runs each tree once: it writes its byte code then."""
        if OUT not in self.line:
            self._check({side: self._run(side, left) for side in sorted(self.trees)}, left)

    def measure(self, this: Round) -> None:
        """Runs the command once on each side.

        Raises:
            SideError: it fails on one side in the first round.
            GateError: it fails on both, or on one that had worked; or a side did not run its own tree.
            OutOfTimeError: the time is over.
        """
        runs = {side: self._run(side, this.left) for side in this.sides}
        self._check(runs, this.left)
        rows = {side: self._rows(run) for side, run in runs.items()}
        before, after = rows["baseline"], rows["candidate"]
        if not before.keys() & after.keys():
            only = "; ".join(f"only on the {side}: {some(list(rows[side]), 5)}" for side in rows)
            raise GateError(Exit.NO_BASELINE, f"the two sides have no benchmark in common, {only}")
        for side, found in rows.items():
            names = frozenset(found)
            if odd := self.written.setdefault(side, names) ^ names:
                raise GateError(
                    Exit.INCONCLUSIVE,
                    f"the {side} does not write the same benchmarks each time, so rounds are no repetitions: "
                    f"{some(sorted(odd), 5)}",
                )
            env = self._env(side, runs[side])
            this.collected[side].plan(env, env_id(env))
            wanted = [row for row in found.values() if not this.only or row["case_id"] in this.only]
            this.collected[side].take(this.number, wanted)
        self.rounds += 1

    def blame(self, error: SideError) -> tuple[str, str, str, str]:
        """What the candidate breaks: see `_refuse`."""
        line = (self.setup or "") if self.step == SET_UP else self.line
        why = f"the {self.step} fails on the candidate and works on the baseline: {error.reason}"
        return self.step, line, "runs", why

    def notes(self) -> list[str]:
        """What the verdict has to say about how the command was run; nothing where it worked on neither side, or was not run."""
        if not self.proven:
            return []
        lines = [
            "the command, in fresh processes, one side after the other, caches outside of the trees are shared "
            f"(HOME=$(mktemp -d) parts them): {self.line}"
        ]
        if self.benchmark:
            lines.append(f"the base commit's benchmark judged both sides; changed: {some(self.benchmark, 5)}")
        if self.proof.changed:
            unseen = sorted(self.proof.changed - self.seen)
            lines.append(
                f"of the change these files were seen to run: {some(sorted(self.seen), 5) or 'none'}"
            )
            if unseen:
                lines.append(f"not seen to run: {some(unseen, 5)}")
        if self.proven and all(proof.count for proof in self.proven.values()):
            counted = "; ".join(f"{s} {p.count}: {some(p.names)}" for s, p in sorted(self.proven.items()))
            sides = "each side" if len(self.proven) > 1 else f"the {next(iter(self.proven))}"
            lines.append(f"{sides} imported modules of its own work tree ({counted}) and none of another")
        else:
            tests = any(proof.tests for proof in self.proven.values())
            seen = "; of its tree only tests were seen" if tests else ""
            lines.append(f"not proven that each side ran its own tree (--unproven-tree ok){seen}")
        before, after = (self.written.get(side, frozenset()) for side in ("baseline", "candidate"))
        for side, judged, names in (
            ("baseline", "lost", before - after),
            ("candidate", "new, and not judged", after - before),
        ):
            if names:
                lines.append(f"only on the {side} ({judged}): {some(sorted(names), 5)}")
        return lines

    def _run(self, side: str, left: Callable[[], float]) -> Run:
        """One run of the command in a side's tree, and the proof of what it ran."""
        folder = self.scratch / f"{side}-{time.monotonic_ns()}"
        (folder / "modules").mkdir(parents=True)
        out, output = folder / "benchmarks.json", folder / "output"
        line = self.line.replace(OUT, shlex.quote(str(out)))
        env = recording(self.scratch, folder / "modules", opened=not all(map(_is_module, self.proof.changed)))
        try:
            with self._left_alone("command", side, list(self.trees)):
                seconds, fault = run_shell(line, self.trees[side] / self.inside, left(), output, env)
        except subprocess.TimeoutExpired as error:
            raise OutOfTimeError from error
        proven = self.proof.check(side, read_modules(folder / "modules"))
        self.seen |= proven.changed
        shutil.rmtree(folder / "modules")
        document: dict[str, Any] = {}
        if OUT in self.line:
            try:
                document = read_document(out)
            except UsageError as error:
                what = str(error) if out.exists() else "it wrote no benchmark to {out}"
                fault = fault or Fault(f"{what}; {last_line(output)}")
        if fault is None:
            self.proven[side] = min(proven, self.proven.get(side, proven), key=lambda proof: proof.count)
        return Run(seconds, fault, document, out)

    @contextmanager
    def _left_alone(self, what: str, side: str, trees: Sequence[str]) -> Iterator[None]:
        """Refuses what changes a file of these trees that git knows: later runs would measure something else."""
        before = {name: content(self.trees[name], self.proof.files[name]) for name in trees}
        yield
        for name in trees:
            after = content(self.trees[name], self.proof.files[name])
            if changed := [file for file, digest in before[name].items() if after[file] != digest]:
                raise GateError(
                    Exit.INVALID,
                    f"the {what} of the {side} changed files in the work tree of the {name}: {some(changed, 5)}; let it write "
                    "to files that git ignores",
                )

    def _check(self, runs: Mapping[str, Run], left: Callable[[], float]) -> None:
        """Refuses a round in which the command failed, or a side did not run its tree."""
        bad = {side: run.fault for side, run in sorted(runs.items()) if run.fault is not None}
        if len(bad) < len(runs):
            self._require_proof([side for side in runs if side not in bad])
        if not bad and self.proof.changed and not self.seen and not self.unproven_ok:
            raise GateError(
                Exit.INCONCLUSIVE,
                f"the change was not seen to run: no Python process of the command imported or opened any of "
                f"{some(sorted(self.proof.changed), 5)}; benchmark what changed, or --unproven-tree ok",
            )
        if worked := bad.keys() & self.proven.keys():  # in a round, or when it was run to fill the caches
            raise GateError(
                Exit.INCONCLUSIVE,
                f"the command failed after it had worked ({self.rounds} rounds): {bad[min(worked)].reason}",
            )
        if list(bad) == ["candidate"] and self.benchmark:
            replace_files(self.proof.original, self.trees["candidate"], self.benchmark)
            if self._run("candidate", left).fault is None:
                raise GateError(
                    Exit.INCONCLUSIVE,
                    f"the base commit's benchmark does not run on the candidate, and the candidate's does "
                    f"({some(self.benchmark, 5)}): {bad['candidate'].reason}; --accept-changed-benchmark judges each side "
                    "by its own",
                )
        if bad:
            self._refuse(bad, self.line)

    def _refuse(self, faults: Mapping[str, Fault], line: str) -> NoReturn:
        """Refuses a line that fails.

        Raises:
            SideError: on the candidate alone, by a code of its own: the change is why.
            GateError: on both sides (exit 2), on the baseline alone (5), or it was ended by a signal or not started (6).
        """
        said = "; ".join(f"{side}: {fault.reason}" for side, fault in faults.items())
        if len(faults) > 1:
            raise GateError(Exit.USAGE, f"the {self.step} works on neither side ({said}): {line}")
        ((side, fault),) = faults.items()
        if fault.kind is Kind.ENDED:
            raise GateError(
                Exit.INCONCLUSIVE,
                f"the {self.step} on the {said}; ended by a signal or not started (126, 127 and above), which need not be its "
                "code's doing",
            )
        if side == "baseline":
            raise GateError(
                Exit.NO_BASELINE, f"the {self.step} fails on the {said}; name a base commit on which it works"
            )
        raise SideError(side, fault.reason)

    def _require_proof(self, sides: Sequence[str]) -> None:
        idle = {s: proof for s in sides if not (proof := self.proven.get(s, Proof())).count}
        if idle and not self.unproven_ok:
            raise unproven(sorted(idle), sorted({test for proof in idle.values() for test in proof.tests}))

    def _rows(self, run: Run) -> dict[str, dict[str, Any]]:
        """Rows by benchmark, as `Collected.take` reads them."""
        if OUT not in self.line:
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
        return {**environment_of(run.document or here), **self.commits[side], "imported_from": None}


def named_paths(line: str, inside: str) -> dict[str, str]:
    """What a shell line may name below a work tree: path there -> the word, or the part of one."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    names = [name for word in words for name in re.split("[=:]+", word) if name]
    return {posixpath.normpath(posixpath.join(inside, name)): name for name in names}


def _is_module(name: str) -> bool:
    return name.endswith((".py", ".so", ".pyd"))


def recording(scratch: Path, folder: Path, *, opened: bool = False) -> dict[str, str]:
    """The environment in which Python processes record into `folder` what they imported, and the files that they opened."""
    site = scratch / "site"
    if not site.exists():
        site.mkdir()
        shutil.copy(RECORDER, site / "sitecustomize.py")
    path = filter(None, (str(site), os.environ.get("PYTHONPATH")))
    env = {**os.environ, VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(path)}
    return {**env, OPENED: "1"} if opened else env


def _row(name: str, samples: Sequence[float], resolved: object) -> dict[str, Any]:
    case = Case.of(SUITE, {"test": name})
    return {
        "suite": SUITE, "case_id": case.case_id, "axes": case.axes_json, "seed": case.seed, "arm": ARM, "baseline": "",
        "arm_fields": Arm(variant=ARM).as_json, "metric": "time_ms", "status": "ok", "samples": samples,
        "resolved": resolved,
    }  # fmt: skip
