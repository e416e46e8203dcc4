"""A Ray that already runs. Oracles: ports of this machine on which something listens, and Hydra's own composition."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra

from harness.__main__ import main
from harness.cli import launch, ray_cluster
from harness.store.errors import UsageError

INIT = ray_cluster.INIT


@pytest.fixture
def port() -> int:
    """One on which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_one_line_and_starts_nothing(
    scheme: str,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "_chosen_launcher", lambda to_hydra: "ray")
    words = ["sweep=gemm", "device=cpu", "shard=0/2,1/2", f"+{INIT}.address={scheme}127.0.0.1:{port}"]
    assert main(["-m", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {INIT}.address={scheme}127.0.0.1:{port}: no Ray answers there (")
    assert not any(tmp_path.iterdir())


def test_an_address_of_the_environment_counts_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(UsageError, match="no Ray answers"):
        ray_cluster.refuse_absent([])
    ray_cluster.refuse_absent([f"+{INIT}.address=auto"])  # the command line says more


def test_one_that_listens_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ray_cluster.refuse_absent([f"+{INIT}.address=127.0.0.1:{server.getsockname()[1]}"])


@pytest.mark.parametrize(
    ("own", "size"),
    [
        ([], "absent"),  # one that the launcher starts, with its own size
        ([f"+{INIT}.address=auto"], None),
        ([f"+{INIT}.address=null"], "absent"),
        ([f"+{INIT}.address=auto", f"+{INIT}.object_store_memory=5"], 5),
    ],
)
def test_a_ray_that_runs_is_told_no_size_of_its_object_store(
    own: list[str], size: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray refuses one with an address, and the launcher sets one where the key is absent."""
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    GlobalHydra.instance().clear()
    with initialize(version_base="1.3", config_path=None):
        words = ["hydra/launcher=ray", *own, *ray_cluster.words(own)]
        init = compose(overrides=words, return_hydra_config=True).hydra.launcher.ray.init
    assert init.get("object_store_memory", "absent" if "object_store_memory" not in init else None) == size
