"""MixtralForCausalLM converted: attention and the experts, held as 3-D parameters, are covered; the router is told."""

import functools

import pytest
import torch
from causal import assert_same_bits, batch, gradients, mixtral, train

import duotone
from duotone import recipes
from duotone.errors import RecipeError
from duotone.recipes import Rule
from later import Later

dynamo_testing = Later("torch._dynamo.testing")

STRICT = recipes.MXFP8BlockScaling(strict=True)


def rows_of(model) -> dict[tuple[str, str], duotone.PlanRow]:
    return {(row.module, row.gemm): row for row in duotone.plan(model)}


def test_attention_and_experts_are_converted_and_the_router_is_told() -> None:
    rows = rows_of(duotone.convert(mixtral(), recipes.load("mxfp8")))
    for layer in ("model.layers.0", "model.layers.1"):
        linears = [f"self_attn.{linear}" for linear in ("q_proj", "k_proj", "v_proj", "o_proj")]
        for linear in (*linears, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            for gemm in ("fprop", "dgrad", "wgrad"):
                row = rows[f"{layer}.{linear}", gemm]
                assert (row.a, row.b) == ("mxfp8_e4m3", "mxfp8_e4m3")
        router = rows[f"{layer}.mlp.gate", "-"]
        assert (router.a, router.b) == ("identity", "identity")
        assert router.reason == "MixtralTopKRouter holds weight (4, 64) itself; convert covers nn.Linear"
    assert rows["lm_head", "fprop"].reason == "kept in high precision by a rule"


def test_strict_refuses_the_router_unless_a_rule_asks_for_high_precision() -> None:
    m = mixtral()
    with pytest.raises(RecipeError, match=r"strict: model.layers.0.mlp.gate stays .* by a rule with format 'identity'"):
        duotone.convert(m, STRICT)
    assert not any(isinstance(module, duotone.Linear) for module in m.modules())
    duotone.convert(m, STRICT, rules=[Rule(module="*.mlp.gate", format="identity")])
    assert isinstance(m.model.layers[1].self_attn.o_proj, duotone.Linear)


def test_under_identity_outputs_and_gradients_are_those_of_the_plain_model() -> None:
    """But for the sum over tokens in the experts' weight gradients: theirs is another product, in another order."""
    plain, converted = (
        gradients(mixtral(), batch(0)),
        gradients(duotone.convert(mixtral(), recipes.load("bf16")), batch(0)),
    )
    experts = [name for name in plain if "experts" in name]
    assert len(experts) == 4
    for name in experts:  # fp32, at most some hundred terms: a few ulp of the largest
        assert (converted.pop(name) - (want := plain.pop(name))).abs().max() <= 2**-20 * want.abs().max()
    assert_same_bits(plain, converted)


def test_experts_have_new_delayed_scales_for_weights_of_a_checkpoint_without_any() -> None:
    trained, fresh = (duotone.convert(mixtral(), recipes.load("fp8-delayed")) for _ in range(2))
    gradients(trained, batch(0))
    plain = {name: value * 4 for name, value in mixtral().state_dict().items()}
    for m in (trained, fresh):
        m.load_state_dict(plain)
    with torch.no_grad():
        logits = [m.eval()(input_ids=batch(1)).logits for m in (trained, fresh)]
    assert torch.equal(*logits)


def experts_of(model) -> torch.nn.Module:
    return model.model.layers[1].mlp.experts


@pytest.mark.parametrize("name", recipes.names())
def test_experts_give_what_each_expert_gives_by_itself(name: str) -> None:
    """A loop over experts, each a Linear of its own with the seed that it has in the group."""
    experts = experts_of(duotone.convert(mixtral(), recipes.load(name)))
    x = torch.randn(10, 64)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
    weights = torch.rand(10, 2)
    parts = {"gate_up_proj": experts.planned_gate_up_proj, "down_proj": experts.planned_down_proj}
    seeds = {part: module.duotone_seed.clone() for part, module in parts.items()}
    with torch.no_grad():
        y = experts(x, index, weights)

        def linear(part: str, e: int, rows: torch.Tensor) -> torch.Tensor:
            group = parts[part]
            one = duotone.Linear(*group.weights[e].shape[::-1], bias=False, name=group.module_name, recipe=group.recipe)
            one.module_type, one.weight = group.module_type, torch.nn.Parameter(group.weights[e].clone())
            one.duotone_seed.copy_(seeds[part] + e * group.plan_for(rows).seeds)
            return one(rows)

        want = torch.zeros(10, 64)
        for e in range(4):
            token, choice = torch.where(index == e)
            h = experts._apply_gate(linear("gate_up_proj", e, x[token]))
            want[token] += linear("down_proj", e, h) * weights[token, choice, None]
    assert torch.equal(y, want)


@pytest.mark.filterwarnings("ignore:.*of this update is lost")
def test_experts_keep_their_parameters_and_are_held_quantized_with_their_usages() -> None:
    m = mixtral()
    keys, parameter = list(m.state_dict()), experts_of(m).gate_up_proj
    duotone.convert(m, recipes.load("mxfp8"))
    assert list(m.state_dict()) == keys and experts_of(m).gate_up_proj is parameter
    duotone.convert_parameters(m, recipes.load("mxfp8"))
    weight = experts_of(m).gate_up_proj
    assert weight is parameter and isinstance(weight, duotone.QuantizedTensor) and tuple(weight.shape) == (4, 192, 64)
    losses, tokens = [], batch(0)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.02)
    for step in range(4):
        m.train(step % 2 == 0)
        losses.append(m(input_ids=tokens, labels=tokens).loss.item())
        if m.training:
            m.zero_grad()
            m(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    assert losses[-1] < losses[0] and weight.get_usages() == {"rowwise": True, "columnwise": True}


@functools.cache
def plain_losses() -> list[float]:
    return train(mixtral(num_hidden_layers=1), 24)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_training_lowers_the_loss_as_the_plain_model_does(name: str) -> None:
    plain = plain_losses()
    losses = train(duotone.convert(mixtral(num_hidden_layers=1), recipes.load(name)), 24)
    assert losses[0] > 5.4 and plain[-1] < 2.75
    assert abs(losses[-1] - plain[-1]) < 0.05 * (losses[0] - losses[-1])


def test_revert_gives_back_the_classes_and_the_bits() -> None:
    m = mixtral()
    kinds = [type(module) for module in m.modules()]
    duotone.revert(duotone.convert(m, recipes.load("mxfp8")))
    assert [type(module) for module in m.modules()] == kinds
    assert torch.equal(gradients(m, batch(0))["loss"], gradients(mixtral(), batch(0))["loss"])


def test_compiled_experts_are_one_graph_with_the_bits_of_eager() -> None:
    """Their row counts follow from the router, which is not the library's: the host looks at them."""
    m = duotone.convert(mixtral(), recipes.load("mxfp8"))
    counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
    results = []
    for compiles in (False, True):
        for layer in m.model.layers:
            experts = layer.mlp.experts
            if compiles:
                experts.compile(backend=counter, fullgraph=True)
            torch.manual_seed(0)
            x, index = torch.randn(16, 64, requires_grad=True), torch.randint(0, 4, (16, 2))
            y = experts(x, index, torch.rand(16, 2))
            results.append([y.detach(), *torch.autograd.grad(y.sum(), [x, *experts.parameters()])])
    assert all(
        torch.equal(*both) for pair in zip(results[:2], results[2:], strict=True) for both in zip(*pair, strict=True)
    )
    assert counter.frame_count == 1
