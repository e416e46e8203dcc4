"""Stands in for transformers where it is not installed: the three names that docs/tutorial-measure-my-model.md uses.

Interface as of transformers 5: a configuration by keywords, `from_config` of the Auto class, a causal LM whose output has
`loss` where there are labels. tests/clients runs the same page with the real one.
"""

from __future__ import annotations

from typing import Any

import language_models


class LlamaConfig(language_models.Config):
    """Takes the sizes that the stand-in needs, and ignores the others."""

    def __init__(self, vocab_size: int = 32000, max_position_embeddings: int = 2048, **sizes: Any) -> None:
        super().__init__(vocab_size, max_position_embeddings)


class LlamaForCausalLM(language_models.TinyForCausalLM):
    """By its name a causal LM."""


class AutoModelForCausalLM:
    """Chooses the class by the configuration's."""

    @classmethod
    def from_config(cls, config: LlamaConfig) -> LlamaForCausalLM:
        """An untrained model."""
        return LlamaForCausalLM(config)
