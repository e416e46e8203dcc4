"""Every main command from the wheel alone: an environment that holds it and what it declares, an empty folder, no network.

    python tests/studies/wheel_alone.py [--only WORD ...]

The declared dependencies are links to those of the running interpreter; nothing else that is installed there can be imported: no
extra, no Triton, torchao or pytest. The working folder, HOME and the caches are empty. Where the system allows it the
processes have no network at all. Prints a line a command with its seconds; exit 1 where one did not do what is expected of it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ABSENT = ("triton", "torchao", "pytest", "ml_dtypes", "gfloat", "hypothesis", "transformers")
# Files that a user would have
FILES = {
    "mine.yaml": "# How long do our casts take?\nsuite: cast\naxes: {dtype: [e4m3fn], granularity: [rowwise], M: [64], K: [64]}\n"
    "arms: [eager, copy]\n",
    "steps.yaml": "# How long is a step?\nsuite: train\naxes: {model: [nano], compute: [fp32], batch: [2], seq: [16]}\n"
    "arms: [bf16_eager, tensorwise_eager]\n",
    "curve.csv": "step,val_loss\n0,4\n10,3\n",
    "times.json": '{"machine_info": {}, "commit_info": {}, "version": "5.0.0", "datetime": "2026-11-23T00:00:00+00:00", "benchmarks": '
    '[{"name": "t", "fullname": "bench.py::t", "group": null, "params": null, "param": null, "extra_info": {}, "options": {}, '
    '"stats": {"data": [0.01, 0.011, 0.0105], "median": 0.0105, "rounds": 3}}]}',
}
QUICK = "device=cpu rounds=3 timing.min_samples=3 timing.min_seconds=0.01"
# What is typed after `python -m harness`, what its output must hold, its exit code; later ones read the runs of earlier ones.
COMMANDS = (
    ("--version", "fp8-harness 0.", 0),
    ("--help", "usage: python -m harness", 0),
    ("list sweeps", "gemm", 0),
    ("list extensions", "no installed package", 0),
    ("list arms gemm", "rowwise_eager", 0),
    ("doctor device=cpu", "torchao is not installed", 0),
    ("sweep=quick dry_run=true device=cpu", "nothing was measured", 0),
    ("sweep=gemn", "unknown sweep", 2),
    (f"sweep=./mine.yaml run_id=one {QUICK}", "report   reports/one.html", 0),
    (f"sweep=./mine.yaml run_id=two {QUICK}", "report   reports/two.html", 0),
    (f"sweep=./steps.yaml run_id=steps {QUICK}", "report   reports/steps.html", 0),
    ("resume=one", "nothing new", 0),
    ("report results/mine/one results/steps/steps -o both.html", "both.html", 0),
    ("gate --baseline results/mine/one --candidate results/mine/two", "", 6),
    ("advise model=llama3_8b gpu=h200", "llama3_8b on H200", 0),
    ("diff results/mine/one results/mine/two", "", 0),
    ("runs", "index", 0),
    ("fleet results/mine/one results/mine/two", "not judged", 0),
    ("import times.json", "results", 0),
    ("verdict base=curve.csv candidate=curve.csv", "INCONCLUSIVE", 6),
    ("export results/mine/one -o out.csv", "out.csv", 0),
    (f"-m sweep=./mine.yaml axes.M=16,32 {QUICK}", "results", 0),
)


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", help="only the commands that hold one of these words")
    only = parser.parse_args(argv).only
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        work = Path(name) / "work"
        work.mkdir()
        python = environment(Path(name))
        for file, text in FILES.items():
            (work / file).write_text(text)
        env = {"PATH": os.environ["PATH"], "HOME": name, "XDG_CACHE_HOME": name, "OMP_NUM_THREADS": "1"}
        check = f"import importlib.util as u; assert not [m for m in {ABSENT!r} if u.find_spec(m)]"
        subprocess.run([python, "-c", check], env=env, cwd=work, check=True)
        for words, holds, code in COMMANDS:
            if only and not any(word in words for word in only):
                continue
            line = [*offline(), str(python), "-m", "harness", *words.split()]
            started = time.perf_counter()
            done = subprocess.run(line, cwd=work, env=env, capture_output=True, text=True)
            out = done.stdout + done.stderr
            is_good = holds in out and "Traceback" not in out and done.returncode == code
            failed += not is_good
            took = f"{time.perf_counter() - started:6.1f} s  exit {done.returncode}"
            print(f"{'ok    ' if is_good else 'FAILED'} {took}  {words}", flush=True)
            print("" if is_good else out[-3000:], end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
