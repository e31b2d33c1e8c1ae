"""What each subject compares: its candidates, what they compute, and the shapes that it takes."""

import pytest
import torch

import duotone
from bench.subjects import cast, grouped, host, layer, linear, mlp, train
from bench.subjects.catalog import SUBJECTS
from bench.timing.case import DEFAULT_RECIPES, Settings, require_multiple
from duotone import recipes
from duotone.errors import UserError
from duotone_lab.training.model import GPT

HIGH = recipes.load("bf16")
CPU = Settings("cpu", (HIGH,), sequence=16, vocabulary=64)
torchao_recipes = layer.torchao_recipes


@pytest.fixture(autouse=True)
def _plain_candidates(monkeypatch):
    monkeypatch.setattr(layer, "compile_module", lambda module: module)
    monkeypatch.setattr(layer, "torchao_recipes", tuple)  # whether it is installed or not


def named(candidates):
    return {candidate.name: candidate for candidate in candidates}


def test_every_subject_takes_its_own_default_shapes():
    assert list(SUBJECTS) == ["linear", "mlp", "grouped", "attention", "cast", "host", "train"]
    for subject in SUBJECTS.values():
        for device, shapes in subject.shapes.items():
            for shape in shapes:
                assert subject.parse("x".join(map(str, shape))) == shape
                assert subject.cases(Settings(device, ()), shape)


@pytest.mark.parametrize("text", ["", "8", "8x8", "8x8x8x8", "8x0x8", "8x-1x8", "ax8x8", "8 x8x8", "8x\uff18x8"])
def test_what_is_no_shape_says_what_is(text):
    with pytest.raises(UserError, match=r"is not MxKxN: give 3 positive whole numbers, such as 8192x4096x4096"):
        linear.LINEAR.parse(text)


def test_a_dimension_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="M is 200, and has to be a multiple of 128: give 256, for example"):
        grouped.cases(CPU, (200, 8, 8))
    with pytest.raises(UserError, match="TOKENS is 40, and has to be a multiple of 16: give 48"):
        train.cases(CPU, (40, 64, 64, 1))
    require_multiple("M", 256, 128)


def test_the_forms_of_a_recipe_are_those_asked_for():
    settings = Settings("cpu", tuple(map(recipes.load, ("bf16", "mxfp8"))), cached=True, compiled=True)
    names = list(named(linear.candidates(settings, (8, 8, 8))))
    assert names[:2] == ["torch bf16 eager", "torch bf16 compiled"]
    assert names[-4:] == ["mxfp8", "mxfp8, cached", "mxfp8, compiled", "mxfp8, cached, compiled"]
    assert list(named(linear.candidates(CPU, (8, 8, 8)))) == [*names[:2], "bf16"]
    assert len(DEFAULT_RECIPES) == 6 and all(recipes.load(name) for name in DEFAULT_RECIPES)


def test_cached_weights_are_encoded_before_the_first_call():
    settings = Settings("cpu", (recipes.load("fp8-current"),), cached=True)
    step = named(linear.candidates(settings, (16, 32, 32)))["fp8-current, cached"].make().call
    assert dict(step.options) == {"is_first_microbatch": False}
    before = step.forward()
    step.module.weight.data.zero_()  # leaves no version behind
    assert torch.equal(step.forward(), before)


def test_a_step_makes_all_gradients_and_keeps_none():
    step = named(linear.candidates(CPU, (16, 32, 8)))["bf16"].make().call
    assert [tuple(leaf.shape) for leaf in step.leaves] == [(16, 32), (8, 32)]
    step()
    assert all(leaf.grad is None for leaf in step.leaves)


