"""The stages of a GPU session: what is measured, for how long, and what stands in for it in a rehearsal on a CPU.

Their order is by what a reader misses most if the time runs out: whether the code is right, the training step on which
the first question hangs, the loss. 25 minutes in all, made for three slots of 8.5: Llama-3-8B; tests, ceilings, the loss and
sums; the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

_COMPILED = "_compile"
# A rehearsal proves the command and times nothing: three rounds, so that intervals and verdicts are formed.
_QUICK = (
    "rounds=3", "timing.min_samples=3", "timing.block_ms=5", "timing.max_block_samples=5", "timing.min_seconds=0.01",
    "timing.max_seconds=2", "timing.warmup_min_seconds=0.01", "timing.warmup_max_seconds=0.5",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the session.

    Attributes:
        name: of the stage; its sweep where `words` name none.
        minutes: that it may take over all slots.
        words: of the command line, beside those that every sweep gets.
        small: words of a rehearsal, in place of those with the same key.
        whole: one case, of which nothing is left if it is cut: it begins only in a slot that has all its minutes, and may
            then have the rest of that slot.
        file: that its rows are packed into, without ending; stages may share one.
        reads_text: it trains on nanoGPT's text, which a machine without a network cannot fetch.
        reads_ceilings: it converts what is advised at the rates that the stage "ceilings" measured.
        last_start_s: seconds before its end in which it starts nothing more: what a case or run takes.
    """

    name: str
    minutes: float
    words: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    whole: bool = False
    file: str = ""
    reads_text: bool = False
    reads_ceilings: bool = False
    last_start_s: float = 30.0

    @property
    def packed(self) -> str:
        """Name of the file of its rows."""
        return f"{self.file or self.name}.parquet"

    @property
    def sweep(self) -> str:
        """The sweep that it runs; "tests" runs none."""
        named = [word.removeprefix("sweep=") for word in self.words if word.startswith("sweep=")]
        return named[0] if named else self.name

    def command(self, device: str) -> list[str]:
        """The words of its sweep on that device."""
        words = {"sweep": f"sweep={self.sweep}"} | _by_key(self.words)
        if device == "cpu":
            words |= _by_key(_QUICK) | _by_key(self.small)
            if "arms" in words:  # a step takes a minute to compile on a CPU
                arms = words["arms"].removeprefix("arms=").strip("[]").split(",")
                words["arms"] = f"arms=[{','.join(a for a in arms if not a.endswith(_COMPILED))}]"
        return list(words.values())


def _by_key(words: tuple[str, ...]) -> dict[str, str]:
    return {word.partition("=")[0]: word for word in words}


def _train(
    name: str,
    minutes: float,
    model: str,
    *words: str,
    small: str = "llama_tiny",
    rounds: int = 3,
    reads_ceilings: bool = False,
) -> Stage:
    """One case of sweep=train in blocks long enough for the energy meter, which moves ten times a second.

    The sweep's own numbers of samples and of calls to warm up are for sittings without a clock: at 0.3 s a step they alone
    would take longer than the stage.
    """
    metered = (
        "timing.block_ms=2500", "timing.max_block_samples=250", "timing.min_samples=5", f"rounds={rounds}",
        f"timing.max_seconds={3 * rounds}", "timing.warmup_min_iterations=1", "timing.warmup_max_seconds=5",
    )  # fmt: skip
    return Stage(
        name, minutes, ("sweep=train", f"model={model}", *words, *metered), whole=True, file="train",
        small=(f"model={small}", "axes.layers=1", "axes.batch=2", "axes.seq=32"), reads_ceilings=reads_ceilings,
    )  # fmt: skip


