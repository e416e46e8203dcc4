"""`python -m harness`: one entry, several commands, each of which imports only what it needs; and how a command ends.

It ends by its exit code also after an exception that nothing was to raise, and although something that an arm has started
still runs.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import __version__
from harness.machine import raw_output
from harness.store.errors import UsageError, one_line, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

USAGE = """\
usage: python -m harness sweep=NAME [key=value ...]   measure; writes results/<sweep>/<run_id>/ and an HTML report
       python -m harness -m sweep=A,B axes.NAME=1,2    a run for each combination, one after another
       python -m harness -m sweep=NAME shard=0/4,1/4,2/4,3/4 hydra/launcher=joblib|submitit_local|submitit_slurm|ray
       python -m harness sweep=NAME shard=I/N run_id=NAME  one share of the cases, on this machine or another; report NAME has all
       python -m harness resume=RUN_ID [key=value ...] continue a run by its own settings; sweep=NAME resume=RUN_ID checks those given
       python -m harness runs                          runs of a results folder, newest first, and reports/index.html
       python -m harness fleet RUN...                  many machines: each card's median and spread, outliers, corrupt results
       python -m harness report RUN... [-o FILE.html]  HTML and markdown from stored runs (no torch needed)
       python -m harness gate --against GIT_REV        did this change make anything slower or less exact? (gate --help)
       python -m harness gate --against GIT_REV --command 'CMD {{out}}'  the same for the benchmarks of your own repository
       python -m harness verdict base=GLOB candidate=GLOB  do loss curves that you have say that FP8 trains the same?
       python -m harness import FILE.json              store the results of a pytest-benchmark file
       python -m harness export RUN -o FILE.csv        every metric of a run, curves too; .parquet; to=tensorboard|wandb|mlflow
       python -m harness list sweeps|models|gpus|recipes|arms|extensions  names that a command line takes; sweep=NAME --help: of one sweep
       python -m harness doctor [device=cpu|cuda]      what this machine can run, and the reasons where it cannot
       python -m harness advise model=NAME [gpu=NAME]  does FP8 pay: layer by layer, predicted and measured
       python -m harness diff RUN RUN                  what changed between two runs, and where the time went

sweeps
{sweeps}

keys  axes.NAME=VALUE or axes.NAME=[V,V]   arms=[ARM,ARM]   peers=[PEER,PEER]   shapes=[SET,SET]   device=auto|cpu|cuda   rounds=N
      cases=[ID,ID]   seed=N   timing.NAME=VALUE   budget_s=SECONDS   control=true|false   resume=RUN_ID|last   dry_run=true
      warm_compile=true|false   report=true|false   resume_anyway=true   trust=true   shard=I/N   run_id=NAME   quiet=true (--quiet)   log_level=DEBUG|INFO|WARNING|ERROR (of _run.log)
      results_dir=DIR   reports_dir=DIR
      processes  isolate=true|false   devices=all|0,1   case_timeout_s=SECONDS   case_wall_s=SECONDS   case_memory_gib=GIB
      training  model=NAME   data=stdlib|shakespeare|bytes|bin   data_path=FILE   schedule=warmup_bf16:1000
                train.mixed_precision=bf16|fp8   train.recipe=NAME   workers=N   ceilings=RUN
      several processes  ranks=N, or torchrun --nproc-per-node=N -m harness sweep=NAME ranks=N
      sweeps of your own  sweep=./FILE.yaml, --config-dir DIR   ~axes.NAME leaves an axis out   --cfg job
