"""Quantized parameters: the same bits as a plain module of the same values, whatever happens between the steps."""

import copy
import gc
import itertools
import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import recipes
from duotone.errors import MissingPlaneError, RecipeError, UserError
from duotone.formats import get
from duotone.recipes import CustomRecipe, DelayedScaling, HighPrecision, QuantizerRole
from duotone.tensor import History, QuantizedTensor, Quantizer
from interrupting import interrupt

WEIGHT = QuantizerRole("linear", "weight")
ALL = [name for name in recipes.names() if recipes.load(name)(WEIGHT) != Quantizer()]
"""Recipes that quantize a weight which no name singles out."""
MX, FP8, DELAYED = recipes.load("mxfp8"), recipes.load("fp8-current"), DelayedScaling(amax_history_len=4)
K, N = 64, 32


def quantized(recipe, bias: bool = True, **kwargs) -> duotone.Linear:
    with duotone.quantized_model_init(recipe=recipe, **kwargs):
        return duotone.Linear(K, N, bias=bias, params_dtype=torch.bfloat16, recipe=recipe, name="body")


def reference_for(m: nn.Module) -> nn.Module:
    """A plain module of the values that `m` was made from, converted to the same recipe under the same name."""
    holder = nn.ModuleDict({"body": nn.Linear(K, N, bias=m.bias is not None, dtype=torch.bfloat16)})
    duotone.convert(holder, m.recipe, ())
    return holder["body"]


