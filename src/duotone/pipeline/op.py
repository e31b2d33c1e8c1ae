"""Op: the interface of modules in a pipeline, what they know of a tensor, and how a sequence of ops runs."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from duotone.errors import UserError
from duotone.formats.format import require_dense
from duotone.numbered import never_compiled
from duotone.pipeline.autograd import (
    RUNNER,
    Backward,
    Outputs,
    are_transforms_active,
    is_transformed,
    second_order,
)
from duotone.pipeline.bound_pipeline import bindings_of
from duotone.pipeline.channels import Channels
from duotone.pipeline.deferred import DeferredOutput
from duotone.pipeline.entry import apply_in_graph
from duotone.pipeline.rewrites import RULES, rewrite
from duotone.pipeline.rows import plain_stages
from duotone.pipeline.slot_roles import KnownRoles
from duotone.pipeline.stage import Stage
from duotone.pipeline.titles import title
from duotone.recipes.recipe import Recipe
from duotone.sharding.dtensors import is_distributed
from duotone.state.autocast_context import HIGH_PRECISION, active_region
from duotone.state.rolling import roll_after
from duotone.state.torch_private import is_forward_grad_enabled
from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.quantizer import quantizer_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from duotone.sharding.activation_layout import ActivationLayout, LocalPieces


class TensorInfo(NamedTuple):
    """What is known about a tensor between two ops before anything runs.

    `width` is its last dimension and `rows` the product of the others; None if unknown. `quantizer` is that of a
    quantized tensor.
    """

    device: str
    dtype: torch.dtype
    width: int | None
    rows: int | None
    requires_grad: bool
    quantizer: Quantizer | None = None
    index: int = -1
    """The index of a CUDA device, -1 elsewhere."""

    layout: "ActivationLayout | None" = None
    """Set if the tensor is the local tensor of a DTensor."""

    @property
    def place(self) -> str:
        """The device with its number, as plans name it."""
        return self.device if self.index < 0 else f"{self.device}:{self.index}"


def is_autocast(device: str) -> bool:
    """Whether torch.autocast is active for a device; there is none for meta."""
    return device != "meta" and torch.is_autocast_enabled(device)


def refuse_distributed(owner: object) -> NoReturn:
    """UserError: this module takes no DTensor."""
    raise UserError(f"{title(owner)} takes local tensors; got a DTensor: pass its to_local()")


def info_of(x: object, owner: object = None, layout: "ActivationLayout | None" = None) -> TensorInfo:
    """The info of the first input. UserError unless `x` is a dense local tensor with a last dimension.

    `layout` describes the DTensor whose local tensor is `x`.
    """
    if isinstance(x, Tensor) and (x.is_nested or x.layout is not torch.strided):
        require_dense(title(owner), x)
    if not isinstance(x, Tensor) or x.dim() == 0:
        got = f"() in {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise UserError(f"{title(owner)} takes a tensor (*lead, width); got {got}")
    if type(x) is not Tensor and is_distributed(x):
        refuse_distributed(owner)
    device, dtype = x.device.type, x.dtype
    if dtype in CAST and device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    width = x.shape[-1]
    rows = x.numel() // width if width else x.shape[:-1].numel()
    quantizer = None
    if isinstance(x, QuantizedTensor) and dtype is x.dtype:  # casting a quantized tensor dequantizes it
        quantizer = quantizer_of(x)
    index = x.get_device() if device == "cuda" else -1
    return TensorInfo(device, dtype, width, rows, x.requires_grad and torch.is_grad_enabled(), quantizer, index, layout)


CAST = (torch.float32, torch.float16, torch.bfloat16)
"""What torch.autocast casts."""


def require_fit(owner: object, info: TensorInfo, weight: Tensor, bias: Tensor | None = None) -> None:
    """UserError unless an input like `info` can be multiplied by `weight` (out, width), and `bias` goes with it."""
    if weight.device.type != info.device:
        raise UserError(f"{title(owner)} is on {weight.device.type} and its input on {info.device}; move one of them")
    width = weight.shape[1]
    fits = info.width in (None, width)
    if fits and info.dtype is not weight.dtype:  # unless torch.autocast casts the weight
        fits = is_autocast(info.device) and info.dtype is torch.get_autocast_dtype(info.device)
    if not fits:
        raise UserError(
            f"{title(owner)} takes (..., {width}) in {weight.dtype}; "
            f"got (..., {info.width}) in {info.dtype}: cast or reshape the input"
        )
    # Kernels only see the address of a bias.
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device != weight.device):
        raise UserError(
            f"{title(owner)}: its bias is {tuple(bias.shape)} on {bias.device}; "
            f"its weight asks for ({weight.shape[0]},) on {weight.device}"
        )


class Op(Channels, KnownRoles):
    """Mixed in before an nn.Module. All ops link in order before anything runs. `link` refuses bad inputs."""

    takes_first_microbatch = True
    handle: Tensor | None = None
    """In a trace: by which ops find the module."""
    number = ""
    """The number that the handle holds."""
    _rewritten: "Rewritten"

    @property
    def pipeline(self) -> "tuple[Op, ...] | None":
        """The ops that stand for this module in a larger pipeline; None if its forward does more than them."""
        return (self,) if type(self).forward is Op.forward else None

    def link(
        self, info: TensorInfo, is_first_microbatch: bool | Tensor | None
    ) -> tuple[Stage, TensorInfo, *tuple[object, ...]]:
        """The stage for an input like `info`, and the info of its output. UserError if the input does not fit.

        Further values go to `operands`: parameters that are fetched once for a call.
        """
        raise NotImplementedError

    def output_layout(self, x: "ActivationLayout") -> "ActivationLayout":
        """How the output lies on a mesh if the input lies there like `x`. UserError if the op takes local tensors."""
        refuse_distributed(self)

    def accept(self, stage: Stage, info: TensorInfo, extra: Sequence[object]) -> Sequence[object]:
        """The `extra` inputs of this call in the form that the linked stage takes. UserError if one does not fit."""
        return extra

    def operands(
        self, stage: Stage, info: TensorInfo, extra: Sequence[object], *parameters: object
    ) -> Sequence[object]:
        """The operands of the linked stage: parameters, seeds and the accepted `extra` inputs of this call.

        Called when every op is linked and no error can follow. Only here may a seed advance.
        """
        return extra

    def __repr__(self) -> str:
        """Like torch's. An export to ONNX prints the model before it guards against errors, so it is refused here."""
        onnx, recipe = sys.modules.get("torch.onnx"), self._recipe_in_use
        if onnx is not None and onnx.is_in_onnx_export() and type(recipe) is not type(HIGH_PRECISION):
            raise UserError(
                f"ONNX has no casts of recipe {recipe.name}: call duotone.revert(model) before torch.onnx.export, or "
                "duotone.export for servers"
            )
        return super().__repr__()

    @property
    def _recipe_in_use(self) -> Recipe:
        """The recipe of a forward now."""
        region = active_region()
        recipe = region.recipe if region is not None else getattr(self, "recipe", HIGH_PRECISION)
        return recipe if recipe.evaluation is None or self.training else recipe.evaluation  # type: ignore[attr-defined]

    def _slow_forward(self, *inputs: object, **options: object) -> object:
        """The forward that nn.Module takes while torch.jit.trace records."""
        self.refuse_jit_trace(inputs)
        return super()._slow_forward(*inputs, **options)  # type: ignore[misc]

    def refuse_jit_trace(self, inputs: Sequence[object]) -> None:
        """UserError for what torch.jit.trace cannot record: products that are quantized or need gradients."""
        recipe = self._recipe_in_use
        tensors = itertools.chain(inputs, self.parameters())  # type: ignore[attr-defined]
        tracked = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
        if type(recipe) is not type(HIGH_PRECISION) or tracked:
            raise UserError(
                f"torch.jit.trace cannot record {type(self).__name__} under recipe {recipe.name}: trace within "
                "torch.no_grad() and duotone.autocast(enabled=False), call duotone.revert(model) before, or use "
                "torch.export or torch.compile"
            )

    def forward(self, x: Tensor, *extra: object, is_first_microbatch: bool | Tensor | None = None) -> Outputs:
        return run((self,), x, extra, is_first_microbatch, self)


