"""export: a model as the files that inference servers read."""

import json
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from duotone.conversion.naming import require_masters, require_model
from duotone.dispatch.stages import uncompiled
from duotone.errors import UserError
from duotone.modules import LayerNormLinear
from duotone.serving.exported_weight import (
    ExportedWeight,
    ExportReport,
    ExportRow,
    fused_by_servers,
    share_global_scales,
)
from duotone.serving.folder import CONFIG, NOTES, Item, Note, as_path, write_folder
from duotone.serving.schemes import BF16, Scheme, get_scheme
from duotone.serving.selection import (
    Weights,
    refuse_arguments,
    refuse_model,
    refuse_shapes,
    scheme_of_recipe,
    selected_weights,
    unwrapped,
    warn_of_unknown_dtype,
    why_none,
)
from duotone.serving.stored_tensors import (
    ExportedExperts,
    PlainTensor,
    StoredNames,
    own_name,
    stored_name,
    stored_tensors,
)
from duotone.tensor.plane_tensor import plain

COMPILE_FROM = 1 << 28
"""With so many parameters, compiled casts on a CPU save more time than the compiler takes. It also takes 130 MiB."""


def export(  # noqa: PLR0913 (one argument for each option)
    model: nn.Module,
    path: str | Path,
    *,
    scheme: str | None = None,
    ignore: Sequence[str] = (),
    masters: Mapping[str, Tensor] | None = None,
    calibrate: Callable[[], object] | None = None,
    allow_requantize: bool = False,
    max_shard_bytes: int = 5 * 2**30,
    dtype: torch.dtype | None = None,
) -> ExportReport:
    """Write a model to a folder in the layout of compressed-tensors, which vLLM, SGLang and transformers read.

    - `scheme`: "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4", the last three also with "A16" for high
      precision in activations, or "BF16". None takes that of the recipe's weights.
    - Linears that the recipe keeps in high precision, output heads, and names that match a glob of `ignore` are bf16.
    - Planes that agree with the scheme are written as they are. Other weights are encoded from `masters`, by full
      parameter name, or from weights in high precision. Planes of another format are encoded a second time only with
      `allow_requantize`. The report has the errors.
    - The codes are those that training multiplied: a weight in high precision, or its master, is cast to `dtype` first.
      None stands for what a forward here would read: the dtype of torch.autocast around the call, else that of the
      weight. A warning appears for fp32, because no weight tells whether training cast it.
    - Linears that servers fuse share one NVFP4 global scale.
    - `calibrate` runs the model on real data, for the static scales of activations of "FP8" and "NVFP4".

    Only some rows of a weight are in memory at a time. An old folder is replaced at the end. If the process dies, the
    next export of the same values continues after the last whole shard. A UserError comes before anything is written.
    """
    options = ExportOptions(scheme, ignore, masters, calibrate, allow_requantize, max_shard_bytes, dtype)
    return write_export(model, path, options)


@dataclass(frozen=True)
class ExportOptions:
    """The arguments of `export`."""

    scheme: str | None = None
    ignore: Sequence[str] = ()
    masters: Mapping[str, Tensor] | None = None
    calibrate: Callable[[], object] | None = None
    allow_requantize: bool = False
    max_shard_bytes: int = 5 * 2**30
    dtype: torch.dtype | None = None


