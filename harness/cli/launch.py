"""`python -m harness -m sweep=NAME shard=0/4,1/4,... hydra/launcher=NAME`: one sweep spread by a Hydra launcher.

Hydra starts the shards (joblib: processes here; submitit: Slurm jobs; ray: a Ray cluster), each of which is the command
`sweep=NAME shard=i/n run_id=ID` with a run id given here. What came of them is read from the run's folder, not from the
launcher: a worker that was killed, a node that was lost or a job that was started twice leaves the rows that it had
stored, and `resume=ID` runs the rest, spread or not.

Shards on this machine end with the command, and each computes at a place of its own (`harness.engine.side_by_side`): a GPU, or
a share of the cores. Of more shards than places, the others wait their turn. Shards elsewhere are their scheduler's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import store
from harness.cli import habits, ray_cluster, seeds_needed, shard_job, slurm_queue
from harness.cli.config import command_line
from harness.cli.resume_alone import load_request
from harness.engine import run_folder, run_lock, shards, side_by_side, watch
from harness.engine.runlog import recorded
from harness.judge.fleet.request import refuse_shares
from harness.machine.processes import interruptible
from harness.store import run_files
from harness.store.errors import UsageError, one_line, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from harness.cli.config import Request
    from harness.engine.shards import Shard


@dataclass(frozen=True, slots=True)
class Launcher:
    """One of Hydra's: the module that brings it, the extra of this project that installs it, where it runs jobs."""

    module: str
    extra: str
    here: bool  # whether its jobs run on this machine alone
    needs: str = ""  # what the module imports
    program: str = ""  # that must be on the path


LAUNCHERS = {
    "basic": Launcher("hydra", "", here=True),
    "joblib": Launcher("hydra_plugins.hydra_joblib_launcher", "joblib", here=True, needs="joblib"),
    "submitit_local": Launcher("hydra_plugins.hydra_submitit_launcher", "slurm", here=True, needs="submitit"),
    "submitit_slurm": Launcher(
        "hydra_plugins.hydra_submitit_launcher", "slurm", here=False, needs="submitit", program="sbatch"
    ),
    "ray": Launcher("hydra_plugins.hydra_ray_launcher", "ray", here=False, needs="ray"),
}
INTERRUPTED = "interrupted"
LOOKS = 5


@dataclass
class ShardJob:
    """What Hydra composes for each shard. The words of the sweep are one text, so that Hydra reads none of them."""

    words: str = ""
    run_id: str = ""
    shard: str = ""
    folder: str = ""  # to run in
    lead: str = ""  # the folder of `side_by_side` where shards are processes of this machine
    places: int = 0  # of them, for shards to take; 0: they share nothing
    cores: list[int] = field(default_factory=list)  # to divide among the places; empty: leave them alone
    gpus: list[str] = field(default_factory=list)  # likewise, one a place
    hydra: Any = field(
        default_factory=lambda: {
            "job": {"name": "fp8-harness", "chdir": False},
            "output_subdir": None,
            "sweep": {"dir": "", "subdir": "${hydra.job.num}"},
        }
    )


