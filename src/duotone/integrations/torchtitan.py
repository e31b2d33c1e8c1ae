"""torchtitan: a converter for the list `converters` of its model registries."""

from dataclasses import dataclass, fields
from typing import Any

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.moe import TokenChoiceTopKRouter as Router
from torchtitan.protocols.model import BaseModel

from duotone.conversion import convert
from duotone.recipes.recipe import as_recipe
from duotone.recipes.rules import OUTPUT_HEAD, Rule

ROUTER = Rule(module="*.router.gate", format="identity")
"""What chooses experts stays in high precision."""


class DuotoneConverter(QuantizationConverter):
    """`model_registry(flavor, converters=[DuotoneConverter.Config(recipe="mxfp8")])`: the model follows the recipe.

    The model is converted when it is built, before torchtitan shards and compiles its blocks. Parameters and
    initialization stay as they are.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """`recipe` is a name or a file, and `rules` are those of `duotone.convert`. Routers stay in high precision."""

        recipe: str
        rules: tuple[Rule, ...] = OUTPUT_HEAD

    def __init__(self, config: Config) -> None:
        as_recipe("DuotoneConverter", config.recipe)
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The config of a model whose class converts itself."""
        values = {field.name: getattr(model_config, field.name) for field in fields(model_config)}
        rules = (*self.config.rules, ROUTER) if any(model_config.traverse(Router.Config)) else self.config.rules
        kind: Any = converted_class(type(model_config)._owner)
        return kind.Config(**values, recipe=self.config.recipe, rules=rules)


def converted_class(kind: Any) -> type[BaseModel]:
    """A class of models as `kind`, which build themselves converted."""

    class Converted(kind):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(kind.Config):  # type: ignore[misc]
            recipe: str
            rules: tuple[Rule, ...]

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            super().verify_module_protocol()
            convert(self, config.recipe, config.rules)

        def verify_module_protocol(self) -> None:
            """As before conversion, which adds plain modules that have no parameters: linears of experts, scales."""

    Converted.__name__ = Converted.__qualname__ = f"Duotone{kind.__name__}"
    return Converted
