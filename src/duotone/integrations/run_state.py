"""What a run has beside its weights, as one text: seeds, and the scales and histories of delayed scaling."""

import base64
import io
import zlib

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.planned.delayed_checkpoint import load_recipe_state, recipe_state
from duotone.state.seeds import load_rng_state, rng_state

KEY = "duotone"
"""Where other libraries keep the text."""


def packed_state(model: nn.Module) -> str:
    """`rng_state` and `recipe_state` of a model."""
    buffer = io.BytesIO()
    torch.save({"rng": rng_state(model), "recipe": recipe_state(model)}, buffer)
    return base64.b64encode(zlib.compress(buffer.getvalue())).decode("ascii")


def load_packed_state(model: nn.Module, text: str) -> None:
    """Restore what `packed_state` gave. UserError if the text is damaged or belongs to another model or recipe."""
    try:
        states: dict[str, dict[str, Tensor]] = torch.load(io.BytesIO(zlib.decompress(base64.b64decode(text))))
        rng, recipe = states["rng"], states["recipe"]
    except (ValueError, KeyError, TypeError, EOFError, RuntimeError, zlib.error) as error:
        raise UserError(f"the seeds and scales of a checkpoint cannot be read ({error!r}); save it again") from None
    if recipe_state(model).keys() - recipe.keys() or rng_state(model).keys() != rng.keys():
        raise UserError("the checkpoint has seeds and scales of another model or recipe; convert it as it was saved")
    load_recipe_state(model, recipe)
    load_rng_state(model, rng)


def without_states(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict without the scales and histories of delayed scaling."""
    states = recipe_state(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in states}
