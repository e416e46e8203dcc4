"""Against: the work tree of another commit, for as long as it is measured.

A gate that is killed outright leaves its tree behind. The folder of each holds a locked file, and the lock ends with the
process: the next gate removes everything that is not locked. (The workers of a killed gate end by themselves: their input does.)
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.gate.exit_code import Exit, GateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PREFIX, LOCK = "harness-gate-", "lock"
NEW = ("--others", "--exclude-standard")  # of git ls-files: untracked and not ignored
MEASURED = ("fp8core", "harness", "sweeps")  # a change elsewhere cannot change a measurement


def project_root() -> Path:
    """The checkout that this harness runs from, if it is where the command was typed.

    Raises:
        GateError: it is not a git checkout, so there is no other commit to compare with; or the command was typed in
            another repository, whose code a sweep does not measure.
    """
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        raise GateError(
            Exit.NO_BASELINE,
            f"{root} is no git checkout, so there is no other commit; gate the repository that you are in with "
            "--command 'pytest bench/ --benchmark-json={out}', or compare stored runs with --baseline and --candidate",
        )
    here = _top_of(Path.cwd())
    if here is not None and here != root:
        raise GateError(
            Exit.USAGE,
            f"{here} is not the checkout that this harness runs from ({root}), and sweeps measure only that one; to gate "
            "this repository, give its benchmarks: --command 'pytest bench/ --benchmark-json={out}'",
        )
    if here is None:
        raise GateError(
            Exit.NO_BASELINE,
            f"{Path.cwd()} is in no git repository, so there is no other commit; run the gate in the repository to be judged",
        )
    return root


def users_root() -> Path:
    """The work tree that holds the current directory.

    Raises:
        GateError: there is none.
    """
    root = _top_of(Path.cwd())
    if root is None:
        raise GateError(
            Exit.NO_BASELINE,
            f"{Path.cwd()} is in no git work tree, so there is no other commit to compare with",
        )
    return root


def _top_of(folder: Path) -> Path | None:
    done = _git(folder, "rev-parse", "--show-toplevel")
    return Path(done.stdout.strip()).resolve() if done.returncode == 0 and done.stdout.strip() else None


def resolve(root: Path, revision: str) -> str:
    """The commit that a revision names.

    Raises:
        GateError: there is none (exit 5); a shallow clone is named as such.
    """
    done = _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if done.returncode == 0:
        return done.stdout.strip()
    shallow = _git(root, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    hint = "; this clone is shallow: git fetch --unshallow" if shallow else "; see git log"
    raise GateError(Exit.NO_BASELINE, f"no commit {revision!r} in {root.name}{hint}")


def merge_base(root: Path, commit: str) -> str:
    """The commit from which this work tree and a commit have gone apart.

    What the other branch has added since is not this change's doing.

    Raises:
        GateError: they share no history (exit 5); a shallow clone is named as such.
    """
    done = _git(root, "merge-base", "HEAD", commit)
    if done.returncode == 0:
        return done.stdout.strip()
    shallow = _git(root, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    hint = "this clone is shallow: git fetch --unshallow" if shallow else "--tip compares with it as it is"
    raise GateError(Exit.NO_BASELINE, f"{commit[:10]} and this work tree have no common ancestor; {hint}")


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
    compared = _git(root, "diff", "--quiet", commit, *where)
    if compared.returncode not in (0, 1):  # 1: they differ
        raise _failed("diff", compared)
    return compared.returncode == 0 and not _listed(root, "ls-files", *NEW, *where)


def files_of(root: Path, left_out: Sequence[str] = ()) -> frozenset[str]:
    """Files of a work tree, as paths below it: those that git tracks and new ones that it does not ignore."""
    return frozenset(_listed(root, "ls-files", "--cached", *NEW, "--", ".", *_but(left_out)))


def copy_changes(root: Path, tree: Path, left_out: Sequence[str] = ()) -> None:
    """Brings what is not committed in `root` into `tree`, a work tree of the same commit; ignored files stay behind.

    Raises:
        GateError: git fails, so that it is not known what is not committed.
    """
    where = ["--", ".", *_but(left_out)]
    diff = ["diff", "--name-only", "--no-renames"]
    for name in _listed(root, *diff, "--diff-filter=D", "HEAD", *where):
        _remove(tree / name)
    changed = _listed(root, *diff, "--diff-filter=d", "HEAD", *where)
    for name in changed + _listed(root, "ls-files", *NEW, *where):
        source, target = root / name, tree / name
        if source.is_dir() and not source.is_symlink():  # a submodule, or a repository within this one
            continue
        _remove(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def _remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _but(left_out: Sequence[str]) -> list[str]:
    """What excludes paths from a list of git's."""
    return [f":(exclude,top,literal){name}" for name in left_out]


def _listed(root: Path, *words: str) -> list[str]:
    """Names that a git command lists.

    Raises:
        GateError: it fails.
    """
    done = _git(root, words[0], "-z", *words[1:])
    if done.returncode:
        raise _failed(words[0], done)
    return [name for name in done.stdout.split("\0") if name]


def _failed(what: str, done: subprocess.CompletedProcess[str]) -> GateError:
    return GateError(
        Exit.USAGE,
        f"git {what} failed, so it is not known what is not committed: {' '.join(done.stderr.split())[-300:]}",
    )


def commit_of(tree: Path) -> dict[str, Any]:
    """Commit of a work tree and whether tracked files differ from it, as a fingerprint names them."""
    changes = _git(tree, "status", "--porcelain", "--untracked-files=no").stdout.strip()
    return {"git_commit": _git(tree, "rev-parse", "HEAD").stdout.strip(), "git_dirty": bool(changes)}


def restore(tree: Path) -> None:
    """Makes a work tree what its commit says again.

    Raises:
        GateError: git fails.
    """
    for words in (("reset", "--hard", "--quiet"), ("clean", "-ffdx", "--quiet")):
        done = _git(tree, *words)
        if done.returncode:
            raise GateError(Exit.USAGE, f"git {words[0]} failed: {' '.join(done.stderr.split())[-300:]}")


@contextmanager
def work_tree(root: Path, commit: str) -> Iterator[Path]:
    """A work tree of the commit in a temporary folder, removed afterwards."""
    clear_up(root)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, (Path(folder) / "new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (Path(folder) / "new").rename(Path(folder) / LOCK)  # so that no one ever finds it unlocked
        tree = Path(folder) / commit[:10]
        added = _git(root, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        if added.returncode:
            raise GateError(Exit.USAGE, f"git worktree add failed: {' '.join(added.stderr.split())}")
        try:
            yield tree
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def clear_up(root: Path) -> None:
    """Removes the work trees of gates that were killed; those of gates that run beside this one are left."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        try:
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or not there yet, or someone else's
            continue
        shutil.rmtree(folder, ignore_errors=True)
    _git(root, "worktree", "prune")


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(root), *words],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
    )
