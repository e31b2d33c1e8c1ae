"""Lightning: precision plugins for its Trainer and for Fabric."""

from collections.abc import Sequence

from torch import nn
from torch.optim.swa_utils import AveragedModel

from duotone.conversion import convert
from duotone.errors import UserError
from duotone.integrations.requirement import require
from duotone.integrations.run_state import RunState, hide_states
from duotone.modules.planned import Planned
from duotone.recipes.recipe import RecipeLike, as_recipe
from duotone.recipes.rules import OUTPUT_HEAD, Rule

require("lightning", "2.5")

from lightning.fabric.plugins import Precision as FabricPrecision  # noqa: E402
from lightning.pytorch.plugins import Precision as TrainerPrecision  # noqa: E402


class FabricDuotonePrecision(FabricPrecision):
    """`Fabric(plugins=FabricDuotonePrecision("mxfp8"))`: `setup` converts the model.

    - `recipe` and `rules` are those of `duotone.convert`. Parameters keep their dtype.
    - Save the plugin with the model, so that a run that resumes has the bits of one that went on:
      `fabric.save(path, {"model": model, "optimizer": optimizer, "precision": plugin})`. `fabric.load` takes the same
      dict.
    - The state_dict of the model has no delayed scales, so a plain model can load it.
    """

    def __init__(self, recipe: RecipeLike, rules: Sequence[Rule] = OUTPUT_HEAD) -> None:
        self.recipe, self.rules = as_recipe(type(self).__name__, recipe), tuple(rules)
        self.states: list[RunState] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.recipe.name})"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a model in place, unless it was converted before. Returns it."""
        if all(state.model is not module for state in self.states):
            convert(module, self.recipe, self.rules)
            hide_states(module)
            self.states.append(RunState(module, of_all_ranks=True))
        return module

    def state_dict(self) -> dict[str, dict[str, object]]:
        """The state of each converted model, by its number."""
        return {str(at): state.state_dict() for at, state in enumerate(self.states)}

    def load_state_dict(self, state_dict: dict[str, dict[str, object]]) -> None:
        """UserError unless `state_dict` is of the same models and recipe."""
        if len(state_dict) != len(self.states):
            raise UserError(f"the checkpoint is of {len(state_dict)} models, and {len(self.states)} were set up")
        for at, state in enumerate(self.states):
            state.load_state_dict(state_dict[str(at)])


class DuotonePrecision(TrainerPrecision, FabricDuotonePrecision):
    """`Trainer(plugins=DuotonePrecision("mxfp8"))`: the model is converted when it is set up.

    - `recipe` and `rules` are those of `duotone.convert`. Parameters keep their dtype.
    - Checkpoints hold seeds, delayed scales and planes. `fit(ckpt_path=...)` continues with the bits of a run that
      went on.
    - The weights in a checkpoint are those of a plain model, so `load_from_checkpoint` works as before.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the model that a Trainer sets up. It takes the place of the model before.

        UserError if a callback that averages weights has copied the plain model with buffers.
        """
        _refuse_plain_averages(module)
        self.states = [state for state in self.states if state.model is module]
        return super().convert_module(module)

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """UserError if the checkpoint was saved without this plugin."""
        if type(self).__qualname__ not in checkpoint:
            raise UserError("no DuotonePrecision saved the seeds and scales of this checkpoint; start from its weights")


def _refuse_plain_averages(module: nn.Module) -> None:
    """UserError if a callback holds a plain copy with buffers: Lightning pairs buffers of both by their order."""
    trainer = getattr(module, "_trainer", None)
    for callback in getattr(trainer, "callbacks", ()):
        for average in vars(callback).values():
            if isinstance(average, AveragedModel) and next(average.module.buffers(), None) is not None:
                if not any(isinstance(each, Planned) for each in average.modules()):
                    raise UserError(
                        f"{type(callback).__name__} copied the model and its buffers before the plugin converts it; "
                        "call duotone.convert(model, recipe) before fit, and leave the plugin for the checkpoints"
                    )
