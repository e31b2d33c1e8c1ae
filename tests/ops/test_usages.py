"""PR #2929 through the ops: usages of quantized weights in any order of train and eval; and what overrides keep."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import duotone
from duotone import MissingPlaneError, QuantizedTensor, QuantizerRole, ops, recipes
from duotone.tensor.quantizer import Quantizer

DTYPE = torch.bfloat16
WEIGHT, INPUT = QuantizerRole("linear", "weight"), QuantizerRole("linear", "input")
QUANTIZING = [n for n in recipes.names() if recipes.load(n)(WEIGHT) != Quantizer() and n != "fp8-delayed"]
MX, NV = recipes.load("mxfp8"), recipes.load("nvfp4")
SPLITS = [20, 0, 12]


def build(kind: str, recipe, is_quantized: bool) -> torch.nn.Module:
    def make() -> torch.nn.Module:
        options = {"params_dtype": DTYPE, "recipe": recipe}
        if kind == "grouped":
            return ops.GroupedLinear(3, 64, 48, name="g", **options)
        return ops.Sequential(
            ops.Linear(64, 96, name="a", **options), ops.SwiGLU(), ops.BasicLinear(48, 32, name="b", **options)
        )

    if not is_quantized:
        return make()
    with duotone.quantized_model_init(recipe=recipe):
        return make()


def weights(m: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in m.parameters() if p.dim() == 2]


def call(m: torch.nn.Module, x: Tensor) -> Tensor:
    return m(x, SPLITS) if isinstance(m, ops.GroupedLinear) else m(x)


def step(m: torch.nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    m.train()
    m.zero_grad()
    y = call(m, leaf)
    y.float().square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in m.parameters())]


@torch.no_grad()
def twin_of(m: torch.nn.Module, kind: str, recipe) -> torch.nn.Module:
    """The same values and seeds, as plain parameters."""
    plain = build(kind, recipe, False)
    duotone.load_rng_state(plain, duotone.rng_state(m))
    for parameter, copy in zip(m.parameters(), plain.parameters(), strict=True):
        copy.copy_(parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter)
    return plain


@torch.no_grad()
def write(weight: Tensor, values: Tensor, how: int) -> None:
    """In place, as optimizers and users do."""
    if how == 0:
        weight.copy_(values)
    elif how == 1:
        torch._foreach_zero_([weight])
        torch._foreach_add_([weight], [values])
    elif how == 2:
        weight.data.copy_(values)
    else:
        weight.zero_()
        weight.grad = -values
        torch.optim.SGD([weight], lr=1.0).step()


def bits(t: QuantizedTensor) -> list[Tensor]:
    return [part.clone() for plane in t.planes if plane is not None for part in plane.parts.values()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("order", "mode"), [("TETE", torch.no_grad), ("ETET", torch.inference_mode)])
@pytest.mark.parametrize("kind", ["sequential", "grouped"])
@pytest.mark.parametrize("name", QUANTIZING)
def test_any_order_of_train_and_eval_keeps_usages_and_has_the_bits_of_plain_weights(name, kind, order, mode) -> None:
    """core 46-48, 54."""
    recipe = recipes.load(name)
    m = build(kind, recipe, True)
    plain = twin_of(m, kind, recipe)
    layouts = [(w.get_usages(), w.quantizer) for w in weights(m)]
    assert all(usages == {"rowwise": True, "columnwise": True} for usages, _ in layouts)
    for i, kind_of_step in enumerate(order):
        x = torch.randn(32, 64).to(DTYPE)
        for weight, other in zip(weights(m), weights(plain), strict=True):
            values = torch.randn(weight.shape).to(DTYPE) / 8
            write(weight, values, i % 4)
            other.data.copy_(values)
            assert equal(bits(weight), bits(weight.quantizer.quantize(values)))
        if kind_of_step == "T":
            assert equal(step(m, x), step(plain, x))
        else:
            with mode():
                assert torch.equal(call(m.eval(), x), call(plain.eval(), x))
        assert [(w.get_usages(), w.quantizer) for w in weights(m)] == layouts


@pytest.mark.parametrize("kind", ["sequential", "grouped"])
def test_values_and_gradients_of_held_weights_are_those_of_their_dequantized_values(kind) -> None:
    """core 46 against plain torch: under "dequantized" every backward product is one of high precision."""
    recipe = recipes.MXFP8BlockScaling(backward_override="dequantized")
    m = build(kind, recipe, True)
    x = (torch.randn(32, 64) / 4).to(DTYPE)
    with torch.no_grad():
        call(m, x)
        for weight in weights(m):
            weight.copy_(torch.randn(weight.shape) / 8)
    result = step(m, x)
    leaves = [p.detach().dequantize() if isinstance(p, QuantizedTensor) else p.detach() for p in m.parameters()]
    leaves = [t.clone().requires_grad_() for t in leaves]
    leaf = x.clone().requires_grad_()

    def rounded(t: Tensor) -> Tensor:
        """The values of forward's operand; the gradient passes."""
        return t + (recipe(INPUT).quantize(t.detach()).dequantize() - t.detach())

    if kind == "grouped":
        parts = zip(leaf.split(SPLITS), leaves[:3], leaves[3:], strict=True)
        y = torch.cat([F.linear(rounded(rows), w, b) if len(rows) else F.linear(rows, w, b) for rows, w, b in parts])
    else:
        first, second = F.linear(rounded(leaf), leaves[0], leaves[1]).chunk(2, -1)
        y = F.linear(rounded(F.silu(first) * second), leaves[2])
    y.float().square().sum().backward()
    for a, b in zip(result, [y.detach(), leaf.grad, *(t.grad for t in leaves)], strict=True):
        assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()


