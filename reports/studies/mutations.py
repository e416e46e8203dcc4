"""Which planted faults the tests notice, and which tests notice none: `python reports/studies/mutations.py WORD --state DIR`.

    map   DIR/tree is a clone of HEAD; the tests named (default: all) run there once, a few files at a time, and DIR keeps
          which test ran which line and how long it took. What is there already is not run again.
    run   plants each fault in DIR/tree, runs the tests that ran its line, the quickest first, until one fails.
          With --all every such test is run, whether the fault was judged before or not.
    cover prints the test functions that may leave by the map and `run --all`.
    check plants each fault and runs the tests of its line that are not named in --gone, then those that are: a fault that
          only these notice is what their removal would cost.
    near  runs the tests that ran lines which have changed here since the map was made, the quickest first, for --budget-s.
    table prints what is known so far, as markdown, and writes each test that a fault was shown to into DIR/matrix.parquet.
    list  prints the faults.

--of names files or folders of code from which faults are drawn.

The working tree is never touched; each command may be stopped and started again. A fault counts as killed only by a test
that passed without it.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import house
import pandas as pd
from coverage import CoverageData
from mutator import Mutation, find, select

ROOT = Path(__file__).parents[2]

PACKAGES = ("fp8core", "harness")
LEFT_OUT = "not slow and not benchmark_bar and not clients and not cluster and not gpu"
FILES_AT_ONCE = 6  # test files of one pytest process while the map is made
ROOM = "tests/harness/"  # what a numeric library promises is not left to a few hundred faults: fp8core's tests stay
STAY = ("tests/harness/test_", "tests/harness/judge/test_loss_situations", "tests/harness/timing/test_tim")
UNSEEN = re.compile(
    r"subprocess\.|Popen|\bProcess\(|fork_server|multiprocessing|on_ranks|torchrun|os\.fork|spawn\(|sys\.executable|executor\.run"
    r"|torch\.compile|fullgraph|inductor|@given|torchao|ml_dtypes|gfloat|[Bb]it for bit|[Bb]itwise|FlopCounter"
    r"|by.hand|closed form|formula|by the definition|scipy|[Nn]um[Pp]y|np\.testing"
)
ORACLE = re.compile(r"[Oo]racle|float64|fp64|published|torch's|pandas")
NEIGHBOURS = (
    40  # tests of a line that no test ran, or that ran at import: those that ran the most of its file
)


class State:
    """The folder that keeps a study: a clone of the commit for each worker, the map and the results."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.tree = folder.resolve(), folder.resolve() / "tree"
        self.results = self.folder / "results.jsonl"
        (self.folder / "map").mkdir(parents=True, exist_ok=True)
        (self.folder / "coveragerc").write_text("[run]\nrelative_files = true\n")
        self.trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for tree in [self.tree, *(self.folder / f"tree{number}" for number in range(1, workers))]:
            if not tree.exists():
                git("clone", "--quiet", "--shared", str(ROOT), str(tree))
                git("-C", str(tree), "checkout", "--quiet", git("-C", str(self.tree), "rev-parse", "HEAD"))
            self.trees.put(tree)
        self.workers = workers
        self.commit = git("-C", str(self.tree), "rev-parse", "HEAD")

    def each(self, work: Callable[[Path, Any], None], jobs: Iterable[Any]) -> None:
        """Does each job in a tree of its own, as many at once as there are trees; the first error ends it."""

        def in_a_tree(job: Any) -> None:
            tree = self.trees.get()
            try:
                git("-C", str(tree), "checkout", "--quiet", "--", ".")
                work(tree, job)
            finally:
                self.trees.put(tree)

        with ThreadPoolExecutor(self.workers) as pool:
            for _ in pool.map(in_a_tree, jobs):
                pass

    @staticmethod
    def pytest(tree: Path, words: Sequence[str], timeout: float | None) -> tuple[int | None, str]:
        """Exit status (None: timed out) and output of a pytest in a clone."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", LEFT_OUT, *words]
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
        with subprocess.Popen(
            command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, errors="replace",
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                return None, output
        return process.returncode, output

    def mutations(self, count: int, seed: int, of: Sequence[str] = PACKAGES) -> list[Mutation]:
        files = sorted(
            f for name in of for f in [self.tree / name, *(self.tree / name).rglob("*.py")] if f.is_file()
        )
        every = (m for f in files for m in find(str(f.relative_to(self.tree)), f.read_text()))
        return select(every, count, seed)

    def known(self) -> dict[str, dict[str, Any]]:
        """Results so far by key."""
        if not self.results.exists():
            return {}
        rows = map(json.loads, self.results.read_text().splitlines())
        return {row["key"]: row for row in rows}

    def add(self, mutation: Mutation, verdict: str, more: dict[str, Any]) -> None:
        """Records what became of a fault."""
        where = f"{mutation.path}:{mutation.line}"
        row = {"key": mutation.key, "where": where, "kind": mutation.kind}
        row |= {"before": mutation.before, "after": mutation.after, "verdict": verdict, **more}
        print(f"{where} {verdict}", flush=True)
        with self.results.open("a") as file:
            file.write(json.dumps(row) + "\n")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


def make_map(state: State, paths: Sequence[str]) -> None:
    """Runs test files under coverage, each with the name of the running test."""
    named = [state.tree / path for path in paths or ("tests",)]
    files = sorted({f for path in named for f in ([path] if path.is_file() else path.rglob("test_*.py"))})
    done = {line for log in (state.folder / "map").glob("*.files") for line in log.read_text().splitlines()}
    left = [str(file.relative_to(state.tree)) for file in files]
    left = [file for file in left if file not in done]
    batches = [left[first : first + FILES_AT_ONCE] for first in range(0, len(left), FILES_AT_ONCE)]
    begun = len(list((state.folder / "map").glob("*.files")))

    def under_coverage(tree: Path, job: tuple[int, list[str]]) -> None:
        number, batch = job
        data = tree / ".coverage"
        data.unlink(missing_ok=True)
        cover = [f"--cov={package}" for package in PACKAGES]
        cover += [f"--cov-config={state.folder / 'coveragerc'}", "--cov-context=test", "--cov-report="]
        status, output = state.pytest(tree, [*batch, *cover, "--durations=0", "-vv"], timeout=1800)
        print(f"{number}: exit {status}: {' '.join(batch)}", flush=True)
        if data.exists():
            shutil.move(data, state.folder / "map" / f"{number}.coverage")
        (state.folder / "map" / f"{number}.log").write_text(output)
        (state.folder / "map" / f"{number}.files").write_text("\n".join(batch))

    state.each(under_coverage, enumerate(batches, begun))


class TestMap:
    """Which test ran which line, and how long each took."""

    __test__ = False

    def __init__(self, state: State) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for log in (state.folder / "map").glob("*.log"):
            text = log.read_text()
            for seconds, test in re.findall(r"^([\d.]+)s (?:call|setup) +(tests/.+)$", text, re.MULTILINE):
                self.seconds[test] += float(seconds)
            self.failed |= set(re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE))
        for file in (state.folder / "map").glob("*.coverage"):
            data = CoverageData(str(file))
            data.read()
            for path in data.measured_files():
                lines = self.lines[path]
                for line, contexts in data.contexts_by_lineno(path).items():
                    lines[line] |= {c.rpartition("|")[0] for c in contexts if "|" in c} - self.failed

    def tests(self, mutation: Mutation, budget_s: float) -> tuple[list[str], int]:
        """The tests of a line, the quickest first, as many as the budget holds; and how many there are."""
        lines = self.lines.get(mutation.path, {})
        chosen = lines.get(mutation.line, set())
        if not chosen or not mutation.function:  # what runs at import is read by tests that ran other lines
            most = Counter(test for tests in lines.values() for test in tests).most_common(NEIGHBOURS)
            chosen = chosen | {test for test, _ in most}
        held, spent = list[str](), 0.0
        for test in sorted(chosen, key=lambda t: (self.seconds[t], t)):
            spent += self.seconds[test]
            if spent > budget_s and held:
                break
            held.append(test)
        return held, len(chosen)


def run(state: State, mutations: Iterable[Mutation], budget_s: float, every: bool) -> None:
    """Plants one fault after another and records what noticed it: the first test, or every one."""
    tests = TestMap(state)
    known = state.known()

    def plant(tree: Path, mutation: Mutation) -> None:
        chosen, of = tests.tests(mutation, budget_s)
        before = known.get(mutation.key)
        if before and ("ran" in before or not every) and not unsettled(before["verdict"], len(chosen)):
            return
        if not chosen:
            print(
                f"{mutation.path}:{mutation.line} waits: no test of the map ran a line of this file",
                flush=True,
            )
            return
        verdict, failed = judged(
            state, tree, mutation, chosen, of, sum(tests.seconds[t] for t in chosen), every
        )
        state.add(mutation, verdict, {"ran": chosen, "failed": failed} if every else {})

    state.each(plant, mutations)


def check(state: State, mutations: Iterable[Mutation], budget_s: float, gone: set[str]) -> None:
    """What a removal costs: each fault is shown first to the tests that stay, then to those of the functions in `gone`."""
    tests = TestMap(state)
    known = state.known()

    def plant(tree: Path, mutation: Mutation) -> None:
        if mutation.key in known:
            return
        chosen, of = tests.tests(mutation, budget_s)
        verdict = "survived 0 tests"
        for word, held in (
            ("stays", [t for t in chosen if function_of(t) not in gone]),
            ("gone", [t for t in chosen if function_of(t) in gone]),
        ):
            if held:
                seconds = sum(tests.seconds[t] for t in held)
                verdict, _ = judged(state, tree, mutation, held, of, seconds, every=False)
                if verdict.startswith("killed"):
                    state.add(mutation, f"{verdict} that {word}", {})
                    return
        state.add(mutation, verdict, {})

    state.each(plant, mutations)


def unsettled(verdict: str, tests: int) -> bool:
    """A fault that fewer tests let through than would be run now: of a smaller budget, or a smaller map."""
    survived = re.match(r"survived (\d+)", verdict)
    return survived is not None and int(survived[1]) < tests


def judged(
    state: State, tree: Path, mutation: Mutation, tests: Sequence[str], of: int, seconds: float, every: bool
) -> tuple[str, list[str]]:
    """What became of one fault, and the tests that failed: the first one, or every one."""
    path = tree / mutation.path
    source = path.read_text()
    names = state.folder / f"{tree.name}.txt"
    names.write_text("\n".join(tests))
    try:
        path.write_text(mutation.apply(source))
        forget_bytecode(path)
        status, output = state.pytest(
            tree, ["--tb=no", *([] if every else ["-x"]), f"@{names}"], timeout=60 + 5 * seconds
        )
    finally:
        path.write_text(source)
        forget_bytecode(path)
    if status is None:
        return "killed: no end in a minute and five times the usual", []
    if status == 0:
        return "survived" + (f" {of} tests" if len(tests) == of else f" {len(tests)} of {of} tests"), []
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if status in (1, 2) and failed:
        return f"killed by {failed[0]}", failed
    could_not = status in (2, 3, 4)
    return (
        f"killed: pytest could not start (exit {status})" if could_not else f"unknown: pytest exit {status}",
        [],
    )


def cover(state: State) -> str:
    """The test functions that may leave, FILE::NAME a line: what they notice and run, others notice and run too.

    Kept, the cheapest in tokens and seconds first and those that name an oracle before others: for each fault two functions that
    notice it (or the only one), for each line two that run it, in fp8core three. Functions that say so in UNSEEN stay: of a process
    of its own, of compiled code and of drawn input the map sees little, and a value by hand is an oracle that nothing replaces. So
    do those that no line was seen of, and all but the tests of the harness's rooms.
    """
    needs: dict[str | tuple[str, int], set[str]] = defaultdict(set)
    tests = TestMap(state)
    seconds: dict[str, float] = defaultdict(float)
    for test, taken in tests.seconds.items():
        seconds[function_of(test)] += taken
    for path, lines in tests.lines.items():
        for line, ran in lines.items():
            needs[path, line] = {function_of(test) for test in ran}
    for row in state.known().values():
        for test in set(row.get("failed", ())) & set(row.get("ran", ())):
            needs[row["key"]].add(function_of(test))
    of: dict[str, list[str | tuple[str, int]]] = defaultdict(list)
    for need, functions in needs.items():
        for function in functions:
            of[function].append(need)
    left = {
        need: min(len(functions), 2 if isinstance(need, str) or need[0].startswith("harness/") else 3)
        for need, functions in needs.items()
    }
    kept, cost = set[str](), dict[str, float]()
    for file, names in itertools.groupby(sorted(of), lambda name: name.partition("::")[0]):
        own, whole = texts_of(state.tree / file)
        for name in names:
            body = own.get(name.rpartition("::")[2], "")
            cost[name] = (house.tokens(body) + 20 * seconds[name] + 1) * (0.6 if ORACLE.search(body) else 1)
            if (
                not body
                or UNSEEN.search(whole[name.rpartition("::")[2]])
                or not file.startswith(ROOM)
                or file.startswith(STAY)
            ):
                kept.add(name)
                for need in of[name]:
                    left[need] -= 1

    def worth(name: str) -> float:
        return sum(50 if isinstance(need, str) else 1 for need in of[name] if left[need] > 0) / cost[name]

    queue = sorted((-worth(name), name) for name in of.keys() - kept)
    while queue:
        _, name = heapq.heappop(queue)
        if (now := worth(name)) and queue and -now > queue[0][0]:
            heapq.heappush(queue, (-now, name))  # others have run some of its lines since
        elif now:
            kept.add(name)
            for need in of[name]:
                left[need] -= 1
    return "\n".join(sorted(of.keys() - kept))


def texts_of(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The text of each function and class of a file, alone and with those of the file that it uses, and theirs."""
    nodes = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    own = {node.name: ast.unparse(node) for node in nodes}
    uses = {name: {other for other in own if re.search(rf"\b{other}\b", text)} for name, text in own.items()}
    for _ in own:
        uses = {name: used.union(*(uses[other] for other in used)) for name, used in uses.items()}
    return own, {name: "\n".join(own[other] for other in {name, *uses[name]}) for name in own}


