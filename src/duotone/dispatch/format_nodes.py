"""What a format does to a matrix, as one node of Dynamo's graph. AOTAutograd opens the node, so compilers fuse in it.

Dynamo interprets each line of Python slowly. Without the nodes, formats are half of the lines of a trace on a CPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from duotone.dispatch.stages import TRACED
from duotone.formats import Epilogue, Factors, Format, Parts, get, philox
from duotone.formats.elements import PLAIN, Stages
from duotone.graph_ops import define_op


def in_trace(fmt: Format) -> "Format | Node":
    """The format, or its node. A node names its format, so `get` has to find it. Code that is not ours has no node.

    No node for torch.export, whose programs show the stages. None in high precision: no op may return an alias.
    """
    is_node = bool(fmt.node_name) and fmt.epilogue is not Epilogue.HIGH_PRECISION
    return Node(fmt) if is_node and not torch.compiler._is_exporting_flag else fmt


class Node(NamedTuple):
    """A format in a trace: methods of `Format`, whose ops choose the stages themselves."""

    format: Format

    def encode(
        self,
        x: Tensor,
        *,
        scale: Tensor | None,
        amax: Tensor | None,
        seed: Tensor | int | None,
        plane: str,
        stages: Stages,
        propagate: bool,
    ) -> Parts:
        """As `Format.encode`. With an amax from outside it is encoded outside of the op."""
        fmt = self.format
        if amax is not None:
            return fmt.encode(x, amax=amax, seed=seed, plane=plane, stages=stages, propagate=propagate)
        seed = philox.as_seed(seed, x.device) if fmt.is_stochastic and seed is not None else None
        return _named(fmt, torch.ops.duotone.encode(x, fmt.node_name, plane, propagate, scale, seed))

    def decode(self, parts: Parts, dtype: torch.dtype, stages: Stages) -> Tensor:
        """`Format.decode`."""
        return torch.ops.duotone.decode(list(parts.values()), self.format.node_name, dtype)

    def factors(self, parts: Parts, stages: Stages, values: Tensor | None) -> Factors:
        """`Format.factors`. In a trace no kernel computes `values`."""
        results: list[Tensor] = torch.ops.duotone.factors(list(parts.values()), self.format.node_name)
        return Factors(results[0], results[1] if len(results) > 1 else None, abs(self.format.divisor))


def _stages(x: Tensor) -> Stages:
    """The stages of a format that a compiler opens."""
    return TRACED if x.device.type == "cpu" else PLAIN


def _format(name: str) -> Format:
    """The format of a node."""
    return get(name.partition("@")[0])


def _named(fmt: Format, parts: list[Tensor]) -> Parts:
    return dict(zip(fmt.part_names, parts, strict=True))


def _encode(
    x: Tensor, name: str, plane: str, propagate: bool, scale: Tensor | None, seed: Tensor | None
) -> list[Tensor]:
    stages = _stages(x)
    parts = _format(name).encode(x, scale=scale, seed=seed, plane=plane, stages=stages, propagate=propagate)
    return [*parts.values()]


def _decode(parts: list[Tensor], name: str, dtype: torch.dtype) -> Tensor:
    fmt = _format(name)
    return fmt.decode(_named(fmt, parts), dtype, _stages(parts[0]))


def _factors(parts: list[Tensor], name: str) -> list[Tensor]:
    """The values, then the epilogue scale if the format has one."""
    fmt = _format(name)
    result = fmt.factors(_named(fmt, parts), _stages(parts[0]))
    return [result.values] if result.epilogue_scale is None else [result.values, result.epilogue_scale]


define_op("encode(Tensor x, str name, str plane, bool propagate, Tensor? scale, Tensor? seed) -> Tensor[]", _encode)
define_op("decode(Tensor[] parts, str name, ScalarType dtype) -> Tensor", _decode)
define_op("factors(Tensor[] parts, str name) -> Tensor[]", _factors)
