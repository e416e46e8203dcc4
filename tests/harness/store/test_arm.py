"""Arms as records. Oracles: the names that sweeps and published files hold, and the records that suites declare."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
from curves_for_tests import control, rows_of_runs, shifted, whole_suite
from report_cases import train_cases
from report_fixtures import Invented, write_run

from fp8core.recipe import RECIPES
from harness import store
from harness.cli import config
from harness.judge.verdict.rows import judge
from harness.report.claims import Ledger
from harness.report.headline import headline, headline_rows
from harness.report.runs import load
from harness.store import arm as arm_module
from harness.store.arm import (
    CONTROL_SUFFIX,
    Arm,
    arm_of,
    from_json,
    original_name,
    parse,
    stored_arm,
    without_controls,
)
from harness.store.case import Case
from harness.store.compare import paired_ratios
from harness.store.measurement import Measurement
from harness.suites import SUITES, divergence
from harness.timing.workload import ArmInfo, arm_table

ROOT = Path(__file__).parents[3]
DECLARED = [(suite, name) for suite, module in SUITES.items() for name in module.ARMS]


# Names and records


@pytest.mark.parametrize("suite", SUITES)
def test_every_arm_of_every_suite_is_a_record_whose_name_reads_back(suite: str) -> None:
    """Oracle: the suite's table. Every sweep takes its arms from these tables; so every name that it can produce is here."""
    for name, info in SUITES[suite].ARMS.items():
        declared = info.record(name)
        for record in (declared, replace(declared, control=True)):
            assert str(record) == name + CONTROL_SUFFIX * record.control
            assert parse(str(record)) == record
            assert from_json(record.as_json) == record
        assert declared.fp8_recipe in ("", *RECIPES)
        assert info.baseline == "" or info.baseline in SUITES[suite].ARMS


def test_published_names_read_back_and_say_what_their_rows_say() -> None:
    """Oracle: `flops`, `resolved` and `baseline` of the rows themselves, written before arms were records."""
    frame = store.read(ROOT / "results" / "published")
    seen = {(r["suite"], r["arm"]): r for r in frame.to_dict("records")}
    assert len(seen) > 50
    for (suite, name), row in seen.items():
        record = arm_of(row)
        assert str(record) == name
        assert parse(name) == record
        assert SUITES[suite].ARMS[original_name(name)].record(original_name(name)) == replace(
            record, control=False
        )
        assert record.control == (row["baseline"] + CONTROL_SUFFIX == name)


def test_arms_of_the_gpu_session_are_known() -> None:
    parts = config.load(["sweep=gpu"], lambda device: device).config["parts"].values()
    names = {name for part in parts for name in part["overrides"].get("arms", ())}
    assert names
    assert all(parse(name) != Arm(variant=name) or name in ("copy", "read", "fp32", "") for name in names)


def test_the_table_has_one_record_a_name_and_one_name_a_record() -> None:
    known = list(arm_module._known())
    assert len(known) == len(set(known)) == len({str(arm) for arm in known}) > 500


@pytest.mark.parametrize(
    "name",
    ["test_sort[10]", "my_eager", "tensorwise_eager_new", "eager_tensorwise", "rowwise_golden_eps", "", "_", "fp8",
     "bf16_", "_eager", "base_to_base", "tensorwise:again:again", "TENSORWISE_EAGER", "tensorwise_fused_fused_eager"],
)  # fmt: skip
def test_nothing_is_guessed_about_a_name_that_no_table_knows(name: str) -> None:
    record = parse(name)
    assert str(record) == name
    assert (record.recipe, record.mode, record.casts, record.peer) == ("", "", "", "")


def test_a_name_is_not_taken_apart_at_a_word_that_it_shares_with_a_recipe() -> None:
    """The repaired fault: "tensorwise_fused_eager" was recipe "tensorwise_fused"."""
    fused = parse("tensorwise_fused_eager")
    assert (fused.recipe, fused.mode, fused.casts) == ("tensorwise", "eager", "fused")
    assert parse("rowwise_with_gw_hp_eager").recipe == "rowwise_with_gw_hp"
    assert parse("scaled_mm_rowwise") == Arm("rowwise", peer="scaled_mm")
    assert str(fused.computes) == "tensorwise"
    assert str(parse("torchao_rowwise_linears").computes) == "torchao_rowwise"


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '"x"', "{", '{"recipe": 1}', '{"control": "no"}', '{"mode": null}']
)
def test_damaged_fields_are_refused_and_claim_nothing_when_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"arm_fields|Expecting"):
        from_json(text)
    assert from_json(stored_arm("own", "tensorwise_eager", "", text)[1]) == Arm(variant="tensorwise_eager")


