"""Calls of a suite while a plan is made: what a suite of somebody else raises is that suite's, and refuses the request."""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from harness.store.errors import UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def refusing(name: str, suite: object, what: str) -> Iterator[None]:
    """Turn what a suite raises into a UsageError that names it; an error of our own suites stays what it is.

    Args:
        name: of the suite.
        suite: what is called within.
        what: the function that is called.
    """
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        if _is_ours(suite) and not isinstance(error, SystemExit):
            raise
        raise UsageError(
            f"suite {name}: {what}() raised {one_line(error)}; expected it to return, or to raise ValueError for a value "
            "that it cannot take"
        ) from error


def _is_ours(suite: object) -> bool:
    module = suite.__name__ if isinstance(suite, ModuleType) else type(suite).__module__
    return module.startswith("harness.")
