"""Every main command from the wheel alone: an environment that holds it and what it declares, an empty folder, no network.

    python tests/studies/wheel_alone.py [--only WORD ...]

The declared dependencies are links to those of the running interpreter; nothing else that is installed there can be imported: no
extra, no Triton, torchao, scipy or pytest. The working folder, HOME and the caches are empty. Where the system allows it the
processes have no network at all. Prints a line a command with its seconds; exit 1 where one did not do what is expected of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ABSENT = ("triton", "torchao", "scipy", "pytest", "ml_dtypes", "gfloat", "hypothesis", "transformers")
# Files that a user would have; {run} of a command is the folder of the first run.
FILES = {
    "mine.yaml": "# How long do our casts take?\nsuite: cast\naxes: {dtype: [e4m3fn], granularity: [rowwise], M: [64], K: [64]}\n"
    "arms: [eager, copy]\n",
    "steps.yaml": "# How long is a step?\nsuite: train\naxes: {model: [nano], compute: [fp32], batch: [2], seq: [16]}\n"
    "arms: [bf16_eager, tensorwise_eager]\n",
    "double.py": "import triton\nimport triton.language as tl\n\n@triton.jit\ndef double(x, n, BLOCK: tl.constexpr):\n    pass\n",
    "times.json": json.dumps(
        {
            "machine_info": {}, "commit_info": {}, "version": "5.0.0", "datetime": "2026-11-23T00:00:00+00:00",
            "benchmarks": [
                {"name": "test_a", "fullname": "bench.py::test_a", "group": None, "params": None, "param": None, "extra_info": {},
                 "options": {}, "stats": {"data": [0.01, 0.011, 0.0105], "median": 0.0105, "rounds": 3}}
            ],
        }
    ),
}  # fmt: skip
FILES["loop.py"] = (
    (ROOT / "docs/examples/ab/after/plain_loop.py")
    .read_text()
    .replace("max_steps, microbatches, length = 200", "max_steps, microbatches, length = 60")
)
QUICK = ("device=cpu", "rounds=3", "timing.min_samples=3", "timing.min_seconds=0.01")


@dataclass(frozen=True)
class Command:
    """What is typed after `python -m harness`, its exit code, and what its output must hold."""

    words: tuple[str, ...]
    holds: str
    code: int = 0

    def __str__(self) -> str:
        return " ".join(self.words)


def commands() -> list[Command]:
    """In order: later ones read the runs of earlier ones."""
    lists = ("sweeps", "models", "gpus", "recipes", "extensions")
    return [
        Command(("--version",), "fp8-harness 0."),
        Command(("--help",), "usage: python -m harness"),
        *(Command(("list", what), {"extensions": "no installed package"}.get(what, "")) for what in lists),
        Command(("list", "arms", "gemm"), "rowwise_eager"),
        Command(("doctor", "device=cpu"), "torchao is not installed"),
        Command(("sweep=quick", "dry_run=true", "device=cpu"), "nothing was measured"),
        Command(("sweep=gemm", "--help"), "axes"),
        Command(("sweep=gemn",), "unknown sweep", 2),
        Command(("sweep=./mine.yaml", "run_id=one", *QUICK), "report   reports/one.html"),
        Command(("sweep=./mine.yaml", "run_id=two", *QUICK), "report   reports/two.html"),
        Command(("sweep=./steps.yaml", "run_id=steps", *QUICK), "report   reports/steps.html"),
        Command(("resume=one",), "nothing new"),
        Command(("watch", "results/mine/one"), "finished"),
        Command(("report", "results/mine/one", "results/steps/steps", "-o", "both.html"), "both.html"),
        Command(("gate", "--baseline", "results/mine/one", "--candidate", "results/mine/two"), "", 6),
        Command(("advise", "model=config.json", "gpu=h200"), "on H200"),
        Command(("advise", "model=llama3_8b", "gpu=h200"), "llama3_8b on H200"),
        Command(("diff", "results/mine/one", "results/mine/two"), ""),
        Command(("fleet", "results/mine/one", "results/mine/two"), "can't tell"),
        Command(("import", "times.json"), "results"),
        Command(("export", "results/mine/one", "-o", "out.json"), "out.json"),
        Command(
            ("kernel", "double.py:double", "x=*bf16", "n=i32:16", "BLOCK=128"),
            "pip install 'fp8-harness[interpreter]'",
            2,
        ),
        Command(("sweep=gpu", "dry_run=true", "device=cpu"), ""),
        Command(("-m", "sweep=./mine.yaml", "axes.M=16,32", *QUICK), "results"),
        Command(("SCRIPT", "loop.py"), "in FP8"),
    ]


def closure(names: list[str]) -> dict[str, object]:
    """Distributions by name that these requirements need here, extras left out."""
    found: dict[str, object] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        need = waiting.pop()
        key = re.sub(r"[-_.]+", "-", need.name).lower()
        if key in found or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        try:
            found[key] = distribution(need.name)
        except PackageNotFoundError as error:
            raise SystemExit(f"error: {need} is declared and not installed here: {error}") from error
        waiting += [Requirement(line) for line in found[key].requires or []]  # type: ignore[attr-defined]
    return found


def environment(folder: Path) -> Path:
    """A virtual environment with the wheel of this tree and links to what it declares; returns its interpreter."""
    tree = folder / "tree"
    shutil.copytree(
        ROOT,
        tree,
        ignore=shutil.ignore_patterns(".git", ".venv", "build", "results", "reports", "tests", "*.egg-info"),
    )
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-index", "--no-deps"]
    subprocess.run([*pip, "wheel", *alone, "--no-build-isolation", "-w", folder, tree], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env/bin/python"
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", *alone, wheel], check=True)
    (site,) = (folder / "env/lib").glob("python*/site-packages")
    (own,) = site.glob("fp8_harness-*.dist-info")
    needs = re.findall(r"^Requires-Dist: (.*)$", (own / "METADATA").read_text(), re.MULTILINE)
    for each in closure(needs).values():
        for file in {f.parts[0] for f in each.files or [] if f.parts[0] not in ("..", "__pycache__", "bin")}:  # type: ignore[attr-defined]
            if not (site / file).exists():
                (site / file).symlink_to(Path(each.locate_file(file)))  # type: ignore[attr-defined]
    return python


def offline() -> list[str]:
    """The words before a command that take its network away; none where the system does not allow it."""
    words = ["unshare", "--user", "--map-root-user", "--net"]
    there = shutil.which("unshare") and not subprocess.run([*words, "true"], capture_output=True).returncode
    return words if there else []


def main(argv: list[str] | None = None) -> int:
    """Runs them all; returns 1 where one did not do what is expected of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="only the commands that hold one of these words")
    asked = parser.parse_args(argv)
    only = asked.only
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = environment(folder)
        work, home = folder / "work", folder / "home"
        work.mkdir()
        home.mkdir()
        for file, text in FILES.items():
            (work / file).write_text(text)
        shutil.copy(ROOT / "docs/examples/Qwen3-8B/config.json", work)
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        before = offline()
        sys.stdout.write(f"network: {'none' if before else 'not taken away, the system does not allow it'}\n")
        check = f"import importlib.util as u; print([m for m in {ABSENT!r} if u.find_spec(m)])"
        there = subprocess.run(
            [python, "-c", check], capture_output=True, text=True, env=env, cwd=work, check=True
        )
        assert there.stdout.strip() == "[]", f"{there.stdout} can be imported"
        for command in commands():
            if only and not any(word in str(command) for word in only):
                continue
            words = (
                [python, *command.words[1:]]
                if command.words[0] == "SCRIPT"
                else [python, "-m", "harness", *command.words]
            )
            if command.words == ("--version",):
                words = [folder / "env/bin/fp8-harness", "--version"]
            started = time.perf_counter()
            done = subprocess.run(
                [*before, *words], cwd=work, env=env, capture_output=True, text=True, check=False
            )
            seconds = time.perf_counter() - started
            out = done.stdout + done.stderr
            is_good = command.holds in out and "internal error:" not in out and "Traceback" not in out
            is_good &= done.returncode == command.code or (command.code == -1 and done.returncode in (0, 1))
            sys.stdout.write(
                f"{'ok    ' if is_good else 'FAILED'} {seconds:6.1f} s  exit {done.returncode}  {command}\n"
            )
            lines = [line for line in out.splitlines() if line.strip()]
            sys.stdout.write(
                f"         ... {lines[-1] if lines else 'prints nothing'}\n"[:160].rstrip() + "\n"
            )
            if not is_good:
                failed.append(str(command))
                sys.stdout.write("".join(f"         {line}\n" for line in lines[-25:]))
            sys.stdout.flush()
    sys.stdout.write(
        f"{len(failed)} of the commands failed\n" if failed else "all commands did what is expected of them\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
