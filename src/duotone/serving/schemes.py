"""Schemes: how servers store and multiply a quantized linear, in the words of compressed-tensors."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from duotone import formats
from duotone.errors import UserError
from duotone.formats import Block, Format, Parts, PartSpec, ScaleCodec
from duotone.formats.elements import divide
from duotone.serving.tensor_file import TensorSpec

Arguments = dict[str, object]


class Name(NamedTuple):
    """The names of a linear's tensors in compressed-tensors, after the name of the module."""

    codes: str
    scale: str = "weight_scale"


PLAIN, PACKED = Name("weight"), Name("weight_packed")
GLOBAL, INPUT_GLOBAL, INPUT = "weight_global_scale", "input_global_scale", "input_scale"


@dataclass(frozen=True)
class Scheme:
    """A preset of compressed-tensors. `format_name` encodes its weights if no plane agrees with it.

    `input_scale` is the tensor of a static scale of activations, "" if the server finds all scales itself.
    """

    name: str
    layout: str
    format_name: str
    weights: tuple[tuple[str, object], ...]
    activations: tuple[tuple[str, object], ...] = ()
    input_scale: str = ""

    @property
    def format(self) -> Format:
        """The format that encodes a weight if no plane of it agrees."""
        return formats.get(self.format_name)

    @property
    def names(self) -> Name:
        """The names of codes and scales."""
        return PACKED if self.format.precision == 4 else PLAIN

    @property
    def has_global_scale(self) -> bool:
        """Whether a scale of the whole tensor stands above those of the blocks."""
        return self.format.scale_codec is ScaleCodec.TWO_LEVEL

    def agrees(self, fmt: Format) -> bool:
        """Whether the codes of a plane in `fmt` are codes of this scheme, under scales that it can express."""
        expected = self.format
        kind = (fmt.precision, fmt.code_dtype, fmt.scale_codec.family, fmt.transform)
        if kind != (expected.precision, expected.code_dtype, expected.scale_codec.family, expected.transform):
            return False
        if self.has_global_scale and fmt.parts(2, 2)["amax"].shape != (1,):
            return False
        stored = fmt.parts(2, 2)["scale"].entries
        sides = zip(_stored_block(expected), stored, strict=True)  # None covers everything
        return all(entry is None or (target is not None and entry % target == 0) for target, entry in sides)

    def reason_unfit(self, shape: tuple[int, int]) -> str:
        """Why a server cannot multiply by a weight (N, K) in this scheme, or ""."""
        cols = self.format.block.cols
        return f"its {shape[1]} columns are no multiple of {cols}" if cols and shape[1] % cols else ""

    def specs(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """The stored tensors of a linear with a weight (N, K), by the end of the name."""
        input_specs = {self.input_scale: TensorSpec((1,), torch.float32)} if self.input_scale else {}
        return self.weight_specs(shape) | input_specs

    def weight_specs(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """The stored tensors of the weight (N, K) alone."""
        parts = self.format.parts(*shape)
        specs = {
            self.names.codes: TensorSpec(parts["codes"].shape, self.format.code_dtype or torch.uint8),
            self.names.scale: TensorSpec(parts["scale"].shape, self.scale_dtype),
        }
        return specs | ({GLOBAL: TensorSpec((1,), torch.float32)} if self.has_global_scale else {})

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype in which scales are stored."""
        dtypes = {ScaleCodec.E8M0: torch.uint8, ScaleCodec.TWO_LEVEL: torch.float8_e4m3fn}
        return dtypes.get(self.format.scale_codec, torch.float32)

    def tensors(self, fmt: Format, parts: Parts, shape: tuple[int, int]) -> dict[str, Tensor]:
        """The parts of a plane in an agreeing format as this scheme stores them. No value changes."""
        specs, names = self.weight_specs(shape), self.names
        scale = _spread(parts["scale"], fmt.parts(*shape)["scale"], self.format, shape)
        tensors = {
            names.codes: parts["codes"].contiguous().view(specs[names.codes].dtype),
            names.scale: scale.contiguous().view(specs[names.scale].dtype).reshape(specs[names.scale].shape),
        }
        if self.has_global_scale:
            tensors[GLOBAL] = global_scale(parts["amax"], fmt)
        return tensors

    def activation_scale(self, amax: Tensor) -> Tensor:
        """The static scale of activations, fp32 (1,), for their amax."""
        return global_scale(amax, self.format) if self.has_global_scale else amax / self.format.largest

    def parts(self, fmt: Format, tensors: Mapping[str, Tensor], shape: tuple[int, int], amax: Tensor | None) -> Parts:
        """The inverse of `tensors`. ValueError if scales differ of which a plane in `fmt` has one.

        `amax` is exact; one that follows from a global scale may be an ulp off.
        """
        names = self.names
        parts = {
            "codes": tensors[names.codes].view(torch.uint8),
            "scale": self.scale_part(fmt, tensors[names.scale], shape),
        }
        if self.has_global_scale:
            parts["amax"] = global_scale(tensors[GLOBAL].float(), fmt) if amax is None else amax
        return parts

    def scale_part(self, fmt: Format, stored: Tensor, shape: tuple[int, int]) -> Tensor:
        """The scales of a plane in `fmt` from those that are stored. ValueError as in `parts`."""
        scale = stored.float() if self.scale_dtype is torch.float32 else stored.view(torch.uint8)
        spec = fmt.parts(*shape)["scale"]
        if scale.shape == spec.shape:
            return scale
        source, target = Block(*(entry or 0 for entry in spec.entries)), _stored_grid(self.format)
        first = scale.reshape(target.grid(*shape))
        for dim, count in enumerate(source.grid(*shape)):
            step = source[dim] // target[dim] if target[dim] else 0  # 0 if one scale covers all
            first = first.index_select(dim, torch.arange(count, device=scale.device) * step)
        part = first.reshape(spec.shape)
        spread = _spread(part, spec, self.format, shape).reshape(-1)
        if not torch.equal(spread.view(torch.uint8), scale.reshape(-1).view(torch.uint8)):  # NaN equals NaN
            raise ValueError(f"a block of {fmt.name} has several scales")
        return part

    def group(self) -> Arguments:
        """The group of a quantization_config, for all linears."""
        activations = DEFAULTS | dict(self.activations) if self.activations else None
        return {
            "targets": ["Linear"],
            "weights": DEFAULTS | dict(self.weights),
            "input_activations": activations,
            "output_activations": None,
            "format": self.layout,
        }


def global_scale(amax: Tensor, fmt: Format) -> Tensor:
    """The global scale of compressed-tensors: 2688 / amax, or 1536 / amax for 4-over-6; 1 if amax is 0."""
    return torch.where(amax == 0, 1.0, divide(fmt.scale_limits(torch.float32)[0], amax))


def _stored_block(fmt: Format) -> tuple[int | None, int | None]:
    return fmt.parts(2, 2)["scale"].entries


def _stored_grid(fmt: Format) -> Block:
    return Block(*(entry or 0 for entry in _stored_block(fmt)))


def _spread(scale: Tensor, spec: PartSpec, to: Format, shape: tuple[int, int]) -> Tensor:
    """A stored scale for each block of `to`. In the plane a scale covers at least such a block."""
    source, target = Block(*(entry or 0 for entry in spec.entries)), _stored_grid(to)
    picked = scale.reshape(source.grid(*shape))
    for dim, count in enumerate(target.grid(*shape)):
        first = torch.arange(count, device=scale.device) * (target[dim] or 1)
        picked = picked.index_select(dim, first // source[dim] if source[dim] else first * 0)
    return picked


DEFAULTS: Arguments = {
    "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "strategy": None, "block_structure": None,
    "dynamic": False, "actorder": None, "scale_dtype": None, "zp_dtype": None, "observer": None,
    "observer_kwargs": {},
}  # fmt: skip


def _fp8(strategy: str, **more: object) -> tuple[tuple[str, object], ...]:
    return tuple({"num_bits": 8, "strategy": strategy, **more}.items())


def _mx(bits: int, **more: object) -> tuple[tuple[str, object], ...]:
    scales = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    return tuple({"num_bits": bits, "strategy": "group", "group_size": 32, **scales, **more}.items())


def _nvfp4(**more: object) -> tuple[tuple[str, object], ...]:
    scales = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
    return tuple({"num_bits": 4, "strategy": "tensor_group", "group_size": 16, **scales, **more}.items())


_FLOAT, _NV = "float-quantized", "nvfp4-pack-quantized"
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("FP8", _FLOAT, "fp8_e4m3_tensor", _fp8("tensor"), _fp8("tensor", observer="static_minmax"), INPUT),
        Scheme("FP8_DYNAMIC", _FLOAT, "fp8_e4m3_row", _fp8("channel"), _fp8("token", dynamic=True)),
        Scheme(
            "FP8_BLOCK", _FLOAT, "fp8_e4m3_128x128_fp32",
            _fp8("block", block_structure=[128, 128]), _fp8("group", group_size=128, dynamic=True),
        ),
        Scheme("MXFP8", "mxfp8-quantized", "mxfp8_e4m3", _mx(8), _mx(8, dynamic=True)),
        Scheme("MXFP8A16", "mxfp8-quantized", "mxfp8_e4m3", _mx(8)),
        Scheme("MXFP4", "mxfp4-pack-quantized", "mxfp4", _mx(4), _mx(4, dynamic=True)),
        Scheme("MXFP4A16", "mxfp4-pack-quantized", "mxfp4", _mx(4)),
        Scheme("NVFP4", _NV, "nvfp4", _nvfp4(), _nvfp4(dynamic="local", observer="static_minmax"), INPUT_GLOBAL),
        Scheme("NVFP4A16", _NV, "nvfp4", _nvfp4()),
    )
}  # fmt: skip
BF16 = "BF16"
NEAREST = {"fp8_e5m2": "FP8_DYNAMIC", "fp8_e4m3": "FP8_BLOCK", "mxfp8": "MXFP8", "mxfp6": "MXFP8", "nvfp4": "NVFP4A16"}
"""Beginning of a format's name -> what to serve instead."""


def get_scheme(name: str) -> Scheme | None:
    """The scheme of that name; None for plain bf16. UserError for others, with the nearest name."""
    key = str(name).upper().replace("-", "_")
    if key in (BF16, *SCHEMES):
        return SCHEMES.get(key)
    names = (*SCHEMES, BF16)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5) or ["MXFP8" if "6" in key else "FP8_DYNAMIC"]
    raise UserError(f"scheme {name!r} cannot be served; the nearest is {near[0]}, and all are {', '.join(names)}")


def scheme_for(fmt: Format) -> Scheme:
    """The scheme with weights of a format, without static scales. UserError if none has, with the nearest."""
    for name in ("FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4A16"):
        if SCHEMES[name].agrees(fmt):
            return SCHEMES[name]
    near = next((scheme for start, scheme in NEAREST.items() if fmt.name.startswith(start)), BF16)
    raise UserError(f"no server reads weights in {fmt.name}; the nearest scheme is {near}: export(scheme={near!r})")


def scheme_of_group(group: Mapping[str, object]) -> Scheme:
    """The scheme that a group of a quantization_config describes. UserError for a scheme that is not in this file."""
    for scheme in SCHEMES.values():
        if _described(group) == _described(scheme.group()):
            return scheme
    raise UserError(f"a checkpoint of weights with {_words(group)} cannot be read; these can: {', '.join(SCHEMES)}")


def _words(group: Mapping[str, object]) -> str:
    sides = zip(("", "input_activations."), _described(group), strict=False)
    pairs = ((name + key, value) for name, side in sides if isinstance(side, Mapping) for key, value in side.items())
    return ", ".join(f"{key} {value}" for key, value in pairs if value is not None) or f"the group {group!r}"


def _described(group: Mapping[str, object]) -> list[object]:
    keys = ("num_bits", "type", "strategy", "group_size", "block_structure", "dynamic", "symmetric")
    sides = (group.get("weights"), group.get("input_activations")) if isinstance(group, Mapping) else (group,)
    return [{key: side.get(key) for key in keys} if isinstance(side, Mapping) else side for side in sides]
