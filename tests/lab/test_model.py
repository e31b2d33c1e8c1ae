import dataclasses

import pytest
import torch
import torch.nn.functional as F

from duotone_lab.training import model, presets

TINY = presets.get("tiny").model


def test_a_token_does_not_see_the_ones_after_it():
    gpt = model.build(TINY, 0)
    tokens = torch.randint(0, 256, (2, 32))
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    before, after = gpt.logits(tokens), gpt.logits(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_the_loss_is_the_mean_cross_entropy_in_fp32():
    gpt = model.to_dtype(model.build(TINY, 0), torch.bfloat16)
    tokens, targets = torch.randint(0, 256, (2, 2, 16))
    loss = gpt(tokens, targets)
    logits = gpt.logits(tokens)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    picked = F.log_softmax(logits.float(), dim=-1).gather(-1, targets[..., None])
    torch.testing.assert_close(loss, -picked.mean())


def test_the_mlp_is_a_swiglu():
    mlp = model.MLP(TINY)
    x = torch.randn(3, TINY.dim)
    gate, up = mlp.gate_up.weight[: TINY.hidden], mlp.gate_up.weight[TINY.hidden :]
    torch.testing.assert_close(mlp(x), (F.silu(x @ gate.T) * (x @ up.T)) @ mlp.down.weight.T)


def test_module_names_are_those_that_recipes_match():
    names = {name for name, module in model.build(TINY, 0).named_modules() if hasattr(module, "weight")}
    layer = {"attention.qkv", "attention.proj", "mlp.gate_up", "mlp.down", "attention_norm", "mlp_norm"}
    inner = {f"layers.{index}.{name}" for index in range(TINY.layers) for name in layer}
    assert names == inner | {"embedding", "norm", "lm_head"}


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = model.build(TINY, 5)
    state = torch.get_rng_state()
    same_seed = model.build(TINY, 5)
    assert torch.equal(state, torch.get_rng_state())
    pairs = zip(first.parameters(), same_seed.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.embedding.weight, model.build(TINY, 6).embedding.weight)


def test_a_perturbation_moves_every_weight_by_its_relative_size():
    plain, perturbed = model.build(TINY, 0), model.perturb(model.build(TINY, 0), 0, 1e-3)
    for a, b in zip(plain.parameters(), perturbed.parameters(), strict=True):
        relative = (b / a - 1).abs()
        assert 2e-4 < relative.mean() < 2e-3 and relative.max() < 6e-3


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_shares_one_parameter_and_casting_keeps_it(tied):
    gpt = model.to_dtype(model.build(dataclasses.replace(TINY, tied=tied), 0), torch.bfloat16)
    assert (gpt.lm_head.weight is gpt.embedding.weight) == tied
    assert {parameter.dtype for parameter in gpt.parameters()} == {torch.bfloat16}
    assert gpt.cos.dtype == torch.float32
    assert not {"cos", "sin"} & gpt.state_dict().keys()
