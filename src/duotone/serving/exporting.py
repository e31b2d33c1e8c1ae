"""export: a model as the files that inference servers read."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from duotone.conversion.default_rules import adapters, heads
from duotone.conversion.experts import holds_experts
from duotone.conversion.left_alone import left_alone
from duotone.conversion.naming import require_model
from duotone.conversion.transposed import is_transposed
from duotone.errors import UserError
from duotone.formats import IDENTITY, Format
from duotone.planned.planned import Planned
from duotone.serving.export_report import ExportReport, ExportRow
from duotone.serving.exported_weight import ExportedWeight, share_global_scales
from duotone.serving.folder import CONFIG, NOTES, Item, write_folder
from duotone.serving.input_amaxes import calibrated
from duotone.serving.schemes import BF16, Scheme, get_scheme, scheme_for
from duotone.serving.tensor_file import TensorSpec
from duotone.state.delayed import DelayedState
from duotone.tensor import QuantizedTensor
from duotone.tensor.plane_tensor import plain


def export(
    model: nn.Module,
    path: str | Path,
    *,
    scheme: str | None = None,
    ignore: Sequence[str] = (),
    masters: Mapping[str, Tensor] | None = None,
    calibrate: Callable[[], object] | None = None,
    allow_requantize: bool = False,
    max_shard_bytes: int = 5 * 2**30,
) -> ExportReport:
    """Write a model to a folder in the layout of compressed-tensors, which vLLM, SGLang and transformers read.

    - `scheme`: "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4", the last three also with "A16" for high
      precision in activations, or "BF16". None takes that of the recipe's weights.
    - Linears that the recipe keeps in high precision, output heads, and names that match a glob of `ignore` are bf16.
    - Planes that agree with the scheme are written as they are. Other weights are encoded from `masters`, by full
      parameter name, or from weights in high precision. Planes of another format are encoded a second time only with
      `allow_requantize`. The report has the errors.
    - Linears that servers fuse share one NVFP4 global scale.
    - `calibrate` runs the model on real data, for the static scales of activations of "FP8" and "NVFP4".

    One weight is in memory at a time, and an old folder is replaced at the end. UserError before anything is written.
    """
    require_model("export", model)
    masters = masters or {}
    chosen = _scheme_of(model) if scheme is None else get_scheme(scheme)
    weights = {} if chosen is None else _weights(model, chosen, ignore, masters)
    _refuse(model, weights, masters, ignore)
    if chosen is not None and chosen.input_scale:
        modules = dict(model.named_modules())
        amaxes = calibrated({name: modules[name] for name in weights}, calibrate, chosen.name)
        for name, weight in weights.items():
            weight.input_amax = amaxes[name]
    share_global_scales(weights)
    for weight in weights.values():
        weight.refuse(allow_requantize)
    rows: list[ExportRow] = []
    amaxes = {}

    def note(row: ExportRow, parts: Mapping[str, Tensor]) -> None:
        rows.append(row)
        if "amax" in parts:
            amaxes[row.weight] = float(parts["amax"]).hex()

    for weight in weights.values():
        weight.note = note
    config = _config(model, chosen, weights)

    def texts() -> dict[str, str]:
        notes = {"version": 1, "formats": {row.weight: row.format for row in rows}, "amaxes": amaxes}
        return {CONFIG: json.dumps(config, indent=2), NOTES: json.dumps(notes, indent=1)} | _generation(model)

    total = write_folder(Path(path), list(_items(model, weights)), max_shard_bytes, texts)
    return ExportReport(BF16 if chosen is None else chosen.name, tuple(rows), total)


@dataclass(frozen=True)
class PlainTensor:
    """A tensor in high precision, or one of integers. Parameters in fp32 become bf16."""

    name: str
    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        is_fp32 = isinstance(self.tensor, nn.Parameter) and self.tensor.dtype == torch.float32
        return torch.bfloat16 if is_fp32 else self.tensor.dtype

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {self.name: TensorSpec(tuple(self.tensor.shape), self.dtype)}

    def tensors(self) -> dict[str, Tensor]:
        return {self.name: plain(self.tensor.detach()).to(self.dtype)}


def _items(model: nn.Module, weights: Mapping[str, ExportedWeight]) -> Iterator[Item]:
    """What is stored, in the order of the state_dict. Tied tensors are stored once, delayed-scaling states never."""
    states = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, DelayedState))
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or name.startswith(states) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        weight = weights.get(name.removesuffix(".weight"))
        yield weight if weight is not None and name.endswith(".weight") else PlainTensor(name, tensor)


def _weights(
    model: nn.Module, scheme: Scheme, ignore: Sequence[str], masters: Mapping[str, Tensor]
) -> dict[str, ExportedWeight]:
    """The weights that are stored quantized, by the name of their linear."""
    excluded = {*left_alone(model), *heads(model)}
    weights = {}
    for name, module in model.named_modules():
        fmt = _trained_format(module)
        if fmt == IDENTITY or any(fnmatchcase(name, pattern) for pattern in ignore):
            continue
        if not isinstance(module, nn.Linear) or "weight" not in module._parameters:
            if isinstance(module, Planned) or is_transposed(module) or holds_experts(module):
                owner = module.__dict__.get("_owner", module)  # of experts
                raise UserError(
                    f"{name} ({type(owner).__name__}) holds what no server reads as the weight of a linear; "
                    f"ignore={[name]!r} stores it in bf16"
                )
        elif fmt is not None or name not in excluded:
            usual = fmt is not None and scheme.agrees(fmt) and not fmt.is_delayed and not fmt.is_stochastic
            encoder = fmt if usual and fmt is not None else scheme.format
            weights[name] = ExportedWeight(name, module.weight, scheme, encoder, masters.get(f"{name}.weight"))
    return weights


def _trained_format(module: nn.Module) -> Format | None:
    """The format in which fprop reads the weight; None if the module follows no plan."""
    if not isinstance(module, Planned):
        return None
    weight = module.weight
    plane = weight.planes.rowwise if isinstance(weight, QuantizedTensor) else None
    return module.plans.plan(module.recipe).weight.quantizer.rowwise if plane is None else plane.format


def _scheme_of(model: nn.Module) -> Scheme | None:
    """The scheme of most linears' weights."""
    formats = [_trained_format(m) for m in model.modules() if isinstance(m, nn.Linear) and isinstance(m, Planned)]
    counts = Counter(fmt.name for fmt in formats if fmt is not None and fmt != IDENTITY)
    most = max(counts, key=lambda name: counts[name], default="")
    return next((scheme_for(fmt) for fmt in formats if fmt is not None and fmt.name == most), None)


