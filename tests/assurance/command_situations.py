"""Situations of `gate --command`: changes that a positive word would pass, one line each; the twin is the same repository with a comment more.

The table is read by `gate_situations` and by the test of the honest changes (`tests/harness/gate/test_gate_ran.py`). Times are
what a benchmark program was told to write, so that each answer is known; only wall times are real.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from command_repo import FAKE, FEW, PROGRAM, commit, gate, git, make_repository, package

CODE, BENCH = "src/pkg/__init__.py", "bench/program.py"
PYTHON = f"PYTHONPATH=src:$PYTHONPATH {sys.executable} -P"
EQUAL, SLOW = package(a=0.01, b=0.02), package(a=0.012, b=0.024)
SLOWER = {CODE: SLOW}
LESS = PROGRAM.replace("seconds *", "0.6 * seconds *")
# Programs that differ in how they write, and packages that say what
EXTRA = PROGRAM.replace('"extra_info": {}', "**pkg.SAID")
DATA = PROGRAM.replace('"median": seconds * random.uniform(1, 1.0001)', '"data": pkg.samples(seconds)')
SAID = "SAID = {{'extra_info': {{'unit': {unit!r}, 'higher_is_better': {higher}}}}}\n"
SAMPLES = """
import random
def samples(seconds):
    data = [seconds * random.uniform(1, 1.0001) for _ in range({count})]
    {more}
    return data
"""
WORK = "import time\ntime.sleep(0.25)\n"  # of the wall clock
LOOSE = ("--policy", "../loose.yaml")  # times of a busy machine
WALL = f"{PYTHON} bench/wall.py"


def sampled(more: str = "pass", count: int = 40) -> dict[str, str]:
    return {CODE: EQUAL + SAMPLES.format(count=count, more=more)}


def figures(unit: str, higher: bool, **values: float) -> dict[str, str]:
    return {CODE: package(**values) + SAID.format(unit=unit, higher=higher)}


ANSWERS: dict[object, tuple[int, str]] = {}  # of twins


@dataclass(frozen=True)
class Planted:
    """A change in a small repository.

    Attributes:
        what: is the case; a line of the published list.
        code: exit code of the gate.
        change: files that it commits.
        base: files of the base commit beside the program and the package.
        line: the command.
        words: more of the gate's options.
        prepare: makes the repository ready before, and `plant` changes it after the commit, in place of or beside `change`.
        bare: the twin is not prepared either, and its command is the usual one: there is nothing honest about the set-up.
    """

    what: str
    code: int
    change: dict[str, str] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)
    line: str = FAKE
    words: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None
    plant: Callable[[Path], None] | None = None
    bare: bool = False

    def gate(self, folder: Path, *, planted: bool = True) -> tuple[int, str]:
        """Exit code and output, of the change or of a comment in the code: one measurement for all equal repositories."""
        line, prepare = (FAKE, None) if self.bare and not planted else (self.line, self.prepare)
        twin = (*self.base.items(), line, self.words, prepare)
        if not planted and twin in ANSWERS:
            return ANSWERS[twin]
        base = {BENCH: PROGRAM, CODE: EQUAL, ".gitignore": "results\n", **self.base}
        root = make_repository(folder / "repo", base)
        if prepare:
            prepare(root)
        if planted:
            if self.change:
                commit(root, self.change)
            if self.plant:
                self.plant(root)
        else:
            commit(root, {CODE: (root / CODE).read_text() + "\n# the same, anew\n"})
        (folder / "loose.yaml").write_text("metrics:\n  time_ms: {rule: timed, tolerance: 0.3}\n")
        line = line.replace("CHECKOUT", str(root))
        code, said, _ = gate(root, "--command", line, *FEW, *self.words)
        return (code, said) if planted else ANSWERS.setdefault(twin, (code, said))


# What differs


def clean_filter(root: Path) -> None:
    git(root, "config", "filter.back.clean", "sed s/0.012/0.01/")
    (root / ".git" / "info" / "attributes").write_text("*.py filter=back\n")


def edit(root: Path, name: str = CODE, text: str = package(a=0.012, b=0.02)) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def equal_stat(root: Path) -> None:
    """An edit of equal size and time, which git, told to look at no more, takes for none."""
    file = root / CODE
    os.utime(file, (1e9, 1e9))
    git(root, "config", "core.checkStat", "minimal")
    git(root, "config", "core.trustctime", "false")
    git(root, "update-index", "--refresh")
    file.write_text(EQUAL.replace("0.01,", "0.09,"))
    os.utime(file, (1e9, 1e9))
    assert not git(root, "status", "--porcelain")


def skip_worktree(root: Path) -> None:
    git(root, "update-index", "--skip-worktree", CODE)
    edit(root)


OPTIONAL = {
    CODE: "try:\n    from pkg.local import times\nexcept ImportError:\n    " + EQUAL.replace("\n", "\n    ")
}
READS = (
    EQUAL
    + "import os\nif os.path.exists('local.txt'): pass\ntry: FACTOR = float(open('local.txt').read())\nexcept OSError: FACTOR = 1.0\n"
)


def excluded(root: Path, name: str, text: str) -> None:
    (root / ".git" / "info" / "exclude").write_text(Path(name).name + "\n")
    edit(root, name, text)


def submodule(root: Path) -> None:
    inner = make_repository(root.parent / "inner", {"sub.py": EQUAL})
    git(root, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "src/inner")
    commit(root, {CODE: "from inner.sub import times\n"})
    git(root, "branch", "-f", "main")


def linked(root: Path, to: Path) -> None:
    """The package is a link to a folder outside of the work tree, or to the checkout's own by an absolute path."""
    git(root, "rm", "-rq", "src/pkg")
    (root / "src").mkdir(exist_ok=True)
    (root / "src" / "pkg").symlink_to(to)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "a link")


