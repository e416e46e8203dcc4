"""`python -m harness resume=RUN_ID`: a run continues by its own settings, as its _run.json holds them.

With `sweep=NAME` beside it, or without `resume=`, a command line is composed as it stands (`harness.cli.config`).
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.cli.config import LITERAL, Composed, Request, key_of, load, sweeps, timing_of
from harness.engine.settings import OF_ONE_COMMAND, SweepConfig, deciding
from harness.store import run_files
from harness.store.errors import UsageError, unknown
from harness.store.private import CUT, found_again

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def continued(
    words: Sequence[str], given: Mapping[str, str], resolve_device: Callable[[str], str]
) -> Request:
    """The request of a command line that names a run and no sweep, by the settings of that run.

    Args:
        words: `key=value`.
        given: value by key, the same words.
        resolve_device: see `harness.cli.config.load`.

    Raises:
        UsageError: see `harness.cli.config.load`; no run or several of that id, a _run.json that holds no settings, a
            setting that would change what was measured.
    """
    name = given["resume"].strip("'\"")
    if name == "":
        raise UsageError("resume=: expected a run id, a folder, or last")
    # With pyarrow, which a dry run does without
    from harness.engine.run_folder import mark, refuse_other_settings

    home = Path(given.get("results_dir", SweepConfig.results_dir).strip("'\""))
    folder = _folder(name, home)
    try:
        about, stored = _stored(folder)
        ours = (home / run_files.SALT).exists() and about.get("mark") == mark(
            home, about["run_id"], about["config"]
        )
        if not ours and given.get("trust") != "true":
            raise UsageError(
                f"{folder} was not made in {home} (results_dir=DIR names another): read its {run_files.ABOUT}, whose settings "
                "name code that is run and folders that are written to, then add trust=true"
            )
        stored = {key: _found_again(key, value, given) for key, value in stored.items()}
        known = sweeps(given.get("config_dir", stored["config_dir"]))
        if stored["name"] not in known:
            raise UsageError(f"its sweep file is gone: {unknown('sweep', stored['name'], known)}")
        same = [
            f"{key}={stored[key]}" for key in ("device", "config_dir") if stored[key] and key not in given
        ]
        own = [word for word in words if key_of(word) != "resume"]
        now = load([f"sweep={stored['name']}", *same, *own], resolve_device).config.plain()
        named = {
            k: v for k, v in deciding(now).items() if any(f"{k}.".startswith(f"{key}.") for key in given)
        }
        refuse_other_settings(about["run_id"], about, {**deciding(stored), **named})
    except UsageError as error:
        raise UsageError(f"resume={name}: {error}") from error
    config = {**now, **{key: value for key, value in stored.items() if key not in OF_ONE_COMMAND}}
    config |= {key: now[key] for key in given if key in now and key not in OF_ONE_COMMAND}
    if "train.judge" in given:
        config["train"] = {**config["train"], "judge": now["train"]["judge"]}
    if not ours and "reports_dir" not in given:
        config["reports_dir"] = now["reports_dir"]
    if "results_dir" not in given:
        config["results_dir"] = str(folder.parent.parent)
    config["resume"] = str(folder)
    return Request(SweepConfig.of(config), timing_of(config), (*_command(about, stored["name"], given), *own))


def _folder(name: str, results_dir: Path) -> Path:
    """The one folder of a run, by its path or its id; "last" is the newest.

    Raises:
        UsageError: there is none, or several.
    """
    if name == "last":
        from harness.engine.run_folder import newest_first

        return (newest_first(results_dir)[0] or [results_dir / "last"])[0]
    from harness.store import find_run  # pandas

    return find_run(name, results_dir)


def _files(folder: Path) -> list[Path]:
    """The _run.json of a run, else those of its shards, which may have been started apart."""
    files = [place / run_files.ABOUT for place in (folder, *run_files.shards(folder))]
    return [file for file in files if file.exists()]


def _stored(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What _run.json says of a run, and its settings with all keys of today.

    Raises:
        UsageError: it is no run, or its settings are not there or cannot be read.
    """
    if not (files := _files(folder)):
        raise UsageError(
            f"{folder} is no run: it holds no _run.json; expected a run id, or a folder results/<sweep>/<run_id>"
        )
    for file in files:
        about = _about(file)
        if isinstance(about.get("config"), dict) and about["config"]:
            break
    again = f"add resume={folder.name} to the command that made it: {about.get('command', 'not known')}"
    config = about.get("config")
    if not config or not isinstance(config, dict):
        raise UsageError(f"{files[0]} holds no settings (config) of a sweep; {again}")
    if folder.name != about["run_id"] and folder in run_files.shards(folder.parent):
        raise UsageError(f"{folder} is a shard; resume={folder.parent} continues its run")
    literal = {key: config.get(key) for key in LITERAL}
    try:
        if not all(value is None or isinstance(value, str) for value in literal.values()):
            raise UsageError(f"expected texts for {', '.join(sorted(LITERAL))}")
        others = {key: value for key, value in config.items() if key not in LITERAL}
        merged: Any = OmegaConf.merge(OmegaConf.structured(Composed), others)
        # What was stored has nothing left to fill in: what looks like it is text, and reads no variable of this machine.
        plain: Any = OmegaConf.to_container(merged, resolve=False, throw_on_missing=False)
        if plain["name"] != about["sweep"] or plain["device"] not in ("cpu", "cuda"):
            raise UsageError(
                f"it is of sweep {about['sweep']!r} and has those of {plain['name']!r} on {plain['device']!r}"
            )
    except (OmegaConfBaseException, UsageError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"the settings in {file} are damaged, or another version's: {reason}; {again}"
        ) from error
    given = {key: value for key, value in literal.items() if value is not None}
    return about, {key: value for key, value in plain.items() if key != "defaults"} | given


def _about(file: Path) -> dict[str, Any]:
    from harness.engine.run_folder import is_run  # likewise
    from harness.store.parquet import read_about

    if not is_run(file.parent):
        raise UsageError(f"{file} is damaged, or another program's: it names no run, sweep and state")
    return read_about(file.parent)


def _found_again(key: str, value: Any, given: Mapping[str, str]) -> Any:
    """A stored setting with its paths as they are here.

    Raises:
        UsageError: a path lay elsewhere, so that its folder is not stored, and it is not given anew.
    """
    if isinstance(value, dict):
        return {name: _found_again(key, each, given) for name, each in value.items()}
    if isinstance(value, list):
        return [_found_again(key, each, given) for each in value]
    if (
        isinstance(value, str)
        and value.partition("/")[0] == CUT
        and key != "results_dir"
        and key not in given
    ):
        raise UsageError(f"{key} was {value}, the folder of which no run names: add {key}=PATH")
    return found_again(value) if isinstance(value, str) else value


def _command(about: Mapping[str, Any], sweep: str, given: Mapping[str, str]) -> list[str]:
    """The words of the command that made the run, without those that belong to it alone or are given anew."""
    try:
        words = shlex.split(str(about.get("command", "")))[3:]  # python -m harness
    except ValueError:
        words = []
    kept = [w for w in words if "=" in w and key_of(w) not in {*OF_ONE_COMMAND, *given}]
    return kept if f"sweep={sweep}" in kept else [f"sweep={sweep}"]