def _refuse(
    model: nn.Module, weights: Mapping[str, ExportedWeight], masters: Mapping[str, Tensor], ignore: Sequence[str]
) -> None:
    """UserError for models and arguments that cannot be exported."""
    for name in adapters(model):
        raise UserError(f"{name} is a low-rank adapter; merge the adapters into the model, then export it")
    for name, tensor in model.state_dict(keep_vars=True).items():
        if hasattr(tensor, "to_local") or (isinstance(tensor, Tensor) and tensor.is_meta):
            where = "on meta" if tensor.is_meta else "sharded"
            raise UserError(f"{name} is {where}; export a model whose tensors are whole, as on one rank")
    unknown = set(masters) - {f"{name}.weight" for name in weights}
    if unknown:
        raise UserError(f"masters has {min(unknown)!r}, which is no weight that is exported quantized")
    names = [name for name, _ in model.named_modules()]
    for pattern in ignore:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"ignore has {pattern!r}, which matches no module of the model")


def _config(model: nn.Module, scheme: Scheme | None, weights: Mapping[str, ExportedWeight]) -> dict[str, object]:
    """The config of the model, if it has one as those of transformers, and how its linears are quantized."""
    text = getattr(getattr(model, "config", None), "to_json_string", None)
    config: dict[str, object] = json.loads(str(text())) if callable(text) else {}
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    config.pop("quantization_config", None)
    if scheme is not None:
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": scheme.layout,
            "config_groups": {"group_0": scheme.group()},
            "ignore": [name for name in linears if name not in weights],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
    return config


def _generation(model: nn.Module) -> dict[str, str]:
    text = getattr(getattr(model, "generation_config", None), "to_json_string", None)
    return {"generation_config.json": str(text())} if callable(text) else {}
