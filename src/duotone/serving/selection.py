"""Which weights of a model are stored quantized, and what cannot be exported."""

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from duotone import formats
from duotone.conversion.default_rules import adapters, heads, routers
from duotone.conversion.experts import PREFIX, holds_experts, linear_names
from duotone.conversion.naming import wrapped_by
from duotone.conversion.skipped import skipped_modules
from duotone.conversion.transposed import is_transposed
from duotone.errors import UserError
from duotone.formats import IDENTITY, Format
from duotone.modules.planned import Planned
from duotone.pipeline.op import CAST, info_of
from duotone.serving.exported_weight import ExportedWeight
from duotone.serving.schemes import Scheme, scheme_for
from duotone.serving.stored_tensors import ExportedExperts, StoredNames, stored_name
from duotone.serving.tensor_file import NAMES
from duotone.state.autocast_context import HIGH_PRECISION
from duotone.tensor import QuantizedTensor

Weights = dict[str, ExportedWeight | ExportedExperts]


def selected_weights(
    model: nn.Module,
    scheme: Scheme,
    ignore: Sequence[str],
    masters: Mapping[str, Tensor],
    names: StoredNames,
    dtype: torch.dtype | None,
) -> Weights:
    """The weights that are stored quantized, by the full name of the parameter.

    A weight in high precision is encoded from `dtype`. None stands for what a forward at the place of this call reads:
    the dtype of torch.autocast, else that of the weight.
    """
    others, outputs = {*skipped_modules(model), *routers(model)}, heads(model)
    weights: Weights = {}
    refused: dict[str, nn.Module] = {}
    for owner, module in model.named_modules():
        if owner in outputs or any(is_within(owner, pattern) for pattern in ignore):
            continue
        for name, fmt in _matrices(owner, module, refused):
            if fmt == IDENTITY or (fmt is None and isinstance(module, nn.Linear) and owner in others):
                continue
            if not owner:
                raise UserError(f"the model is one {type(module).__name__}, whose weight has no name; export its owner")
            parameter = model.get_parameter(name)
            encoder = scheme.format if fmt is None else _encoder(fmt, scheme)
            is_linear = parameter.dim() == 2
            stored = stored_name(names, name).removesuffix(".weight") if is_linear else name
            is_plain = not isinstance(parameter, QuantizedTensor)
            read = (dtype or info_of(parameter).dtype) if is_plain else None
            weight = ExportedWeight(stored, parameter, scheme, encoder, masters.get(name), dtype=read)
            weights[name] = weight if is_linear else ExportedExperts(weight, names)
            if is_linear and not isinstance(module, nn.Linear):
                refused[owner] = module
    _refuse_modules(refused)
    _refuse_ties(model, weights)
    return weights


def is_within(owner: str, pattern: str) -> bool:
    """Whether a glob matches the name of a module, or of one that contains it."""
    parts = owner.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def why_none(model: nn.Module) -> str:
    """Why no linear of a model is stored quantized, and what to do."""
    for name, why in skipped_modules(model).items():
        if isinstance(model.get_submodule(name), nn.Linear):
            return f"because linears such as {name} have a forward of their own ({why.text}); export BF16"
    remedy = "call duotone.convert(model, recipe) with another, or export BF16"
    return f"because the recipe or ignore= keeps all in high precision; {remedy}"


def _encoder(fmt: Format, scheme: Scheme) -> Format:
    """The format that encodes a weight which fprop reads in `fmt`: one with such planes if the scheme can store them.

    Its scales follow from the weight, and it rounds to nearest.
    """
    alike = (fmt, *map(formats.get, formats.names()))
    stored = (f for f in alike if f.stored == fmt.stored and not (f.is_delayed or f.is_stochastic))
    return next((f for f in stored if scheme.agrees(f)), scheme.format)


def _refuse_ties(model: nn.Module, weights: Weights) -> None:
    """UserError for a linear that would be quantized and shares its weight with what stays in high precision."""
    linears = {id(model.get_parameter(name)): name for name in weights}
    for other, parameter in model.named_parameters(remove_duplicate=False):
        name = linears.get(id(parameter), other)
        if name != other and other not in weights:
            owner = name.rpartition(".")[0]
            raise UserError(f"{name} is tied to {other}, which stays in bf16; ignore={[owner]!r} stores both so")


def _matrices(owner: str, module: nn.Module, refused: dict[str, nn.Module]) -> Iterator[tuple[str, Format | None]]:
    """The full names of the weights of a module, with the format that fprop reads; None if it follows no plan.

    `refused` gets modules whose weights have no such name.
    """
    if holds_experts(module):
        if any(part not in module._parameters for part in linear_names(module)):
            refused[owner] = module
            return
        for part in linear_names(module):
            yield f"{owner}.{part}", trained_format(module._modules.get(f"{PREFIX}{part}"))
    elif isinstance(module, nn.Linear) or is_transposed(module) or isinstance(module, Planned):
        fmt = trained_format(module)
        if "weight" in module._parameters:
            yield f"{owner}.weight".removeprefix("."), fmt
        elif fmt not in (None, IDENTITY) and "_owner" not in module.__dict__:  # experts have an owner
            refused[owner] = module