def function_of(test: str) -> str:
    """`FILE::NAME` without the values of its parameters."""
    return test.partition("[")[0]


def near(state: State, budget_s: float) -> int:
    """Runs the tests of the lines that differ between the map's commit and this tree; the exit code of pytest."""
    tests = TestMap(state)
    if not tests.lines:
        print(f"{state.folder} holds no map: `make test-map` makes it once, in half an hour", file=sys.stderr)
        return 2
    chosen: set[str] = set()
    path = ""
    for line in git("-C", str(ROOT), "diff", "--unified=0", "--no-renames", state.commit).splitlines():
        if line.startswith("--- "):
            path = line.removeprefix("--- a/")
        elif line.startswith("+++ b/tests/") and Path(line).name.startswith("test_"):
            chosen.add(line.removeprefix("+++ b/"))  # a test that was changed is its own
        elif (hunk := re.match(r"@@ -(\d+)(?:,(\d+))?", line)) and path in tests.lines:
            first, count = int(hunk[1]), int(hunk[2] or 1)
            for number in range(first - (count == 0), first + max(count, 1) + (count == 0)):
                chosen |= tests.lines[path].get(number, set())
    files = {test for test in chosen if "::" not in test}
    chosen = {test for test in chosen if (ROOT / test.partition("::")[0]).exists()}
    took = {test: tests.seconds[test] for test in chosen if test.partition("::")[0] not in files}
    took |= {
        file: sum(s for test, s in tests.seconds.items() if test.startswith(f"{file}::")) for file in files
    }
    held, spent = list[str](), 0.0
    for test in sorted(took, key=lambda t: (took[t], t)):
        spent += took[test]
        if spent <= budget_s:
            held.append(test)
    print(
        f"{len(held)} of {len(took)} tests or files that ran what has changed since {state.commit[:10]}",
        flush=True,
    )
    return (
        subprocess.call([sys.executable, "-m", "pytest", "-q", "-m", LEFT_OUT, *held], cwd=ROOT)
        if held
        else 0
    )


