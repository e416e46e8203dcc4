"""The parts of a GPU session as data: what is measured, how long that is estimated to take, and its rehearsal on a CPU.

Their order is by what a reader misses most if the time runs out. The first slot holds the headline: kernels checked,
then bf16 and FP8 on Llama-3-8B blocks in eager mode, casts beside a copy, the compiled blocks. A case has two or three
arms, and its rounds are durable one by one, so a part that is cut off keeps what it measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.store.arm import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOT_ON_CPU = ("compile", "graph")  # modes: one takes a minute to compile there, the other needs a GPU
PATIENCE = 1.4  # a part may take so many times what it is estimated at, then it is cut off
LEAST_ROUNDS = 3  # an interval needs them
TRIES = 3  # slots in which a part is begun
BUILD_S = 90  # an arm may take so long to be built, compiled and checked
# A rehearsal proves the command and times nothing: three rounds, so that intervals and verdicts are formed.
_QUICK = (
    "rounds=3", "timing.min_samples=3", "timing.block_ms=5", "timing.max_block_samples=5", "timing.min_seconds=0.01",
    "timing.max_seconds=2", "timing.warmup_min_seconds=0.01", "timing.warmup_max_seconds=0.5",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the session.

    Attributes:
        name: of the part; its sweep where `words` name none.
        seconds: that it is estimated to take.
        about: what it measures, in a few words.
        words: of the command line, beside those that every sweep gets; of the tests, their files.
        small: words of a rehearsal, in place of those with the same key.
        rounds: of its cases; fewer when it is tried again. 0: as its sweep has them.
        file: that its rows are packed into, without ending; parts may share one.
        reads_text: it trains on nanoGPT's text, which a machine without a network cannot fetch.
        reads_ceilings: it converts what is advised at the rates that the part "ceilings" measured.
        last_start_s: seconds before its end in which it starts nothing more: what a case or run takes.
        needs: kernels by arm; an arm whose kernel failed is left out. Arms of a recipe need what its layer ran.
    """

    name: str
    seconds: float
    about: str = ""
    words: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    rounds: int = 0
    file: str = ""
    reads_text: bool = False
    reads_ceilings: bool = False
    last_start_s: float = 0.0
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    @property
    def packed(self) -> str:
        """Name of the file of its rows."""
        return f"{self.file or self.name}.parquet"

    @property
    def sweep(self) -> str:
        """The sweep that it runs; "tests" runs none."""
        named = [word.removeprefix("sweep=") for word in self.words if word.startswith("sweep=")]
        return named[0] if named else self.name

    @property
    def budget_s(self) -> float:
        """It is cut off after so long."""
        return PATIENCE * self.seconds

    @property
    def least_s(self) -> float:
        """It starts only in a slot that has this much time left: the duration of its first rounds."""
        return max(20.0, 0.95 * self.seconds)

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that it names."""
        named = [word for word in self.words if word.startswith("arms=")]
        return tuple(named[-1].removeprefix("arms=").strip("[]").split(",")) if named else ()

    def command(self, device: str, tries: int = 0, without: tuple[str, ...] = ()) -> list[str]:
        """The words of its sweep on that device.

        Args:
            device: "cuda" or "cpu".
            tries: earlier slots in which it was started: its rounds are halved each time.
            without: arms that are left out.
        """
        words = {"sweep": f"sweep={self.sweep}"} | _by_key(self.words)
        if self.rounds:
            words["rounds"] = f"rounds={max(LEAST_ROUNDS, self.rounds >> tries)}"
        if device == "cpu":
            words |= _by_key(_QUICK) | _by_key(self.small)
        if "arms" in words:
            arms = words["arms"].removeprefix("arms=").strip("[]").split(",")
            arms = [arm for arm in arms if arm not in without]
            if device == "cpu":
                arms = list(dict.fromkeys(map(_eager, arms)))
            words["arms"] = f"arms=[{','.join(arms)}]"
        return list(words.values())


def _eager(arm: str) -> str:
    """
    >>> _eager("tensorwise_compile"), _eager("fused")
    ('tensorwise_eager', 'fused')
    """
    fields = parse(arm)
    return str(replace(fields, mode="eager", casts="")) if fields.mode in _NOT_ON_CPU else arm


def _by_key(words: tuple[str, ...]) -> dict[str, str]:
    return {word.partition("=")[0]: word for word in words}


def _steps(
    name: str, seconds: float, about: str, *words: str, rounds: int = 4, block_ms: int = 2200, small: str = "llama_tiny",
    reads_ceilings: bool = False,
) -> Stage:  # fmt: skip
    """One case of sweep=train in blocks long enough for the energy meter, which moves ten times a second.

    The sweep's own numbers of samples and of calls to warm up are for sittings without a clock.
    """
    metered = (
        f"timing.block_ms={block_ms}", "timing.max_block_samples=250", "timing.min_samples=5",
        f"timing.max_seconds={3 * rounds}", "timing.warmup_min_iterations=1", "timing.warmup_min_seconds=1",
        "timing.warmup_max_seconds=4", "timing.checkpoint_s=0", "warm_compile=false",
    )  # fmt: skip
    return Stage(
        name, seconds, about, ("sweep=train", *words, *metered), rounds=rounds, file="train", reads_ceilings=reads_ceilings,
        small=(f"model={small}", "axes.layers=1", "axes.batch=2", "axes.seq=32"),
    )  # fmt: skip


# 4 of the 32 blocks, 16,384 tokens; the batches are bytes, so that embedding and head have 256 rows of 128,256.
_BLOCKS = ("model=llama3_8b", "axes.layers=4", "axes.batch=4", "axes.seq=4096", "axes.compute=bf16")
_8B = "4 Llama-3-8B blocks, 16k tokens: "
_GPT2 = ("model=gpt2", "axes.batch=16", "axes.seq=1024")
_FEW_ROUNDS = ("timing.sustained_max_cases=0", "timing.checkpoint_s=0")
_LINEAR = (
    "arms=[bf16_eager,bf16_compile,tensorwise_eager,tensorwise_compile,rowwise_eager,torchao_tensorwise_eager,"
    "torchao_tensorwise_compile]"
)
_CASTS = ("axes.dtype=[e4m3fn]", "axes.granularity=[tensorwise]", "axes.src=[bf16]", "axes.M=[16384]")
_NEEDS = {"fused": ("amax", "cast"), "fused_both": ("amax", "cast_both")}
# Estimates (2026-11-22, not measured). A step of the blocks takes an H200 about 155 ms in bf16, 120 in FP8, 215 by
# torchao's eager casts; a block of 2.2 s with what surrounds it 2.7 s. Three arms and the baseline's second block, four
# rounds: 43 s. Process, device, weights, three checks and the warm-up: 25 s. Compiling one arm cold: 25 s.
#
# The loss: 5,000 steps of 16,384 tokens. A step is 1.2 TFLOP and some 5 GB, 6 ms; Python starts its 600 kernels at 8 us
# each. Three runs at once share the GPU (workers=3): 6 runs x 5,000 x 6.5 ms = 195 s, and 40 s to start. What does not
# fit is the last seed, and below three the verdict is INCONCLUSIVE.
STAGES = (
    Stage("start", 40, "every kernel compiled, 16 processes at once",
        ("sweep=smoke", "parts.kernels.axes.do=[compile]", "parts.kernels.axes.K=[4096,14336]", "arms=[bf16,fp32]",
         "workers=16"),
        ("parts.kernels.axes.K=[256]", "parts.kernels.axes.kernel=[amax,cast_both]", "arms=[bf16]", "workers=1"),
        file="smoke", last_start_s=5),
    Stage("smoke", 30, "every kernel against its reference; a layer of each recipe, verified",
        ("sweep=smoke", "workers=1"), ("parts.kernels.axes.M=[32]",), file="smoke", last_start_s=3),
    _steps("eager", 80, f"{_8B}bf16, tensorwise, torchao, eager", *_BLOCKS,
        "arms=[bf16_eager,tensorwise_eager,torchao_tensorwise_eager]"),
    Stage("casts", 60, "bf16 to e4m3, 16384 x 4096 and 14336: fused, fused both, torchao; a copy and a read for comparison",
        ("sweep=cast", *_CASTS, "axes.K=[4096,14336]", "arms=[fused,fused_both,torchao_compile,copy,read]", *_FEW_ROUNDS),
        ("arms=[eager,copy,read]", "axes.M=[256]", "axes.K=[1024]"), rounds=12, file="kernels", last_start_s=15,
        needs=_NEEDS),
    _steps("compiled", 100, f"{_8B}bf16, tensorwise, compiled cold", *_BLOCKS, "arms=[bf16_compile,tensorwise_compile]"),
    _steps("compiled_torchao", 85, f"{_8B}bf16, torchao, compiled cold", *_BLOCKS,
        "arms=[bf16_compile,tensorwise_compile,torchao_tensorwise_compile]", rounds=3, block_ms=1200),
    Stage("tests", 90, "the GPU tests", words=("tests/fp8core/test_gpu.py", "tests/fp8core/kernels", "tests/harness/models/test_gpu.py",
        "tests/harness/test_timers.py"), small=("tests/fp8core/test_gpu.py",)),
    _steps("fused", 90, f"{_8B}bf16, tensorwise, delayed with fused norms and SwiGLU", *_BLOCKS,
        "arms=[bf16_fused_eager,tensorwise_fused_eager,delayed_fused_eager]"),
    _steps("nocompile", 80, f"{_8B}bf16, tensorwise, float8nocompile", *_BLOCKS,
        "arms=[bf16_eager,tensorwise_eager,nocompile_tensorwise_eager]", rounds=3),
    _steps("rowwise", 80, f"{_8B}bf16, rowwise, delayed", *_BLOCKS,
        "arms=[bf16_eager,rowwise_eager,delayed_eager]", rounds=3),
    Stage("ceilings", 45, "products of cubes, copies, reads, transposes, launches",
        ("axes.what=[mm_bf16,mm_fp8_tensorwise,mm_fp8_rowwise,copy,launch,transpose,read]",
        "axes.mib=[16,64,256,1024]", "timing.max_seconds=1", "timing.sustained_max_cases=3"),
        ("axes.mib=[1,8]", "axes.cube=[128]"), file="kernels", last_start_s=8),
    Stage("gemm", 45, "products of Llama-3-8B by role, fast accumulation on and off",
        ("shapes=[llama3_8b]", *_FEW_ROUNDS), ("shapes=[tiny]", "axes.tokens=[32]"), rounds=8, file="kernels",
        last_start_s=15),
    Stage("nanogpt_char", 270, "loss of nanoGPT's 6 layers, bf16 and tensorwise, three seeds",
        ("data=shakespeare", "axes.seed=[0,1,2,3,4]", "arms=[base,tensorwise]", "workers=3"),
        ("axes.seed=[0,1,2]", "axes.steps=60", "axes.lr_warmup=5", "axes.batch=4", "axes.eval_every=20",
         "axes.eval_batches=4", "axes.diagnose_every=0", "workers=2"),
        file="loss", reads_text=True, last_start_s=90),
    _steps("gpt2_graph", 60, "GPT-2's 12 blocks, byte vocabulary: bf16, tensorwise as CUDA graphs", *_GPT2,
        "arms=[bf16_graph,tensorwise_graph]", rounds=3, small="nano"),
    _steps("gpt2_eager", 60, "GPT-2's 12 blocks, byte vocabulary: bf16, tensorwise, torchao, eager", *_GPT2,
        "arms=[bf16_eager,tensorwise_eager,torchao_tensorwise_eager]", rounds=3, small="nano"),
    _steps("gpt2_advised", 50, "the same, only the layers that are advised", *_GPT2, "axes.convert=advised",
        "arms=[bf16_eager,tensorwise_eager]", rounds=3, small="nano", reads_ceilings=True),
    Stage("accumulation", 30, "sums of FP8 products against models of the accumulator", ("axes.K=[8192,2048,512]",),
        ("axes.K=[512]",), file="kernels", last_start_s=8),
    Stage("codes", 45, "every code against the format's definition", ("arms=[]", "axes.source=[bf16]"),
        ("arms=[plain,saturating]",), file="kernels", last_start_s=8),
    _steps("llama3_1b", 80, "Llama 3.2 1B's 16 blocks, byte vocabulary: fused norms and SwiGLU", "model=llama3_1b",
        "axes.batch=8", "axes.seq=2048", "axes.compute=bf16", "arms=[bf16_eager,bf16_fused_eager,delayed_fused_eager]",
        rounds=3),
    Stage("linear", 60, "layers of Llama-3-8B", ("shapes=[llama3_8b]", _LINEAR, *_FEW_ROUNDS),
        ("shapes=[tiny]", "arms=[bf16_eager,tensorwise_eager,rowwise_eager]"), rounds=8, file="layers", last_start_s=20),
    Stage("peers", 40, "other libraries' products, casts and layers",
        ("parts.linear.arms=[bf16_eager,tensorwise_eager,torchao_tensorwise_eager]", *_FEW_ROUNDS),
        ("parts.gemm.arms=[bf16,fp8_tensorwise]", "parts.cast.arms=[eager,torchao_eager]",
         "parts.step.arms=[bf16_eager,tensorwise_eager]"), rounds=8, file="layers", last_start_s=10),
)  # fmt: skip
