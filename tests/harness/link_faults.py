"""What ranks do when links are timed and one of them fails: imported by name in the ranks."""

from __future__ import annotations

import os
import signal
import time

import torch.distributed as dist

from harness.machine import link_check
from harness.machine.link_times import RankTimes, Survey, measure
from harness.machine.links import ALL_REDUCE


def killed_in_all_reduce(survey: Survey) -> RankTimes:
    """Rank 1 is killed in the middle of one arm."""
    if survey.operation == ALL_REDUCE and dist.get_rank() == 1:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    if survey.operation == ALL_REDUCE:
        dist.barrier()
    return measure(survey)


def silent_in_all_reduce(survey: Survey) -> RankTimes:
    """Rank 1 takes part in nothing."""
    if survey.operation == ALL_REDUCE and dist.get_rank() == 1:
        time.sleep(600)
    return measure(survey)


def wrong_in_all_reduce(survey: Survey) -> RankTimes:
    """What arrives is not what was sent: rank 1 counts as another one."""
    if survey.operation == ALL_REDUCE and dist.get_rank() == 1:
        fill = link_check.fill
        link_check.fill = lambda data, operation, members, rank: fill(data, operation, members, rank + 7)
    return measure(survey)
