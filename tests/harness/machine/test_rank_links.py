"""How rank 0 and the others find one another, and whom they do not take: strangers, impostors, ranks of another job.

Oracle: a file that a pickle makes when it is opened; the clock.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from harness.machine import rank_links
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class Bomb:
    """A pickle that makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, int]]:
        return os.open, (str(self._path), os.O_CREAT | os.O_WRONLY)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where the ranks of one process meet, each in a thread of its own."""
    found = dist.HashStore()
    found.set_timeout(rank_links.timedelta(seconds=5))
    monkeypatch.setattr(rank_links, "_store", lambda **kwargs: found)
    monkeypatch.setattr(rank_links.raw_output, "captured", nullcontext)
    monkeypatch.setattr(rank_links.raw_output, "lines", list)
    monkeypatch.setattr(rank_links, "MEET_S", 4.0)
    monkeypatch.setattr(rank_links, "HELLO_S", 0.5)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_RUN_ID", rank_links.SECRET, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return found


class First(threading.Thread):
    """Rank 0 of two."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.links: list[rank_links.Link] = []
        self.error = ""
        self.start()

    def run(self) -> None:
        try:
            _, self.links = rank_links.gathered(2)
        except UsageError as error:
            self.error = str(error)


def address(store: Any) -> tuple[str, int]:
    here = json.loads(store.get("rank 0"))
    return here["address"], here["port"]


@pytest.mark.parametrize("secret", ["", "s3cret"])
def test_strangers_and_other_jobs_are_passed_over(
    store: Any, secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hangs up, one sends a pickle, one says nothing; a rank of another world, port or secret reads why; then the right one."""
    monkeypatch.setenv(rank_links.SECRET, secret)
    first = First()
    place = address(store)
    assert place[0] == "127.0.0.1"  # not of every interface
    socket.create_connection(place).close()
    with socket.create_connection(place) as rude, socket.create_connection(place):
        rude.sendall(pickle.dumps(Bomb(tmp_path / "ran")))
        with pytest.raises(UsageError, match="with world 3, rank 0 of one with 2"):
            rank_links.linked(1, 3)
    mine, proof = threading.current_thread(), rank_links._proof  # one environment for both threads

    def is_mine() -> bool:
        return threading.current_thread() is mine

    with monkeypatch.context() as other:
        other.setattr(rank_links, "_job", lambda: "29501" if is_mine() else "29500")
        with pytest.raises(UsageError, match="with job 29501, rank 0 of one with 29500"):
            rank_links.linked(1, 2)
    with monkeypatch.context() as other:
        other.setattr(rank_links, "_proof", lambda *said: proof(*said) if not is_mine() else "0")
        with pytest.raises(UsageError, match="another FP8_HARNESS_SECRET"):
            rank_links.linked(1, 2)
    with pytest.raises(UsageError, match="rank 2 of 2 is there already, or cannot be"):
        rank_links.linked(2, 2)
    own = rank_links.linked(1, 2)
    first.join(5)
    (theirs,) = first.links
    assert (theirs.rank, own.rank) == (1, 0)
    own.send("hello")
    assert theirs.receive() == ("hello",)
    theirs.send({"a": 1})
    assert own.receive() == ({"a": 1},)
    own.connection.close()
    theirs.connection.close()
    assert not (tmp_path / "ran").exists()


def test_who_does_not_have_the_secret_is_not_taken_for_rank_0(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An impostor in the store, which any process of the network may write to, sends a pickle after a proof of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = {"host": "h", "address": "127.0.0.1", "port": server.getsockname()[1]}
        store.set("rank 0", json.dumps(here))

        def impostor() -> None:
            peer, _ = server.accept()
            with peer:
                until = time.monotonic() + 4
                rank_links._say(peer, {"nonce": "0"}, until)
                hello = rank_links._heard(peer, until)["hello"]
                forged = rank_links.hmac.digest(b"", f"rank 0\0{0}\0{hello}".encode(), "sha256").hex()
                rank_links._say(peer, {"proof": forged}, until)
                bomb = pickle.dumps(Bomb(tmp_path / "ran"))
                peer.sendall(len(bomb).to_bytes(4, "big") + bomb)

        threading.Thread(target=impostor, daemon=True).start()
        monkeypatch.setenv(rank_links.SECRET, "s3cret")
        with pytest.raises(
            UsageError, match="who answers there has another FP8_HARNESS_SECRET, or is not rank 0"
        ):
            rank_links.linked(1, 2)
    assert not (tmp_path / "ran").exists()


def test_a_port_in_use_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=f"127.0.0.1:{port} .*set another MASTER_PORT"):
            rank_links.gathered(2)


def test_where_rank_0_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One host: its loopback. Several: the address of the network they share; all only where the name hides which that is."""
    v4 = socket.AF_INET
    for master, local, own, expected in (
        ("127.0.0.1", None, "127.0.0.1", ("127.0.0.1", "127.0.0.1")),
        ("node1", "2", "10.0.0.5", ("127.0.0.1", "127.0.0.1")),
        ("node1", "1", "10.0.0.5", ("10.0.0.5", "10.0.0.5")),
        ("node1", "1", "127.0.1.1", ("", "node1")),
    ):
        monkeypatch.setenv("MASTER_ADDR", master)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if local is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert rank_links._where_to_listen(own, v4, 2)[:2] == expected
