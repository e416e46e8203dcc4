"""Oracle: pytest-benchmark files made with a known change, a process each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.__main__ import main

MACHINE: dict[str, Any] = {
    "node": "n",
    "system": "Linux",
    "release": "6.1",
    "python_version": "3.11.7",
    "cpu": {"brand_raw": "AMD EPYC 7B13", "count": 8},
}


def files(
    tmp: Path, side: str, count: int, factor: float = 1.0, tests: int = 3, cpu: str = "AMD EPYC 7B13"
) -> list[str]:
    """One file a process; each process has a speed of its own, by 0.5 %, and its samples lie close together."""
    random = np.random.default_rng([ord(side[0]), count])
    names = []
    for number in range(count):
        benchmarks = [
            {
                "fullname": f"t.py::test_{n}",
                "group": None,
                "stats": {
                    "median": 1.0,
                    "data": list(
                        0.001 * factor * np.exp(random.normal(0, 0.005)) * np.exp(random.normal(0, 0.001, 40))
                    ),
                },
            }
            for n in range(tests)
        ]
        machine = MACHINE | {"cpu": {"brand_raw": cpu, "count": 8}}
        file = tmp / f"{side}{number}.json"
        file.write_text(
            json.dumps({"machine_info": machine, "commit_info": {"id": side}, "benchmarks": benchmarks})
        )
        names.append(str(file))
    return names


def gated(tmp: Path, a: list[str], b: list[str]) -> tuple[int, dict[str, Any]]:
    code = main(["gate", "--baseline", *a, "--candidate", *b, "--json", str(tmp / "v.json")])
    return code, json.loads((tmp / "v.json").read_text())


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.2, 1), (0.8, 0)])
def test_files_are_the_rounds(tmp_path: Path, factor: float, code: int) -> None:
    found, document = gated(tmp_path, files(tmp_path, "a", 8), files(tmp_path, "b", 8, factor))
    assert found == code
    assert {f["rounds"] for f in document["findings"]} == {8}
    assert {f["verdict"] for f in document["findings"]} == {
        {1.0: "OK", 1.2: "REGRESSED", 0.8: "IMPROVED"}[factor]
    }
    assert {str(f["cause"]) for f in document["findings"]} == {"None"}  # nothing was counted


def test_one_file_a_side_decides_nothing_and_says_how_many_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 samples of one process are one round, however far apart the sides are."""
    found, document = gated(tmp_path, files(tmp_path, "a", 1), files(tmp_path, "b", 1, 2.0))
    assert (found, document["verdict"]) == (6, "COULD NOT JUDGE 3 of 3")
    out = capsys.readouterr().out
    assert "a file is one round" in out
    assert "8 files a side would decide 3 tests" in out


@pytest.mark.parametrize("count", [3, 4, 5, 7])
def test_ten_times_slower_in_a_few_files_is_no_ok(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Six tests, one 10 times slower, +899 to +902 %: one undecided unit of six is below the share that may stay open."""
    a, b = files(tmp_path, "a", count, tests=6), files(tmp_path, "b", count, tests=6)
    for name in b:
        document = json.loads(Path(name).read_text())
        stats = document["benchmarks"][2]["stats"]
        stats["data"] = [10 * x for x in stats["data"]]
        Path(name).write_text(json.dumps(document))
    code, document = gated(tmp_path, a, b)
    assert code == 6
    assert "1 of them looks slower: pytest-benchmark" in document["verdict"]
    assert "test_2" in document["verdict"]
    assert max(f["low"] for f in document["findings"]) > 9
    assert capsys.readouterr().out.splitlines()[-1].startswith("COULD NOT JUDGE 1 of 6")


def test_a_file_that_is_named_twice_is_one_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file named eight times, or copied, had eight rounds that agree to the last bit."""
    a, b = files(tmp_path, "a", 1), files(tmp_path, "b", 8, 1.2)
    copied = tmp_path / "copy.json"
    copied.write_bytes(Path(a[0]).read_bytes())
    for names in (a * 8, [a[0], str(copied)]):
        assert main(["gate", "--baseline", *names, "--candidate", *b]) == 2
        err = capsys.readouterr().err
        assert "are the same file, which is one round and not two" in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["--baseline", "a0.json", "--candidate", "run"], "pytest-benchmark files on both"),
        (["--baseline", "run", "run2", "--candidate", "run"], "name one run"),
        (["--baseline", "a0.json", "other0.json", "--candidate", "a0.json"], "was measured elsewhere"),
        (["--baseline", "none.json", "--candidate", "a0.json"], "cannot read none.json"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    names: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    files(tmp_path, "a", 1)
    files(tmp_path, "other", 1, cpu="Another CPU")
    assert main(["gate", *names]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine_info": "a laptop"}, "machine_info is 'a laptop'; expected an object"),
        ({"machine_info": {"cpu": "AMD"}}, "machine_info.cpu is 'AMD'; expected an object"),
        ({"commit_info": ["abc"]}, "commit_info is ['abc']; expected an object"),
        ({"benchmarks": ["t.py::x"]}, "a benchmark is 't.py::x'; expected an object with fullname and stats"),
        (
            {"benchmarks": [{"fullname": "x", "stats": [1.0]}]},
            "without 'stats' (it is [1.0]); expected an object",
        ),
        ({"benchmarks": [{"stats": {}}]}, "a benchmark without 'fullname' (it is None); expected a text"),
        (
            {"benchmarks": [{"fullname": "x", "stats": {}}]},
            "a benchmark without 'median' and without 'data': x",
        ),
        ({"benchmarks": [{"fullname": "x", "stats": {"median": None}}]}, "x has the times [None]; expected"),
        ({"benchmarks": [{"fullname": "x", "stats": {"data": "12"}}]}, "x has the times '12'; expected"),
        ({"benchmarks": [{"fullname": "x", "stats": {"data": ["1"]}}]}, "x has the times ['1']; expected"),
        (
            {"benchmarks": [{"fullname": "x", "stats": {"data": [1.0]}, "extra_info": "y"}]},
            "extra_info of x is 'y'; expected an object",
        ),
    ],
)
def test_a_value_of_another_type_is_named_with_what_is_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    (a,), (b,) = files(tmp_path, "a", 1), files(tmp_path, "b", 1)
    Path(b).write_text(json.dumps({**json.loads(Path(b).read_text()), **change}))
    for words in (["gate", "--baseline", a, "--candidate", b], ["import", b, "--results-dir", str(tmp_path)]):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert f"{b}: " in err
        assert message in err
        assert err.count("\n") == 1
