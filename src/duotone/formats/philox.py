"""The counter-based random stream of stochastic rounding: Philox4x32-10 (Salmon et al., SC 2011).

Key: the 64-bit seed. Counter: (i low, i high, plane, 0) for the i-th group of 16 elements of a plane in row-major
order. Element e takes bits 8*(e%4)..+7 of word (e%16)//4, so the stream depends on no tiling and no device.
"""

import torch
from torch import Tensor

from duotone.errors import UserError

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
PLANES = {"row": 0, "col": 1}


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """One block: four int64 counter words and two key words, each holding 32 bits -> four words."""
    a, b, c, d = counter
    low_key, high_key = key
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # int64 wraps; the 64 bits are those of the product
        a, b = ((second >> 32) & WORD) ^ b ^ low_key, second & WORD
        c, d = ((first >> 32) & WORD) ^ d ^ high_key, first & WORD
        low_key, high_key = (low_key + KEY_STEPS[0]) & WORD, (high_key + KEY_STEPS[1]) & WORD
    return a, b, c, d


def random_bytes(seed: Tensor, rows: int, cols: int, plane: int) -> Tensor:
    """uint8 (rows, cols): eight random bits for each element of a plane; `seed` int64 with one element."""
    count = rows * cols
    index = torch.arange((count + 15) // 16, dtype=torch.int64, device=seed.device)
    key = seed.reshape(())
    zero = torch.zeros_like(index)
    counter = index & WORD, (index >> 32) & WORD, zero + plane, zero
    words = philox_4x32(counter, (key & WORD, (key >> 32) & WORD))
    stacked = torch.stack(words, dim=-1)[..., None]
    shifts = torch.arange(0, 32, 8, dtype=torch.int64, device=seed.device)
    drawn = ((stacked >> shifts) & 0xFF).to(torch.uint8)
    return drawn.flatten()[:count].view(rows, cols)


def as_seed(seed: Tensor | int, device: torch.device) -> Tensor:
    """A seed as int64 with one element on `device`. UserError if it is neither that nor an integer."""
    if isinstance(seed, Tensor) and seed.numel() == 1 and seed.dtype == torch.int64:
        return seed.to(device=device)
    if not isinstance(seed, int):
        got = f"a {seed.dtype} tensor of {seed.numel()}" if isinstance(seed, Tensor) else type(seed).__name__
        raise UserError(f"a seed is an integer or an int64 tensor with one element; got {got}")
    signed = (seed + 2**63) % 2**64 - 2**63  # the 64 bits of the seed as an int64
    return torch.tensor([signed], dtype=torch.int64, device=device)