def step(m: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    m.zero_grad()
    m.train()
    y = m(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad, m.weight.grad, m.bias.grad]


def evaluate(m: nn.Module, x: Tensor, mode) -> list[Tensor]:
    m.eval()
    with mode():
        return [m(x)]


@torch.no_grad()
def write(m: nn.Module, values: Tensor, how: int) -> None:
    """A weight rewritten in place, in one of the ways of an optimizer or its user."""
    if how == 0:
        m.weight.copy_(values)
    elif how == 1:
        m.weight.zero_()
        m.weight.add_(values)
    elif how == 2:
        m.weight.data.copy_(values)
    else:
        optimizer = torch.optim.SGD([m.weight], lr=1.0)
        m.weight.zero_()
        m.weight.grad = -values
        optimizer.step()


def bits(t: QuantizedTensor) -> list[Tensor]:
    return [part.clone() for plane in t.planes if plane is not None for part in plane.parts.values()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


ORDERS = ["TETE", "ETET", "EETTE"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [n for n in ALL if n != "fp8-delayed"])
def test_any_order_of_training_and_evaluation_has_the_bits_of_plain_weights(name, mode, order) -> None:
    """core 46, 47, 48, 54, hybrid 60: with weights rewritten before every training step."""
    m = quantized(recipes.load(name))
    plain = reference_for(m)
    plain.load_state_dict({"weight": m.weight.dequantize(), "bias": m.bias.detach()})
    seed = m.duotone_seed.clone()
    plain.duotone_seed.copy_(seed)
    layout = m.weight.get_usages(), m.weight.quantizer
    assert layout[0] == {"rowwise": True, "columnwise": True}
    for i, kind_of_step in enumerate(order):
        x, dy = torch.randn(16, K).bfloat16(), torch.randn(16, N).bfloat16()
        values = torch.randn(N, K).bfloat16()
        write(m, values, i % 4)
        plain.weight.data.copy_(values)
        if kind_of_step == "T":
            assert equal(step(m, x, dy), step(plain, x, dy))
        else:
            assert equal(evaluate(m, x, mode), evaluate(plain, x, mode))
        assert (m.weight.get_usages(), m.weight.quantizer) == layout
        fresh = m.weight.quantizer.quantize(values)
        assert equal(bits(m.weight), bits(fresh))


def test_delayed_weights_train_and_evaluate_in_turn_with_the_scales_of_their_writes() -> None:
    """core 46, 48, 71: the amax of each write is recorded, and the next write takes the scale of the last roll."""
    m = quantized(DELAYED)
    amaxes = [m.weight.dequantize().abs().max()]
    state = m.duotone_forward
    addresses = [part.data_ptr() for plane in m.weight.planes for part in plane.parts.values()]
    assert state.amax_history[0, 2] > 0
    for i, mode in enumerate([torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode]):
        x, dy = torch.randn(16, K).bfloat16(), torch.randn(16, N).bfloat16()
        values = torch.randn(N, K).bfloat16() * (i + 1)
        with torch.no_grad():
            m.weight.copy_(values)
        scale = state.scale[2].clone()
        assert m.weight.planes.rowwise.parts["scale"].item() == (1 / scale).item()
        assert state.amax_history[0, 2] >= values.abs().max()
        evaluate(m, x, mode)
        assert torch.equal(scale, state.scale[2])
        y, dx, *_ = step(m, x, dy)
        assert torch.isfinite(y).all() and torch.isfinite(dx).all()
        amaxes.append(values.abs().max())
        largest = torch.stack(amaxes[-3:] if i else amaxes[-2:]).max().float()
        assert i == 0 or state.scale[2] == torch.tensor(448.0) / largest
    assert addresses == [part.data_ptr() for plane in m.weight.planes for part in plane.parts.values()]


def test_delayed_weights_roll_once_per_step_under_autocast(monkeypatch) -> None:
    """core 71: a write outside of the region and a forward inside are one roll."""
    m = quantized(DELAYED)
    rolls = []
    roll = type(m.duotone_forward).roll
    monkeypatch.setattr(type(m.duotone_forward), "roll", lambda s: (rolls.append(s.scale.numel()), roll(s))[1])
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(3):
        with duotone.autocast(recipe=DELAYED):
            y = m(torch.randn(8, K).bfloat16())
        y.sum().backward()
        optimizer.step()
    assert rolls == [4, 2] * 3


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_freezing_between_steps_removes_no_usage(frozen) -> None:
    """core 54."""
    m, x, dy = quantized(MX), torch.randn(16, K).bfloat16(), torch.randn(16, N).bfloat16()
    expected = step(m, x, dy)
    m.zero_grad()
    if frozen == "weight":
        m.weight.requires_grad_(False)
    m(x.clone().requires_grad_(frozen == "weight")).sum().backward()
    m.weight.requires_grad_(True)
    assert m.weight.get_usages() == {"rowwise": True, "columnwise": True}
    assert equal(step(m, x, dy), expected)


@pytest.mark.parametrize("name", ALL)
def test_a_weight_made_without_gradients_trains_without_loss_or_says_why_not(name) -> None:
    """core 49: in forward, never in backward, and never with wrong gradients."""
    recipe = recipes.load(name)
    with torch.no_grad():
        m = quantized(recipe)
    assert m.weight.get_usages() == {"rowwise": True, "columnwise": False}
    m.weight.requires_grad_(True)
    x, dy = torch.randn(16, K).bfloat16(), torch.randn(16, N).bfloat16()
    q = m.weight.quantizer
    lossless = q.rowwise == q.columnwise and q.rowwise.is_derivable
    before = bits(m.weight)
    evaluate(m, x, torch.inference_mode)
    if not lossless:
        with pytest.raises(MissingPlaneError, match=r"the weight of body: .*no columnwise plane.*materialize_usage"):
            m(x.clone().requires_grad_())
        assert equal(bits(m.weight), before)
        m.weight.materialize_usage(columnwise=True, allow_requantize=True)
        step(m, x, dy)
        return
    step(m, x, dy)
    assert m.weight.get_usages() == {"rowwise": True, "columnwise": True}
    with torch.no_grad():
        m.weight.copy_(torch.randn(N, K).bfloat16())
    step(m, x, dy)


@pytest.mark.parametrize("recipe", [FP8, recipes.load("nvfp4")], ids=lambda r: r.name)
@pytest.mark.parametrize("cached", [False, True])
def test_a_plane_that_evaluation_derives_can_be_written_in_training(cached, recipe) -> None:
    """core 49: nothing that inference mode makes stays with a weight."""
    m, x, dy = quantized(recipe), torch.randn(16, K).bfloat16(), torch.randn(16, N).bfloat16()
    seed, before = m.duotone_seed.clone(), bits(m.weight)
    expected = step(m, x, dy)
    if cached:
        evaluate(m, x, torch.inference_mode)
    m.weight.update_usage(rowwise=False)
    evaluate(m, x, torch.inference_mode)
    assert not any(part.is_inference() for part in bits_of(m.weight)) and equal(bits(m.weight), before)
    m.duotone_seed.copy_(seed)
    assert equal(step(m, x, dy), expected)
    values = torch.randn(N, K).bfloat16()
    with torch.no_grad():
        m.weight.copy_(values)
    assert equal(bits(m.weight), bits(m.weight.quantizer.quantize(values)))


def test_a_module_made_and_used_in_inference_mode_alone_works() -> None:
    """core 49, 3.2 (8)."""
    with torch.inference_mode():
        m = quantized(MX)
        y = m(torch.randn(16, K).bfloat16())
        m.weight.copy_(torch.randn(N, K).bfloat16())
        assert not torch.equal(y, m(torch.randn(16, K).bfloat16()))


# Recipe changes


def test_equal_recipes_reuse_plans_and_ask_a_factory_once_per_slot() -> None:
    """core 50, 63, hybrid 85: five slots, boundaries get None; another recipe value asks anew."""
    roles = []

    def factory(role):
        roles.append(role and role.tensor_type)
        return Quantizer(get("mxfp8_e4m3"), get("mxfp8_e4m3"))

    m = quantized(CustomRecipe(qfactory=factory))
    slots = ["input", "weight", None, "grad_output", None]
    assert roles == slots
    x, dy = torch.randn(16, K).bfloat16(), torch.randn(16, N).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(m, x, dy)
            evaluate(m, x, torch.no_grad)
            with duotone.autocast(recipe=CustomRecipe(qfactory=factory)):
                step(m, x, dy)
    assert roles == slots
    with duotone.autocast(recipe=CustomRecipe(qfactory=lambda role: factory(role))):
        step(m, x, dy)
    assert roles == slots * 2


def test_a_numeric_change_waits_for_the_next_write() -> None:
    """core 51: the columnwise source is not a format; margin and length of a history are none either."""
    fmt = get("mxfp8_e4m3")
    first = CustomRecipe(qfactory=lambda role: Quantizer(fmt, fmt))
    follows = Quantizer(fmt, fmt, "rowwise_dequantized")
    second = CustomRecipe(
        qfactory=lambda role: follows if role and role.tensor_type == "weight" else Quantizer(fmt, fmt)
    )
    m, x, dy = quantized(first), torch.randn(16, K).bfloat16(), torch.randn(16, N).bfloat16()
    before, values = bits(m.weight), m.weight.dequantize()
    with duotone.autocast(recipe=second):
        step(m, x, dy)
    assert equal(bits(m.weight), before) and torch.equal(m.weight.dequantize(), values)
    new = torch.randn(N, K).bfloat16()
    with torch.no_grad():
        m.weight.copy_(new)
    assert equal(bits(m.weight), bits(Quantizer(fmt, fmt, "rowwise_dequantized").quantize(new)))
    step(m, x, dy)
    with torch.no_grad():
        m.weight.copy_(new)
    assert equal(bits(m.weight), bits(Quantizer(fmt, fmt).quantize(new)))

    m = quantized(DELAYED)
    with duotone.autocast(recipe=DelayedScaling(margin=2, amax_history_len=9)):
        step(m, x, dy)
    assert m.weight.quantizer.history == History(2, 9)


@pytest.mark.parametrize("change", [recipes.load("nvfp4"), FP8, recipes.load("fp8-block")], ids=lambda r: r.name)
def test_a_format_change_is_refused_whole_and_conversion_succeeds(change) -> None:
    """core 52: the error names the weight, both formats and the remedy; nothing has changed."""
    m, x, dy = quantized(MX), torch.randn(16, K).bfloat16(), torch.randn(16, N).bfloat16()
    before, seed = bits(m.weight), m.duotone_seed.clone()
    fmt = change(WEIGHT).rowwise.name
    message = rf"body is held in mxfp8_e4m3 and recipe {re.escape(change.name)} asks for {fmt}; .*convert_parameters"
    with pytest.raises(RecipeError, match=message), duotone.autocast(recipe=change):
        m(x)
    assert equal(bits(m.weight), before) and torch.equal(m.duotone_seed, seed) and m.weight.quantizer == MX(WEIGHT)
    parameter = m.weight
    values = parameter.dequantize()
    duotone.convert_parameters(m, change)
    assert m.weight is parameter and m.recipe == change
    assert equal(bits(m.weight), bits(change(WEIGHT).quantize(values)))
    step(m, x, dy)


def model(*names: str) -> nn.Module:
    root = nn.ModuleDict({name: nn.Linear(K, N, dtype=torch.bfloat16) for name in names})
    return duotone.convert(root, HighPrecision(), ())


def snapshot(root: nn.Module) -> list:
    results = []
    for module in root.modules():
        if isinstance(module, duotone.Linear):
            weight = module.weight
            content = bits(weight) if isinstance(weight, QuantizedTensor) else [weight.detach().clone()]
            results.append((type(weight), weight, content, weight.grad, module.recipe, list(module.state_dict())))
    return results


def same_snapshot(a: list, b: list) -> bool:
    return all(
        x[0] is y[0] and x[1] is y[1] and equal(x[2], y[2]) and x[3] is y[3] and x[4:] == y[4:]
        for x, y in zip(a, b, strict=True)
    )


def bad_second(role):
    if role is not None and role.name == "b":
        raise ZeroDivisionError
    return Quantizer(get("mxfp8_e4m3"), get("mxfp8_e4m3"))


def mismatched_second(role):
    if role is not None and role.name == "b" and role.tensor_type == "weight":
        return Quantizer(get("nvfp4"), get("nvfp4"))
    return Quantizer(get("mxfp8_e4m3"), get("mxfp8_e4m3"))


def stochastic_second(role):
    stochastic = role is not None and role.name == "b" and role.tensor_type == "weight"
    fmt = get("nvfp4_sr" if stochastic else "nvfp4")
    return Quantizer(fmt, fmt)


@pytest.mark.parametrize("start", [None, MX, DELAYED], ids=str)
@pytest.mark.parametrize("factory", [bad_second, mismatched_second, stochastic_second])
def test_conversion_is_all_or_nothing(start, factory) -> None:
    """core 52: the second of two modules fails."""
    root = model("a", "b")
    if start is not None:
        duotone.convert_parameters(root, start)
        root["a"](torch.randn(4, K).bfloat16()).sum().backward()
    before = snapshot(root)
    with pytest.raises(ValueError):
        duotone.convert_parameters(root, CustomRecipe(qfactory=factory))
    assert same_snapshot(before, snapshot(root))


def test_conversion_while_something_holds_a_weight_changes_nothing() -> None:
    """core 52: a weight with a weak reference cannot change its kind; the one before it changes back."""
    import weakref

    root = model("a", "b")
    reference = weakref.ref(root["b"].weight)
    before = snapshot(root)
    with pytest.raises(UserError, match=r"cannot be converted, cast or moved while something holds it.*weakref"):
        duotone.convert_parameters(root, MX)
    assert same_snapshot(before, snapshot(root)) and reference() is root["b"].weight


def test_wrong_masters_are_refused_before_anything_changes() -> None:
    """core 52."""
    root = model("a", "b")
    before = snapshot(root)
    for masters, message in (
        ({"b.weights": torch.zeros(N, K)}, "'b.weights', which is no weight"),
        ({"a.weight": torch.zeros(N, K), "b.weight": torch.zeros(K, N)}, "weight of b"),
    ):
        with pytest.raises(UserError, match=message):
            duotone.convert_parameters(root, MX, masters=masters)
        assert same_snapshot(before, snapshot(root))
    with pytest.raises(UserError, match="convert_parameters takes a recipe or its name; got int"):
        duotone.convert_parameters(root, 8)


@pytest.mark.parametrize("name", ALL)
def test_conversion_there_and_back_keeps_the_parameter_and_its_marks(name) -> None:
    """core 52: optimizer, gradient, requires_grad and attributes stay with the object; masters give exact values."""
    root = model("a")
    masters = {"a.weight": torch.randn(N, K).bfloat16()}
    weight, copy_before = root["a"].weight, masters["a.weight"].clone()
    root["a"](torch.randn(4, K).bfloat16()).sum().backward()
    gradient, weight.mark = weight.grad, "mine"
    optimizer = torch.optim.SGD(root.parameters(), lr=0.5, momentum=0.9)
    duotone.convert_parameters(root, recipes.load(name), masters=masters)
    assert root["a"].weight is weight and isinstance(weight, QuantizedTensor) and isinstance(weight, nn.Parameter)
    assert torch.equal(weight.grad, gradient) and weight.mark == "mine" and weight.requires_grad
    before = weight.dequantize().clone()
    optimizer.step()
    assert not torch.equal(weight.dequantize(), before)
    values = weight.dequantize().clone()
    assert torch.equal(masters["a.weight"], copy_before)
    duotone.convert_parameters(root, HighPrecision())
    assert root["a"].weight is weight and not isinstance(weight, QuantizedTensor)
    assert torch.equal(weight, values) and weight.mark == "mine" and torch.equal(weight.grad, gradient)
    assert list(root.state_dict()) == ["a.weight", "a.bias"]


def test_conversion_without_gradients_keeps_usages_that_are_held() -> None:
    """core 47."""
    root = model("a")
    duotone.convert_parameters(root, MX)
    with torch.no_grad():
        duotone.convert_parameters(root, FP8)
    assert root["a"].weight.get_usages() == {"rowwise": True, "columnwise": True}


def test_conversion_to_delayed_scaling_takes_the_scales_that_training_found() -> None:
    """core 52: a state that is there is used, and the amax of the values is recorded."""
    root = duotone.convert(nn.ModuleDict({"a": nn.Linear(K, N, dtype=torch.bfloat16)}), DELAYED, ())
    for _ in range(2):
        root["a"](torch.randn(4, K).bfloat16()).sum().backward()
    state = root["a"].duotone_forward
    scale = state.scale.clone()
    assert scale[2] != 1
    duotone.convert_parameters(root, DELAYED)
    assert root["a"].duotone_forward is state and torch.equal(state.scale, scale)
    assert root["a"].weight.planes.rowwise.parts["scale"] == torch.ones(1) / scale[2]
    assert state.amax_history[0, 2] > 0


# Initial values


@pytest.mark.parametrize("name", ALL)
def test_the_initial_value_is_exact_on_the_cpu_and_goes_on_request(name) -> None:
    """core 78: only planes are allocated besides it."""
    torch.manual_seed(7)
    plain = nn.Linear(K, N, dtype=torch.bfloat16)
    torch.manual_seed(7)
    m = quantized(recipes.load(name), preserve_high_precision_init_val=True)
    value = m.weight.get_high_precision_init_val()
    assert torch.equal(value, plain.weight) and value.device.type == "cpu" and not value.requires_grad
    assert isinstance(m.weight, QuantizedTensor)
    for other in (copy.deepcopy(m), m.to(torch.float32), m.half()):
        assert torch.equal(other.weight.get_high_precision_init_val(), plain.weight)
    m.weight.clear_high_precision_init_val()
    assert m.weight.get_high_precision_init_val() is None
    assert quantized(MX).weight.get_high_precision_init_val() is None


def test_a_new_conversion_preserves_its_own_values() -> None:
    """core 78."""
    root = model("a")
    values = root["a"].weight.detach().clone()
    duotone.convert_parameters(root, MX, preserve=True)
    assert torch.equal(root["a"].weight.get_high_precision_init_val(), values)
    decoded = root["a"].weight.dequantize()
    duotone.convert_parameters(root, FP8, preserve=True)
    assert torch.equal(root["a"].weight.get_high_precision_init_val(), decoded)


def test_initialization_nests_restores_and_refuses_what_is_no_recipe() -> None:
    """core 78."""
    with duotone.quantized_model_init(recipe=MX):
        with duotone.quantized_model_init(enabled=False):
            assert not isinstance(duotone.Linear(K, N).weight, QuantizedTensor)
        with pytest.raises(ZeroDivisionError), duotone.quantized_model_init(recipe=FP8):
            raise ZeroDivisionError
        assert duotone.Linear(K, N).weight.quantizer == MX(WEIGHT)
    assert not isinstance(duotone.Linear(K, N).weight, QuantizedTensor)
    with duotone.quantized_model_init():
        assert duotone.Linear(K, N).weight.quantizer == FP8(WEIGHT)
    with duotone.quantized_model_init(recipe=recipes.load("bf16")):
        assert not isinstance(duotone.Linear(K, N).weight, QuantizedTensor)
    with pytest.raises(UserError, match="quantized_model_init takes a recipe or its name; got int"):
        duotone.quantized_model_init(recipe=8)
    context = duotone.quantized_model_init()
    with context, pytest.raises(RuntimeError, match="entered already"):
        context.__enter__()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_casting_a_module_changes_the_nominal_dtype_alone(dtype) -> None:
    """core 37: bytes, gradient and requires_grad stay."""
    m = quantized(MX)
    step(m, torch.randn(4, K).bfloat16(), torch.randn(4, N).bfloat16())
    parameter, before, gradient = m.weight, bits(m.weight), m.weight.grad.clone()
    m.to(dtype)
    assert m.weight is parameter and m.weight.dtype == dtype and equal(bits(m.weight), before)
    assert torch.equal(m.weight.grad, gradient.to(dtype)) and m.bias.dtype == dtype
    assert m(torch.randn(4, K, dtype=dtype)).dtype == dtype


def test_without_quantization_a_quantized_weight_computes_its_values_and_warns_once() -> None:
    """core 99."""
    m, x = quantized(MX), torch.randn(16, K).bfloat16()
    expected = nn.functional.linear(x, m.weight.dequantize(), m.bias)
    with duotone.autocast(enabled=False):
        with pytest.warns(UserWarning, match="body: the weight is held quantized and computes here in high precision"):
            assert torch.equal(m(x), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            m(x)
            step(m, x, torch.randn(16, N).bfloat16())
            with torch.no_grad():
                m(x)


# Roles and names


def test_boundary_roles_reach_the_factory_at_the_next_forward() -> None:
    """hybrid 77, 78: also after the first one; an equal role changes nothing."""
    asked_roles = []

    def factory(role):
        asked_roles.append(role)
        return Quantizer(get("mxfp8_e4m3"), get("mxfp8_e4m3"))

    m, x = quantized(CustomRecipe(qfactory=factory)), torch.randn(4, K).bfloat16()
    m(x)
    asked_roles.clear()
    role = QuantizerRole("linear", "input", "next")
    m.output_quantizer_role = role
    assert asked_roles == []
    m(x)
    roles = [QuantizerRole("linear", kind, "body") for kind in ("input", "weight", "grad_output")]
    assert asked_roles == [roles[0], roles[1], role, roles[2], None]
    asked_roles.clear()
    m.output_quantizer_role = QuantizerRole("linear", "input", "next")
    m(x)
    assert asked_roles == []
    m.grad_input_quantizer_role = QuantizerRole("linear", "grad_output", "previous")
    m(x)
    assert asked_roles[2:] == [role, roles[2], QuantizerRole("linear", "grad_output", "previous")]
    assert m.get_quantizer_roles()["output"] == role


def test_convert_and_name_modules_give_full_names_and_rules_need_them() -> None:
    """Issue 3, roles: an unnamed module is Layer_<n>, and a rule by name or layer says what to call."""
    root = nn.Sequential(nn.Sequential(duotone.Linear(K, N), nn.ReLU()), duotone.Linear(N, N))
    x = torch.randn(4, K)
    assert all(re.fullmatch(r"Layer_\d+", m.module_name) for m in (root[0][0], root[1]))
    for condition in ({"module": "0.*"}, {"module_regex": "0.*"}, {"layer": 0}):
        recipe = recipes.RuleRecipe(rules=(recipes.Rule(format="mxfp8_e4m3", **condition),))
        with pytest.raises(RecipeError, match=r"duotone\.assign_names\(root\)"), duotone.autocast(recipe=recipe):
            root(x)
    duotone.assign_names(root)
    assert [m.module_name for m in (root[0][0], root[1])] == ["0.0", "1"]
    assert [m.site.layer for m in (root[0][0], root[1])] == [0, 1] and root[0][0].site.layers == 2
    with duotone.autocast(recipe=recipe):
        assert not torch.equal(root[0][0](x), nn.functional.linear(x, root[0][0].weight, root[0][0].bias))
        assert torch.equal(root[1](x[:, :N]), nn.functional.linear(x[:, :N], root[1].weight, root[1].bias))
    plain = nn.Sequential(nn.Sequential(nn.Linear(K, N), nn.ReLU()), nn.Linear(N, N))
    duotone.convert(plain, MX, ())
    assert [m.module_name for m in (plain[0][0], plain[1])] == ["0.0", "1"]
    alone = duotone.assign_names(duotone.Linear(K, N))
    assert alone.module_name == "Linear"


# Leaks and memory


def census() -> int:
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("recipe", [MX, DELAYED], ids=lambda r: r.name)
@pytest.mark.rest
def test_many_switches_between_training_and_evaluation_leak_nothing(recipe) -> None:
    """Issue 3, numbers."""
    from duotone.modules import traced_stages as traced
    from duotone.state.delayed import STATES

    m, x, dy = quantized(recipe), torch.randn(4, K).bfloat16(), torch.randn(4, N).bfloat16()
    modes = itertools.cycle([torch.no_grad, torch.inference_mode])

    def counted() -> tuple[int, ...]:
        step(m, x, dy)
        m(x)
        evaluate(m, x, torch.no_grad)
        evaluate(m, x, torch.inference_mode)
        return census(), len(m.plans.stages), len(traced._OWNERS), len(STATES)

    counted()
    before = counted()
    for i in range(20):
        m.train(i % 2 == 0)
        with next(modes)() if i % 2 else torch.enable_grad():
            m(x)
    after = counted()
    assert after[0] <= before[0] and after[1:] == before[1:]


def test_changing_roles_for_ever_leaks_no_registration() -> None:
    """Issue 3, numbers: each change gives the module a new number."""
    from duotone.modules import traced_stages as traced

    gc.collect()
    m = duotone.Linear(K, N)
    before = len(traced._OWNERS)
    for i in range(20):
        m.output_quantizer_role = QuantizerRole(name=str(i))
    copies = [copy.deepcopy(m) for _ in range(3)]
    assert len(traced._OWNERS) == before + 3
    del copies
    gc.collect()
    assert len(traced._OWNERS) == before


def test_a_weight_in_rowwise_mxfp8_costs_at_most_1_04_bytes_per_element() -> None:
    """Issue 3, numbers."""
    with torch.no_grad(), duotone.quantized_model_init(recipe=MX):
        m = duotone.Linear(128, 64, bias=False)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in bits_of(m.weight)}
    assert sum(storages.values()) <= 1.04 * 128 * 64


def bits_of(t: QuantizedTensor) -> list[Tensor]:
    return [part for plane in t.planes if plane is not None for part in plane.parts.values()]


@pytest.mark.parametrize("recipe", [MX, FP8, DELAYED], ids=["mxfp8", "fp8", "delayed"])
def test_workers_map_the_quantized_weights_of_a_shared_model(recipe) -> None:
    """Workers that train one model in shared memory would each keep the weights that they started with."""
    model = nn.Sequential(quantized(recipe))
    values, buffers = model[0].weight.dequantize(), [part.data_ptr() for part in model[0].weight.parts]
    assert not model[0].weight.is_shared()
    model.share_memory()
    assert model[0].weight.is_shared() and all(part.is_shared() for part in model[0].weight.parts)
    assert model[0].weight.detach().is_shared() and torch.equal(model[0].weight.dequantize(), values)
    assert buffers != [part.data_ptr() for part in model[0].weight.parts]


@pytest.mark.parametrize("recipe", [MX, DELAYED], ids=["mxfp8", "delayed"])
def test_a_model_with_gradients_comes_back_from_meta(recipe) -> None:
    """A gradient on meta has no values to move, so it is dropped."""
    m = quantized(recipe)
    x, dy = torch.randn(16, K, dtype=torch.bfloat16), torch.randn(16, N, dtype=torch.bfloat16)
    expected = copy.deepcopy(m)
    m(x).backward(dy)
    m.to("meta")
    assert m.weight.grad.is_meta
    m.to_empty(device="cpu")
    assert m.weight.grad is None and m.weight.device.type == "cpu"
    m.load_state_dict(expected.state_dict())
    m.zero_grad()
    for module in (m, expected):
        module(x).backward(dy)
    assert torch.equal(m.weight.grad, expected.weight.grad)


@pytest.mark.filterwarnings("ignore:.*the weight is held quantized and computes here in high precision")
@pytest.mark.parametrize("is_disabled", [False, True])
@pytest.mark.parametrize("kind", ["linears", "experts", "compiled"])
@pytest.mark.parametrize("name", ["mxfp8", "fp8-current", "mxfp8-fwd-bf16-bwd", "high-precision-fwd-mxfp8-bwd"])
def test_under_torch_autocast_a_quantized_weight_multiplies_in_its_dtype(name: str, kind: str, is_disabled: bool):
    """An Identity plane and decoded values are cast, codes are not. A model in bf16 with equal values is the oracle."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        if kind == "experts":
            m: nn.Module = duotone.GroupedLinear(2, 64, 32, params_dtype=torch.bfloat16)
        else:
            m = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)).bfloat16()
        m = duotone.convert(m.to(dtype), name, rules=())
        duotone.convert_parameters(m, name)
        assert {p.dtype for p in m.parameters()} == {dtype}
        run = torch.compile(m, backend="aot_eager", fullgraph=True) if kind == "compiled" else m
        x = torch.randn(64, 64, dtype=torch.bfloat16).to(dtype).requires_grad_()
        splits = ([32, 32],) if kind == "experts" else ()
        with torch.autocast("cpu", torch.bfloat16), duotone.autocast(enabled=not is_disabled, recipe=name):
            y = run(x, *splits)
        y.backward(torch.randn(y.shape).to(y.dtype))
        assert all(p.grad.dtype == dtype for p in (x, *m.parameters()))
        results.append([y, *(p.grad.bfloat16() for p in (x, *m.parameters()))])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["mxfp8", pytest.param("fp8-delayed", marks=pytest.mark.rest)])
def test_an_interrupted_cast_keeps_all_parameters(name: str) -> None:
    """A weight was missing in what was saved then, and no cast brought it back."""

    def build() -> nn.Module:
        m = duotone.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), name, rules=())
        return duotone.convert_parameters(m, name)

    whole = build()
    names = list(whole.state_dict())
    for at in range(1, interrupt(lambda: whole.to(torch.bfloat16), 0) + 1):
        m = build()
        interrupt(lambda m=m: m.to(torch.bfloat16), at)
        assert list(m.state_dict()) == names, at
        assert m.to(torch.bfloat16)(torch.randn(32, 64).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ALL)
def test_parameters_in_the_formats_of_a_recipe_keep_their_codes_when_they_are_converted_to_it_again(name: str) -> None:
    """They were encoded anew from decoded values: the gradient of an input lost a third of its precision."""
    torch.manual_seed(0)
    m = quantized(recipes.load(name))
    with torch.no_grad():
        m.weight.copy_(torch.randn(N, K) * torch.logspace(-3, 3, N)[:, None] * torch.logspace(-2, 2, K))
    before = [part.clone() for part in m.weight.parts]
    duotone.convert_parameters(m, name)
    assert all(torch.equal(a, b) for a, b in zip(before, m.weight.parts, strict=True))


@pytest.mark.parametrize("is_cast", [False, True], ids=["mxfp8", "float"])
def test_hooks_on_weights_stay_when_their_storage_changes(is_cast: bool) -> None:
    """A mask of gradients, or an optimizer in the backward, that was there before ran no more."""
    model = duotone.convert(nn.Sequential(nn.Linear(32, 32)).bfloat16(), "nvfp4")
    duotone.convert_parameters(model, "nvfp4")
    weight, steps = model[0].weight, []
    handle = weight.register_hook(lambda gradient: gradient * 0)
    weight.register_post_accumulate_grad_hook(lambda p: steps.append(p.grad.clone()))
    model.float() if is_cast else duotone.convert_parameters(model, "mxfp8")
    x = torch.randn(8, 32, dtype=model[0].bias.dtype)
    model(x).sum().backward()
    handle.remove()
    model(x).sum().backward()
    assert model[0].weight is weight and [bool(step.any()) for step in steps] == [False, True]
