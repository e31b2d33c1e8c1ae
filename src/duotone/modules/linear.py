"""Linear: nn.Linear whose three GEMMs follow a plan."""

from typing import Any

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.formats import IDENTITY
from duotone.linear import Layout, linear
from duotone.linear.layout import LAYOUTS, WHOLE
from duotone.modules import boundary, states
from duotone.modules.parameters import quantized_parameter
from duotone.modules.planned import Planned, holds_codes
from duotone.recipes.recipe import Recipe
from duotone.state import seeds
from duotone.state.autocast import DEFAULT_RECIPE, HIGH_PRECISION, STACK
from duotone.state.parameters import CURRENT
from duotone.tensor import QuantizedTensor


class PlannedLinear(Planned):
    """What makes an nn.Linear follow plans. Mixed in before nn.Linear or a subclass without a forward of its own.

    Parameters, their names and the state_dict stay nn.Linear's.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    module_type = "linear"

    def forward(self, x: Tensor, *, fp8_output: bool = False, fp8_grad: bool = False) -> Tensor:
        """(*lead, in_features) -> (*lead, out_features).

        `fp8_output` gives the output, `fp8_grad` the gradient of the input, as quantized tensors in the formats that
        the recipe gives `output_quantizer_role` and `grad_input_quantizer_role`.
        """
        weight, bias = self.weight, self.bias
        if not isinstance(x, Tensor):
            raise UserError(f"{self.module_name or 'Linear'} takes a tensor; got {type(x).__name__}")
        dtype = weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
            weight = weight if holds_codes(weight) else weight.to(dtype)  # codes stand for values of any dtype
        if x.dtype is not dtype or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
            raise UserError(
                f"{self.module_name or 'Linear'} takes (..., {weight.shape[1]}) in {dtype}; "
                f"got {tuple(x.shape)} in {x.dtype}: cast or reshape the input"
            )
        plan = self.plan_for(x, weight)
        if STACK.regions and STACK.regions[-1].calibrating is not None:
            self.calibrate(STACK.regions[-1], x, weight)
        seed = seeds.take(getattr(self, seeds.BUFFER), plan.seeds) if plan.seeds else None
        if not (fp8_output or fp8_grad):
            return states.roll_with(linear(plan, x, weight, bias, seed), plan)
        boundary.warn_without_role(self, fp8_output, fp8_grad)
        x = boundary.quantize_gradient(x, plan) if fp8_grad else x
        y = states.roll_with(linear(plan, x, weight, bias, seed), plan)
        return boundary.quantize_output(y, plan) if fp8_output else y

    def quantize_weight(self) -> None:
        """Inside of `quantized_model_init`, keep planes of the weight only."""
        construction = CURRENT.construction
        if not construction.enabled:
            return
        recipe = construction.recipe or (DEFAULT_RECIPE if self.recipe == HIGH_PRECISION else self.recipe)
        quantizer = self.plan_of(recipe, self.weight.device.type, self.weight.dtype).weight
        self.recipe = recipe if self.recipe == HIGH_PRECISION else self.recipe
        if quantizer.rowwise == quantizer.columnwise == IDENTITY:
            return
        values, keep = self.weight.detach(), construction.preserve_high_precision_init_val
        self.weight = quantized_parameter(self.weight, quantizer, preserve=keep)
        if any(quantizer.delayed):
            self.prepare(recipe)
            assert isinstance(self.weight, QuantizedTensor)
            states.record(self.weight.context, values)


class Linear(PlannedLinear, nn.Linear):
    """nn.Linear with a recipe. Arguments after the sizes are keyword-only; without a recipe, autocast alone quantizes.

    `params_dtype` is torch's default dtype where None, `device` its default device. `parallel_mode` "column" splits
    out_features over the ranks of `tp_group`, "row" in_features; `sequence_parallel` keeps the activations outside as
    shards of their rows.
    """

    def __init__(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str = "",
        recipe: Recipe | None = None,
        parallel_mode: str | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
    ) -> None:
        layout = _layout(parallel_mode, tp_group, sequence_parallel)
        size = 1 if tp_group is None else tp_group.size()
        whole = {"column": out_features, "row": in_features}.get(layout.mode or "", size)
        if whole % size:
            raise UserError(f"parallel_mode {parallel_mode!r} cannot split {whole} features over {size} ranks")
        local_in = in_features // size if layout.mode == "row" else in_features
        local_out = out_features // size if layout.mode == "column" else out_features
        nn.Linear.__init__(self, local_in, local_out, bias=bias, device=device, dtype=params_dtype)
        self.layout = layout
        self.adopt(recipe or HIGH_PRECISION, (), name)
        self.quantize_weight()

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Communicate in another group from the next forward on; backwards stay in the group of their forward."""
        self.layout = _layout(self.layout.mode, tp_group, self.layout.sequence_parallel)
        self.forget_plans()


def _layout(mode: str | None, group: Any, sequence_parallel: bool) -> Layout:
    if mode not in LAYOUTS:
        raise UserError(f"parallel_mode {mode!r} is unknown; allowed are None, 'column' and 'row'")
    if mode is None and sequence_parallel:
        raise UserError("sequence_parallel needs parallel_mode 'column' or 'row'; give one, and its tp_group")
    if mode is not None and group is None:
        raise UserError(f"parallel_mode {mode!r} needs a tp_group; pass the process group of the tensor-parallel ranks")
    return LAYOUTS[mode](group.group_name, sequence_parallel) if mode else WHOLE
