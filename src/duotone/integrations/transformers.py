"""Hugging Face transformers: a quantization config for `from_pretrained`, and a callback for Trainer."""

import sys
import warnings
from collections.abc import MutableMapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from duotone.attention import DotProductAttention
from duotone.conversion import convert, convert_parameters, plan, revert
from duotone.conversion.converting import require_schedule
from duotone.errors import UserError
from duotone.integrations.requirement import require
from duotone.integrations.run_state import (
    KEY,
    hide_states,
    load_common_state,
    load_packed_state,
    load_planes,
    packed_state,
    quantized_parameters,
    recipe_names,
    renew_outgrown_scales,
    save_planes,
)
from duotone.modules.planned import Planned
from duotone.modules.same_recipes import require_same_recipes
from duotone.recipes import library
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.recipes.rules import OUTPUT_HEAD, Rule, require_rules
from duotone.recipes.schedule import Phase, Schedule
from duotone.serving.exported_weight import ExportReport
from duotone.serving.exporting import ExportOptions, write_export
from duotone.serving.importing import load_into
from duotone.serving.selection import unwrapped
from duotone.serving.stored_tensors import StoredNames, stored_tensors
from duotone.state.autocast_context import autocast
from duotone.state.region import STACK
from duotone.tensor import QuantizedTensor

require("transformers", "5")

from safetensors import safe_open  # noqa: E402
from transformers import (  # noqa: E402
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.core_model_loading import revert_weight_conversion  # noqa: E402
from transformers.quantizers.auto import register_quantization_config, register_quantizer  # noqa: E402
from transformers.quantizers.base import HfQuantizer  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

from duotone.integrations import transformers_attention  # noqa: E402, F401  # registers attn_implementation="duotone"
from duotone.integrations.transformers_parallel import follow_plans  # noqa: E402

METHOD = "duotone"
PLANES, TRAINER_STATE = "duotone_planes.pt", "trainer_state.json"
"""Files beside a checkpoint: ours, and that of Trainer."""


class DuotoneConfig(QuantizationConfigMixin):
    """`from_pretrained(..., quantization_config=DuotoneConfig("mxfp8"))`: the model follows the recipe.

    - `recipe` and `rules` are those of `duotone.convert`. With `quantize_parameters` weights exist as planes only.
    - The weights come from a checkpoint in high precision. `save_pretrained` writes such a checkpoint too, without a
      quantization_config. The metadata of its files has the seeds and delayed scales, which load if the recipe is the
      same.
    """

    def __init__(
        self,
        recipe: RecipeLike,
        rules: Sequence[Rule] = OUTPUT_HEAD,
        *,
        quantize_parameters: bool = False,
        quant_method: str = METHOD,
    ) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]
        recipe = library.from_dict(recipe) if isinstance(recipe, dict) else recipe
        self.recipe = as_recipe("DuotoneConfig", recipe)
        if isinstance(rules, Sequence):
            rules = [Rule(**rule) if isinstance(rule, dict) else rule for rule in rules]
        require_rules(rules)
        self.rules = tuple(rules)
        self.quantize_parameters = quantize_parameters

    def to_dict(self) -> dict[str, object]:
        """The configuration as `config.json` holds it. `from_dict` reads it, unless the recipe has a function."""
        is_named = self.recipe.name in library.names() and self.recipe == library.load(self.recipe.name)
        return {
            "quant_method": METHOD,
            "recipe": self.recipe.name if is_named else self.recipe.to_dict(),
            "rules": [rule.to_dict() for rule in self.rules],
            "quantize_parameters": self.quantize_parameters,
        }


