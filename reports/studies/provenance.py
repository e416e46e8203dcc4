"""Whether runs may be published: their code is that of a commit, and the sentences about them leave out nothing that their rows hold.

python reports/studies/provenance.py [ROOT]     exits 2 with a line a fault, its code first

Runs lie in results/published. What stands against one that is published all the same is said in
results/published/provenance.yaml, by the path of the run or of a folder above it: `accepted` codes, and `commit` of a run that was
made by a copy without git, whose hash is then held against that commit.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from harness import store
from harness.machine.environment import counted, hash_of
from harness.store.case import arm_of
from harness.store.compare import BOTH_SIDES, ONE_SIDE, TIMES, pairs_of
from harness.store.outside import parse
from harness.store.rows import rows_of

SENTENCES = ("README.md", "PACKAGE.md", "results/README.md")  # pages whose sentences people write
_FIGURE = re.compile(r"\b(\d+\.\d+)(?=x|(?: to| and| or) \d+\.\d+x)")
_SAYS_AA = re.compile(r"A/A|control|noise", re.IGNORECASE)


class Fault(NamedTuple):
    """One reason not to publish."""

    code: str
    where: str
    words: str


def faults(root: Path) -> list[Fault]:
    """All that stands against the published runs of a checkout, and against the sentences about them."""
    published = root / "results" / "published"
    marks = _marks(published)
    found, seen = [], {place: set[str]() for place, *_ in marks}
    for run in sorted(path.parent for path in published.rglob("_run.json")):
        name = run.relative_to(published).as_posix()
        own = [mark for mark in marks if f"{name}/".startswith(f"{mark[0]}/")]
        commit = next((commit for _, _, commit in own if commit), None)
        for fault in _of_run(root, name, store.read([run]), commit):
            accepting = [place for place, accepted, _ in own if fault.code in accepted]
            for place in accepting:
                seen[place].add(fault.code)
            found += [] if accepting else [fault]
    found += [
        Fault("accepted_in_vain", place, f"{code} is accepted of runs that have no such fault; remove it")
        for place, accepted, _ in marks
        for code in sorted(accepted - seen[place])
    ]
    return found + _of_sentences(root, published)


def _marks(published: Path) -> list[tuple[str, set[str], str | None]]:
    file = published / "provenance.yaml"
    lines = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else []
    return [(line["runs"], set(line.get("accepted", ())), line.get("commit")) for line in lines]


def _of_run(root: Path, name: str, frame: Any, named: str | None) -> list[Fault]:
    found = []
    for env in (parse(text) for text in frame["env"].unique()):
        commit = named or env.get("git_commit")
        if env.get("git_dirty"):
            found.append(
                Fault(
                    "dirty_tree",
                    name,
                    "measured from a tree with uncommitted changes; commit and measure again",
                )
            )
        if not env.get("code"):
            found.append(Fault("no_code", name, "its rows hold no hash of the code that ran"))
        if not commit:
            way = "name the commit that was copied in results/published/provenance.yaml"
            found.append(
                Fault("unknown_commit", name, f"a copy without git, of a commit that nobody named; {way}")
            )
        elif (codes := codes_of_commit(root, commit)) is None:
            found.append(Fault("unknown_commit", name, f"commit {commit[:12]} is not in this repository"))
        elif env.get("code") == codes[1]:
            found.append(Fault("python_alone", name, "its hash covers Python and neither data nor templates"))
        elif env.get("code") and env["code"] != codes[0]:
            words = f"its code {env['code']} is not that of commit {commit[:12]}, {codes[0]}"
            found.append(Fault("code_of_no_commit", name, words))
    return list(dict.fromkeys(found))


@cache
def codes_of_commit(root: Path, commit: str) -> tuple[str | None, str | None] | None:
    """What `harness.machine.environment.code_hash` gives for a checkout of the commit, and what it gave until 2026-11-29, over
    Python alone; None where the commit is not in the repository.
    """
    listed = _git(root, "ls-tree", "--name-only", commit)
    if listed is None:
        return None
    tops = sorted({"fp8core", "harness", "sweeps"} & set(listed.decode().split()))
    content = _git(root, "archive", "--format=tar", commit, *tops) if tops else None
    if content is None:
        return None
    with tarfile.open(fileobj=io.BytesIO(content)) as tree:
        members = [(counted(each.name), tree.extractfile(each)) for each in tree if each.isfile()]
        files = [(name, file.read()) for name, file in members if name and file is not None]
    return hash_of(files), hash_of(each for each in files if each[0].endswith(".py"))


def _git(root: Path, *words: str) -> bytes | None:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _of_sentences(root: Path, published: Path) -> list[Fault]:
    """Paragraphs that quote a ratio of a GPU's rows and not the condition that these rows hold."""
    frames = [store.read([path.parent]) for path in sorted(published.rglob("_run.json"))]
    pairs = [
        {**pair, "gpu": parse(frame["env"].iloc[0])["gpu"].split()[-1], "aa": pair["arm"] in without}
        for frame in frames
        if "gpu" in parse(frame["env"].iloc[0])
        for without in [_without_fp8(frame)]
        for pair in pairs_of(rows_of(frame[frame["metric"].isin(TIMES)]))
    ]
    found = []
    for page in SENTENCES:
        text = (root / page).read_text(encoding="utf-8") if (root / page).exists() else ""
        for paragraph in re.split(r"\n\s*\n|\n(?=\|)", text):
            quoted = _FIGURE.findall(paragraph)
            own = [
                p
                for p in pairs
                if p["gpu"] in paragraph and any(_is(p["speedup"], figure) for figure in quoted)
            ]
            throttled = [p for p in own if p["condition"] in (ONE_SIDE, BOTH_SIDES)]
            if throttled and "throttl" not in paragraph:
                words = f"it quotes {_named(throttled)} and not that they throttled"
                found.append(Fault("throttling_left_out", page, words))
            alone = [
                p
                for p in own
                if p["aa"] and not any(_is(o["speedup"], f"{p['speedup']:.2f}") for o in own if not o["aa"])
            ]
            if alone and not _SAYS_AA.search(paragraph):
                words = f"it quotes {_named(alone)} as a speedup: no layer ran in FP8, so that it is an A/A"
                found.append(Fault("aa_as_speedup", page, words))
    return found


def _without_fp8(frame: Any) -> set[str]:
    """Arms of a recipe that had no layer in FP8."""
    rows = rows_of(frame.drop_duplicates(["arm", "resolved"]))
    return {r["arm"] for r in rows if arm_of(r).has_fp8 and parse(r["resolved"]).get("fp8_layers") == 0}


def _is(speedup: float, quoted: str) -> bool:
    return f"{speedup:.{len(quoted.partition('.')[2])}f}" == quoted


def _named(pairs: list[dict[str, Any]]) -> str:
    return ", ".join(sorted({f"{p['speedup']:.3f} of {p['arm']}" for p in pairs}))


if __name__ == "__main__":
    against = faults(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
    for fault in against:
        print(f"{fault.code}: {fault.where}: {fault.words}", file=sys.stderr)
    sys.exit(2 if against else 0)
