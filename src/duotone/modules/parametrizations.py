"""Parametrizations of torch: they compute a weight at each read, and may advance, as spectral norms do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, cached

from duotone.modules.base import PlannedModule


@contextmanager
def reads_without_effect(model: nn.Module) -> Iterator[None]:
    """Reads of parametrized weights within compute each weight once. Afterwards their buffers are as before."""
    lists = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    if not lists:
        yield
        return
    buffers = [(buffer, buffer.clone()) for each in lists for buffer in each.buffers()]
    try:
        with cached():
            yield
    finally:
        for buffer, before in buffers:
            buffer.data.copy_(before)


def weights_of(module: PlannedModule) -> Sequence[Tensor]:
    """The weights of a module, read without effect."""
    with reads_without_effect(module):
        return module.weights
