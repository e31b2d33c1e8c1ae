"""A corpus of bytes: which part is held out, and the batch of each step."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duotone.errors import UserError
from duotone_lab.training import texts

PIECE = 16_384
"""Length in bytes of one held-out piece of a long corpus."""

EVERY = 20
"""One piece of this many is held out."""


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, each a 1-D uint8 tensor; together they are the whole text."""

    sources: tuple[str, ...]
    train: Tensor
    heldout: Tensor
    digest: str

    @property
    def size(self) -> int:
        """Bytes of text."""
        return self.train.numel() + self.heldout.numel()

    def batch(self, seed: int, step: int, *, count: int, context: int) -> tuple[Tensor, Tensor]:
        """Tokens and next tokens of one step, int64 (count, context): a pure function of the arguments."""
        limit = self.train.numel() - context
        starts = np.random.default_rng((seed, step)).integers(0, limit, size=count)
        return windows(self.train, torch.from_numpy(starts), context)

    def heldout_batches(self, batches: int, *, count: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same `batches` held-out batches every time, spread evenly over the held-out bytes."""
        last = self.heldout.numel() - context - 1
        starts = torch.linspace(0, last, batches * count, dtype=torch.float64).long()
        for group in starts.view(batches, count):
            yield windows(self.heldout, group, context)


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (len(starts), context): the bytes from each start, and those one later."""
    picked = text[starts[:, None] + torch.arange(context + 1)].long()
    return picked[:, :-1], picked[:, 1:]


def load(paths: Sequence[str], *, context: int) -> Corpus:
    """The corpus of `paths` (files, folders, globs), or the text that Python ships when there are none.

    UserError: a path that does not exist, an empty or binary file, fewer bytes than two contexts.
    """
    parts = texts.read(paths) if paths else texts.python_texts()
    sources = tuple(paths) or (texts.DEFAULT_SOURCE,)
    text = b"\n".join(parts)
    least = 2 * (context + 1)
    if len(text) < least:
        raise UserError(
            f"the data in {', '.join(sources)} is {len(text)} bytes, but a context to train on and one to "
            f"hold out need {least}: give more text or a preset with a shorter context"
        )
    train, heldout = split(np.frombuffer(text, dtype=np.uint8), context)
    return Corpus(sources, train, heldout, hashlib.sha256(text).hexdigest())


def split(text: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    """Cut `text` into contiguous pieces longer than one context; hold out one of twenty, at least one."""
    piece = max(context + 1, min(PIECE, len(text) // EVERY))
    count = len(text) // piece
    pieces = np.split(text, [piece * index for index in range(1, count)])
    chosen = min(EVERY // 2, count - 1)
    train = [part for index, part in enumerate(pieces) if index % EVERY != chosen]
    heldout = [part for index, part in enumerate(pieces) if index % EVERY == chosen]
    return torch.from_numpy(np.concatenate(train)), torch.from_numpy(np.concatenate(heldout))
