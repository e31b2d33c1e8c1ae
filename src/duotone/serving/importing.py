"""load: exported files as quantized tensors, alone or in a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from duotone import formats
from duotone.conversion.naming import require_model
from duotone.errors import RecipeError, UserError, path_errors
from duotone.formats import Format
from duotone.modules import delayed_states
from duotone.modules.planned import Planned
from duotone.modules.weights import replace, show_values
from duotone.serving.folder import CONFIG, NOTES, as_path, open_files, read_text
from duotone.serving.schemes import GLOBAL, Scheme, global_scale, scheme_of_group
from duotone.serving.stored_tensors import StoredNames, own_name, stored_tensors
from duotone.serving.tensor_file import TensorFile, TensorSpec
from duotone.tensor import Plane, Planes, QuantizedTensor, Quantizer
from duotone.tensor.plane_tensor import plain

OTHER_LAYOUT = ", or what duotone.integrations.transformers.export wrote: load of that module reads it"


class StoredLinear(NamedTuple):
    """A weight (N, K) that a checkpoint stores quantized: its scheme, the format that encoded it, its exact amax."""

    scheme: Scheme
    shape: tuple[int, int]
    format: Format
    amax: Tensor | None
    """None if the checkpoint does not contain it."""


class Checkpoint:
    """The open files of an export, or of another checkpoint of compressed-tensors in one of the schemes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path_errors("cannot load", path, "give a folder that duotone.export wrote, and that you may read"):
            self._open()

    def _open(self) -> None:
        path = self.path
        scheme = _scheme(read_text(path, CONFIG).get("quantization_config"), path)
        self.files = open_files(path)
        notes = read_text(path, NOTES) if (path / NOTES).exists() else {}
        if notes.get("version", 1) != 1:
            raise UserError(f"{path / NOTES} is of a newer Duotone; install that, or remove the file")
        self.linears: dict[str, StoredLinear] = {}
        stored: set[str] = set()
        if scheme is not None:
            scale = f".{scheme.names.scale}"
            names = [name.removesuffix(scale) for name in self.files if name.endswith(scale)]
            if not names:
                raise UserError(f"{path} stores no weight as {scheme.name}, which its {CONFIG} names; export again")
            self.linears = {name: self._linear(name, scheme, notes) for name in names}
            ends = *scheme.weight_specs((1, 128)), "input_scale", "input_global_scale"
            stored = {f"{name}.{end}" for name in names for end in ends}
        self.shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": one.shape for name, one in self.linears.items()}
        self.shapes |= {name: file.specs[name].shape for name, file in self.files.items() if name not in stored}

    def _linear(self, name: str, scheme: Scheme, notes: Mapping[str, object]) -> StoredLinear:
        """UserError unless the tensors of the linear are those of the scheme."""
        fmt, amax = self._format(name, scheme, notes)
        codes = self._spec(f"{name}.{scheme.names.codes}")
        rows, cols = codes.shape if len(codes.shape) == 2 else (0, 0)
        shape = (rows, cols * (2 if scheme.format.precision == 4 else 1))
        for end, spec in scheme.weight_specs(shape).items():
            stored = self._spec(f"{name}.{end}")
            is_float = spec.dtype == torch.float32 and stored.dtype.is_floating_point
            if stored.shape != spec.shape or not (stored.dtype == spec.dtype or is_float):
                raise UserError(
                    f"{name}.{end} of {self.path} is {stored.shape}, {stored.dtype}, not as {scheme.name} has it"
                )
        if fmt != scheme.format:
            try:
                scheme.scale_part(fmt, self._read(f"{name}.{scheme.names.scale}"), shape)
            except ValueError:
                raise self._wrong(name) from None
        return StoredLinear(scheme, shape, fmt, amax)

    def _wrong(self, linear: str) -> UserError:
        return UserError(f"{self.path / NOTES} describes {linear} wrongly; remove the file, or export again")

    def _format(self, linear: str, scheme: Scheme, notes: Mapping[str, object]) -> tuple[Format, Tensor | None]:
        """The format in which a weight was written, and its exact amax if the notes have it."""
        wrong = self._wrong(linear)
        names, amaxes = (notes.get(key, {}) for key in ("formats", "amaxes"))
        if not isinstance(names, dict) or not isinstance(amaxes, dict):
            raise wrong
        try:
            fmt = formats.get(names.get(linear, scheme.format_name))
            amax = torch.tensor([float.fromhex(amaxes[linear])]) if linear in amaxes else None
        except (RecipeError, TypeError, ValueError):
            raise wrong from None
        if amax is not None and scheme.has_global_scale:
            if not torch.equal(global_scale(amax, fmt), self._read(f"{linear}.{GLOBAL}").float()):
                raise wrong
        return fmt if scheme.agrees(fmt) else scheme.format, amax

    def _file(self, name: str) -> TensorFile:
        if name not in self.files:
            raise UserError(f"{self.path} lacks {name}; it is a checkpoint of another scheme than its {CONFIG} says")
        return self.files[name]

    def _spec(self, name: str) -> TensorSpec:
        return self._file(name).specs[name]

    def _read(self, name: str) -> Tensor:
        return self._file(name).read(name)

    def read(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """A tensor. If the scheme quantizes it, it is a quantized tensor of nominal dtype `dtype`."""
        linear = name.removesuffix(".weight")
        if linear not in self.linears:
            return self._read(name)
        scheme, shape, fmt, amax = self.linears[linear]
        tensors = {end: self._read(f"{linear}.{end}") for end in scheme.weight_specs(shape)}
        plane = Plane(fmt, scheme.parts(fmt, tensors, shape, amax), shape)
        return QuantizedTensor(Planes(plane, None), Quantizer(fmt, fmt), torch.Size(shape), dtype)


def load(path: str | Path, model: nn.Module | None = None) -> dict[str, Tensor] | nn.Module:
    """Read what `export` wrote: its tensors by name, or into `model`, which is returned.

    Weights of linears come back as quantized tensors with a rowwise plane. Their nominal dtype is bf16, or that of the
    model's parameter. If a quantized parameter had a columnwise plane, it gets one from the loaded values. Checkpoints
    of other programs in the same schemes load too. UserError, before anything changes, for a checkpoint of another
    model or scheme, and for files that are absent or damaged.
    """
    if model is None:
        checkpoint = Checkpoint(as_path("load", path))
        return {name: checkpoint.read(name) for name in checkpoint.shapes}
    return load_into(path, model, own_name)


def load_into(path: str | Path, model: nn.Module, names: StoredNames) -> nn.Module:
    """`load` into a model, from the layout of `names`."""
    checkpoint = Checkpoint(as_path("load", path))
    require_model("load", model)
    targets = [Target(name, tensor, names) for name, tensor in stored_tensors(model).items()]
    _refuse_other(checkpoint, targets)
    planned = [module for module in model.modules() if isinstance(module, Planned)]
    for module in planned:
        delayed_states.forget(module)  # their scales are of other weights, and would clip these
    with torch.no_grad():
        for target in targets:
            if target.is_in(checkpoint):
                _write(target.tensor, target.value(checkpoint))
    for module in planned:
        delayed_states.drop(module)
        module.forget_plans()
    for module in model.modules():
        if any(isinstance(parameter, QuantizedTensor) for parameter in module._parameters.values()):
            show_values(module)  # save_pretrained reads them, also of modules that follow no plan
    return model


@dataclass(frozen=True)
class Target:
    """A tensor of a model, and the layout of its files."""

    name: str
    tensor: Tensor
    names: StoredNames

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the stored pieces, by name."""
        pieces = self.names(self.name, torch.empty(self.tensor.shape, device="meta"))
        return {name: tuple(piece.shape) for name, piece in pieces.items()}

    def is_in(self, checkpoint: Checkpoint) -> bool:
        """Whether all pieces are stored."""
        return self.shapes.keys() <= checkpoint.shapes.keys()

    def value(self, checkpoint: Checkpoint) -> Tensor:
        """The stored tensor, joined from its pieces if they have another layout."""
        small = torch.arange(2 ** self.tensor.dim()).view((2,) * self.tensor.dim())
        alike = self.names(self.name, small)
        name, first = next(iter(alike.items()))
        if len(alike) == 1 and torch.equal(first, small):
            return checkpoint.read(name, self.tensor.dtype)
        places = torch.arange(self.tensor.numel()).view(self.tensor.shape)
        value = torch.empty(self.tensor.shape, dtype=self.tensor.dtype)
        for name, place in self.names(self.name, places).items():
            value.view(-1)[place.reshape(-1)] = plain(checkpoint.read(name, value.dtype)).to(value.dtype).reshape(-1)
        return value


def _refuse_other(checkpoint: Checkpoint, targets: Sequence[Target]) -> None:
    """UserError unless the checkpoint has each tensor of the model, or one that it is tied to, and no other."""
    path, shapes = checkpoint.path, checkpoint.shapes
    stored = {id(target.tensor) for target in targets if target.is_in(checkpoint)}
    places = {name: (target, shape) for target in targets for name, shape in target.shapes.items()}
    for name, (target, shape) in places.items():
        if name not in shapes and id(target.tensor) not in stored:
            other = OTHER_LAYOUT if target.names is own_name else ""
            raise UserError(f"{path} has no {name}; it is a checkpoint of another model{other}")
        if name in shapes and shape != tuple(shapes[name]):
            both = f"{tuple(shapes[name])} in {path} and {shape} in the model"
            raise UserError(f"{name} is {both}; load it into the model that was exported")
    for name in shapes.keys() - places.keys():
        raise UserError(f"{path} has {name}, which the model has not; it is a checkpoint of another model")
    firsts: dict[int, Target] = {}
    for target in (target for target in targets if target.is_in(checkpoint)):
        first = firsts.setdefault(id(target.tensor), target)
        if first is not target and not torch.equal(plain(first.value(checkpoint)), plain(target.value(checkpoint))):
            raise UserError(f"{path} has other values for {target.name} than for {first.name}; untie them in the model")


def _write(target: Tensor, value: Tensor) -> None:
    if isinstance(value, QuantizedTensor) or target.is_meta:
        device = torch.device("cpu") if target.is_meta else target.device
        value = (value if isinstance(value, QuantizedTensor) else value.to(target.dtype)).to(device)
        if isinstance(value, QuantizedTensor) and isinstance(target, QuantizedTensor):
            value.quantizer = Quantizer(value.quantizer.rowwise, target.quantizer.columnwise)
            value.materialize_usage(columnwise=target.get_usages()["columnwise"], allow_requantize=True)
        replace(target, nn.Parameter(value, requires_grad=target.requires_grad))
    else:
        target.copy_(value)


def _scheme(config: object, path: Path) -> Scheme | None:
    """The scheme of a quantization_config. None without one."""
    if config is None:
        return None
    groups = config.get("config_groups") if isinstance(config, dict) else None
    method = config.get("quant_method") if isinstance(config, dict) else config
    if method != "compressed-tensors" or not isinstance(groups, dict) or len(groups) != 1:
        raise UserError(f"{path} is quantized by {method!r}; load reads compressed-tensors with one group of linears")
    return scheme_of_group(next(iter(groups.values())))
