"""MultiheadAttention against projections, norms and softmax attention written out in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import duotone
from duotone import recipes
from duotone.attention import MultiheadAttention, RotaryPositionEmbedding, Rotation
from duotone.errors import UserError

BATCH, TOKENS, HIDDEN, HEADS, GROUPS, WIDTH = 2, 6, 32, 4, 2, 8
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def build(**options) -> MultiheadAttention:
    """Small, in eval of dropout, with biases and norms that are not neutral."""
    plain = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "attention_dropout": 0.0, "qkv_format": "bshd"}
    module = MultiheadAttention(**{**plain, **options})
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def states(tokens: int = TOKENS) -> Tensor:
    return torch.randn(BATCH, tokens, HIDDEN)


def piece(linear, kind: str, rows: slice) -> Tensor:
    """Rows of a projection's weight or bias, where it is one parameter or several, in float64."""
    parameters = dict(linear.named_parameters())
    whole = parameters.get(kind)
    if whole is None:
        whole = torch.cat([p for name, p in parameters.items() if name.endswith(f"_{kind}") and "norm" not in name])
    return whole[rows].double()


def project(linear, x: Tensor, rows: slice) -> Tensor:
    return x @ piece(linear, "weight", rows).T + piece(linear, "bias", rows)


def normed(linear, x: Tensor, kind: str) -> Tensor:
    gamma, beta = linear.layer_norm_weight.double(), getattr(linear, "layer_norm_bias", None)
    if kind == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma + beta.double()


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool = True) -> Tensor:
    """(b, s, features) of heads one after the other; keys and values may have fewer."""
    query, key, value = (x.unflatten(-1, (-1, WIDTH)) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    outs = []
    for head in range(query.shape[2]):
        scores = query[:, :, head] @ key[:, :, head // group].transpose(1, 2) / math.sqrt(WIDTH)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        outs.append(scores.softmax(-1) @ value[:, :, head // group])
    return torch.cat(outs, -1)


Q, K, V = slice(0, HEADS * WIDTH), slice(HEADS * WIDTH, (HEADS + 2) * WIDTH), slice((HEADS + 2) * WIDTH, None)


@pytest.mark.parametrize("kind", [None, "LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("fused", [False, True])
def test_self_attention_equals_the_reference_with_gradients(fused, kind) -> None:
    options = {"input_layernorm": True, "normalization": kind} if kind else {}
    module = build(num_gqa_groups=GROUPS, fuse_qkv_params=fused, qkv_weight_interleaved=False, **options)
    x = states().requires_grad_()
    linear = module.layernorm_qkv if kind else module.qkv
    assert hasattr(module, "layernorm_qkv") == bool(kind) and hasattr(module, "qkv") != bool(kind)
    wide = normed(linear, x.double(), kind) if kind else x.double()
    expected = project(module.proj, attend(*(project(linear, wide, rows) for rows in (Q, K, V))), slice(None))
    out = module(x)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    dy, leaves = torch.randn_like(out), (x, *module.parameters())
    gradients = torch.autograd.grad(out, leaves, dy)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, leaves, dy.double()), strict=True):
        torch.testing.assert_close(gradient, reference, **CLOSE)


def test_split_parameters_have_the_names_and_sizes_of_their_kinds() -> None:
    shapes = {name: tuple(p.shape) for name, p in build(num_gqa_groups=GROUPS).qkv.named_parameters()}
    assert shapes == {
        "query_weight": (32, 32), "key_weight": (16, 32), "value_weight": (16, 32),
        "query_bias": (32,), "key_bias": (16,), "value_bias": (16,),
    }  # fmt: skip
    assert set(dict(build(fuse_qkv_params=True).qkv.named_parameters())) == {"weight", "bias"}


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_interleaved_rows_are_the_same_attention_group_by_group(groups) -> None:
    plain = build(num_gqa_groups=groups, fuse_qkv_params=True, qkv_weight_interleaved=False)
    mixed = build(num_gqa_groups=groups, fuse_qkv_params=True)
    mixed.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for kind in ("weight", "bias"):
            heads = getattr(plain.qkv, kind).unflatten(0, (-1, WIDTH))
            per, order = HEADS // groups, []
            for group in range(groups):
                order += [*range(group * per, (group + 1) * per), HEADS + group, HEADS + groups + group]
            getattr(mixed.qkv, kind).copy_(heads[order].flatten(0, 1))
    x = states()
    torch.testing.assert_close(mixed(x), plain(x))


@pytest.mark.parametrize("norm", [False, True])
def test_cross_attention_takes_keys_and_values_from_the_encoder(norm) -> None:
    module = build(attention_type="cross", attn_mask_type="no_mask", num_gqa_groups=GROUPS, input_layernorm=norm)
    x, encoder = states(), states(9)
    linear = module.layernorm_query if norm else module.query_layer
    wide = normed(linear, x.double(), "LayerNorm") if norm else x.double()
    query = project(linear, wide, slice(None))
    key, value = (project(module.key_value, encoder.double(), rows) for rows in (slice(0, 16), slice(16, 32)))
    expected = project(module.proj, attend(query, key, value, causal=False), slice(None))
    torch.testing.assert_close(module(x, encoder_output=encoder).double(), expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_high_precision_is_linear_attention_linear_bit_for_bit(dtype) -> None:
    module = build(fuse_qkv_params=True, qkv_weight_interleaved=False, params_dtype=dtype, recipe=recipes.load("bf16"))
    x = states().to(dtype).requires_grad_()
    out = module(x)
    heads = F.linear(x, module.qkv.weight, module.qkv.bias).view(BATCH, TOKENS, 3, HEADS, WIDTH)
    mixed = F.scaled_dot_product_attention(*(heads.permute(2, 0, 3, 1, 4)), is_causal=True)
    reference = F.linear(mixed.transpose(1, 2).flatten(2), module.proj.weight, module.proj.bias)
    assert torch.equal(out, reference)
    dy, leaves = torch.randn_like(out), (x, *module.parameters())
    for a, b in zip(*(torch.autograd.grad(y, leaves, dy) for y in (out, reference)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-delayed"])
def test_a_recipe_quantizes_the_projections_and_leaves_attention_alone(name) -> None:
    module = build(fuse_qkv_params=True, qkv_weight_interleaved=False, recipe=recipes.load(name))
    twin = copy.deepcopy(module)
    x = states().requires_grad_()
    out = module(x)
    heads = twin.qkv(x).view(BATCH, TOKENS, 3, HEADS, WIDTH)
    mixed = F.scaled_dot_product_attention(*(heads.permute(2, 0, 3, 1, 4)), is_causal=True)
    assert torch.equal(out, twin.proj(mixed.transpose(1, 2).flatten(2)))
    with duotone.autocast(recipe=recipes.load("bf16")):
        assert not torch.equal(out, module(x))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Heads (b, s, h, d) as complex numbers, turned in float64."""
    pairs = torch.complex(*x.double().chunk(2, -1))
    pairs = pairs * torch.polar(torch.ones((), dtype=torch.float64), angles.double()[None, :, None, : WIDTH // 2])
    return torch.cat((pairs.real, pairs.imag), -1)


def head_norm(x: Tensor, kind: str, module) -> Tensor:
    x = x.double()
    if kind == "L2Normalization":
        return x / (x.square().sum(-1, keepdim=True) + 1e-3).sqrt()
    if kind == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * module.weight.double()
    return F.layer_norm(x, (WIDTH,), module.weight.double(), module.bias.double(), 1e-3)


@pytest.mark.parametrize("rotary", ["none", "angles", "tables", "pair"])
@pytest.mark.parametrize(
    ("kind", "before"),
    [(None, False), *((k, b) for k in ("L2Normalization", "RMSNorm", "LayerNorm") for b in (False, True))],
)
def test_heads_are_turned_and_normed_in_the_order_asked(kind, before, rotary) -> None:
    module = build(num_gqa_groups=GROUPS, qk_norm_type=kind, qk_norm_eps=1e-3, qk_norm_before_rope=before)
    angles = RotaryPositionEmbedding(WIDTH)(TOKENS + 3)
    other = angles * (0.5 if rotary == "pair" else 1.0)
    options = {
        "none": None,
        "angles": angles,
        "tables": Rotation(angles.cos(), angles.sin()),
        "pair": (angles, other),
    }[rotary]
    x = states()
    parts = [project(module.qkv, x.double(), rows) for rows in (Q, K, V)]
    heads = []
    for part, norm, turns in zip(parts, (module.q_norm, module.k_norm), (angles, other), strict=False):
        steps = [lambda h, turns=turns: turned(h, turns[:TOKENS])] if rotary != "none" else []
        steps += [lambda h, norm=norm: head_norm(h, kind, norm)] if kind else []
        head = part.unflatten(-1, (-1, WIDTH))
        for step in reversed(steps) if before else steps:
            head = step(head)
        heads.append(head.flatten(2))
    expected = project(module.proj, attend(*heads, parts[2]), slice(None))
    torch.testing.assert_close(module(x, rotary_pos_emb=options).double(), expected, **CLOSE)


def test_layouts_agree_and_packed_sequences_equal_each_alone() -> None:
    module, x = build(num_gqa_groups=GROUPS), states()
    angles = RotaryPositionEmbedding(WIDTH)(TOKENS)
    expected = module(x, rotary_pos_emb=angles)
    swapped = build(num_gqa_groups=GROUPS, qkv_format="sbhd")
    packed = build(num_gqa_groups=GROUPS, qkv_format="thd", attn_mask_type="padding_causal")
    for other in (swapped, packed):
        other.load_state_dict(module.state_dict())
    by_sequence = swapped(x.transpose(0, 1), rotary_pos_emb=angles).transpose(0, 1)
    torch.testing.assert_close(by_sequence, expected, **CLOSE)
    cu = torch.tensor([0, 2, 6])
    out = packed(x[1], rotary_pos_emb=angles, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    torch.testing.assert_close(out[:2], module(x[1:, :2], rotary_pos_emb=angles)[0], **CLOSE)
    torch.testing.assert_close(out[2:], module(x[1:, 2:], rotary_pos_emb=angles)[0], **CLOSE)


def test_masks_windows_and_types_of_a_call_reach_attention() -> None:
    module, x = build(), states()
    hidden = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    hidden[:, 4:] = True
    out = module(x, hidden, attn_mask_type="padding_causal", window_size=(1, 0))
    windowed = build(window_size=(1, 0))
    windowed.load_state_dict(module.state_dict())
    torch.testing.assert_close(out[:, :4], windowed(x[:, :4]))


def test_returned_biases_and_norms_come_in_transformer_engines_order() -> None:
    module = build(return_bias=True, input_layernorm=True, return_layernorm_output=True)
    x = states()
    out, bias, norm = module(x)
    assert bias is module.proj.bias
    torch.testing.assert_close(norm.double(), normed(module.layernorm_qkv, x.double(), "LayerNorm"), **CLOSE)
    plain = build(input_layernorm=True)
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(out + bias, plain(x))
    assert isinstance(build(return_layernorm_output=True)(x), Tensor)


def test_dropout_acts_in_training_alone() -> None:
    module, x = build(attention_dropout=0.5), states()
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_initialisers_fill_their_own_linears() -> None:
    options = {"init_method": lambda w: w.fill_(0.25), "output_layer_init_method": lambda w: w.fill_(0.5)}
    module = MultiheadAttention(HIDDEN, HEADS, fuse_qkv_params=True, **options)
    assert (module.qkv.weight == 0.25).all() and (module.proj.weight == 0.5).all()


def test_the_state_dict_goes_round() -> None:
    options = {"num_gqa_groups": GROUPS, "input_layernorm": True, "qk_norm_type": "RMSNorm"}
    module, other = build(**options), build(**options)
    x = states()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert not any("core" in key for key in module.state_dict())


@pytest.mark.parametrize("fused", [True, False])
def test_it_is_built_on_meta_and_filled_later(fused) -> None:
    options = {"fuse_qkv_params": fused, "qk_norm_type": "RMSNorm", "qkv_format": "bshd", "attention_dropout": 0.0}
    module = MultiheadAttention(HIDDEN, HEADS, device="meta", **options)
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu")
    torch.manual_seed(5)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    twin = MultiheadAttention(HIDDEN, HEADS, **options)
    twin.load_state_dict(module.state_dict())
    x = states()
    assert torch.equal(module(x), twin(x)) and (module.q_norm.weight == 1).all()
    assert 0 < module.proj.weight.std() < 1


def test_is_first_microbatch_reaches_both_linears() -> None:
    module = build(recipe=recipes.load("mxfp8"), fuse_qkv_params=True)
    x = states()
    first = module(x, is_first_microbatch=True)
    with torch.no_grad():
        for linear in (module.qkv, module.proj):
            linear.weight.data.zero_()  # leaves no version, so that the cache is what is read
    assert torch.equal(module(x, is_first_microbatch=False), first)
    assert not torch.equal(module(x), first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gqa_groups": 3}, "num_gqa_groups 3 does not divide num_attention_heads 4"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; give an integer of at least 1"),
        ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0; give an integer of at least 1"),
        ({"kv_channels": 0}, "kv_channels is 0; give an integer of at least 1"),
        ({"hidden_size": 30}, "hidden_size 30 does not divide over 4 heads"),
        ({"attention_type": "both"}, "'both' is unknown; allowed are 'self', 'cross'"),
        ({"qk_norm_type": "GroupNorm"}, "qk_norm_type 'GroupNorm' is unknown"),
        ({"attn_mask_type": "triangle"}, "'triangle' is unknown"),
        ({"qkv_format": "bhsd"}, "'bhsd' is unknown"),
        ({"set_parallel_mode": True}, "needs a tp_group"),
    ],
)
def test_a_wrong_argument_is_one_line(options, message) -> None:
    with pytest.raises(UserError) as error:
        build(**options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({}, {"encoder_output": states()}, "'self' takes none"),
        ({"attention_type": "cross"}, {}, "'cross', which needs it"),
        ({}, {"attention_mask": torch.zeros(2, 6, dtype=torch.bool)}, "leave it out"),
        ({}, {"rotary_pos_emb": torch.zeros(3, 8)}, "3 positions and the sequence has 6"),
        ({"num_gqa_groups": 2}, {"hidden_states": torch.randn(2, 6, 31)}, "got (..., 31)"),
        ({}, {"hidden_states": torch.randn(12, 32)}, "got (12, 4, 8)"),
    ],
)
def test_a_wrong_call_is_one_line(options, call, message) -> None:
    with pytest.raises(UserError) as error:
        build(**options)(**{"hidden_states": states(), **call})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_subclass_may_have_a_method_prepare() -> None:
    """Users give this name to steps of their own. Attention must not call them with a recipe."""

    class Scaled(MultiheadAttention):
        def prepare(self, x: Tensor) -> Tensor:
            return 2 * x

        def forward(self, x: Tensor, **options: object) -> Tensor:
            return super().forward(self.prepare(x), **options)

    plain, x = MultiheadAttention(32, 4, attention_dropout=0.0), torch.randn(6, 2, 32)
    scaled = Scaled(32, 4, attention_dropout=0.0)
    scaled.load_state_dict(plain.state_dict())
    with duotone.autocast(recipe="mxfp8"):
        assert torch.equal(scaled(x), plain(2 * x))
