"""The page of four bits. Oracle: its program, which judges the stored rows anew."""

from __future__ import annotations

import four_bits
from documented_table import documented


def test_the_page_and_its_figure_are_what_the_program_makes() -> None:
    assert documented(four_bits.PAGE, "verdicts") == four_bits.table().splitlines()
    assert documented(four_bits.PAGE, "public") == four_bits.public().splitlines()
    assert four_bits.PAGE.with_suffix(".svg").read_text() == four_bits.figure()


def test_every_arm_of_the_run_has_a_word_and_the_broken_one_fails() -> None:
    words = {four_bits.name(v): v.verdict.outcome for v in four_bits.verdicts()}
    assert {"tensorwise", "nvfp4", "nvfp4_nearest", "nvfp4, keep_bf16@layers.3.*"} <= set(words)
    assert words["negative_control"] == "FAIL"
