"""What Hydra's users type, in the words of the harness: flags, paths of a sweep of one's own, several runs at once.

sweep=./my.yaml, --config-dir DIR          sweeps from outside the tree: the key config_dir
--cfg job                                  the composed configuration
-m sweep=cast,gemm axes.tokens=1024,2048   a run for each combination, one after another
-m sweep=cast shard=0/2,1/2 hydra/launcher=joblib   one run by several commands: `harness.cli.launch`
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.config import LITERAL, load
from harness.cli.resume_alone import load_request
from harness.machine.processes import interruptible
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SHORT = {"-cd": "--config-dir", "-c": "--cfg", "-h": "--help", "-m": "--multirun"}
_VALUED = {"--config-dir": "DIR", "--cfg": "job"}
# In the order in which they count where several are given
_TAKEN = ["--help", "--cfg", "--multirun", "--quiet", "--config-dir"]
_PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_][\w.-]*")


def plain(argv: Sequence[str]) -> tuple[list[str], str]:
    """Words of the form key=value, and the flag that asks for something else than one run ("" for a run).

    Raises:
        UsageError: a flag that is unknown, refused, lacks its value or has one that it does not take; a sweep's file that is
            not there.
    """
    words: list[str] = []
    folders: list[str] = []
    asked: list[str] = []
    left = list(argv)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = _SHORT.get(flag, flag)
        if flag not in _TAKEN:
            raise UsageError(f"unknown flag {word!r}; python -m harness --help lists commands and keys")
        if flag in _VALUED and not equals:
            if not left:
                raise UsageError(f"{word} needs a value: {flag} {_VALUED[flag]}")
            value = left.pop(0)
        elif equals and flag not in _VALUED:
            raise UsageError(f"{word}: {flag} takes no value")
        if flag == "--config-dir":
            folders.append(value)
        elif flag == "--quiet":
            words.append("quiet=true")
        elif flag == "--cfg" and value != "job":
            raise UsageError(
                f"--cfg {value}: expected --cfg job; Hydra's own settings (hydra, all) steer nothing here"
            )
        else:
            asked.append(flag)
    # -m beside a question asks it of each run
    return _with_folder(words, folders), min(asked, key=_TAKEN.index, default="")


def _with_folder(words: Sequence[str], folders: list[str]) -> list[str]:
    """The words with a sweep's path as its name and folder."""
    out = []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key == "sweep":
            names = [_name(part.strip(" '\""), folders) for part in value.split(",")]
            out.append(f"sweep={','.join(names)}")
        else:
            out.append(word)
    named = {str(Path(folder).resolve()) for folder in folders}
    if len(named) > 1:
        raise UsageError(f"sweeps come from one folder of your own, got {', '.join(sorted(named))}")
    for folder in named:
        if not Path(folder).is_dir():
            raise UsageError(f"{folder} is no folder; --config-dir DIR takes one with sweeps, NAME.yaml each")
    return [*out, *(f"config_dir={folder}" for folder in named)]


def _name(value: str, folders: list[str]) -> str:
    """The name of a sweep that may be given by its path, whose folder is added."""
    path = Path(value)
    if path.suffix not in (".yaml", ".yml"):
        return value
    if not path.is_file():
        raise UsageError(f"sweep={value}: there is no such file; a sweep by name is sweep={path.stem}")
    if path.suffix != ".yaml" or not _PLAIN.fullmatch(path.stem):
        raise UsageError(
            f"sweep={value}: expected a file NAME.yaml whose name is a letter and then letters, digits, _, - and dots; rename it"
        )
    folders.append(str(path.parent))
    return path.stem


def answer(asked: str, words: Sequence[str], usage: Callable[[], int]) -> int:
    """Prints what a flag asks for, of each run that the words name; exit code 0.

    Args:
        asked: the flag.
        words: key=value.
        usage: what --help prints where no sweep is named.
    """
    if asked == "--help" and not any(w.lstrip("+").startswith(("sweep=", "resume=")) for w in words):
        return usage()
    from omegaconf import OmegaConf

    from harness.cli.catalogue import sweep_help
    from harness.machine import environment

    for line in several(words):
        request = load_request(line, environment.device_kind)
        if asked == "--help":
            sweep_help(request.config)
        else:
            sys.stdout.write(OmegaConf.to_yaml(OmegaConf.create(request.config)))
    return 0


def several(words: Sequence[str]) -> list[list[str]]:
    """The command lines of a multirun: each combination of the values that commas part, in Hydra's order.

    Raises:
        UsageError: a word that Hydra cannot read, or values that cannot be counted.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ValueType
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    choices: list[list[str]] = []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key == "sweep" and "(" not in value:
            choices.append([f"sweep={name}" for name in value.split(",")])
            continue
        if key in LITERAL or ("," not in value and "(" not in value):
            choices.append([word])
            continue
        try:
            parsed = parser.parse_override(word)
        except HydraException as error:
            raise UsageError(f"cannot read {word!r}: {str(error).splitlines()[0]}") from error
        if parsed.value_type in (ValueType.GLOB_CHOICE_SWEEP, ValueType.INTERVAL_SWEEP):
            raise UsageError(f"{word}: expected values parted by commas, choice(A,B) or range(FROM,TO)")
        is_several = parsed.is_sweep_override()
        choices.append(
            [f"{word.partition('=')[0]}={v}" for v in parsed.sweep_string_iterator()]
            if is_several
            else [word]
        )
    return [list(each) for each in itertools.product(*choices)]


def run_several(words: Sequence[str], run: Callable[[list[str]], int]) -> int:
    """A run for each combination; the worst exit code: a request that could not be carried out before a failed case.

    Raises:
        UsageError: one of them is refused before any has begun.
    """
    lines = several(words)
    if len(lines) == 1:
        raise UsageError("-m runs several: part values by commas (sweep=cast,gemm, axes.tokens=1024,2048)")
    if any(word.lstrip("+").startswith(("resume=", "run_id=")) for word in words):
        raise UsageError(
            "several runs cannot share a run id: leave resume= and run_id= out, or give them one by one"
        )
    for number, line in enumerate(lines, 1):
        try:
            _plan(line)
        except UsageError as error:
            raise UsageError(f"run {number} of {len(lines)} ({' '.join(line)}): {error}") from error
    codes: list[int] = []
    with interruptible() as interrupts:
        for number, line in enumerate(lines, 1):
            sys.stdout.write(f"run {number} of {len(lines)}: {' '.join(line)}\n")
            sys.stdout.flush()
            try:
                codes.append(run(line))
            except UsageError as error:  # the others are runs of their own
                sys.stderr.write(f"error: run {number} of {len(lines)}: {error}\n")
                codes.append(2)
            if interrupts.heard:
                sys.stderr.write(f"error: interrupted; {number - 1} of {len(lines)} runs were carried out\n")
                return 2
    return max(codes)


def _plan(line: list[str]) -> None:
    """Refuses what a run would refuse before it measures."""
    from harness.engine.plan import make_plan
    from harness.machine import environment
    from harness.suites import SUITES

    config = load(line, environment.device_kind).config
    if not any(part["sweep"] for part in config["parts"].values()):
        make_plan(config, SUITES)
