"""A shard that its scheduler takes back. Oracle: submitit calls a job done when its function returns."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import pytest
from omegaconf import OmegaConf

from harness.cli import launch, shard_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JOB = OmegaConf.structured(launch.ShardJob(words="[]", shard="0/1", folder="."))


@pytest.fixture
def scheduler() -> Iterator[Callable[[Callable[[], NoReturn]], None]]:
    """Installs what a launcher does when its scheduler takes the job back."""
    before = signal.getsignal(signal.SIGUSR2)

    def install(end: Callable[[], NoReturn]) -> None:
        signal.signal(signal.SIGUSR2, lambda *_: end())

    yield install
    signal.signal(signal.SIGUSR2, before)


def taken_back_while_it_runs(config: object) -> int:
    """The shard: taken back in the middle, then ended by the signal that follows, which counts as an interruption."""
    with suppress(SystemExit, RuntimeError):
        os.kill(os.getpid(), signal.SIGUSR2)
    return 2


def test_a_job_that_is_queued_again_does_not_return(
    scheduler: Callable[[Callable[[], NoReturn]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler(lambda: sys.exit(-1))
    monkeypatch.setattr(shard_job, "_run", taken_back_while_it_runs)
    with pytest.raises(SystemExit):
        shard_job.run(JOB)


def test_what_a_launcher_says_of_a_job_that_is_not_queued_again_reaches_it(
    scheduler: Callable[[Callable[[], NoReturn]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class UncompletedJobError(RuntimeError):
        """submitit's: it writes it down as the job's result."""

    def refuse() -> NoReturn:
        raise UncompletedJobError("timed-out too many times")

    def run(config: object) -> int:
        os.kill(os.getpid(), signal.SIGUSR2)
        return 0

    scheduler(refuse)
    monkeypatch.setattr(shard_job, "_run", run)
    with pytest.raises(UncompletedJobError):
        shard_job.run(JOB)


def test_a_shard_that_is_interrupted_or_fails_by_itself_returns(
    scheduler: Callable[[Callable[[], NoReturn]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scheduler(lambda: sys.exit(-1))
    monkeypatch.setattr(shard_job, "_run", lambda config: 2)
    assert shard_job.run(JOB) == 2
    monkeypatch.setattr(shard_job, "_run", lambda config: 1 // 0)
    monkeypatch.setattr("harness.cli.internal_error.kill_children", lambda: None)
    assert shard_job.run(JOB) == 7
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_handler_is_given_back(scheduler: Callable[[Callable[[], NoReturn]], None]) -> None:
    scheduler(lambda: sys.exit(-1))
    own = signal.getsignal(signal.SIGUSR2)
    with shard_job._taken_back():
        assert signal.getsignal(signal.SIGUSR2) is not own
    assert signal.getsignal(signal.SIGUSR2) is own
