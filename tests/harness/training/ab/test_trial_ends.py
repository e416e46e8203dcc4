"""How a trial ends, and what it then says and stores. Oracles: planted faults; the loop's own weights, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Loop, equal
from test_trial_energy import of_h200

from fp8core import RECIPES
from fp8core.extensions import Extension
from harness import ab
from harness.machine import hardware, mfu
from harness.store import read
from harness.store.errors import UsageError
from harness.training.ab import rows
from harness.training.ab.facts import Known
from harness.training.ab.plan import BASE, FP8, Plan
from harness.training.ab.proving import is_profiled

SHORT: dict[str, Any] = {"steps": 52}


class Broken:
    """A loader whose state cannot be put back, until it is mended."""

    mended = False

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self.mended:
            raise KeyError("planted")


def with_broken() -> tuple[Loop, Broken, Any]:
    loop, broken = Loop(), Broken()
    trial = ab.Trial(loop.model, restore=[loop.optimizer, broken], **SHORT)
    loop.run(trial)
    return loop, broken, trial


@pytest.mark.parametrize("by_hooks", [False, True])
def test_after_a_failed_restore_the_loop_trains_on(by_hooks: bool) -> None:
    loop, broken, trial = with_broken()
    assert trial.result().restored is None
    broken.mended = True
    before = [p.detach().clone() for p in loop.model.parameters()]
    if by_hooks:
        trial.begin_step()
        loop.step()
        trial.end_step()
    else:
        with trial.step():
            loop.step()
    after = [p.detach().clone() for p in loop.model.parameters()]
    assert not equal(before, after)
    with trial.step():
        pass
    trial.close()
    assert equal([p.detach() for p in loop.model.parameters()], after), "steps that ran since are kept"
    assert trial.result().restored is None


def test_close_tries_a_failed_restore_again_at_once() -> None:
    loop, broken, trial = with_broken()
    broken.mended = True
    trial.close()
    assert trial.result().restored == ("model", "random numbers", "AdamW", "Broken")
    assert equal(
        [p.detach() for p in loop.model.parameters()], [p.detach() for p in Loop().model.parameters()]
    )


@pytest.mark.parametrize("changes", [{"problem": "rank 1: planted"}, {"proved": False, "proof": "planted"}])
def test_no_line_gives_a_ratio_where_the_trial_has_none(changes: dict[str, Any], tmp_path: Path) -> None:
    result = of_h200(**changes)
    told = result.lines()
    assert told[0].startswith("FP8 (tensorwise) against bf16 in this loop: no ratio: ")
    assert "planted" in told[0]
    assert not any(line.startswith(("step:", "between", "energy", "mixed", "peak", "loss")) for line in told)
    assert "x (" not in "\n".join(told)
    folder = rows.store(replace(result, device="cpu"), Plan(), "Net", tmp_path, True)
    assert set(read([folder])["status"]) == {"failed"}


def test_blocks_left_out_give_no_energy_memory_or_slow_rank() -> None:
    def message(factor: float, fault: str = "") -> dict[str, Any]:
        return {
            "times_ms": {BASE: [100.0], FP8: [100.0 * factor]},
            "gaps_ms": {BASE: [1.0], FP8: [1.0 * factor]},
            "faults": {FP8: fault} if fault else {},
            "peaks": {BASE: 10, FP8: 10 * round(factor)},
            "joules": {BASE: 5.0, FP8: 5.0 * factor},
            "own_ms": {BASE: [100.0], FP8: [100.0 * factor]},
        }

    known = Known()
    for index in range(4):
        known.add_round(index, [message(1.0), message(7.0, "compiled")])
    assert known.peak_bytes == {BASE: 10}
    assert dict(known.joules) == {BASE: [(i, 5.0) for i in range(4)]}
    assert known.slow_rank() == ""


def test_rows_of_a_recipe_from_another_package_say_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the entry point that the table is told of; the baseline has nothing of it."""
    of = Extension("recipes", "tensorwise", "acme-fp8", "1.2", "acme:RECIPE", lambda: None)
    monkeypatch.setitem(RECIPES._owners, "tensorwise", of)
    extensions = {m.arm: m.resolved.get("extensions") for m in rows.measurements(of_h200(), Plan(), "Net")}
    assert extensions == {m: {"acme-fp8": "1.2"} if m == "tensorwise" else None for m in extensions}
    assert {"tensorwise", "base"} <= set(extensions)


def test_hfu_is_not_claimed_where_recomputation_is_not_known(tmp_path: Path) -> None:
    folder = rows.store(of_h200(device="cpu"), Plan(), "Net", tmp_path, True)
    found = read([folder])
    device = hardware.lookup("NVIDIA H200", 139.8)
    for row in found[found["metric"] == "time_ms"].to_dict("records"):
        (used,) = mfu.of_row({str(key): value for key, value in row.items()}, device)
        assert used.mfu_mixed is not None
        assert used.hfu is None


def test_a_trial_that_cannot_begin_is_over() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, fp8_all_gather="both", restore=[], steps=100)
    with pytest.raises(UsageError, match="FSDP2 does not shard"), trial.step():
        loop.step()
    assert trial.done
    assert "the trial could not begin: UsageError: fp8_all_gather='both'" in trial.result().problem
    assert not any(m._forward_hooks for m in loop.model.modules())
    with trial.step():
        loop.step()
    assert trial.result().steps_run == (0, 0)


def test_a_profiler_of_the_users_own_is_not_ended() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, **SHORT)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as mine:
        with pytest.raises(UsageError, match="a profiler is active") as error, trial.step():
            loop.step()
        assert is_profiled()
        torch.ones(2).add(1)
    assert "\n" not in str(error.value)
    assert any(event.name == "aten::add" for event in mine.events())
    assert trial.done