exit  0 all ok or skipped; 1 a case failed; 2 the request could not be carried out; 7 internal error
"""


def main(argv: Sequence[str]) -> int:
    """Runs one command; returns the exit code. Nothing that it has started outlives an exception."""
    with raw_output.guarded():
        try:
            return _main(argv)
        finally:  # all has been written and said: a launcher kills what makes it wait
            if "multiprocessing" in sys.modules:
                from harness.machine.processes import kill_children

                kill_children()


def _main(argv: Sequence[str]) -> int:
    command, *rest = argv or ["--help"]
    try:
        _refuse_place(argv)
        code = commands().get(command, lambda words: _sweep([command, *words]))(rest)
        raw_output.refuse_full()
        return code
    except UsageError as error:
        message = str(error)
    except KeyboardInterrupt:
        message = "interrupted"
    except Exception as error:  # noqa: BLE001 - the last handler: an interpreter that exits waits for its processes
        missing = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing not in ("", "harness", "fp8core"):
            message = f"{command} needs {missing}: pip install {missing}; report, diff, fleet, gate and runs read stored runs without torch"
        elif type(error).__name__ == "ExtensionError":  # by name: what measures nothing needs no torch
            message = str(error)
        elif refused(error):
            message = one_line(error)
        else:
            return _internal_error(error)
    raw_output.refuse(message)
    return 2


COMMANDS = {
    "runs": "harness.cli.runs",
    "report": "harness.report",
    "gate": "harness.gate",
    "verdict": "harness.cli.verdict",
    "import": "harness.cli.import_benchmark",
    "export": "harness.cli.export",
    "doctor": "harness.cli.doctor",
    "advise": "harness.advise.command",
    "diff": "harness.cli.diff",
    "fleet": "harness.judge.fleet",
    "list": "harness.cli.catalogue",
}  # word -> module whose `main` takes the words after it

FORMER_COMMANDS = {
    "gpu": "`make gpu`, in a checkout",
    "gate-selftest": "python reports/studies/gate_error_rates.py, in a checkout",
    "verdict-selftest": "python reports/studies/verdict_error_rates.py, in a checkout",
    "kernel": "`make aot` for fp8core's kernels (docs/kernels.md); for any other cuobjdump -res-usage and nvdisasm, of Triton's wheel",
}  # word -> what does it now


def commands() -> dict[str, Callable[[list[str]], int]]:
    """Every command by its word."""
    return {
        "--help": _help,
        "-h": _help,
        "--version": _version,
        **{word: partial(_run, module) for word, module in COMMANDS.items()},
    }


def _run(module: str, words: list[str]) -> int:
    return int(importlib.import_module(module).main(words))


def _help(_: list[str]) -> int:
    from harness.cli.config import question, sweeps

    lines = [f"  {name:<10} {question(path)}" for name, path in sorted(sweeps().items())]
    print(USAGE.format(sweeps="\n".join(lines)), end="")
    return 0


def _version(_: list[str]) -> int:
    print(f"fp8-harness {__version__}")
    return 0


def _sweep(words: list[str]) -> int:
    from harness.machine import torchrun
    from harness.store.errors import unknown

    if words[0] in FORMER_COMMANDS:
        raise UsageError(f"the command {words[0]} is gone; use {FORMER_COMMANDS[words[0]]}")
    if "=" not in words[0] and not words[0].startswith(("-", "~")):
        from harness.cli.config import sweeps

        if words[0] in sweeps():
            raise UsageError(f"{words[0]} is a sweep: write sweep={words[0]}")
        raise unknown("command", words[0], [*commands(), "sweep=NAME"])
    from harness.cli import habits

    keys, asked = habits.plain(words)
    if asked == "--multirun" and any(key.lstrip("+~").startswith(("shard=", "hydra")) for key in keys):
        from harness.cli import launch

        return launch.main(keys)
    if asked == "--multirun":
        from harness.cli.run import run_sweep

        return habits.run_several(keys, run_sweep)
    if asked:
        return habits.answer(asked, keys, lambda: _help([]))
    _refuse_limits()

    def sweep() -> int:
        from harness.cli.run import run_sweep

        return run_sweep(keys)

    def follow(store: Any, rank: int) -> int:
        from harness.cli.run import follow_sweep

        return follow_sweep(keys, store, rank)

    return torchrun.shared(sweep, follow)


def console() -> int:
    """The script `fp8-harness`."""
    raw_output.forgive()
    return _exit_with(main(sys.argv[1:]))


# What a sweep takes with its processes: the least that it ends with, and the shell's word for more.
LEAST = {resource.RLIMIT_NOFILE: (64, "open files", "n"), resource.RLIMIT_AS: (2**31, "bytes of memory", "v")}


def _refuse_place(words: Sequence[str]) -> None:
    """Refuse a working folder that is gone, and words that are no text.

    Raises:
        UsageError: which, and the way out.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(f"the working folder cannot be used ({error.strerror}); cd to another one") from None
    for word in words:
        if word != word.encode(errors="replace").decode():
            raise UsageError(
                f"{word!a}: expected UTF-8; give the file another name, or set LC_ALL=C.UTF-8 where it is UTF-8"
            )


def _refuse_limits() -> None:
    """Refuse limits within which no sweep ends.

    Raises:
        UsageError: which, and the way out.
    """
    for kind, (least, what, option) in LEAST.items():
        limit = resource.getrlimit(kind)[0]
        if 0 <= limit < least:
            raise UsageError(
                f"this shell allows {limit} {what}: expected at least {least}; set it by ulimit -{option}"
            )


INTERNAL = 7  # exit code of every command; 2 is a request that cannot be carried out
JOIN_S = 1.0  # for threads that are about to end


def _internal_error(error: Exception) -> int:
    """Prints an exception that nothing was to raise; the exit code."""
    raw_output.notify("".join(traceback.format_exception(error)))
    raw_output.notify(f"error: internal error: {one_line(error)}; please report it with the lines above\n")
    return INTERNAL


def _exit_with(code: int) -> int:
    """The exit code; this process ends here where a thread of an arm would keep it alive for ever.

    So would a server of processes that is stopped: an interpreter that exits waits for those that it forked.
    """
    if "harness.machine.fork_server" in sys.modules:
        from harness.machine import fork_server

        fork_server.kill()
    if (pools := sys.modules.get("concurrent.futures.thread")) is not None:
        # What the interpreter does as it exits: idle threads of pools end, for those that work it would wait for ever.
        idle = threading.Thread(target=pools._python_exit, daemon=True)
        idle.start()
        idle.join(JOIN_S)
        setattr(pools, "_shutdown", False)  # noqa: B010 - whoever called this in a longer process may go on
    deadline = time.monotonic() + JOIN_S
    threads = [t for t in threading.enumerate() if not t.daemon and t is not threading.current_thread()]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(console())
