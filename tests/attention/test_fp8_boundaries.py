"""fp8_mha: query, key and value leave their projection quantized, and the gradient of the output arrives so."""

import pytest
import torch

import duotone
from duotone.attention import MultiheadAttention, TransformerLayer
from duotone.attention.head_planes import HeadOperand

FP8 = duotone.Float8CurrentScaling(fp8_mha=True)
DPA = duotone.Float8CurrentScaling(fp8_dpa=True)


def step(module, x: torch.Tensor, run=None, **options) -> list[torch.Tensor]:
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    out = (module if run is None else run)(leaf, **options)
    out.square().mean().backward()
    return [out.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.fixture
def encodes(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes that attention encodes itself, and not its neighbours."""
    shapes = []
    encode = HeadOperand.encode

    def watched(self, x, usage, seed):
        shapes.append(tuple(x.shape))
        return encode(self, x, usage, seed)

    monkeypatch.setattr(HeadOperand, "encode", watched)
    return shapes


def attention(recipe, **options) -> MultiheadAttention:
    torch.manual_seed(0)
    options = {"num_gqa_groups": 2, "attention_dropout": 0.0, "bias": False, "name": "a", "recipe": recipe, **options}
    return MultiheadAttention(64, 4, **options)


@pytest.mark.parametrize("options", [{}, {"qkv_format": "bshd"}, {"input_layernorm": True}])
def test_neighbours_encode_for_attention_and_attention_does_not_again(encodes, options) -> None:
    x = torch.randn(12, 12, 64)
    results = step(attention(FP8, **options), x)
    assert encodes == [(12, 2, 2, 12, 16)]  # the output, which backward keeps
    plain = step(attention(duotone.HighPrecision(), **options), x)
    for one, other in zip(results, plain, strict=True):
        if other.norm() < 1e-4 * plain[2].norm():  # a shift of all keys, which attention does not see
            continue
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.98
    encodes.clear()
    step(attention(DPA, **options), x)
    assert len(encodes) == 5


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"qk_norm_type": "RMSNorm"}, {}),
        ({"fuse_qkv_params": True}, {}),
        ({}, {"rotary_pos_emb": duotone.RotaryPositionEmbedding(16)(12)}),
    ],
)
def test_what_changes_heads_on_their_way_leaves_the_gradient_alone_quantized(encodes, options, call) -> None:
    module = attention(FP8, **options)
    step(module, torch.randn(12, 2, 64), **call)
    assert len(encodes) == 4


def test_cross_attention_and_layers_train_and_their_bits_repeat() -> None:
    layer = TransformerLayer(64, 96, 4, layer_type="decoder", hidden_dropout=0.0, name="l", recipe=FP8)
    layer = layer.eval()
    results = [step(layer, torch.ones(7, 2, 64), encoder_output=torch.ones(5, 2, 64)) for _ in range(2)]
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other)


def test_a_compiled_layer_has_the_bits_of_an_eager_one() -> None:
    module, x = attention(FP8), torch.randn(12, 2, 64)
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    for result, expected in zip(step(module, x, run), step(module, x), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_quantized_heads_are_not_exported_and_fp8_dpa_is(strict: bool) -> None:
    x = torch.randn(2, 16, 64)
    with torch.no_grad():
        m = MultiheadAttention(64, 2, recipe=FP8, qkv_format="bshd").eval()
        with pytest.raises(duotone.UserError, match="takes no quantized heads: give a recipe with fp8_dpa"):
            torch.export.export(m, (x,), strict=strict)
        m = MultiheadAttention(64, 2, recipe=DPA, qkv_format="bshd").eval()
        assert torch.equal(torch.export.export(m, (x,), strict=strict).module()(x), m(x))
