"""Situations of a sweep and of what follows its progress: cases that failed, runs that ended early, nothing to measure."""

from __future__ import annotations

import errno
import json
import math
from functools import partial

from situations import Place, exit_code, situation
from toy import offered

from harness.__main__ import main
from harness.engine import runlog
from harness.machine.processes import this_host
from harness.store import parquet
from harness.store.case import Case
from harness.store.run_files import PROGRESS
from harness.suites import parallel
from harness.timing.workload import Numerics, Workload
from harness.training.parallel import cells
from harness.training.parallel.cells import RankResult

RUN = ["sweep=toy", "device=cpu", "report=false", "quiet=true"]


def boom(_: Case) -> Workload:
    raise ValueError("boom")


@exit_code("sweep=NAME", "an arm fails", instead=1)
def failing_arm(place: Place, planted: bool) -> object:
    suite = offered([1], place.folder, place.patch)
    suite.behaviour = {"other": boom} if planted else {}
    return main(RUN)


@exit_code("sweep=NAME", "an arm is fast and wrong", instead=1)
def wrong_arm(place: Place, planted: bool) -> object:
    def checked(_: Case) -> Workload:
        return Workload(run=int, check=lambda: Numerics({"sqnr_db": 3.0}, ok=not planted, reason="too far"))

    offered([1], place.folder, place.patch).behaviour = {"other": checked}
    return main(RUN)


@exit_code("resume=RUN", "a finished run holds a failed case", instead=1)
def resumed_with_failures(place: Place, planted: bool) -> object:
    suite = offered([1], place.folder, place.patch)
    suite.behaviour = {"other": boom} if planted else {}
    main([*RUN, "run_id=r"])
    return main([*RUN, "resume=r"])


@exit_code("resume=RUN", "the run was made with other axes", instead=2)
def resumed_with_other_axes(place: Place, planted: bool) -> object:
    offered([1], place.folder, place.patch)
    main([*RUN, "run_id=r"])
    return main([*RUN, "resume=r", *(["axes.n=[2]"] if planted else [])])


@exit_code("dry_run=true", "the arm to measure does not exist", instead=2)
def dry_run_of_nothing(place: Place, planted: bool) -> object:
    offered([1], place.folder, place.patch)
    return main([*RUN, "dry_run=true", f"arms=[base,{'othre' if planted else 'other'}]"])


@exit_code("sweep=NAME", "the disk is full", instead=2)
def full_disk(place: Place, planted: bool) -> object:
    offered([1], place.folder, place.patch)
    if planted:

        def write(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        place.patch.setattr(parquet, "_write_durably", write)
    return main(RUN)


@exit_code("sweep=NAME", "a run of that id is there already", instead=2)
def one_id_twice(place: Place, planted: bool) -> object:
    offered([1], place.folder, place.patch)
    main([*RUN, "run_id=r"])
    return main([*RUN, f"run_id={'r' if planted else 's'}", *(["axes.n=[2]"] if planted else [])])


@situation(
    "runs", "the process of a running sweep is gone", word="Note.state", positive="running", instead="gone"
)
def gone(place: Place, planted: bool) -> object:
    note = {"pid": 1, "began": 5, "host": this_host(), "started": 1.0, "written": 2.0, "statuses": {}}
    text = json.dumps(note | {"state": "running", "total": 4, "share": 0.5})
    (place.folder / PROGRESS).write_text(text)
    (note,) = runlog.notes(place.folder, lambda _: None if planted else 5)
    return note.state


@situation(
    "runs", "a running sweep has nothing to measure", word='"100 %" is said', positive=True, instead=False
)
def hundred_percent_of_nothing(_: Place, planted: bool) -> object:
    return "100 %" in runlog.progress(
        [runlog.ProgressNote("running", 0 if planted else 4, 1.0, "", 1.0)], 1.0
    )


def ran_in_ranks(place: Place, losses: tuple[float, ...], alone: tuple[float, ...]) -> bool:
    """Whether a cell counts as one that runs."""
    place.patch.setattr(cells, "everywhere", lambda *_: [RankResult(losses)] * 2)
    place.patch.setattr(cells, "reference", lambda _: alone)
    case = Case.of("parallel", {"cell": "ddp", "steps": 3})
    return not parallel.trial(case, "tensorwise", "cpu", place.folder, lambda *_: None).failure


of_parallel = partial(
    situation, "sweep=parallel", word="Trial.failure is empty", positive=True, instead=False
)


@of_parallel(what="the one process that the ranks are held against has a loss of NaN")
def reference_of_nan(place: Place, planted: bool) -> object:
    return ran_in_ranks(place, (4.0, 3.9, 3.8), (4.0, 3.9, math.nan if planted else 3.8))


@of_parallel(what="ranks and the one process are NaN alike")
def ranks_of_nan(place: Place, planted: bool) -> object:
    last = math.nan if planted else 3.8
    return ran_in_ranks(place, (4.0, 3.9, last), (4.0, 3.9, last))


@of_parallel(what="ranks differ in the last digits where sums are the same")
def ranks_that_differ(place: Place, planted: bool) -> object:
    return ran_in_ranks(place, (4.0, 3.9, 3.8 + 1e-6 * planted), (4.0, 3.9, 3.8))
