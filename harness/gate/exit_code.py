"""Exit codes of the gate, and the error that carries one."""

from __future__ import annotations

from enum import IntEnum

from harness.store.errors import UsageError


class Loud(str):
    """A note that must not be overlooked; the type says so, whatever its words are."""

    __slots__ = ()


class Exit(IntEnum):
    """Exit codes of the gate."""

    OK = 0
    REGRESSED = 1
    USAGE = 2
    INVALID = 3  # the environment differs, or the control case moved
    NUMERICS = 4
    NO_BASELINE = 5
    INCONCLUSIVE = 6  # too little of the times was decided, or anything open where on_inconclusive: fail
    INTERNAL = 7  # see harness.cli.process_end


class GateError(UsageError):
    """The gate cannot judge; the message says why and what to do, `code` what the process returns."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code