def test_extra_memory_is_taken_over_a_step_that_dropped_its_gradients(monkeypatch):
    step = named(linear.candidates(CPU, (16, 32, 8)))["bf16"].make().call
    memory_calls = []

    def sees(name, value=None):
        monkeypatch.setattr(
            torch.cuda, name, lambda: (memory_calls.append((name, step.leaves[1].grad is not None)), value)[1]
        )

    sees("synchronize"), sees("memory_allocated", 5 * layer.MIB), sees("reset_peak_memory_stats")
    sees("max_memory_allocated", 8 * layer.MIB)
    assert step.peak_mib() == 3.0
    assert [kind for kind in memory_calls if kind[0] != "synchronize"] == [
        ("memory_allocated", True),
        ("reset_peak_memory_stats", True),
        ("max_memory_allocated", True),
    ]
    assert all(leaf.grad is None for leaf in step.leaves)


@pytest.mark.parametrize("kind", mlp.KINDS)
def test_the_plain_mlp_computes_what_the_module_computes(kind):
    candidates_by_name = named(mlp.candidates(CPU, (16, 32, 64), mlp.KINDS[kind]))
    plain, module = (candidates_by_name[name].make().call for name in ("torch bf16 eager", "bf16"))
    with torch.no_grad():
        module.module.fc1.weight.copy_(plain.module.up.weight)
        module.module.fc2.weight.copy_(plain.module.down.weight)
    assert module.x is plain.x and len(module.leaves) == len(plain.leaves)
    torch.testing.assert_close(module.forward(), plain.forward(), rtol=0.02, atol=0.02)


def test_experts_have_uneven_multiples_that_cover_all_rows():
    splits = grouped.uneven(16384)
    assert sum(splits) == 16384 and len(splits) == 8 and len(set(splits)) > 3
    assert all(rows % 128 == 0 for rows in splits) and splits == grouped.uneven(16384)


def test_a_loop_of_linears_computes_what_grouped_linear_computes():
    settings = Settings("cpu", (HIGH,), device_splits=True)
    splits = [4, 0, 12]
    candidates_by_name = named(grouped.candidates(settings, (16, 8, 24), splits))
    assert list(candidates_by_name) == ["torch bf16 eager", "torch bf16 compiled", "bf16", "bf16, device splits"]
    plain, module, device = (
        candidates_by_name[name].make().call for name in ("torch bf16 eager", "bf16", "bf16, device splits")
    )
    assert module.extra == (splits,) and device.extra[0].tolist() == splits
    with torch.no_grad():
        for weight, linear in zip(module.module.weights, plain.module.linears, strict=True):
            weight.copy_(linear.weight)
    assert torch.equal(module.forward(), plain.forward())


def test_a_cast_counts_the_input_and_each_plane_that_has_memory_of_its_own():
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    block = cast.quantizer_of(recipes.load("mxfp8"), "input")
    assert cast.cast(block, x).amount == 64 * 32 * (2 + 1 + 1)
    assert cast.cast(block.with_usage(columnwise=False), x).amount == 64 * 32 * (2 + 1)
    assert cast.copied(x).amount == 64 * 32 * (2 + 2)
    stochastic = cast.quantizer_of(recipes.load("nvfp4"), "grad_output")
    assert cast.cast(stochastic.with_usage(columnwise=False), x).amount == 64 * 32 * 2.5


def test_a_tensor_that_stays_as_it_is_is_no_cast():
    with pytest.raises(UserError, match="nothing is cast"):
        cast.cast(cast.quantizer_of(HIGH, "input"), torch.randn(8, 8, dtype=torch.bfloat16))


def test_host_calls_are_bursts_of_steps():
    first, second = host.cases(CPU, (8, 16, 16))
    assert not first.clock.queues and "GroupedLinear" in second.what
    work = named(second.candidates())["bf16"].make()
    assert work.steps == host.STEPS
    work.call()


