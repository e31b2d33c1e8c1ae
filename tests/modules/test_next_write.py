"""core 43, 51: a recipe that only finds scales in another way changes a held weight at its next write."""

import pytest
import torch

import duotone
from duotone import recipes
from duotone.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=2)
CHANGES = {
    "power of two": (CURRENT, Float8CurrentScaling(power_of_two_scales=True)),
    "exact scales": (Float8BlockScaling(), Float8BlockScaling(power_of_two_scales=False)),
    "floor": (CURRENT, Float8CurrentScaling(amax_epsilon=4.0)),
    "delayed": (CURRENT, DELAYED),
    "current": (DELAYED, CURRENT),
}


def quantized_linear(recipe) -> duotone.Linear:
    torch.manual_seed(1)
    with duotone.quantized_model_init(recipe=recipe):
        return duotone.Linear(128, 128, bias=False, name="a", recipe=recipe)


def parts(m) -> list[torch.Tensor]:
    return [part.clone() for plane in m.weight.planes if plane for part in plane.parts.values()]


@pytest.mark.parametrize("name", CHANGES)
def test_scales_found_in_another_way_wait_for_the_next_write(name: str) -> None:
    before, after = CHANGES[name]
    m, x = quantized_linear(before), torch.randn(16, 128)
    m(x).sum().backward()
    bytes_before, addresses = parts(m), [p.data_ptr() for plane in m.weight.planes for p in plane.parts.values()]
    with duotone.autocast(recipe=after):
        y = m(x)
        y.sum().backward()
    assert y.isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(parts(m), bytes_before, strict=True))
    values = torch.randn(128, 128) * 0.3
    with duotone.autocast(recipe=after), torch.no_grad():
        m.weight.copy_(values)
    assert [p.data_ptr() for plane in m.weight.planes for p in plane.parts.values()] == addresses
    quantizer = m.weight.quantizer
    assert [plane.format for plane in m.weight.planes] == [quantizer.rowwise, quantizer.columnwise]
    if after is not DELAYED:
        fresh = quantizer.quantize(values)
        assert torch.equal(m.weight.dequantize(), fresh.dequantize())
    with duotone.autocast(recipe=after):
        again = m(x)
    expected = quantized_linear(after)
    with torch.no_grad():
        expected(x)
        if after is not DELAYED:
            expected.weight.copy_(values)
            with duotone.autocast(recipe=after):
                assert torch.equal(again, expected(x))


def test_what_is_stored_otherwise_still_asks_for_a_conversion() -> None:
    m, x = quantized_linear(CURRENT), torch.randn(16, 128)
    for other in ("mxfp8", "fp8-rowwise", "fp8-block", "nvfp4"):
        with (
            duotone.autocast(recipe=recipes.load(other)),
            pytest.raises(duotone.RecipeError, match="convert_parameters"),
        ):
            m(x)
    with duotone.autocast(recipe=Float8CurrentScaling(fp8_format="E5M2")), pytest.raises(duotone.RecipeError):
        m(x)


@pytest.mark.filterwarnings("ignore:.*of this update is lost")
def test_a_step_of_an_optimizer_is_that_next_write() -> None:
    m, x = quantized_linear(DELAYED), torch.randn(16, 128)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for recipe in (DELAYED, CURRENT, CURRENT, DELAYED, DELAYED):
        optimizer.zero_grad()
        with duotone.autocast(recipe=recipe):
            m(x).square().mean().backward()
        optimizer.step()
        assert m.weight.planes.rowwise.format.is_delayed == (recipe is DELAYED)
        assert m.weight.dequantize().isfinite().all()
