import pytest
import torch
from torch import nn

from duotone.errors import UserError
from duotone_lab.training.model import to_dtype
from duotone_lab.training.optimizer import MasterAdamW


def make(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8))
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return to_dtype(model, dtype), masters


def put_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = (1e-3 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


def test_updates_too_small_for_bf16_add_up_in_the_masters():
    model, masters = make()
    optimizer = MasterAdamW(model, masters)
    before = model[0].weight.detach().clone()
    for _ in range(200):
        model[0].weight.grad = torch.full((8, 8), 1e-3, dtype=torch.bfloat16)
        optimizer.step(1e-5)
    updates = (masters["0.weight"] - optimizer.state()["master/0.weight"]).detach()
    decayed = 200 * 1e-5 * 0.1 * masters["0.weight"]
    torch.testing.assert_close(updates, 200 * 1e-5 + decayed, rtol=5e-3, atol=0)
    assert not torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight, optimizer.state()["master/0.weight"].bfloat16())


def test_the_update_is_torchs_adamw_with_decay_on_matrices_only():
    model, masters = make(torch.float32)
    twin, _ = make(torch.float32)
    optimizer = MasterAdamW(model, masters)
    groups = [
        {"params": [twin[0].weight], "weight_decay": 0.1},
        {"params": [twin[1].weight, twin[1].bias], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=False)
    for step in range(5):
        put_gradients(model, step)
        put_gradients(twin, step)
        optimizer.step(1e-2)
        reference.step()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


def test_a_large_gradient_is_clipped_to_norm_one():
    model, masters = make(torch.float32)
    optimizer = MasterAdamW(model, masters)
    model[0].weight.grad = torch.full((8, 8), 100.0)
    optimizer.step(1e-3)
    average = optimizer.state()["exp_avg/0.weight"]
    torch.testing.assert_close(average.norm(), torch.tensor(0.1), rtol=1e-4, atol=0)


def test_a_loaded_state_continues_bit_for_bit():
    straight, masters = make()
    whole = MasterAdamW(straight, masters)
    for step in range(6):
        put_gradients(straight, step)
        whole.step(1e-2)

    first, _ = make()
    half = MasterAdamW(first, masters)
    for step in range(3):
        put_gradients(first, step)
        half.step(1e-2)
    second, _ = make()
    resumed = MasterAdamW(second, masters)
    resumed.load_state(half.state())
    for step in range(3, 6):
        put_gradients(second, step)
        resumed.step(1e-2)
    uninterrupted_state, resumed_state = whole.state(), resumed.state()
    assert uninterrupted_state.keys() == resumed_state.keys()
    assert all(torch.equal(uninterrupted_state[name], resumed_state[name]) for name in uninterrupted_state)


@pytest.mark.parametrize("forged", [torch.zeros(1), torch.zeros(0), torch.zeros(8, 8, dtype=torch.int64), None])
def test_a_moment_of_another_shape_is_refused_before_anything_changes(forged):
    model, masters = make()
    optimizer = MasterAdamW(model, masters)
    put_gradients(model, 0)
    optimizer.step(1e-2)
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    state = {**before, "master/1.bias": torch.ones(8), "exp_avg_sq/0.weight": forged}
    with pytest.raises(UserError, match=r"a saved (exp_avg_sq|state without exp_avg_sq)"):
        optimizer.load_state({name: tensor for name, tensor in state.items() if tensor is not None})
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state().items())
