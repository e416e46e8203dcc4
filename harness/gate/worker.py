"""Worker: one process of one side. It measures the code of its own work tree, one block for each command.

Started as `python -P worker.py PIPE TREE [CLOCK]` with TREE first on PYTHONPATH, so that this file is the candidate's on both
sides (one instrument) while `harness` and `fp8core` are those of TREE (what is compared). It speaks JSON
over the pipe of that number:

    {"do": "plan", "words": [...]}      -> {"env": ..., "env_id": ..., "cases": [{"case_id", ...}]}
    {"do": "prepare", "case": ID}       -> {"rows": [...], "arms": [...]}   builds, compiles, checks
    {"do": "block"}                     -> {ARM: {"samples": [...], "clocks": [mhz], ...} or {"fault": ..., "cause": ...}}
    {"do": "quit"}

Every block holds the control case too: a fixed bf16 product that PyTorch alone computes.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

CONTROL = "control"
CONTROL_SIZE = {"cpu": 128, "cuda": 4096}
# No round has a warm-up of its own: the first block of a case is led in by this, the later ones by one call an arm.
LEAD_IN_S = {"cpu": 0.05, "cuda": 0.5}


class LayoutError(RuntimeError):
    """A tree is built otherwise than this program expects; its code need not be at fault."""


class Worker:
    """The state of one process: its plan, and the case under way."""

    def __init__(self, tree: Path, clock: Path | None = None) -> None:
        self.tree, self.clock = tree, clock
        self.cases: dict[str, Any] = {}
        self.arms: dict[str, Callable[[], object]] = {}
        self.resident: dict[str, Callable[[], AbstractContextManager[object]]] = {}
        self.compiled: set[str] = set()
        self.on_host = False
        self.blocks = 0

    def plan(self, words: list[str]) -> dict[str, Any]:
        """Composes the sweep of this tree and says where it will be measured."""
        import fp8core
        import harness

        if self.clock is not None:
            _lend(self.clock)
        try:
            from harness.cli.config import load
            from harness.engine.plan import make_plan
            from harness.machine import environment
            from harness.suites import SUITES
            from harness.timing.rounds import timer_for
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("harness"):
                raise
            raise LayoutError(
                f"{self.tree} lacks the module {error.name}: its harness has another layout than this worker measures; "
                "run python -m harness sweep=NAME at each commit, then gate --baseline RUN --candidate RUN"
            ) from error

        from harness.timing import rounds

        for module, tree in ((harness, self.tree), (fp8core, self.tree), (rounds, self.clock or self.tree)):
            found = Path(str(module.__file__)).resolve()
            if tree.resolve() not in found.parents:
                raise RuntimeError(f"{module.__name__} was imported from {found}, not from {tree}")
        request = load(words, environment.device_kind)
        self.device = request.config["device"]
        self.monitor = environment.monitor_for(self.device).__enter__()
        self.timing = replace(request.timing, min_rounds=1, max_rounds=1, min_samples=5, min_seconds=0.0)
        self.timer = timer_for(self.device)
        self.cases = {c.case.case_id: c for c in make_plan(request.config, SUITES).cases}
        for planned in self.cases.values():
            if not hasattr(planned.suite, "build"):
                raise RuntimeError(
                    f"an arm of suite {planned.case.suite} is a run and no closure to time; run "
                    "python -m harness sweep=NAME at each commit, then gate --baseline RUN --candidate RUN"
                )
        self.control = self._control()
        env = environment.fingerprint(self.device, root=self.tree)
        return {
            "env": env,
            "env_id": environment.env_id(env),
            "cases": [
                _about(c) | {"arms": {arm: c.suite.ARMS[arm].baseline for arm in c.runnable}}
                for c in self.cases.values()
            ],
        }

    def prepare(self, case_id: str) -> dict[str, Any]:
        """Builds every arm of a case, compiles it, counts its operators and checks it; the right ones can be timed."""
        from harness.timing import compiling

        planned = self.cases[case_id]
        self.arms, self.resident, self.compiled = {}, {}, set()
        self.blocks, self.on_host = 0, False
        compiling.reset()
        rows: list[dict[str, Any]] = []
        for arm in planned.arms:
            info = planned.suite.ARMS[arm]
            record = info.record(arm).as_json if hasattr(info, "record") else None  # not in an older commit
            base = _about(planned) | {"arm": arm, "arm_fields": record, "baseline": info.baseline}
            if arm in planned.unsupported:
                why = planned.unsupported[arm]
                cause = getattr(why, "cause", "unsupported")  # of another commit's harness, which may lack it
                rows.append(base | _row("time_ms", "skipped", reason=why.reason, cause=str(cause)))
                continue
            try:
                rows += [base | row for row in self._prepare_arm(planned, arm)]
            except Exception as error:  # noqa: BLE001 - whatever a suite raises becomes a row
                self.arms.pop(arm, None)
                text = " ".join(str(error).split())[:500]
                why = f"{type(error).__name__}: {text}"
                rows.append(base | _row("time_ms", "failed", reason=why, cause=_cause_of_build(error)))
        self.watch = compiling.CompileWatch()
        return {"rows": rows, "arms": list(self.arms)}

    def _prepare_arm(self, planned: Any, arm: str) -> list[dict[str, Any]]:
        from harness.timing import compiling

        rows = []
        work = planned.suite.build(planned.case, arm, self.device)
        resolved = dict(work.resolved)
        if work.compiled:
            compiling.prime(self.device)
            watch = compiling.CompileWatch()
            # Cold in every process: else what one side compiled, the other side would find on disk.
            with compiling.empty_caches(), work.held():
                started = time.perf_counter()
                work.run()
                self.timer.synchronize()
                seconds = time.perf_counter() - started
            resolved |= watch.summary()
            if fault := watch.fault():
                return [_row(work.metric, "failed", resolved=resolved, reason=fault, cause="compile")]
            rows.append(_row("compile_s", "ok", resolved=resolved, samples=[seconds]))
            self.compiled.add(arm)
        else:
            with work.held():
                resolved["operator_calls"] = _operator_calls(work.run)
        numerics = work.check()
        resolved |= work.resolved  # a check may learn what really ran
        refuted = str(getattr(numerics, "cause", "numerics"))
        figures = {(metric, ""): value for metric, value in numerics.values.items()} | dict(numerics.parts)
        for (metric, part), value in figures.items():
            said: dict[str, Any] = {"samples": [float(value)]}
            if not numerics.ok:
                said = {"reason": f"{value:.6g}; {numerics.reason}", "cause": refuted}
            status = "ok" if numerics.ok else "failed"
            rows.append(_row(metric, status, part=part, resolved=resolved, **said))
        for metric, why in numerics.skipped.items():
            rows.append(_row(metric, "skipped", resolved=resolved, reason=why))
        if not numerics.ok:
            why = f"numerics: {numerics.reason}"
            return [*rows, _row(work.metric, "failed", resolved=resolved, reason=why, cause=refuted)]
        self.arms[arm] = work.run
        if work.resident is not None:
            self.resident[arm] = work.resident
        self.on_host |= work.on_host
        timed = _row(work.metric, "ok", resolved=resolved)
        return [*rows, timed | {"flops": dict(work.flops), "bytes_moved": work.bytes_moved}]

    def block(self) -> dict[str, Any]:
        """One block of samples of every arm of the case, in an order of its own, and of the control."""
        from harness.timing.rounds import measure, timer_for

        timer = timer_for("cpu") if self.on_host else self.timer
        lead = LEAD_IN_S[self.device] if self.blocks == 0 else 0.0
        config = replace(self.timing, warmup_min_seconds=lead, warmup_min_iterations=3 if lead else 1)
        self.blocks += 1
        control = {CONTROL: self.control}
        # Whole steps are timed apart from the control: their memory is made and freed around each block of theirs.
        sets = [self.arms, control] if self.resident else [{**self.arms, **control}]
        timings: dict[str, Any] = {}
        for arms in sets:
            resident = self.resident if arms is self.arms else None
            timings |= measure(arms, timer, config, self.blocks, self.monitor, resident=resident)
        fault = self.watch.steady_fault() if self.compiled else ""
        out: dict[str, Any] = {}
        for name, timing in timings.items():
            if timing.failure or (fault and name in self.compiled):
                out[name] = {
                    "fault": timing.failure or fault,
                    "cause": "run" if timing.failure else "compile",
                }
                continue
            out[name] = {
                "samples": list(timing.samples_ms),
                "clocks": list(timing.sample_clock_mhz),
                "late": timing.late_samples,
                "timing": {
                    "method": timing.method,
                    "l2": timing.l2,
                    "throttled": timing.throttled,
                    "contended": bool(getattr(timing, "contended", False)),
                },
            }
        return out

    def _control(self) -> Callable[[], object]:
        import torch

        size = CONTROL_SIZE[self.device]
        random = torch.Generator(self.device).manual_seed(0)
        a, b = (
            torch.randn(size, size, device=self.device, generator=random).to(torch.bfloat16) for _ in range(2)
        )
        return lambda: torch.mm(a, b)


def _lend(clock: Path) -> None:
    """Makes `harness.timing` that of another tree, for whoever imports it from now on."""
    import importlib.util

    import harness

    folder = clock / "harness" / "timing"
    spec = importlib.util.spec_from_file_location(
        "harness.timing", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness.timing"] = module
    setattr(harness, "timing", module)  # noqa: B010 - a submodule is an attribute of its package
    spec.loader.exec_module(module)


def _about(planned: Any) -> dict[str, Any]:
    case = planned.case
    return {"case_id": case.case_id, "suite": case.suite, "axes": case.axes_json, "seed": case.seed}


def _row(metric: str, status: str, **more: Any) -> dict[str, Any]:
    return {"metric": metric, "status": status, **more}


def _cause_of_build(error: Exception) -> str:
    """By this tree's harness, which tells memory that ran out from other faults."""
    from harness.store.errors import Cause, cause_of

    return str(cause_of(error, Cause.BUILD))


def _operator_calls(run: Callable[[], object]) -> int:
    """How many operators one call hands to PyTorch's dispatcher: a count that no machine changes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        calls = 0

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return (
                False  # no one compiles inside, and to be skipped costs the import of Dynamo: 1.4 s a process
            )

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        run()
    return counter.calls


def serve(worker: Worker, parent: Connection) -> None:
    """Answers commands until `quit` or the end of the input."""
    while (command := json.loads(parent.recv_bytes()))["do"] != "quit":
        try:
            about = [command[name] for name in ("words", "case") if name in command]
            answer = getattr(worker, command["do"])(*about)
        except Exception as error:  # noqa: BLE001 - the parent decides what becomes of it
            answer = {
                "error": f"{type(error).__name__}: {' '.join(str(error).split())[:800]}",
                "kind": type(error).__name__,
            }
            traceback.print_exc()
        parent.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    with suppress(EOFError), Connection(int(sys.argv[1])) as pipe:
        serve(Worker(*map(Path, sys.argv[2:])), pipe)
