"""The one builder of stored rows for tests: the fields of a case by keyword, and what every row has filled in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterable

    from harness.store.case import Case


def row(
    case: Case | str, arm: str, samples: Iterable[float] = (), metric: str = "time_ms", **fields: Any
) -> Measurement:
    """A row of an arm.

    Args:
        case: a Case, or the id of one without axes of the suite "s".
        arm: its name.
        samples: none for a row that failed or was skipped.
        metric: of a time, one sample is one round of the regime "isolated" unless `fields` say otherwise.
        fields: of `Measurement`; `status` is "ok" where there are samples, else "failed".
    """
    about = ("s", case, "{}") if isinstance(case, str) else (case.suite, case.case_id, case.axes_json)
    given: dict[str, Any] = {"samples": tuple(map(float, samples)), "status": "ok" if samples else "failed"}
    if metric == "time_ms" and samples:
        given |= {"rounds": tuple(range(len(given["samples"]))), "regime": "isolated"}
    given |= fields
    return Measurement(suite=about[0], case_id=about[1], arm=arm, axes=about[2], metric=metric, **given)
