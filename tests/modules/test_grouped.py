"""GroupedLinear: N separate Linears bit for bit, whatever the splits, formats and packing."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import duotone
from duotone import QuantizedTensor, QuantizerRole, RecipeError, UserError, formats, recipes
from duotone.modules import GroupedLinear, Linear
from duotone.recipes import CustomRecipe, DelayedScaling
from duotone.tensor.quantizer import Quantizer

DTYPE = torch.bfloat16
K, N = 64, 64
MX, NV = recipes.load("mxfp8"), recipes.load("nvfp4")
RECIPES = {
    **{name: recipes.load(name) for name in recipes.names()},
    "high_precision": recipes.MXFP8BlockScaling(backward_override="high_precision"),
    "dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
}
WEIGHT = QuantizerRole("grouped_linear", "weight")
QUANTIZING = [n for n in RECIPES if RECIPES[n](WEIGHT) != Quantizer()]
PACKABLE = ["mxfp8", "high-precision-fwd-mxfp8-bwd", "dequantized"]
"""Recipes whose weights have no scale across the rows of two experts."""


def grouped(count: int = 4, recipe=MX, **options) -> GroupedLinear:
    return GroupedLinear(count, K, N, **{"params_dtype": DTYPE, "recipe": recipe, "name": "g", **options})


def member(m: GroupedLinear, kind: str, i: int) -> Tensor | None:
    """The weight or bias of an expert, however they are packed."""
    if kind == "bias" and not m.use_bias:
        return None
    packed = m.single_grouped_weight if kind == "weight" else m.single_grouped_bias
    return m._parameters[kind][i] if packed else m._parameters[f"{kind}{i}"]


def separate(m: GroupedLinear, seeds: int) -> list[Linear]:
    """Linears of the same values; the i-th takes the seeds that the group gives its i-th expert."""
    results = []
    for i in range(m.num_gemms):
        one = Linear(K, N, bias=m.use_bias, params_dtype=m.weight.dtype, recipe=m.recipe, name=f"g{i}")
        with torch.no_grad():
            for kind in ("weight", "bias") if m.use_bias else ("weight",):
                getattr(one, kind).copy_(member(m, kind, i))
        one.duotone_seed.copy_(m.duotone_seed + i * seeds)
        one.module_type = m.module_type  # some recipes give grouped linears formats of their own
        results.append(one)
    return results


def gradient(m: GroupedLinear, kind: str, i: int) -> Tensor:
    packed = m.single_grouped_weight if kind == "weight" else m.single_grouped_bias
    return m._parameters[kind].grad[i] if packed else m._parameters[f"{kind}{i}"].grad


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train(m: GroupedLinear, x: Tensor, splits, dy: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    m.zero_grad()
    y = m(leaf, splits)
    y.backward(dy)
    kinds = ("weight", "bias") if m.use_bias else ("weight",)
    return [y.detach(), leaf.grad, *(gradient(m, kind, i) for kind in kinds for i in range(m.num_gemms))]


def train_each(linears: list[Linear], x: Tensor, splits: list[int], dy: Tensor) -> list[Tensor]:
    ys, dxs = [], []
    for one, rows, grad in zip(linears, x.split(splits), dy.split(splits), strict=True):
        leaf = rows.clone().requires_grad_()
        one.zero_grad()
        y = one(leaf)
        y.backward(grad)
        ys.append(y.detach())
        dxs.append(leaf.grad)
    kinds = ("weight", "bias") if linears[0].bias is not None else ("weight",)
    return [torch.cat(ys), torch.cat(dxs), *(getattr(one, kind).grad for kind in kinds for one in linears)]


SPLITS = [[16, 16, 16, 16], [33, 0, 1, 30], [0, 0, 0, 64], [5, 7, 0, 3]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_it_is_so_many_separate_linears_bit_for_bit(name, bias, packed) -> None:
    """core 87, hybrid 99: four steps of other splits; outputs, gradients, seeds and delayed scales."""
    m = grouped(recipe=RECIPES[name], bias=bias, single_grouped_weight=packed, single_grouped_bias=packed)
    plan = m.plan_for(torch.zeros(4, K, dtype=DTYPE, requires_grad=True))
    linears = separate(m, plan.seeds)
    for splits in SPLITS:
        x, dy = torch.randn(sum(splits), K).to(DTYPE), torch.randn(sum(splits), N).to(DTYPE)
        for i, one in enumerate(linears):
            one.duotone_seed.copy_(m.duotone_seed + i * plan.seeds)
        before = m.duotone_seed.clone()
        assert equal(train(m, x, splits, dy), train_each(linears, x, splits, dy))
        assert torch.equal(m.duotone_seed, before + plan.seeds * m.num_gemms)
        if plan.is_delayed:
            for state in ("duotone_forward", "duotone_backward"):
                for buffer in ("scale", "amax_history"):
                    each = [getattr(getattr(one, state), buffer) for one in linears]
                    assert torch.equal(getattr(getattr(m, state), buffer), torch.cat(each, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, DTYPE], ids=str)
def test_identity_is_bit_identical_to_f_linear_over_each_part(dtype) -> None:
    m = grouped(recipe=None, params_dtype=dtype)
    x, dy = torch.randn(39, K).to(dtype), torch.randn(39, N).to(dtype)
    splits = [20, 0, 18, 1]
    leaves = [member(m, kind, i).detach().clone().requires_grad_() for kind in ("weight", "bias") for i in range(4)]
    leaf = x.clone().requires_grad_()
    y = torch.cat([F.linear(rows, leaves[i], leaves[4 + i]) for i, rows in enumerate(leaf.split(splits))])
    y.backward(dy)
    assert equal(train(m, x, splits, dy), [y.detach(), leaf.grad, *(t.grad for t in leaves)])


def test_splits_may_be_a_list_a_tuple_or_a_tensor_of_integers() -> None:
    m, x, dy = grouped(), torch.randn(40, K).to(DTYPE), torch.randn(40, N).to(DTYPE)
    splits = [9, 0, 30, 1]
    expected = train(m, x, splits, dy)
    for inputs in (
        tuple(splits),
        torch.tensor(splits),
        torch.tensor(splits, dtype=torch.int32),
        torch.tensor(splits * 2)[:4],
    ):
        assert equal(train(m, x, inputs, dy), expected)
    lead = train(m, x.view(5, 8, K), splits, dy.view(5, 8, N))
    assert lead[0].shape == (5, 8, N) and lead[1].shape == (5, 8, K)
    assert equal([lead[0].view(40, N), lead[1].view(40, K), *lead[2:]], expected)
    strided = torch.randn(40, 2 * K).to(DTYPE)
    strided[:, ::2] = x
    assert torch.equal(m(strided[:, ::2], splits), expected[0])


def test_integers_of_numpy_are_row_counts() -> None:
    m, x = grouped(), torch.randn(40, K).to(DTYPE)
    counts = np.array([9, 0, 30, 1])
    assert torch.equal(m(x, list(counts)), m(x, [9, 0, 30, 1]))
    with pytest.raises(UserError, match="integers that are not negative"):
        m(x, list(counts.astype(np.float32)))


def test_splits_may_change_after_forward() -> None:
    """Backward follows the counts of its forward."""
    m, x, dy = grouped(), torch.randn(40, K).to(DTYPE), torch.randn(40, N).to(DTYPE)
    expected = train(m, x, [9, 0, 30, 1], dy)
    for splits in ([9, 0, 30, 1], torch.tensor([9, 0, 30, 1])):
        leaf = x.clone().requires_grad_()
        m.zero_grad()
        y = m(leaf, splits)
        splits[0], splits[2] = 30, 9
        y.backward(dy)
        assert torch.equal(leaf.grad, expected[1]) and torch.equal(m.weight2.grad, expected[4])


@pytest.mark.parametrize(
    "recipe", [None, MX, NV, recipes.load("fp8-delayed")], ids=["bf16", "mxfp8", "nvfp4", "delayed"]
)
def test_no_tokens_at_all_give_empty_outputs_and_zero_gradients(recipe) -> None:
    """core 87, hybrid 106."""
    m = grouped(recipe=recipe)
    for shape in ((0, K), (2, 0, K)):
        result = train(m, torch.zeros(shape).to(DTYPE), [0] * 4, torch.zeros(*shape[:-1], N).to(DTYPE))
        assert result[0].shape == (*shape[:-1], N) and result[1].shape == shape
        assert all(not g.any() and g.shape[-1] in (N, K) for g in result[2:])
    with torch.no_grad():
        m(torch.randn(3, K).to(DTYPE), [0, 3, 0, 0])


def state_of(m: nn.Module) -> list[Tensor]:
    return [*(p.detach().clone() for p in m.parameters()), *(b.clone() for b in m.buffers())]


BAD = {
    "sum": ([9, 0, 30, 2], "sum to 41, and the input has 40 rows"),
    "short sum": ([9, 0, 30, 0], "sum to 39"),
    "negative": ([-1, 11, 30, 0], "not negative"),
    "too few": ([10, 30], "needs 4 row counts"),
    "too many": ([10, 10, 10, 5, 5], "needs 4 row counts"),
    "none": ([], "needs 4 row counts"),
    "floats": ([10.0, 10.0, 10.0, 10.0], "row counts"),
    "float tensor": (torch.full((4,), 10.0), "int tensor of one dimension; got (4,) in torch.float32"),
    "two dimensions": (torch.full((2, 2), 10), "int tensor of one dimension; got (2, 2)"),
    "scalar tensor": (torch.tensor(40), "int tensor of one dimension; got ()"),
    "bool tensor": (torch.ones(4, dtype=torch.bool), "torch.bool"),
    "bools": ([True, True, True, 37], "row counts"),
    "on meta": (torch.full((4,), 10, device="meta"), "on meta, where it has no values"),
    "a number": (40, ""),
    "nothing": (None, ""),
}


@pytest.mark.parametrize("recipe", [NV, DelayedScaling()], ids=["nvfp4", "delayed"])
@pytest.mark.parametrize("case", BAD)
def test_bad_splits_are_one_line_and_leave_nothing_half_updated(case, recipe) -> None:
    """core 88."""
    splits, message = BAD[case]
    m, x = grouped(recipe=recipe), torch.randn(40, K).to(DTYPE)
    train(m, x, [10] * 4, torch.randn(40, N).to(DTYPE))
    before = state_of(m)
    with pytest.raises(UserError) as error:
        m(x, splits)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert equal(state_of(m), before)


def test_wrong_inputs_and_constructions_are_one_line() -> None:
    m = grouped(recipe=NV)
    x = torch.randn(40, K).to(DTYPE)
    before = state_of(m)
    tensor = MX(QuantizerRole("linear", "input")).quantize(x)
    for call, message in (
        (lambda: m(tensor, [10] * 4), "g takes a plain tensor; got one quantized to"),
        (lambda: m(x.float(), [10] * 4), "in torch.bfloat16; got (..., 64) in torch.float32"),
        (lambda: m(x[:, :32], [10] * 4), "takes (..., 64) in torch.bfloat16; got (..., 32)"),
        (lambda: m(torch.tensor(1.0), [10] * 4), "takes a tensor"),
        (lambda: m("x", [10] * 4), "got str"),
        (lambda: GroupedLinear(0, K, N), "num_gemms is 0; give a whole number, one or more"),
        (lambda: GroupedLinear("3", K, N), "num_gemms is '3'; give a whole number"),
        (lambda: grouped(single_grouped_weight=True, delay_wgrad_compute=True), "keep separate weights"),
    ):
        with pytest.raises(UserError) as error:
            call()
        assert message in str(error.value) and "\n" not in str(error.value)
    assert equal(state_of(m), before)


@pytest.mark.parametrize("recipe", [None, MX, NV, DelayedScaling()], ids=["identity", "mxfp8", "nvfp4", "delayed"])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_experts_of_other_shapes_or_devices_are_refused_by_name(kind, recipe) -> None:
    """Kernels over all experts see addresses alone, and the casts of the CPU would cut or pad a contraction."""
    x = torch.randn(40, K).to(DTYPE)
    m = grouped(**({} if recipe is None else {"recipe": recipe}))
    parameter = getattr(m, f"{kind}2")
    wrong = [parameter.new_ones((N, K + 32) if kind == "weight" else (1,)), parameter.detach().to("meta")]
    for other in wrong:
        setattr(m, f"{kind}2", nn.Parameter(other))
        text = (
            rf"g: the {kind} of expert 2 is \({', '.join(map(str, other.shape))},?\) on {other.device.type}; those of"
        )
        with pytest.raises(UserError, match=text):
            m(x, [10] * 4)
    setattr(m, f"{kind}2", parameter)
    assert m(x, [10] * 4).isfinite().all()


def test_a_packed_weight_of_other_experts_is_refused() -> None:
    m = grouped(single_grouped_weight=True)
    m.weight = nn.Parameter(m.weight.detach()[:3].clone())
    with pytest.raises(UserError, match="g has weights of 3 experts for num_gemms 4"):
        m(torch.randn(40, K).to(DTYPE), [10] * 4)


def test_experts_of_mixed_formats_are_refused_by_name() -> None:
    """core 88, hybrid 61."""
    x = torch.randn(40, K).to(DTYPE)
    with duotone.quantized_model_init(recipe=MX):
        m = grouped()
    with duotone.quantized_model_init(recipe=NV):
        other = grouped(recipe=NV)
    plain = grouped()
    m.weight2 = plain.weight2
    with pytest.raises(UserError, match=r"g: the weight of expert 2 is plain torch.bfloat16 where expert 0 has mxfp8"):
        m(x, [10] * 4)
    m.weight2 = other.weight2
    with pytest.raises(UserError, match="the weight of expert 2 is"):
        m(x, [10] * 4)
    m = grouped()
    m.weight1 = nn.Parameter(m.weight1.detach().float())
    with pytest.raises(UserError, match=r"expert 1 is plain torch.float32 where expert 0 has plain torch.bfloat16"):
        m(x, [10] * 4)


# --- packed and discrete


@pytest.mark.parametrize(("packed_weight", "packed_bias"), list(itertools.product([True, False], repeat=2)))
def test_checkpoints_load_both_ways_bit_for_bit(packed_weight, packed_bias) -> None:
    """core 89: any packing into any other, also below a prefix, and the given mapping stays as it is."""
    source = grouped(single_grouped_weight=packed_weight, single_grouped_bias=packed_bias)
    names = set(source.state_dict())
    assert ("weight" in names) == packed_weight and ("bias3" in names) != packed_bias
    for weight, bias in itertools.product([True, False], repeat=2):
        m = nn.ModuleDict({"moe": grouped(single_grouped_weight=weight, single_grouped_bias=bias)})
        options = {f"moe.{name}": value for name, value in source.state_dict().items()}
        saved = dict(options)
        m.load_state_dict(options)
        assert options.keys() == saved.keys()
        for kind, i in itertools.product(("weight", "bias"), range(4)):
            assert torch.equal(member(m["moe"], kind, i), member(source, kind, i))


def bits(t: QuantizedTensor) -> list[Tensor]:
    return [part for plane in t.planes if plane is not None for part in plane.parts.values()]


@pytest.mark.parametrize("name", PACKABLE)
@pytest.mark.parametrize("direction", [(True, False), (False, True), (True, True)])
def test_checkpoints_of_held_weights_load_both_ways_bit_for_bit(direction, name) -> None:
    """core 89: the bytes, not a second rounding; usages once per group."""
    recipe = RECIPES[name]
    with duotone.quantized_model_init(recipe=recipe):
        source = grouped(recipe=recipe, single_grouped_weight=direction[0])
        m = grouped(recipe=recipe, single_grouped_weight=direction[1])
    usages = m.weight.get_usages()
    m.load_state_dict(source.state_dict())
    assert m.weight.get_usages() == usages and isinstance(m.weight, QuantizedTensor)
    for i in range(4):
        a, b = member(m, "weight", i).detach(), member(source, "weight", i).detach()
        assert torch.equal(a.dequantize(), b.dequantize())
        assert equal([t.contiguous() for t in bits(a)], [t.contiguous() for t in bits(b)])


@pytest.mark.parametrize("counts", [(4, 2), (2, 4)])
@pytest.mark.parametrize(("is_saved_packed", "is_packed"), list(itertools.product([True, False], repeat=2)))
def test_a_checkpoint_of_another_number_of_experts_is_refused(is_saved_packed, is_packed, counts) -> None:
    source, m = (
        grouped(counts[0], single_grouped_weight=is_saved_packed, bias=False),
        grouped(counts[1], single_grouped_weight=is_packed, bias=False),
    )
    with pytest.raises((RuntimeError, UserError)):
        m.load_state_dict(source.state_dict())


def test_a_packed_weight_is_one_leaf_that_optimizers_write() -> None:
    m, x, dy = grouped(single_grouped_weight=True), torch.randn(40, K).to(DTYPE), torch.randn(40, N).to(DTYPE)
    assert {n: tuple(p.shape) for n, p in m.named_parameters() if "weight" in n} == {"weight": (4, N, K)}
    twin = grouped()
    twin.load_state_dict(m.state_dict())
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (m, twin)]
    for _ in range(3):
        assert equal(train(m, x, [9, 0, 30, 1], dy), train(twin, x, [9, 0, 30, 1], dy))
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("name", [n for n in QUANTIZING if n not in PACKABLE])
def test_a_scale_over_two_experts_is_refused_where_weights_are_packed_and_held(name) -> None:
    if RECIPES[name].backward_override == "high_precision" or name in (
        "mxfp8-fwd-bf16-bwd",
        "mxfp8-fwd-high-precision-bwd",
    ):
        pytest.skip("mxfp8 rowwise alone")
    with duotone.quantized_model_init(recipe=RECIPES[name]), pytest.raises(UserError, match="would span experts"):
        grouped(recipe=RECIPES[name], single_grouped_weight=True)


# --- held weights


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", QUANTIZING)
def test_held_weights_have_the_bits_of_separate_held_linears(name, packed) -> None:
    """core 78, 87, and convert_parameters gives the same as construction."""
    recipe = RECIPES[name]
    if packed and name not in PACKABLE:
        pytest.skip("refused")
    plain = grouped(recipe=recipe, single_grouped_weight=packed)
    m = copy.deepcopy(plain)
    duotone.convert_parameters(m, recipe)
    plan = m.plan_for(torch.zeros(4, K, dtype=DTYPE, requires_grad=True))
    linears = separate(plain, plan.seeds)
    for one in linears:
        duotone.convert_parameters(one, recipe)
    assert all(isinstance(p, QuantizedTensor) for n, p in m.named_parameters() if "weight" in n)
    for splits in SPLITS[:2]:
        x, dy = torch.randn(64, K).to(DTYPE), torch.randn(64, N).to(DTYPE)
        for i, one in enumerate(linears):
            one.duotone_seed.copy_(m.duotone_seed + i * plan.seeds)
        assert equal(train(m, x, splits, dy), train_each(linears, x, splits, dy))
        values = torch.randn(4, N, K).to(DTYPE)
        with torch.no_grad():
            for i, one in enumerate(linears):
                one.weight.copy_(values[i])
                member(m, "weight", i).copy_(values[i])
    duotone.convert_parameters(m, recipes.load("bf16"))
    assert not any(isinstance(p, QuantizedTensor) for p in m.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("packed", [False, True])
def test_usages_of_held_weights_survive_train_and_eval(packed, mode) -> None:
    """core 46-48 with one usage for the group."""
    with duotone.quantized_model_init(recipe=MX):
        m = grouped(single_grouped_weight=packed)
    twin = grouped()
    x, dy = torch.randn(40, K).to(DTYPE), torch.randn(40, N).to(DTYPE)
    for _ in range(3):
        values = torch.randn(4, N, K).to(DTYPE) / 8
        with torch.no_grad():
            for i in range(4):
                member(m, "weight", i).copy_(values[i])
                member(twin, "weight", i).copy_(values[i])
                member(twin, "bias", i).copy_(member(m, "bias", i))
        with mode():
            assert torch.equal(m(x, [9, 0, 30, 1]), twin(x, [9, 0, 30, 1]))
        assert equal(train(m, x, [9, 0, 30, 1], dy), train(twin, x, [9, 0, 30, 1], dy))
        assert m.weight.get_usages() == {"rowwise": True, "columnwise": True}


# --- the rest of the contract


def test_roles_are_the_triple_of_every_expert_then_the_pair() -> None:
    """hybrid 75 (table 7.2)."""
    roles = grouped(2).get_quantizer_roles()
    slots = ["input", "weight", "output"]
    assert list(roles) == [f"{s}.{i}" for i in range(2) for s in slots] + [
        f"{s}.{i}" for i in range(2) for s in ("grad_output", "grad_input")
    ]
    assert all(
        role is None
        if slot.startswith(("output", "grad_input"))
        else role == QuantizerRole("grouped_linear", slot[:-2], "g")
        for slot, role in roles.items()
    )


def test_a_custom_recipe_is_asked_once_for_each_slot_of_each_expert() -> None:
    """hybrid 75, 80: in the order of the table, when the plan is built, and never again."""
    roles = []

    def factory(role):
        roles.append(role)
        return MX(QuantizerRole("linear", "input") if role is None else role)

    m, x = grouped(), torch.randn(40, K).to(DTYPE)
    expected = train(m, x, [10] * 4, torch.ones(40, N).to(DTYPE))
    with duotone.autocast(recipe=CustomRecipe(qfactory=factory)):
        for _ in range(2):
            assert equal(train(m, x, [10] * 4, torch.ones(40, N).to(DTYPE)), expected)
    assert roles == list(m.get_quantizer_roles().values()) and len(roles) == 20


@pytest.mark.parametrize("kind", ["input", "weight", "grad_output"])
def test_experts_of_different_formats_are_an_error_that_names_the_expert(kind) -> None:
    """core 88, hybrid 61: before anything ran."""

    def factory(role, seen=[]):  # noqa: B006 (one list for all calls)
        if role is None or role.tensor_type != kind:
            return Quantizer()
        seen.append(role)
        fmt = formats.get("mxfp8_e4m3" if len(seen) % 4 else "mxfp8_e5m2")
        return Quantizer(fmt, fmt)

    m = grouped(recipe=CustomRecipe(qfactory=factory, emulate_mixed=True))
    with pytest.raises(RecipeError) as error:
        m(torch.randn(40, K).to(DTYPE), [10] * 4)
    names = "mxfp8_e5m2/mxfp8_e5m2 and of expert 0 mxfp8_e4m3/mxfp8_e4m3"
    assert str(error.value).startswith(f"g: the recipe gives {kind} of expert 3 {names}; give all experts")


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("packed", [False, True])
def test_copies_are_equal_and_independent(packed, copier) -> None:
    m, x, dy = (
        grouped(recipe=NV, single_grouped_weight=packed),
        torch.randn(40, K).to(DTYPE),
        torch.randn(40, N).to(DTYPE),
    )
    train(m, x, [10] * 4, dy)
    other = copier(m)
    assert equal(train(other, x, [9, 0, 30, 1], dy), train(m, x, [9, 0, 30, 1], dy))
    assert other.weight.data_ptr() != m.weight.data_ptr()


def test_delayed_states_of_each_expert_travel_in_checkpoints() -> None:
    m, other = grouped(recipe=DelayedScaling()), grouped(recipe=DelayedScaling())
    x, dy = torch.randn(40, K).to(DTYPE), torch.randn(40, N).to(DTYPE)
    for _ in range(2):
        train(m, x, [9, 0, 30, 1], dy)
    assert m.duotone_forward.scale.shape == (16,) and m.duotone_backward.scale.shape == (8,)
    other.load_state_dict(m.state_dict())
    assert equal(train(other, x, [9, 0, 30, 1], dy), train(m, x, [9, 0, 30, 1], dy))


def test_torch_autocast_casts_parameters_and_input() -> None:
    m = grouped(params_dtype=torch.float32)
    low = copy.deepcopy(m).to(DTYPE)
    x = torch.randn(40, K)
    with torch.autocast("cpu", dtype=DTYPE):
        y = m(x, [9, 0, 30, 1])
    want = low(x.to(DTYPE), [9, 0, 30, 1])
    y.sum().backward()
    want.sum().backward()
    assert torch.equal(y, want) and m.weight2.grad.dtype == torch.float32
    assert torch.equal(m.weight2.grad, low.weight2.grad.float())


def test_the_state_of_a_failed_backward_stays_usable() -> None:
    """A gradient of the wrong shape is autograd's error; the next step is as ever."""
    m, x, dy = grouped(), torch.randn(40, K).to(DTYPE), torch.randn(40, N).to(DTYPE)
    expected = train(m, x, [10] * 4, dy)
    with pytest.raises(RuntimeError):
        m(x, [10] * 4).backward(dy[:3])
    assert equal(train(m, x, [10] * 4, dy), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("packed", [False, True])
def test_experts_compile_whole(packed: bool, backend: str) -> None:
    """Backend "eager" copies saved tensors. The one op of a group finds its own all the same."""
    torch.manual_seed(0)
    eager = duotone.GroupedLinear(2, 64, 64, recipe="mxfp8", name="g", single_grouped_weight=packed)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend=backend)
    x, dy = torch.randn(32, 64), torch.randn(32, 64)
    for call in (eager, run):
        call(x, [16, 16]).backward(dy)
    assert torch.equal(run(x, [16, 16]), eager(x, [16, 16]))
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
