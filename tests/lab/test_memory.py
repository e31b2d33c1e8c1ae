import pytest
import torch

from duotone_lab.memory.step_memory import StepMemory, measure_step
from duotone_lab.memory.storages import LiveStorages, total_bytes

KB = 1000


def test_the_high_water_mark_counts_each_storage_once_and_frees_it():
    x = torch.zeros(250)
    with LiveStorages([x]) as storages:
        doubled = x * 2
        view = doubled.view(25, 10).t()
        assert storages.live == 2 * KB
        tripled = doubled * 3
        del doubled
        assert storages.live == 3 * KB
        del view
        assert storages.live == 2 * KB
        tripled.add_(1)
    assert storages.peak == 3 * KB


def test_a_reused_address_counts_anew():
    with LiveStorages() as storages:
        for _ in range(50):
            torch.zeros(250)
    assert storages.live == 0 and storages.peak == KB


def test_storages_freed_after_the_block_do_no_harm():
    with LiveStorages() as storages:
        saved = torch.zeros(250)
    del saved
    assert storages.peak == KB


def test_a_saved_tensor_counts_once_and_known_ones_do_not():
    x, w = torch.zeros(250, requires_grad=True), torch.zeros(250, requires_grad=True)
    memory = StepMemory()
    with memory.forward([w]):
        y = x * w
        z = (y * y).sum()
    assert memory.saved_activation_bytes == 2 * KB
    z.backward()
    assert x.grad is not None


def test_one_step_of_a_linear_has_the_bytes_counted_by_hand():
    """x (8, 16) and w (32, 16) in fp32: y is 1024 bytes, dy as much, dw and w 2048 each, dx and x 512 each."""
    x, w = torch.zeros(8, 16, requires_grad=True), torch.nn.Parameter(torch.zeros(32, 16))
    with measure_step([w], [x], torch.device("cpu")) as memory:
        with memory.forward([w]):
            y = torch.nn.functional.linear(x, w)
        y.backward(torch.ones(8, 32))
    assert memory.weight_bytes == 2048
    assert memory.saved_activation_bytes == 512
    assert memory.peak_bytes == 512 + 2048 + 1024 + 1024 + 512 + 2048


def test_parts_of_a_wrapper_subclass_count_instead_of_its_outer_size():
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(torch.zeros(250), torch.zeros(250))
    assert total_bytes([pair, pair.a]) == 2 * KB


def test_tied_weights_count_once():
    weight = torch.zeros(250)
    assert total_bytes([weight, weight, weight.view(10, 25)]) == KB


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run pytest tests/lab/test_memory.py on one")
def test_on_cuda_the_peak_is_the_allocators():
    x = torch.zeros(1 << 20, device="cuda")
    with measure_step([x], [], x.device) as memory:
        y = x + 1
        del y
    assert memory.peak_bytes >= 2 * x.nbytes
