"""Command: rounds of a user's benchmark command in two work trees, one fresh process after the other.

The command is a shell line. Where it holds `{out}`, it writes pytest-benchmark JSON there and each benchmark is a unit by
its fullname; without `{out}` its wall time is the only unit. A round runs the command once a side, in random order. What
its processes read says which files are the benchmark and which the code, and that a change ran (`harness.gate.ran`); each
run has to leave both trees as they were. Neither tree is the user's checkout itself, so that a file of the checkout shows.

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import psutil

from harness.gate.benchmark_files import of_document, read_file
from harness.gate.figures import SUITE, WHOLE
from harness.gate.options import Exit, GateError
from harness.gate.ran import RECORDER, FilesRan
from harness.gate.runner import Instrument, OutOfTimeError, SideError
from harness.gate.trees import digest
from harness.machine.environment import env_id
from harness.machine.processes import MARK, interruptible, marked
from harness.store.case import Case
from harness.store.errors import UsageError
from harness.store.outside import parse
from harness.store.text import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from harness.gate.options import Options
    from harness.gate.ran import SideFiles
    from harness.gate.runner import GateRound
    from harness.store.measurement import Measurement


KILLER = "import sys\nfrom harness.machine.processes import kill_marked\nsys.stdin.read()\nkill_marked(sys.argv[1])\n"
VARIABLE, TREE = "HARNESS_GATE_RECORD", "HARNESS_GATE_TREE"  # of the recorder
SHELL = ("bash", "-o", "pipefail", "-c")
TICK_S = 0.01  # between two looks at what runs
ENDING_S = 1.0  # for helpers, as multiprocessing's tracker, to see that their parent has ended
# Exit codes of a program's own; beyond: not executable, not found, ended by a signal
ORDINARY = range(1, 126)


class CommandFault(NamedTuple):
    """Why a run did not work: by an exit code of its own, which says that its code is broken; or, where `ended`, by a signal, as
    it could not be started, as what it started had not ended, or as it ended well and had written no benchmark."""

    reason: str
    ended: bool = False


def run_shell(
    line: str, folder: Path, timeout_s: float | None, output: Path, env: dict[str, str], programs: dict[int, Path] | None = None
) -> tuple[float, CommandFault | None]:  # fmt: skip
    """Runs a shell line in a group of its own; returns its seconds and its fault, None where it worked.

    Args:
        line: for bash.
        folder: where it runs.
        timeout_s: after which it is ended.
        output: file for what it writes to standard output; that of standard error is beside it.
        env: its environment.
        programs: takes the programs of its processes, by their numbers.

    Raises:
        subprocess.TimeoutExpired: it was ended as the time was over.
    """
    if not folder.is_dir():
        return 0.0, CommandFault(f"the commit has no folder {folder.name}")
    if timeout_s is not None and timeout_s <= 0:
        raise subprocess.TimeoutExpired(line, timeout_s)
    waited, left = 0.0, ""
    with output.open("wb") as file, errors_of(output).open("wb") as errors:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [*SHELL, line], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = _wait(
                process,
                line,
                math.inf if timeout_s is None else timeout_s,
                {} if programs is None else programs,
            )
            seconds = time.perf_counter() - begun
            if VARIABLE in env:
                waited, left = _left_behind(env[VARIABLE])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if left:
        return seconds, CommandFault(
            f"{left} still ran when the line had ended: wait for it there", ended=True
        )
    if code == 0:
        return seconds + waited, None
    return seconds, CommandFault(f"exit code {code}; {last_line(output)}", code not in ORDINARY)


def errors_of(output: Path) -> Path:
    """The file of what a line writes to standard error."""
    return output.with_suffix(".errors")


def _wait(process: subprocess.Popen[bytes], line: str, timeout_s: float, programs: dict[int, Path]) -> int:
    """The exit code of a shell, whose programs are noted until it has ended."""
    ends = time.monotonic() + timeout_s
    while True:
        try:
            return process.wait(min(TICK_S, max(ends - time.monotonic(), 0.0)))
        except subprocess.TimeoutExpired:
            _note(process.pid, b"\0".join([*map(os.fsencode, (*SHELL, line)), b""]), programs)
            if time.monotonic() >= ends:
                raise subprocess.TimeoutExpired(line, timeout_s) from None


def _note(process: int, before: bytes, programs: dict[int, Path]) -> None:
    """Notes the programs of a process and of all below it; one with the command line of its parent has not yet become another.

    Linux tells the children of a process; where nothing does, an unknown program ran.
    """
    root = Path("/proc")
    if not (root / "self").exists():
        programs[0] = Path("unknown")
    with suppress(OSError, ValueError):
        cmdline = (root / f"{process}/cmdline").read_bytes()
        if cmdline not in (before, b""):
            programs[process] = (root / f"{process}/exe").readlink()
        for file in root.glob(f"{process}/task/*/children"):
            for child in map(int, file.read_text().split()):
                _note(child, cmdline, programs)


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

    Raises:
        GateError: there is no bash.
    """
    if shutil.which(SHELL[0]) is None:
        raise GateError(Exit.USAGE, "--command runs in bash, for its pipefail, and there is none: install it")
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
    """The last line of a command that explains something; pytest's own summary line comes after its reason."""
    texts = (file.read_text(errors="replace") for file in (output, errors_of(output)) if file.exists())
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("E  ") or "Error" in line]
    return (telling or lines or ["no output"])[-1][:300]