class DuotoneQuantizer(HfQuantizer):
    """Converts a model after its weights are loaded: hooks, devices and ties are settled by then."""

    quantization_config: DuotoneConfig
    checkpoint_files: Sequence[str] = ()

    def _process_model_before_weight_loading(
        self,
        model: nn.Module,
        checkpoint_files: Sequence[str] | None = None,
        device_map: object = None,
        **kwargs: object,
    ) -> None:
        places = set(map(str, device_map.values())) if isinstance(device_map, dict) else set[str]()
        if self.quantization_config.quantize_parameters and ("disk" in places or places > {"cpu"}):
            raise UserError(
                "accelerate would offload weights, which exist as planes with quantize_parameters=True and have no "
                "values to move; leave quantize_parameters out, or cpu and disk out of device_map"
            )
        self.checkpoint_files = [str(file) for file in checkpoint_files or () if str(file).endswith(".safetensors")]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: object) -> None:
        config = self.quantization_config
        follow_plans(model)
        convert(model, config.recipe, config.rules)
        if config.quantize_parameters:
            convert_parameters(model, config.recipe)
        if getattr(model.config, "quantization_config", None) is config:
            del model.config.quantization_config  # saved weights are in high precision
        is_outline = all(parameter.is_meta for parameter in model.parameters())  # device_map={"": "meta"} loads nothing
        for file in () if is_outline else self.checkpoint_files[:1]:
            with safe_open(file, framework="pt") as opened:
                saved = opened.metadata() or {}
            if saved.get(f"{KEY}_recipe") == config.recipe.name:
                load_common_state(model, saved[KEY], f"{model.base_model_prefix}.")
                renew_outgrown_scales(model)

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The weights, and the seeds and scales as metadata of the file."""
        metadata = {KEY: packed_state(model), f"{KEY}_recipe": recipe_names(model)}
        return model.state_dict(), metadata

    def _dequantize(self, model: nn.Module, dtype: object = None) -> nn.Module:
        return revert(convert_parameters(model, "bf16"))

    def is_serializable(self) -> bool:
        """True: a converted model can be saved."""
        return True

    is_trainable = is_qat_trainable = is_compileable = property(lambda self: True)


register_quantization_config(METHOD)(DuotoneConfig)
register_quantizer(METHOD)(DuotoneQuantizer)


class DuotoneCallback(TrainerCallback):
    """For Trainer: converts its model, follows a schedule, and resumes with the same bits as an uninterrupted run.

    - `recipe` and `rules` are those of `duotone.convert`. Without a recipe the model must be converted already.
    - `schedule` gives each optimizer step its recipe, and an evaluation that of the step before. Fractions count from
      Trainer's number of steps. After training the model follows the last recipe, and the best model its own.
    - Seeds and delayed scales are in `trainer_state.json` of each checkpoint, and `train(resume_from_checkpoint=...)`
      restores them. Planes of quantized parameters are in a file beside it, which is found under `output_dir`.
    - `report` is a text file, written at the end of training: the recipe, the steps, and the plan of each GEMM.
    """

    def __init__(
        self,
        recipe: RecipeLike | None = None,
        rules: Sequence[Rule] = OUTPUT_HEAD,
        *,
        schedule: Schedule | None = None,
        report: str | Path | None = None,
    ) -> None:
        require_rules(rules)
        require_schedule(schedule)
        if report is not None and not Path(report).absolute().parent.is_dir():
            raise UserError(f"report is {str(report)!r}, in a folder that is not there; create the folder first")
        self.report = report
        self.recipe = None if recipe is None else as_recipe("DuotoneCallback", recipe)
        self.rules, self.schedule = tuple(rules), schedule
        self.step = 0
        self.phase: Phase | None = None
        self.timed = schedule
        """The schedule over the steps of the present training."""
        self.regions: list[autocast | None] = []

    def __repr__(self) -> str:
        return f"DuotoneCallback({getattr(self.schedule or self.recipe, 'name', None)})"

    def on_init_end(self, args: object, state: object, control: object, model: nn.Module, **_: object) -> None:
        """Convert the model."""
        if self.schedule is not None and self.recipe is None:
            self.recipe = self.schedule.phases[0].recipe
        if self.recipe is not None:
            follow_plans(model)
            convert(model, self.recipe, self.rules, schedule=self.schedule)

    def on_train_begin(
        self, args: TrainingArguments, state: Any, control: object, model: nn.Module, **_: object
    ) -> None:
        """Convert the model if it was not there before, and follow the schedule. UserError without a recipe."""
        if not any(isinstance(module, Planned) for module in model.modules()):  # of model_init, or before add_callback
            self.on_init_end(args, state, control, model)
        if not any(isinstance(module, Planned) for module in model.modules()):
            raise UserError("nothing in the model follows recipes: give DuotoneCallback a recipe")
        require_same_recipes(model)
        hide_states(model)  # they are in trainer_state.json, and a plain model would not expect them
        self.step = max(0, state.global_step - 1)  # what was saved is of the step before
        self.phase = None
        for hook in HOOKS.pop(model, ()):  # of a training that ended in an exception
            hook.remove()
        self.regions.clear()
        if self.schedule is not None:
            self.timed = self.schedule.over(state.max_steps)
            _follow_alone(model, self.timed.phases[0].recipe)
            self._follow(model)
            HOOKS[model] = [
                model.register_forward_pre_hook(self._enter),
                model.register_forward_hook(self._leave, always_call=True),
            ]
        saved = state.stateful_callbacks.pop(KEY, None)
        if saved is not None:
            load_packed_state(model, saved)
            if quantized_parameters(model) and not load_planes(model, _files(args, state), saved):
                warnings.warn(
                    f"{PLANES} of the checkpoint was not found, so planes were encoded again from its values; a run "
                    "that went on may have other bits",
                    stacklevel=2,
                )
        elif state.global_step:
            raise UserError("no DuotoneCallback saved the seeds and scales of this checkpoint; start from its weights")

    def on_step_begin(self, args: object, state: TrainerState, control: object, model: nn.Module, **_: object) -> None:
        """Change to the recipe that the schedule has for this step."""
        self.step = state.global_step
        self._follow(model)

    def on_step_end(self, args: object, state: Any, control: TrainerControl, model: nn.Module, **_: object) -> None:
        """Put seeds and scales into the trainer's state before a checkpoint."""
        if control.should_save:
            state.stateful_callbacks[KEY] = packed_state(model, of_all_ranks=True)

    on_epoch_end = on_step_end

    def on_save(self, args: TrainingArguments, state: Any, control: object, model: nn.Module, **_: object) -> None:
        """Complete the checkpoint: planes of quantized parameters, and what `on_step_end` could not know of.

        Trainer decides only after an evaluation whether it saves the best model, and callbacks may ask for more.
        """
        saved = state.stateful_callbacks.pop(KEY, None)
        file, is_known = _files(args, state)[0], saved is not None
        saved = saved if is_known else packed_state(model, of_all_ranks=True)
        if not args.should_save:
            return
        if not file.parent.is_dir():  # that of a trial in a search of hyperparameters
            if not is_known or quantized_parameters(model):
                text = "so it has no seeds, delayed scales or planes, and no run can resume from it"
                warnings.warn(f"the checkpoint is not at {file.parent}, {text}", stacklevel=2)
            return
        if not is_known:
            _add_to_state(file.with_name(TRAINER_STATE), saved)
        if quantized_parameters(model):
            save_planes(model, file, saved)

    def on_train_end(self, args: Any, state: TrainerState, control: object, model: nn.Module, **_: object) -> None:
        """Leave the model under its last recipe, and write the report. The best model gets its seeds and scales."""
        for hook in HOOKS.pop(model, ()):
            hook.remove()
        best = Path(state.best_model_checkpoint or "")
        if args.load_best_model_at_end and (best / TRAINER_STATE).is_file():
            ended: Any = TrainerState.load_from_json(str(best / TRAINER_STATE))
            if (saved := ended.stateful_callbacks.get(KEY)) is None:
                text = "has the weights of that step, and the seeds and scales of the last one"
                warnings.warn(f"{best} holds no seeds and scales, so the best model {text}", stacklevel=2)
            else:
                self.step = max(0, ended.global_step - 1)
                self._follow(model)
                load_common_state(model, saved)
                load_planes(model, [best / PLANES], saved)
        if self.timed is not None:
            _follow_alone(model, self.timed.phase(self.step).recipe)
        if self.report is not None and state.is_world_process_zero:
            head = f"{state.global_step} steps, at the end under {recipe_names(model)}"
            Path(self.report).write_text(f"{head}\n{plan(model)}\n")

    def _follow(self, model: nn.Module) -> None:
        """Convert quantized parameters if another phase than before was the last one that asked for it."""
        if self.timed is None:
            return
        asking = [each for each in self.timed.phases if each.convert_parameters and each.start <= self.step]
        phase = asking[-1] if asking else None
        if phase != self.phase and quantized_parameters(model):
            convert_parameters(model, (phase or self.timed.phases[0]).recipe)
        self.phase = phase

    def _enter(self, module: nn.Module, inputs: object) -> None:
        """Open the region of this step, unless a region of the script is open, or the model follows another recipe.

        So nothing of a schedule is left in a model whose training ended in an exception.
        """
        assert self.timed is not None
        first = next((each for each in module.modules() if isinstance(each, Planned)), None)
        follows = first is not None and not STACK.regions and first.recipe is self.timed.phases[0].recipe
        self.regions.append(autocast(recipe=self.timed.at(self.step)) if follows else None)
        if (region := self.regions[-1]) is not None:
            region.__enter__()

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        region = self.regions.pop() if self.regions else None
        if region is not None:
            region.__exit__(*sys.exc_info())


