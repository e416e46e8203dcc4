"""A new user's first hour, by the documentation alone: `python tests/studies/newcomer.py CHECKOUT [--here] [--only STEP ...]`.

CHECKOUT is a fresh clone. Each command is read from a page of it, so that one that is no longer there ends the script (exit
2). Home and caches are empty. Steps run in a new folder, with the environment that `make quick` sets up; with `--here` with
the interpreter of this script, and nothing is installed. Prints a table of seconds, exit codes and load; exit 1 where a
command did not end as its page says.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "harness")]

from command_repo import SPIN, SUITE, commit, make_repository  # noqa: E402
from doc_blocks import blocks, section  # noqa: E402

# Left out of the environment: caches that are full, and what belongs to the process that started this one.
OURS = re.compile(r"^(FP8CORE_|TRITON_|TORCHINDUCTOR_|TORCH_HOME|HF_|PYTHONPATH|VIRTUAL_ENV|PYTEST_|MAKE)")
ACTIVATE = ("docs/index.md", "The first ten minutes", r"^source \S+activate")


@dataclass(frozen=True)
class Step:
    """Something that a new user wants, and where the documentation says how.

    Attributes:
        name: of the step.
        page: relative to the checkout.
        heading: pattern of the section; "" is the whole page.
        line: pattern of one command of it; "" takes all of its blocks in turn.
        folder: where it is typed, relative to the checkout; "" is a folder of the user's own.
        exit: the code that the page promises.
        needs: a module without which the step is skipped.
        planned: pattern of the commands in a `sh plan` block that are typed up to their plan; they would take too long.
    """

    name: str
    page: str
    heading: str
    line: str = ""
    folder: str = ""
    exit: int = 0
    needs: str = ""
    planned: str = "sweep="


STEPS = (
    Step("install and quick", "README.md", "^Start", r"^make quick", "."),
    Step("doctor", "docs/index.md", "The first ten minutes", r"^python -m harness doctor"),
    Step("advise on a name", "docs/index.md", "The first ten minutes", r"^python -m harness advise "),
    Step("advise on a config.json", "docs/advise.md", "", r"^python -m harness advise .*config\.json", "docs/examples"),
    Step("sweeps of a Hugging Face model", "docs/tutorial-measure-my-model.md", "Hugging Face", needs="transformers",
         planned="sweep=divergence"),
    Step("A/B in a loop", "docs/tutorial-ab-in-my-loop.md", ""),
    # The repository's benchmark is made twice as slow: the page says exit 1.
    Step("gate on an own repository", "docs/howto-gate-your-benchmarks.md", "^Gate your own", r"^cd your-repository\n.*", exit=1),
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """What is typed: a shell script, the exit code that it must have, and files that are written before."""

    script: str
    exit: int = 0
    files: tuple[tuple[str, str], ...] = ()


def one(checkout: Path, page: str, heading: str, line: str) -> str:
    """The first command of a section's blocks that matches; comments stay, as somebody copies them.

    Raises:
        LookupError: names the page and the pattern.
    """
    for _, _, content in blocks(section(checkout / page, heading)):
        if found := re.search(line + r".*$", content, re.MULTILINE):
            return found[0]
    raise LookupError(f"{page}: no command matches {line!r} below {heading or 'its title'!r}")


def commands(checkout: Path, step: Step) -> list[Command]:
    """What a step types, from its page.

    Raises:
        LookupError: the page has no such heading or command.
    """
    if step.line:
        return [Command(one(checkout, step.page, step.heading, step.line), step.exit)]
    typed: list[Command] = []
    files: list[tuple[str, str]] = []
    source = ""

    def flush() -> None:
        nonlocal source
        if source:
            name = f"{Path(step.page).stem.replace('-', '_')}_{len(typed)}.py"
            typed.append(Command(f"python {name}", 0, (*files, (name, source))))
            files.clear()
            source = ""

    for language, about, content in blocks(section(checkout / step.page, step.heading)):
        if language == "python" and about.startswith("file="):
            files.append((about.removeprefix("file="), content))
        elif language == "python":
            source += content
        elif language == "sh":
            flush()
            lines = content.replace("\\\n", " ").strip().splitlines()
            if about == "plan":
                lines = [f"{line} dry_run=true" if re.search(step.planned, line) else line for line in lines]
            ends = int(about.removeprefix("exit=")) if about.startswith("exit=") else 0
            typed += [Command(line, ends, tuple(files) if not n else ()) for n, line in enumerate(lines)]
            files.clear()
    flush()
    if not typed:
        raise LookupError(f"{step.page}: nothing to type below {step.heading or 'its title'!r}")
    return typed


class User:
    """Somebody with an empty home, a checkout and a folder of their own."""

    def __init__(self, checkout: Path, home: Path, here: bool) -> None:
        self.checkout, self.here, self.folder = checkout, here, home / "work"
        self.folder.mkdir(parents=True)
        self.env = {name: value for name, value in os.environ.items() if not OURS.match(name)}
        self.env |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "COLUMNS": "120"}
        if here:
            path = f"{Path(sys.executable).parent}{os.pathsep}{self.env['PATH']}"
            self.env |= {"PATH": path, "PYTHONPATH": str(checkout)}
        self.activate = "" if here else one(checkout, *ACTIVATE)

    def typed(self, script: str, folder: Path, limit_s: float = 3600) -> tuple[int, float, str]:
        """Exit code, seconds and output of a script."""
        ready = (self.checkout / ".venv" / ".ready").exists()
        before = f"cd {shlex.quote(str(self.checkout))}; {self.activate}\n" if self.activate and ready else ""
        begun = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", f"{before}cd {shlex.quote(str(folder))}\n{script}"],
            env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s, check=False,
        )  # fmt: skip
        return done.returncode, time.monotonic() - begun, done.stdout

    def has(self, module: str) -> bool:
        return self.typed(f"python -c 'import {module}'", self.folder)[0] == 0

    def repository(self) -> None:
        """A repository with a benchmark, whose working tree made it twice as slow."""
        # The processor's time, as the page advises for a shared machine
        own = "[pytest]\naddopts = --benchmark-timer=time.process_time -p no:cacheprovider\n"
        files = {"bench/test_bench.py": SUITE, "pkg.py": SPIN.format(factor=1.0), "pytest.ini": own}
        root = make_repository(
            self.folder / "your-repository", {**files, ".gitignore": "results\n__pycache__\n"}
        )
        commit(root, {"pkg.py": SPIN.format(factor=2.0)})


def installs(user: User, script: str) -> str:
    """`make quick`; with `--here` the form that the README names for an environment that is already there."""
    if not user.here:
        return script
    text = (user.checkout / "README.md").read_text()
    if (found := re.search(r"`(make PY=python3 quick)`", text)) is None:
        raise LookupError("README.md: `make PY=python3 quick` is not there")
    return found[1]


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |", flush=True)


def follow(user: User, step: Step) -> bool:
    """Type a step, print its rows; whether each command ended as its page says."""
    right = True
    if step.needs and not user.has(step.needs):
        row(step.name, step.page, "", "", f"skipped: {step.needs} is not installed", "")
        return True
    if step.name.startswith("gate"):
        user.repository()
    for command in commands(user.checkout, step):
        script = installs(user, command.script) if step.folder == "." else command.script
        for name, content in command.files:
            (user.folder / name).write_text(content)
        begun, load = time.time(), os.getloadavg()[0]
        folder = user.checkout / step.folder if step.folder else user.folder
        code, seconds, output = user.typed(script, folder)
        ready = user.checkout / ".venv" / ".ready"
        spent = f"{seconds:.0f}"
        if step.folder == "." and not user.here and ready.exists() and ready.stat().st_mtime > begun:
            spent += f", {ready.stat().st_mtime - begun:.0f} of them to install"
        shown = textwrap.shorten(script.split("#")[0].replace("\n", "; "), 160, placeholder=" ...")
        said = f"{code}" if code == command.exit else f"**{code}**, the page says {command.exit}"
        row(step.name, step.page, f"`{shown}`", spent, said, f"{load:.1f} to {os.getloadavg()[0]:.1f}")
        if code != command.exit:
            print(output[-6000:], file=sys.stderr, flush=True)
            right = False
    return right


def main(words: Sequence[str] | None = None) -> int:
    """Exit 0: all ended as the pages say; 1: not all; 2: a page lacks a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--here", action="store_true", help="with this interpreter; nothing is installed")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="STEP")
    asked = parser.parse_args(words)
    checkout = asked.checkout.resolve()
    steps = [step for step in STEPS if not asked.only or step.name in asked.only]
    try:
        for step in steps:
            commands(checkout, step)
        with tempfile.TemporaryDirectory(prefix="newcomer-") as home:
            user = User(checkout, Path(home), asked.here)
            row("step", "page", "command", "seconds", "exit", "load")
            row(*["---"] * 6)
            wrong = [step.name for step in steps if not follow(user, step)]
            return 1 if wrong else 0
    except LookupError as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