def main(argv: Sequence[str]) -> int:
    """Spreads one sweep; returns the exit code of the contract.

    Raises:
        UsageError: the request is refused; nothing was started.
    """
    to_hydra = [word for word in argv if word.lstrip("+~").startswith(("hydra/", "hydra."))]
    asked = [word for word in argv if word.startswith("shard=")]
    words = [word for word in argv if word not in to_hydra and word not in asked]
    if not asked and not to_hydra:
        from harness.cli.sweep import run_sweep

        return habits.run_several(words, run_sweep)
    if not asked and len(habits.several(words)) > 1:
        raise UsageError(
            f"{to_hydra[0]}: a launcher spreads the shards of one run (shard=0/2,1/2); several runs go one after another, without it"
        )
    if len(asked) != 1:
        raise UsageError(
            "-m spreads one sweep over several jobs: add shard=0/4,1/4,2/4,3/4 (or fewer of the four)"
        )
    chosen = shards.of_command(asked[0].partition("=")[2])
    name = _chosen_launcher(to_hydra)
    launcher = LAUNCHERS[name]
    request = load_request(words, _device if launcher.here else _leave)
    is_whole = any(word.lstrip("+").startswith("sweep=") for word in words)  # else resume= names the sweep
    refuse_shares(request.config, chosen[0].count)
    if launcher.here or request.config["dry_run"]:
        from harness.engine.plan import describe, make_plan
        from harness.suites import SUITES

        plan = make_plan(request.config, SUITES)
        if request.config["dry_run"]:
            for shard in chosen:
                sys.stdout.write("\n".join([f"shard {shard}", *describe(shards.share(plan, shard))]) + "\n")
            sys.stdout.writelines(f"{line}\n" for line in seeds_needed.lines(request.config, plan))
            return 0
    several = launcher.here and name != "basic"  # shards at once, each in a process of its own
    cores = sorted(os.sched_getaffinity(0)) if several and request.config["device"] == "cpu" else []
    gpus = _gpus() if several and request.config["device"] == "cuda" else []
    places = min(len(cores or gpus), len(chosen))
    if name == "joblib":
        places, to_hydra = _at_once(places, to_hydra)
    if name == "ray":
        ray_cluster.refuse_absent(to_hydra)
    folder = _folder(request)
    goes_on = request.config["resume"] is not None and folder.exists()  # of resume=last there may be none
    config = _absolute(request.config)
    moved = {
        key: config[key]
        for key in ("results_dir", "reports_dir", "data_path", "ceilings", "config_dir")
        if config[key]
    }
    kept = [w for w in words if w.partition("=")[0] not in ("resume", "run_id", "quiet", *moved)]
    kept += [f"{key}={value}" for key, value in moved.items()]
    kept += ["quiet=true", *([f"resume={folder}"] if goes_on else [])]
    job = ShardJob(
        words=_without_dollars(json.dumps(kept)),
        run_id="" if goes_on else folder.name,
        folder=_without_dollars(str(Path.cwd())),
        places=places,
        cores=cores,
        gpus=gpus,
    )
    # What the device decides is not known where shards run elsewhere: they hold themselves to their own.
    is_known = launcher.here or not is_whole or f"device={request.config['device']}" in words
    about = {
        "made_by": "launch",
        "command": command_line(["-m", *(argv if is_whole else (*request.overrides, *asked, *to_hydra))]),
        "config": request.config if is_known else {},
        "question": request.config["question"],
    }
    overrides = [f"shard={','.join(map(str, chosen))}", f"hydra/launcher={name}"]
    began, before = time.time(), _ended(folder, chosen)
    with (
        side_by_side.lead() if several else nullcontext() as lead,
        interruptible(lead.end if lead else None) as interrupts,
        run_lock.held(folder, "shards"),
    ):
        writer = store.RunWriter(
            folder, run_id=folder.name, sweep=request.config["name"], env_id="", env={}, about=about
        )
        if lead:
            job.lead = str(lead.folder)
        with recorded(writer):
            with watch.shown(folder, {str(s) for s in chosen}, began, request.config["quiet"]):
                trouble = _launch(job, overrides, to_hydra, folder)
            if interrupts.heard:
                trouble = INTERRUPTED
            return _finish(request, writer, before, trouble, time.time() - began)


def _without_dollars(text: str) -> str:
    """A text that OmegaConf takes as it is; JSON reads the escape, `_with_dollars` that of any other text."""
    return text.replace("$", shard_job.DOLLAR)


def _at_once(places: int, to_hydra: Sequence[str]) -> tuple[int, list[str]]:
    """The places of joblib's processes, no more than it is asked for, and the words for Hydra that start so many.

    A process more than there are places would get a shard and wait with it for another one's end.

    Raises:
        UsageError: it is asked for what is no number of processes.
    """
    key = "hydra.launcher.n_jobs"
    asked = [word for word in to_hydra if word.lstrip("+").startswith(f"{key}=")]
    for word in asked:
        if not re.fullmatch(r"-1|[1-9]\d{0,5}", word.partition("=")[2]):
            raise UsageError(
                f"{word}: expected how many shards at once, or -1 for as many as there is room for"
            )
    most = int(asked[-1].partition("=")[2]) if asked else -1
    places = places if most < 0 else min(places, most)
    return places, [*(word for word in to_hydra if word not in asked), f"{key}={places}"]


def _chosen_launcher(to_hydra: Sequence[str]) -> str:
    """The name of the launcher, there to be used.

    Raises:
        UsageError: it is unknown, or not installed: then the extra that brings it is named; or it was to give a shard
            several nodes or processes, which Slurm might also never have, and the command wait.
    """
    for word in to_hydra:
        key, _, value = word.lstrip("+").partition("=")
        if key in ("hydra.launcher.nodes", "hydra.launcher.tasks_per_node") and value != "1":
            raise UsageError(
                f"{word}: a shard is one process on one node; take more shards (shard=0/8,1/8,...), or "
                "docs/examples/reference_7b.sbatch for one job on several nodes"
            )
    named = [word.partition("=")[2] for word in to_hydra if word.startswith("hydra/launcher=")]
    name = named[-1] if named else "basic"
    if name not in LAUNCHERS:
        raise unknown("launcher", name, LAUNCHERS)
    launcher = LAUNCHERS[name]
    try:
        there = all(importlib.util.find_spec(name) for name in (launcher.module, launcher.needs) if name)
    except ModuleNotFoundError:  # not even Hydra's folder of plugins
        there = False
    if not there:
        raise UsageError(
            f"hydra/launcher={name} is not installed: pip install 'fp8-harness[{launcher.extra}]' brings it; "
            "hydra/launcher=basic runs the shards one after another"
        )
    if launcher.program and shutil.which(launcher.program) is None:
        raise UsageError(
            f"hydra/launcher={name}: no {launcher.program} on the path, so this is no node of such a cluster; "
            "hydra/launcher=submitit_local runs the shards on this machine"
        )
    return name