@pytest.mark.parametrize("kind", ["sequential", "grouped"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", QUANTIZING)
def test_a_weight_made_without_gradients_is_derived_without_loss_or_refused_in_forward(name, mode, kind) -> None:
    """core 49: never a wrong gradient, and the error names who it is."""
    recipe = recipes.load(name)
    with mode():
        m = build(kind, recipe, True)
        assert all(not w.get_usages()["columnwise"] for w in weights(m))
        x = torch.randn(32, 64).to(DTYPE)
        before = call(m, x)
    if mode is torch.inference_mode:
        with mode():
            assert torch.equal(call(m, x), before)
        leaf, plain = x.clone().requires_grad_(), twin_of(m, kind, recipe)
        try:
            y = call(m, leaf)
        except (MissingPlaneError, RuntimeError) as error:
            assert "columnwise" in str(error) or "nference tensors cannot be saved" in str(error)
        else:
            y.float().square().sum().backward()
            assert equal([y.detach(), leaf.grad], step(plain, x.clone())[:2])
        return
    plain = twin_of(m, kind, recipe)
    try:
        result = step(m, x)
    except MissingPlaneError as error:
        assert "the weight of" in str(error) and "columnwise" in str(error) and "\n" not in str(error)
        assert all(p.grad is None for p in m.parameters())
    else:
        assert equal(result, step(plain, x))
        assert all(w.get_usages() == {"rowwise": True, "columnwise": True} for w in weights(m))


@pytest.mark.parametrize("kind", ["sequential", "grouped"])
def test_a_recipe_change_plans_anew_and_back_again(kind) -> None:
    """hybrid 85: autocast decides at every call; plans of both are kept."""
    m, x = build(kind, MX, False), torch.randn(32, 64).to(DTYPE)
    other = recipes.load("fp8-current")
    first, twin = step(m, x), build(kind, other, False)
    twin.load_state_dict(m.state_dict())
    with duotone.autocast(recipe=other):
        changed = step(m, x)
    assert equal(changed, step(twin, x)) and not torch.equal(changed[0], first[0])
    assert equal(step(m, x), first)


@pytest.mark.parametrize("kind", ["sequential", "grouped"])
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "fp8-current", "mxfp8-fwd-high-precision-bwd"])
def test_backward_follows_its_forward_whatever_the_recipe_becomes(name, kind) -> None:
    """core 62."""
    m, x = build(kind, recipes.load(name), False), torch.randn(32, 64).to(DTYPE)
    expected = step(m, x)
    leaf = x.clone().requires_grad_()
    m.zero_grad()
    y = call(m, leaf)
    for module in m.modules():
        if hasattr(module, "recipe"):
            module.recipe = NV
            module.forget_plans()
    with duotone.autocast(recipe=recipes.load("fp8-block")):
        call(m, x)
        y.float().square().sum().backward()
    assert equal([y.detach(), leaf.grad, *(p.grad for p in m.parameters())], expected)


def test_a_held_weight_in_another_format_is_refused_before_anything_changes() -> None:
    """core 52."""
    for kind in ("sequential", "grouped"):
        m, x = build(kind, MX, True), torch.randn(32, 64).to(DTYPE)
        before = [bits(w) for w in weights(m)]
        with duotone.autocast(recipe=NV), pytest.raises(duotone.RecipeError, match="is held in mxfp8_e4m3"):
            call(m, x)
        assert all(equal(a, bits(w)) for a, w in zip(before, weights(m), strict=True))
        duotone.convert_parameters(m, NV)
        step(m, x)
        assert weights(m)[0].planes.rowwise.format.name.startswith("nvfp4")


def test_evaluation_builds_no_plan_twice() -> None:
    """core 103."""
    m, x = build("sequential", MX, True), torch.randn(32, 64).to(DTYPE)
    results = []
    for _ in range(3):
        step(m, x)
        with torch.no_grad():
            call(m.eval(), x)
        results.append(
            [*(id(s) for op in m if hasattr(op, "plans") for s in op.plans.stages.values()), len(m._rewritten)]
        )
    assert results[0] == results[1] == results[2]


# --- backward_override in every op


