"""A real Ray with two nodes, and what goes wrong on one: `make test-cluster`.

Oracle: the plan of the sweep. Whatever happened, each case ends in exactly one final row an arm and metric, and what
`watch` and `report` say meanwhile agrees with the rows.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import ray_here
from slurm_here import wait_for
from tiny_sweep import CASES, began, note, reported, states, stored, whole

from harness import store
from harness.engine.run_lock import STALE_S
from harness.store.run_files import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

RUN = Path("results/tiny/r1")
QUICKLY = ["timing.min_seconds=0.3", "timing.max_seconds=0.3"]
WORDS = ["-m", "sweep=tiny", "device=cpu", "shard=0/4,1/4,2/4,3/4", "run_id=r1", "hydra/launcher=ray",
         "+hydra.launcher.ray.init.address=auto", "+hydra.launcher.ray.remote.num_cpus=1", *QUICKLY]  # fmt: skip


@pytest.fixture(scope="module")
def ray(pytestconfig: pytest.Config) -> Iterator[ray_here.Ray]:
    if why := ray_here.why_not():
        pytest.skip(why)
    yield from ray_here.cluster(PYTHONPATH=str(pytestconfig.rootpath), OMP_NUM_THREADS="1")


def after_two_minutes(shards: list[int]) -> None:
    """For so long a dead writer of another machine counts as alive, and its shard waits there; nobody else need wait."""
    for shard in shards:
        with suppress(FileNotFoundError):  # it has ended in order
            os.utime(RUN / f"shard-{shard}-of-4" / LOCK, (time.time() - STALE_S,) * 2)


def test_four_shards_on_two_nodes(ray: ray_here.Ray, shared: Path) -> None:
    code, out, err = ray.head.harness(*WORDS).said(240)
    assert code == 0, (out, err)
    assert "4 of 4 shards finished" in out
    assert len({note(RUN, shard)["host"] for shard in range(4)}) == 2
    whole(RUN)


def test_a_killed_worker_is_replaced_and_its_shard_goes_on(ray: ray_here.Ray, shared: Path) -> None:
    command = ray.head.harness(*WORDS)
    began(RUN, 1)
    watched = ray.head.harness("watch", str(RUN))
    ray_here.kill_worker(note(RUN, 1)["pid"])
    after_two_minutes([1])
    kept = stored(RUN / "shard-1-of-4")
    code, out, err = command.said(240)
    assert code == 0, (out, err)
    assert kept >= 1
    whole(RUN)
    assert store.read(RUN / "shard-1-of-4", all_attempts=True)["attempt"].nunique() == 2
    assert "finished" in watched.said(60)[1]  # it ends with the run


def test_a_lost_node_costs_no_row(ray: ray_here.Ray, shared: Path) -> None:
    """Its raylet and all that it runs are killed; Ray starts its shards again on what is left."""
    command = ray.head.harness(*WORDS)
    for shard in range(4):
        began(RUN, shard)
    lost = [shard for shard in range(4) if note(RUN, shard)["pid"] in ray.worker.pids()]
    assert lost
    ray.worker.lose()
    before = stored(RUN)
    assert reported(RUN) == "running"
    after_two_minutes(lost)
    code, out, err = command.said(240)
    ray.start_worker()
    assert code == 0, (out, err)
    assert 4 <= before < CASES
    assert states(RUN) == ["finished"] * 4
    whole(RUN)


def test_a_shard_that_is_not_started_again_is_named(ray: ray_here.Ray, shared: Path) -> None:
    command = ray.head.harness(*WORDS, "+hydra.launcher.ray.remote.max_retries=0")
    began(RUN, 1)
    ray_here.kill_worker(note(RUN, 1)["pid"])
    code, _, err = command.said(240)
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert line.startswith("error: shards ")
    assert "1/4 (" in line
    assert "resume=r1 runs the rest" in line
    assert 1 <= stored(RUN) < CASES
    wait_for("the other shards have ended with the command", lambda: not any(
        note(RUN, shard)["pid"] in [*ray.head.pids(), *ray.worker.pids()] for shard in (0, 2, 3)))  # fmt: skip
    assert reported(RUN) == "running"  # "or was killed", as these shards were
    after_two_minutes([0, 1, 2, 3])
    code, out, err = ray.head.harness("sweep=tiny", "device=cpu", *QUICKLY, "resume=r1").said(240)
    assert code == 0, (out, err)
    whole(RUN)


def test_an_address_where_no_ray_runs(ray: ray_here.Ray, shared: Path) -> None:
    address = "10.77.0.9:6379"
    words = [word for word in WORDS if "address" not in word]
    began_at = time.monotonic()
    code, out, err = ray.head.harness(*words, f"+hydra.launcher.ray.init.address={address}").said(60)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"error: hydra.launcher.ray.init.address={address}: no Ray answers there")
    assert time.monotonic() - began_at < 30
    assert not RUN.exists()
