"""`python -m harness -m sweep=NAME shard=0/4,1/4,... hydra/launcher=NAME`: a Hydra launcher starts one command a shard.

Each job is `python -m harness sweep=NAME shard=I/N run_id=ID`, wherever the launcher runs it (joblib: processes here;
submitit: Slurm jobs; ray: a Ray cluster). What came of it is read from the folder of the run, not from the launcher: the
same command with `run_id=ID` measures what a lost job did not store.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import store
from harness.cli.config import key_of, load_request
from harness.engine import run_folder, shards
from harness.machine.environment import commit_here
from harness.machine.processes import interruptible
from harness.store import run_files
from harness.store.errors import UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omegaconf import DictConfig


@dataclass(frozen=True)
class ShardCommand:
    """Hydra's task: the command of one shard, run in the folder where the sweep was asked for."""

    words: tuple[str, ...]
    folder: str

    def __call__(self, config: DictConfig) -> int:
        command = [sys.executable, "-m", "harness", *self.words, f"shard={config.shard}"]
        with subprocess.Popen(command, cwd=self.folder) as process:
            try:
                return process.wait()
            except KeyboardInterrupt:
                process.terminate()
                raise


def main(words: Sequence[str]) -> int:
    """Spread one sweep; return the exit code of the contract.

    Raises:
        UsageError: the request is refused, or the launcher is not there; nothing was started.
    """
    to_hydra = [word for word in words if word.lstrip("+~").startswith(("hydra/", "hydra."))]
    asked = [word for word in words if word.lstrip("+").startswith("shard=")]
    own = [word for word in words if word not in to_hydra and word not in asked]
    if len(asked) != 1:
        raise UsageError("a launcher spreads the shards of one run: add shard=0/4,1/4,2/4,3/4")
    chosen = [shards.parse(text) for text in asked[0].partition("=")[2].strip("[]").split(",")]
    if len({shard.count for shard in chosen}) > 1 or len(set(chosen)) < len(chosen):
        raise UsageError(f"{asked[0]}: expected different shards of one count, such as shard=0/4,1/4")
    request = load_request(
        own, lambda device: "cpu" if device == "auto" else device
    )  # each shard has its own
    if request.config.dry_run:
        from harness.cli.run import run_sweep

        for shard in chosen:
            sys.stdout.write(f"shard {shard}\n")
            run_sweep([*own, f"shard={shard}"])
        return 0
    folder = run_folder.of_run(request.config, {"git_commit": commit_here()}).resolve()
    run_folder.refuse_stranger(folder)
    if not (request.config.resume and folder.exists()):  # of resume=last there may be none
        own = [word for word in own if key_of(word) not in ("resume", "run_id")]
        own += ["resume=null", f"run_id={folder.name}"]
    _prepare(to_hydra, folder)
    sys.stdout.write(f"{run_folder.opening(folder.name)}\n")
    sys.stdout.flush()
    before = {shard: _about(folder, shard).get("ended_at") for shard in chosen}
    task = ShardCommand((*own, "quiet=true"), str(Path.cwd()))
    with interruptible():
        trouble = _launch(task, f"shard={','.join(map(str, chosen))}", to_hydra)
    return _outcome(folder, before, Path(request.config.reports_dir), trouble)


def _prepare(to_hydra: Sequence[str], folder: Path) -> None:
    """Compose what Hydra is to run.

    Raises:
        UsageError: Hydra knows no such launcher, or no such key of it.
    """
    from hydra import compose, initialize
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException

    sweep = {"dir": str(folder / run_files.LAUNCH).replace("$", "\\$"), "subdir": "${hydra.job.num}"}
    hydra_node = {"job": {"name": "fp8-harness", "chdir": False}, "output_subdir": None, "sweep": sweep}
    ConfigStore.instance().store(name="shards", node={"shard": "", "hydra": hydra_node})
    try:
        with initialize(version_base="1.3", config_path=None):
            compose("shards", list(to_hydra), return_hydra_config=True)
    except HydraException as error:
        raise UsageError(
            f"{' '.join(to_hydra)}: {one_line(error)}; in a checkout pip install -e '.[joblib]', [slurm] or [ray] brings launchers"
        ) from error


def _launch(task: ShardCommand, asked: str, to_hydra: Sequence[str]) -> str:
    """Hand the shards to Hydra; return why that ended early, or ""."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    before, silent = sys.argv, ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    sys.argv = ["fp8-harness", "--multirun", asked, *silent, *to_hydra]
    try:
        hydra.main(version_base="1.3", config_path=None, config_name="shards")(task)()
    except KeyboardInterrupt:
        return "interrupted"
    except Exception as error:  # noqa: BLE001 -- whatever a launcher raises, the rows say what is done
        return one_line(error)
    except SystemExit as error:
        return f"Hydra ended with code {error.code}" if error.code else ""
    finally:
        sys.argv = before
    return ""


def _about(folder: Path, shard: shards.Shard) -> dict[str, Any]:
    return store.read_about(folder / shard.folder)


def _outcome(folder: Path, before: dict[shards.Shard, object], reports_dir: Path, trouble: str) -> int:
    """Name the shards that did not end since `before`, report what there is; return the exit code."""
    from harness.report import write_report

    now = {shard: _about(folder, shard) for shard in before}
    missing = [
        f"{shard} ({about.get('state', 'not begun')})"
        for shard, about in now.items()
        if about.get("state") != "finished" or about.get("ended_at") == before[shard]
    ]
    sys.stdout.write(f"{len(before) - len(missing)} of {len(before)} shards finished\nresults  {folder}\n")
    if missing:
        why = f": {trouble}" if trouble else ""
        sys.stderr.write(
            f"error: shards {', '.join(missing)} did not finish{why}; the same command with run_id={folder.name} measures the rest\n"
        )
    else:  # what the launcher wrote names folders and hosts
        shutil.rmtree(folder / run_files.LAUNCH, ignore_errors=True)
    rows = store.open_run(folder)
    if len(rows):
        sys.stdout.write(f"report   {write_report([folder], reports_dir / f'{folder.name}.html').html}\n")
    return 2 if missing else int((rows["status"] == "failed").any())
