"""Model `example_tiny`: one of the harness's architectures in sizes of your own, for `sweep=train` and `advise`."""

from __future__ import annotations

from harness.training.models import ModelSpec
from harness.training.models.llama import LlamaConfig

MODEL = ModelSpec(
    name="example_tiny",
    doc="1 block of width 64 for bytes",
    source="no published model",
    config=LlamaConfig(vocab_size=256, max_seq=128, layers=1, width=64, heads=4, kv_heads=2, ffn=96),
)
