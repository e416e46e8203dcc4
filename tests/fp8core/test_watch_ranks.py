"""fp8core.watch on two gloo processes. Oracle: the same training without it, bitwise; each rank's own batch.

What ran is in `watch_worker.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import watch_worker

from harness.machine import ranks as launched

Ranks = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """The folder of the files, and what each of the two processes found."""
    folder = tmp_path_factory.mktemp("watch")
    return folder, launched.run(watch_worker.runs, 2, folder)


def test_training_is_the_same_on_every_rank(ranks: Ranks) -> None:
    """Also where one rank alone watches, which would hang if anything were asked of the other."""
    for rank in ranks[1]:
        for kind, (plain, watched) in rank["runs"].items():
            assert watched["losses"] == plain["losses"], kind
            assert watched["weights"] == plain["weights"], kind
            assert watched["records"]
        assert rank["alone"] == rank["runs"]["ddp"][0]["losses"]


def test_each_rank_reports_its_own_part_under_its_number(ranks: Ranks) -> None:
    folder, printed = ranks
    for number, rank in enumerate(printed):
        for kind, (_, watched) in rank["runs"].items():
            records = watched["records"]
            assert {r["rank"] for r in records} == {number}
            prefix = "module." if kind == "ddp" else ""
            (first,) = (r for r in records if (r["layer"], r["operand"]) == (f"{prefix}0", "input"))
            assert (first["status"], first["amax"]) == ("cast", watched["amax"])
            lines = (folder / f"{kind}.rank{number}.jsonl").read_text().splitlines()
            assert [json.loads(line) for line in lines[-len(records) :]] == json.loads(json.dumps(records))
    amaxes = [rank["runs"]["ddp"][1]["amax"] for rank in printed]
    assert amaxes[0] != amaxes[1]


def test_ranks_with_one_scale_show_it(ranks: Ranks) -> None:
    """Delayed scaling takes the largest amax of all ranks."""
    scales = [
        {(r["layer"], r["operand"]): r["scale"] for r in rank["runs"]["ddp"][1]["records"]}
        for rank in ranks[1]
    ]
    assert scales[0] == scales[1]


def test_a_weight_that_was_gathered_in_codes_says_so(ranks: Ranks) -> None:
    """And has the scale of the one that was gathered in high precision."""
    for rank in ranks[1]:
        weights = {
            kind: {r["layer"]: r for r in rank["runs"][kind][1]["records"] if r["operand"] == "weight"}
            for kind in ("fsdp", "fsdp8")
        }
        for layer in ("0", "2"):
            plain, codes = weights["fsdp"][layer], weights["fsdp8"][layer]
            assert (plain["status"], codes["status"]) == ("cast", "codes only")
            assert codes["amax"] is codes["sqnr_db"] is codes["saturated_share"] is None
            assert codes["scale"] == plain["scale"]
            assert plain["elements"] == 32 * 64
