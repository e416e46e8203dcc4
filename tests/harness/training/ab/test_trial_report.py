"""What `report` says of stored trials. Oracle: the lines that the trials print themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from test_trial_energy import of_h200

from harness.__main__ import main
from harness.store import read
from harness.training.ab import rows
from harness.training.ab.plan import ARMS, BASE, FP8, GATHER, WITH_GATHER, Plan
from harness.training.ab.result import Round


def test_a_page_of_trials_says_what_each_answered(tmp_path: Path) -> None:
    good = of_h200(
        device="cpu", ranks=2, slow_rank="rank 1 takes about 21 % longer", proof="FP8 verified: planted"
    )
    failed = replace(good, proved=False, rounds=(), problem="FP8 is not proved: rank 1: no FP8 GEMM ran")
    rounds = tuple(Round(r.index, {**r.times_ms, GATHER: (50.0,)}) for r in good.rounds)
    both = replace(
        good, arms=WITH_GATHER, rounds=rounds, flops={**good.flops, GATHER: good.flops[FP8]}, tokens=None
    )
    for name, result in (("Good", good), ("Failed", failed), ("Both", both)):
        rows.store(result, Plan(arms=result.arms), name, tmp_path, True)
    assert main(["report", str(tmp_path / "ab"), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "FP8 against bf16 in a user's own training loop" in page
    for result in (good, failed, both):
        assert all(f"| {line} |" in page for line in result.lines())
    assert "tensorwise_fp8_gather" in page
    assert "could not be written" not in page, "a trial that failed has written its rows"
    assert "ab base could not be proved" not in page, "bf16 has nothing to prove"
    assert "ended early" not in page
    found = read([tmp_path / "ab"])
    found = found[found["status"] == "failed"].set_index("arm")
    assert len(found) == len(ARMS)
    assert (found.loc[BASE, "cause"], found.loc["tensorwise", "cause"]) == ("baseline", "unproven")
