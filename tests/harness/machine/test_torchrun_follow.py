"""What a rank of torchrun sends to rank 0, and when. Oracle: what the next group of ranks reads."""

from __future__ import annotations

from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from harness.machine import torchrun
from harness.machine.rank_links import Link


class FakeRank:
    """A process that answers each call at once, and whose pipe is closed when it is ended."""

    def __init__(self, rank: int, *rest: object) -> None:
        self.rank, self.process = rank, SimpleNamespace(exitcode=None)
        self.ours, self._theirs = Pipe()

    def send(self, work: bytes) -> None:
        self._theirs.send((True, work))

    def answer(self) -> Any:
        try:
            return self.ours.recv()
        except (EOFError, OSError):  # as `harness.machine.rank_process.Rank` does
            return torchrun.rank_faults.died(self.rank, -9, "")

    def news(self) -> str:
        return ""

    def kill(self) -> None:
        pass

    def end(self) -> None:
        self.ours.close()


def test_no_answer_of_an_ended_group_reaches_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a group and the answer of its rank are there at once, and the end is read first."""
    first, other = (Link(one, 0, "h", "127.0.0.1") for one in Pipe())
    near = ("127.0.0.1:1", "lo")
    for number, work in enumerate((b"first", b"second")):
        first.send("start", number, 2, "cpu", 1, near, b"", {})
        first.send("work", number, work)
        if number == 0:
            torchrun.FarRank(first, 0, None).kill()
    first.send("leave")
    link, rank = [0], [1]  # places of what is ready, in what is waited for
    script = iter([link, link, link + rank, link, link, rank, link])

    def wait(waited: list[Any]) -> list[Any]:
        ready = [waited[place] for place in next(script)]
        assert all(one.poll() for one in ready)
        return ready

    monkeypatch.setattr(torchrun, "wait", wait)
    monkeypatch.setattr(torchrun, "Rank", FakeRank)
    assert torchrun._follow(other, 1, 2) == 0
    torchrun.FarRank(first, 0, None).end()
    assert first.lost is None
    assert torchrun.FarRank(first, 1, None).answer() == (True, b"second")
    assert not first.connection.poll()