def link_to_checkout(root: Path) -> None:
    commit(root, {"real/pkg/__init__.py": EQUAL})
    linked(root, root / "real" / "pkg")
    git(root, "branch", "-f", "main")


def outside(root: Path, name: str, text: str) -> Path:
    folder = root.parent / name
    folder.mkdir()
    (folder / "__init__.py").write_text(text)
    return folder


def link_to_outside(root: Path) -> None:
    linked(root, outside(root, "old", EQUAL))
    git(root, "branch", "-f", "main")
    outside(root, "new", SLOW)


def relinked(root: Path) -> None:
    (root / "src" / "pkg").unlink()
    (root / "src" / "pkg").symlink_to(root.parent / "new")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "another link")


def installed(root: Path) -> None:
    """A copy of the package as it was, in a folder that both sides share."""
    (root.parent / "site").mkdir()
    outside(root, "site/pkg", EQUAL)


# Which of them ran

BY_NAME = {CODE: "from pkg.test_time_scaling import times\n", "src/pkg/test_time_scaling.py": EQUAL}
IN_FOLDER = {CODE: "from pkg.bench.timer import times\n", "src/pkg/bench/timer.py": EQUAL}
IN_TESTS = {CODE: "from tests.support import times\n", "tests/support.py": EQUAL}
DOCUMENT = {CODE: "exec(open('docs/code.md').read())\n", "docs/code.md": EQUAL}
BY_PROGRAM = {
    CODE: "",
    BENCH: PROGRAM.replace("import pkg", "import pkg\nexec(open('docs/code.md').read(), pkg.__dict__)"),
    "docs/code.md": EQUAL,
}
FORKED = {
    CODE: "import multiprocessing\ndef work(queue):\n    from pkg.late import times\n    queue.put(times())\n"
    "def times():\n    context = multiprocessing.get_context('fork')\n    queue = context.Queue()\n"
    "    context.Process(target=work, args=(queue,)).start()\n    return queue.get()\n",
    "src/pkg/late.py": EQUAL,
}  # fmt: skip
OWN_FILE = {
    BENCH: PROGRAM.replace(
        "import pkg",
        "import types; pkg = types.ModuleType('pkg'); exec(open('CHECKOUT/src/pkg/__init__.py').read(), pkg.__dict__)",
    )
}
ISOLATED = {BENCH: PROGRAM.replace("import pkg", "sys.path.insert(0, 'src')\nimport pkg")}


