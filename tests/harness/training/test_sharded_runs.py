"""A training run of two ranks: cut off, killed in a save, damaged, not in FP8 on one rank.

Oracle: the same run whole, bit for bit; for its first loss, both ranks' batches through the whole model of one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import sharded_runs

from harness.machine import ranks
from harness.store.proof import ProofOutcome

if TYPE_CHECKING:
    from pathlib import Path


def test_a_run_of_ranks_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Asked to end on one rank, killed in a save, with a damaged checkpoint: the curves are those of the whole run."""
    found = ranks.run(sharded_runs.everything, 2, str(tmp_path))
    for told in found:
        assert told["ended"]
        assert not told["part_ended"]
        assert [step for step, _ in told["part"]] == [0, 1]  # rank 0 ended where rank 1 was asked to
        without_time = [
            {key: points for key, points in told[name].items() if key[0] != "elapsed_s"}
            for name in ("whole", "continued", "again")
        ]
        assert [step for step, _ in told["whole"]["loss", ""]] == [0, 1, 2, 3]
        assert [step for step, _ in told["whole"]["heldout_loss", ""]] == [0, 2, 4]
        assert without_time[1] == without_time[0]
        assert without_time[2] == without_time[0]
        assert told["resumed"] == [1]  # not 2: that save was not finished
        assert told["proof"] == str(ProofOutcome.PROVED)
        assert any("step-00000004 is not used: rank 0" in problem for problem in told["problems"])
        assert {"step-00000003", "step-00000004"} <= set(told["left"])
        sharded, alone = told["first"]
        assert sharded == pytest.approx(alone, rel=1e-6)  # of some 64 float32 terms, summed in another order
        assert told["unproved"] == str(ProofOutcome.DISPROVED)  # on rank 0 too, whose layers are all in FP8
        (problem,) = told["unsaved"]["on_problem"]
        assert problem.startswith("rank 0: step 1 was not saved: NotADirectoryError")
        assert told["unsaved"]["error"].startswith(
            "asked to end, and the checkpoint could not be written: " + problem
        )
    assert found[0]["whole"]["loss", ""] == found[1]["whole"]["loss", ""]
