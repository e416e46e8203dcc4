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
from typing import TYPE_CHECKING

from harness.gate.codes import Exit, GateError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX, LOCK = "harness-gate-", "lock"
MEASURED = ("fp8core", "harness", "sweeps")  # a change elsewhere cannot change a measurement


def project_root() -> Path:
    """The checkout that this harness runs from.

    Raises:
        GateError: it is not a git checkout, so there is no other commit to compare with.
    """
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        raise GateError(
            Exit.NO_BASELINE,
            f"{root} is no git checkout, so there is no other commit; compare stored runs with --baseline and "
            "--candidate",
        )
    return root


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


def same_code(root: Path, commit: str) -> bool:
    """Whether nothing that is measured differs between a commit and the work tree as it lies there."""
    tracked = _git(root, "diff", "--quiet", commit, "--", *MEASURED).returncode == 0
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--", *MEASURED).stdout.strip()
    return tracked and not new


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
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
