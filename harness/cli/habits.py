"""What Hydra's users type, in the words of the harness: flags, paths of a sweep of one's own, several runs at once.

    sweep=./my.yaml, --config-dir DIR, hydra.searchpath=[DIR]   sweeps from outside the tree: the key config_dir
    --cfg job, --info                                           the composed configuration; where sweeps come from
    -m sweep=cast,gemm axes.tokens=1024,2048                    a run for each combination, one after another
    --shell-completion                                          a script for bash

What Hydra has and the harness does not is refused with the reason (`REFUSED`).
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.config import KEYS, LITERAL, load, sweep_folders, sweeps
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REFUSED = {
    "--config-name": "a sweep is chosen by sweep=NAME or sweep=./FILE.yaml",
    "--config-path": "sweeps of your own come from --config-dir DIR",
    "--run": "sweep=NAME runs by itself; -m runs several",
    "--resolve": "--cfg job prints values as they are resolved",
    "--package": "--cfg job prints the whole configuration; it is short",
    "--hydra-help": "python -m harness --help has the keys, sweep=NAME --help the axes; launchers are in docs/howto-scale-out.md",
    "--experimental-rerun": "resume=RUN_ID continues a run, and each report names the command that made it",
}
_SHORT = {"-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path", "-c": "--cfg", "-i": "--info",
          "-r": "--run", "-p": "--package", "-sc": "--shell-completion"}  # fmt: skip
_SEARCH = "hydra.searchpath"


def plain(argv: Sequence[str]) -> tuple[list[str], str]:
    """Words of the form key=value, and the flag that asks for something else than a run ("" for a run).

    Raises:
        UsageError: a flag that is unknown, refused or lacks its value; a sweep's file that is not there.
    """
    words: list[str] = []
    folders: list[str] = []
    asked = ""
    left = list(argv)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = _SHORT.get(flag, flag)
        if flag == "--quiet":
            words.append("quiet=true")
        elif flag in ("--config-dir", "--cfg"):
            if not equals:
                if not left:
                    raise UsageError(
                        f"{word} needs a value: {flag} {'DIR' if flag == '--config-dir' else 'job'}"
                    )
                value = left.pop(0)
            if flag == "--config-dir":
                folders.append(value)
            elif value == "job":
                asked = flag
            else:
                raise UsageError(
                    f"--cfg {value}: expected --cfg job; Hydra's own settings (hydra, all) steer nothing here"
                )
        elif flag in ("--info", "--shell-completion", "--help", "-h"):
            asked = "--help" if flag == "-h" else flag
            if left and left[0] in ("all", "config", "searchpath", "plugins", "defaults", "defaults-tree"):
                left.pop(0)  # Hydra's subject; the answer has them all
        elif flag in REFUSED:
            raise UsageError(f"{flag} is not taken: {REFUSED[flag]}")
        else:
            raise UsageError(f"unknown flag {word!r}; python -m harness --help lists commands and keys")
    return _with_folder(words, folders), asked


def _with_folder(words: Sequence[str], folders: list[str]) -> list[str]:
    """The words with a sweep's path as its name and folder."""
    out = []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        value = value.strip("'\"")
        if key == _SEARCH:
            folders += [
                part.strip(" '\"").removeprefix("file://")
                for part in value.strip("[] ").split(",")
                if part.strip()
            ]
        elif key == "sweep" and value.endswith((".yaml", ".yml")):
            path = Path(value)
            if not path.is_file():
                raise UsageError(
                    f"sweep={value}: there is no such file; a sweep by name is sweep={path.stem}"
                )
            if path.suffix != ".yaml":
                raise UsageError(f"sweep={value}: expected a file that ends in .yaml")
            folders.append(str(path.parent))
            out.append(f"sweep={path.stem}")
        else:
            out.append(word)
    named = {str(Path(folder).resolve()) for folder in folders}
    if len(named) > 1:
        raise UsageError(f"sweeps come from one folder of your own, got {', '.join(sorted(named))}")
    for folder in named:
        if not Path(folder).is_dir():
            raise UsageError(f"{folder} is no folder; --config-dir DIR takes one with sweeps, NAME.yaml each")
    return [*out, *(f"config_dir={folder}" for folder in named)]


def answer(asked: str, words: Sequence[str]) -> int:
    """Prints what a flag asks for; exit code 0."""
    if asked == "--help":
        from harness.cli.catalogue import sweep_help

        return sweep_help(words)
    if asked == "--shell-completion":
        sys.stdout.write(_completion())
        return 0
    if asked == "--info":
        given = next((w.partition("=")[2] for w in words if w.startswith("config_dir=")), None)
        lines = ["sweeps come from, the last one first where names are equal:"]
        lines += [f"  {folder}" for folder in sweep_folders(given) if folder.is_dir()]
        lines += [f"  {name:<14} {path}" for name, path in sorted(sweeps(given).items())]
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    from omegaconf import OmegaConf

    from harness.machine import environment

    sys.stdout.write(OmegaConf.to_yaml(OmegaConf.create(load(words, environment.device_kind).config)))
    return 0


def several(words: Sequence[str]) -> list[list[str]]:
    """The command lines of a multirun: each combination of the values that commas part, in Hydra's order.

    Raises:
        UsageError: a word that Hydra cannot read, or a sweep over the paths of a run.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    choices: list[list[str]] = []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key in LITERAL or ("," not in value and "(" not in value):
            choices.append([word])
            continue
        try:
            parsed = parser.parse_override(word)
            choices.append(
                [f"{word.partition('=')[0]}={v}" for v in parsed.sweep_string_iterator()]
                if parsed.is_sweep_override()
                else [word]
            )
        except HydraException as error:
            raise UsageError(f"cannot read {word!r}: {str(error).splitlines()[0]}") from error
    return [list(each) for each in itertools.product(*choices)]


def run_several(words: Sequence[str], run: Callable[[list[str]], int]) -> int:
    """A run for each combination; the worst exit code: a request that could not be carried out before a failed case."""
    lines = several(words)
    if len(lines) == 1:
        raise UsageError(
            "-m runs several: part values by commas (sweep=cast,gemm, axes.tokens=1024,2048), or spread one sweep over jobs "
            "by shard=0/4,1/4,2/4,3/4"
        )
    if any(word.startswith(("resume=", "run_id=")) for word in words):
        raise UsageError(
            "several runs cannot share a run id: leave resume= and run_id= out, or give them one by one"
        )
    for line in lines:  # all are read before the first is run
        from harness.machine import environment

        load(line, environment.device_kind)
    codes = []
    for number, line in enumerate(lines, 1):
        sys.stdout.write(f"run {number} of {len(lines)}: {' '.join(line)}\n")
        sys.stdout.flush()
        codes.append(run(line))
    return max(codes)


def _completion() -> str:
    """A function of bash: commands, sweeps and keys; what follows a key is the reader's."""
    from harness.__main__ import commands

    names = [
        *commands(),
        *(f"{key}=" for key in sorted(KEYS)),
        *(f"sweep={name}" for name in sorted(sweeps())),
    ]
    words = " ".join(sorted(set(names)))
    return f"""\
# eval "$(fp8-harness --shell-completion)"
_fp8_harness() {{
  COMP_WORDBREAKS="${{COMP_WORDBREAKS//=/}}"
  COMPREPLY=( $(compgen -W "{words}" -- "${{COMP_WORDS[COMP_CWORD]}}") )
  [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace
}}
complete -o default -F _fp8_harness fp8-harness
"""