def test_fields_of_another_name_claim_nothing() -> None:
    """A row whose two columns disagree must not pass for either."""
    text = Arm("rowwise", "eager").as_json
    assert from_json(stored_arm("own", "tensorwise_eager", "", text)[1]) == Arm(variant="tensorwise_eager")


def test_fields_that_a_newer_version_added_are_left_out() -> None:
    text = Arm("rowwise", "eager").as_json[:-1] + ',"sparsity":"2:4"}'
    assert from_json(text) == Arm("rowwise", "eager")


def test_an_older_row_is_a_control_only_where_its_baseline_says_so() -> None:
    """An imported benchmark may have any name."""
    assert from_json(stored_arm("own", "bf16:again", "bf16", None)[1]).control
    assert not from_json(stored_arm("own", "sort:again", "", None)[1]).control


def test_two_arms_of_one_name_are_refused() -> None:
    arms = {Arm("rowwise_golden"): ArmInfo("a recipe"), Arm("rowwise", variant="golden"): ArmInfo("emulated")}
    with pytest.raises(ValueError, match=r"'rowwise_golden'.*rename"):
        arm_table(arms)


# Rows


def test_rows_store_their_arm_and_older_rows_are_given_it(tmp_path: Path) -> None:
    """Oracle: the record of the declared arm; for the older row, the record of the name."""
    about = {
        "suite": "own",
        "case_id": "c",
        "axes": "{}",
        "metric": "time_ms",
        "status": "ok",
        "samples": (1.0,),
    }
    new = Measurement(arm="amax_golden", arm_fields=Arm("amax_golden"), **about)  # type: ignore[arg-type]
    older = Measurement(arm="tensorwise_fused_eager", **about)  # type: ignore[arg-type]
    assert older.as_row()["arm_fields"] is None
    run = write_run(tmp_path, [[new, older]])
    frame = store.read(run)
    assert [arm_of(r) for r in frame.to_dict("records")] == [
        Arm("amax_golden"),
        Arm("tensorwise", "eager", "fused"),
    ]


def test_fields_that_print_another_name_are_no_row() -> None:
    with pytest.raises(ValueError, match="rowwise_eager"):
        Measurement(
            "own",
            "c",
            "tensorwise_eager",
            "{}",
            "time_ms",
            "skipped",
            reason="x",
            arm_fields=Arm("rowwise", "eager"),
        )


def test_controls_are_left_out_by_their_field(tmp_path: Path) -> None:
    run = write_run(tmp_path, train_cases(Invented()))
    frame = store.read(run)
    assert frame["arm"].str.endswith(CONTROL_SUFFIX).any()
    assert not without_controls(frame)["arm"].str.endswith(CONTROL_SUFFIX).any()
    assert not paired_ratios(frame)["arm"].str.endswith(CONTROL_SUFFIX).any()


# The two reproduced faults


def test_a_failed_loss_stands_beside_the_fused_arm_of_its_recipe(tmp_path: Path) -> None:
    """`tensorwise_fused_eager` is an arm of recipe tensorwise; its FAILED loss was missing from the headline."""
    case = Case.of("train", {"model": "llama3_1b", "batch": 4})
    arms = {
        "bf16_fused_eager": {"ms": 2.0, "flops": {"bf16": 1.0}},
        "tensorwise_fused_eager": {"ms": 1.0, "flops": {"e4m3": 1.0}, "baseline": "bf16_fused_eager"},
    }
    base = control()
    broken = shifted(base, lambda t: 0.6 * t / (t + 30), ratio=0.6)
    curves = [*rows_of_runs("base", base), *rows_of_runs("tensorwise", broken, recipe="tensorwise")]
    run = write_run(tmp_path, [Invented().times(case, arms), curves])
    (machine,) = load([run], Path()).machines
    assert {v.arm: v.verdict.outcome for v in machine.verdicts}["tensorwise"] == "FAIL"
    table = headline(machine, headline_rows(machine, "conditions", Ledger()))
    assert table is not None
    (row,) = [r for r in table.rows if r[0].text == "tensorwise_fused_eager"]
    cells = dict(zip([c.title for c in table.columns], (cell.text for cell in row), strict=True))
    assert cells["loss"] == "FAIL"


