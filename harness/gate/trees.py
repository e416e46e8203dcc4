"""Trees: the work tree of another commit, for as long as it is measured, and what of a change would judge the change.

A gate that is killed outright leaves its tree behind. The folder of each holds a locked file, and the lock ends with the
process: the next gate removes everything that is not locked. (The workers of a killed gate end by themselves: their input does.)

With `--against`, the policy is the base commit's, and so is the clock: both sides measure with its `harness/timing`. The
rest of the gate is this tree's, as it runs; where a change touches it, the verdict says so.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from harness.gate.options import Exit, GateError, Loud
from harness.gate.policy import DEFAULT, load_policy
from harness.store.errors import UsageError
from harness.store.text import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from harness.gate.policy import Policy

Walk = dict[str, "bytes | None"]
PREFIX, LOCK = "harness-gate-", "lock"
NO_FILES = {".git", "__pycache__"}
NEW = ("--others", "--exclude-standard")  # of git ls-files: untracked and not ignored
MEASURED = ("fp8core", "harness", "sweeps")  # a change elsewhere cannot change a measurement
CLOCK, POLICY = "harness/timing", "harness/gate/policy.yaml"  # of the checkout that is measured by sweeps
JUDGES = (
    "harness/gate",
    CLOCK,
    "harness/engine/turns.py",
    "harness/engine/control.py",
    "harness/store",
    "harness/machine",
    ".ci/gate",
    ".ci/gate-policy.yaml",
)
ANEW = (
    "land that change by itself and gate the rest against it, or measure both commits, each with its own: "
    "python -m harness sweep=NAME at each, then gate --baseline RUN --candidate RUN"
)
NO_OTHER = "so there is no other commit"


def project_root() -> Path:
    """The checkout that this harness runs from, if it is where the command was typed.

    Raises:
        GateError: it is not a git checkout, so there is no other commit to compare with; or the command was typed in
            another repository, whose code a sweep does not measure.
    """
    root = Path(__file__).resolve().parents[2]
    instead = "--command 'pytest bench/ --benchmark-json={out}'"
    if not (root / ".git").exists():
        raise GateError(
            Exit.NO_BASELINE,
            f"{root} is no git checkout, {NO_OTHER}; gate the repository that you are in with {instead}, or compare stored "
            "runs with --baseline and --candidate",
        )
    if (here := users_root()) != root:
        raise GateError(
            Exit.USAGE,
            f"{here} is not the checkout that this harness runs from ({root}), and sweeps measure only that one; to gate "
            f"this repository, give its benchmarks: {instead}",
        )
    return here


def users_root() -> Path:
    """The work tree that holds the current directory.

    Raises:
        GateError: there is none.
    """
    top = _git(Path.cwd(), "rev-parse", "--show-toplevel").stdout.strip()
    if not top:
        raise GateError(
            Exit.NO_BASELINE,
            f"{Path.cwd()} is in no git work tree, {NO_OTHER}; run the gate in the repository to be judged",
        )
    return Path(top).resolve()


def commit_to_compare(root: Path, revision: str, *, tip: bool) -> str:
    """The commit that a revision names, or, unless `tip`, the one from which this work tree and it have gone apart.

    What the other branch has added since is not this change's doing.

    Raises:
        GateError: there is no such commit, or no common history (exit 5); a shallow clone is named as such.
    """
    shallow = "this clone is shallow: git fetch --unshallow"
    is_shallow = _git(root, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    done = _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if done.returncode:
        hint = shallow if is_shallow else "see git log"
        raise GateError(Exit.NO_BASELINE, f"no commit {revision!r} in {root.name}; {hint}")
    commit = done.stdout.strip()
    if tip:
        return commit
    done = _git(root, "merge-base", "HEAD", commit)
    if done.returncode:
        hint = shallow if is_shallow else "--tip compares with it as it is"
        raise GateError(Exit.NO_BASELINE, f"{commit[:10]} and this work tree have no common ancestor; {hint}")
    return done.stdout.strip()


def walk(root: Path, paths: Sequence[str] = (".",), left_out: Sequence[str] = ()) -> Walk:
    """Every file below some paths of a folder by what it holds, and every link by where it leads; git is not asked.

    Left out are its own folders and compiled Python, which counts by its source.
    """
    names = {
        place.relative_to(root).as_posix()
        for path in paths
        for place in (root / path, *(root / path).rglob("*"))
        if (place.is_symlink() or not place.is_dir()) and NO_FILES.isdisjoint(place.parts)
    }
    kept = (n for n in names if not any(n == out or n.startswith(f"{out}/") for out in left_out))
    return {name: digest(root / name) for name in kept}


def digest(path: Path, tree: Path | None = None) -> bytes | None:
    """SHA-256 of what a file holds, or of where a link leads; None where there is nothing.

    Args:
        path: of the file.
        tree: its work tree, whose own path within what was built there makes no difference.
    """
    try:
        if path.is_symlink():
            return hashlib.sha256(b"link " + os.fsencode(path.readlink())).digest()
        data = path.read_bytes()
    except OSError:  # it is not there, or is no file
        return None
    return hashlib.sha256(data.replace(os.fsencode(tree), b"") if tree else data).digest()


def differing(one: Walk, other: Walk) -> list[str]:
    """Files that differ between two walks, or that one alone has."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def files_of(root: Path, left_out: Sequence[str] = ()) -> set[str]:
    """Files of a work tree, as paths below it: all but those that git ignores; of the repositories within it, likewise.

    What a sparse checkout leaves out is listed too.
    """
    found = set()
    for name in _listed(root, "ls-files", "--cached", *NEW, "--", ".", *_but(left_out)):
        if (root / name).is_dir() and not (
            root / name
        ).is_symlink():  # a submodule, or a repository within this one
            inner = files_of(root / name) if (root / name / ".git").exists() else ()
            found |= {f"{name.rstrip('/')}/{inside}" for inside in inner}
        else:
            found.add(name)
    return found


