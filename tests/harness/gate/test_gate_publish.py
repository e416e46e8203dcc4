"""Oracle: an XML parser, GitHub's grammar of workflow commands (written out here), and the exit code."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from gate_fixtures import Times, failed_row, run, time_row, value_row, write

from harness.__main__ import main
from harness.gate import publish
from harness.gate.exit_code import Exit, Loud
from harness.gate.judge import Judgement
from harness.gate.render import HEADLINE, as_json, terminal

COMMAND = re.compile(
    r"^::(error|warning) (?:file=([^,:]+),)?title=([^,:]+)::(.*)$"
)  # :: , % escaped in properties


def regressed(tmp: Path) -> Judgement:
    before = [value_row(1, "rel_err_max", 0.1), value_row(2, "rel_err_max", 0.1), time_row(1, Times()())]
    after = [value_row(1, "rel_err_max", 0.5), value_row(2, "rel_err_max", 0.1), time_row(1, Times(0.3, 3)())]
    return run(tmp, before, after)


def test_junit_counts_what_the_exit_code_counts(tmp_path: Path) -> None:
    found = regressed(tmp_path)
    (suite,) = ET.fromstring(publish.junit(found))
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4",
        "failures": "2",  # the unit and the whole
        "errors": "0",
        "skipped": "1",  # a time of noise is not passed
    }
    assert [c.get("name") for c in suite.iter("testcase") if c.find("failure") is not None] == [
        "fp8 rel_err_max",
        "verdict",
    ]


@pytest.mark.parametrize("code", list(Exit))
def test_only_exit_0_is_without_failure_or_error(tmp_path: Path, code: Exit) -> None:
    """A judgement whose units are all well may still have no verdict: the machine moved, nothing was decided."""
    rows = [value_row(1, "rel_err_max", 0.1)]
    found = replace(run(tmp_path, rows, rows), code=code)
    of_units = [publish.junit(found)] if code in HEADLINE else []  # the others come with no judgement
    for text in (*of_units, publish.junit_of(code, "why")):
        (suite,) = ET.fromstring(text)
        bad = int(suite.get("failures", "")) + int(suite.get("errors", ""))
        assert (bad == 0) == (code is Exit.OK)
    if of_units:
        assert bool(publish.github_lines(found)) == (code is not Exit.OK)


def test_no_name_breaks_the_xml_or_a_workflow_command(tmp_path: Path) -> None:
    found = regressed(tmp_path)
    for f in found.findings:
        f.unit.case = 'bench/a.py::t[<&"\x00\x1b[31m%,:]\n::error::no'
    ET.fromstring(publish.junit(found))
    lines = publish.github_lines(found).splitlines()
    (line,) = [x for x in lines if "rel_err_max" in x]
    matched = COMMAND.match(line)
    assert matched is not None
    assert matched[2] == "bench/a.py"
    assert all(COMMAND.match(x) for x in lines)


def test_many_regressions_are_ten_annotations(tmp_path: Path) -> None:
    rows = [[value_row(n, "rel_err_max", v) for n in range(40)] for v in (0.1, 0.5)]
    lines = publish.github_lines(run(tmp_path, *rows)).splitlines()
    assert len(lines) == 10
    assert "31 more regressions" in lines[-1]


def test_an_allowed_regression_is_neither_failure_nor_annotation(tmp_path: Path) -> None:
    found = regressed(tmp_path)
    found = replace(found, findings=tuple(replace(f, told_only=True) for f in found.findings), code=Exit.OK)
    assert "<failure" not in publish.junit(found)
    assert publish.github_lines(found) == ""


def test_a_note_is_a_warning_by_its_type_and_not_by_its_words(tmp_path: Path) -> None:
    judgement = replace(
        regressed(tmp_path), notes=(Loud("read this"), "NOT JUDGED: so begins an arm's own name")
    )
    warnings = [line for line in publish.github_lines(judgement).splitlines() if line.startswith("::warning")]
    assert warnings == ["::warning title=Gate::read this"]
    assert "> **read this**" in publish.comment(judgement)
    assert "> **NOT JUDGED" not in publish.comment(judgement)
    assert terminal(judgement).splitlines()[-2] == "read this"
    assert json.loads(as_json(judgement))["notes"] == list(judgement.notes)


def test_the_comment_fits_and_can_be_found_again(tmp_path: Path) -> None:
    rows = [[failed_row(n, "w" * 3000) if v else time_row(n, [1.0] * 5) for n in range(50)] for v in (0, 1)]
    body = publish.comment(run(tmp_path, *rows))
    assert len(body) < 65_536
    assert body.startswith(f"{publish.MARKER}\n### Gate: REGRESSED\n")
    assert "The rest is in the job's summary." in body
    assert body.endswith("</details>\n")


def files(tmp: Path) -> list[str]:
    return ["--junit", str(tmp / "j.xml"), "--comment", str(tmp / "c.md"), "--annotations"]


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write(tmp_path / n, [value_row(1, "rel_err_max", v)]) for n, v in (("a", 0.1), ("b", 0.5)))
    assert main(["gate", "--baseline", str(a), "--candidate", str(b), *files(tmp_path)]) == 4
    out = capsys.readouterr().out
    assert out.startswith("::error title=Gate%3A REGRESSED::gemm 1x64x64: fp8 rel_err_max")
    assert out.splitlines()[-1].startswith("NUMERICS FAIL (exit 4)")
    assert [s.get("failures") for s in ET.parse(tmp_path / "j.xml").iter("testsuite")] == ["2"]
    assert (tmp_path / "c.md").read_text().startswith(publish.MARKER)


def test_a_refusal_replaces_what_an_earlier_gate_has_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_b = write(tmp_path / "b", [value_row(1, "rel_err_max", 0.5)])
    for name in ("j.xml", "c.md"):
        (tmp_path / name).write_text("OK, of an earlier gate")
    assert main(["gate", "--baseline", "no-such-run", "--candidate", str(run_b), *files(tmp_path)]) == 5
    assert "::error title=Gate%3A no verdict (exit 5)::" in capsys.readouterr().out
    assert [s.get("errors") for s in ET.parse(tmp_path / "j.xml").iter("testsuite")] == ["1"]
    assert "no verdict (exit 5)" in (tmp_path / "c.md").read_text()


OLD = '{"verdict": "OK", "exit_code": 0}'


def outputs(tmp: Path) -> list[str]:
    """All four outputs, each holding what an earlier gate wrote."""
    names = {"--json": "v.json", "--markdown": "v.md", "--junit": "j.xml", "--comment": "c.md"}
    for name in names.values():
        (tmp / name).write_text(OLD)
    return [word for option, name in names.items() for word in (option, str(tmp / name))]


def refused(case: str, tmp: Path) -> list[str]:
    """Words of a gate that can give no verdict."""
    sound, again = (write(tmp / name, [value_row(1, "rel_err_max", 0.5)]) for name in "bc")
    test = {"fullname": "t.py::x", "stats": {"data": [1.0]}}
    texts = {"none": [], "zero": [{"fullname": "t.py::x", "stats": {"data": [0.0]}}], "good": [test]}
    files = {}
    for name, tests in texts.items():
        files[name] = tmp / f"{name}.json"
        files[name].write_text(json.dumps({"benchmarks": tests}))
    (tmp / "bad.yaml").write_text("no_such_key: 1\n")
    sides = {
        "no baseline": ["no-such-run", sound],
        "bad policy": [sound, again],
        "no benchmark": [files["none"], files["good"]],
        "no time": [files["good"], files["zero"]],
    }[case]
    policy = ["--policy", str(tmp / "bad.yaml")] if case == "bad policy" else []
    return ["gate", "--baseline", str(sides[0]), "--candidate", str(sides[1]), *policy]


@pytest.mark.parametrize(
    ("case", "code", "says"),
    [
        ("no baseline", 5, "no run 'no-such-run'"),
        ("bad policy", 2, "no_such_key"),
        ("no benchmark", 2, "contains no benchmark"),
        ("no time", 2, "not a positive number"),
    ],
)
def test_without_a_verdict_every_output_says_so(tmp_path: Path, case: str, code: int, says: str) -> None:
    words = [*refused(case, tmp_path), *outputs(tmp_path)]
    assert main(words) == code
    document = json.loads((tmp_path / "v.json").read_text())
    assert (document["exit_code"], document["verdict"]) == (code, f"no verdict (exit {code})")
    assert says in document["reason"]
    for name in ("v.md", "j.xml", "c.md"):
        text = (tmp_path / name).read_text()
        assert OLD not in text
        assert f"no verdict (exit {code})" in text
    assert [s.get("errors") for s in ET.parse(tmp_path / "j.xml").iter("testsuite")] == ["1"]


@pytest.mark.parametrize("which", ["file", "part", "policy", "symlink"])
def test_an_input_is_never_an_output(tmp_path: Path, which: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = refused("no baseline", tmp_path)
    old = outputs(tmp_path)
    if which == "file":
        words, place = refused("no time", tmp_path), tmp_path / "good.json"
    elif which == "part":
        place = next((tmp_path / "b").rglob("*.parquet"))
    elif which == "policy":
        place = tmp_path / "bad.yaml"
        words += ["--policy", str(place)]
    else:
        words, place = refused("no time", tmp_path), tmp_path / "good.json"
        (tmp_path / "link").symlink_to(place)
    before = place.read_bytes()
    given = tmp_path / "link" if which == "symlink" else place
    old[old.index("--comment") + 1] = str(given)
    assert main([*words, *old]) == 2
    assert f"--comment {given} is an input of this gate" in capsys.readouterr().err
    assert place.read_bytes() == before


def test_two_outputs_are_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = str(tmp_path / "x")
    words = refused("bad policy", tmp_path)[:-2]
    assert main([*words, "--json", same, "--junit", same]) == 2
    assert "--junit and --json are the same file" in capsys.readouterr().err
    assert main([*words, "--json", "/dev/null", "--junit", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


def test_an_output_that_cannot_be_written_leaves_none_of_an_earlier_gate(tmp_path: Path) -> None:
    old = outputs(tmp_path)
    old[old.index("--comment") + 1] = str(tmp_path / "no" / "folder.md")
    assert main([*refused("bad policy", tmp_path)[:-2], *old]) == 2
    assert not any((tmp_path / name).exists() for name in ("v.json", "v.md", "j.xml"))


def test_an_annotation_names_the_file_of_a_pytest_benchmark_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random.seed(0)
    files: dict[str, list[str]] = {"a": [], "b": []}
    for side, factor in (("a", 1.0), ("b", 3.0)):
        for number in range(8):
            times = [factor * random.gauss(0.002, 0.00002) for _ in range(50)]
            test = {"fullname": "bench/t.py::test_x", "stats": {"median": 1, "iterations": 1, "data": times}}
            path = tmp_path / f"{side}{number}.json"
            path.write_text(json.dumps({"benchmarks": [test]}))
            files[side].append(str(path))
    words = ["gate", "--baseline", *files["a"], "--candidate", *files["b"], "--annotations"]
    assert main(words) == 1
    assert capsys.readouterr().out.startswith("::error file=bench/t.py,title=Gate%3A REGRESSED::")
