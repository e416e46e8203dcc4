"""What Hydra's users type, in the words of the harness: flags, paths of a sweep of one's own, several runs at once.

sweep=./my.yaml, --config-dir DIR          sweeps from outside the tree: the key config_dir
--cfg job                                  the composed configuration
-m sweep=cast,gemm axes.tokens=1024,2048   a run for each combination, one after another
-m sweep=cast shard=0/2,1/2 hydra/launcher=joblib   one run by several commands: `harness.cli.launch`
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.config import LITERAL, key_of, load, load_request
from harness.machine.processes import interruptible
from harness.store.errors import UsageError
from harness.store.words import HELP, key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_][\w.-]*")


@dataclass(frozen=True, slots=True)
class Flags:
    """python -m harness sweep=NAME: the flags beside its keys; python -m harness --help has the keys"""

    words: list[str] = word("KEY=VALUE", "keys of the sweep", [])
    config_dir: str | None = key("a folder of sweeps of your own", short="-cd")
    cfg: str | None = key("print the composed configuration", short="-c", choices=("job",))
    multirun: bool = key("a run for each combination of values parted by commas", False, short="-m")
    quiet: bool = key("no progress", False)


def plain(argv: Sequence[str]) -> tuple[list[str], str]:
    """Words of the form key=value, and the flag that asks for something else than one run ("" for a run).

    Raises:
        UsageError: a flag that is unknown, refused, lacks its value or has one that it does not take; a sweep's file that is
            not there.
    """
    flags = options_of(Flags, [each for each in argv if each not in HELP], flags_only=True)
    assert flags is not None
    asked = "--cfg" if flags.cfg else "--multirun" if flags.multirun else ""
    # -m beside a question asks it of each run
    folders = [] if flags.config_dir is None else [flags.config_dir]
    words = _with_folder([*flags.words, *["quiet=true"] * flags.quiet], folders)
    return words, "--help" if HELP & set(argv) else asked


def _with_folder(words: Sequence[str], folders: list[str]) -> list[str]:
    """The words with a sweep's path as its name and folder."""
    out = []
    for each in words:
        name, _, value = each.lstrip("+").partition("=")
        if name == "sweep":
            names = [_name(part.strip(" '\""), folders) for part in value.split(",")]
            each = f"sweep={','.join(names)}"
        out.append(each)
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
            sys.stdout.write(OmegaConf.to_yaml(OmegaConf.create(request.config.plain())))
    return 0


def several(words: Sequence[str]) -> list[list[str]]:
    """The command lines of a multirun: each combination of the values that commas part, in Hydra's order.

    Raises:
        UsageError: a word that Hydra cannot read, or values that cannot be counted.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    several = [w for w in words if {",", "("} & set(w) and key_of(w) not in LITERAL]
    try:
        parsed = OverridesParser.create().parse_overrides(several)
        (lines,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise UsageError(
            f"{' '.join(several)}: {str(error).splitlines()[0]}; expected values parted by commas, choice(A,B) or range(FROM,TO)"
        ) from error
    chosen = map(iter, lines)
    return [[next(line, word) if word in several else word for word in words] for line in chosen]


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

    make_plan(load(line, environment.device_kind).config, SUITES)
