"""`python -m harness verdict`. Oracles: the published runs of modded-nanogpt, and what is planted in copies of them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from command_line import run

RECORD = Path(__file__).parents[2] / "results" / "published" / "curves" / "modded_nanogpt_fp8_down.csv"
BASE = f"base={RECORD}:baseline/*"


def planted(folder: Path, share: float) -> str:
    """The candidate's runs, their last losses changed by a share."""
    table = pd.read_csv(RECORD).query("arm == 'this_pr'")
    table.loc[table["step"] == 1390, "val_loss"] *= 1 + share
    table.to_csv(folder / "mine.csv", index=False)
    return "candidate=mine.csv"


@pytest.mark.parametrize(
    ("share", "code", "word"), [(0, 0, "PASS"), (0.01, 4, "FAIL"), (0.0025, 6, "INCONCLUSIVE")]
)
def test_exit_codes(share: float, code: int, word: str, tmp_path: Path) -> None:
    ended = run(tmp_path, "verdict", BASE, planted(tmp_path, share))
    assert ended.code == code
    assert ended.out[0].startswith(f"{word}: ")
    assert any(line.startswith("base: 13 runs, val_loss by step") for line in ended.out)
    found = json.loads("".join(run(tmp_path, "verdict", BASE, "candidate=mine.csv", "json=true").out))
    assert (found["outcome"], found["margin"]) == (word, 0.0025)
    assert found["low"] < found["gap"] < found["high"]


def test_the_margin_decides(tmp_path: Path) -> None:
    assert run(tmp_path, "verdict", BASE, planted(tmp_path, 0), "margin=0.03%").code == 6


@pytest.mark.parametrize(
    "words",
    [
        [BASE],
        ["candidate=x.csv", BASE],
        ["base=.", BASE.replace("base", "candidate")],
        [BASE, BASE.replace("base", "candidate"), "margin=0.25"],
        [BASE, BASE.replace("base", "candidate"), "value=valloss"],
        [BASE, BASE.replace("base", "candidate"), "format=(?P<step>"],
        [BASE, BASE.replace("base", "candidate"), "-o", "nowhere/page.html"],
        [BASE, BASE.replace("base", "candidate"), "paired=seed"],
    ],
    ids=lambda words: words[-1],
)
def test_a_request_that_cannot_be_carried_out_is_one_line(words: list[str], tmp_path: Path) -> None:
    ended = run(tmp_path, "verdict", *words)
    assert ended.code == 2
    assert [line[:7] for line in ended.err] == ["error: "]


def test_the_page_shows_names_of_others_as_text(tmp_path: Path) -> None:
    table = pd.read_csv(RECORD)
    table["run"] = table["run"].str.replace("1d7c6c03", "<script>alert(1)</script>\x1b[2J")
    table.to_csv(tmp_path / "x.csv", index=False)
    ended = run(tmp_path, "verdict", "base=x.csv:base*", "candidate=x.csv:base*", "-o", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert ended.code == 6
    assert "INCONCLUSIVE" in page
    assert "<svg" in page
    assert "alert(1)" in page
    assert "<script" not in page
    assert "\x1b" not in page + "".join(ended.out)


def test_raw_mlperf_logs_of_a_published_pair(tmp_path: Path) -> None:
    """Two arms of one submitter with equal hyperparameters, FP8 and NVFP4: their logs are judged as their curves are."""
    published = pd.read_csv(RECORD.parent / "mlperf" / "evals.csv")
    for arm, setting in (("m087", "fp8: hybrid"), ("m085", "fp4: e2m1")):
        for seed, rows in [*published[published["arm_id"] == arm].groupby("run")][:5]:
            events = [("seed", seed, 0.0, {}), ("global_batch_size", 16, 0, {}), ("run_start", None, 0, {})]
            events += [
                ("eval_accuracy", row["value"], row["seconds"], {"samples_count": row["samples"]})
                for row in rows.to_dict("records")
            ]
            events.append(("run_stop", None, 9e3, {"status": "success"}))
            lines = [
                {
                    "key": k,
                    "value": v,
                    "time_ms": int(1e12 + 1e3 * t),
                    "event_type": "POINT_IN_TIME",
                    "metadata": m,
                }
                for k, v, t, m in events
            ]
            text = "\n".join([setting, *(f":::MLLOG {json.dumps(line)}" for line in lines)])
            (tmp_path / f"{arm}_{seed}.txt").write_text(text)
    ended = run(
        tmp_path,
        "verdict",
        "format=mllog",
        "base=m087_*.txt",
        "candidate=m085_*.txt",
    )
    assert any(line.startswith("base: 5 runs, eval_loss by samples") for line in ended.out)
    assert any(line.startswith("FAIL: worse") for line in ended.out)
    assert ended.code == 4
