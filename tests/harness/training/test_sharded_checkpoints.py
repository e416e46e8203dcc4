"""Sharded checkpoints of two ranks that a fault has met: bytes that changed on the disk, a rank that fails before it writes.

Oracle: the weights before the save, bit for bit.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from harness.machine import ranks
from harness.store.errors import UsageError
from harness.training.sharded_checkpoints import ShardedCheckpoints


def faults(folder: str) -> dict[str, Any]:
    """What one rank sees of each fault."""
    told: dict[str, Any] = {}
    model, optimizer = _trained()
    place, said = Path(folder), list[str]()
    checkpoints = ShardedCheckpoints(place, "id", said.append)
    kept = []
    for step in (1, 2):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert checkpoints.save(step, model, optimizer, {"a": step})
        kept.append(_local(model))
    dist.barrier()
    if dist.get_rank() == 0:  # rank 0's weights, in a file that only rank 0 reads
        shard = place / "step-00000002" / "__0_0.distcp"
        content, weights = shard.read_bytes(), kept[1][0].numpy().tobytes()[:64]
        assert content.count(weights) == 1
        shard.write_bytes(content.replace(weights, bytes(64)))
    dist.barrier()
    again, its_optimizer = _trained()
    reader = ShardedCheckpoints(place, "id")
    told["loaded"] = reader.load_newest(again, its_optimizer)
    told["equal"] = all(map(torch.equal, _local(again), kept[0]))
    told["unread"] = reader.problems

    begun = time.monotonic()
    checkpoints._shards = _fails if dist.get_rank() == 1 else checkpoints._shards  # type: ignore[method-assign]
    told["saved"] = checkpoints.save(3, model, optimizer, {})
    told["seconds"] = time.monotonic() - begun
    told["unsaved"], told["said"] = checkpoints.problems, said
    dist.barrier()  # rank 0 removes what is left over
    told["left"] = sorted(path.name for path in place.iterdir())

    if dist.get_rank() == 0:  # nothing says what was written
        (run,) = (place / "step-00000001").glob("run-*.pt")
        run.rename(run.with_name("run.pt"))
    dist.barrier()
    bare = ShardedCheckpoints(place, "id")
    try:
        told["bare"] = bare.load_newest(again, its_optimizer)
    except UsageError:
        told["bare"] = bare.problems
    return told


def damaged_run(folder: str) -> dict[str, Any]:
    """What one rank loads where a float64, a float32, or all of the newest `run*.pt` has changed or gone."""
    told: dict[str, Any] = {}
    model, optimizer = _trained()
    place = Path(folder)
    checkpoints = ShardedCheckpoints(place, "id")
    run = {
        "curve": torch.arange(64, dtype=torch.float64) + 0.5,
        "amaxes": torch.arange(64, dtype=torch.float32) + 0.25,
    }
    for step in (1, 2):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert checkpoints.save(step, model, optimizer, {"step": step, **run})
    dist.barrier()
    (file,) = (place / "step-00000002").glob("run*.pt")
    content = file.read_bytes()
    for name in (*run, "gone"):
        dist.barrier()
        if dist.get_rank() == 0 and name in run:
            there = run[name].numpy().tobytes()[-64:]
            assert content.count(there) == 1
            file.write_bytes(content.replace(there, bytes(64)))
        elif dist.get_rank() == 0:
            file.unlink()
        dist.barrier()
        reader = ShardedCheckpoints(place, "id")
        found = reader.load_newest(*_trained())
        assert found is not None
        told[name] = (found[0], found[1]["step"], reader.problems)
    return told


def generators(folder: str) -> dict[str, Any]:
    """What one rank's GPU generator, a fake one, is restored to: from a checkpoint with its state, and from one without."""
    told: dict[str, Any] = {"restored": []}
    own, place, cuda = dist.get_rank() + 10, Path(folder), torch.cuda
    cuda.is_initialized = lambda: False
    ShardedCheckpoints(place / "without", "id").save(1, *_trained(), {})
    cuda.is_initialized = lambda: True
    cuda.get_rng_state = lambda *_: torch.full((16,), own, dtype=torch.uint8)  # type: ignore[misc, assignment]
    cuda.set_rng_state = lambda state, *_: told["restored"].append(state.tolist())  # type: ignore[misc, assignment]
    ShardedCheckpoints(place / "with", "id").save(1, *_trained(), {})
    own = 0
    for name in ("without", "with"):
        reader = ShardedCheckpoints(place / name, "id")
        told[name] = reader.load_newest(*_trained()), reader.problems, len(told["restored"])
    return told


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters())


def _local(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


def _fails(*args: object) -> dict[str, Any]:
    raise MemoryError("planted")


def test_no_fault_of_a_checkpoint_is_taken_for_a_whole_one(tmp_path: Path) -> None:
    """64 zeroed bytes of a shard: the checkpoint before. One rank out of memory: known to all, in seconds, nothing left over."""
    for told in ranks.run(faults, 2, str(tmp_path)):
        assert told["loaded"] == (1, {"a": 1})
        assert told["equal"]
        (problem,) = told["unread"]
        assert problem.startswith("step-00000002 is not used: rank 0: __0_0.distcp has changed")
        assert told["saved"] is False
        assert told["seconds"] < 60  # not the timeout of a collective
        assert told["unsaved"] == told["said"]
        (problem,) = told["unsaved"]
        assert problem == "rank 1: step 3 was not saved: out of memory: planted"
        assert told["left"] == ["step-00000001", "step-00000002"]
        assert told["bare"][-1] == "step-00000001 is not used: rank 0: run-<sha256>.pt is missing"


def test_a_damaged_file_of_the_run_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    """Loss curves and amaxes are kept beside the shards: where their bytes changed, the checkpoint before is taken."""
    for told in ranks.run(damaged_run, 2, str(tmp_path)):
        for name in ("curve", "amaxes", "gone"):
            step, of_run, problems = told[name]
            assert (step, of_run) == (1, 1), name
            (problem,) = problems
            assert problem.startswith("step-00000002 is not used: rank 0: run"), problem
            said = "is missing" if name == "gone" else "has changed since it was written (sha256)"
            assert problem.endswith(said)


def test_the_generator_of_each_gpu_goes_on(tmp_path: Path) -> None:
    """A checkpoint that was made without a GPU leaves it as it is."""
    for rank, told in enumerate(ranks.run(generators, 2, str(tmp_path))):
        assert told["without"] == ((1, {}), [], 0)
        assert told["with"] == ((1, {}), [], 1)
        assert told["restored"] == [[rank + 10] * 16]
