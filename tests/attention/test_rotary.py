"""Rotary embeddings: pairs turn by angles in proportion to their positions."""

import math

import pytest
import torch

from duotone.attention import RotaryPositionEmbedding, Rotation, apply_rotary_pos_emb, rotary
from duotone.errors import UserError


def test_each_pair_turns_as_a_complex_number_in_float64() -> None:
    x = torch.randn(5, 2, 3, 8)
    rotated = apply_rotary_pos_emb(x, RotaryPositionEmbedding(8)(5))
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    for token in range(5):
        for pair in range(4):
            angle = token * 10000.0 ** (-2 * pair / 8)
            expected = pairs[token, ..., pair] * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(rotated[token, ..., pair].double(), expected.real, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(rotated[token, ..., pair + 4].double(), expected.imag, rtol=1e-5, atol=1e-6)


def test_norms_stay_and_products_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    angles = RotaryPositionEmbedding(8, 100.0)(12)
    rotated = [apply_rotary_pos_emb(x.expand(12, 1, 1, 8), angles)[:, 0, 0] for x in (query, key)]
    torch.testing.assert_close(rotated[0].norm(dim=1), query.norm().expand(12), rtol=1e-6, atol=1e-6)
    products = rotated[0] @ rotated[1].T
    for distance in range(-11, 12):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(products[0], products[0, :1].expand(12))


def test_layouts_forms_of_angles_and_tables_agree_bit_for_bit() -> None:
    x, angles = torch.randn(5, 2, 3, 8).bfloat16(), RotaryPositionEmbedding(8)(9)
    expected = apply_rotary_pos_emb(x, angles)
    assert expected.dtype is torch.bfloat16
    assert torch.equal(apply_rotary_pos_emb(x.transpose(0, 1), angles, "bshd").transpose(0, 1), expected)
    assert torch.equal(apply_rotary_pos_emb(x, angles[:, None, None]), expected)
    assert torch.equal(apply_rotary_pos_emb(x, Rotation(angles.cos(), angles.sin())), expected)
    packed = apply_rotary_pos_emb(x.transpose(0, 1).flatten(0, 1), angles, "thd", torch.tensor([0, 5, 10]))
    assert torch.equal(packed.view(2, 5, 3, 8).transpose(0, 1), expected)


def test_tokens_behind_the_last_sequence_need_no_rows() -> None:
    x, angles = torch.randn(20, 3, 8), RotaryPositionEmbedding(8)(4)
    turned = apply_rotary_pos_emb(x, angles, "thd", torch.tensor([0, 4, 7]))
    assert torch.equal(turned[:7], apply_rotary_pos_emb(x[:7], angles, "thd", torch.tensor([0, 4, 7])))
    assert torch.equal(turned[7:], x[7:])


def test_a_narrow_table_turns_the_first_elements_and_leaves_the_rest() -> None:
    x = torch.randn(5, 2, 3, 8)
    rotated = apply_rotary_pos_emb(x, RotaryPositionEmbedding(4)(5))
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    assert torch.equal(rotated[..., :4], apply_rotary_pos_emb(x[..., :4].contiguous(), RotaryPositionEmbedding(4)(5)))


def test_an_offset_shifts_the_positions() -> None:
    rotary = RotaryPositionEmbedding(8)
    assert torch.equal(rotary(3, offset=4), rotary(7)[4:])


def test_rates_stay_fp32_through_casts_and_meta() -> None:
    expected = RotaryPositionEmbedding(8)(5)
    assert torch.equal(RotaryPositionEmbedding(8).bfloat16()(5), expected)
    with torch.device("meta"):
        module = RotaryPositionEmbedding(8)
    assert module(5).is_meta and torch.equal(module.to_empty(device="cpu")(5), expected)
    assert not module.state_dict()


def test_gradients_turn_back() -> None:
    x, angles = torch.randn(5, 2, 3, 8, requires_grad=True), RotaryPositionEmbedding(8)(5)
    dy = torch.randn(5, 2, 3, 8)
    apply_rotary_pos_emb(x, angles).backward(dy)
    torch.testing.assert_close(x.grad, apply_rotary_pos_emb(dy, -angles))


def test_a_graph_turns_heads_without_a_break() -> None:
    x, angles = torch.randn(2, 5, 3, 8), RotaryPositionEmbedding(8)(5)
    compiled = torch.compile(apply_rotary_pos_emb, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, angles, "bshd"), apply_rotary_pos_emb(x, angles, "bshd"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RotaryPositionEmbedding(7), "dim is 7"),
        (lambda: apply_rotary_pos_emb(torch.ones(5, 1, 1, 8), torch.ones(4, 8)), "4 positions and the sequence has 5"),
        (
            lambda: apply_rotary_pos_emb(torch.ones(5, 1, 1, 8), torch.ones(5, 10)),
            "width 10 cannot turn heads of width 8",
        ),
        (lambda: apply_rotary_pos_emb(torch.ones(5, 1, 8), torch.ones(5, 8), "thd"), "need cu_seqlens"),
        (
            lambda: apply_rotary_pos_emb(torch.ones(9, 1, 8), torch.ones(4, 8), "thd", torch.tensor([0, 4, 9])),
            "4 positions and a sequence has 5",
        ),
        (lambda: apply_rotary_pos_emb(torch.ones(5, 1, 1, 8), torch.ones(5, 8), "bhsd"), "'bhsd' is unknown"),
    ],
)
def test_a_wrong_call_is_one_line(call, message) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_the_kernel_gets_heads_by_batch_and_token(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and second derivatives through the kernel's function equal plain operations."""
    kernels = pytest.importorskip("duotone.kernels.rotary", reason="needs Triton: pip install triton")

    def turn(t: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> None:
        plain = rotary._turned_back if back else rotary._turned
        out.copy_(plain(t, cos[:, None], sin[:, None]))

    monkeypatch.setattr(kernels, "turn", turn)
    lead = {"sbhd": (5, 2), "bshd": (2, 5), "thd": (10,)}[layout]
    edges = torch.tensor([0, 4, 10]) if layout == "thd" else None
    t = torch.randn(*lead, 3, 4, 8, dtype=torch.bfloat16).select(len(lead), 1)
    results = []
    for fits in (True, False):
        monkeypatch.setattr(rotary, "_fits", lambda t, fits=fits: fits)
        x = t.clone().requires_grad_()
        y = apply_rotary_pos_emb(x, RotaryPositionEmbedding(8)(6), layout, edges)
        dy = y.detach().sin().requires_grad_()
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        results.append([y, dx, *torch.autograd.grad(dx.sum(), dy)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_kernel_turns_no_heads_whose_offsets_pass_32_bits(monkeypatch) -> None:
    monkeypatch.setattr(rotary, "has_kernels", lambda t: True)
    for tokens, fits in ((2**19 - 1, True), (2**19, False)):
        t = torch.empty(1, 32, tokens, 128, device="meta").transpose(1, 2)  # memory as (batch, heads, tokens, width)
        assert rotary._fits(t) is fits