def ignored(root: Path) -> list[str]:
    """Files that git ignores, among files that it does not; folders that it ignores as a whole are not looked into."""
    found = _listed(root, "ls-files", "--others", "--ignored", "--exclude-standard", "--directory")
    return [name for name in found if not name.endswith(("/", ".pyc"))]


def copy_changes(root: Path, tree: Path, left_out: Sequence[str] = ()) -> list[str]:
    """Makes `tree`, a work tree of the same commit, hold what lies in `root`, ignored files aside; returns what it changed.

    Raises:
        GateError: git fails, so that it is not known what it ignores.
    """
    tagged = (line.partition(" ") for line in _listed(root, "ls-files", "-t", "--cached"))
    sparse = {name for tag, _, name in tagged if tag == "S" and not (root / name).exists()}
    there = {name: digest(root / name) for name in files_of(root, left_out) - sparse}
    mine = {name: value for name, value in walk(tree, left_out=left_out).items() if name not in sparse}
    names = differing(there, mine)
    replace_files(root, tree, names)
    return names


def replace_files(root: Path, tree: Path, names: Iterable[str]) -> None:
    """Makes files of a tree what they are below `root`; those that are not there are removed."""
    for name in names:
        source, target = root / name, tree / name
        above = [tree / parent for parent in Path(name).parents]
        is_there = (source.is_symlink() or source.is_file()) and not any(
            (root / p).is_symlink() for p in Path(name).parents
        )
        if blocked := [parent for parent in above if parent.is_symlink() or parent.is_file()]:
            if not is_there:  # nothing behind a link is touched
                continue
            blocked[-1].unlink()  # the outermost: a folder now
        _remove(target)
        if is_there:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def add_submodules(root: Path, tree: Path, commit: str) -> None:
    """Fills the submodules of a work tree from those that lie in `root`, each at the commit that is recorded for it."""
    for line in _listed(root, "ls-tree", "-r", commit):
        about, _, name = line.partition("\t")
        mode, _, recorded = about.split()
        if mode == "160000" and (root / name / ".git").exists():
            _git(root, "clone", "--quiet", "--no-checkout", str(root / name), str(tree / name))
            _git(tree / name, "checkout", "--quiet", "--detach", recorded)