def test_candidates_that_train_share_parameters_and_agree():
    bench = train.Bench.of(CPU, (32, 32, 64, 2))
    plain, converted = bench.twin(), train.converted(bench.twin(), HIGH)
    fused, modules = train.fused(bench.twin(), HIGH), train.of_modules(bench.twin(), HIGH)
    shared = {id(parameter) for parameter in bench.model.parameters()}
    for model in (plain, converted, fused, modules):
        assert {id(parameter) for parameter in model.parameters()} == shared
    losses = [model(bench.tokens, bench.targets).item() for model in (plain, converted, fused, modules)]
    assert losses[0] == losses[1] and losses[2:] == pytest.approx(losses[:1] * 2, rel=1e-3)
    assert [row.reason.split(":")[0] for row in duotone.plan(fused).filter(reason="fused")] == ["fused"] * 6
    assert type(plain.layers[0].attention.qkv) is torch.nn.Linear


def test_the_loss_of_a_model_that_trains_is_that_of_its_logits(monkeypatch):
    monkeypatch.setattr(train.head, "CHUNK", 12)
    bench = train.Bench.of(CPU, (32, 32, 64, 1))
    model = bench.model.float()
    result, expected = model(bench.tokens, bench.targets), GPT.forward(model, bench.tokens, bench.targets)
    torch.testing.assert_close(result, expected)
    leaves = list(model.parameters())
    for pair in zip(torch.autograd.grad(result, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(*pair)


def test_a_training_step_moves_the_shared_parameters_and_counts_tokens():
    bench = train.Bench.of(CPU, (32, 32, 64, 1))
    work = bench.work(train.of_modules(bench.twin(), HIGH))
    before = bench.model.layers[0].mlp.down.weight.detach().clone()
    work.call()
    assert work.amount == 32 and not torch.equal(bench.model.layers[0].mlp.down.weight, before)
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def test_the_forms_of_a_recipe_that_trains():
    names = list(named(train.candidates(Settings("cpu", (HIGH,), compiled=True, vocabulary=64), (8, 16, 16, 1))))
    assert names[:2] == ["torch bf16 eager", "torch bf16, blocks compiled"]
    forms = ["", ", the rest compiled", ", compiled"]
    assert names[2:] == [f"bf16, {kind}{form}" for kind in ("converted", "fused", "modules") for form in forms]


def test_torchao_makes_its_linears_where_it_is_installed(monkeypatch):
    class Float8:
        class Float8LinearConfig:
            from_recipe_name = staticmethod(lambda name: f"config of {name}")

        @staticmethod
        def convert_to_float8_training(module, *, config):
            module.config = config
            return module

    monkeypatch.setattr(layer, "torchao_recipes", torchao_recipes)
    monkeypatch.setattr(layer.importlib.util, "find_spec", lambda name: name == "torchao")
    monkeypatch.setattr(layer.importlib, "import_module", {"torchao.float8": Float8}.__getitem__)
    candidates_by_name = named(linear.candidates(CPU, (8, 8, 8)))
    assert list(candidates_by_name)[2:4] == ["torchao tensorwise", "torchao rowwise"]
    assert candidates_by_name["torchao rowwise"].make().call.module.config == "config of rowwise"


def test_torchs_grouped_product_computes_what_the_loop_computes():
    splits = [128, 0, 256]
    loop, whole = grouped.Experts(splits, 32, 16, "cpu"), grouped.GroupedMM(splits, 32, 16, "cpu")
    with torch.no_grad():
        for weight, linear in zip(whole.weight, loop.linears, strict=True):
            weight.copy_(linear.weight)
    x = torch.randn(384, 32, dtype=torch.bfloat16)
    torch.testing.assert_close(whole(x), loop(x), rtol=0.02, atol=0.02)
    assert grouped.base("cuda") == "torch._grouped_mm bf16 compiled" and grouped.base("cpu") == "torch bf16 compiled"


def test_only_keeps_the_base_and_the_candidates_with_the_text():
    settings = Settings("cpu", (HIGH, recipes.load("mxfp8")), compiled=True)
    (case,) = linear.LINEAR.cases(settings, (32, 32, 32))
    assert [c.name for c in case.only(("mxfp8, comp", "eager")).candidates()] == [
        "torch bf16 eager",
        "torch bf16 compiled",
        "mxfp8, compiled",
    ]
