"""Which weights are worth a native product: the least K x N from which a linear is faster than in bf16."""

from duotone.dispatch.target import Target
from duotone.formats import ROW, TENSOR, Block

# bench/results/2026-11-21-h200-small-linear.jsonl, 8192 tokens: all lose at 2048 x 4096 and win at 4096 x 4096.
LEAST_WORK: dict[tuple[tuple[int, int], Block], int] = {
    ((9, 0), TENSOR): 4096 * 4096,
    ((9, 0), ROW): 4096 * 4096,
    ((9, 0), Block(1, 128)): 4096 * 4096,
}
"""K x N by compute capability and the block of a scale; 128x128 goes by its partner.

For forward and backward with nothing cached, host time included.
"""


def least_work(blocks: set[Block], target: Target) -> int:
    """The entry of operands with these scales, the larger one of two; 0 without any."""
    return max(LEAST_WORK.get((target.arch, block), 0) for block in blocks)
