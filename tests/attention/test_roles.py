"""The roles of attention, who asks for low precision there, and what the plan says about it."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import CustomRecipe, IdentityQuantizer, QuantizerRole, recipes
from duotone.attention import DotProductAttention, MultiheadAttention, TransformerLayer
from duotone.compat import MXFP8Quantizer
from duotone.compat.factories import RECIPES
from duotone.errors import RecipeError, UserError
from duotone.recipes import Rule, RuleRecipe

DPA = recipes.load("nvfp4-linear-fp8-dpa")


def dpa(kind: str, name: str = "core") -> QuantizerRole:
    return QuantizerRole("dpa", kind, name)


def slots(module, mode: str | None = None) -> list[QuantizerRole | None]:
    return list(module.get_quantizer_roles(mode).values())


def linear(kind: str, name: str) -> QuantizerRole:
    return QuantizerRole("linear", kind, name)


def hint(name: str) -> QuantizerRole:
    return QuantizerRole("", "", name)


def heads() -> list[torch.Tensor]:
    return [torch.randn(4, 2, 4, 8) for _ in range(3)]


class Recording:
    """A factory that keeps the roles it was asked for; attention in MXFP8 where `asks`, linears in MXFP8 always."""

    def __init__(self, asks: bool = True) -> None:
        self.roles: list[QuantizerRole | None] = []
        self.asks = asks

    def __call__(self, role: QuantizerRole | None) -> object:
        self.roles.append(role)
        kinds = ("linear", "dpa") if self.asks else ("linear",)
        return MXFP8Quantizer() if role is not None and role.module_type in kinds else IdentityQuantizer()

    def slots(self) -> list[QuantizerRole | None]:
        return self.roles


def test_the_slots_are_nine_and_six_in_the_order_of_the_table() -> None:
    core = DotProductAttention(4, 8, name="core")
    assert slots(core, "forward") == [dpa("qkv")] * 3 + [hint("core.dpa_output")] * 3 + [dpa("s")] * 3
    assert slots(core, "backward") == [hint("core.dpa_grad_input")] * 2 + [dpa("do")] * 2 + [dpa("dp")] * 2
    with pytest.raises(UserError, match="mode 'both' is unknown"):
        core.get_quantizer_roles("both")


def test_roles_of_known_consumers_take_the_places_of_the_hints() -> None:
    core = DotProductAttention(4, 8, name="core")
    assert core.output_quantizer_role is None and core.grad_input_quantizer_role is None
    core.output_quantizer_role, core.grad_input_quantizer_role = linear("input", "p"), linear("grad_output", "q")
    assert slots(core, "forward")[3:6] == [linear("input", "p")] * 3
    assert slots(core, "backward")[:2] == [linear("grad_output", "q")] * 2


def test_a_factory_is_asked_once_per_slot_and_anew_only_for_a_changed_role() -> None:
    factory = Recording(asks=False)
    core = DotProductAttention(4, 8, name="core", recipe=CustomRecipe(qfactory=factory))
    expected = slots(core)
    for _ in range(2):
        core(*heads())
        assert factory.roles == expected
    core.output_quantizer_role = None
    core(*heads())
    assert factory.roles == expected
    core.output_quantizer_role = linear("input", "proj")
    core(*heads())
    assert factory.roles == expected + [linear("input", "proj")] * 3
    with duotone.autocast(recipe=CustomRecipe(qfactory=Recording())):
        core(*heads())
    core(*heads())
    assert len(factory.roles) == 18


def test_an_unnamed_module_gets_a_name_of_its_own_and_naming_gives_the_full_one() -> None:
    first, second = DotProductAttention(4, 8), DotProductAttention(4, 8)
    assert first.module_name != second.module_name and not first.site.named
    layers = torch.nn.ModuleList(TransformerLayer(32, 64, 4) for _ in range(2))
    duotone.assign_names(layers)
    core = layers[1].self_attention.core_attention
    assert core.module_name == "1.self_attention.core_attention" and (core.site.layer, core.site.layers) == (1, 2)
    assert slots(core, "forward")[0] == dpa("qkv", "1.self_attention.core_attention")


def test_the_recipe_file_runs_as_written_on_a_module_without_a_name() -> None:
    """Its rules for boundaries ask how names end, which the module knows. A rule for the name before it is an error."""
    named, lone = DotProductAttention(4, 8, name="core", recipe=DPA), DotProductAttention(4, 8, recipe=DPA)
    inputs = heads()
    assert torch.equal(lone(*inputs), named(*inputs))
    assert lone.quantizers(DPA) == named.quantizers(DPA)
    for end in ("core", "a.dpa_output", "?dpa_output"):
        recipe = RuleRecipe(rules=(Rule(module=f"*{end}", format="identity"),), base=DPA)
        with pytest.raises(duotone.RecipeError, match="has no place in a model"):
            DotProductAttention(4, 8, recipe=recipe)(*inputs)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "nvfp4-linear-fp8-dpa"])
@pytest.mark.parametrize("custom", [False, True])
def test_recipes_for_linears_do_not_ask_for_attention(name, custom) -> None:
    recipe = CustomRecipe(qfactory=RECIPES[name], strict=True) if custom else recipes.load(name)
    core = DotProductAttention(4, 8, name="core", recipe=recipe)
    core(*heads())
    assert [tuple(row) for row in core.plan_rows(recipe, "cpu")] == [
        ("QK^T", "identity", "identity", "attention runs in high precision", "torch", True),
        ("PV", "identity", "identity", "attention runs in high precision", "torch", True),
    ]


ASKING = {
    "file": DPA,
    "factory": CustomRecipe(qfactory=RECIPES["nvfp4-linear-fp8-dpa"], fp8_dpa=True),
    "module type": RuleRecipe(rules=(Rule(module_type="dpa", format="mxfp8_e4m3"),)),
    "tensor type": RuleRecipe(rules=(Rule(tensor_type="s", format="mxfp8_e4m3"), Rule(format="mxfp8_e4m3"))),
    "base": RuleRecipe(rules=(Rule(module_type="linear", format="identity"),), base=DPA),
}


@pytest.mark.parametrize("name", ASKING)
def test_a_request_runs_as_its_recipe_says_and_is_in_the_plan(name) -> None:
    recipe = ASKING[name]
    core = DotProductAttention(4, 8, name="core", recipe=recipe)
    inputs = heads()
    out, plain = core(*inputs), DotProductAttention(4, 8)(*inputs)
    assert not torch.equal(out, plain) and (out - plain).norm() < 0.1 * plain.norm()
    rows = {row.gemm: (row.a, row.b) for row in core.plan_rows(recipe, "cpu")}
    kinds = {kind: recipe.attention_quantizer(dpa(kind)) for kind in ("qkv", "s", "do", "dp")}
    planes = {kind: (each.rowwise.name, each.columnwise.name) for kind, each in kinds.items()}
    assert rows == {
        "QK^T": (planes["qkv"][0], planes["qkv"][0]),
        "PV": (planes["s"][0], planes["qkv"][1]),
        "QK^T again": (planes["qkv"][0], planes["qkv"][0]),
        "P^T dO": (planes["s"][1], planes["do"][1]),
        "dO V^T": (planes["do"][0], planes["qkv"][0]),
        "dS K": (planes["dp"][0], planes["qkv"][1]),
        "dS^T Q": (planes["dp"][1], planes["qkv"][1]),
    }


@pytest.mark.parametrize(
    "rules",
    [
        (Rule(format="mxfp8_e4m3"),),
        (Rule(module_type="dpa", format="identity"), Rule(format="mxfp8_e4m3")),
        (Rule(module_type="linear", format="mxfp8_e4m3"),),
    ],
)
def test_rules_for_all_alike_or_for_linears_do_not_ask_even_where_strict(rules) -> None:
    core = DotProductAttention(4, 8, name="core", recipe=RuleRecipe(rules=rules, strict=True))
    core(*heads())
    assert {row.reason for row in core.plan_rows(core.recipe, "cpu")} == {"attention runs in high precision"}


def strict(name: str) -> recipes.Recipe:
    return {
        "factory": CustomRecipe(qfactory=Recording(), strict=True, fp8_dpa=True),
        "rules": RuleRecipe(rules=(Rule(module_type="dpa", tensor_type="do", format="mxfp8_e4m3"),), strict=True),
    }[name]


def test_a_factory_that_fails_at_a_boundary_stops_before_any_projection_ran() -> None:
    """The seed of a stochastic projection stays where it was."""

    def factory(role: QuantizerRole | None) -> object:
        if role == hint("a.core_attention.dpa_output"):
            return None
        return RECIPES["nvfp4"](role) if role and role.module_type == "linear" else IdentityQuantizer()

    module = MultiheadAttention(32, 4, name="a", fuse_qkv_params=True, recipe=CustomRecipe(qfactory=factory))
    seed = module.qkv.duotone_seed.clone()
    with pytest.raises(RecipeError, match=r"None for name=a\.core_attention\.dpa_output"):
        module(torch.randn(16, 2, 32, requires_grad=True))
    assert torch.equal(module.qkv.duotone_seed, seed)


@pytest.mark.parametrize("name", ["factory", "rules"])
def test_strict_makes_a_request_an_error_in_the_plan_and_in_every_forward(name) -> None:
    core = DotProductAttention(4, 8, name="a.core", recipe=strict(name))
    for call in (lambda: core.plan_rows(core.recipe, "cpu"), lambda: core(*heads()), lambda: core(*heads())):
        with pytest.raises(RecipeError) as error:
            call()
        assert "strict: a.core would emulate its products" in str(error.value) and "\n" not in str(error.value)
        assert "no attention kernel takes mxfp8_e4m3;" in str(error.value)
    with duotone.autocast(recipe=recipes.load("bf16")):
        core(*heads())


def test_strict_takes_formats_that_an_attention_kernel_takes() -> None:
    recipe = CustomRecipe(qfactory=lambda role: RECIPES["nvfp4-linear-fp8-dpa"](role), strict=True, fp8_dpa=True)
    core = DotProductAttention(4, 64, name="a", recipe=recipe)
    core(*(torch.randn(4, 2, 4, 64) for _ in range(3)))
    assert {row.kernel for row in core.plan_rows(recipe, "cpu")} == {"blocks of keys"}


@pytest.mark.parametrize(
    ("width", "dropout", "reason"),
    [(64, 0.1, "no dropout; set attention_dropout to 0"), (48, 0.0, "one width"), ((192, 128), 0.0, "one width")],
)
def test_strict_refuses_heads_and_dropout_that_no_attention_kernel_takes(width, dropout, reason) -> None:
    recipe = duotone.Float8CurrentScaling(fp8_dpa=True, strict=True)
    core = DotProductAttention(4, width, attention_dropout=dropout, name="a", recipe=recipe)
    x = [torch.randn(4, 2, 4, wide) for wide in (core.channels[0], *core.channels)]
    for call in (lambda: core.plan_rows(recipe, "cpu"), lambda: core(*x), lambda: core(*x)):
        with pytest.raises(RecipeError, match=f"strict: a would emulate its products: .*{reason}"):
            call()
    if dropout:
        core.eval()(*x)


def test_a_strict_request_stops_before_any_projection_ran() -> None:
    recipe = CustomRecipe(qfactory=RECIPES["nvfp4"], strict=True, fp8_dpa=True)
    module = MultiheadAttention(32, 4, name="a", fuse_qkv_params=True, recipe=recipe)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with pytest.raises(RecipeError, match=r"strict: a\.core_attention"):
        module(torch.randn(4, 2, 32))
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert module.qkv.output_quantizer_role is None


def test_a_factory_that_gives_nothing_is_named_with_its_slot() -> None:
    recipe = CustomRecipe(qfactory=lambda role: None if role and role.tensor_type == "dp" else IdentityQuantizer())
    with pytest.raises(RecipeError, match=r"None for module_type=dpa\|tensor_type=dp\|name=core"):
        DotProductAttention(4, 8, name="core", recipe=recipe)(*heads())


def test_a_recipe_of_evaluation_is_the_one_that_counts_then() -> None:
    recipe = RuleRecipe(rules=(Rule(module_type="dpa", format="mxfp8_e4m3"),), evaluation=strict("factory"))
    core = DotProductAttention(4, 8, name="core", recipe=recipe)
    core(*heads())
    with pytest.raises(RecipeError, match="strict: core"):
        core.eval()(*heads())


@pytest.mark.parametrize("norm", [False, True])
def test_multihead_attention_tells_four_neighbours_before_the_factory_is_asked(norm) -> None:
    factory = Recording()
    recipe = CustomRecipe(qfactory=factory, fp8_mha=True)
    module = MultiheadAttention(32, 4, name="a", fuse_qkv_params=True, input_layernorm=norm, recipe=recipe)
    qkv = "a.layernorm_linear_qkv" if norm else "a.qkv"
    for _ in range(2):
        module(torch.randn(4, 2, 32, requires_grad=True)).sum().backward()
    core = "a.core_attention"
    expected = [
        *[linear("input", qkv), linear("weight", qkv), dpa("qkv", core), linear("grad_output", qkv), None],
        *[dpa("qkv", core)] * 3,
        *[linear("input", "a.proj")] * 3,
        *[dpa("s", core)] * 3,
        *[linear("grad_output", qkv)] * 2,
        *[dpa("do", core)] * 2,
        *[dpa("dp", core)] * 2,
        *[linear("input", "a.proj"), linear("weight", "a.proj"), None, linear("grad_output", "a.proj")],
        dpa("do", core),
    ]
    assert sorted(map(str, factory.slots())) == sorted(map(str, expected)) and len(expected) == 25
    first = module.layernorm_qkv if norm else module.qkv
    assert first.output_quantizer_role == dpa("qkv", core) and first.grad_input_quantizer_role is None
    assert module.proj.grad_input_quantizer_role == dpa("do", core) and module.proj.output_quantizer_role is None


def test_without_a_request_boundaries_stay_unknown_and_go_back_to_it() -> None:
    module = MultiheadAttention(32, 4, name="a", fuse_qkv_params=True, recipe=recipes.load("mxfp8"))
    x = torch.randn(4, 2, 32)
    boundaries = (
        lambda: module.qkv.output_quantizer_role,
        lambda: module.proj.grad_input_quantizer_role,
        lambda: module.core_attention.output_quantizer_role,
        lambda: module.core_attention.grad_input_quantizer_role,
    )
    module.proj.output_quantizer_role = linear("input", "next")
    for recipe, has_roles in ((recipes.load("mxfp8"), False), (DPA, True), (recipes.load("bf16"), False)):
        with duotone.autocast(recipe=recipe):
            module(x)
        assert all((role() is not None) == has_roles for role in boundaries)
    assert module.proj.output_quantizer_role == linear("input", "next")


def test_roles_that_a_user_gave_stay_while_nobody_asks_for_attention() -> None:
    module = MultiheadAttention(32, 4, name="a", fuse_qkv_params=True)
    module.qkv.output_quantizer_role = dpa("qkv", "own")
    module(torch.randn(4, 2, 32))
    assert module.qkv.output_quantizer_role == dpa("qkv", "own")


def test_cross_attention_tells_both_projections() -> None:
    module = MultiheadAttention(32, 4, name="a", attention_type="cross", attn_mask_type="no_mask", recipe=DPA)
    module(torch.randn(4, 2, 32), encoder_output=torch.randn(5, 2, 32))
    for projection in (module.query_layer, module.key_value):
        assert projection.output_quantizer_role == dpa("qkv", "a.core_attention")
    assert module.core_attention.grad_input_quantizer_role == linear("grad_output", "a.query_layer")


def test_boundaries_follow_names_that_come_later() -> None:
    layers = torch.nn.ModuleList([MultiheadAttention(32, 4, recipe=ASKING["factory"])])
    module = layers[0]
    module(torch.randn(4, 2, 32))
    duotone.assign_names(layers)
    module(torch.randn(4, 2, 32))
    assert module.qkv.output_quantizer_role == dpa("qkv", "0.core_attention")
    assert module.core_attention.output_quantizer_role == linear("input", "0.proj")


def test_rules_by_name_reach_attention_once_modules_are_named() -> None:
    rules = (Rule(module="1.*", module_type="dpa", format="mxfp8_e4m3"),)
    layers = duotone.assign_names(torch.nn.ModuleList(MultiheadAttention(32, 4) for _ in range(2)))
    formats = [m.core_attention.plan_rows(RuleRecipe(rules=rules), "cpu")[0].a for m in layers]
    assert formats == ["identity", "mxfp8_e4m3"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_after_its_region_repeats_the_forward_and_tells_nobody_anything(reentrant) -> None:
    module = MultiheadAttention(32, 4, attention_dropout=0.0, fuse_qkv_params=True, name="a")
    recipe = RuleRecipe(rules=(Rule(module_type="dpa", format="mxfp8_e4m3"),), base=recipes.load("mxfp8"))
    x = torch.randn(4, 2, 32)
    gradients = []
    for again in (False, True):
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        with duotone.autocast(recipe=recipe):
            out = checkpoint(module, leaf, use_reentrant=reentrant) if again else module(leaf)
        out.square().sum().backward()
        gradients.append([leaf.grad, *(p.grad.clone() for p in module.parameters())])
        assert module.qkv.output_quantizer_role == dpa("qkv", "a.core_attention")
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_names_of_a_layer_are_transformer_engines() -> None:
    layer = TransformerLayer(32, 64, 4, layer_type="decoder", name="tl")
    assert [module.module_name for module in layer.modules() if hasattr(module, "module_name")] == [
        "tl.self_attention.layernorm_linear_qkv",
        "tl.self_attention.core_attention",
        "tl.self_attention.proj",
        "tl.inter_attention.layernorm_linear_q",
        "tl.inter_attention.key_value",
        "tl.inter_attention.core_attention",
        "tl.inter_attention.proj",
        "tl.layernorm_mlp.fc1",
        "tl.layernorm_mlp.fc2",
    ]


def test_copies_meet_recipes_of_their_own() -> None:
    core = DotProductAttention(4, 8, name="core", recipe=DPA)
    core(*heads())
    for other in (copy.deepcopy(core), pickle.loads(pickle.dumps(core))):
        assert other._number != core._number and not other._answers
        other(*heads())


def by_name(kinds: dict[str, QuantizerRole | None], prefix: str) -> dict[str, QuantizerRole | None]:
    return {f"{prefix}.{slot}": role for slot, role in kinds.items()}


def test_every_module_gives_its_roles_in_one_shape_in_the_order_of_the_table() -> None:
    """hybrid 75, table 7.2: slots by name, children below, forward slots before backward ones."""

    def forward(name: str, output: QuantizerRole | None = None) -> dict[str, QuantizerRole | None]:
        return {"input": linear("input", name), "weight": linear("weight", name), "output": output}

    def backward(name: str, grad_input: QuantizerRole | None = None) -> dict[str, QuantizerRole | None]:
        return {"grad_output": linear("grad_output", name), "grad_input": grad_input}

    layer = TransformerLayer(32, 64, 4, name="tl", fuse_qkv_params=True)
    qkv, proj = "tl.self_attention.layernorm_linear_qkv", "tl.self_attention.proj"
    fc1, fc2 = "tl.layernorm_mlp.fc1", "tl.layernorm_mlp.fc2"
    core = layer.self_attention.core_attention
    attention = [
        by_name(forward(qkv), "layernorm_qkv")
        | by_name(core.get_quantizer_roles("forward"), "core_attention")
        | by_name(forward(proj), "proj"),
        by_name(backward(qkv), "layernorm_qkv")
        | by_name(core.get_quantizer_roles("backward"), "core_attention")
        | by_name(backward(proj), "proj"),
    ]
    mlp = [
        by_name(forward(fc1, linear("input", fc2)), "fc1") | by_name(forward(fc2), "fc2"),
        by_name(backward(fc1), "fc1") | by_name(backward(fc2, linear("grad_output", fc1)), "fc2"),
    ]
    for i, mode in enumerate(("forward", "backward")):
        assert list(layer.self_attention.get_quantizer_roles(mode).items()) == list(attention[i].items())
        assert list(layer.layernorm_mlp.get_quantizer_roles(mode).items()) == list(mlp[i].items())
        whole = by_name(attention[i], "self_attention") | by_name(mlp[i], "layernorm_mlp")
        assert list(layer.get_quantizer_roles(mode).items()) == list(whole.items())
    both = layer.get_quantizer_roles("forward") | layer.get_quantizer_roles("backward")
    assert list(layer.get_quantizer_roles().items()) == list(both.items())
    single = duotone.Linear(32, 32, name="l")
    assert list(single.get_quantizer_roles().items()) == list((forward("l") | backward("l")).items())
    grouped = duotone.GroupedLinear(2, 32, 32, name="g").get_quantizer_roles("backward")
    assert list(grouped) == ["grad_output.0", "grad_input.0", "grad_output.1", "grad_input.1"]
    chain = duotone.ops.Sequential(duotone.ops.Quantize(True, True), duotone.ops.GELU(), single)
    expected = {"0.output": linear("input", ""), **by_name(forward("l"), "2")}
    expected |= {"0.grad_input": linear("grad_output", ""), **by_name(backward("l"), "2")}
    assert list(chain.get_quantizer_roles().items()) == list(expected.items())
    assert len(duotone.MoE(32, 32, 2).get_quantizer_roles()) == 20


OWNERS = {
    "mlp": (lambda: duotone.LayerNormMLP(32, 64, name="m"), "fc2", "fc1"),
    "attention": (lambda: MultiheadAttention(32, 4, name="m", fuse_qkv_params=True), "proj", "qkv"),
    "cross": (lambda: MultiheadAttention(32, 4, name="m", attention_type="cross"), "proj", "query_layer"),
    "layer": (
        lambda: TransformerLayer(32, 64, 4, name="m", fuse_qkv_params=True),
        "layernorm_mlp.fc2",
        "self_attention.layernorm_qkv",
    ),
}


@pytest.mark.parametrize("name", OWNERS)
def test_boundary_roles_reach_the_linears_at_the_boundary(name) -> None:
    """hybrid 77, 78: before the first forward and after it, as the recipe sees them."""
    make, last, first = OWNERS[name]
    module, recorder = make(), Recording(asks=False)
    call = (torch.randn(4, 2, 32),) if name != "cross" else (torch.randn(4, 2, 32), None, torch.randn(4, 2, 32))
    with duotone.autocast(recipe=CustomRecipe(qfactory=recorder)):
        module(*call)
        assert linear("input", "next") not in recorder.roles
        module.output_quantizer_role = linear("input", "next")
        module.grad_input_quantizer_role = linear("grad_output", "previous")
        module(*call)
    assert recorder.roles.count(linear("input", "next")) == recorder.roles.count(linear("grad_output", "previous")) == 1
    slots = module.get_quantizer_roles()
    assert slots[f"{last}.output"] == module.output_quantizer_role == linear("input", "next")
    assert slots[f"{first}.grad_input"] == module.grad_input_quantizer_role == linear("grad_output", "previous")


@pytest.mark.parametrize("make", [*(make for make, *_ in OWNERS.values()), lambda: duotone.Linear(32, 32)])
def test_a_role_for_a_slot_that_is_not_there_or_what_is_no_role_is_refused(make) -> None:
    module = make()
    with pytest.raises(UserError, match="has no input_quantizer_role; allowed are output_quantizer_role, grad_input"):
        module.input_quantizer_role = linear("input", "next")
    with pytest.raises(UserError, match=r"output_quantizer_role is 'next'; give a duotone\.QuantizerRole"):
        module.output_quantizer_role = "next"
    with pytest.raises(UserError, match="a linear has no tensor 'inputs'"):
        module.output_quantizer_role = linear("inputs", "next")
    assert module.output_quantizer_role is None
    with pytest.raises(UserError, match="MoE has no output_quantizer_role; set those of its children"):
        duotone.MoE(32, 32, 2).output_quantizer_role = None
