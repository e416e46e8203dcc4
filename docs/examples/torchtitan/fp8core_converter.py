"""fp8core in torchtitan: a converter for `model_registry(..., converters=[Fp8coreConverter.Config(recipe="rowwise")])`.

Tried with torchtitan 0.3.0 in one process on a CPU: recipes rowwise, tensorwise and delayed, no compiler, not sharded. Put the
file beside your config and import it there. As torchtitan's own converters do, it changes the configuration of the model before
the model is built on "meta" and initialised.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

import fp8core


class Fp8coreLinear(fp8core.Float8Linear, Module):
    """fp8core's layer, as torchtitan builds and initialises one."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A Linear, and the recipe that it trains by."""

        recipe: str | fp8core.Float8LinearConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias, config=config.recipe)


class Fp8coreConverter(ModelConfigConverter):
    """Linears of the model become fp8core's."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Which recipe, and which layers stay as they are: those whose name contains one of `filter_fqns`."""

        recipe: str | fp8core.Float8LinearConfig = "rowwise"
        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head"])

    def __init__(self, config: Config) -> None:
        self.recipe, self.filter_fqns = config.recipe, config.filter_fqns

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Replace each plain `Linear.Config` in place; a subclass computes something of its own and stays."""
        converted, kept = 0, []
        for fqn, linear, parent, name in list(model_config.traverse(Linear.Config)):
            whole = linear.in_features % 16 == 0 and linear.out_features % 16 == 0
            if (
                type(linear) is not Linear.Config
                or not whole
                or any(word in fqn for word in self.filter_fqns)
            ):
                kept.append(fqn)
                continue
            held = {each.name: getattr(linear, each.name) for each in fields(linear)}
            new = Fp8coreLinear.Config(**held, recipe=self.recipe)
            if isinstance(parent, list):
                parent[name] = new
            else:
                setattr(parent, name, new)
            converted += 1
        if not converted:
            raise ValueError(
                f"no Linear was converted; these stayed: {', '.join(kept) or 'none is there'}; see filter_fqns"
            )
        logger.info(
            f"fp8core: {converted} Linear layers train in FP8; in high precision: {', '.join(kept) or 'none'}"
        )
        return model_config
