"""One weight on its way into a file: its plane as it is, or a plane that is encoded for the scheme. And the report."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duotone.dispatch.stages import stages_for
from duotone.errors import UserError
from duotone.formats import Format
from duotone.serving.schemes import Scheme
from duotone.serving.tensor_file import TensorSpec
from duotone.tensor import Plane, QuantizedTensor
from duotone.tensor.plane_tensor import plain
from duotone.text import aligned


@dataclass(frozen=True)
class ExportRow:
    """One exported weight. `source` is "planes", "encoded" or "re-encoded".

    `error` is the relative error ||decoded - values|| / ||values||: 0 from planes.
    """

    weight: str
    format: str
    source: str
    error: float


@dataclass(frozen=True, repr=False)
class ExportReport:
    """The rows of an export, its scheme and the bytes of its tensors. `str(report)` is a table."""

    scheme: str
    rows: tuple[ExportRow, ...]
    bytes: int

    def __str__(self) -> str:
        cells = [(row.weight, row.format, row.source, f"{row.error:.3e}") for row in self.rows]
        return "\n".join(aligned([("weight", "format", "source", "error"), *cells], [False, False, False, True]))

    def __repr__(self) -> str:
        counts = Counter(row.source for row in self.rows)
        sources = ", ".join(f"{count} {source}" for source, count in counts.items())
        return (
            f"ExportReport({self.scheme}, {len(self.rows)} weights{': ' * bool(sources)}{sources}, {self.bytes} bytes)"
        )


@dataclass
class ExportedWeight:
    """The weight (N, K) of the linear `name`. `format` encodes it, if no plane is taken as it is.

    `amax` is the one that fused linears share, `input_amax` that of the activations.
    """

    name: str
    weight: Tensor
    scheme: Scheme
    format: Format
    master: Tensor | None = None
    amax: Tensor | None = None
    input_amax: Tensor | None = None
    is_rounded: bool = False
    """Whether the weight has the values of planes."""
    note: Callable[[ExportRow, Mapping[str, Tensor]], None] = field(default=lambda row, parts: None)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {f"{self.name}.{end}": spec for end, spec in self.scheme.specs(self.shape).items()}

    @property
    def plane(self) -> Plane | None:
        """The plane along K that the weight holds, if the scheme stores its codes."""
        if not isinstance(self.weight, QuantizedTensor) or self.weight.dim() != 2:
            return None
        row, col = self.weight.planes
        plane = row or (col and col.transposed())
        return plane if plane is not None and self.scheme.agrees(plane.format) else None

    @property
    def source(self) -> str:
        if self.plane is not None and self.amax is None:
            return "planes"
        is_rounded = self.is_rounded or isinstance(self.weight, QuantizedTensor)
        return "re-encoded" if is_rounded and self.master is None else "encoded"

    @property
    def values(self) -> Tensor:
        """The most precise values of the weight, (N, K)."""
        return plain(self.weight if self.master is None else self.master).detach()

    def global_amax(self) -> Tensor:
        """fp32 (1,) on the CPU: the amax of the plane, or of the values if there is none."""
        plane = self.plane
        return (self.values_amax() if plane is None else plane.parts["amax"]).cpu()

    def values_amax(self) -> Tensor:
        return self.values.abs().amax().float().reshape(1)

    def refuse_shape(self) -> None:
        """UserError for a shape that the scheme cannot serve."""
        unfit = self.scheme.reason_unfit(self.shape)
        if unfit:
            raise UserError(f"{self.name} cannot be served as {self.scheme.name}: {unfit}; ignore={[self.name]!r}")

    def refuse_source(self, allow_requantize: bool) -> None:
        """UserError for a master of another shape, and for a second rounding that is not allowed."""
        if self.master is not None and self.master.shape != self.weight.shape:
            shapes = tuple(self.master.shape), tuple(self.weight.shape)
            raise UserError(f"the master of {self.name} is {shapes[0]}, and its weight {shapes[1]}")
        if self.source == "re-encoded" and not allow_requantize:
            why = "shares its global scale with others" if self.plane is not None else f"holds {self.weight!r}"
            remedy = "give masters= (of the optimizer), or allow_requantize=True, which rounds a second time"
            raise UserError(f"{self.name} {why}, so {self.scheme.name} needs it encoded again; {remedy}")

    def tensors(self) -> dict[str, Tensor]:
        plane, source = self.plane, self.source
        if source == "planes":
            assert plane is not None
            fmt, parts, error = plane.format, plane.parts, 0.0
        else:
            values = self.values
            amax = None if self.amax is None else self.amax.to(values.device)
            fmt, parts = self.format, self.format.encode(values, amax=amax, stages=stages_for(values))
            error = _error(Plane(fmt, parts, self.shape).dequantize(torch.float32), values)
        self.note(ExportRow(self.name, fmt.name, source, error), parts)
        tensors = self.scheme.tensors(fmt, parts, self.shape)
        if self.input_amax is not None:
            tensors[self.scheme.input_scale] = self.scheme.activation_scale(self.input_amax)
        return {f"{self.name}.{end}": tensor for end, tensor in tensors.items()}


FUSED = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of linears of one module that servers multiply as one matrix, which has one global scale."""


def share_global_scales(weights: Mapping[str, ExportedWeight]) -> None:
    """Give linears that servers fuse one amax, unless their planes agree on one already."""
    groups: dict[tuple[str, int], list[ExportedWeight]] = defaultdict(list)
    for name, weight in weights.items():
        owner, _, child = name.rpartition(".")
        for kind, members in enumerate(FUSED):
            if child in members and weight.scheme.has_global_scale:
                groups[owner, kind].append(weight)
    for group in (group for group in groups.values() if len(group) > 1):
        amaxes = torch.cat([one.global_amax() for one in group])
        if any(one.plane is None for one in group) or bool((amaxes != amaxes[0]).any()):
            shared = torch.cat([one.values_amax().cpu() for one in group]).amax().reshape(1)
            for one in group:
                one.amax = shared


def _error(decoded: Tensor, values: Tensor) -> float:
    values = values.float()
    norm = torch.linalg.vector_norm(values)
    return (torch.linalg.vector_norm(decoded - values) / norm).item() if norm > 0 else 0.0