def write_export(
    model: nn.Module, path: str | Path, options: ExportOptions, names: StoredNames = own_name
) -> ExportReport:
    """`export`, in the layout of `names`."""
    path = as_path("export", path)
    require_model("export", model)
    model = unwrapped(model)
    refuse_model(model)
    scheme = scheme_of_recipe(model) if options.scheme is None else get_scheme(options.scheme)
    masters = {} if options.masters is None else options.masters
    ignore = (options.ignore,) if isinstance(options.ignore, str) else options.ignore
    require_masters(masters)
    if not isinstance(ignore, Collection) or not all(isinstance(pattern, str) for pattern in ignore):
        raise UserError(f"ignore is {ignore!r}; give a list of names or globs")
    weights = {} if scheme is None else selected_weights(model, scheme, ignore, masters, names, options.dtype)
    refuse_arguments(model, weights, masters, ignore, options.dtype)
    if not isinstance(options.max_shard_bytes, int | float) or not options.max_shard_bytes > 0:
        raise UserError(f"max_shard_bytes is {options.max_shard_bytes!r}; give a number above 0")
    if scheme is not None and not weights:
        raise UserError(f"no linear would be stored as {scheme.name}, {why_none(model)}")
    linears = {name: weight for name, weight in weights.items() if isinstance(weight, ExportedWeight)}
    for weight in weights.values():
        if isinstance(weight, ExportedExperts):
            weight.refuse(options.allow_requantize)
    refuse_shapes(weights)
    if scheme is not None and scheme.input_scale:
        modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in linears}
        amaxes = _calibrated(modules, options.calibrate, scheme.name)
        for name, linear in linears.items():
            linear.input_amax = amaxes[name]
    share_global_scales({linear.name: linear for linear in linears.values()})
    for linear in linears.values():
        linear.refuse_source(options.allow_requantize)
    items = list(_items(model, weights, names))
    ignored = _ignored(model, weights, items, names)
    warn_of_unknown_dtype(weights, options.dtype)
    _warn_of_mixes([linear.name for linear in linears.values()], ignored)
    config = _config(model, scheme, ignored)
    is_small = sum(parameter.numel() for parameter in model.parameters()) < COMPILE_FROM
    with uncompiled(is_small), _threads(1 if is_small else torch.get_num_threads()):
        total, notes = write_folder(
            path,
            items,
            options.max_shard_bytes,
            lambda notes: {CONFIG: json.dumps(config, indent=2), **_texts(model, notes)},
        )
    rows = tuple(ExportRow(*note[:4]) for note in notes)
    broken = [row.weight for row in rows if math.isnan(row.error)]
    broken += [item.name for item in items if isinstance(item, PlainTensor) and item.is_broken()]
    if broken:
        holds = f"and {len(broken) - 1} others hold" if len(broken) > 1 else "holds"
        why = "NaN, infinities or values near them, which may be stored as finite values"
        warnings.warn(f"{broken[0]} {holds} {why}; do not serve {path}", stacklevel=3)
    return ExportReport(BF16 if scheme is None else scheme.name, rows, total)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Limit torch to so many threads. More would wait for each other in short stages, for long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _calibrated(
    linears: Mapping[str, nn.Module], calibrate: Callable[[], object] | None, scheme: str
) -> dict[str, Tensor]:
    """The largest magnitude that each linear reads in a calibration, fp32 (1,), by its name.

    UserError without a calibration, and for a linear that did not run or read no finite value.
    """
    if not callable(calibrate):
        other = "NVFP4A16" if scheme == "NVFP4" else "FP8_DYNAMIC"
        remedy = f"give calibrate=lambda: model(batch), or export scheme {other}"
        raise UserError(f"scheme {scheme} stores the scales of activations; {remedy}")
    amaxes: dict[str, Tensor] = {}

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
        x = plain(inputs[0] if inputs else named["input" if "input" in named else "x"]).detach()
        amax = (module.normalised(x) if isinstance(module, LayerNormLinear) else x).abs().amax().float().reshape(1)
        amaxes[name] = torch.maximum(amaxes.get(name, amax), amax)

    with ExitStack() as hooks, torch.no_grad():
        for name, module in linears.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        calibrate()
    for name in linears:
        if name not in amaxes:
            raise UserError(f"{name} did not run while calibrate was called, so its activations have no scale")
        if not 0 < amaxes[name].item() < float("inf"):
            raise UserError(f"{name} read an amax of {amaxes[name].item()} while calibrate was called; give real data")
    return amaxes


def _texts(model: nn.Module, notes: Sequence[Note]) -> dict[str, str]:
    """The notes for `load`, and the generation config of a model that has one as those of transformers."""
    names = {note.weight: note.format for note in notes}
    table = {"version": 1, "formats": names, "amaxes": {note.weight: note.amax for note in notes if note.amax}}
    text = getattr(getattr(model, "generation_config", None), "to_json_string", None)
    return {NOTES: json.dumps(table, indent=1)} | ({"generation_config.json": str(text())} if callable(text) else {})


def _items(model: nn.Module, weights: Weights, names: StoredNames) -> Iterator[Item]:
    """What is stored, in the order of the state_dict. Tied tensors are stored once, delayed-scaling states never."""
    stored: set[int] = set()
    for name, tensor in stored_tensors(model).items():
        if id(tensor) not in stored:
            stored.add(id(tensor))
            yield weights.get(name) or PlainTensor(name, tensor, names)


def _config(model: nn.Module, scheme: Scheme | None, ignored: list[str]) -> dict[str, object]:
    """The config of the model, if it is one of transformers, and how its linears are quantized."""
    text = getattr(getattr(model, "config", None), "to_json_string", None)
    config: dict[str, object] = json.loads(str(text())) if callable(text) else {}
    dtypes = {PlainTensor("", parameter, own_name).dtype for parameter in model.parameters()}
    is_half = dtypes == {torch.float16}
    config |= {"architectures": [type(model).__name__], "dtype": "float16" if is_half else "bfloat16"}
    config.pop("quantization_config", None)
    if scheme is not None:
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": scheme.layout,
            "config_groups": {"group_0": scheme.group()},
            "ignore": ignored,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
    return config


def _warn_of_mixes(stored: Sequence[str], ignored: Sequence[str]) -> None:
    """Warn if linears that servers multiply as one matrix would be stored in two ways."""
    for group in fused_by_servers([*stored, *ignored]):
        high = sorted(set(group) & set(ignored))
        if high and len(high) < len(group):
            low = sorted(set(group) - set(high))
            warnings.warn(
                f"{' and '.join(low)} would be stored quantized and {' and '.join(high)} in bf16, but servers multiply "
                "them as one matrix and refuse such files; put all of them into ignore=",
                stacklevel=4,
            )


def _ignored(model: nn.Module, weights: Weights, items: Sequence[Item], names: StoredNames) -> list[str]:
    """Linears in high precision, tied ones too, and other modules of one matrix, such as routers.

    With the names of the files, which servers use, and those of the model, by which transformers looks for them.
    """
    kinds = {f"{name}.weight": type(module) for name, module in model.named_modules()}
    high = [name for name, kind in kinds.items() if issubclass(kind, nn.Linear) and name not in weights]
    for item in items:
        if isinstance(item, PlainTensor) and item.name.endswith(".weight") and item.tensor.dim() == 2:
            if not issubclass(kinds.get(item.name, nn.Linear), nn.Linear | nn.Embedding):
                high.append(item.name)
    both = *(stored_name(names, name) for name in high), *high
    return [name.removesuffix(".weight") for name in dict.fromkeys(both)]