@pytest.fixture
def own_recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe literal of a contributor under a name that ends like a variant."""
    monkeypatch.setitem(RECIPES, request.param, replace(RECIPES["rowwise"], name=request.param))  # type: ignore[index]
    return str(request.param)


@pytest.mark.parametrize(
    "own_recipe", ["amax_golden", "late_eps", "own_to_base", "base_to_own"], indirect=True
)
def test_a_recipe_named_like_a_variant_is_that_recipe(
    own_recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`amax_golden` became an emulated arm, `late_eps` a perturbed one, `own_to_base` one that changes precision."""
    monkeypatch.setattr(divergence, "ARMS", divergence._arms())
    assert divergence.recipe_of(own_recipe) == RECIPES[own_recipe]
    golden = str(Arm(own_recipe, variant="golden"))
    emulated = divergence.recipe_of(golden)
    assert emulated is not None
    assert emulated.backend.startswith("reference")
    axes = {
        name: axis.default if axis.default is not None else axis.choices[0]
        for name, axis in divergence.AXES.items()
        if not axis.optional
    }
    case = Case.of("divergence", axes)
    job = divergence.job_of(case, own_recipe, "cpu")
    assert not job.perturb
    assert not job.schedule.rules


@pytest.mark.parametrize("own_recipe", ["rowwise_golden"], indirect=True)
def test_a_recipe_whose_name_is_taken_by_an_arm_is_refused(own_recipe: str) -> None:
    """`rowwise_golden` would be two arms of one name, and files keep names: refused where the table is made."""
    with pytest.raises(ValueError, match="'rowwise_golden'"):
        divergence._arms()


@pytest.mark.parametrize("own_recipe", ["amax_golden"], indirect=True)
def test_the_verdict_takes_the_stored_recipe_and_not_the_name(own_recipe: str, tmp_path: Path) -> None:
    """Oracle: the same curves under the name `rowwise`; a recipe `amax_golden` lacks its own golden arm."""
    rows = [
        replace(m, arm=own_recipe, arm_fields=Arm(own_recipe)) if m.arm == "tensorwise" else m
        for m in whole_suite()
        if m.arm in ("base", "tensorwise")
    ]
    (verdict,) = judge(store.read(write_run(tmp_path, [rows])))
    assert verdict.arm == own_recipe
    assert any(m.startswith(f"{own_recipe}_golden ") for m in verdict.missing)


# No other code takes a name apart

_TAKES_APART = (
    "split",
    "rsplit",
    "partition",
    "rpartition",
    "removesuffix",
    "removeprefix",
    "startswith",
    "endswith",
)
_ARM = re.compile(r"\b(arm|arms|baseline|product|name_of_arm)\b")
_WORDS = re.compile(
    r"_(eager|compile|graph|linears|golden|eps|fused|plain|kernels|fast|fastest|triton)\b|:again|_to_base|base_to_|^bf16_|^fp8_"
)


def _offences(file: Path) -> list[str]:
    """Calls that take a text apart at a word of arms' names, or take apart something called an arm."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        method, whose = node.func.attr, ast.unparse(node.func.value)
        words = [
            str(leaf.value) for part in node.args for leaf in ast.walk(part) if isinstance(leaf, ast.Constant)
        ]
        by_pattern = whose == "re" and method in ("sub", "match", "search", "fullmatch", "split")
        takes_apart = (
            method in _TAKES_APART
            or by_pattern
            or (method in ("contains", "replace", "slice") and whose.endswith(".str"))
        )
        subject = (
            " ".join([whose, *(ast.unparse(part) for part in node.args[by_pattern:])])
            if by_pattern
            else whose
        )
        if takes_apart and (_ARM.search(subject) or any(_WORDS.search(word) for word in words)):
            found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_other_code_takes_the_name_of_an_arm_apart() -> None:
    files = [
        f for f in sorted((ROOT / "harness").rglob("*.py")) if f != ROOT / "harness" / "store" / "arm.py"
    ]
    assert len(files) > 100
    found = [line for file in files for line in _offences(file)]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["row['arm'].endswith(AGAIN)", "arm.rpartition('_')", "name.removesuffix('_eager')", "frame['arm'].str.endswith(x)",
     "re.sub('_(eager|compile)$', '', r['arm'])", "str(row['arm']).startswith('bf16')", "pairs['baseline'].str.endswith(m)",
     "name.startswith('base_to_')", "arm.removeprefix(f'{peer}_')", "name.split(':again')"],
)  # fmt: skip
def test_the_search_finds_each_way_that_was_in_use(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: lines of the code before arms were records."""
    file = tmp_path / "planted.py"
    file.write_text(line + "\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert _offences(file)
