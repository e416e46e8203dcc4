"""The suite `links` on real ranks over gloo. Oracle: nccl-tests' definitions by hand, the bytes asked for, and planted faults."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import link_faults
import pandas as pd
import pytest

from harness import store
from harness.__main__ import main
from harness.machine.links import End, Members, kind
from harness.store.case import Case
from harness.suites import links

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow  # several launches of processes

WITHOUT = ["~parts.checksum", "~parts.gemm", "~parts.ceilings"]
QUICK = [*WITHOUT, "device=cpu", "isolate=false", "report=false", "axes.rounds=2"]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LEAST_S", 0.0)


def swept(tmp_path: Path, *words: str, code: int = 0) -> pd.DataFrame:
    assert main(["sweep=fleet", *QUICK, f"results_dir={tmp_path}", *words]) == code
    return store.read(tmp_path)


def test_three_ranks_measure_every_pair_and_all_at_once(tmp_path: Path) -> None:
    """By hand: busbw is 2(n-1)/n, (n-1)/n, (n-1)/n and 1 of algbw = S/t. 64 KiB do not divide by three ranks of float32."""
    frame = swept(tmp_path, "ranks=3", "axes.kib=64")
    factors = {
        ("send", 2): 1.0, ("all_reduce", 2): 1.0, ("all_reduce", 3): 4 / 3, ("all_gather", 2): 0.5, ("reduce_scatter", 2): 0.5,
    }  # fmt: skip
    ok = frame[frame["status"] == "ok"]
    assert set(ok[ok["arm"] == "send"]["part"]) == {"0>1", "1>0", "0>2", "2>0", "1>2", "2>1"}
    assert set(ok[ok["arm"] == "all_reduce"]["part"]) == {"0-1", "0-2", "1-2", "0-1-2"}
    for (arm, part), own in ok.groupby(["arm", "part"]):
        by_metric = own.set_index("metric")["samples"].map(list)
        factor = factors[arm, len(Members.of(part).ranks)]
        for seconds, algorithm, bus in zip(
            by_metric["link_s"], by_metric["algorithm_gb_s"], by_metric["bus_gb_s"], strict=True
        ):
            assert algorithm == pytest.approx(64 * 1024 / seconds / 1e9)
            assert bus == pytest.approx(factor * algorithm)
    ends = [End.of(end) for end in json.loads(ok.iloc[0]["resolved"])["ends"]]
    assert [end.rank for end in ends] == [0, 1, 2]
    assert {kind(ends[0], end) for end in ends[1:]} == {"within a host"}
    assert set(ok["unit"]) == {"s", "GB/s"}
    # What does not divide is a row with its cause, beside the pairs that were measured
    uneven = frame[frame["status"] != "ok"]
    assert list(uneven["arm"]) == ["all_gather", "reduce_scatter"]
    assert set(uneven["status"]) == {"skipped"}
    assert "65,536 bytes over 3 ranks: they do not divide" in uneven["reason"].iloc[0]
    assert uneven["reason"].iloc[0].endswith("nearest: axes.kib=63")
    assert set(ok[ok["arm"] == "all_gather"]["part"]) == {"0-1", "0-2", "1-2"}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed_in_all_reduce", "rank 1 of 2: was killed by SIGKILL"),
        ("silent_in_all_reduce", "rank 1 of 2 is at fault: not all ended within 1.5 s"),
        ("wrong_in_all_reduce", "all_reduce of ranks 0-1: 16384 of 16384 elements arrived wrong at rank 0"),
    ],
)
def test_a_rank_that_fails_is_named_and_other_operations_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    monkeypatch.setattr(links, "measure", getattr(link_faults, how))
    monkeypatch.setattr(links, "TIMEOUT_S", 1.5)
    frame = swept(tmp_path, "ranks=2", "axes.kib=64", "arms=[send,all_reduce,all_gather]", code=1)
    failed = frame[frame["status"] == "failed"]
    assert list(failed["arm"]) == ["all_reduce"]
    assert said in failed["reason"].iloc[0]
    assert failed["metric"].iloc[0] == "link_s"
    assert set(frame[frame["status"] == "ok"]["arm"]) == {"send", "all_gather"}
    wrong = how == "wrong_in_all_reduce"
    assert main(["fleet", str(tmp_path)]) == (1 if wrong else 2)
    if wrong:
        assert json.loads(failed["resolved"].iloc[0])["wrong_part"] == "0-1"


def test_one_rank_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What sweep=fleet says of a machine where nobody asked for ranks: rows without a number beside those of its other parts."""
    few = ["~parts.gemm", "~parts.ceilings", "device=cpu", "isolate=false", "report=false", "rounds=3"]
    assert main(["sweep=fleet", *few, f"results_dir={tmp_path}", "arms=[send,bf16_eager]"]) == 0
    frame = store.read(tmp_path)
    frame = frame[frame["suite"] == "links"]
    assert set(frame["status"]) == {"skipped"}
    assert frame["reason"].iloc[0].startswith("not judged: one rank")
    capsys.readouterr()
    assert main(["fleet", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "can't tell: no link could be judged (send: not judged: one rank" in said
    assert "OK" not in said


def test_what_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(ranks: Any, device: str = "cpu") -> str:
        found = links.unsupported(Case.of("links", {"ranks": ranks, "kib": 64, "rounds": 2}), "send", device)
        return found.reason if found else ""

    assert why(4) == ""
    assert why(33).startswith("33 ranks have 528 pairs; at most 32 ranks")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert why("all", "cuda") == ""
    assert why(9, "cuda") == "9 ranks need 9 GPUs; here are 8"
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert why("all", "cuda") == ""  # two nodes of eight
    assert why(4).startswith("ranks=4, and torchrun has started 16")


def test_a_size_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep=fleet", *QUICK, f"results_dir={tmp_path}", "axes.kib=0"]) == 2
    assert "axes.kib=0" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"needs axes\.kib"):
        links.points([], {}, None)
