"""What the rounds of a trial say, and what is stored and reported of them.

Oracles: planted speedups and noises; a fake counter of energy; published peaks; what each fault of a trial forbids.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeNvml
from loops import Loop, planted
from noises import quiet, simulated

from fp8core import RECIPES
from fp8core.extensions import Extension
from harness import ab, store
from harness.__main__ import main
from harness.machine import hardware, mfu
from harness.machine.gpu_monitor import GpuMonitor
from harness.store.compare import paired_ratios
from harness.store.printer import as_json
from harness.training.ab import rows
from harness.training.ab.result import AGAIN, ARMS, BASE, FP8, TrialPlan, TrialResult, TrialRound


def good(**changes: Any) -> TrialResult:
    return replace(simulated(quiet, 1.3, 0), **changes)


def with_faults(arm: str, keep: int) -> TrialResult:
    """Only the first rounds of an arm count."""
    return with_rounds(lambda r: {"faults": {arm: "planted"} if r.index >= keep else {}})


def with_rounds(change: Any) -> TrialResult:
    return good(rounds=tuple(replace(r, **change(r)) for r in good().rounds))


# Two copies of bf16 seem 7 % apart, and FP8 may be 8 % faster: neither a gain nor a tie
WITHIN_A_WIDE_FLOOR = tuple(
    TrialRound(
        i,
        {
            BASE: (100.0,),
            AGAIN: (100.0 * (1.06 if i % 2 else 1 / 1.06),),
            FP8: (98.0 * (1.05 if i < 3 else 1 / 1.05),),
        },
    )
    for i in range(6)
)


@pytest.mark.parametrize(
    "result",
    [
        good(proved=False),
        good(problem="rank 1 did not answer"),
        good(device="cpu"),
        good(rounds=()),
        good(rounds=good().rounds[:2]),
        with_faults(FP8, 2),
        with_faults(BASE, 2),
        with_faults(AGAIN, 2),  # no noise floor
        good(rounds=WITHIN_A_WIDE_FLOOR),
        good(under_way=True),
    ],
)
def test_no_decision_without_proof_rounds_control_or_direction(result: TrialResult) -> None:
    assert result.decision == "cannot tell"
    assert result.doubt
    assert "for speed: cannot tell, because " in "\n".join(result.lines())
    assert not any(line.startswith(("for speed: on", "for speed: off")) for line in result.lines())


def test_the_honest_twin_is_decided() -> None:
    assert good().decision == "on"
    assert not good().doubt
    assert "for speed: on" in good()._repr_html_()
    assert simulated(quiet, 1.0, 0).decision == "off"  # shown to be a tie


def test_a_loader_slower_than_the_step_is_told() -> None:
    text = "\n".join(with_rounds(lambda r: {"gaps_ms": dict.fromkeys(ARMS, (150.0,))}).lines())
    assert "waits for its loader longer than for the model" in text
    assert "with it the loop gains 1.1" in text  # (100 + 150) / (76.9 + 150)


BASE_J, FP8_J = 50.0, 40.0


def metered(nvml: FakeNvml, step_ms: float) -> tuple[TrialResult, Any]:
    """A trial whose steps take `step_ms` by the clock and planted joules by the counter, and its stored rows of energy."""
    loop = Loop()
    trial = planted(ab.Trial(loop.model, steps=67), factor=step_ms / 100)  # four rounds of blocks of four
    trial._monitor = GpuMonitor(uuid=nvml.UUID, nvml=nvml)

    def burn() -> None:
        if trial._turn is not None:
            nvml.energy_mj += round(1e3 * (FP8_J if trial._turn.is_fp8 else BASE_J))

    return loop.run(trial, inside=burn), trial


def energy_of(trial: Any, folder: Path) -> Any:
    found = store.read([trial.save(folder)])
    return found[found["metric"] == "joules_per_token"].set_index("arm")


def test_long_blocks_are_metered_from_the_second_round_on_and_stored_by_token(tmp_path: Path) -> None:
    nvml = FakeNvml()
    result, trial = metered(nvml, 700.0)
    arms = ((BASE, BASE_J), (AGAIN, BASE_J), (FP8, FP8_J))
    assert result.joules == {arm: tuple((i, j) for i in (1, 2, 3)) for arm, j in arms}
    assert nvml.opened == 0, "NVML is let go at the end"
    energy = energy_of(trial, tmp_path)
    assert list(energy["status"]) == ["ok", "ok"]
    assert energy["value"].to_dict() == pytest.approx({"base": BASE_J / 16, "tensorwise": FP8_J / 16})
    assert list(energy.loc["base", "rounds"]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("given", "step_ms", "words"),
    [
        ({}, 100.0, "320 ms, .* which block=26 gives"),
        ({"refused": ("nvmlDeviceGetTotalEnergyConsumption",)}, 700.0, "energy cannot be read here"),
        ({"mig": True}, 700.0, "energy cannot be read here"),  # the board's other slices are in it
    ],
)
def test_energy_that_is_not_measured_is_told(given: Any, step_ms: float, words: str, tmp_path: Path) -> None:
    result, trial = metered(FakeNvml(**given), step_ms)
    assert result.joules == {}
    assert re.search(words, result.unmetered)
    energy = energy_of(trial, tmp_path)
    assert set(energy["status"]) == {"skipped"}
    assert set(energy["reason"]) == {result.unmetered}
    (pair,) = paired_ratios(store.read([tmp_path])).to_dict("records")
    assert (pair["arm"], pair["rounds"]) == ("tensorwise", 4)
    assert (pair["speedup"], pair["floor"]) == pytest.approx((1.25, 1.0))


def of_h200(**changes: Any) -> TrialResult:
    """Steps of 100 ms in bf16 and 60 ms in FP8, with some 49 TFLOP, of which FP8 takes all but 9.89."""
    rounds = tuple(
        TrialRound(i, {BASE: (100.0,), AGAIN: (100.0 + 0.01 * i,), FP8: (60.0,)}) for i in range(6)
    )
    flops = {BASE: {"bf16": 49.45e12}, FP8: {"bf16": 9.89e12, "e4m3": 29.58e12, "e5m2": 10.0e12}}
    found = TrialResult("tensorwise", "cuda", rounds, "cuda_events_adjoining", proved=True)
    given: dict[str, Any] = {"flops": flops, "gpu": ("NVIDIA H200", 139.8), "tokens": 4096.0}
    return replace(found, **(given | changes))


def line(result: TrialResult, start: str) -> str:
    (found,) = [each for each in result.lines() if each.startswith(start)]
    return found


def test_mixed_mfu_stands_with_its_denominators() -> None:
    """By hand, with NVIDIA's 989 and 1979 TFLOP/s: 50 ms of 100; 10 ms and 39.58 / 1979 = 20 ms of 60."""
    (table,) = of_h200().tables()
    shares = [[cell.text for cell in row if cell.text.endswith("%")] for row in table.rows]
    assert shares == [["50.0%", "50.0%"], ["50.0%", "83.4%"]]
    assert "NVIDIA H200: bf16 989, e4m3 1979, e5m2 1979 TFLOP/s" in line(of_h200(), "mixed MFU")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": ("NVIDIA Unheard", 80.0)}, "NVIDIA Unheard is not in the table of peaks"),
        ({"gpu": None}, "is not in the table of peaks"),
        ({"flops": {BASE: {"unknown": 1e12}, FP8: {"e4m3": 1e12}}}, "the dtype of some product, or its peak"),
        ({"flops": {}}, "the dtype of some product"),
        (
            {"flops": {BASE: {"bf16": 1e15}, FP8: {"e4m3": 1e15}}},
            "it would be above the peaks of NVIDIA H200",
        ),
    ],
)
def test_an_mfu_that_is_not_known_is_not_stated(changes: dict[str, Any], words: str) -> None:
    told = line(of_h200(**changes), "MFU: not stated")
    assert words in told
    assert "%" not in told