OUT = "{out}"
WALL = "wall time"
SET_UP, COMMAND = "set-up", "command"


@dataclass(frozen=True)
class CommandRun:
    """One run of the command on one side. `fault` is None where it worked."""

    fault: CommandFault | None
    rows: Mapping[str, Measurement]  # by benchmark
    env: Mapping[str, Any]


class NothingElseError(Exception):
    """Only new files of the benchmark differ, which have nothing to be compared with."""


@dataclass
class Commanded(Instrument):
    """The instrument of a command.

    Attributes:
        line: the shell line, with or without `{out}`.
        ran: what each side read.
        inside: folder below a tree that is current while the command runs.
        scratch: temporary folder for what the command writes.
        commits: commit of each tree, as a fingerprint names it.
        setup: another shell line, run once in each tree before.
        unproven_ok: no file of the change need have been read.
        own_benchmark: each side is judged by its own benchmark.
        benchmark: files of the benchmark that the change touches; in both trees they are the base commit's.
        worked: sides on which it has worked.
        written: names of the benchmarks of a side.
        rounds: complete ones.
        step: what is being run, and a `SideError` is about: the set-up, or the command.
    """

    line: str
    ran: FilesRan
    inside: str
    scratch: Path
    commits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    setup: str | None = None
    unproven_ok: bool = False
    own_benchmark: bool = False
    benchmark: list[str] = field(default_factory=list)
    worked: set[str] = field(default_factory=set)
    written: dict[str, frozenset[str]] = field(default_factory=dict)
    rounds: int = 0
    step: str = COMMAND

    def set_up(self, report: Callable[[str], None]) -> None:
        """Runs the set-up once in each tree.

        Raises:
            SideError: it fails on one.
            GateError: it fails on both (exit 2).
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
            report(f"set up the {side} in {seconds:.0f} s" + (f": {fault.reason}" if fault else ""))
            if fault:
                faults[side] = fault
            side_of = self.ran.sides[side]  # it may write files of its own tree
            side_of.sources = {name: digest(side_of.tree / name) for name in side_of.sources}
        if faults:
            self._refuse(faults, command)
        self.step = COMMAND

    def warm(self, left: Callable[[], float]) -> None:
        """Where the wall time is judged, runs each tree once: it writes its byte code then."""
        if OUT not in self.line:
            self._checked(sorted(self.trees), left)

    def measure(self, this: GateRound) -> None:
        """Runs the command once on each side.

        Raises:
            SideError: it fails on one side in the first round.
            GateError: it fails on both, or on one that had worked; or a side did not run its own tree.
            OutOfTimeError: the time is over.
        """
        runs = self._checked(this.sides, this.left)
        rows = {side: run.rows for side, run in runs.items()}
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
            env = {**runs[side].env, **self.commits[side], "imported_from": None}
            collected = this.collected[side]
            collected.env, collected.env_id = env, env_id(env)
            collected.rows += [
                (this.number, row) for row in found.values() if not this.only or row.case_id in this.only
            ]
        self.rounds += 1

    def notes(self) -> list[str]:
        """What the verdict has to say about how the command was run; nothing where it worked on neither side, or was not run."""
        if not self.worked:
            return []
        what = (
            "the figures that the command wrote, the median of each,"
            if OUT in self.line
            else "the wall times of the command"
        )
        lines = [
            f"OK means: {what} are within the tolerance of the base's in {self.rounds} rounds in turn, whatever else it does",
            "the command, in fresh processes, one side after the other, caches outside of the trees are shared "
            f"(HOME=$(mktemp -d) parts them): {self.line}",
        ]
        if self.benchmark:
            lines.append(f"the base commit's benchmark judged both sides; changed: {some(self.benchmark, 5)}")
        lines += self.ran.notes(allowed=self.unproven_ok)
        before, after = (self.written.get(side, frozenset()) for side in ("baseline", "candidate"))
        for side, judged, names in (
            ("baseline", "lost", before - after),
            ("candidate", "new, and not judged", after - before),
        ):
            if names:
                lines.append(f"only on the {side} ({judged}): {some(sorted(names), 5)}")
        return lines

    def _run(self, side: str, left: Callable[[], float]) -> CommandRun:
        """One run of the command in a side's tree, and the proof of what it ran."""
        folder = self.scratch / f"{side}-{time.monotonic_ns()}"
        (folder / "modules").mkdir(parents=True)
        out, output = folder / "benchmarks.json", folder / "output"
        line, programs = self.line.replace(OUT, shlex.quote(str(out))), dict[int, Path]()
        env = recording(self.scratch, folder / "modules", self.trees[side])
        try:
            with self._left_alone("command", side, list(self.trees)):
                seconds, fault = run_shell(
                    line, self.trees[side] / self.inside, left(), output, env, programs
                )
        except subprocess.TimeoutExpired as error:
            raise OutOfTimeError from error
        self.ran.add_record(side, folder / "modules", programs)
        shutil.rmtree(folder / "modules")
        if (errors := errors_of(output)).exists() and errors.read_bytes().strip():
            self.ran.sides[side].ended.add("words on standard error")
        machine = {
            "machine": platform.machine(), "system": platform.system(), "release": platform.release(),
            "node": platform.node(), "cpu": {"count": os.cpu_count()},
        }  # fmt: skip
        wall = {
            "machine_info": machine,
            "benchmarks": [{"fullname": WALL, "stats": {"data": [seconds]}}],
        }
        if fault:
            return CommandRun(fault, {}, {})
        try:
            found = read_file(out) if OUT in self.line else of_document(wall, output)
        except UsageError as error:
            what = str(error) if out.exists() else "it wrote no benchmark to {out}"
            return CommandRun(CommandFault(f"{what}; {last_line(output)}", ended=True), {}, {})
        return CommandRun(None, self._by_name(found.rows), found.env)

    @contextmanager
    def _left_alone(self, what: str, side: str, trees: Sequence[str]) -> Iterator[None]:
        """Refuses what changes a file of these trees that git knows: later runs would measure something else."""
        before = {name: self.ran.sides[name].sources for name in trees}
        yield
        for name in trees:
            if changed := [
                file for file, was in before[name].items() if digest(self.trees[name] / file) != was
            ]:
                raise GateError(
                    Exit.INVALID,
                    f"the {what} of the {side} changed files in the work tree of the {name}: {some(changed, 5)}; let it write "
                    "to files that git ignores",
                )

    def _checked(self, sides: Sequence[str], left: Callable[[], float]) -> dict[str, CommandRun]:
        """Runs the command once on each side, with one benchmark; refuses a round in which it failed, or did not read its tree."""
        runs = {side: self._run(side, left) for side in sides}
        if not self.own_benchmark and (names := self.ran.changed_benchmark()):
            runs = self._judged_by_base(names, runs, left)
        bad = {side: run.fault for side, run in sorted(runs.items()) if run.fault is not None}
        self.ran.check()
        if worked := bad.keys() & self.worked:  # in a round, or when it was run to fill the caches
            raise GateError(
                Exit.INCONCLUSIVE,
                f"the command failed after it had worked ({self.rounds} rounds): {bad[min(worked)].reason}",
            )
        if bad:
            self._refuse(bad, self.line)
        self.worked |= runs.keys()
        before, after = (self.ran.sides[side].ended for side in ("baseline", "candidate"))
        if odd := before ^ after:
            raise GateError(
                Exit.INCONCLUSIVE,
                f"on the {'candidate' if odd & after else 'baseline'} alone: {some(sorted(odd), 4)}; so it is not shown that both "
                "sides did the same work",
            )
        if self.ran.changed and not self.ran.seen and not self.ran.unseen and not self.unproven_ok:
            raise GateError(
                Exit.INCONCLUSIVE,
                f"no file of the change was read by any process of the command: {some(sorted(self.ran.changed), 5)}; benchmark "
                "what changed, or --unproven-tree ok judges all the same",
            )
        return runs

    def _judged_by_base(
        self, names: Sequence[str], own: dict[str, CommandRun], left: Callable[[], float]
    ) -> dict[str, CommandRun]:
        """The runs of both sides anew, with the base commit's files of the benchmark."""
        base = self.ran.sides["baseline"].sources
        is_new = base.keys().isdisjoint(names)
        self.ran.take_over(names)
        self.benchmark = sorted({*self.benchmark, *names})
        if not self.ran.sources:
            if is_new and not any(run.fault for run in own.values()):
                raise NothingElseError(some(names, 5))
            raise GateError(
                Exit.INCONCLUSIVE,
                f"only {some(names, 5)} differs, which is the benchmark, and the base commit's has to judge it; "
                "--accept-changed-benchmark judges each side by its own",
            )
        runs = {side: self._run(side, left) for side in own}
        fault = runs["candidate"].fault
        if fault and not own["candidate"].fault and not runs["baseline"].fault:
            raise GateError(
                Exit.INCONCLUSIVE,
                f"the base commit's benchmark does not run on the candidate, and the candidate's does ({some(self.benchmark, 5)}): "
                f"{fault.reason}; --accept-changed-benchmark judges each side by its own",
            )
        return runs

    def _refuse(self, faults: Mapping[str, CommandFault], line: str) -> NoReturn:
        """Refuses a line that fails.

        Raises:
            SideError: on one side alone.
            GateError: on both sides (exit 2).
        """
        faulty = "; ".join(f"{side}: {fault.reason}" for side, fault in faults.items())
        if len(faults) > 1:
            raise GateError(Exit.USAGE, f"the {self.step} works on neither side ({faulty}): {line}")
        ((side, fault),) = faults.items()
        why = f"the {self.step} fails on the {faulty}"
        if fault.ended:
            why += "; ended by a signal, not started (126, 127 and above) or without a figure"
        elif side == "baseline":
            why += "; name a base commit on which it works"
        raise SideError(side, why, "ended" if fault.ended else "broken", (self.step, line, "runs"))

    def _by_name(self, rows: Sequence[Measurement]) -> dict[str, Measurement]:
        """Rows by benchmark; the name alone says which one it is."""
        found: dict[str, Measurement] = {}
        for row in rows:
            name = str(parse(row.axes)["test"])
            if name in found:
                raise GateError(
                    Exit.USAGE, f"two benchmarks are named {name}; a name decides which ones are compared"
                )
            case = Case.of(SUITE, {"test": name})
            resolved = row.resolved if OUT in self.line else {"timed": WHOLE, "unit": "s"}
            found[name] = replace(
                row, case_id=case.case_id, axes=case.axes_json, regime="", timing={}, resolved=resolved
            )
        return found


