"""torchao's own float8 tests on fp8core: `TORCHAO=DIR pytest -m clients -s tests/clients/test_torchao_own.py`.

DIR is a checkout of pytorch/ao at the release of `torchao_compat.FOLLOWS`; its wheel has no float8 tests. They run in a process of
their own (`torchao_plugin`). Oracle: torchao's assertions. A test that passes without entering fp8core, as of torchao's own
tensors, shows nothing and is counted apart; one that fails must have its reason here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torchao", reason="pip install -e '.[peers]'")
pytest.importorskip("expecttest", reason="pip install -e '.[clients]'")  # torchao's tests import it

pytestmark = pytest.mark.clients

# Of training in one process; others need several GPUs, or are of inference
FILES = ("test_auto_filter.py", "test_base.py", "test_float8_utils.py")
_ENUMS = "casts by torchao's own functions, which know torchao's enums alone; here `quantize` casts"
DIFFERS = {  # test -> why it fails
    "test_axiswise_dynamic_cast": _ENUMS,
    "test_axiswise_gemm": _ENUMS,
    "test_axiswise_reshape": _ENUMS,
    "test_pad_inner_dim": "torchao's own tensors; torch's CPU product refuses no size, and torchao alone fails here too",
    "test_quantize": "`quantize_` of a converted model: convert_to_high_precision first",
    "test_repr": "the repr has recipe=, not tags of casts",
    "test_swap_root_linear": "layer.recipe, no linear_mm_config",
    "test_swap_root_linear_with_children_raises": "ValueError, where torchao has AssertionError",
    "test_swap_submodule_linears": "a Linear of 3 x 3, which FP8 cannot multiply, stays in high precision",
}


def test_torchaos_own(tmp_path: Path) -> None:
    if "TORCHAO" not in os.environ:
        pytest.skip("TORCHAO=DIR names no checkout of pytorch/ao")
    at, found = Path(os.environ["TORCHAO"]) / "test/float8", tmp_path / "outcomes.json"
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "torchao_plugin",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
    ]
    subprocess.run(
        [*command, "--rootdir", str(at), *(str(at / name) for name in FILES)],
        env={**os.environ, "PYTHONPATH": here, "TORCHAO_OUTCOMES": str(found)},
        check=False,
    )
    outcomes = json.loads(found.read_text())
    counts: Counter[str] = Counter()
    wrong = []
    for name, outcome, ours, message in outcomes:
        reason = DIFFERS.get(name.rpartition("::")[2].partition("[")[0], "")
        counts[outcome if outcome != "passed" or ours else "passed without fp8core"] += 1
        if outcome == "failed":
            print(f"fails  {name}: {reason or message}")
        elif ours:
            print(f"{outcome:6} {name}")
        if (outcome == "failed") != bool(reason):
            wrong.append(f"{name} {outcome}: {message}")
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    assert not wrong, "\n".join(wrong)
    assert counts["passed"]