def _launch(job: ShardJob, overrides: Sequence[str], to_hydra: Sequence[str], folder: Path) -> str:
    """Hands the shards to Hydra; why that ended early, or ""."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    # As text and not as a variable of this process, which a job on another machine has not
    job.hydra["sweep"]["dir"] = str((folder / run_files.LAUNCH).resolve()).replace("${", "\\${")
    ConfigStore.instance().store(name="shards", node=job)
    GlobalHydra.instance().clear()
    silent = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    own = [word for word in to_hydra if not word.startswith("hydra/launcher=")]
    if "hydra/launcher=ray" in overrides:
        own += ray_cluster.words(own)
    before = sys.argv
    sys.argv = ["fp8-harness", "--multirun", *overrides, *silent, *own]
    try:
        with slurm_queue.watched():
            hydra.main(version_base="1.3", config_path=None, config_name="shards")(shard_job.run)()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 -- whatever a launcher raises, the rows say what is done
        return one_line(error)
    except SystemExit as error:
        return f"Hydra ended with code {error.code}" if error.code else ""
    finally:
        sys.argv = before
    return ""


def _ended(folder: Path, chosen: Sequence[Shard]) -> dict[Shard, object]:
    """When each shard ended last, as it noted it."""
    return {shard: store.read_about(folder / shard.folder).get("ended_at") for shard in chosen}


def _finish(
    request: Request, writer: store.RunWriter, before: dict[Shard, object], trouble: str, seconds: float
) -> int:
    """Reads what came of the shards, writes the report of what there is, and says what is missing.

    A shard that did not end after `before` was refused this time, or never started.
    """
    from harness.report import write_report

    folder = writer.folder
    chosen, ended = list(before), _ended(folder, list(before))
    states = {shard: store.read_about(folder / shard.folder).get("state", "not begun") for shard in chosen}
    states |= {s: "not begun" for s in chosen if states[s] == "finished" and ended[s] == before[s]}
    unfinished = {shard: state for shard, state in states.items() if state != "finished"}
    writer.close("finished" if not unfinished else INTERRUPTED if trouble == INTERRUPTED else "failed")
    rows = _rows(folder)
    counts = rows["status"].value_counts()
    said = ", ".join(f"{counts[status]} {status}" for status in sorted(counts.index)) or "no rows"
    sys.stdout.write(
        f"{len(chosen) - len(unfinished)} of {len(chosen)} shards finished in {seconds:.0f} s: {said}\n"
    )
    sys.stdout.write(f"results  {folder}\n")
    sys.stdout.flush()  # whatever becomes of the report, the reader knows where the rows are
    message = ""
    if len(rows):
        html = Path(request.config["reports_dir"]) / f"{folder.name}.html"
        try:
            sys.stdout.write(f"report   {write_report([folder], html).html}\n")
        except KeyboardInterrupt:
            message = f"interrupted; python -m harness report {folder} makes the report"
        except (UsageError, OSError) as error:  # shards elsewhere may still write, and move files as they do
            message = f"no report: {error}; python -m harness report {folder} makes it"
    if unfinished:
        which = ", ".join(f"{shard} ({state})" for shard, state in unfinished.items())
        why = f": {trouble}" if trouble else ""
        message = (
            f"shards {which} did not finish{why}; what they stored is kept, the same command with "
            f"resume={folder.name} runs the rest"
        )
    if message:
        sys.stderr.write(f"error: {message}\n")
        return 2
    return 1 if counts.get("failed", 0) else 0


def _rows(folder: Path) -> pd.DataFrame:
    """The rows of a run, of which shards elsewhere may still move a file between its listing and its reading."""
    for _ in range(LOOKS - 1):
        try:
            return store.read_quietly(folder)[0]
        except UsageError:
            time.sleep(1.0)
    return store.read_quietly(folder)[0]


def _folder(request: Request) -> Path:
    """The folder of the run, new or to be continued."""
    from harness.machine.environment import commit_here

    folder = run_folder.of_run(request.config, commit_here()).resolve()
    run_folder.refuse_stranger(folder)
    return folder


def _absolute(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the folders that shards share as absolute paths."""
    paths = {key: str(Path(config[key]).resolve()) for key in ("results_dir", "reports_dir") if config[key]}
    if config["config_dir"]:
        paths["config_dir"] = str(Path(config["config_dir"]).resolve())
    if config["data_path"]:
        paths["data_path"] = str(Path(config["data_path"]).resolve())
    if config["ceilings"]:
        paths["ceilings"] = str(store.find_run(config["ceilings"]).resolve())
    return {**config, **paths}


def _device(asked: str) -> str:
    from harness.machine.environment import device_kind

    return device_kind(asked)


def _leave(asked: str) -> str:
    """The device of a machine that is not this one: each shard finds out by itself."""
    return "cpu" if asked == "auto" else asked


def _gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