def commanded(options: Options, root: Path, sides: Mapping[str, SideFiles], scratch: Path) -> Commanded:
    """The command of the user's words, which runs where they were typed."""
    line, inside = str(options.command), Path.cwd().resolve().relative_to(root).as_posix()
    named = frozenset(name for name in _named(line, inside) if any(s.is_text(name) for s in sides.values()))
    return Commanded(
        {side: each.tree for side, each in sides.items()},
        ("--command", line),
        1,
        line,
        FilesRan(sides, root, named),
        inside,
        scratch,
        setup=options.setup,
        unproven_ok=options.unproven_tree == "ok",
        own_benchmark=options.accept_changed_benchmark,
    )


def _named(line: str, inside: str) -> set[str]:
    """What a shell line may name below a work tree by a word, or the part of one."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    names = {name for word in words for name in re.split("[=:]+", word) if name}
    return {posixpath.normpath(posixpath.join(inside, name)) for name in names}


def recording(scratch: Path, folder: Path, tree: Path) -> dict[str, str]:
    """The environment in which Python processes record into `folder` what they read, and who of `tree` did."""
    site = scratch / "site"
    if not site.exists():
        site.mkdir()
        shutil.copy(RECORDER, site / "sitecustomize.py")
    path = filter(None, (str(site), os.environ.get("PYTHONPATH")))
    return {**os.environ, VARIABLE: str(folder), TREE: str(tree), "PYTHONPATH": os.pathsep.join(path)}
