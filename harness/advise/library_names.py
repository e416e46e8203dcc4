"""The libraries whose FP8 layers are advised, and what is known of their speed. No torch."""

from __future__ import annotations

FP8CORE, TORCHAO, ENGINE = "fp8core", "torchao", "transformer_engine"
LIBRARIES = (FP8CORE, TORCHAO, ENGINE)


def not_by_default(library: str, name: str) -> str:
    """Why a recipe is not advised unless it is asked for by name; "" if it may be.

    One is enough to rule it out: `delayed` of fp8core gains by cast kernels that no GPU has run, and needs a call in each step.
    """
    if library == FP8CORE and name == "delayed":
        return "not the default: it rests on cast kernels that no GPU has run"
    return ""


def provenance(library: str) -> str:
    """What of a library's FP8 layers was not measured, and where."""
    if library == FP8CORE:
        return "fp8core's kernels on any GPU"
    name = "torchao" if library == TORCHAO else "TransformerEngine"
    return f"{name}'s kernels here (costs from its source, held against its publications)"
