"""Links between hosts that `tc` gives a rate: healthy ones are in line, one at a tenth is found and named. `make test-cluster`.

Oracle: the rates that were set. Four namespaces stand for four hosts; each sends to each other one at 200 Mbit/s, so that the
link and not the two cores of this machine is what is measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import links_here
import pytest

from harness import store
from harness.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

HOSTS, RATE_MBIT = 4, 200
HEALTHY = 20
SCRIPT = """
import sys
from harness.__main__ import main
from harness.machine import torchrun

def every():
    \"\"\"Rank 0's: one run after the other, with the same ranks.\"\"\"
    torchrun.shared = lambda command: command()
    for run in sys.argv[3:]:
        words = [f"run_id={run}", f"results_dir={sys.argv[1]}", *sys.argv[2].split()]
        if main(["sweep=fleet", "~parts.checksum", "~parts.gemm", "~parts.ceilings", "device=cpu", "isolate=false",
                 "report=false", "quiet=true", *words]):
            return 1
    return 0

if __name__ == "__main__":  # processes of ranks import this file
    sys.exit(torchrun.shared(every))
"""


@pytest.fixture(autouse=True)
def _can() -> None:
    if why := links_here.why_not():
        pytest.skip(why)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Iterator[Path]:
    (tmp_path / "runs.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    with links_here.hosts(HOSTS, RATE_MBIT):
        yield tmp_path


def measured(folder: Path, runs: list[str], words: str) -> None:
    """Runs of sweep=fleet over all hosts, by one torchrun."""
    done = links_here.launched(HOSTS, [str(folder / "runs.py"), str(folder / "results"), words, *runs], 400)
    assert [one.returncode for one in done] == [0] * HOSTS, "\n".join(one.stdout[-3000:] for one in done)


def judged(folder: Path, run: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["fleet", str(folder / "results" / "fleet" / run), "json=true"])
    return code, json.loads(capsys.readouterr().out)["links"]


def test_healthy_runs_raise_no_alarm_and_a_link_at_a_tenth_is_found_in_each(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 runs of the messages; then three with the link between hosts 1 and 2 at 20 Mbit/s."""
    healthy = [f"healthy-{i}" for i in range(HEALTHY)]
    measured(shared, healthy, "arms=[send]")
    for run in healthy:
        code, said = judged(shared, run, capsys)
        assert (code, said["outliers"]) == (0, []), run
        assert said["verdict"].startswith("no link out of line; judged 6 of 6"), said["verdict"]
        rates = [o["bus_gb_s"] for o in said["operations"] if o["bytes"] == 2**20]
        assert all(0.015 < rate < 0.026 for rate in rates)  # 200 Mbit/s are 0.025 GB/s, headers included
    for one, other in ((1, 2), (2, 1)):
        links_here.shape(one, other, RATE_MBIT // 10)
    slow = [f"slow-{i}" for i in range(3)]
    measured(shared, slow, "arms=[send]")
    for run in slow:
        code, said = judged(shared, run, capsys)
        assert code == 1
        named = {
            (o["what"], *sorted(name.partition(" (")[0] for name in o["names"])) for o in said["outliers"]
        }
        assert named == {("slow link", "rank 1", "rank 2")}
        assert {o["size"] for o in said["outliers"]} == {2**16, 2**20}
        assert {o["link"] for o in said["outliers"]} == {"between networks of a host"}


def test_a_slow_all_reduce_is_located_by_the_messages(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Host 3's card at a tenth: all operations of all ranks are slow, and the end is named."""
    measured(shared, ["before"], "arms=[send,all_reduce] axes.kib=1024")
    for other in range(3):
        links_here.shape(3, other, RATE_MBIT // 10)
        links_here.shape(other, 3, RATE_MBIT // 10)
    measured(shared, ["after"], "arms=[send,all_reduce] axes.kib=1024")
    bus = {}
    for run in ("before", "after"):
        frame = store.read(shared / "results" / "fleet" / run)
        whole = frame[
            (frame["arm"] == "all_reduce") & (frame["metric"] == "bus_gb_s") & (frame["part"] == "0-1-2-3")
        ]
        bus[run] = float(whole["value"].iloc[0])
    assert bus["after"] < bus["before"] / 3
    assert judged(shared, "before", capsys)[0] == 0
    code, said = judged(shared, "after", capsys)
    assert code == 1
    assert {(o["what"], o["names"][0].partition(" (")[0]) for o in said["outliers"]} == {
        ("slow end", "rank 3")
    }