def forget_bytecode(path: Path) -> None:
    """Bytecode is told from its source by size and second alone, and a fault may change neither."""
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()


def table(state: State, mutations: Sequence[Mutation]) -> str:
    """The results as a markdown table, and their count."""
    known = state.known()
    rows = ["| | where | kind | change | what noticed it |", "|---|---|---|---|---|"]
    counts: Counter[str] = Counter()
    for number, mutation in enumerate(mutations, 1):
        verdict = known.get(mutation.key, {}).get("verdict", "not run yet")
        counts[re.split(r"[ :]", verdict)[0]] += 1
        change = f"`{short(mutation.before)}` -> `{short(mutation.after)}`".replace("|", "\\|")
        where = f"{mutation.path}:{mutation.line}"
        rows.append(
            f"| {number} | {where} | {mutation.kind} | {change} | {verdict.replace('|', chr(92) + '|')} |"
        )
    total = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return "\n".join([f"Commit {state.commit[:10]}: {total} of {len(mutations)}.", "", *rows])


def write_matrix(state: State) -> None:
    """A row for each fault and each test that it was shown to by `run --all`, and whether the test noticed it."""
    rows = [
        {
            "fault": row["key"],
            "where": row["where"],
            "kind": row["kind"],
            "test": test,
            "noticed": test in row["failed"],
        }
        for row in state.known().values()
        for test in row.get("ran", ())
    ]
    pd.DataFrame(rows).to_parquet(state.folder / "matrix.parquet", compression="zstd")


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=["map", "run", "check", "cover", "near", "table", "list"])
    parser.add_argument("paths", nargs="*", help="of map: test files or folders")
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="outside the repository")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--budget-s", type=float, default=60.0, help="of tests for a fault, as the map timed them"
    )
    parser.add_argument(
        "--all", action="store_true", help="of run: every test of a line, not up to the first failure"
    )
    parser.add_argument(
        "--of", nargs="*", default=PACKAGES, metavar="PATH", help="code that faults are planted in"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="that run tests at once, each in a clone of its own"
    )
    parser.add_argument(
        "--gone",
        type=Path,
        metavar="FILE",
        help="of check: the test functions that would leave, FILE::NAME a line",
    )
    options = parser.parse_intermixed_args()  # options may stand before the files
    if options.state.resolve().is_relative_to(ROOT):
        parser.error(f"--state {options.state} lies in the repository; name a folder outside it")
    state = State(options.state, options.workers)
    if options.do == "map":
        make_map(state, options.paths)
        return
    if options.do == "near":
        raise SystemExit(near(state, options.budget_s))
    if options.do == "cover":
        print(cover(state))
        return
    mutations = state.mutations(options.count, options.seed, options.of)
    if options.do == "run":
        run(state, mutations, options.budget_s, options.all)
    if options.do == "check":
        check(state, mutations, options.budget_s, set(options.gone.read_text().split("\n")))
    if options.do == "list":
        for mutation in mutations:
            print(
                f"{mutation.path}:{mutation.line} {mutation.kind}: {short(mutation.before)} -> {short(mutation.after)}"
            )
    else:
        print(table(state, mutations))
        write_matrix(state)


if __name__ == "__main__":
    main()