def _remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _but(left_out: Sequence[str]) -> list[str]:
    """What excludes paths from a list of git's."""
    return [f":(exclude,top,literal){name}" for name in left_out]


@contextmanager
def work_tree(root: Path, commit: str) -> Iterator[Path]:
    """A work tree of the commit in a temporary folder, removed afterwards."""
    clear_up(root)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, FileLock(Path(folder) / "new"):
        (Path(folder) / "new").rename(Path(folder) / LOCK)  # so that no one ever finds it unlocked
        tree = (Path(folder) / commit[:10]).resolve()
        _checked(root, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            yield tree
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def clear_up(root: Path) -> None:
    """Removes the work trees of gates that were killed; those of gates that run beside this one are left."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            FileLock(lock, timeout=0).acquire().lock.release()
        except OSError:  # held, or someone else's
            continue
        shutil.rmtree(lock.parent, ignore_errors=True)
    _git(root, "worktree", "prune")


def _listed(root: Path, *words: str) -> list[str]:
    return [name for name in _checked(root, words[0], "-z", *words[1:]).split("\0") if name]


def _checked(root: Path, *words: str) -> str:
    """What a git command says.

    Raises:
        GateError: it fails, so that it is not known which files differ.
    """
    done = _git(root, *words)
    if done.returncode:
        raise GateError(Exit.USAGE, f"git {words[0]} failed: {' '.join(done.stderr.split())[-300:]}")
    return done.stdout


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(root), *words],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
    )


@dataclass(frozen=True, slots=True)
class Base:
    """What the base commit lends to the judgement.

    Attributes:
        policy: the base commit's, with what it has of the policy file that was named; none that the change brings.
        clock: files of `harness/timing` that differ, for both sides to measure with the base commit's.
        notes: what of the judge the change touches; nothing where it touches none of it.
    """

    policy: Policy
    clock: list[str]
    notes: tuple[str, ...]


def base_of(
    root: Path, tree: Path, named: Path | None, default: Path = DEFAULT, judges: Sequence[str] = ()
) -> Base:
    """Compares the judges of a work tree and of the base commit's tree.

    Args:
        root: the work tree that is judged.
        tree: the base commit's.
        named: the policy file of the command line; part of the change where it lies below `root`.
        default: the policy that is put under it; likewise.
        judges: other files and folders that judge.

    Raises:
        UsageError: a policy that can't be read.
        GateError: likewise, and the change may be why (exit 5).
    """
    own = below(root, default)
    relative = named and (below(root, named) or below(root, named.resolve()))
    paths = [path for path in (*judges, own, relative) if path]
    changed = differing(walk(root, paths), walk(tree, paths))
    notes = []
    if relative:
        named = tree / relative
        if not named.is_file():
            named = None
            notes.append(
                f"{relative} is not in the base commit, so the change brings its own policy; the default policy judges "
                "(land a policy of yours first, or keep it outside of the repository)"
            )
    if changed:
        notes.append(
            f"this change touches what judges it ({some(changed, 8)}); the policy is the base commit's: read the other changes"
        )
    try:
        policy = load_policy(named, tree / own if own and (tree / own).is_file() else default)
    except UsageError as error:
        if not notes:
            raise
        raise GateError(
            Exit.NO_BASELINE, f"this gate cannot read the policy of the base commit ({error}); {ANEW}"
        ) from error
    lent = [name for name in changed if name.startswith(f"{CLOCK}/")]
    return Base(policy, lent, tuple(Loud(f"JUDGE CHANGED: {note}") for note in notes))


def inside(root: Path, path: Path) -> str:
    """A path below a root, as both are written; "" where it is not."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else ""


def below(root: Path, path: Path) -> str:
    """A path below a root, its own links not followed; "" where it is not."""
    return inside(root.resolve(), path.parent.resolve() / path.name)
