"""Render: a judgement as a terminal table, as JSON, and as markdown for a pull request."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from harness.gate.decide import Verdict
from harness.gate.exit_code import Exit, Loud
from harness.gate.sides import differing_fields
from harness.store.measurement import to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.gate.judge import Finding, Judgement

FORMAT = 1  # of the JSON
ORDER = (Verdict.REGRESSED, Verdict.INCONCLUSIVE, Verdict.IMPROVED, Verdict.OK)
SHOWN = 60  # rows of a table; the JSON holds all
HEADLINE = {
    Exit.OK: "OK",
    Exit.REGRESSED: "REGRESSED",
    Exit.INVALID: "INVALID: the machine changed",
    Exit.NUMERICS: "NUMERICS FAIL",
    Exit.INCONCLUSIVE: "INCONCLUSIVE",
}
MODES = {
    "paired": "rounds measured together, pair by pair",
    "stored": "two stored runs, not measured together; the tolerance is widened by session_spread",
    "machine-free": "what no machine changes, and ratios within each run",
    "broken": "one side does not run, so nothing was measured",
}


def headline(judgement: Judgement) -> str:
    """The whole answer in a few words; OK only of what was judged."""
    slower = sum(f.told_only and f.verdict is Verdict.REGRESSED for f in judgement.findings)
    undecided = judgement.counted[str(Verdict.INCONCLUSIVE)]
    if judgement.could_not_judge and judgement.code in (Exit.OK, Exit.INCONCLUSIVE):
        return _open(judgement)
    if judgement.code is not Exit.OK:
        return HEADLINE[judgement.code]
    words = ["OK"]
    words += [] if judgement.times else ["no time judged"]
    words += [f"{slower} slower"] if slower else []
    words += [f"{undecided} undecided"] if undecided else []
    return ", ".join(words)


def _open(judgement: Judgement) -> str:
    """How much was not decided, and what of it looks slower."""
    times = judgement.times or judgement.findings
    count = sum(f.verdict is Verdict.INCONCLUSIVE for f in times)
    words = f"COULD NOT JUDGE {count} of {len(times)}"
    if suspects := judgement.suspects:
        first = suspects[0]
        words += f", {len(suspects)} of them look{'s' * (len(suspects) == 1)} slower: "
        words += " ".join(filter(None, (_case(first), first.unit.arm, _metric(first), _change(first))))
        words += f" and {len(suspects) - 1} more" if len(suspects) > 1 else ""
    return words


def terminal(judgement: Judgement) -> str:
    """A table of what matters first, then what it rests on; the last line is the verdict."""
    shown, hidden = _shown(judgement)
    head = ("verdict", "case", "arm", "metric", "change", "why")
    rows = _rows(shown)
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in [head, *rows]
    ]
    if hidden:
        lines.append(f"... and {_more(hidden)} (--json FILE holds them)")
    return "\n".join([*lines, "", *_conditions(judgement), _last_line(judgement)]) + "\n"


def markdown(judgement: Judgement) -> str:
    """The same for a pull request."""
    shown, hidden = _shown(judgement)
    lines = [
        f"### Gate: {headline(judgement)}",
        "",
        _tally(judgement),
        "",
        "| verdict | case | arm | metric | change (95 % interval) | why |",
        "|---|---|---|---|---|---|",
        *("| " + " | ".join(map(_cell, row)) + " |" for row in _rows(shown)),
    ]
    if hidden:
        lines += ["", f"And {_more(hidden)}."]
    lines += ["", *(f"- {_cell(line)}" for line in _conditions(judgement)), ""]
    return "\n".join(lines)


def as_json(judgement: Judgement) -> str:
    """Everything, for a program; infinities and NaN are the strings "inf" and "nan"."""
    return json.dumps(json.loads(to_json(_document(judgement))), indent=1) + "\n"


def _document(j: Judgement) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "verdict": headline(j),
        "exit_code": int(j.code),
        "date": j.date.isoformat(),
        "mode": j.mode,
        "session": j.baseline.session if j.mode == "paired" else "",
        "baseline": {
            "name": j.baseline.name,
            "commit": j.baseline.env.get("git_commit"),
            "env_id": j.baseline.env_id,
        },
        "candidate": {
            "name": j.candidate.name,
            "commit": j.candidate.env.get("git_commit"),
            "env_id": j.candidate.env_id,
        },
        "control": {
            "moved": j.control.moved,
            "change": j.control.change,
            "low": j.control.low,
            "high": j.control.high,
            "rounds": j.control.rounds,
            "reason": j.control.reason,
        },
        "counts": {str(v): j.counted[str(v)] for v in ORDER},
        "notes": list(j.notes),
        "findings": [_finding(f) for f in j.findings],
    }


def _finding(f: Finding) -> dict[str, Any]:
    return {
        **f.unit.fields,
        "case_id": f.unit.case_id,
        "rule": f.unit.rule.rule,
        "verdict": str(f.verdict),
        "reason": f.reason,
        "unit": f.unit.unit,
        "before": f.unit.before,
        "after": f.unit.after,
        "change": f.change,
        "low": f.low,
        "high": f.high,
        "limit": f.limit,
        "rounds": f.rounds,
        "direction": f.effect.direction if f.effect is not None else "",
        "noise_floor": f.effect.floor if f.effect is not None else math.nan,
        "policy": f.policy,
        "p": f.p,
        "p_confirm": f.p_confirm,
        "flagged": f.flagged,
        "more_rounds": f.more,
        "cause": None if f.cause is None else {"name": f.cause.name, "evidence": f.cause.evidence},
        "allowed_until": None if f.allowed is None else f.allowed.until.isoformat(),
        "counts": f.counts,
        "stray_clock_samples": f.unit.strayed,
    }


def _shown(judgement: Judgement) -> tuple[list[Finding], list[Finding]]:
    """What a table holds, and what not: all that is not OK, then the timed ones, the largest change first."""
    ranked = sorted(
        judgement.findings,
        key=lambda f: (
            ORDER.index(f.verdict),
            math.isnan(f.change),
            -f.change if not math.isnan(f.change) else 0.0,
        ),
    )
    first = [f for f in ranked if f.verdict is not Verdict.OK or f.unit.rule.rule == "timed"]
    last = [f for f in ranked if f.verdict is Verdict.OK and f.unit.rule.rule != "timed"]
    return first[:SHOWN], [*first[SHOWN:], *last]


def _more(hidden: Sequence[Finding]) -> str:
    bad = sum(f.verdict is not Verdict.OK for f in hidden)
    return f"{len(hidden)} more" + (f", {bad} of them not OK" if bad else " that are OK")


def _rows(findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """Cells of a table. What an arm lost because it was not measured, or is wrong, is one row and not one a metric."""
    troubled: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        if f.unit.trouble:
            troubled.setdefault((_word(f), _case(f), f.unit.arm), []).append(f)
    rows: list[tuple[str, ...]] = []
    for f in findings:
        metric, reason = _metric(f), _reason(f)
        if f.unit.trouble:
            group = troubled.pop((_word(f), _case(f), f.unit.arm), [])
            if not group:
                continue
            metric += f" and {len(group) - 1} more" if len(group) > 1 else ""
            # A check's own line says what is wrong; those of its figures begin with the figure.
            reason = next((_reason(g) for g in group if g.unit.wrong and g.unit.rule.rule == "timed"), reason)
        rows.append((_word(f), _case(f), f.unit.arm, metric, _change(f), reason))
    return rows


def _conditions(j: Judgement) -> list[str]:
    env = j.candidate.env
    device = env.get("gpu") or env.get("cpu") or env.get("device") or "unknown device"
    power = f" at {env['power_limit_w']:g} W" if env.get("power_limit_w") else ""
    has_torch = env.get("torch") or not env.get("python")
    software = f"torch {env.get('torch')}" if has_torch else f"Python {env['python']}"
    lines = [
        f"baseline {j.baseline.commit}, candidate {j.candidate.commit}: {MODES[j.mode]}",
        f"{device}{power}, {software}, {j.date.isoformat()}" if env else j.date.isoformat(),
    ]
    if j.mode != "machine-free":
        lines.append(j.control.reason)
    elif j.baseline.env_id != j.candidate.env_id:
        lines.append(f"the environments differ: {differing_fields(j.baseline.env, j.candidate.env)}")
    return lines + sorted(j.notes, key=lambda note: isinstance(note, Loud))  # nearest to the verdict


def _tally(j: Judgement) -> str:
    counted = ", ".join(f"{j.counted[str(v)]} {v}" for v in ORDER if j.counted[str(v)])
    reported = sum(f.verdict is Verdict.REGRESSED and not f.counts for f in j.findings)
    return counted + (f" ({reported} of the regressions are allowed or only reported)" if reported else "")


def _last_line(j: Judgement) -> str:
    return f"{headline(j)} (exit {int(j.code)}): {_tally(j)}"


def _word(f: Finding) -> str:
    if f.counts or f.verdict is not Verdict.REGRESSED:
        return str(f.verdict)
    return f"{f.verdict}, {'only reported' if f.told_only else 'allowed'}"


def _case(f: Finding) -> str:
    return " ".join(filter(None, (f.unit.suite, f.unit.case, f.unit.part)))


def _metric(f: Finding) -> str:
    return f.unit.metric + (f" {f.unit.unit}" if f.unit.regime == "ratio" else "")


def _change(f: Finding) -> str:
    if math.isnan(f.change):
        return ""
    if f.rounds < 2:
        return f"{f.change - 1:+.1%}"
    return f"{f.change - 1:+.1%} ({f.low - 1:+.1%} to {f.high - 1:+.1%})"


def _reason(f: Finding) -> str:
    parts = [f.reason]
    if f.cause is not None:
        parts.append(f"cause: {f.cause.name}" + (f" ({f.cause.evidence})" if f.cause.evidence else ""))
    if f.allowed is not None:
        parts.append(
            f"{'the allowance ended on' if f.expired else 'allowed until'} {f.allowed.until}: {f.allowed.reason}"
        )
    return "; ".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