def own_file(root: Path) -> None:
    commit(root, {BENCH: OWN_FILE[BENCH].replace("CHECKOUT", str(root))})
    git(root, "branch", "-f", "main")


# The benchmark

SUITE = {"perfsuite/__init__.py": "", "perfsuite/__main__.py": PROGRAM}
SIZED = {
    BENCH: PROGRAM.replace("seconds *", "float(open('input/sizes.json').read()) * seconds *"),
    "input/sizes.json": "1.0",
}
SCRIPT = {"run.sh": f'{PYTHON} bench/program.py "$1"\n'}
HALVED = {
    "run.sh": f'{PYTHON} bench/program.py "$1" && sed -i -E \'s/"median": 0.0/"median": 0.000/\' "$1"\n'
}
CHECKS = {
    "speed/check_speed.py": PROGRAM.replace("sys.argv[1]", "sys.OUT")
    .replace("sys.exit(", "def check_it(): (")
    .replace("import pkg", "import pkg\nimport conftest\nimport os; sys.OUT = os.environ['OUT']")
    .replace("seconds *", "conftest.FACTOR * seconds *"),
    "conftest.py": "FACTOR = 1.0\n",
    "pytest.ini": "[pytest]\npython_files = check_*.py\npython_functions = check_*\n",
}
LESS_CHECKED = CHECKS["speed/check_speed.py"].replace("seconds *", "0.6 * seconds *")
# One repository, so that what pytest collects, loads and selects has one twin
SELECTED = {
    **CHECKS,
    "speed/check_other.py": LESS_CHECKED,
    "pytest.ini": CHECKS["pytest.ini"].replace("check_*.py", "check_speed.py"),
}
BY_PYTEST = f"OUT={{out}} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {PYTHON.replace('src:', 'src:.:')} -m pytest -q -p no:cacheprovider speed"

# How code is reached

LOADED = {
    CODE: "import importlib.util\nspec = importlib.util.spec_from_file_location('late', 'plugins/late.py')\n"
    "late = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(late)\ntimes = late.times\n",
    "plugins/late.py": EQUAL,
}
STARTED = {
    CODE: "import json, subprocess, sys\ndef times():\n"
    "    return json.loads(subprocess.check_output([sys.executable, 'tools/times.py']))\n",
    "tools/times.py": EQUAL + "import json\nprint(json.dumps(times()))\n",
}
TABLE = {CODE: "import json\ndef times():\n    return json.load(open('src/pkg/times.json'))\n",
         "src/pkg/times.json": '{"bench.py::a": 0.01, "bench.py::b": 0.02}'}  # fmt: skip
INLINE = f"{PYTHON} -c \"import sys; exec(open('bench/program.py').read())\" {{out}}"

# What the figures are

RATE = {BENCH: EXTRA, **figures("tokens/s", True, a=900.0, b=1800.0)}
MILLI = {BENCH: EXTRA, **figures("s", False, a=0.01, b=0.02)}
ENTRY = {
    CODE: package(a=900.0, b=1800.0) + "SAID = {'unit': 'items/s', 'higher_is_better': True}\n",
    BENCH: EXTRA,
}

# Work that was not done

