"""Checks: attention's backward in Triton's interpreter, against the blocks of keys in plain torch."""

import itertools

import torch
from interpreted_attention import E4M3, some_masks, some_spans
from interpreting import Check

from duotone import formats
from duotone.attention import blockwise
from duotone.attention.blockwise import Blocks, attend
from duotone.attention.head_planes import TileOperand
from duotone.attention.low_precision import grouped
from duotone.dispatch.attention import sight
from duotone.formats import Format
from duotone.kernels import attention_backward
from duotone.kernels.attention_backward import BackwardOperands, Operand, Weights
from duotone.tensor.context import LOCAL, QuantizeContext, Slot
from duotone.tensor.quantizer import Quantizer

E5M2, HIGH = formats.get("fp8_e5m2_tensor"), None


class Fixed(Slot):
    """A delayed scale; it keeps the largest amax that it was told."""

    largest = 0.0

    def scale_for(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, x.abs().amax().item())
        return torch.full((1,), 64.0)


MIXES = {
    "the default": (E4M3, E4M3, E5M2, HIGH, HIGH),
    "all in high precision": (HIGH, HIGH, HIGH, HIGH, HIGH),
    "all in FP8": (E4M3, E4M3, E5M2, E5M2, E5M2),
    "dS in high precision": (E4M3, E4M3, E5M2, E5M2, HIGH),
    "P in FP8 alone": (E4M3, E4M3, HIGH, HIGH, HIGH),
}
"""Formats of query, key and value, of P, of the gradient over tokens and over the width, and of dS."""
DELAYED = "all in FP8, dS with a delayed scale"
MIXES[DELAYED] = MIXES["all in FP8"]

TILES = (64, 32, 4, 2), (64, 64, 4, 2)
BOUND, BOUND_BY_ROW = 3e-3, 0.08
"""Norm of what differs over that of the result. The kernel has a scale for each row of a tile of dS, if not delayed."""


def planes(x: torch.Tensor, fmt: Format | None, over_tokens: bool) -> tuple[Operand, torch.Tensor]:
    """A plane of heads (batch, tokens, heads, width) as the kernel reads it, and values (batch, groups, heads, ...)."""
    operand, values = Operand(x, None), x
    if fmt is not None:
        parts = fmt.encode(x.reshape(-1, x.shape[-1]))
        codes = parts["codes"].view(fmt.code_dtype).view(x.shape)
        operand, values = Operand(codes, parts["scale"]), codes.float() * parts["scale"]
        if over_tokens:
            operand = Operand(codes.permute(2, 3, 0, 1).contiguous(), parts["scale"])
    return operand, values


def checks(everything: bool) -> Check:
    """Whole and ragged blocks, groups of heads, mixes of formats."""
    sizes = [(70, 130, 2, True), (130, 70, 1, False)] + [(128, 128, 1, True), (200, 200, 2, True)] * everything
    cases = [(*each, None) for each in itertools.product(MIXES, sizes)]
    cases += [("the default", (200, 200, 2, False), seen) for seen in some_spans(200)]
    cases += [("all in FP8", (200, 190, 2, False), seen) for seen in some_masks(2, 4, 200, 190)]
    for name, (queries, keys, batch, causal), seen in cases:
        qkv, p, do_col, do_row, ds = MIXES[name]
        heads, groups, width = 4, 2, 64
        q, do = (torch.randn(batch, queries, heads, width) for _ in range(2))
        k, v = (torch.randn(batch, keys, groups, width) for _ in range(2))
        tensors = {
            "q_row": (q, qkv, False), "q_col": (q, qkv if ds else HIGH, True), "k_row": (k, qkv, False),
            "k_col": (k, qkv if ds else HIGH, True), "v_row": (v, qkv if do_row else HIGH, False),
            "do_row": (do, do_row, False), "do_col": (do, do_col, True),
        }  # fmt: skip
        both = {at: planes(*arguments) for at, arguments in tensors.items()}
        values = {at: x.permute(0, 2, 1, 3).unflatten(1, (groups, -1)) for at, (_, x) in both.items()}
        blocks = Blocks(width**-0.5, causal, 0.0, grouped(seen, groups), None, torch.float32)
        slot = Fixed()
        slots = (slot, slot) if name == DELAYED else (None, None)
        of_p, of_ds = (
            TileOperand(Quantizer(p, p), LOCAL, 1.0),
            TileOperand(Quantizer(ds, ds), QuantizeContext(slots=slots)),
        )
        out, lse = attend(values["q_row"], values["k_row"], values["v_row"], blocks, of_p, None)
        twin = blockwise.differentiate(blockwise.BackwardOperands(**values), out, lse, blocks, of_p, of_ds, None)
        saved = Operand(out.flatten(1, 2).transpose(1, 2).contiguous(), None)
        operands = BackwardOperands(**{at: operand for at, (operand, _) in both.items()}, out=saved)
        weights = Weights(p and p.code_dtype, ds and ds.code_dtype, None, slots[0] and torch.full((1,), 64.0))
        logs = lse.flatten(1, 2).squeeze(-1).contiguous()
        *kernel, peak = attention_backward.differentiate(
            operands, weights, logs, (width**-0.5, causal, True, torch.float32), *sight(seen, queries, keys), TILES
        )
        where = f"{name} {queries} {keys} {causal} {seen is not None}"
        for what, result, expected in zip(("dq", "dk", "dv"), kernel, twin, strict=True):
            expected = expected.flatten(1, 2).transpose(1, 2)
            error = ((result - expected).norm() / expected.norm()).item()
            by_row = ds is not None and name != DELAYED and what != "dv"
            yield f"{what} {where}: {error:.1e}", error < (BOUND_BY_ROW if by_row else BOUND)
        yield f"amax of dS {where}", abs(peak.item() - slot.largest) <= 1e-4 * slot.largest
