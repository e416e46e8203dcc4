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


Outcome = tuple[str, str, bool, str]  # as `torchao_plugin` writes them


def folder_of(checkout: str) -> Path:
    """The folder of torchao's float8 tests. ValueError: it is no checkout of pytorch/ao, or lacks one of `FILES`."""
    folder = Path(checkout) / "test/float8"
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ValueError(
            f"TORCHAO={checkout}: no checkout of pytorch/ao; {folder} lacks {', '.join(missing)}"
        )
    return folder


def reason_of(name: str) -> str:
    """What `DIFFERS` says of a test and of each of its parameters; "" where it is to pass."""
    return DIFFERS.get(bare(name), "")


def bare(name: str) -> str:
    return name.rpartition("::")[2].partition("[")[0]


def unexplained(outcomes: list[Outcome]) -> list[str]:
    """Tests that fail without a reason or pass in spite of one, and reasons whose test never ran."""
    wrong = [
        f"{name} {outcome}: {message}"
        for name, outcome, _, message in outcomes
        if (outcome == "failed") != bool(reason_of(name))
    ]
    ran = {bare(name) for name, outcome, *_ in outcomes if outcome != "skipped"}
    return wrong + [f"{name} never ran" for name in DIFFERS if name not in ran]


def test_a_folder_that_is_no_checkout_is_an_error(tmp_path: Path) -> None:
    """Oracle: the three files that are to run; a run without them would show nothing."""
    with pytest.raises(ValueError, match=r"TORCHAO=.*test_base\.py"):
        folder_of(str(tmp_path))


def test_every_reason_belongs_to_a_test_that_failed() -> None:
    """Oracle: a list of outcomes written by hand, changed in one place at a time."""
    failed: list[Outcome] = [(f"f.py::C::{name}[a]", "failed", True, "") for name in DIFFERS]
    assert unexplained(failed) == []
    first = next(iter(DIFFERS))
    assert unexplained(failed[1:]) == [f"{first} never ran"]
    assert unexplained([(f"f.py::{first}", "skipped", False, "no GPU"), *failed[1:]])
    assert unexplained([(f"f.py::{first}", "passed", True, ""), *failed])
    assert unexplained([*failed, ("f.py::test_new", "failed", True, "")])


def test_torchaos_own(tmp_path: Path) -> None:
    if "TORCHAO" not in os.environ:
        pytest.skip("TORCHAO=DIR names no checkout of pytorch/ao")
    at, found = folder_of(os.environ["TORCHAO"]), tmp_path / "outcomes.json"
    pytest.importorskip("expecttest", reason="pip install -e '.[clients]'")  # torchao's tests import it
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
    for name, outcome, ours, message in outcomes:
        counts[outcome if outcome != "passed" or ours else "passed without fp8core"] += 1
        if outcome == "failed":
            print(f"fails  {name}: {reason_of(name) or message}")
        elif ours:
            print(f"{outcome:6} {name}")
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    wrong = unexplained(outcomes)
    assert not wrong, "\n".join(wrong)
    assert counts["passed"]
