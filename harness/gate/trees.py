"""Trees: the work tree of another commit, for as long as it is measured, and what of a change would judge the change.

A gate that is killed outright leaves its tree behind. The folder of each holds a locked file, and the lock ends with the
process: the next gate removes everything that is not locked. (The workers of a killed gate end by themselves: their input does.)

With `--against`, the policy is the base commit's, and so is the clock: both sides measure with its `harness/timing`. The
rest of the gate is this tree's, as it runs; where a change touches it, the verdict says so.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from harness.gate.options import Exit, GateError, Loud
from harness.gate.policy import DEFAULT, load_policy
from harness.store.errors import UsageError
from harness.store.text import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from harness.gate.policy import Policy

PREFIX, LOCK = "harness-gate-", "lock"
NEW = ("--others", "--exclude-standard")  # of git ls-files: untracked and not ignored
MEASURED = ("fp8core", "harness", "sweeps")  # a change elsewhere cannot change a measurement
CLOCK, POLICY = "harness/timing", "harness/gate/policy.yaml"  # of the checkout that is measured by sweeps
JUDGES = ("harness/gate", CLOCK, "harness/store", "harness/machine", ".ci/gate", ".ci/gate-policy.yaml")
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
    root, here = Path(__file__).resolve().parent.parent.parent, _top_of(Path.cwd())
    instead = "--command 'pytest bench/ --benchmark-json={out}'"
    if not (root / ".git").exists():
        raise GateError(
            Exit.NO_BASELINE,
            f"{root} is no git checkout, {NO_OTHER}; gate the repository that you are in with {instead}, or compare stored "
            "runs with --baseline and --candidate",
        )
    if here is not None and here != root:
        raise GateError(
            Exit.USAGE,
            f"{here} is not the checkout that this harness runs from ({root}), and sweeps measure only that one; to gate "
            f"this repository, give its benchmarks: {instead}",
        )
    return users_root()


def users_root() -> Path:
    """The work tree that holds the current directory.

    Raises:
        GateError: there is none.
    """
    root = _top_of(Path.cwd())
    if root is None:
        raise GateError(
            Exit.NO_BASELINE,
            f"{Path.cwd()} is in no git work tree, {NO_OTHER}; run the gate in the repository to be judged",
        )
    return root


def _top_of(folder: Path) -> Path | None:
    top = _git(folder, "rev-parse", "--show-toplevel").stdout.strip()
    return Path(top).resolve() if top else None


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


def same_code(root: Path, commit: str, paths: Sequence[str] = MEASURED, left_out: Sequence[str] = ()) -> bool:
    """Whether nothing below some paths differs between a commit and the work tree as it lies there; "." is all.

    Args:
        root: the work tree.
        commit: what it is compared with.
        paths: files or folders below `root`.
        left_out: likewise, and not compared: what the gate itself writes.

    Raises:
        GateError: git fails.
    """
    where = ["--", *paths, *_but(left_out)]
    return not (
        _listed(root, "diff", "--name-only", commit, *where)
        or _listed(root, "ls-files", *NEW, *where)
        or any(
            _git(root, "hash-object", "--", name).stdout != _git(root, "rev-parse", f"{commit}:{name}").stdout
            for name in _hidden(root, where)
        )
    )


def files_of(root: Path, left_out: Sequence[str] = (), paths: Sequence[str] = (".",)) -> frozenset[str]:
    """Files of a work tree, as paths below it: those that git tracks and new ones that it does not ignore."""
    return frozenset(_listed(root, "ls-files", "--cached", *NEW, "--", *paths, *_but(left_out)))


def copy_changes(root: Path, tree: Path, left_out: Sequence[str] = ()) -> None:
    """Brings what is not committed in `root` into `tree`, a work tree of the same commit; ignored files stay behind.

    Raises:
        GateError: git fails, so that it is not known what is not committed.
    """
    where = ["--", ".", *_but(left_out)]
    diff = ["diff", "--name-only", "--no-renames", "HEAD", *where]
    deleted, there = (_listed(root, *diff[:3], f"--diff-filter={kind}", *diff[3:]) for kind in "Dd")
    for name in deleted:
        _remove(tree / name)
    replace_files(root, tree, there + _listed(root, "ls-files", *NEW, *where) + _hidden(root, where))


def replace_files(root: Path, tree: Path, names: Iterable[str]) -> None:
    """Makes files of a tree what they are below `root`; those that are not there are removed."""
    for name in names:
        source, target = root / name, tree / name
        if source.is_dir() and not source.is_symlink():  # a submodule, or a repository within this one
            continue
        _remove(target)
        if source.exists() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def _hidden(root: Path, where: Sequence[str]) -> list[str]:
    """Files whose changes git was told not to see (skip-worktree, assume-unchanged) and that are there; the index is not asked."""
    flagged = (line.partition(" ") for line in _listed(root, "ls-files", "-v", *where))
    return [name for flag, _, name in flagged if (flag == "S" or flag.islower()) and (root / name).is_file()]


def _remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _but(left_out: Sequence[str]) -> list[str]:
    """What excludes paths from a list of git's."""
    return [f":(exclude,top,literal){name}" for name in left_out]


def commit_of(tree: Path) -> dict[str, Any]:
    """Commit of a work tree and whether tracked files differ from it, as a fingerprint names them."""
    changes = _git(tree, "status", "--porcelain", "--untracked-files=no").stdout.strip()
    return {"git_commit": _git(tree, "rev-parse", "HEAD").stdout.strip(), "git_dirty": bool(changes)}


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
        clock: the base commit's tree where its `harness/timing` differs, for both sides to measure with.
        notes: what of the judge the change touches; nothing where it touches none of it.
    """

    policy: Policy
    clock: Path | None
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
    here, there = (files_of(side, paths=paths) if paths else frozenset() for side in (root, tree))
    changed = differing(root, tree, here | there)
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
        clock = f" and {CLOCK}" if CLOCK in judges else ""
        notes.append(
            f"this change touches what judges it ({some(changed, 8)}); policy{clock} are the base commit's on both sides, the "
            "rest is this tree's: read those changes"
        )
    try:
        policy = load_policy(named, tree / own if own and (tree / own).is_file() else default)
    except UsageError as error:
        if not notes:
            raise
        raise GateError(
            Exit.NO_BASELINE, f"this gate cannot read the policy of the base commit ({error}); {ANEW}"
        ) from error
    lent = tree if any(name.startswith(CLOCK) for name in changed) else None
    return Base(policy, lent, tuple(Loud(f"JUDGE CHANGED: {note}") for note in notes))


def differing(one: Path, other: Path, names: Iterable[str]) -> list[str]:
    """Files whose bytes differ between two folders, or that one alone has."""
    return sorted(name for name in names if _content(one / name) != _content(other / name))


def content(tree: Path, names: Iterable[str]) -> dict[str, bytes | None]:
    """SHA-256 of files below a folder; None of those that are not there."""
    found = {name: _content(tree / name) for name in names}
    return {name: None if data is None else hashlib.sha256(data).digest() for name, data in found.items()}


def below(root: Path, path: Path) -> str:
    """A path below a root, its own links not followed; "" where it is not."""
    whole, root = path.parent.resolve() / path.name, root.resolve()
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else ""


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
