"""What is printed and written of a judgement. Oracle: what a reader and a program must find, an XML parser, GitHub's grammar."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from gate_fixtures import Rows, Times, control_row, failed_row, run, time_row, value_row, write

from harness.__main__ import main
from harness.gate import render
from harness.gate.options import Exit, Loud
from harness.gate.render import GateAnswer

if TYPE_CHECKING:
    from harness.gate.unit import Judgement

COMMAND = re.compile(
    r"^::(error|warning) (?:file=([^,:]+),)?title=([^,:]+)::(.*)$"
)  # :: , % escaped in properties
MARKER = "<!-- harness gate -->"  # by which a later comment finds the one that it replaces
OLD = '{"verdict": "OK", "exit_code": 0}'


@pytest.fixture
def judgement(tmp_path: Path) -> Judgement:
    """One unit of each verdict, in the order 1 REGRESSED, 2 INCONCLUSIVE, 3 IMPROVED; an SQNR that is OK."""
    times, noisy, again = Times(), Times(0.1, seed=2), Times(seed=1)
    clean = [value_row(1, "sqnr_db", float("inf")), control_row(times())]
    before = [time_row(1, times()), time_row(2, noisy()), time_row(3, times()), *clean]
    after = [time_row(1, times(1.2)), time_row(2, noisy()), time_row(3, times(0.8)), *clean]
    confirm = tuple([time_row(1, again(f)), time_row(3, again(g))] for f, g in ((1.0, 1.0), (1.2, 0.8)))
    return run(tmp_path / "judged", before, after, confirm=confirm)


def errors(tmp: Path, count: int, before: float = 0.1, after: float = 0.5) -> tuple[Rows, Rows]:
    return tuple([value_row(n, "rel_err_max", v) for n in range(count)] for v in (before, after))


# The table, markdown and JSON


def test_no_regression_is_hidden_among_what_is_ok_and_none_is_too_many(tmp_path: Path) -> None:
    found = run(tmp_path, *errors(tmp_path, render.SHOWN + 5))
    for text in (render.terminal(GateAnswer.of(found)), render.markdown(GateAnswer.of(found))):
        assert "5 more, 5 of them not OK" in text
    lines = render.github_lines(GateAnswer.of(found)).splitlines()
    assert (len(lines), f"{render.SHOWN - 4} more regressions" in lines[-1]) == (10, True)


def test_no_name_breaks_a_table_the_xml_or_a_workflow_command(judgement: Judgement) -> None:
    for finding in judgement.findings:
        finding.case = 'bench/a.py::t[<&"|\x00\x1b[31m%,:]\n::error::no'
    lines = render.markdown(GateAnswer.of(judgement)).splitlines()
    assert lines[0] == "### Gate: REGRESSED"
    table = [line for line in lines if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    ET.fromstring(render.junit(GateAnswer.of(judgement)))
    matched = [COMMAND.match(line) for line in render.github_lines(GateAnswer.of(judgement)).splitlines()]
    assert [m and m[2] for m in matched] == ["bench/a.py"]


# What CI systems read


@pytest.mark.parametrize("code", list(Exit))
def test_only_exit_0_is_without_failure_or_error(tmp_path: Path, code: Exit) -> None:
    """A judgement whose units are all well may still have no verdict: the machine moved, nothing was decided."""
    found = replace(run(tmp_path, *errors(tmp_path, 1, 0.1, 0.1)), code=code)
    of_units = (
        [render.junit(GateAnswer.of(found))] if code in render.HEADLINE else []
    )  # the others come with no judgement
    for text in (*of_units, render.junit(GateAnswer(code, "no verdict", "why"))):
        (suite,) = ET.fromstring(text)
        bad = int(suite.get("failures", "")) + int(suite.get("errors", ""))
        assert (bad == 0) == (code is Exit.OK)
    if of_units:
        assert bool(render.github_lines(GateAnswer.of(found))) == (code is not Exit.OK)


def test_an_allowed_regression_is_neither_failure_nor_annotation(judgement: Judgement) -> None:
    held = tuple(replace(f, told_only=True) for f in judgement.findings)
    found = replace(judgement, findings=held, code=Exit.OK)
    assert "<failure" not in render.junit(GateAnswer.of(found))
    assert render.github_lines(GateAnswer.of(found)) == ""


def test_a_note_is_a_warning_by_its_type_and_not_by_its_words(judgement: Judgement) -> None:
    found = replace(judgement, notes=(Loud("read this"), "NOT JUDGED: so begins an arm's own name"))
    warnings = [
        line
        for line in render.github_lines(GateAnswer.of(found)).splitlines()
        if line.startswith("::warning")
    ]
    assert warnings == ["::warning title=Gate::read this"]
    assert (
        "> **read this**" in render.comment(GateAnswer.of(found)),
        "> **NOT" in render.comment(GateAnswer.of(found)),
    ) == (True, False)
    assert render.terminal(GateAnswer.of(found)).splitlines()[-2] == "read this"
    assert json.loads(render.as_json(GateAnswer.of(found)))["notes"] == list(found.notes)


def test_the_comment_fits_and_can_be_found_again(tmp_path: Path) -> None:
    rows = [[failed_row(n, "w" * 3000) if v else time_row(n, [1.0] * 5) for n in range(50)] for v in (0, 1)]
    body = render.comment(GateAnswer.of(run(tmp_path, *rows)))
    assert len(body) < 65_536
    assert body.startswith(f"{MARKER}\n### Gate: REGRESSED\n")
    assert "The rest is in the job's summary." in body
    assert body.endswith("</details>\n")


# The files that the command writes


def outputs(tmp: Path, **instead: Path) -> list[str]:
    """All four outputs, each holding what an earlier gate wrote."""
    words = []
    for option, name in {"json": "v.json", "markdown": "v.md", "junit": "j.xml", "comment": "c.md"}.items():
        (tmp / name).write_text(OLD)
        words += [f"--{option}", str(instead.get(option, tmp / name))]
    return words


def sides(tmp: Path, baseline: Any = None, candidate: Any = None) -> list[str]:
    """Words of a gate of two sound runs, or of what is named instead."""
    found = [write(tmp / name, [value_row(1, "rel_err_max", v)]) for name, v in (("a", 0.1), ("b", 0.5))]
    return ["gate", "--baseline", str(baseline or found[0]), "--candidate", str(candidate or found[1])]


def benchmark(tmp: Path, name: str, *seconds: float) -> Path:
    tests = [{"fullname": "t.py::x", "stats": {"data": [s]}} for s in seconds]
    (tmp / name).write_text(json.dumps({"benchmarks": tests}))
    return tmp / name


def test_the_command_writes_them_and_appends_to_the_step_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert main([*sides(tmp_path), *outputs(tmp_path), "--annotations"]) == 4
    out = capsys.readouterr().out
    assert out.startswith("::error title=Gate%3A REGRESSED::gemm.1x64x64: fp8 rel_err_max")
    assert out.splitlines()[-1].startswith("NUMERICS FAIL (exit 4)")
    assert [s.get("failures") for s in ET.parse(tmp_path / "j.xml").iter("testsuite")] == ["2"]
    assert (tmp_path / "c.md").read_text().startswith(MARKER)
    assert json.loads((tmp_path / "v.json").read_text())["exit_code"] == 4
    assert (tmp_path / "summary.md").read_text() == "before\n" + (tmp_path / "v.md").read_text() + "\n"


@pytest.mark.parametrize(
    ("case", "code", "says"),
    [
        ("no baseline", 5, "no run 'no-such-run'"),
        ("no time", 2, "not a positive number"),
    ],
)
def test_without_a_verdict_every_output_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, code: int, says: str
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    good = benchmark(tmp_path, "good.json", 1.0)
    words = {
        "no baseline": sides(tmp_path, "no-such-run"),
        "no time": sides(tmp_path, good, benchmark(tmp_path, "zero.json", 0.0)),
    }[case]
    assert main([*words, *outputs(tmp_path)]) == code
    document = json.loads((tmp_path / "v.json").read_text())
    assert (document["exit_code"], document["verdict"]) == (code, f"no verdict (exit {code})")
    assert says in document["reason"]
    for name in ("v.md", "j.xml", "c.md", "summary.md"):
        text = (tmp_path / name).read_text()
        assert (OLD in text, f"no verdict (exit {code})" in text) == (False, True)
    assert [s.get("errors") for s in ET.parse(tmp_path / "j.xml").iter("testsuite")] == ["1"]


@pytest.mark.parametrize("which", ["file", "part", "policy", "symlink"])
def test_an_input_is_never_an_output(tmp_path: Path, which: str) -> None:
    (tmp_path / "bad.yaml").write_text("no_such_key: 1\n")
    good = benchmark(tmp_path, "good.json", 1.0)
    words = (
        sides(tmp_path)
        if which in ("part", "policy")
        else sides(tmp_path, good, benchmark(tmp_path, "o.json", 2.0))
    )
    words += ["--policy", str(tmp_path / "bad.yaml")] if which == "policy" else []
    (tmp_path / "link").symlink_to(good)
    place = {
        "file": good, "part": next((tmp_path / "b").rglob("*.parquet")), "policy": tmp_path / "bad.yaml",
        "symlink": tmp_path / "link",
    }[which]  # fmt: skip
    before = place.read_bytes()
    assert main([*words, *outputs(tmp_path, comment=place)]) == 2
    assert place.read_bytes() == before


def test_a_device_is_no_file_of_an_earlier_gate(tmp_path: Path) -> None:
    assert main([*sides(tmp_path), "--json", "/dev/null", "--junit", "/dev/null"]) == 4
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("place", ["no/folder.md", "."])
def test_an_output_that_cannot_be_written_leaves_none_of_an_earlier_gate(tmp_path: Path, place: str) -> None:
    assert main([*sides(tmp_path), *outputs(tmp_path, comment=tmp_path / place)]) == 2
    assert not any((tmp_path / name).read_text() for name in ("v.json", "v.md", "j.xml"))
