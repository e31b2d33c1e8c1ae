"""Weights and scales that other code writes under delayed scaling: a scale that fits, in every way of writing."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import duotone
from duotone import Quantizer, formats
from duotone.formats.elements import E4M3
from duotone.formats.geometry import TENSOR
from duotone.formats.scaled_format import ScaledFormat
from duotone.formats.scales import Fp32Scale
from duotone.recipes import CustomRecipe, DelayedScaling
from duotone.tensor import QuantizeContext, QuantizedTensor, Usage

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
WAYS = {
    "copy_": lambda m, values: m.weight.copy_(values),
    "add_": lambda m, values: m.weight.add_(values - m.weight),
    "data +=": lambda m, values: setattr(m.weight, "data", m.weight.data + (values - m.weight.data)),
    "data.copy_": lambda m, values: m.weight.data.copy_(values),
    "data =": lambda m, values: setattr(m.weight, "data", values.clone()),
    "foreach": lambda m, values: torch._foreach_copy_([m.weight], [values]),
    "row": lambda m, values: (
        [m.weight[i].copy_(values[i]) for i in range(64)]
        if not isinstance(m.weight, QuantizedTensor)
        else m.weight.__setitem__(slice(0, 64), values)
    ),
    "load_state_dict": lambda m, values: m.load_state_dict({**m.state_dict(), "weight": values}),
}


def trained(stored: bool, frozen: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    m = duotone.convert(nn.Linear(64, 64, bias=False), "fp8-delayed", rules=())
    if stored:
        duotone.convert_parameters(m, "fp8-delayed")
    m.weight.requires_grad_(not frozen)
    for _ in range(3):
        m(X.clone().requires_grad_()).square().mean().backward()
    return m


def error(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("write", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("stored", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_that_grew_is_not_clipped_in_an_evaluation(stored, frozen, write) -> None:
    """As after a merge of adapters. The error is that of E4M3 and not that of a clipped weight, 40 % here."""
    m = trained(stored, frozen)
    torch.manual_seed(1)
    with torch.no_grad():
        merged = m.weight.detach() + torch.randn(64, 4) @ torch.randn(4, 64) * 0.1
        write(m, merged)
        assert error(m.eval()(X), X @ merged.T) < 0.06
    with torch.inference_mode():
        assert error(m(X), X @ merged.T) < 0.06
    if stored:
        assert error(m.weight.dequantize(), merged) < 0.03


@pytest.mark.parametrize("stored", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("factor", [1e-3, 1e-6, 1e6])
def test_a_weight_of_another_magnitude_is_not_lost_in_an_evaluation(stored, factor) -> None:
    m = trained(stored)
    values = m.weight.detach().clone() * factor
    with torch.no_grad():
        m.weight.copy_(values)
        assert error(m.eval()(X), X @ values.T) < 0.06


def test_an_evaluation_leaves_the_scales_of_training() -> None:
    m = trained(stored=False)
    before = {name: value.clone() for name, value in duotone.recipe_state(m).items()}
    with torch.no_grad():
        m.weight.mul_(100.0)
        m.eval()(X)
    assert all(torch.equal(value, before[name]) for name, value in duotone.recipe_state(m).items())


def test_a_weight_that_fits_keeps_the_scale_of_its_history_in_an_evaluation() -> None:
    """So evaluations of a weight that only training wrote have the bits that they had."""
    m = trained(stored=False)
    with torch.no_grad():
        m.weight.mul_(0.5)
        scale = m.duotone_forward.scale[2]
        w = ((m.weight * scale).to(torch.float8_e4m3fn).float() / scale).double()
        x_scale = m.duotone_forward.scale[0]
        x = ((X * x_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / x_scale).double()
        assert torch.allclose(m.eval()(X).double(), x @ w.T, rtol=1e-5, atol=1e-6)


def assigned(m: nn.Linear) -> nn.Linear:
    other = trained(stored=True)
    other.load_state_dict({name: value.clone() for name, value in m.state_dict().items()}, assign=True)
    return other


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy of a copy": lambda m: copy.deepcopy(copy.deepcopy(m)),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "AveragedModel": lambda m: AveragedModel(m).module,
    "load_state_dict(assign=True)": assigned,
}
every_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())


def optimizer_of(m: nn.Linear, master_dtype: torch.dtype | None) -> duotone.optim.AdamW:
    return duotone.optim.AdamW(
        m.parameters(), lr=1e-5, weight_decay=0.0, master_weights=True, master_dtype=master_dtype
    )


def step(m: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    m.train()(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@every_copy
@pytest.mark.parametrize("master_dtype", [torch.float32, None], ids=["masters", "no masters"])
@pytest.mark.parametrize("factor", [2.0, 16.0, 100.0])
def test_a_step_does_not_clip_a_copy_that_was_written_before_its_first_forward(copied, factor, master_dtype) -> None:
    """The history is of earlier values. Clipped to it, the weights are 36 to 98 % off, and for good without masters."""
    m = copied(trained(stored=True))
    with torch.no_grad():
        m.weight.mul_(factor)
    written = m.weight.dequantize().detach().clone()
    optimizer = optimizer_of(m, master_dtype)
    for _ in range(3):
        step(m, optimizer)
        assert error(m.weight.dequantize(), written) < 0.005
    amax = written.abs().max()
    assert torch.allclose(m.duotone_forward.scale[2], 448 / amax, rtol=2**-7)


def test_a_weight_that_follows_another_state_is_not_clipped_by_its_old_scale() -> None:
    """The scale of the second module is of the weight before it grew under the slots of the first."""
    m, other = trained(stored=True), trained(stored=True)
    first = m.weight
    other.weight = first
    with torch.no_grad():
        first.mul_(16.0)
    other.train(False)(X)
    written = first.dequantize().detach().clone()
    step(other.train(), optimizer_of(other, None))
    assert error(first.dequantize(), written) < 0.005


def times_8(weight: Tensor) -> Tensor:
    """A quantized tensor of the same formats, whose scale no slot knows."""
    other = weight.detach().clone()
    return other.mul_(8.0)


def by_swap(m: nn.Linear) -> None:
    """As an average does that swaps its memory in."""
    other = nn.Parameter(m.weight.detach().clone())
    m.weight.data, other.data = other.data, m.weight.data
    other.mul_(8.0)
    m.weight.data, other.data = other.data, m.weight.data


def by_flat(m: nn.Linear) -> None:
    flat = m.weight.detach().clone()
    m.weight.data = flat
    flat.mul_(8.0)


ADOPTING = {
    "copy_": lambda m: m.weight.copy_(times_8(m.weight)),
    "data.copy_": lambda m: m.weight.data.copy_(times_8(m.weight)),
    "foreach": lambda m: torch._foreach_copy_([m.weight], [times_8(m.weight)]),
    "data =": lambda m: setattr(m.weight, "data", times_8(m.weight)),
    "swap": by_swap,
    "flat": by_flat,
    "load_state_dict": lambda m: m.load_state_dict({**m.state_dict(), "weight": times_8(m.weight)}),
}
every_adoption = pytest.mark.parametrize("write", ADOPTING.values(), ids=ADOPTING.keys())


@every_adoption
@pytest.mark.parametrize("master_dtype", [torch.float32, None], ids=["masters", "no masters"])
@pytest.mark.parametrize("start", ["new optimizer", "after a step", "resumed"])
def test_a_step_does_not_clip_codes_that_came_with_another_scale(start, master_dtype, write) -> None:
    """Clipped to the history of earlier values, the weights are 82 % off, and for good without masters."""
    m = trained(stored=True)
    optimizer = optimizer_of(m, master_dtype)
    if start != "new optimizer":
        step(m, optimizer)
    with torch.no_grad():
        write(m)
    written = m.weight.dequantize().detach().clone()
    if start == "resumed":
        saved = optimizer.state_dict()
        if master_dtype is not None:
            saved["state"][0]["master"] = written.clone()
        optimizer.load_state_dict(saved)
    for _ in range(3):
        step(m, optimizer)
        assert error(m.weight.dequantize(), written) < 0.005


@pytest.mark.parametrize("write", [ADOPTING["copy_"], ADOPTING["data ="]], ids=["copy_", "data ="])
def test_codes_that_came_with_another_scale_start_the_history_anew(write) -> None:
    """At once, and not at the next step of an optimizer."""
    m = trained(stored=True)
    with torch.no_grad():
        write(m)
    amax = m.weight.dequantize().abs().max()
    assert torch.allclose(m.duotone_forward.scale[2], 448 / amax, rtol=2**-7)
    assert not m.duotone_forward.amax_history[:, 2].any()


@pytest.mark.parametrize("master_dtype", [torch.float32, None], ids=["masters", "no masters"])
def test_codes_that_fit_leave_the_scale_and_the_history(master_dtype) -> None:
    """Bit for bit, as if nobody had asked: the same values are written, half of them, and the first step looks too."""
    m = trained(stored=True)
    before = {name: value.clone() for name, value in duotone.recipe_state(m).items()}
    with torch.no_grad():
        m.weight.copy_(m.weight.detach().clone())
        m.weight.data = m.weight.detach().clone()
        m.weight.copy_(m.weight.detach().clone().mul_(0.5))
    assert all(torch.equal(value, before[name]) for name, value in duotone.recipe_state(m).items())
    m.weight.grad = torch.zeros(64, 64)
    optimizer_of(m, master_dtype).step()
    assert torch.equal(m.duotone_forward.scale, before["duotone_forward.scale"])


@every_copy
def test_a_copy_that_nobody_wrote_keeps_the_scales_of_its_original(copied) -> None:
    """Bit for bit, also what an optimizer has recorded and no backward has rolled yet."""
    m = trained(stored=True)
    step(m, optimizer_of(m, torch.float32))
    other = copied(m)
    before = duotone.recipe_state(m)
    with torch.no_grad():
        other.eval()(X)
    assert all(torch.equal(value, before[name]) for name, value in duotone.recipe_state(other).items())


def test_after_a_write_the_history_is_of_the_new_values() -> None:
    """A spike above 16 times the history would be cut, and the next step would clip the weight again."""
    m = trained(stored=True)
    with torch.no_grad():
        m.weight.mul_(1000.0)
    m.train()(X).square().mean().backward()
    amax = m.weight.dequantize().abs().max()
    assert torch.allclose(m.duotone_forward.scale[2], 448 / amax, rtol=2**-7)


def test_without_first_scales_from_amaxes_histories_decide_alone() -> None:
    """As in Transformer Engine, which this field follows when it is false."""
    m = duotone.convert(nn.Linear(64, 64, bias=False), DelayedScaling(first_scale_from_amax=False), rules=())
    m(X).sum().backward()
    with torch.no_grad():
        m.weight.fill_(1000.0)
        clipped = 448 / m.duotone_forward.scale[2]
        assert torch.allclose(m.eval()(torch.eye(64)), clipped.expand(64, 64), rtol=2**-4)


def fill(weight: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(SMALL)


SMALL = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) * 1e-4
STORES = {
    "convert_parameters of a module": lambda recipe: duotone.convert_parameters(filled(duotone.Linear), recipe),
    "convert_parameters of a model that followed another recipe": lambda recipe: duotone.convert_parameters(
        duotone.convert(filled(nn.Linear), "mxfp8", rules=()), recipe
    ),
    "convert, then convert_parameters": lambda recipe: duotone.convert_parameters(
        duotone.convert(filled(nn.Linear), recipe, rules=()), recipe
    ),
    "convert_parameters twice": lambda recipe: duotone.convert_parameters(
        duotone.convert_parameters(duotone.convert(filled(nn.Linear), "mxfp8", rules=()), "mxfp8"),
        recipe,
        masters={"weight": SMALL},
    ),
    "quantized_model_init": lambda recipe: initialised(recipe),
    "quantized_model_init, preserved": lambda recipe: initialised(recipe, preserve_high_precision_init_val=True),
}


def filled(kind: type[nn.Linear]) -> nn.Linear:
    m = kind(64, 64, bias=False)
    fill(m.weight)
    return m


def initialised(recipe: object, **options: bool) -> nn.Linear:
    with duotone.quantized_model_init(recipe=recipe, **options):
        return duotone.Linear(64, 64, bias=False, init_method=fill)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", DelayedScaling(amax_history_len=1)])
@pytest.mark.parametrize("store", STORES.values(), ids=STORES.keys())
def test_stored_weights_start_from_their_values(store, recipe) -> None:
    """Also far below 1: at scale 1 these would be zeros. Masters start from what the weight holds."""
    weight = store(recipe).weight
    assert error(weight.dequantize(), SMALL) < 0.04
    optimizer = duotone.optim.AdamW([weight], lr=0.0)
    weight.grad = torch.ones(64, 64)
    optimizer.step()
    assert error(weight.dequantize(), SMALL) < 0.04


ROTATED = ScaledFormat("fp8_delayed_rht", E4M3, TENSOR, Fp32Scale(), hadamard=True, is_delayed=True)
"""A format of a user whose columnwise plane follows from no rowwise one."""


@pytest.mark.parametrize("usage", [Usage(False, True), Usage(True, True)], ids=["columnwise", "both"])
@pytest.mark.parametrize("col", [formats.get("fp8_e4m3_delayed"), ROTATED], ids=["derivable", "rotated"])
@pytest.mark.parametrize("row", [formats.get("mxfp8_e4m3"), formats.get("fp8_e5m2_delayed")], ids=["mxfp8", "delayed"])
def test_a_columnwise_delayed_plane_has_a_slot_of_its_own(row, col, usage) -> None:
    """Beside a rowwise plane of another format, and alone."""
    scales = torch.tensor([8.0]), torch.tensor([2.0])
    slots = tuple(duotone.tensor.context.FixedScale(scale) for scale in scales)
    t = Quantizer(row, col).quantize(torch.ones(32, 32), usage=usage, ctx=QuantizeContext(slots=slots))
    assert t.columnwise_scale.item() == 0.5


def test_a_module_records_a_columnwise_plane_in_its_own_slot() -> None:
    """Not in that of the rowwise plane, which has no delayed scale here."""
    mixed = Quantizer(formats.get("mxfp8_e4m3"), formats.get("fp8_e4m3_delayed"))
    m = duotone.Linear(64, 64, bias=False, recipe=CustomRecipe(qfactory=lambda role: mixed, emulate_mixed=True))
    for _ in range(2):
        m(X.clone().requires_grad_()).sum().backward()
    weight_row, weight_col = m.duotone_forward.scale[2:4].tolist()
    assert weight_row == 1.0 and weight_col == pytest.approx(448 / m.weight.abs().max().item(), rel=1e-6)


@pytest.mark.parametrize("fmt", ["fp8_e4m3_delayed", "fp8_e5m2_delayed"])
def test_a_write_far_above_the_largest_value_takes_a_new_scale(fmt) -> None:
    """A tensor without slots keeps its scale while it fits."""
    q = Quantizer(formats.get(fmt), formats.get(fmt))
    t = q.quantize(torch.ones(32, 32))
    largest = q.rowwise.largest
    for value, inverse in ((0.5, 1.0), (largest, 1.0), (largest * 4, 4.0), (2.0, 4.0)):
        t.copy_(torch.full((32, 32), value))
        assert t.rowwise_scale.item() == pytest.approx(inverse, rel=1e-6)
        assert torch.equal(t.dequantize(), torch.full((32, 32), value))


def lerp_all(kept: list[Tensor], values: list[Tensor]) -> None:
    torch._foreach_lerp_([*filter(torch.is_floating_point, kept)], [*filter(torch.is_floating_point, values)], 0.1)


def averaged_model(model: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return average.module, lambda: average.update_parameters(model)


def averaged_state_dict(model: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
    average = copy.deepcopy(model)
    return average, lambda: lerp_all([*average.state_dict().values()], [*model.state_dict().values()])


@pytest.mark.parametrize("average_of", [averaged_model, averaged_state_dict])
@torch.no_grad()
def test_an_average_that_holds_averaged_scales_does_not_clip(
    average_of: Callable[[nn.Module], tuple[nn.Module, Callable[[], None]]],
) -> None:
    """A mean of scales is that of the oldest, smallest activations, and the average clipped those of today."""
    torch.manual_seed(0)
    model = duotone.convert(nn.Sequential(nn.Linear(32, 32, bias=False)), "fp8-delayed", rules=())
    with torch.enable_grad():
        model(torch.randn(16, 32)).sum().backward()
        average, update = average_of(model)
        for growth in (1, 2, 4, 8, 16, 32, 64):
            model(growth * torch.randn(16, 32)).sum().backward()
            update()
    x = 64 * torch.randn(16, 32)
    for module in (average, average.eval()):
        expected = x @ module[0].weight.t()
        assert (module(x) - expected).norm() < 0.06 * expected.norm()  # E4M3 rounds each element by at most 1/16


@torch.no_grad()
def test_scales_that_were_swapped_out_and_back_are_those_of_training() -> None:
    torch.manual_seed(0)
    models = [duotone.convert(nn.Linear(32, 32), "fp8-delayed", rules=())]
    models.append(copy.deepcopy(models[0]))
    x = torch.randn(16, 32)
    for swaps, model in enumerate(models):
        with torch.enable_grad():
            model(x).sum().backward()
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        if swaps:
            for name, buffer in model.named_buffers():
                buffer.mul_(3 if "scale" in name else 1)
            model(x)
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        with torch.enable_grad():
            model(x).square().sum().backward()
    for one, other in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(models[0].weight.grad, models[1].weight.grad)
