"""The way of one case is the one that docs/architecture.md tells. Oracle: the profiler of the interpreter."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.__main__ import main

if TYPE_CHECKING:
    from types import FrameType

ROOT = Path(__file__).resolve().parents[2]


def test_a_case_goes_through_the_steps_in_their_order(tmp_path: Path) -> None:
    told = re.findall(r"^\d\. `(.+)` `(.+)`:", (ROOT / "docs/architecture.md").read_text(), re.M)
    assert 6 <= len(told) <= 8
    steps = {(str(ROOT / file), function) for file, function in told}
    entered: dict[tuple[str, str], None] = {}

    def enter(frame: FrameType, event: str, arg: object) -> None:
        step = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and step in steps:
            entered[step] = None

    words = "sweep=cast device=cpu arms=[eager] axes.granularity=rowwise axes.dtype=e4m3fn axes.src=bf16 axes.M=64 axes.K=64 rounds=2"
    folders = [f"results_dir={tmp_path}/results", f"reports_dir={tmp_path}/reports"]
    sys.setprofile(enter)
    try:
        code = main([*words.split(), "isolate=false", *folders])
    finally:
        sys.setprofile(None)
    assert code == 0
    assert [(str(Path(file).relative_to(ROOT)), function) for file, function in entered] == told
