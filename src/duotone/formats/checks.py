"""What encode and decode refuse before anything else."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.formats import philox
from duotone.formats.geometry import ROW, TENSOR
from duotone.formats.parts import Parts

if TYPE_CHECKING:
    from duotone.formats.scaled_format import ScaledFormat


def check_values(name: str, scale: Tensor | None, amax: Tensor | None) -> None:
    """UserError for a scale that is not positive and finite, and for an amax that is NaN or negative.

    Values on a GPU are trusted, because to look at them would wait for the GPU.
    """
    cases: tuple[tuple[str, Tensor | None, str, Callable[[Tensor], Tensor]], ...] = (
        ("scale", scale, "positive and finite", lambda x: (x > 0) & torch.isfinite(x)),
        ("amax", amax, "at least 0", lambda x: x >= 0),
    )
    for what, values, least, allowed in cases:
        if values is not None and values.device.type == "cpu" and not torch.compiler.is_dynamo_compiling():
            wrong = values[~allowed(values)]
            if wrong.numel():
                raise UserError(f"{name} takes a {what} that is {least}; got {wrong[0].item():g}: correct it")


def require_parts(name: str, wanted: tuple[str, ...], parts: Parts) -> None:
    """UserError if a buffer of an encoded plane is missing."""
    for part in wanted:
        if part not in parts:
            raise UserError(f"parts of {name} without {part!r}; pass all that encode gave")


def check_sizes(fmt: "ScaledFormat", parts: Parts) -> None:
    """UserError unless the scales fit the codes."""
    codes = parts["codes"]
    if codes.dim() != 2:
        raise UserError(f"{fmt.name} decodes codes of a matrix; got {codes.dim()}-D codes: pass all that encode gave")
    for name, spec in fmt.parts(codes.shape[0], codes.shape[1] * fmt.element.codes_per_byte).items():
        part, dtype = parts[name], spec.dtype
        if part.shape != spec.shape or (dtype is not None and part.dtype.itemsize != dtype.itemsize):
            raise UserError(
                f"{fmt.name} takes {name!r} of shape {tuple(spec.shape)} in {dtype} for codes of shape "
                f"{tuple(codes.shape)}; got {tuple(part.shape)} in {part.dtype}: pass all that encode gave"
            )


def require_dense(name: str, x: Tensor) -> None:
    """UserError if `x` is nested, sparse or in a layout of a library. Traced code cannot see the layout."""
    if torch.compiler.is_dynamo_compiling():
        return
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise UserError(f"{name} takes dense tensors; got a {kind} one: make it dense first")


def check_matrix(name: str, x: Tensor, plane: str) -> None:
    """UserError unless `x` is a dense matrix and `plane` the name of a plane."""
    if not isinstance(x, Tensor):
        raise UserError(f"{name} encodes a 2-D tensor; got {type(x).__name__}: make it one")
    require_dense(name, x)
    if x.dim() != 2:
        raise UserError(f"{name} encodes a 2-D tensor; got {x.dim()}-D: flatten it first")
    if plane not in philox.PLANES:
        raise UserError(f"plane {plane!r} is unknown; allowed are 'row' and 'col'")


def check_request(
    fmt: "ScaledFormat", x: Tensor, plane: str, scale: Tensor | None, amax: Tensor | None, seed: Tensor | int | None
) -> None:
    """UserError for a matrix that no scaled format encodes, and for arguments that this one does not take."""
    name = fmt.name
    is_matrix = (
        isinstance(x, Tensor) and x.dim() == 2 and (torch.compiler.is_dynamo_compiling() or x.layout is torch.strided)
    )
    if not is_matrix or x.is_nested or plane not in philox.PLANES:
        check_matrix(name, x, plane)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UserError(f"{name} encodes bf16, fp16 and fp32; got {x.dtype}: cast it first")
    if fmt.is_stochastic and seed is None:
        raise UserError(f"{name} rounds stochastically and needs a seed; pass seed=<64-bit integer>")
    if scale is not None and amax is not None:
        raise UserError("scale and amax were both given; pass the one that decides")
    if scale is not None:
        if not fmt.rule.accepts_scale:
            raise UserError(f"{name} makes its own {fmt.rule.name} scales; omit scale=")
        _check_count(name, "scale", scale, fmt.parts(*x.shape)["scale"].shape)
    if amax is not None:
        if "amax" not in fmt.part_names and fmt.block not in (TENSOR, ROW):
            raise UserError(f"{name} takes the amax of each block itself; omit amax=")
        specs = fmt.parts(*x.shape)
        _check_count(name, "amax", amax, specs.get("amax", specs["scale"]).shape)


def _check_count(name: str, what: str, values: object, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor) or values.numel() != math.prod(shape):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise UserError(f"{name} takes {what} as a tensor of shape {shape} for this input; got {got}")