def override_model(kind: str, recipe) -> torch.nn.Module:
    options = {"params_dtype": DTYPE, "recipe": recipe}
    if kind == "grouped":
        return ops.GroupedLinear(3, 64, 48, bias=False, **options)
    front = {"linear": [], "norm": [ops.RMSNorm(64, dtype=DTYPE)], "activation": [ops.GELU()]}[kind]
    return ops.Sequential(*front, ops.BasicLinear(64, 48, **options), *([ops.SiLU()] if kind == "activation" else []))


@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=2) if any(n)], ids=str)
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kind", ["linear", "norm", "activation", "grouped"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-current", "fp8-block"])
def test_gradients_are_products_of_what_the_override_names(name, kind, override, needs) -> None:
    """core 85, hybrid 89-93, 99, 101: against torch.mm; forward keeps its bits; one side alone has the same ones."""
    recipe = dataclasses.replace(recipes.load(name), backward_override=override)
    m = override_model(kind, recipe)
    weight = weights(m)
    x, dy = torch.randn(32, 64).to(DTYPE), torch.randn(32, 48).to(DTYPE)
    seed = duotone.rng_state(m)
    for w in weight:
        w.requires_grad_(needs[1])
    leaf = x.clone().requires_grad_(needs[0])
    y = call(m, leaf)
    with torch.no_grad():
        duotone.load_rng_state(m, seed)
        with duotone.autocast(recipe=recipes.load(name)):
            assert torch.equal(call(m, x), y)
    y.backward(dy)
    assert (leaf.grad is not None) == needs[0] and all((w.grad is not None) == needs[1] for w in weight)

    def operand(t: Tensor, role: str) -> Tensor:
        if override == "high_precision" or not t.numel():
            return t
        tensor = recipe(QuantizerRole("linear", role)).encode(t, ctx=duotone.tensor.QuantizeContext())
        return tensor.rowwise.dequantize(DTYPE)

    fresh = x.clone().requires_grad_()
    front = m[0](fresh) if kind in ("norm", "activation") else fresh
    values = front.detach()
    if kind == "activation":
        product = y.detach()
        with torch.no_grad():
            duotone.load_rng_state(m, seed)
            product = m[1](values).requires_grad_()
        dy = torch.autograd.grad(F.silu(product), product, dy)[0]
    splits = SPLITS if kind == "grouped" else [32]
    dxs, dws = [], []
    for w, rows, grad in zip(weight, values.split(splits), dy.split(splits), strict=True):
        dxs.append(grad @ operand(w.detach(), "weight"))
        dws.append(grad.t() @ operand(rows, "input"))
    dx = torch.cat(dxs)
    if kind in ("norm", "activation"):
        front.backward(dx)
        dx = fresh.grad
    assert not needs[0] or torch.equal(leaf.grad, dx)
    assert not needs[1] or all(torch.equal(w.grad, dw) for w, dw in zip(weight, dws, strict=True))


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=2)), ids=str)
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("kind", ["linear", "activation", "grouped"])
def test_each_op_saves_what_its_gradients_need_and_nothing_else(kind, override, needs) -> None:
    """core 86, hybrid 92, 93, 103: kinds of the saved tensors."""
    m = override_model(kind, recipes.MXFP8BlockScaling(backward_override=override))
    for w in weights(m):
        w.requires_grad_(needs[1])
    x = torch.randn(32, 64).to(DTYPE).requires_grad_(needs[0])
    saved: list[tuple] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: (saved.append((tuple(t.shape), t.dtype)), t)[1], lambda t: t
    )
    with hooks:
        call(m, x)
    saved = [one for one in saved if one[0] != (0,)]  # the empty tensor of graphs of second derivatives
    high, codes = DTYPE, torch.uint8

    def plane(rows: int, cols: int) -> list[tuple]:
        """A plane along the rows of (rows, cols), as the override keeps it."""
        if override == "high_precision":
            return [((rows, cols), high)]
        rows, cols = (cols, rows) if override is None else (rows, cols)
        return [((rows, cols), codes), ((rows, -(-cols // 32)), codes)]

    expected: list[tuple] = []
    if kind == "activation":
        expected += [((32, 64), high)] if needs[0] else []
    for rows in SPLITS if kind == "grouped" else [32]:
        expected += plane(rows, 64) if needs[1] else []
        expected += plane(48, 64) if needs[0] else []
    if kind == "activation":
        expected += [((32, 48), high)] if any(needs) else []
    assert saved == expected


def test_a_frozen_expert_stops_no_other() -> None:
    """core 86, 87: any expert may be frozen, the first too."""
    x = torch.randn(32, 64).to(DTYPE)
    everything = build("grouped", MX, False)
    step(everything, x)
    for frozen in range(3):
        m = build("grouped", MX, False)
        m.load_state_dict(everything.state_dict())
        m._parameters[f"weight{frozen}"].requires_grad_(False)
        call(m, x).float().square().sum().backward()
        for i in range(3):
            result, want = m._parameters[f"weight{i}"].grad, everything._parameters[f"weight{i}"].grad
            assert result is None if i == frozen else result is not None and torch.equal(result, want)
