"""Rank faults: which of several ranks is at fault, and what to say about it.

A fault of one rank becomes one of all: the others wait for it in a collective, which ends in an error of the connection
or not at all. So the rank at fault is the first one whose fault is no such error; and of ranks that do not end, one that
stands in no collective while others do.
"""

from __future__ import annotations

import re
import signal
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.store.cause import Cause
from harness.store.errors import OUT_OF_MEMORY, one_line, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

# What a rank sees of another one's end, by gloo, NCCL and the store
_OF_A_PEER = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|DistStore|store timed out", re.I
)
# gloo aborts the process that receives more or less than it expects
_SIZES = "Received data size doesn't match expected size"
# What TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch say; ranks and collectives are in the order of the sentence
_DIFFER = re.compile(
    r"Rank (\d+) is running collective: \w+\(SequenceNumber=\d+, ?OpType=(\w+)(.*?)but Rank (\d+) is running "
    r"collective: \w+\(SequenceNumber=\d+, ?OpType=(\w+)(.*)",
    re.S,
)
_SHAPE = re.compile(r"TensorShape=(\[[^\]]*\]), TensorDtypes=(\w+)")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_LIBRARY = re.compile(r"/(site-packages|dist-packages|lib/python3[^/]*)/")


class RanksError(RuntimeError):
    """A rank raised, died or did not end in time; the message names it.

    Attributes:
        rank: the one at fault; None where it is unknown.
        out_of_step: ranks may have been in different collectives; to compare them would tell.
        differ: they were, and the message says which rank was in which.
        words: of the rank at fault alone, without its number; the message where it is unknown.
        lost: the rank is gone with its process or its host, for all groups to come: no fault of what was run.
    """

    def __init__(
        self,
        message: str,
        rank: int | None,
        *,
        out_of_step: bool = False,
        differ: bool = False,
        words: str = "",
        lost: bool = False,
    ) -> None:
        super().__init__(message)
        self.words = words or message
        self.rank, self.out_of_step, self.differ, self.lost = rank, out_of_step, differ, lost
        # None: what was under way decides (`harness.store.errors.cause_of`)
        self.cause = Cause.DIED if lost else Cause.OOM if self.words.startswith(OUT_OF_MEMORY) else None


@dataclass(frozen=True, slots=True)
class Fault:
    """What became of one rank, by the clock that all processes of a machine share."""

    rank: int
    at: float
    text: str
    of_a_peer: bool = False  # it only saw that another one was gone
    sizes_differ: bool = False
    host: str = ""  # where it is not this one
    lost: bool = False  # with the process that would start another one in its place


def raised(rank: int, error: BaseException) -> Fault:
    """A rank whose function raised."""
    text = f"{one_line(error)}\n{''.join(traceback.format_exception(error)).strip()}"
    of_a_peer = isinstance(error, RuntimeError) and bool(_OF_A_PEER.search(text_of(error)))
    return Fault(rank, time.monotonic(), text, of_a_peer, _SIZES in text_of(error))


def died(rank: int, code: int, words: str) -> Fault:
    """A rank that is gone without an answer; `words`: the end of what it wrote to stderr."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    said = words.strip()[-2000:]
    return Fault(rank, time.monotonic(), how + (f":\n{said}" if said else ""), False, _SIZES in words)


def error(faults: list[Fault], world: int) -> RanksError:
    """The error that names the rank at fault, with its own words; the others are its victims."""
    for fault in faults:
        if said := _DIFFER.search(fault.text):
            one, other = _collective(*said.groups()[:3]), _collective(*said.groups()[3:])
            return RanksError(
                f"the ranks' collectives differ: {one}, {other}; {fault.text}", None, differ=True
            )
    guilty = min(faults, key=lambda fault: (fault.of_a_peer, fault.at))
    out_of_step = any(fault.sizes_differ for fault in faults)
    where = f" ({guilty.host})" if guilty.host else ""
    return RanksError(
        f"rank {guilty.rank} of {world}{where}: {guilty.text}",
        guilty.rank,
        out_of_step=out_of_step,
        words=guilty.text,
        lost=guilty.lost,
    )


def _collective(rank: str, kind: str, rest: str) -> str:
    tensor = _SHAPE.search(rest)
    return f"rank {rank} runs {kind}" + (f" of {tensor[1]} {tensor[2]}" if tensor else "")


def late(stacks: Mapping[int, str], ended: set[int], world: int, timeout_s: float) -> RanksError:
    """The error of ranks that have not ended in time.

    Args:
        stacks: of each of them, what faulthandler wrote of its main thread.
        ended: the ranks that have.
        world: number of ranks.
        timeout_s: the time that they had.
    """
    stands = {rank: _stands(stack) for rank, stack in stacks.items()}
    idle = [rank for rank, (collective, _) in stands.items() if not collective]
    # The odd one out: in no collective where others are, gone while others wait, or waiting in a place of its own.
    alone = [rank for rank, at in stands.items() if list(stands.values()).count(at) == 1]
    suspects = idle or sorted(ended) or alone
    guilty = suspects[0] if len(suspects) == 1 else None
    lines = [
        f"rank {rank} {collective or 'is in no collective,'} {at}"
        for rank, (collective, at) in stands.items()
    ]
    lines += [f"rank {rank} has returned" for rank in sorted(ended)]
    at_fault = "" if guilty is None else f"rank {guilty} of {world} is at fault: "
    return RanksError(
        f"{at_fault}not all ended within {timeout_s:g} s: {'; '.join(lines)}", guilty, out_of_step=not idle
    )


def _stands(stack: str) -> tuple[str, str]:
    """Which collective a stack waits in ("" for none), and the place in a caller's own code."""
    frames = [match for line in stack.splitlines() if (match := _FRAME.match(line))]
    if not frames:
        return "", "gives no sign of life"
    own = next((i for i, frame in enumerate(frames) if not _LIBRARY.search(frame["file"])), len(frames) - 1)
    calls = [frame["name"] for frame in frames[:own] if "/torch/distributed/" in frame["file"]]
    named = next((name for name in reversed(calls) if name != "wrapper"), "")
    place = frames[own]
    return f"waits in {named}" if named else "", f"at {place['file']}:{place['line']} in {place['name']}"
