"""The code that is printed for two GPUs, run on two ranks over gloo with FSDP2. Oracle: `fp8core.verify`, which looks at what is gathered."""

from __future__ import annotations

import functools

import code_on_ranks
from code_on_ranks import FSDP

from harness.advise.casts import FP8CORE, TORCHAO
from harness.advise.command import answer, parse
from harness.advise.views import as_code, lines
from harness.machine import ranks

ASKED = "model=llama3_1b gpu=h100 dp=2 recipe=tensorwise checkpointing=full"
ALL: dict[str, list[str]] = {"words": [], "names": []}


@functools.cache
def printed(*more: str) -> str:
    """The code of the answer, as it stands on the screen."""
    told = lines(answer(parse([*ASKED.split(), *more])))
    return "\n".join(line.removeprefix("  ") for line in told[told.index("code:") + 1 :])


def test_the_code_for_two_gpus_gathers_in_fp8() -> None:
    assert "with_fp8_all_gather()" in printed()
    for (found,) in ranks.run(code_on_ranks.trained, 2, printed(), True):
        assert found["ok"], found["line"]
        assert "gathered in FP8" in found["line"]
        assert found["layers"] == 5


def test_the_code_for_two_gpus_without_it_is_no_proof_of_it() -> None:
    code = printed("fp8_all_gather=false")
    assert "with_fp8_all_gather()" not in code
    for claimed, plain in ranks.run(code_on_ranks.trained, 2, code, True, False):
        assert not claimed["ok"]
        assert "the all-gather is not in FP8" in claimed["line"]
        assert plain["ok"], plain["line"]


def test_where_layers_are_split_the_code_says_by_what() -> None:
    """Tensor parallelism comes before FSDP (docs/distributed.md); in FP8 by the styles that gather in FP8."""
    both = dict.fromkeys(("sharded", "fp8_all_gather", "split", "tp_fp8_all_gather"), True)
    for library in (FP8CORE, TORCHAO):
        code = as_code("tensorwise", ALL, library=library, **both).splitlines()
        split = next(i for i, line in enumerate(code) if line.startswith("# TP: "))
        assert "Float8ColwiseParallel" in code[split]
        assert split < code.index(FSDP)
        assert max(map(len, code)) <= 78
    plain = as_code("rowwise", ALL, split=True)
    assert "# TP: " in plain
    assert "Float8ColwiseParallel" not in plain
    assert "# TP: " not in as_code("rowwise", ALL, sharded=True)
