"""Oracle: the default file documents every key; whatever is unknown, out of range or without an end is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from harness.gate.policy import DEFAULT, MetricRule, Policy, load_policy
from harness.store.errors import UsageError


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
    assert policy.rule_for(unit("time_ms", suite="gemm")) == MetricRule("timed", 0.03)
    assert policy.rule_for(unit("time_ms", suite="train")) == MetricRule("timed", 0.02)
    assert policy.rule_for(unit("compile_s", suite="linear")) == MetricRule("timed", 0.05)
    assert policy.rule_for(unit("saved_bytes_per_elem")) == MetricRule("exact")
    assert policy.rule_for(unit("mismatches")) == MetricRule("numerics")


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
