"""GPT-2's Conv1D, a linear with a transposed weight: the bits of nn.Linear, everything else as in the plain model."""

import copy
import pickle

import pytest
import torch
from causal import assert_same_bits, batch, gradients, train
from torch import nn

import duotone
import duotone_lab
from duotone import recipes
from duotone.recipes import Rule
from later import Later

transformers = Later("transformers")
pytorch_utils = Later("transformers.pytorch_utils")

NAMES = ["mxfp8", "nvfp4", "fp8-block", "fp8-delayed", "fp8-current"]

SIZES = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
OPTIONS = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **OPTIONS))


def pair(recipe: str):
    """One linear as nn.Linear and as pytorch_utils.Conv1D, both converted."""
    linear, transposed = nn.Linear(64, 96), pytorch_utils.Conv1D(96, 64)
    with torch.no_grad():
        transposed.weight.copy_(linear.weight.t())
        transposed.bias.copy_(linear.bias)
    return [duotone.convert(nn.ModuleDict({"layer": layer}), recipe).layer for layer in (linear, transposed)]


@pytest.mark.parametrize("recipe", NAMES)
def test_outputs_and_gradients_are_those_of_a_linear(recipe: str) -> None:
    linear, transposed = pair(recipe)
    for _ in range(2):
        x = torch.randn(2, 32, 64)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [layer(one) for layer, one in zip((linear, transposed), inputs, strict=True)]
        for output in outputs:
            output.square().sum().backward()
        assert torch.equal(*outputs) and torch.equal(inputs[0].grad, inputs[1].grad)
        assert torch.equal(linear.weight.grad.t(), transposed.weight.grad)
        assert torch.equal(linear.bias.grad, transposed.bias.grad)


def test_every_product_of_gpt2_follows_the_recipe_and_the_model_trains() -> None:
    model = duotone.convert(gpt2(), recipes.MXFP8BlockScaling(strict=True))
    rows = duotone.plan(model).filter("transformer.h.*")
    assert {row.a for row in rows} == {"mxfp8_e4m3"} and len(rows) == 2 * 4 * 3
    losses = train(model, 5)
    assert losses[-1] < 0.9 * losses[0]


def test_under_identity_the_bits_are_those_of_the_plain_model() -> None:
    assert_same_bits(gradients(gpt2(), batch(0)), gradients(duotone.convert(gpt2(), "bf16"), batch(0)))


def test_parameters_names_and_classes_stay_and_revert_gives_the_class_back() -> None:
    plain, model = gpt2(), duotone.convert(gpt2(), "mxfp8")
    assert_same_bits(plain.state_dict(), model.state_dict())
    assert isinstance(model.transformer.h[0].mlp.c_fc, pytorch_utils.Conv1D)
    duotone.revert(model)
    assert type(model.transformer.h[0].mlp.c_fc) is pytorch_utils.Conv1D
    assert_same_bits(gradients(plain, batch(0)), gradients(model, batch(0)))


def test_pickles_copies_and_compiled_layers_have_the_same_bits() -> None:
    _, layer = pair("mxfp8")
    x = torch.randn(32, 64)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), torch.compile(layer, backend="aot_eager")):
        assert torch.equal(other(x), layer(x))


def test_rules_see_the_sizes_of_the_linear() -> None:
    rules = [Rule(module="transformer.*", out_features=">=200", format="identity")]
    rows = duotone.plan(duotone.convert(gpt2(), "mxfp8", rules=rules)).filter("transformer.h.0.mlp.*", gemm="fprop")
    assert {row.module.rpartition(".")[2]: row.a for row in rows} == {"c_fc": "identity", "c_proj": "mxfp8_e4m3"}


def test_cached_planes_follow_writes() -> None:
    _, layer = pair("mxfp8")
    x = torch.randn(32, 64)
    first = layer(x, is_first_microbatch=True)
    assert torch.equal(layer(x, is_first_microbatch=False), first)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert not torch.equal(layer(x, is_first_microbatch=False), first)


def test_the_ledger_counts_what_backward_keeps() -> None:
    model = duotone.convert(gpt2(), "mxfp8")
    rows = duotone_lab.ledger(model, lambda: model(batch(0)).logits.sum())
    assert "transformer.h.0.mlp.c_fc" in str(rows)


def test_a_transposed_weight_is_not_held_quantized_and_a_replaced_forward_is_told() -> None:
    model = duotone.convert(gpt2(), "mxfp8")
    with pytest.raises(duotone.UserError, match=r"^transformer.h.0.attn.c_attn stores its weight transposed[^\n]*$"):
        duotone.convert_parameters(model, "mxfp8")
    other = gpt2()
    other.transformer.h[0].mlp.c_fc.forward = lambda x: x.repeat(1, 1, 4)
    with pytest.warns(UserWarning, match=r"do not follow recipe mxfp8; left alone: transformer.h.0.mlp.c_fc"):
        duotone.convert(other, "mxfp8")
