"""Attention of Hugging Face's transformers: if a model asks for "duotone" attention, its products follow recipes.

`duotone.integrations.transformers` registers the name. A converted attention module holds a `DotProductAttention`.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from duotone.attention import DotProductAttention
from duotone.conversion.naming import named_modules
from duotone.errors import RecipeError, UserError
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import QuantizerRole

NAME, CORE = "duotone", "duotone_attention"
"""What `attn_implementation` is called, and the attribute that holds the `DotProductAttention`."""

DROPOUTS = ("attention_dropout", "attn_dropout", "attn_drop", "dropout_prob", "dropout_p", "dropout")
"""Attributes of attention modules that hold the probability, or an `nn.Dropout`. Each call tells the one that holds."""


def attentions(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that multiply through transformers' attention interface, by name."""
    for name, module in named_modules(model):
        config = vars(module).get("config")
        if isinstance(vars(module).get("is_causal"), bool) and hasattr(config, "_attn_implementation"):
            yield name, module


def refuse_without_interface(model: nn.Module) -> None:
    """UserError if a model of transformers asks for Duotone's attention, and none of its modules can run it.

    Such models add masks to their scores, and those that transformers makes for "duotone" are bool.
    """
    for name, module in named_modules(model):
        config = vars(module).get("config") if hasattr(module, "_supports_attention_backend") else None
        if getattr(config, "_attn_implementation", None) == NAME and not any(attentions(model)):
            raise UserError(
                f"{name or type(module).__name__} does not attend through transformers' attention interface, so that "
                f"attn_implementation={NAME!r} would change its masks; load it with 'eager'"
            )


def add_cores(model: nn.Module) -> None:
    """Give each attention module that asks for it a `DotProductAttention`, which the interface calls."""
    for _, module in list(attentions(model)):
        config = module.config
        if config._attn_implementation != NAME or CORE in module._modules:
            continue
        heads = getattr(module, "num_heads", config.num_attention_heads)
        width = getattr(module, "head_dim", None) or config.hidden_size // heads
        core = DotProductAttention(
            heads,
            (getattr(module, "qk_head_dim", width), getattr(module, "v_head_dim", width)),
            num_gqa_groups=heads // getattr(module, "num_key_value_groups", 1),
            attention_dropout=_dropout(module),
            softmax_scale=getattr(module, "scaling", None),
            qkv_format="bshd",
        )
        module.add_module(CORE, core.train(module.training))


def _dropout(module: nn.Module) -> float:
    values = (getattr(module, name, None) for name in DROPOUTS)
    numbers = (value.p if isinstance(value, nn.Dropout) else value for value in values)
    return next((float(number) for number in numbers if isinstance(number, int | float)), 0.0)


def remove_cores(model: nn.Module) -> None:
    """The inverse of `add_cores`."""
    for _, module in attentions(model):
        module._modules.pop(CORE, None)


def other_attentions(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attention modules that transformers runs itself now, since another implementation is set."""
    return ((name, module) for name, module in attentions(model) if module.config._attn_implementation != NAME)


def idle_cores(model: nn.Module) -> set[str]:
    """The names of the `DotProductAttention`s that transformers does not call."""
    return {f"{name}.{CORE}" for name, _ in other_attentions(model)}


def left_in_high_precision(name: str, module: nn.Module, recipe: Recipe) -> str | None:
    """Why an attention module stays in high precision although the recipe asks for its products, or None."""
    config = vars(module).get("config")
    current = getattr(config, "_attn_implementation", None)
    if not isinstance(vars(module).get("is_causal"), bool) or not isinstance(current, str):
        return None
    if current == NAME and CORE in module._modules:
        return None
    if not recipe.asks_for(QuantizerRole("dpa", "qkv", f"{name}.{CORE}")):
        return None
    if current == NAME:
        return "attention runs as 'sdpa' of transformers, since 'duotone' was set later: call duotone.convert again"
    return (
        f"attention runs as {current!r} of transformers; import duotone.integrations.transformers and load the model "
        f"with attn_implementation={NAME!r}, so that its products follow the recipe"
    )


def refuse_other_attention(model: nn.Module, recipe: Recipe) -> None:
    """RecipeError if a strict recipe asks for products of an attention that transformers runs itself."""
    for name, module in other_attentions(model) if recipe.strict else ():
        if why := left_in_high_precision(name, module, recipe):
            raise RecipeError(f"strict: {name}: {why}; or leave roles of module type 'dpa' in high precision")