EARLY = {CODE: "import sys\nsys.exit(0)\n"}
RAISES = {CODE: "raise ValueError('no')\n"}
TIMED = {"bench/wall.py": "import pkg\nimport time\ntime.sleep(0.15)\n", CODE: WORK}
TOLD = {CODE: EQUAL + "import os\nos.write(2, b'fell back\\n')\n"}
SILENT = {CODE: EQUAL + "import sys\nsys.exit(0)\n"}

SITUATIONS = {
    "clean_filter": Planted("a clean filter of git maps the edit back", 1, prepare=clean_filter, plant=edit),
    "equal_stat": Planted("the edited file has the size and the time of before", 1, plant=equal_stat),
    "skip_worktree": Planted("git was told to skip the edited file (skip-worktree)", 1, plant=skip_worktree),
    "ignored_module": Planted("a module that git ignores is imported in the checkout, and lies in neither work tree", 6, {CODE: OPTIONAL[CODE] + "# anew\n", ".gitignore": "results\nlocal.py\n"}, OPTIONAL, plant=partial(edit, name="src/pkg/local.py", text=SLOW)),
    "excluded_module": Planted("the only change is a module of the checkout that git excludes", 6, base=OPTIONAL, plant=partial(excluded, name="src/pkg/local.py", text=SLOW)),
    "excluded_data": Planted("the only change is a file of the checkout that git excludes and the code opens", 6, base={CODE: READS}, plant=partial(excluded, name="local.txt", text="2.0")),
    "dirty_submodule": Planted("a submodule holds an edit that is not committed", 1, prepare=submodule, plant=partial(edit, name="src/inner/sub.py", text=SLOW)),
    "link_to_the_checkout": Planted("the package is a link to the checkout, so both sides run that", 6, {"real/pkg/__init__.py": SLOW}, prepare=link_to_checkout, bare=True),
    "link_to_outside": Planted("the package is a link to a folder outside, and leads to another one now", 1, prepare=link_to_outside, plant=relinked, bare=True),
    "code_named_as_a_test": Planted("the module that is slower is named test_time_scaling.py", 1, {"src/pkg/test_time_scaling.py": SLOW}, BY_NAME),
    "code_in_a_folder_bench": Planted("the module that is slower lies in a folder bench of the package", 1, {"src/pkg/bench/timer.py": SLOW}, IN_FOLDER),
    "code_in_a_folder_tests": Planted("the module that is slower lies in a folder tests", 1, {"tests/support.py": SLOW}, IN_TESTS, line=FAKE.replace("src:", "src:.:")),
    "code_in_a_document": Planted("the code that is slower is in code.md, which a module executes", 1, {"docs/code.md": SLOW}, DOCUMENT),
    "code_in_a_document_of_the_program": Planted("the code that is slower is in code.md, which the benchmark itself executes", 1, {"docs/code.md": SLOW}, BY_PROGRAM),
    "code_in_a_fork": Planted("the module that is slower is imported in a forked process alone", 1, {"src/pkg/late.py": SLOW}, FORKED),
    "unread_module": Planted("no process reads the module that changed", 6, {"src/pkg/other.py": "A = 1\n"}),
    "unread_document": Planted("no process reads the document that changed", 6, {"README.md": "words\n"}),
    "unread_test": Planted("no process reads the test that changed", 6, {"tests/test_pkg.py": "A = 1\n"}),
    "checkout_by_its_path": Planted("the benchmark opens the checkout's own file by its path", 6, SLOWER, prepare=own_file, bare=True),
    "editable_install": Planted("the command imports the project from the checkout, not from its work tree", 6, SLOWER, line=f"PYTHONPATH=CHECKOUT/src:$PYTHONPATH {sys.executable} -P bench/program.py {{out}}", bare=True),
    "installed_copy": Planted("both sides import a copy that is installed elsewhere", 6, SLOWER, prepare=installed, line=f"PYTHONPATH=CHECKOUT/../site:$PYTHONPATH {sys.executable} -P bench/program.py {{out}}", bare=True),
    "isolated": Planted("an isolated Python runs code that is slower", 1, SLOWER, ISOLATED, line=f"{sys.executable} -I bench/program.py {{out}}"),
    "module_that_does_less": Planted("the code is slower, and the module that the command starts does less", 1, {**SLOWER, "perfsuite/__main__.py": LESS}, SUITE, line=f"PYTHONPATH=src:.:$PYTHONPATH {sys.executable} -P -m perfsuite {{out}}"),
    "script_that_does_less": Planted("the code is slower, and the program that the command names does less", 1, {**SLOWER, "perf.py": LESS}, {"perf.py": PROGRAM}, line=f"{PYTHON} perf.py {{out}}"),
    "shell_script_that_does_less": Planted("the code is slower, and the shell script that the command starts divides its figures", 1, {**SLOWER, **HALVED}, SCRIPT, line="bash run.sh {out}"),
    "less_data": Planted("the code is slower, and the file that the benchmark opens names smaller sizes", 1, {**SLOWER, "input/sizes.json": "0.6"}, SIZED),
    "tests_that_do_less": Planted("the code is slower, and the test file that pytest collects does less", 1, {**SLOWER, "speed/check_speed.py": LESS_CHECKED}, SELECTED, line=BY_PYTEST),
    "benchmark_alone": Planted("nothing but the benchmark differs, which the base's replaces", 6, {BENCH: LESS}),
    "rate_that_fell": Planted("tokens/s fell by a third", 1, figures("tokens/s", True, a=600.0, b=1200.0), RATE),
    "rate_of_an_entry_that_fell": Planted("a figure that states its unit beside its name, higher is better, fell", 1, {CODE: ENTRY[CODE].replace("900", "600")}, ENTRY),
    "seconds_now_milliseconds": Planted("figures without a unit are a thousandth of before: another unit, or work not done", 6, {CODE: package(a=0.00001, b=0.00002)}),
    "another_unit": Planted("the two sides state different units", 6, figures("tokens", False, a=0.01, b=0.02), MILLI),
    "another_direction": Planted("the two sides state different directions", 6, figures("s", True, a=0.01, b=0.02), MILLI),
    "three_times_faster": Planted("three times faster: work not done", 6, {CODE: package(a=0.003, b=0.006)}),
    "exit_before_the_work": Planted("the candidate calls sys.exit(0) before the work; wall time", 6, EARLY, TIMED, line=WALL, words=LOOSE),
    "failure_hidden_by_true": Planted("the candidate raises, and the line ends in `|| true`", 6, RAISES, TIMED, line=f"{WALL} 2>/dev/null || true", words=LOOSE),
    "failure_hidden_by_echo": Planted("the candidate raises, and the line ends in `; echo done`", 6, RAISES, TIMED, line=f"{WALL} 2>/dev/null; echo done", words=LOOSE),
    "words_on_one_side": Planted("the candidate alone writes to standard error", 6, TOLD),
    "no_figures": Planted("the candidate exits by 0 and writes no figures", 6, SILENT),
    "fewer_samples": Planted("the candidate takes a quarter of the samples, in as much less time", 6, sampled(count=10), {BENCH: DATA, **sampled()}),
    "rare_and_slow": Planted("a tenth of the samples is 30 times slower; the median stays", 6, sampled("data[-4:] = [30 * x for x in data[-4:]]"), {BENCH: DATA, **sampled()}),
    "slow_first_call": Planted("the first call is ten times slower; the median stays", 6, sampled("data[0] *= 10", 400), {BENCH: DATA, **sampled(count=400)}),
    "code_loaded_by_its_path": Planted("the module that is slower is loaded by its path, without an import", 1, {"plugins/late.py": SLOW}, LOADED),
    "code_in_a_process_of_its_own": Planted("the script that is slower is run by the code in a process of its own", 1, {"tools/times.py": SLOW + "import json\nprint(json.dumps(times()))\n"}, STARTED),
    "data_of_the_code": Planted("the code reads a table that changed, and is slower by it", 1, {"src/pkg/times.json": '{"bench.py::a": 0.012, "bench.py::b": 0.024}'}, TABLE),
    "conftest_that_does_less": Planted("the code is slower, and the conftest.py that pytest loads does less", 1, {**SLOWER, "conftest.py": "FACTOR = 0.6\n"}, SELECTED, line=BY_PYTEST),
    "selected_tests": Planted("the code is slower, and pytest.ini selects the quicker tests", 1, {**SLOWER, "pytest.ini": CHECKS["pytest.ini"].replace("check_*.py", "check_other.py")}, SELECTED, line=BY_PYTEST),
    "program_given_in_the_line": Planted("the code is slower, and a line without a file opens the program that does less", 1, {**SLOWER, BENCH: LESS}, line=INLINE),
    "lost_benchmark": Planted("the candidate writes one benchmark fewer", 1, {CODE: package(a=0.01)}),
    "renamed_benchmarks": Planted("the candidate names its benchmarks otherwise", 5, {CODE: EQUAL.replace("bench.py::", "speed.py::")}),
    "benchmarks_that_come_and_go": Planted("the candidate does not write the same benchmarks each time", 6, {CODE: EQUAL + "import random\nall_of = times\ndef times():\n    return all_of() | {f'bench.py::{random.random()}': 0.01}\n"}),
    "ended_without_a_word": Planted("the candidate ends by os._exit(0) before the work; wall time", 6, {CODE: "import os\nos._exit(0)\n"}, TIMED, line=WALL, words=LOOSE),
    "time_that_is_none": Planted("a figure of the candidate is 0", 6, {CODE: package(a=0.0, b=0.02)}),
    "constants": Planted("all samples of the candidate are equal", 6, sampled("data = [seconds] * len(data)"), {BENCH: DATA, **sampled()}),
}  # fmt: skip

