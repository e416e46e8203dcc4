"""Torchrun: the ranks that `torchrun` has started, where `harness.machine.ranks` would start some itself.

    torchrun --nproc-per-node=2 -m harness sweep=allgather ranks=2

Rank 0 is the command: it plans, stores and reports. The others compute what it asks of them, until it lets them go.
A rank that dies takes all with it, by torchrun, which names it; what was stored before is intact.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from harness.machine import rank_faults, raw_output
from harness.machine.rank_faults import Fault
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_GIVEN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT_S = 120.0  # of one collective
_IDLE = timedelta(days=7)  # for which the others wait between two runs

_control: list[Any] = []  # the group by which rank 0 speaks to the others; none before the first run
_broken: list[str] = []  # why the ranks can't be used any more


def started() -> int:
    """How many ranks torchrun, or a launcher that sets what it sets, has started; 0 where this is not one of them."""
    return int(os.environ["WORLD_SIZE"]) if all(os.environ.get(name) for name in _GIVEN) else 0


def shared(command: Callable[[], int]) -> int:
    """The exit code of a command; of several ranks, the first one runs it and the others help.

    Raises:
        UsageError: the ranks cannot meet.
    """
    if not started():
        return command()
    if os.environ["RANK"] != "0":
        return _follow()
    try:
        return command()
    finally:
        if not _broken:
            _tell(None)
        _leave()


def run(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """On rank 0: `fn(*args)` in every rank; see `harness.machine.ranks.run`.

    Raises:
        RanksError: a rank raised; where not all did, the ranks are out of step and later calls raise too.
    """
    if _broken:
        raise rank_faults.RanksError(f"the ranks are out of step since an earlier run: {_broken[0]}", None)
    _tell((fn, args))
    return _take_part(fn, args)


def _follow() -> int:
    # Once the ranks are broken rank 0 stores that, and fails; an error code here would have torchrun kill it first.
    while not _broken and (work := _tell(None)) is not None:
        with suppress(rank_faults.RanksError):
            _take_part(*work)
    _leave()
    return 0


def _leave() -> None:
    """Out of step or not: a process that exits with a group still there is now and then aborted by gloo's own threads."""
    if _control:
        import torch.distributed as dist

        _control.clear()
        dist.destroy_process_group()


def _tell(work: tuple[Callable[..., Any], tuple[Any, ...]] | None) -> Any:
    """Rank 0's work, in every rank."""
    import torch.distributed as dist

    if not _control:
        _control.append(_meet())
    box = [work]
    dist.broadcast_object_list(box, src=0, group=_control[0])
    return box[0]


def _meet() -> Any:
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=TIMEOUT_S)
        )
    except dist.DistNetworkError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        _broken.append(
            f"the ranks cannot meet at {address} ({str(error).splitlines()[0]}); set another MASTER_PORT, or start "
            "without torchrun: the harness starts ranks=N itself and needs no port"
        )
        raise UsageError(_broken[0]) from error
    return dist.new_group(backend="gloo", timeout=_IDLE)


def _take_part(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """This rank's part of a run; every rank gets what all returned."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        answer: Any = (True, fn(*args))
    except Exception as error:  # noqa: BLE001 - whatever a rank raises is told to all
        answer = rank_faults.raised(rank, error)
        # others may wait for this one until a timeout
        raw_output.say(f"rank {rank} of {world}: {answer.text}\n")
    answers: list[Any] = [None] * world
    dist.all_gather_object(answers, answer, group=_control[0])
    faults = [a for a in answers if isinstance(a, Fault)]
    if faults:
        error_of_all = rank_faults.error(faults, world)
        if len(faults) < world or any(fault.of_a_peer for fault in faults):
            _broken.append(str(error_of_all))
        raise error_of_all
    return [a[1] for a in answers]
