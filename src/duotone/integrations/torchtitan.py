"""torchtitan: a converter for the list `converters` of its model registries."""

from dataclasses import dataclass, fields
from typing import Any

from duotone.conversion import convert
from duotone.errors import UserError
from duotone.integrations.requirement import require
from duotone.integrations.run_state import KEY, hide_states, load_packed_state, packed_state
from duotone.recipes.recipe import as_recipe
from duotone.recipes.rules import OUTPUT_HEAD, Rule
from duotone.state.seeds import BUFFER

require("torchtitan", "0.3")

from torchtitan.components.quantization import QuantizationConverter  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class DuotoneConverter(QuantizationConverter):
    """`model_registry(flavor, converters=[DuotoneConverter.Config(recipe="mxfp8")])`: the model follows the recipe.

    The model is converted when it is built, before torchtitan shards and compiles its blocks. Parameters and
    initialization stay as they are.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """`recipe` is a name or a file, and `rules` are those of `duotone.convert`."""

        recipe: str
        rules: tuple[Rule, ...] = OUTPUT_HEAD

    def __init__(self, config: Config) -> None:
        as_recipe("DuotoneConverter", config.recipe)
        self.config = config

    def convert(self, model_config: BaseModel.Config) -> BaseModel.Config:
        """The config of a model whose class converts itself. UserError for a second converter."""
        values = {field.name: getattr(model_config, field.name) for field in fields(model_config)}
        if "recipe" in values:
            raise UserError("the model has a DuotoneConverter already; give one, whose rules name all formats")
        owner: Any = type(model_config)._owner
        kind: Any = _converted_class(owner)
        return kind.Config(**values, recipe=self.config.recipe, rules=self.config.rules)


class DuotoneTrainer(Trainer):
    """torchtitan's trainer. Its checkpoints hold seeds and delayed scales too, so that runs resume with equal bits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration, unchanged."""

    def state_dict(self) -> dict[str, object]:
        """torchtitan's state, and the seeds and scales of each part of the model."""
        return {**super().state_dict(), KEY: [packed_state(part, of_all_ranks=True) for part in self.model_parts]}

    def load_state_dict(self, state_dict: dict[str, list[str]]) -> None:
        """UserError if the seeds and scales are of another model or recipe."""
        super().load_state_dict(state_dict)
        for part, text in zip(self.model_parts, state_dict[KEY], strict=True):
            load_packed_state(part, text)


def _converted_class(kind: type[BaseModel]) -> type[BaseModel]:
    """A class of models as `kind`, which build themselves converted."""

    class Converted(kind):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(kind.Config):  # type: ignore[misc]
            recipe: str
            rules: tuple[Rule, ...]

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            super().verify_module_protocol()
            convert(self, config.recipe, config.rules)
            hide_states(self)

        def parallelize(self, parallel_dims: ParallelDims) -> None:
            """Seeds are no states that torchtitan lays out over ranks: each rank has its own."""
            seeds = [(module, module._buffers.pop(BUFFER)) for module in self.modules() if BUFFER in module._buffers]
            super().parallelize(parallel_dims)
            for module, seed in seeds:
                module._buffers[BUFFER] = seed

        def verify_module_protocol(self) -> None:
            """As before conversion, which adds plain modules that have no parameters: linears of experts, scales."""

    Converted.__name__ = Converted.__qualname__ = f"Duotone{kind.__name__}"
    return Converted
