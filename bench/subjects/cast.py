"""The subject `cast`: bytes per second of quantizers, next to a copy on the device."""

import torch
from torch import Tensor

from bench.timing.case import Candidate, Case, Settings, Shape, Subject, Work, written
from bench.timing.duel import clock_for
from duotone.errors import UserError
from duotone.recipes import QuantizerRole, Recipe
from duotone.state.delayed import DelayedState
from duotone.state.delayed_slot import DelayedSlot
from duotone.tensor import History, QuantizedTensor, Quantizer
from duotone.tensor.context import QuantizeContext

COPY = "copy"


def copied(x: Tensor) -> Work:
    """Its bytes are those read and those written."""
    out = torch.empty_like(x)
    return Work(lambda: out.copy_(x), amount=2 * x.nbytes)


def cast(quantizer: Quantizer, x: Tensor) -> Work:
    """Its bytes are those of the input and of the codes, once each; scales do not count."""
    state = DelayedState(2, History(first_scale_from_amax=False), x.device)  # casts as later steps do
    slots = DelayedSlot(state.number, 0), DelayedSlot(state.number, 1)
    ctx = QuantizeContext(slots=slots, seed=torch.ones(1, dtype=torch.int64, device=x.device))

    def call(alive: DelayedState = state) -> QuantizedTensor:
        """Holds the state, which slots only name."""
        del alive
        return quantizer.quantize(x, ctx=ctx)

    codes = code_bytes(call(), x)
    if not codes:
        raise UserError("nothing is cast: the planes are the tensor itself")
    return Work(call, amount=x.nbytes + codes)


def code_bytes(tensor: QuantizedTensor, x: Tensor) -> int:
    """Bytes of the codes of all planes; those that share memory count once, those of `x` not at all."""
    codes = [plane.parts["codes"] for plane in tensor.planes if plane is not None]
    sizes = {part.data_ptr(): part.nbytes for part in codes}
    sizes.pop(x.data_ptr(), None)
    return sum(sizes.values())


def quantizer_of(recipe: Recipe, tensor: str) -> Quantizer:
    """What the recipe gives a tensor of a linear."""
    return recipe(QuantizerRole("linear", tensor))


def candidates(settings: Settings, shape: Shape) -> list[Candidate]:
    x = torch.randn(*shape, device=settings.device, dtype=torch.bfloat16)
    planes = {"rowwise": {"columnwise": False}, "both planes": {}}
    return [
        Candidate(COPY, lambda: copied(x)),
        *(
            Candidate(
                f"{recipe.name}, {name}",
                lambda recipe=recipe, usage=usage: cast(quantizer_of(recipe, settings.tensor).with_usage(**usage), x),
            )
            for recipe in settings.recipes
            for name, usage in planes.items()
        ),
    ]


def cases(settings: Settings, shape: Shape) -> list[Case]:
    return [
        Case(
            f"cast of {settings.tensor}",
            written(shape),
            COPY,
            clock_for(settings.device),
            lambda: candidates(settings, shape),
            unit="GB/s",
            scale=1e-9,
        )
    ]


CAST = Subject(
    "cast",
    "Quantizers at work on a bf16 tensor of M rows and N columns, in bytes per second, next to a copy.",
    ("M", "N"),
    {"cuda": ((16384, 8192),), "cpu": ((512, 512),)},
    cases,
)
