"""What encode and decode refuse before anything else: inputs that are no dense matrix, scales that are none."""

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.formats import philox
from duotone.formats.parts import Parts


def check_values(name: str, scale: Tensor | None, amax: Tensor | None) -> None:
    """UserError where a given scale is not positive and finite, or an amax NaN or negative; those on a GPU are trusted,
    because to look at them would wait for it."""
    for what, given, least, allowed in (
        ("scale", scale, "positive and finite", lambda x: (x > 0) & torch.isfinite(x)),
        ("amax", amax, "at least 0", lambda x: x >= 0),
    ):
        if given is not None and given.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = given[~allowed(given)]
            if wrong.numel():
                raise UserError(f"{name} takes a {what} that is {least}; got {wrong[0].item():g}: correct it")


def require_parts(name: str, wanted: tuple[str, ...], parts: Parts) -> None:
    """UserError where a buffer of an encoded plane is missing."""
    for part in wanted:
        if part not in parts:
            raise UserError(f"parts of {name} without {part!r}; pass all that encode gave")


def require_dense(name: str, x: Tensor) -> None:
    """Raise UserError where `x` is nested, sparse or in a layout of a library; traced code sees no layout."""
    if torch.compiler.is_compiling():
        return
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise UserError(f"{name} takes dense tensors; got a {kind} one: make it dense first")


def check_matrix(name: str, x: Tensor, plane: str) -> None:
    """Raise UserError unless `x` is a dense matrix and `plane` the name of a plane."""
    if not isinstance(x, Tensor):
        raise UserError(f"{name} encodes a 2-D tensor; got {type(x).__name__}: make it one")
    require_dense(name, x)
    if x.dim() != 2:
        raise UserError(f"{name} encodes a 2-D tensor; got {x.dim()}-D: flatten it first")
    if plane not in philox.PLANES:
        raise UserError(f"plane {plane!r} is unknown; allowed are 'row' and 'col'")