HOOKS: MutableMapping[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
"""The hooks of a schedule on a model."""


def _add_to_state(file: Path, saved: str) -> None:
    """Put seeds and scales into the file of a checkpoint that Trainer wrote. The file is replaced as a whole."""
    written = TrainerState.load_from_json(str(file))
    written.stateful_callbacks = {**(written.stateful_callbacks or {}), KEY: saved}  # type: ignore[assignment, dict-item]
    beside = file.with_suffix(".new")
    written.save_to_json(str(beside))
    beside.replace(file)


def _follow_alone(model: nn.Module, recipe: Recipe) -> None:
    """Let the modules follow a recipe outside of regions. Their states stay."""
    for module in model.modules():
        if isinstance(module, Planned | DotProductAttention):
            module.recipe = recipe
        if isinstance(module, Planned):
            module.forget_plans()


def _files(args: TrainingArguments, state: TrainerState) -> list[Path]:
    """Where the planes of the checkpoint of a step may be; the first is where they are saved."""
    place = f"checkpoint-{state.global_step}"
    resumed = args.resume_from_checkpoint
    return [
        Path(str(args.output_dir)) / place / PLANES,
        *([Path(resumed) / PLANES] if isinstance(resumed, str) else []),
    ]


def export(model: PreTrainedModel, path: str | Path, **options: Any) -> ExportReport:
    """Like `duotone.export`, in the layout of published checkpoints: with their names, and experts split into linears.

    UserError for a model whose layout joins several of its tensors.
    """
    unknown = options.keys() - {field.name for field in fields(ExportOptions)}
    if unknown:
        raise UserError(f"export has no argument {min(unknown)!r}; its arguments are those of duotone.export")
    return write_export(model, path, ExportOptions(**options), _published(model))


def load(path: str | Path, model: PreTrainedModel) -> PreTrainedModel:
    """Like `duotone.load` into a model, from the layout of published checkpoints, which `export` writes."""
    return load_into(path, model, _published(model))  # type: ignore[return-value]


def _published(model: nn.Module) -> StoredNames:
    """The layout of published checkpoints. UserError if it joins several tensors of the model."""
    inner: Any = unwrapped(model)

    def names(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return revert_weight_conversion(inner, {name: tensor})

    tensors = {name: t.to("meta") for name, t in stored_tensors(inner).items() if not isinstance(t, QuantizedTensor)}
    whole = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(inner, dict(tensors)).items()}
    pieces = {n: tuple(piece.shape) for name, tensor in tensors.items() for n, piece in names(name, tensor).items()}
    if whole != pieces:
        odd = min(whole.keys() ^ pieces.keys() or whole)
        remedy = "use duotone.export, and duotone.load"
        raise UserError(f"the layout of {type(inner).__name__} makes {odd} of several tensors; {remedy}")
    return names
