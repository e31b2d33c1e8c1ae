"""TransformerLayer against norms, attention, MLP and residual connections written out in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import duotone
from duotone import recipes
from duotone.attention import RotaryPositionEmbedding, TransformerLayer
from duotone.errors import UserError

BATCH, TOKENS, HIDDEN, HEADS, FFN = 2, 6, 32, 4, 48
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def build(**options) -> TransformerLayer:
    """Small, without dropout, with biases and norms that are not neutral."""
    plain = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "attn_input_format": "bshd", "fuse_qkv_params": True}
    layer = TransformerLayer(HIDDEN, FFN, HEADS, **{**plain, "qkv_weight_interleaved": False, **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def states(tokens: int = TOKENS) -> Tensor:
    return torch.randn(BATCH, tokens, HIDDEN)


def norm(x: Tensor, module, prefix: str = "layer_norm_") -> Tensor:
    weights = dict(module.named_parameters(recurse=False))
    return F.layer_norm(x, (HIDDEN,), weights[f"{prefix}weight"].double(), weights[f"{prefix}bias"].double(), 1e-5)


def linear(x: Tensor, module) -> Tensor:
    return F.linear(x, module.weight.double(), module.bias.double())


def attend(parts: tuple[Tensor, ...], causal: bool) -> Tensor:
    query, key, value = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in parts)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def self_attention(x: Tensor, module) -> Tensor:
    qkv = module.layernorm_qkv if hasattr(module, "layernorm_qkv") else module.qkv
    return linear(attend(linear(x, qkv).chunk(3, -1), causal=True), module.proj)


def mlp(x: Tensor, module) -> Tensor:
    return linear(F.gelu(linear(x, module.fc1), approximate="tanh"), module.fc2)


def reference(layer: TransformerLayer, x: Tensor, encoder: Tensor | None, post: bool, out_norm: bool, beside: bool):
    x = x.double()
    wide = x if out_norm else norm(x, layer.self_attention.layernorm_qkv)
    out = (wide if post else x) + self_attention(wide, layer.self_attention)
    if encoder is not None:
        cross = layer.inter_attention
        wide = norm(out, cross.layernorm_query)
        keys_values = linear(encoder.double(), cross.key_value).chunk(2, -1)
        mixed = attend((linear(wide, cross.layernorm_query), *keys_values), causal=False)
        out = (wide if post else out) + linear(mixed, cross.proj)
    wide = norm(x if beside else out, layer.layernorm_mlp)
    out = (wide if post and not beside else out) + mlp(wide, layer.layernorm_mlp)
    return norm(out, layer.layernorm, "") if out_norm else out


@pytest.mark.parametrize(
    ("kind", "post", "out_norm", "beside"),
    [
        ("encoder", False, False, False),
        ("encoder", True, False, False),
        ("encoder", False, True, False),
        ("encoder", True, True, False),
        ("encoder", False, False, True),
        ("encoder", True, False, True),
        ("decoder", False, False, False),
        ("decoder", True, False, False),
        ("decoder", False, True, False),
    ],
)
def test_each_arrangement_equals_the_reference_with_gradients(kind, post, out_norm, beside) -> None:
    layer = build(
        layer_type=kind,
        apply_residual_connection_post_layernorm=post,
        output_layernorm=out_norm,
        parallel_attention_mlp=beside,
    )
    x, encoder = states().requires_grad_(), states(9) if kind == "decoder" else None
    out = layer(x, encoder_output=encoder)
    expected = reference(layer, x, encoder, post, out_norm, beside)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    dy, leaves = torch.randn_like(out), (x, *layer.parameters())
    gradients = torch.autograd.grad(out, leaves, dy)
    for gradient, exact in zip(gradients, torch.autograd.grad(expected, leaves, dy.double()), strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-3, atol=1e-4)


def test_high_precision_is_its_parts_bit_for_bit() -> None:
    """The identity recipe: F.layer_norm, F.linear, torch's attention and residual sums, in bfloat16."""
    layer = build(params_dtype=torch.bfloat16, recipe=recipes.load("bf16"))
    x = states().bfloat16().requires_grad_()
    out = layer(x)
    attention, block = layer.self_attention, layer.layernorm_mlp
    first, width = attention.layernorm_qkv, (HIDDEN,)
    qkv = F.linear(F.layer_norm(x, width, first.layer_norm_weight, first.layer_norm_bias), first.weight, first.bias)
    heads = qkv.view(BATCH, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
    reference = x + F.linear(mixed, attention.proj.weight, attention.proj.bias)
    wide = F.layer_norm(reference, width, block.layer_norm_weight, block.layer_norm_bias)
    inner = F.gelu(F.linear(wide, block.fc1.weight, block.fc1.bias), approximate="tanh")
    reference = reference + F.linear(inner, block.fc2.weight, block.fc2.bias)
    assert torch.equal(out, reference)
    dy, leaves = torch.randn_like(out), (x, *layer.parameters())
    for a, b in zip(*(torch.autograd.grad(y, leaves, dy) for y in (out, reference)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-delayed", "nvfp4-linear-fp8-dpa"])
def test_a_quantized_layer_stays_near_high_precision_and_learns(name) -> None:
    layer = build(activation="swiglu", normalization="RMSNorm", num_gqa_groups=2, name="tl")
    x, target = states(), states()
    expected = layer(x).detach()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses = []
    with duotone.autocast(recipe=recipes.load(name)):
        assert 0 < (layer(x) - expected).norm() < 0.3 * expected.norm()
    for _ in range(12):
        optimizer.zero_grad()
        with duotone.autocast(recipe=recipes.load(name)):
            loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_rotary_masks_and_windows_reach_self_attention() -> None:
    layer, x = build(), states()
    angles = RotaryPositionEmbedding(HIDDEN // HEADS)(TOKENS)
    plain = layer(x)
    assert not torch.allclose(layer(x, rotary_pos_emb=angles), plain)
    assert not torch.allclose(layer(x, window_size=(1, 0)), plain)
    hidden = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    hidden[:, 4:] = True
    out = layer(x, hidden, self_attn_mask_type="padding_causal")
    torch.testing.assert_close(out[:, :4], layer(x[:, :4]), **CLOSE)


def test_decoders_mask_the_encoder() -> None:
    layer, x, encoder = build(layer_type="decoder"), states(), states(9)
    hidden = torch.zeros(BATCH, 1, TOKENS, 9, dtype=torch.bool)
    hidden[..., 5:] = True
    out = layer(x, encoder_output=encoder, enc_dec_attn_mask=hidden, enc_dec_attn_mask_type="arbitrary")
    torch.testing.assert_close(out, layer(x, encoder_output=encoder[:, :5]), **CLOSE)
    full, five = (torch.arange(BATCH + 1) * tokens for tokens in (TOKENS, 5))  # lengths that self attention leaves out
    lengths = {"cu_seqlens_q": full, "cu_seqlens_kv": five, "enc_dec_attn_mask_type": "padding"}
    torch.testing.assert_close(layer(x, encoder_output=encoder, **lengths), out, **CLOSE)


def test_packed_decoders_meet_their_own_part_of_the_encoder() -> None:
    layer = build(layer_type="decoder", enc_dec_attn_mask_type="padding")
    packed = build(layer_type="decoder", attn_input_format="thd", enc_dec_attn_mask_type="padding")
    packed.load_state_dict(layer.state_dict())
    x, encoder = states()[0], states(9)[0]
    cu_q, cu_kv = torch.tensor([0, 2, 6]), torch.tensor([0, 5, 9])
    out = packed(x, encoder_output=encoder, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    for rows, keys in ((slice(0, 2), slice(0, 5)), (slice(2, 6), slice(5, 9))):
        alone = layer(x[None, rows], encoder_output=encoder[None, keys], enc_dec_attn_mask_type="no_mask")
        torch.testing.assert_close(out[rows], alone[0], **CLOSE)


@pytest.mark.parametrize("name", ["hidden_dropout", "attention_dropout", "drop_path_rate"])
def test_dropouts_act_in_training_alone(name) -> None:
    layer, x = build(**{name: 0.5}), states()
    assert not torch.equal(layer(x), layer(x))
    twin = build()
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), twin(x))


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_drop_path_drops_branches_of_whole_samples_and_scales_the_rest(layout) -> None:
    layer = build(drop_path_rate=0.5, attn_input_format=layout)
    out = torch.ones(64, 3, 4) if layout == "bshd" else torch.ones(3, 64, 4)
    dropped = layer._add(out, torch.zeros(()))
    samples = dropped if layout == "bshd" else dropped.transpose(0, 1)
    assert {tuple(sample.unique().tolist()) for sample in samples} == {(0.0,), (2.0,)}


def test_the_state_dict_and_copies_go_round() -> None:
    options = {"layer_type": "decoder", "output_layernorm": True, "qk_norm_type": "RMSNorm", "fuse_qkv_params": False}
    layer, other = build(**options), build(**options)
    other.load_state_dict(layer.state_dict())
    x, encoder = states(), states()
    expected = layer(x, encoder_output=encoder)
    assert torch.equal(other(x, encoder_output=encoder), expected)
    assert torch.equal(copy.deepcopy(layer)(x, encoder_output=encoder), expected)


def test_arguments_reach_the_parts() -> None:
    layer = TransformerLayer(
        HIDDEN, FFN, HEADS, num_gqa_groups=2, kv_channels=16, activation="swiglu", normalization="RMSNorm", bias=False
    )
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "self_attention.layernorm_qkv.query_weight": (64, 32),
        "self_attention.layernorm_qkv.key_weight": (32, 32),
        "self_attention.layernorm_qkv.value_weight": (32, 32),
        "self_attention.layernorm_qkv.layer_norm_weight": (32,),
        "self_attention.proj.weight": (32, 64),
        "layernorm_mlp.layer_norm_weight": (32,),
        "layernorm_mlp.fc1.weight": (96, 32),
        "layernorm_mlp.fc2.weight": (32, 48),
    }
    assert layer.self_attention.core_attention.attention_dropout == 0.1 and layer.hidden_dropout == 0.1
    for wrong in ("heads", "return_bias", "qkv_format", "input_layernorm"):
        with pytest.raises(TypeError, match=wrong):
            TransformerLayer(HIDDEN, FFN, HEADS, **{wrong: 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_type": "both"}, "'both' is unknown; allowed are 'encoder', 'decoder'"),
        ({"hidden_dropout": -0.1}, "hidden_dropout is -0.1"),
        ({"drop_path_rate": 1.0}, "drop_path_rate is 1.0"),
        ({"drop_path_rate": 0.1, "attn_input_format": "thd"}, "set it to 0"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "leave one of them out"),
        ({"attn_input_format": "bhsd"}, "'bhsd' is unknown"),
        ({"normalization": "BatchNorm"}, "'BatchNorm' is unknown"),
        ({"normalization": "BatchNorm", "output_layernorm": True}, "'BatchNorm' is unknown"),
    ],
)
def test_a_wrong_argument_is_one_line(options, message) -> None:
    with pytest.raises(UserError) as error:
        build(**options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_encoders_output_is_for_decoders_alone() -> None:
    for kind, inputs in (("encoder", {"encoder_output": states()}), ("decoder", {})):
        with pytest.raises(UserError, match="encoder_output is for layer_type 'decoder'"):
            build(layer_type=kind)(states(), **inputs)


def test_a_mask_that_does_not_fit_moves_no_seed() -> None:
    layer = TransformerLayer(32, 64, 4, self_attn_mask_type="arbitrary", recipe=recipes.load("nvfp4"))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    with pytest.raises(UserError):
        layer(torch.randn(16, 2, 32, requires_grad=True), attention_mask=torch.zeros(3, 5, dtype=torch.bool))
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("shape", [(0, 2, 64), (4, 0, 64)])
def test_a_batch_without_tokens_has_an_empty_output_and_zero_gradients(recipe: str, shape: tuple[int, ...]) -> None:
    layer = TransformerLayer(64, 128, 4, recipe=recipe)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape
    assert all(not p.grad.any() for p in layer.parameters())
