"""Oracle: the default file documents every key; whatever is unknown, out of range or without an end is refused."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest
import yaml

from harness.gate.policy import DEFAULT, Policy, Rule, load_policy
from harness.store.errors import UsageError
from harness.store.measurement import METRICS


def policy_of(tmp_path: Path, text: str) -> Policy:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    return load_policy(file)


def unit(metric: str, **fields: str) -> dict[str, str]:
    return {"metric": metric, **fields}


def test_the_default_file_holds_every_key() -> None:
    assert set(yaml.safe_load(DEFAULT.read_text())) == {f.name for f in dataclasses.fields(Policy)}


def test_the_tolerances_of_the_contract() -> None:
    """Kernels 3 %, steps 2 %, compile 5 %, memory 0 %, numerics deterministic."""
    policy = load_policy()
    assert policy.rule_for(unit("time_ms", suite="gemm")) == Rule("timed", 0.03)
    assert policy.rule_for(unit("time_ms", suite="train")) == Rule("timed", 0.02)
    assert policy.rule_for(unit("compile_s", suite="linear")) == Rule("timed", 0.05)
    assert policy.rule_for(unit("saved_bytes_per_elem")) == Rule("exact")
    assert policy.rule_for(unit("mismatches")) == Rule("numerics")


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda m: m.name)
def test_every_metric_has_a_rule_unless_it_has_no_better_side(metric) -> None:
    rule = load_policy().rule_for(unit(metric.name))
    left_out = ("heldout_loss", "elapsed_s", "kernel_time_ms")
    ignored = metric.better == "none" or metric.name in left_out
    assert (rule.rule == "ignore") == ignored


def test_a_file_changes_only_what_it_names(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "metrics: {time_ms: {rule: timed, tolerance: 0.1}}\npairs: 4\n")
    assert policy.rule_for(unit("time_ms")) == Rule("timed", 0.1)
    assert policy.rule_for(unit("compile_s")) == load_policy().rule_for(unit("compile_s"))
    assert (policy.pairs, policy.confirm_pairs) == (4, load_policy().confirm_pairs)
    assert policy_of(tmp_path, "units: {1: {rule: exact}}").units["1"] == Rule("exact")  # YAML reads a number


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("metrics: {time_mss: {rule: timed}}", "unknown metric 'time_mss' (nearest: time_ms)"),
        (
            "metrics: {time_ms: {rule: timid}}",
            "metrics: time_ms: rule: 'timid' must be one of timed, exact, numerics, ignore",
        ),
        ("metrics: {time_ms: {rule: timed, tolerence: 1}}", "unknown key 'tolerence' (nearest: tolerance)"),
        ("metrics: {time_ms: {rule: timed, tolerance: -1}}", "-1 must be a number of at least 0"),
        ("metrics: [time_ms]", "must be a mapping"),
        ("tolerance: 0.1", "unknown key of the policy"),
        ("pairs: 0", "0 must be a whole number of at least 1"),
        ("alpha: 0.7", "0.7 must be a number between 0 and 0.5"),
        ("session_spread: .nan", "nan must be a number"),
        ("on_inconclusive: maybe", "'maybe' must be one of warn, share, fail"),
        ("units: {msec: {rule: exact}}", "unknown unit 'msec' (nearest: "),
        ("facts: {fp8_layers: more}", "fp8_layers: 'more' must be one of lower, higher"),
        ("budget_s: .inf", "inf must be a number"),
        ("allow: [{match: {arm: x}, until: soon, reason: y}]", "until: 'soon' must be a date"),
        ("allow: [{match: {arm: x}, until: 2027-01-01}]", "lacks 'reason'"),
        ("allow: [{match: {}, until: 2027-01-01, reason: y}]", "matches everything"),
        ("allow: [{until: 2027-01-01, reason: y}]", "lacks 'match'"),
        ("metrics: {time_ms: {tolerance: 1}}", "lacks 'rule'"),
        ("groups: [{match: {arn: x}}]", "unknown key 'arn' (nearest: arm)"),
        ("exclude: [[throttled]]", "must be one of contended, throttled"),
        ("- a", "must be a mapping of keys"),
        ("a: [", "cannot read the policy"),
    ],
)
def test_what_a_policy_may_not_say(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        policy_of(tmp_path, text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_two_allowances_the_one_that_holds_longer_counts(tmp_path: Path) -> None:
    text = "allow:\n" + "".join(
        f"- {{match: {{arm: x}}, until: {year}-01-01, reason: '{year}'}}\n" for year in (2026, 2028, 2027)
    )
    found = policy_of(tmp_path, text).allowance(unit("time_ms", arm="x"))
    assert found is not None
    assert found.until == datetime.date(2028, 1, 1)