NO_BACKWARD = Backward(())
"""For a trace, in which each row and run of stages has a backward of its own."""


def run(
    ops: Sequence[Op],
    x: Tensor,
    extra: Sequence[object],
    first: bool | Tensor | None,
    owner: object,
    layout: "ActivationLayout | None" = None,
) -> Any:
    """Link the ops and run them as one pipeline. `owner` is the module that remembers rewritten tuples.

    `layout` says how the DTensor lies on its mesh whose local tensor is `x`.
    """
    if type(x) is not Tensor and (type(x) is DeferredOutput or is_distributed(x)):
        return _special_run(x)(ops, x, extra, first, owner)
    info = info_of(x, owner, layout)
    x = x if info.dtype is x.dtype else x.to(info.dtype)
    count, linked, stages = 0, [], ()
    for op in ops:
        before = info
        stage, info, *parameters = op.link(before, first)
        linked.append((op, stage, before, parameters))
        stages += (stage,)
        count += op.extra_inputs
    if torch.compiler.is_dynamo_compiling():
        forward, backward, rolls, apply = stages, NO_BACKWARD, False, apply_in_graph
        how: Any = ops
        if is_transformed():  # a transform would not find the backward of PipelineFunction, and give zeros
            again = second_order(stages, owner.__dict__.get("module_name", ""))
            again.check()
            apply = again.transformed
    else:
        forward, backward, rolls = _rewritten(stages, ops, owner.__dict__, is_forward_grad_enabled())
        how, apply = backward, RUNNER.apply
        if are_transforms_active() or forward_ad._current_level >= 0:  # `is_transformed`, in less host time
            assert backward.again is not None
            backward.again.check()
            apply = backward.again.transformed
    accepted = _accepted(linked, extra, count) if count or extra else iter(())
    operands: list[object] = []
    for op, stage, before, parameters in linked:
        operands += op.operands(stage, before, next(accepted) if op.extra_inputs else (), *parameters)
    if info.device == "meta" or not torch.is_autocast_enabled(info.device):
        y = apply(forward, how, x, *operands)
    else:  # operands are cast already: torch.autocast must not cast inside of products and epilogues
        with torch.autocast(info.device, enabled=False):
            y = apply(forward, how, x, *operands)
    if backward.again is not None and backward.again.marks:
        y = y[0] if len(y) == 2 else y[:-1]
    if rolls and (output := y[0] if isinstance(y, tuple) else y).requires_grad:
        output.register_hook(roll_after)  # no gradient is delayed, so nothing else rolls the scales of forward
    return y