def _refuse_modules(modules: Mapping[str, nn.Module]) -> None:
    """UserError if there are any. It names the first, and globs for all."""
    if not modules:
        return
    owner, module = next(iter(modules.items()))
    others = f" and {len(modules) - 1} others hold" if len(modules) > 1 else " holds"
    raise UserError(
        f"{owner} ({type(module).__name__}){others} what no server reads as the weight of a linear; "
        f"ignore={_globs(modules, modules)!r} stores that in bf16"
    )


def refuse_shapes(weights: Weights) -> None:
    """UserError if there are shapes that the scheme cannot serve. It names the first, and globs for all."""
    owners = {name.rpartition(".")[0]: weight for name, weight in weights.items()}
    unfit = {owner: weight for owner, weight in owners.items() if weight.reason_unfit}
    if unfit:
        owner, weight = next(iter(unfit.items()))
        others = f", and {len(unfit) - 1} others are alike" if len(unfit) > 1 else ""
        raise UserError(
            f"{owner} cannot be served as {weight.scheme.name}: {weight.reason_unfit}{others}; "
            f"ignore={_globs(unfit, owners)!r}"
        )


def _globs(names: Collection[str], among: Collection[str]) -> list[str]:
    """Globs that match these names and no others of `among`; names that have no such glob."""
    globs: list[str] = []
    for name in names:
        glob = f"*.{name.rpartition('.')[2]}"
        alike = {other for other in among if fnmatchcase(other, glob)}
        globs.append(glob if name in alike and len(alike) > 1 and alike <= set(names) else name)
    return list(dict.fromkeys(globs))


def trained_format(module: nn.Module | None) -> Format | None:
    """The format in which fprop reads the weight; None if the module follows no plan and its weight has no planes."""
    if not isinstance(module, Planned | nn.Linear):
        return None
    weight = module.weight
    plane = weight.planes.rowwise if isinstance(weight, QuantizedTensor) else None
    if plane is None and isinstance(module, Planned):
        return module.plans.plan(module.recipe).weight.quantizer.rowwise
    return None if plane is None else plane.format


def scheme_of_recipe(model: nn.Module) -> Scheme | None:
    """The scheme of most weights; None if all are in high precision. UserError if no recipe says so."""
    for name, module in model.named_modules():
        if isinstance(module, Planned) and module.recipe is HIGH_PRECISION:
            raise UserError(
                f"{name or type(module).__name__} follows no recipe outside of autocast, so that scheme=None has no "
                'answer; give scheme=, as "BF16" for high precision'
            )
    read = [fmt for module in model.modules() if (fmt := trained_format(module)) is not None]
    if not read:
        text = "nothing in the model follows recipes, so all weights are stored in bf16; call duotone.convert before"
        warnings.warn(f'{text}, or give scheme=, "BF16" too', stacklevel=4)
    formats = [fmt for fmt in read if fmt is not IDENTITY]
    counts = Counter(fmt.name for fmt in formats)
    most = max(counts, key=lambda name: counts[name], default="")
    return next((scheme_for(fmt) for fmt in formats if fmt.name == most), None)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of wrappers, whose names servers do not know."""
    while (inside := wrapped_by(model)) is not None:
        model = inside
    return model


def refuse_model(model: nn.Module) -> None:
    """UserError for a model with adapters or wrapped parts, or with tensors that are sharded or on meta."""
    for name, module in model.named_modules():
        if wrapped_by(module) is not None:
            raise UserError(f"{name} is wrapped in {type(module).__name__}, whose names no server knows; unwrap it")
    for name in adapters(model):
        raise UserError(f"{name} is a low-rank adapter; merge the adapters into the model, then export it")
    for name, tensor in model.state_dict(keep_vars=True).items():
        if hasattr(tensor, "to_local") or (isinstance(tensor, Tensor) and tensor.is_meta):
            where = "on meta" if tensor.is_meta else "sharded"
            raise UserError(f"{name} is {where}; export a model whose tensors are whole, as on one rank")
        if isinstance(tensor, Tensor) and not isinstance(tensor, QuantizedTensor) and tensor.dtype not in NAMES:
            raise UserError(f"{name} is {tensor.dtype}, which safetensors does not store; give it another dtype")


def warn_of_unknown_dtype(weights: Weights, dtype: torch.dtype | None) -> None:
    """Warn if fp32 weights are encoded and no dtype was asked for: no model tells whether training cast them."""
    wide = [name for name, weight in weights.items() if weight.dtype is torch.float32]
    if wide and dtype is None:
        others = f" and {len(wide) - 1} others are" if len(wide) > 1 else " is"
        warnings.warn(
            f"{wide[0]}{others} encoded from fp32; if torch.autocast or FSDP cast weights in training, other codes "
            "were trained: give dtype=torch.bfloat16, else dtype=torch.float32",
            stacklevel=4,
        )


def refuse_arguments(
    model: nn.Module,
    weights: Weights,
    masters: Mapping[str, Tensor],
    ignore: Sequence[str],
    dtype: torch.dtype | None,
) -> None:
    """UserError for names that the model, or the export, does not have, and for a dtype that no weight is cast to."""
    if dtype not in (None, *CAST):
        raise UserError(f"dtype is {dtype!r}; give one of {', '.join(map(str, CAST))}, in which training read weights")
    unknown = set(masters) - weights.keys()
    if unknown:
        raise UserError(f"masters has {min(unknown)!r}, which is no weight that is exported quantized")
    names = [name for name, _ in model.named_modules()]
    for pattern in ignore:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"ignore has {pattern!r}, which matches no module of the model")