HONEST = {
    "comment": Planted("a comment", 0, {CODE: EQUAL + "# more\n"}),
    "faster": Planted("30 % faster", 0, {CODE: package(a=0.007, b=0.014)}),
    "one_percent": Planted("1 % slower", 0, {CODE: package(a=0.0101, b=0.0202)}),
    "new_benchmark": Planted("a new benchmark", 0, {"speed/check_more.py": "def check_more(): pass\n"}, CHECKS, line=BY_PYTEST),
    "new_module": Planted("a new module", 0, {CODE: "from pkg.new import times\n", "src/pkg/new.py": EQUAL}),
    "renamed_module": Planted("a renamed module", 0, {CODE: "from pkg.new import times\n", "src/pkg/new.py": EQUAL}, {CODE: "from pkg.old import times\n", "src/pkg/old.py": EQUAL}, plant=lambda root: git(root, "rm", "-q", "src/pkg/old.py")),
    "refactoring": Planted("a refactoring", 0, {CODE: "def _entries():\n    return (('bench.py::a', 0.01), ('bench.py::b', 0.02))\ndef times():\n    return dict(_entries())\n"}),
    "compiled": Planted("a compiled program, in whose source a comment is new", 0, {"prog.c": "/* more */\n"}, {**ISOLATED, "prog.c": "\n", ".gitignore": "results\nprog\n"}, line=f"env -i PYTHONHOME={sys.base_prefix} ./prog bench/program.py {{out}}", words=("--setup", f"cp {Path(sys.executable).resolve()} prog")),
    "shell_script": Planted("a shell script that runs the program", 0, {CODE: EQUAL + "# more\n"}, SCRIPT, line="bash run.sh {out}"),
    "four_times_slower": Planted("four times slower, beside the suspicion", 1, {CODE: package(a=0.04, b=0.08)}),
    "units_that_differ_in_scale": Planted("the same in ms", 0, figures("ms", False, a=10.0, b=20.0), MILLI),
}  # fmt: skip