def _special_run(x: Tensor) -> Callable[..., Any]:
    """The function that runs a call whose input is deferred or a DTensor."""
    return x.reader.read if type(x) is DeferredOutput else _run_outside_of_graphs


def _run_outside_of_graphs(*arguments: Any) -> Any:
    if torch.compiler.is_dynamo_compiling() or "torch._dynamo" in sys.modules:
        from duotone.state.uncompiled import call_with_dtensors  # loads the compiler

        return call_with_dtensors(_run_sharded, *arguments)
    return _run_sharded(*arguments)


def _run_sharded(
    ops: Sequence[Op],
    x: "DTensor | LocalPieces",
    extra: Sequence[object],
    first: bool | Tensor | None,
    owner: object,
) -> "DTensor | LocalPieces":
    """`run` for a DTensor: the ops run one by one on local tensors."""
    from torch.distributed.tensor import Partial

    from duotone.sharding.activation_layout import (  # loads DTensor
        ActivationLayout,
        LocalPieces,
        from_local,
        placement_of,
        to_local,
    )

    name = getattr(owner, "module_name", "") or type(owner).__name__
    if extra:
        raise UserError(f"{name} takes further inputs as local tensors beside a local tensor: pass to_local() of each")
    for one in ops:
        if isinstance(x, LocalPieces):
            raise UserError(f"{name}: an op takes no output of pieces that lie on ranks; give it to_local() of them")
        layout = ActivationLayout(x.device_mesh, placement_of(x, f"the input of {name}"), tuple(x.shape))
        output = one.output_layout(layout)
        # If columns are cut into shards, gradients of a replicated input are summed where the input was replicated.
        cut = layout.dim is None and output.dim is not None
        local = to_local(x, Partial() if cut else layout.placement)
        if output.dim and layout.cuts_last and not output.cuts_last:  # to be scattered: (ranks * first dimension, ...)
            local = local.unflatten(output.dim, (x.device_mesh.size(), -1)).movedim(output.dim, 0).flatten(0, 1)
        y = run((one,), local, (), first, owner, layout)
        if layout.dim and not layout.cuts_last and output.cuts_last:  # gathered: (ranks * first dimension, ...)
            y = y.unflatten(0, (-1, layout.shape[0])).movedim(0, layout.dim).flatten(layout.dim, layout.dim + 1)
        x = LocalPieces(y, name) if output.of_pieces else from_local(y, output)
    return x