_FEW_ROUNDS = ("rounds=8", "timing.sustained_max_cases=0")  # more shapes, not the last half per cent of one
_LINEAR = (
    "arms=[bf16_eager,bf16_compile,tensorwise_eager,tensorwise_compile,rowwise_eager,torchao_tensorwise_eager,"
    "torchao_tensorwise_compile]"
)
_PEERS = ("parts.linear.arms=[bf16_eager,tensorwise_eager,torchao_tensorwise_eager]", *_FEW_ROUNDS)
_EAGER = "arms=[bf16_eager,tensorwise_eager,rowwise_eager,torchao_tensorwise_eager"
# Llama-3-8B, estimated (2026-11-21): 9 arms and a copy of each baseline take 4 blocks of 2.5 s, with what is moved before
# each 3.9 s: 187 s. Beside that weights are drawn ten times (80 s), three arms compile cold and warm (150 s), all warm up
# and are checked (50 s). The other models are small: 3 blocks an arm, the least that gives an interval.
#
# The loss: 5,000 steps of 16,384 tokens, estimated (2026-11-21, not measured). A step is 1.2 TFLOP and some 5 GB: 6 ms of
# an H200 at the 350 TFLOP/s and 4 TB/s that such small products and tensors may reach. Alone it would take longer than
# that, since Python starts its 600 kernels at 8 us each and waits for the loss: 10 ms in bf16, 16 in FP8, so 50 and 80 s
# a run and 6.5 minutes for three seeds of both. Three runs at once share the GPU (workers=3), which then is what they
# wait for: 6 runs x 5,000 x 6.5 ms = 195 s, and 40 s to start. So three seeds should fit, four hardly. Its order is seed
# by seed: what does not fit is the last seed, and below three the verdict is INCONCLUSIVE. Rowwise would cost a seed.
STAGES = (
    _train(
        "train_llama3_8b", 8, "llama3_8b", "axes.layers=4", "axes.batch=4", "axes.seq=4096",
        "axes.compute=bf16",  # weights and activations, as FSDP's mixed precision computes; nocompile takes no other
        "arms=[bf16_eager,bf16_compile,bf16_fused_eager,tensorwise_eager,tensorwise_compile,tensorwise_fused_eager,"
        "torchao_tensorwise_eager,torchao_tensorwise_compile,nocompile_tensorwise_eager]", rounds=4,
    ),
    Stage("tests", 2, small=("tests/fp8core/test_gpu.py", "tests/fp8core/kernels")),
    Stage("ceilings", 1, ("axes.what=[mm_bf16,mm_fp8_tensorwise,mm_fp8_rowwise,copy,launch,transpose,read]",
        "axes.mib=[16,64,256,1024]", "timing.max_seconds=1", "timing.sustained_max_cases=3"),
        small=("axes.mib=[1,8]", "axes.cube=[128]"), file="kernels", last_start_s=8),
    Stage("nanogpt_char", 4.5, ("data=shakespeare", "axes.seed=[0,1,2,3,4]", "arms=[base,tensorwise]", "workers=3"),
        small=("axes.seed=[0,1,2]", "axes.steps=60", "axes.lr_warmup=5", "axes.batch=4", "axes.eval_every=20",
               "axes.eval_batches=4", "axes.diagnose_every=0", "workers=2"),
        file="loss", reads_text=True, last_start_s=90),
    Stage("accumulation", 0.5, ("axes.K=[8192,2048,512]",), ("axes.K=[512]",), file="kernels", last_start_s=8),
    Stage("codes", 1, ("arms=[]", "axes.source=[bf16]"), ("arms=[plain,saturating]",), file="kernels", last_start_s=8),
    Stage("gemm", 1, ("shapes=[llama3_8b]", *_FEW_ROUNDS), file="kernels", small=("shapes=[tiny]", "axes.tokens=[32]"),
        last_start_s=15),
    Stage("cast", 1, _FEW_ROUNDS, file="kernels", last_start_s=15,
        small=("arms=[eager]", "axes.M=[256]", "axes.src=[bf16]", "axes.dtype=[e4m3fn]")),
    Stage("linear", 1, ("shapes=[llama3_8b]", _LINEAR, *_FEW_ROUNDS), last_start_s=20,
        small=("shapes=[tiny]", "arms=[bf16_eager,tensorwise_eager,rowwise_eager]")),
    _train("train_gpt2", 2, "gpt2", "axes.batch=16", "axes.seq=1024", f"{_EAGER},bf16_graph,tensorwise_graph]",
        small="nano"),
    _train("train_gpt2_advised", 1, "gpt2", "axes.batch=16", "axes.seq=1024", "axes.convert=advised",
        "arms=[bf16_eager,tensorwise_eager]", small="nano", reads_ceilings=True),
    _train("train_llama3_1b", 1.5, "llama3_1b", "axes.batch=8", "axes.seq=2048", "axes.compute=bf16",
        f"{_EAGER},bf16_fused_eager,delayed_fused_eager]"),
    Stage("peers", 0.5, _PEERS, small=("parts.gemm.arms=[bf16,fp8_tensorwise]", "parts.cast.arms=[eager,torchao_eager]",
        "parts.step.arms=[bf16_eager,tensorwise_eager]"), last_start_s=10),
)  # fmt: skip
