"""Scripts of docs/examples/ab for Hugging Face, Lightning and accelerate, run as they stand. Oracle: each script's own microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install -e '.[clients]'")
pytest.importorskip("accelerate", reason="pip install -e '.[clients]'")
pytest.importorskip("lightning", reason="pip install -e '.[clients]'")

import examples

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

# name -> forward passes that are seen of a step in one process, and on each of two ranks; converted layers
EXPECTED = {
    "hugging_face_loop": ("1 forward passes of 4x16, 4x16", None, 15),
    "hugging_face_trainer": ("2 forward passes of 4x16, 4x16", "2 forward passes of 4x16, 4x16", 15),
    # Alone Lightning calls training_step and not the module; DistributedDataParallel calls the module
    "lightning_trainer": ("0 forward passes of 4x33, 4x33", "2 forward passes of 4x33, 4x33", 15),
    "accelerate_loop": ("2 forward passes of 4x16, 4x16", "2 forward passes of 4x16, 4x16", 15),
}
RUNS = [(name, ranks) for name, row in EXPECTED.items() for ranks in (1, 2) if row[ranks - 1]]


@pytest.mark.parametrize(("name", "ranks"), RUNS)
def test_a_script_comes_to_an_answer_as_it_stands(name: str, ranks: int, tmp_path: Path) -> None:
    found, printed = examples.run(name, tmp_path, ranks)
    extent, layers = EXPECTED[name][ranks - 1], EXPECTED[name][2]
    for each in found:
        print(
            name, ranks, {k: each[k] for k in ("seconds", "speedup", "interval", "extent", "proof")}
        )  # pytest -s
        examples.check(each, ranks)
        assert each["extent"].startswith(str(extent))
        assert each["extent"].endswith("1 optimizer steps")
        assert each["layers"] == layers
        assert sum(each["steps_run"]) == 97
        assert each["faults"] == []
    assert "for speed: cannot tell, because a cpu multiplies FP8 codes in float32" in printed


def test_every_script_with_a_library_is_run_here() -> None:
    assert {*EXPECTED} == {*examples.NAMES} - {"plain_loop", "fsdp2_torchrun"}