def _accepted(
    linked: Sequence[tuple[Op, Stage, TensorInfo, Sequence[object]]], extra: Sequence[object], count: int
) -> Iterator[Sequence[object]]:
    """The further inputs of each op in the form that its stage takes. UserError unless there are `count` in all."""
    if count != len(extra):
        raise UserError(f"{len(extra)} further inputs were given to ops that take {count}; pass one for each")
    at, accepted = 0, []
    for op, stage, info, _ in linked:
        if op.extra_inputs:
            accepted.append(op.accept(stage, info, extra[at : at + op.extra_inputs]))
            at += op.extra_inputs
    return iter(accepted)


class Rewritten(dict[tuple[object, ...], tuple[tuple[Stage, ...], Backward, bool]]):
    """Rewritten forms by tuple of stages. They belong to this process, so copies and pickles are empty."""

    def __reduce__(self) -> "tuple[type[Rewritten], tuple[()]]":
        return Rewritten, ()


REMEMBERED = 64
"""How many rewritten tuples of stages a module remembers. Forgotten plans leave some behind."""


@never_compiled  # Dynamo compiles parts of what it could not compile whole
def _rewritten(
    stages: tuple[Stage, ...], ops: Sequence[Op], owner: dict[str, Any], alone: bool
) -> tuple[tuple[Stage, ...], Backward, bool]:
    """The stages of forward, the backward, and whether nothing else rolls the delayed scales of forward."""
    cache: Rewritten = owner.setdefault("_rewritten", Rewritten())
    key = (RULES.version, alone, *stages)
    entry = cache.get(key)
    if entry is None:
        if len(cache) >= REMEMBERED:
            cache.clear()
        # Code behind a broken graph has stages of a trace.
        pairs = zip(ops, stages, strict=True)
        eager = [plain_stages(stage.row_part, [op.number])[0] if stage.has_owner else stage for op, stage in pairs]
        forward, backward = rewrite(tuple(eager))
        again = second_order(stages, owner.get("module_name", ""))
        rolls = any(stage.rolls_forward_alone for stage in stages)
        stores = any(basic.stores for stage in backward for basic in stage.basics)
        of_backward = Backward(backward, again, alone, stores=stores)
        entry = cache[key] = forward, of_backward._replace(bound=bindings_of(forward, of_backward)), rolls
    return entry
