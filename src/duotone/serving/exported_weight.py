"""One weight on its way into a file, as a plane that it holds or that is encoded for the scheme; and the report."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duotone.dispatch.stages import stages_for
from duotone.errors import UserError
from duotone.formats import Format, Parts
from duotone.serving.folder import Note
from duotone.serving.schemes import Scheme, global_scale
from duotone.serving.tensor_file import TensorSpec, split_rows
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
    """The weight (N, K) of the linear `name`. `format` encodes it, unless a plane of it is stored.

    `amax` is the amax that fused linears share, `input_amax` the amax of the activations.
    """

    name: str
    weight: Tensor
    scheme: Scheme
    format: Format
    master: Tensor | None = None
    amax: Tensor | None = None
    input_amax: Tensor | None = None
    dtype: torch.dtype | None = None
    """The dtype in which training encodes the weight. The values are cast to it first. None: they are as they are."""
    is_rounded: bool = False
    """Whether the weight has the values of planes."""
    notes: list[Note] = field(default_factory=list[Note])
    """What encoding the weight told. Experts of one parameter share the list."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """What is stored, by its full name."""
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
        """Where the codes come from: "planes", "encoded", or "re-encoded" if they were rounded before."""
        if self.plane is not None and self.amax is None:
            return "planes"
        is_rounded = self.is_rounded or isinstance(self.weight, QuantizedTensor)
        return "re-encoded" if is_rounded and self.master is None else "encoded"

    @property
    def values(self) -> Tensor:
        """The most precise values of the weight, (N, K)."""
        return plain(self.weight if self.master is None else self.master).detach()

    def values_amax(self) -> Tensor:
        """fp32 (1,) on the device of the values."""
        amaxes = [torch.stack(torch.aminmax(rows)).abs().amax().float() for rows in self.rows() if rows.numel()]
        return torch.stack(amaxes).amax().reshape(1)

    def rows(self) -> Iterator[Tensor]:
        """The values that are encoded, some rows at a time, with whole blocks of every format."""
        weight = self.weight if self.master is None else self.master
        return (plain(rows).to(dtype=self.dtype) for rows in split_rows(weight.detach(), 128))

    def sources(self) -> Iterator[object]:
        """Everything that decides the stored bytes."""
        yield self.scheme.name, self.format.name, self.source, self.dtype
        weight = self.weight if self.master is None else self.master
        parts = weight.parts if isinstance(weight, QuantizedTensor) else [weight]
        yield from (t for t in (self.amax, self.input_amax, *parts) if t is not None)

    @property
    def reason_unfit(self) -> str:
        """Why the scheme cannot serve the shape, or ""."""
        return self.scheme.reason_unfit(self.shape)

    def refuse_source(self, allow_requantize: bool) -> None:
        """UserError for a master of another shape, and for a second rounding that is not allowed."""
        if self.master is not None and self.master.shape != self.weight.shape:
            shapes = tuple(self.master.shape), tuple(self.weight.shape)
            raise UserError(f"the master of {self.name} is {shapes[0]}, and its weight {shapes[1]}")
        if self.source == "re-encoded" and not allow_requantize:
            why = "shares its global scale with others" if self.plane is not None else f"holds {self.weight!r}"
            remedy = "give masters= (of the optimizer), or allow_requantize=True, which rounds a second time"
            raise UserError(f"{self.name} {why}, so {self.scheme.name} needs it encoded again; {remedy}")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors by name, some rows at a time. At the end there is a note."""
        plane, source, error = self.plane, self.source, Error()
        if source == "planes":
            assert plane is not None
            pieces = iter([(plane.format, plane.parts, self.shape)])
        else:
            pieces = self._encoded(error)
        amax = None
        for at, (fmt, parts, shape) in enumerate(pieces):
            for end, tensor in self.scheme.tensors(fmt, parts, shape).items():
                if at == 0 or tensor.shape != (1,):  # a single element belongs to the whole weight
                    yield f"{self.name}.{end}", tensor
            amax = float(parts["amax"]).hex() if "amax" in parts else None
        if self.input_amax is not None:
            yield f"{self.name}.{self.scheme.input_scale}", self.scheme.activation_scale(self.input_amax)
        fmt = plane.format if plane is not None and source == "planes" else self.format
        self.notes.append(Note(self.name, fmt.name, source, error.relative, amax))

    def _encoded(self, error: "Error") -> Iterator[tuple[Format, Parts, tuple[int, int]]]:
        """The parts of planes, some rows at a time, under the scales of the whole weight."""
        whole = self.amax
        if self.format.spans(0) and whole is None:
            amaxes = [self.format.shared_amax(rows, 0, stages_for(rows)) for rows in self.rows()]
            whole = torch.stack([amax for amax in amaxes if amax is not None]).amax(0)
        for rows in self.rows():
            shared = None if whole is None else whole.to(rows.device)
            parts = self.format.encode(rows, amax=shared, stages=stages_for(rows))
            shape = rows.shape[0], rows.shape[1]
            error.add(Plane(self.format, parts, shape).dequantize(torch.float32), rows)
            yield self.format, parts, shape


@dataclass
class Error:
    """The norms of an error and of the values, summed over pieces of rows."""

    lost: float = 0.0
    norm: float = 0.0

    def add(self, decoded: Tensor, values: Tensor) -> None:
        """Count further rows: decoded values and original values."""
        values = values.float()
        self.lost = math.hypot(self.lost, torch.linalg.vector_norm(decoded - values).item())
        self.norm = math.hypot(self.norm, torch.linalg.vector_norm(values).item())

    @property
    def relative(self) -> float:
        """The norm of the error over that of the values."""
        return self.lost / self.norm if self.norm else 0.0  # NaN if a value is


FUSED = (
    *(("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("to_q", "to_k", "to_v")),
    *(("gate_proj", "up_proj"), ("w1", "w3")),
    ("q_a_proj", "kv_a_proj_with_mqa"),  # of DeepSeek
    *(("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),  # of Qwen 3.5
)
"""Names of linears of one module that servers multiply as one matrix, which has one global scale."""


def fused_by_servers(names: Iterable[str]) -> list[list[str]]:
    """The names of linears, without ".weight", of which servers multiply several as one matrix."""
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name in names:
        owner, _, child = name.rpartition(".")
        for kind, members in enumerate(FUSED):
            if child in members:
                groups[owner, kind].append(name)
    return [group for group in groups.values() if len(group) > 1]


def share_global_scales(weights: Mapping[str, ExportedWeight]) -> None:
    """Give linears that servers fuse one global scale, unless their planes agree on one already."""
    scaled = (name for name, weight in weights.items() if weight.scheme.has_global_scale)
    for group in ([weights[name] for name in group] for group in fused_by_servers(scaled)):
        planes = [one.plane for one in group]
        scales = {None if plane is None else float(global_scale(plane.parts["amax"], plane.format)) for plane in planes}
        if None not in scales and len(scales) == 1:
            continue
        shared = torch.cat([one.values_amax().cpu() for one in group]).amax().reshape(1)
        is_mixed = len({one.format.scale_limits(torch.float32)[0] for one in group}) > 1
        for one in group:
            one.amax, one.format = shared, one.scheme.format if is_mixed else one.format