@pytest.mark.parametrize("changes", [{"problem": "rank 1: planted"}, {"proved": False, "proof": "planted"}])
def test_no_line_gives_a_ratio_where_the_trial_has_none(changes: dict[str, Any], tmp_path: Path) -> None:
    result = of_h200(**changes)
    told = result.lines()
    assert told[0].startswith("for speed: cannot tell, because ")
    assert "planted" in told[0]
    assert not any(line.startswith(("FP8", "between", "energy", "mixed", "loss")) for line in told)
    assert not result.tables()
    assert [result.data()[name] for name in ("speedup", "low", "high", "floor", "loss_gap")] == [None] * 5
    assert set(json.loads(as_json(result))["arms"][FP8].values()) == {None}
    assert "x (" not in "\n".join(told)
    folder = rows.store(replace(result, device="cpu"), TrialPlan(), "Net", tmp_path)
    assert set(store.read([folder])["status"]) == {"failed"}


def test_a_trial_without_times_has_no_table() -> None:
    assert not of_h200(rounds=(), flops={}).tables()


def test_a_page_of_trials_says_what_each_answered(tmp_path: Path) -> None:
    good = of_h200(device="cpu", ranks=2, proof="FP8 verified: planted")
    good = replace(good, rounds=tuple(replace(r, peak_bytes={FP8: (3 * 2.0**30,)}) for r in good.rounds))
    failed = replace(good, proved=False, rounds=(), problem="FP8 is not proved: rank 1: no FP8 GEMM ran")
    for name, result in (("Good", good), ("Failed", failed)):
        rows.store(result, TrialPlan(), name, tmp_path)
    assert main(["report", str(tmp_path / "ab"), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "FP8 against bf16 in a user's own training loop" in page
    for result in (good, failed):
        assert all(f"| {line} |" in page for line in result.lines())
    assert "| A step, the slowest of 2 ranks |" in page
    assert (
        "FP8: 60 ms, 68,267 tokens/s a rank, 50.0% mixed MFU, 83.4% of the bf16 peak, 3.00 peak GiB |" in page
    )
    assert "could not be written" not in page, "a trial that failed has written its rows"
    assert "ab base could not be proved" not in page, "bf16 has nothing to prove"
    assert "ended early" not in page
    found = store.read([tmp_path / "ab"])
    broken = found[found["status"] == "failed"].set_index("arm")
    assert len(broken) == len(ARMS)
    assert (broken.loc[BASE, "cause"], broken.loc["tensorwise", "cause"]) == ("baseline", "unproven")
    timed = found[(found["metric"] == "time_ms") & (found["status"] == "ok")]
    for row in timed.to_dict("records"):
        (used,) = mfu.of_row({str(k): v for k, v in row.items()}, hardware.lookup("NVIDIA H200", 139.8))
        assert used.mfu_mixed is not None
        assert used.hfu is None, "whether the loop recomputes is not known"


def test_rows_of_a_recipe_from_another_package_say_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the entry point that the table is told of; the baseline has nothing of it."""
    of = Extension("recipes", "tensorwise", "acme-fp8", "1.2", "acme:RECIPE", lambda: None)
    monkeypatch.setitem(RECIPES._owners, "tensorwise", of)
    extensions = {
        m.arm: m.resolved.get("extensions") for m in rows.measurements(of_h200(), TrialPlan(), "Net")
    }
    assert extensions == {m: {"acme-fp8": "1.2"} if m == "tensorwise" else None for m in extensions}
    assert {"tensorwise", "base"} <= set(extensions)
