"""In-place operations of torch on quantized tensors and their views: decode, compute, encode."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from duotone.errors import UserError
from duotone.formats import IDENTITY
from duotone.tensor.lost_updates import values_before, warn_if_lost
from duotone.tensor.plane import memory_of
from duotone.tensor.plane_tensor import Decodable, unshared, values_as
from duotone.tensor.writes import Writes, write_all

COLLECTIVES = "c10d"


def writes_arguments(func: OpOverload) -> bool:
    """Whether an operation writes into arguments. Schemas of torch's collectives do not say it, their names do."""
    return func._schema.is_mutable or (func.namespace == COLLECTIVES and func._schema.name.endswith("_"))


def written_arguments(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    """The arguments that the schema marks as written, lists flattened. A collective writes into the first one."""
    if func.namespace == COLLECTIVES:
        return tree_leaves(args[0])
    written: list[object] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += [*value] if isinstance(value, list | tuple) else [value]
    return written


NARROW = (torch.bfloat16, torch.float16)

AT_ONCE = 1 << 25
"""Elements of a list of tensors, such as an optimizer's, of which values in high precision exist at the same time."""


def run_in_place(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Run a writing operation on dequantized values and requantize every argument that it wrote.

    Values and operands are fp32, so that encoded values are rounded once. Random numbers are drawn in the nominal
    dtype, and Identity planes compute in it. Long lists of tensors are written in parts.
    """
    targets = written_arguments(func, args, kwargs)
    for target in targets:
        if isinstance(target, Decodable):
            target.require_writable()
            if func._schema.name.startswith("c10d::recv"):  # a second wait for the work would fail
                raise UserError("recv cannot write into a quantized tensor: receive a plain one, then copy_ it")
            if isinstance(target, Writes) and target.is_blank and func.namespace != COLLECTIVES:
                target.hold_high_precision()
    widens = torch.Tag.nondeterministic_seeded not in func.tags and func.namespace != COLLECTIVES
    result = None
    for part in _in_parts(func, args, kwargs):
        result = _run_part(func, part, kwargs, widens and all(map(_is_encoded, written_arguments(func, part, kwargs))))
    return result


def _is_encoded(x: object) -> bool:
    return isinstance(x, Decodable) and all(fmt != IDENTITY for fmt in x.whole.formats)


LISTS = "aten::_foreach", "aten::_fused", "aten::_amp_foreach"


def _in_parts(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, object]) -> Iterator[Sequence[object]]:
    """The arguments of an operation on lists, cut into lists of at most `AT_ONCE` elements or of one tensor.

    Tensors that are encoded and others are in different parts, since only the first compute in fp32. If one element of
    the lists writes memory that another one uses, each is a part, and reads what the parts before it wrote.
    """
    # A tensor in one dimension has a scalar for each element.
    lists = [bool(x) if type(x) in (list, tuple) else isinstance(x, Tensor) and x.dim() == 1 < x.numel() for x in args]
    others = [*kwargs.values(), *(value for value, is_list in zip(args, lists, strict=True) if not is_list)]
    is_shared = any(isinstance(each, Tensor) and each.numel() > 1 for each in others) or "out" in kwargs
    lengths = {len(value) for value, is_list in zip(args, lists, strict=True) if is_list}
    if not func._schema.name.startswith(LISTS) or is_shared or len(lengths) != 1:
        yield args
        return

    def at(places: list[int]) -> Sequence[object]:
        picked = (x[places] if isinstance(x, Tensor) else [x[i] for i in places] for x in compress(args, lists))
        return [next(picked) if is_list else value for value, is_list in zip(args, lists, strict=True)]

    single = [at([place]) for place in range(lengths.pop())]
    yield from single if _overlap(func, single, kwargs) else map(at, _groups(args[0]))


def _overlap(func: OpOverload, calls: Sequence[Sequence[object]], kwargs: Mapping[str, object]) -> bool:
    """Whether one of several calls writes memory that another one reads or writes."""
    uses: list[tuple[int, int, int, int, bool]] = []
    for call, args in enumerate(calls):
        written = {id(each) for each in written_arguments(func, args, kwargs)}
        uses += [(*memory, call, id(x) in written) for x in tree_leaves((args, kwargs)) for memory in _memory_of(x)]
    before: list[tuple[int, int, int, int, bool]] = []
    for storage, start, end, call, writes in sorted(uses):
        before = [each for each in before if each[0] == storage and each[2] > start]
        if any(of_call != call and (writes or wrote) for *_, of_call, wrote in before):
            return True
        before.append((storage, start, end, call, writes))
    return False


def _memory_of(x: object) -> Iterator[tuple[int, int, int]]:
    """The storages that hold a tensor, each with the first byte there and the byte after the last one."""
    for part in x.whole.parts if isinstance(x, Decodable) else [x]:
        if isinstance(part, Tensor) and part.layout is torch.strided and part.numel():
            yield memory_of(part)


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    for kind in (True, False):
        places, count = list[int](), 0
        for at, tensor in enumerate(tensors):
            if _is_encoded(tensor) is not kind:
                continue
            count += tensor.numel()
            if places and count > AT_ONCE:
                yield places
                places, count = [], tensor.numel()
            places.append(at)
        if places:
            yield places


def _run_part(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], widens: bool) -> object:
    targets = written_arguments(func, args, kwargs)

    def operand(value: object) -> object:
        if widens and isinstance(value, Tensor) and value.dtype in NARROW:
            return values_as(value, torch.float32) if isinstance(value, Decodable) else value.to(torch.float32)
        return unshared(value)

    looks = func.namespace != COLLECTIVES
    before = [values_before(target) if looks else None for target in targets if isinstance(target, Decodable)]
    plain_args, plain_kwargs = tree_map(operand, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for leaf in tree_leaves(result) if func.namespace == COLLECTIVES else ():
        if isinstance(leaf, torch.ScriptObject):
            work = cast("dist.Work | None", dist.Work.unbox(leaf))
            if work is not None:  # NCCL gives a null work for what is already on the stream of the caller
                work.wait()
    values = written_arguments(func, plain_args, plain_kwargs)
    pairs = zip(targets, values, strict=True)
    writes = [(t, value) for t, value in pairs if isinstance(t, Decodable) and isinstance(value, Tensor)]
    write_all(writes)
    for (target, value), first in zip(writes, before, strict=True):
        if first is not None:
            warn_if_lost(first, value, target.values(torch.float32))
    returned = {id(value): target for target, value in writes}

    def replaced(value: object) -> object:
        return returned.get(id(value), value)

    return tree_map(replaced, result)
