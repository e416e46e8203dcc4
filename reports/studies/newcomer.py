"""A new user's first hour, by the documentation alone: `python reports/studies/newcomer.py CHECKOUT [--here] [--only STEP ...]`.

CHECKOUT is a fresh clone. Each command is read from a page of it, so that one that is no longer there ends the script (exit 2).
Home and caches are empty. Steps run in a new folder, with the environment that `make quick` sets up; with `--here` with the
interpreter of this script, and nothing is installed. Prints a table; exit 1 where a command did not end as its page says.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "harness")]

from command_repo import SPIN, SUITE, commit, make_repository  # noqa: E402
from doc_blocks import blocks, section  # noqa: E402

# Left out of the environment: caches that are full, and what belongs to the process that started this one.
OURS = re.compile(r"^(FP8CORE_|TRITON_|TORCHINDUCTOR_|TORCH_HOME|HF_|PYTHONPATH|VIRTUAL_ENV|PYTEST_|MAKE)")


class Step(NamedTuple):
    """Something that a new user wants, and where the documentation says how.

    Attributes:
        name: of the step.
        page: relative to the checkout.
        heading: pattern of the section; "" is the whole page.
        line: pattern of one command of it; "" takes all of its blocks in turn.
        folder: where it is typed, relative to the checkout; "" is a folder of the user's own.
        exit: the code that the page promises.
        needs: a module without which the step is skipped.
    """

    name: str
    page: str
    heading: str
    line: str = ""
    folder: str = ""
    exit: int = 0
    needs: str = ""


STEPS = (
    Step("quick", "README.md", "^Start", r"^make quick", "."),
    Step("doctor", "docs/index.md", "The first ten minutes", r"^python -m harness doctor"),
    Step("advise", "docs/index.md", "The first ten minutes", r"^python -m harness advise "),
    Step("config", "docs/advise.md", "", r"^python -m harness advise .*config\.json", "docs/examples", needs="transformers"),
    Step("model", "docs/tutorial-measure-my-model.md", "Hugging Face", needs="transformers"),
    Step("loop", "docs/tutorial-ab-in-my-loop.md", ""),
    # The repository's benchmark is made twice as slow: the page says exit 1.
    Step("gate", "docs/howto-gate-your-benchmarks.md", "^Gate your own", r"^cd your-repository\n.*", exit=1),
)  # fmt: skip


def script(checkout: Path, step: Step, folder: Path) -> str:
    """What a step types, from its page; its files and programs are written into the folder.

    Raises:
        LookupError: the page has no such heading or command.
    """
    parts = list(blocks(section(checkout / step.page, step.heading)))
    if step.line:
        found = (re.search(step.line + r".*$", content, re.MULTILINE) for _, _, content in parts)
        typed = [match[0] for match in found if match][:1]
    else:
        typed, source = [], ""
        for number, (language, about, content) in enumerate(parts):
            if about.startswith("file="):
                (folder / about.removeprefix("file=")).write_text(content)
            elif language == "python":  # one program to the end of the page: its blocks share names
                source += content
                (folder / f"part_{number}.py").write_text(source)
                typed.append(f"python part_{number}.py")
            elif language == "sh":
                plan = " dry_run=true" if about == "plan" else ""
                typed += [line + plan for line in content.strip().splitlines()]
    if not typed:
        raise LookupError(
            f"{step.page}: no command matches {step.line!r} below {step.heading or 'its title'!r}"
        )
    return "\n".join(typed)


def follow(checkout: Path, home: Path, step: Step, here: bool) -> bool:
    """Types a step and prints its row; whether it ended as its page says."""
    folder = home / step.name
    folder.mkdir(parents=True)
    if step.name == "gate":
        # The processor's time, as the page advises for a shared machine
        own = "[pytest]\naddopts = --benchmark-timer=time.process_time -p no:cacheprovider\n"
        files = {"bench/test_bench.py": SUITE, "pkg.py": SPIN.format(factor=1.0), "pytest.ini": own,
                 ".gitignore": "results\n__pycache__\n"}  # fmt: skip
        commit(make_repository(folder / "your-repository", files), {"pkg.py": SPIN.format(factor=2.0)})
    typed = script(checkout, step, folder)
    env = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    env |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "COLUMNS": "120"}
    before = f"source {shlex.quote(str(checkout / '.venv/bin/activate'))}\n" if step.folder != "." else ""
    if here:
        path = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        before, typed = "", typed.replace("make quick", "make PY=python3 quick")
        env |= {"PATH": path, "PYTHONPATH": str(checkout)}
    if (
        step.needs
        and subprocess.run([sys.executable, "-c", f"import {step.needs}"], capture_output=True).returncode
    ):
        print(f"| {step.name} | {step.page} | | skipped: {step.needs} is not installed |")
        return True
    begun = time.monotonic()
    at = checkout / step.folder if step.folder else folder
    done = subprocess.run(["bash", "-ec", before + typed], cwd=at, env=env, capture_output=True, text=True)
    print(f"| {step.name} | {step.page} | {time.monotonic() - begun:.0f} s | {done.returncode} |", flush=True)
    if done.returncode != step.exit:
        print(f"the page says {step.exit}\n{done.stdout[-3000:]}{done.stderr[-3000:]}", file=sys.stderr)
    return done.returncode == step.exit


def main(words: Sequence[str] | None = None) -> int:
    """Exit 0: all ended as the pages say; 1: not all; 2: a page lacks a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--here", action="store_true", help="with this interpreter; nothing is installed")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="STEP")
    asked = parser.parse_args(words)
    steps = [step for step in STEPS if not asked.only or step.name in asked.only]
    try:
        with tempfile.TemporaryDirectory(prefix="newcomer-") as home:
            print("| step | page | took | exit |\n|---|---|---|---|")
            right = [follow(asked.checkout.resolve(), Path(home), step, asked.here) for step in steps]
            return 0 if all(right) else 1
    except LookupError as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
