"""What a file stores for a tensor of a model: itself under its name, or pieces with the names of another layout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.modules.delayed_checkpoint import state_names
from duotone.serving.exported_weight import ExportedWeight, share_global_scales
from duotone.serving.folder import Note
from duotone.serving.schemes import Scheme
from duotone.serving.tensor_file import TensorSpec, split_rows
from duotone.tensor import QuantizedTensor
from duotone.tensor.plane_tensor import plain

StoredNames = Callable[[str, Tensor], Mapping[str, Tensor]]
"""The full name of a tensor, and the tensor, which may be on meta -> its pieces by the names that files give them."""


SPLITS = ", and duotone.integrations.transformers.export splits experts that the published layout splits"


def own_name(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """The layout of the model itself."""
    return {name: tensor}


def stored_name(names: StoredNames, name: str) -> str:
    """The name under which a matrix is stored."""
    return next(iter(names(name, torch.empty(2, 2, device="meta"))))


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a state_dict, without the states of delayed scaling. Parameters are the objects themselves."""
    states, tensors = state_names(model), model.state_dict(keep_vars=True)
    return {name: t for name, t in tensors.items() if isinstance(t, Tensor) and name not in states}


@dataclass(frozen=True)
class PlainTensor:
    """A tensor in high precision, or one of integers. Parameters in fp32 become bf16."""

    name: str
    tensor: Tensor
    names: StoredNames
    notes: Sequence[Note] = ()

    @property
    def dtype(self) -> torch.dtype:
        """bf16 for a parameter in fp32, else the dtype of the tensor."""
        is_fp32 = isinstance(self.tensor, nn.Parameter) and self.tensor.dtype == torch.float32
        return torch.bfloat16 if is_fp32 else self.tensor.dtype

    @property
    def specs(self) -> dict[str, TensorSpec]:
        pieces = self.names(self.name, torch.empty(self.tensor.shape, dtype=self.dtype, device="meta"))
        return {name: TensorSpec.of(piece) for name, piece in pieces.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        tensor = self.tensor.detach()
        for name, piece in self.names(self.name, tensor if tensor.dim() == 2 else plain(tensor)).items():
            yield from ((name, plain(rows).to(self.dtype)) for rows in split_rows(piece, 128))

    def is_broken(self) -> bool:
        """Whether a parameter is stored with NaN or infinities. Masks and other buffers may hold them."""
        if not isinstance(self.tensor, nn.Parameter) or not self.dtype.is_floating_point:
            return False
        wide = torch.float32 if self.dtype.itemsize == 1 else self.dtype  # torch tests not all FP8 dtypes
        return not all(bool(rows.to(wide).isfinite().all()) for _, rows in self.tensors())

    def sources(self) -> Iterator[object]:
        yield from self.tensor.parts if isinstance(self.tensor, QuantizedTensor) else [self.tensor]


@dataclass(frozen=True)
class ExportedExperts:
    """The linears of experts, which one parameter (E, ...) holds. `like` describes the parameter as a whole."""

    like: ExportedWeight
    names: StoredNames

    @property
    def specs(self) -> dict[str, TensorSpec]:
        pieces = self._pieces(torch.empty(self.like.weight.shape, device="meta"))
        return {name: spec for piece in pieces.values() for name, spec in piece.specs.items()}

    def refuse(self, allow_requantize: bool) -> None:
        """UserError if the experts cannot be exported in the scheme."""
        like = self.like
        if like.scheme.input_scale:
            raise UserError(f"{like.name} is of experts, whose inputs have no static scale; choose another scheme")
        like.refuse_source(allow_requantize)

    @property
    def scheme(self) -> Scheme:
        """The scheme in which the linears are stored."""
        return self.like.scheme

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which training encodes the linears."""
        return self.like.dtype

    @property
    def reason_unfit(self) -> str:
        """Why the scheme cannot serve the shape of some linear, or ""."""
        pieces = self._pieces(torch.empty(self.like.weight.shape, device="meta")).values()
        return next(filter(None, (piece.reason_unfit for piece in pieces)), "")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        pieces = self._pieces(self.like.values)
        share_global_scales(pieces)
        for piece in pieces.values():
            yield from piece.tensors()

    def sources(self) -> Iterator[object]:
        return self.like.sources()

    @property
    def notes(self) -> Sequence[Note]:
        return self.like.notes

    def _pieces(self, values: Tensor) -> dict[str, ExportedWeight]:
        """Each linear by its name."""
        like, pieces = self.like, self.names(self.like.name, values)
        for name, piece in pieces.items():
            if piece.dim() != 2 or not name.endswith(".weight"):
                owner = like.name.rpartition(".")[0]
                remedy = "" if self.names is not own_name else SPLITS
                raise UserError(
                    f"{like.name} holds what no server reads as weights of linears; ignore={[owner]!r} stores it in "
                    f"bf16{remedy}"
                )
        whole = replace(like, master=None, is_rounded=like.source == "re-encoded")
        linears = {name.removesuffix(".weight"): piece for name, piece in pieces.items()}
        return {name: replace(whole, name=name, weight=piece) for name, piece in linears.items()}
