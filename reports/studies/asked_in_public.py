"""Questions from public trackers, put to advise: `python reports/studies/asked_in_public.py` rewrites the tables of reports/published/studies/questions.md.

`asked_in_public.csv` holds each question with its source, the words of the command, what its asker measured, and the decisions
that would have been wrong (`must_not_say`, fixed by the sign of the measured gain: see the page). Rows without words
can't be asked, because of `why`.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from documented_table import fill
from torch import Tensor, nn

from harness.advise.command import answer, parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.advise.step import Ratio

TABLE = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).parents[2] / "reports" / "published" / "studies" / "questions.md"
TIMES = ("s", "ms")


class TwoSmall(nn.Module):
    """The two layers of float8_experimental issue 280."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).float().mean()


def two_small() -> nn.Module:
    """For `model._target_`."""
    return TwoSmall()


def small_batch(step: int, seed: int, batch_size: int, device: str) -> tuple[Tensor, ...]:
    """For `model.batch`: rows of 32."""
    return (torch.zeros(batch_size, 32, device=device, dtype=torch.bfloat16),)


def one_layer(width: int) -> nn.Module:
    """For `model._target_`: one square layer."""
    return nn.Sequential(nn.Linear(width, width))


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its answer.

    Attributes:
        row: of `asked_in_public.csv`.
        decision: advise's word.
        step: bf16 step over FP8 step with the layers that advise converts.
        everything: the same with every layer converted, as most askers had it.
    """

    row: Mapping[str, str]
    decision: str
    step: Ratio
    everything: Ratio

    @property
    def measured(self) -> tuple[float, float, float]:
        """FP8 speed over bf16 speed, and the least and most that the rounding of the published figures allows."""
        bf16, fp8, by = (float(self.row[name]) for name in ("bf16", "fp8", "rounding"))
        if self.row["unit"] in TIMES:
            return bf16 / fp8, (bf16 - by) / (fp8 + by), (bf16 + by) / (fp8 - by)
        return fp8 / bf16, (fp8 - by) / (bf16 + by), (fp8 + by) / (bf16 - by)

    @property
    def word_agrees(self) -> bool:
        """The decision is none of those that the measurement forbids."""
        return self.decision not in self.row["must_not_say"].split("|")

    @property
    def figure_agrees(self) -> bool:
        """What was measured lies in the 95 % interval of the advised step or of the step with every layer converted."""
        _, least, most = self.measured
        return any(least <= ratio.high and ratio.low <= most for ratio in self._comparable)

    @property
    def _comparable(self) -> tuple[Ratio, ...]:
        """Without a converted layer the advised step is bf16's own, which no FP8 run is compared with."""
        return (self.everything,) if self.step.low == self.step.high else (self.step, self.everything)

    @property
    def agrees(self) -> str:
        """Word and figure, each judged by itself."""
        if not self.word_agrees:
            return "no" if not self.figure_agrees else "figure yes, word no"
        return "yes" if self.figure_agrees else "word yes, figure no"


def rows() -> list[dict[str, str]]:
    """All questions, those that can't be asked included."""
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def ask(row: Mapping[str, str]) -> Asked:
    """Advise's answer to one question."""
    found = answer(parse(row["words"].split()))
    return Asked(row, found.decision, found.chosen.step, found.chosen.everything)


def answered(found: Sequence[Asked]) -> list[str]:
    """Markdown: question, measured, answer, agreement."""
    lines = ["| asked | measured | advise | all layers in FP8 | agrees? |", "|---|---|---|---|---|"]
    for one in found:
        row = one.row
        why = f": {row['why']}" if row["why"] else ""
        note = f" ({row['measured']})" if row["measured"] else ""
        lines.append(
            f"| [{row['key']}]({row['source']}). {row['question']} | {one.measured[0]:.3f}{note} "
            f"| {one.decision}, {_shown(one.step)} | {_shown(one.everything)} | {one.agrees}{why} |"
        )
    return lines


def unasked() -> list[str]:
    """Markdown: questions whose conditions or results are not known."""
    lines = ["| can't be asked | because |", "|---|---|"]
    lines += [f"| [{r['key']}]({r['source']}) | {r['why']} |" for r in rows() if not r["words"]]
    return lines


def _shown(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def main() -> int:
    """Rewrites both tables of the page."""
    found = [ask(row) for row in rows() if row["words"]]
    fill(PAGE, {"answered": "\n".join(answered(found)), "unasked": "\n".join(unasked())})
    return 0


if __name__ == "__main__":
    sys.exit(main())
