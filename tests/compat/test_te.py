"""Scripts for Transformer Engine run after `install()`, with its defaults and numerics, or are refused in one line."""

import copy
import importlib.metadata
import importlib.util
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone.compat import te as compat
from duotone.compat.transformer_engine.instead import INSTEAD, MODULES_WITHOUT
from duotone.compat.transformer_engine.names import MODULES
from duotone.errors import UserError

SCRIPTS = Path(__file__).parent / "te_scripts"


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are built on a GPU where one is. Inputs of these tests are on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def script(name: str) -> ModuleType:
    """A script as a module; it imports transformer_engine when it runs."""
    spec = importlib.util.spec_from_file_location(f"te_script_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rounded(x: Tensor, scale: float, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype).float() / scale


def test_a_classifier_learns_with_and_without_fp8(te) -> None:
    digits = script("digits")
    model, loss, accuracy = digits.main(use_fp8=True)
    _, plain, accuracy_plain = digits.main(use_fp8=False)
    assert min(accuracy, accuracy_plain) > 0.95
    assert loss == pytest.approx(plain, abs=0.1) and loss != plain
    assert {"fc1.duotone_forward.scale", "fc2.duotone_backward.scale"} <= set(duotone.recipe_state(model))


def test_the_parts_of_a_layer_compute_what_torch_computes(te) -> None:
    plain, modules, layer = script("layers").main(enabled=False)
    assert torch.allclose(modules, plain, atol=1e-5) and torch.allclose(layer, plain, atol=1e-5)
    plain, modules, layer = script("layers").main(enabled=True)
    for output in (modules, layer):
        error = (output - plain).norm() / plain.norm()
        assert 1e-3 < error < 0.05


def test_delayed_scaling_starts_as_there_from_a_scale_of_one(te) -> None:
    """By hand: scale 1 in the first step, 448 / amax in the second."""
    linear = te.Linear(32, 16, bias=False)
    recipe = te.recipe.DelayedScaling(amax_history_len=4)
    xs = [torch.randn(8, 32) * 100, torch.randn(8, 32)]
    scales = [(1.0, 1.0), (448 / xs[0].abs().max().item(), 448 / linear.weight.abs().max().item())]
    for x, (of_x, of_w) in zip(xs, scales, strict=True):
        with te.fp8_autocast(fp8_recipe=recipe):
            y = linear(x)
        y.sum().backward()
        want = rounded(x, of_x) @ rounded(linear.weight.detach(), of_w).T
        assert torch.allclose(y, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("module", ["transformer_engine.common.recipe", "transformer_engine.pytorch"])
def test_a_delayed_request_has_the_numbers_of_delayed_scaling(te, module) -> None:
    """The first scale is 1 there too, and NaN and spikes count."""
    recipe = import_module("transformer_engine.common.recipe")
    request = import_module(module).DelayedScalingRequest
    torch.manual_seed(0)
    x, results = torch.randn(48, 64) * 50, []
    linear = te.Linear(64, 32, bias=False)
    for chosen in (recipe.DelayedScaling(), recipe.CustomRecipe(lambda role: request(fp8_format=recipe.Format.HYBRID))):
        copied = copy.deepcopy(linear)
        for _ in range(2):
            with te.fp8_autocast(fp8_recipe=chosen):
                y = copied(x)
            y.sum().backward()
            results += [y.detach(), copied.weight.grad.clone()]
    assert all(map(torch.equal, results[:4], results[4:]))
    assert isinstance(request(), duotone.DelayedScalingRequest) and request(margin=1).margin == 1


def test_weights_are_normal_and_biases_zero_as_there(te) -> None:
    torch.manual_seed(0)
    layer = te.TransformerLayer(256, 512, 4)
    modules = [te.Linear(256, 256), te.LayerNormLinear(256, 256), te.GroupedLinear(2, 256, 128), layer]
    for name, parameter in (item for module in modules for item in module.named_parameters()):
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.023, rel=0.03), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float("layer_norm_weight" in name))), name
    assert te.Linear(64, 64, init_method=nn.init.ones_).weight.mean() == 1
    bound = 256**-0.5
    op = te.ops.Linear(256, 256)
    assert op.weight.abs().max() <= bound and op.weight.std() > bound / 2 and not op.bias.any()


def test_arguments_go_by_position_and_by_their_names(te) -> None:
    """The third argument of te.Linear is sequence_parallel, and forwards take `inp`."""
    linear = te.Linear(32, 16, False, False, None, 1, None, None, False)
    assert linear.bias is None
    x = torch.randn(8, 32)
    assert torch.equal(linear(inp=x), linear(x, None))
    grouped = te.GroupedLinear(2, 32, 16, parallel_mode="column", sequence_parallel=True)
    assert torch.equal(grouped(inp=x, m_splits=[4, 4])[:4], grouped(x, [4, 4], True)[:4])
    norm = te.LayerNorm(hidden_size=32, eps=1e-6, sequence_parallel=True)
    assert norm.weight.sequence_parallel and norm.eps == 1e-6
    layer = te.TransformerLayer(32, 64, 4, layer_number=1, seq_length=8, micro_batch_size=2, ub_tp_comm_overlap=False)
    hidden = torch.randn(8, 2, 32)
    layer.eval()
    assert torch.equal(layer(hidden, None, "causal", max_seqlen_q=8), layer(hidden_states=hidden))
    with pytest.raises(TypeError, match="in_features twice"):
        te.Linear(32, 16, in_features=32)


def test_the_recipe_of_an_autocast_without_one_is_that_of_the_device(te, monkeypatch) -> None:
    contexts = import_module("duotone.compat.transformer_engine.contexts")
    for arch, kind in (((9, 0), "delayed"), ((10, 0), "mxfp8"), ((12, 0), "float8_current_scaling"), (None, "delayed")):
        monkeypatch.setattr(contexts, "capability", lambda arch=arch: arch)
        assert getattr(te.get_default_recipe(), kind)()
        assert te.is_mxfp8_available() == (arch is None or arch >= (10, 0))
    monkeypatch.setattr(contexts, "capability", lambda: (8, 0))
    available, reason = te.is_fp8_available(return_reason=True)
    assert not available and "8.9" in reason


def test_recipes_take_their_options_and_tell_their_kind(te) -> None:
    recipe = import_module("transformer_engine.common.recipe")
    current = recipe.Float8CurrentScaling(
        use_power_2_scales=True, fp8_gemm_fprop=recipe.MMParams(use_split_accumulator=True)
    )
    assert current.power_of_two_scales and not current.fprop_fast_accum
    assert current.float8_current_scaling() and current.float8_per_tensor_scaling() and not current.delayed()
    block = recipe.Float8BlockScaling(use_f32_scales=True, x_block_scaling_dim=1)
    assert not block.power_of_two_scales and block.float8_block_scaling()
    same = recipe.QParams(power_2_scale=False, amax_epsilon=1e-3)
    assert recipe.Float8CurrentScaling(fp8_quant_fwd_inp=same, fp8_quant_bwd_grad=same).amax_epsilon == 1e-3
    delayed = recipe.DelayedScaling(0, recipe.Format.E4M3, interval=1)
    assert delayed.fp8_format == "E4M3" and pickle.loads(pickle.dumps(delayed)) == delayed
    assert recipe.NVFP4BlockScaling(fp4_format=recipe.Format.E2M1).nvfp4()
    for options in ({"override_linear_precision": (False, False, True)}, {"margin": 1}, {"x_block_scaling_dim": 2}):
        with pytest.raises(duotone.RecipeError, match=next(iter(options))):
            recipe.Float8BlockScaling(**options)
    with pytest.raises(duotone.RecipeError, match="RuleRecipe"):
        recipe.Float8CurrentScaling(fp8_quant_fwd_inp=same, fp8_quant_fwd_weight=recipe.QParams())


REFUSED = {
    "atomic_gemm": lambda te: te.Linear(32, 16, atomic_gemm=True),
    "no argument typo": lambda te: te.Linear(32, 16, typo=1),
    "set_tensor_parallel_group": lambda te: te.Linear(32, 16, parallel_mode="column", tp_size=2)(torch.ones(8, 32)),
    "over 3 ranks": lambda te: te.Linear(32, 16, parallel_mode="column", tp_size=3),
    "needs a tp_group": lambda te: te.LayerNormMLP(32, 64, set_parallel_mode=True, tp_size=2),
    "core_attention_bias": lambda te: te.DotProductAttention(2, 8)(
        *[torch.ones(4, 1, 2, 8)] * 3, core_attention_bias=1
    ),
    "cp_group": lambda te: te.DotProductAttention(2, 8, cp_group=[1]),
    "softmax_type": lambda te: te.DotProductAttention(2, 8, softmax_type="learnable"),
    "adam_w_mode": lambda te: te.optimizers.FusedAdam([nn.Parameter(torch.ones(1))], adam_w_mode=False),
    "offload_weights": lambda te: te.get_cpu_offload_context(True, 1, 1, True, True),
    "distribute_saved_activations": lambda te: te.checkpoint(torch.sin, distribute_saved_activations=True),
    "cache_quantized_params": lambda te: te.make_graphed_callables(te.Linear(8, 8), (), cache_quantized_params=True),
    "duotone.MoE": lambda te: te.moe_permute(torch.ones(2), None),
    "cross_entropy": lambda te: te.parallel_cross_entropy(torch.ones(2), None),
    "rewrite rule": lambda te: type("Mine", (te.ops.FusedOperation,), {})(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_one_line_that_names_it(te, name: str) -> None:
    with pytest.raises(UserError, match=name) as error:
        REFUSED[name](te)
    assert "\n" not in str(error.value)


USER_BUFFERS = {
    "ub_bulk_wgrad": lambda te: te.LayerNormMLP(32, 64, ub_bulk_wgrad=True, ub_name="mlp"),
    "ub_overlap_rs": lambda te: te.Linear(32, 16, ub_overlap_rs=1, ub_overlap_ag=False, ub_bulk_dgrad=None),
    "ub_tp_comm_overlap": lambda te: te.TransformerLayer(32, 64, 4, ub_tp_comm_overlap=True),
    "initialize_ub": lambda te: te.module.base.initialize_ub([64, 32], 1, use_fp8=True, bootstrap_backend="gloo"),
}


@pytest.mark.parametrize("name", USER_BUFFERS)
def test_user_buffers_warn_that_nothing_overlaps(te, name: str) -> None:
    """They change no result. Scripts that ask for them run, and the warning stands at their own line."""
    with pytest.warns(UserWarning, match=f"{name}.*do not overlap") as caught:
        USER_BUFFERS[name](te)
    assert len(caught) == 1 and caught[0].filename == __file__
    te.module.base.destroy_ub()


def test_every_name_leads_somewhere(te) -> None:
    for path, names in MODULES.items():
        module = import_module(path)
        for name in names:
            assert getattr(module, name) is not None
        assert set(names) <= set(dir(module)) and not set(names) & set(INSTEAD)
    with pytest.raises(AttributeError, match=r"pytorch\.Nothing"):
        te.Nothing  # noqa: B018
    with pytest.raises(ImportError, match=r"duotone.compat.te\.py"):
        from transformer_engine.pytorch import Nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"pytorch\.nothing"):
        import_module("transformer_engine.pytorch.nothing")


PAGE = (Path(__file__).parents[2] / "docs/from-te.md").read_text()


def test_what_has_no_counterpart_can_be_imported_and_is_in_the_table(te) -> None:
    for name, remedy in INSTEAD.items():
        assert f"`{name}`" in PAGE
        with pytest.raises(UserError, match=name) as error:
            getattr(te, name)()
        assert remedy in str(error.value)
    for module, remedy in MODULES_WITHOUT.items():
        assert f"`{module.removeprefix('transformer_engine.')}`" in PAGE
        part = import_module(module)
        for use in (lambda part=part: part.anything(), lambda part=part: part.TABLE[torch.float32]):
            with pytest.raises(UserError, match=module) as error:
                use()
            assert remedy in str(error.value)
        with pytest.raises(AttributeError, match="no counterpart"):
            part.DType.kFloat8E4M3  # noqa: B018


def test_packages_find_the_version_and_the_modules(te) -> None:
    assert importlib.metadata.version("transformer_engine") == importlib.metadata.version("transformer-engine")
    assert importlib.util.find_spec("transformer_engine") is not None
    root = import_module("transformer_engine")
    assert root.pytorch is te and root.common.recipe.DelayedScaling is te.recipe.DelayedScaling
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("transformer-engine-not")


def test_checkpointed_and_offloaded_layers_have_the_same_gradients(te) -> None:
    torch.manual_seed(0)
    layer = te.LayerNormMLP(32, 64)
    x = torch.randn(8, 32, requires_grad=True)
    recipe = te.recipe.Float8CurrentScaling()
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1)

    def dropped(x: Tensor) -> Tensor:
        with tracker.fork():
            return nn.functional.dropout(layer(x))

    def plain() -> Tensor:
        return dropped(x)

    def recomputed() -> Tensor:
        return te.checkpoint(dropped, x, get_rng_state_tracker=lambda: tracker, use_reentrant=False)

    def reentrant() -> Tensor:
        return te.checkpoint(lambda inp: dropped(inp), x, get_rng_state_tracker=lambda: tracker)

    def offloaded() -> Tensor:
        context, synchronise = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
        with context:
            y = dropped(x)
        return synchronise(y)

    results = []
    start = tracker.get_states()
    for call in (plain, recomputed, reentrant, offloaded):
        tracker.set_states(start)
        layer.zero_grad(), setattr(x, "grad", None)
        with te.autocast(recipe=recipe):
            y = call()
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        after = tracker.get_states()["model-parallel-rng"]
        results[-1].append(after)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_weights_and_dropout_draw_from_the_tracker_of_the_rank(te) -> None:
    """Two trackers of one seed give the same, whatever torch's own state is, which stays."""

    def layer_and_output(state: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        tracker = te.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 7)
        x = torch.randn(8, 2, 32)
        torch.manual_seed(state)
        before = torch.get_rng_state()
        attention = te.MultiheadAttention(32, 4, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
        y = attention(x)
        assert torch.equal(torch.get_rng_state(), before)
        return attention.proj.weight, y

    first, second = layer_and_output(1), layer_and_output(2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_state_manager_tells_the_enclosing_region(te) -> None:
    manager, recipe = te.fp8.FP8GlobalStateManager, te.recipe.MXFP8BlockScaling()
    assert not manager.is_fp8_enabled() and not manager.with_fp8_parameters()
    assert manager.is_nvfp4_available() == (True, "")
    assert manager.get_fp8_group() is None and manager.reduce_and_update_fp8_tensors(forward=False) is None
    with pytest.raises(AttributeError, match="set_skip_fp8_weight_update_tensor has no counterpart"):
        manager.set_skip_fp8_weight_update_tensor(True)
    with te.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        assert manager.with_high_precision_init_val()
    with te.autocast(recipe=recipe), te.fp8_model_init(recipe=recipe):
        assert manager.is_fp8_enabled() and manager.get_fp8_recipe() == recipe and manager.with_fp8_parameters()
        linear = te.Linear(32, 32)
        with te.fp8_autocast(enabled=False):
            assert not manager.is_fp8_enabled()
        with te.fp8_autocast(enabled=False, calibrating=True):
            assert manager.is_fp8_calibration()
    assert isinstance(linear.weight, te.QuantizedTensor)


KINDS = {
    "Float8CurrentScaling": "Float8Tensor",
    "DelayedScaling": "Float8Tensor",
    "Float8BlockScaling": "Float8BlockwiseQTensor",
    "MXFP8BlockScaling": "MXFP8Tensor",
    "NVFP4BlockScaling": "NVFP4Tensor",
}


@pytest.mark.parametrize("recipe", KINDS)
def test_quantized_weights_are_of_the_class_of_their_format(te, recipe: str) -> None:
    with te.fp8_model_init(recipe=getattr(te.recipe, recipe)()):
        weight = te.Linear(128, 128).weight
    names = {name for name in KINDS.values() if isinstance(weight, getattr(te.tensor.float8_tensor, name))}
    assert names == {KINDS[recipe]} and not isinstance(torch.ones(2), te.Float8Tensor)
    with pytest.raises(UserError, match="call a quantizer"):
        te.Float8Tensor(torch.ones(2))


def test_graphed_modules_run_under_their_recipe(te) -> None:
    linear, x = te.Linear(32, 32), torch.randn(8, 32)
    recipe = te.recipe.Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        want = linear(x)
    graphed = te.make_graphed_callables(linear, (x,), fp8_enabled=True, fp8_recipe=recipe)
    assert torch.equal(graphed(x), want)


def test_optimizers_have_the_defaults_there(te) -> None:
    """No weight decay, unlike torch.optim.AdamW; the update is torch's."""
    fused, reference = (nn.Parameter(torch.arange(1.0, 5.0)) for _ in range(2))
    optimizers = te.optimizers.FusedAdam([fused], lr=0.1), torch.optim.AdamW([reference], lr=0.1, weight_decay=0.0)
    for parameter, optimizer in zip((fused, reference), optimizers, strict=True):
        parameter.grad = torch.ones(4)
        optimizer.step()
    assert torch.equal(fused, reference)
    assert isinstance(te.optimizers.FusedSGD([fused], lr=0.1, momentum=0.9), torch.optim.SGD)


@pytest.mark.parametrize("master_weights", [False, True])
def test_moments_of_short_parameters_are_fp32_and_survive_a_checkpoint(te, master_weights: bool) -> None:
    """Without masters each step is torch's in fp32 on the rounded parameter, with gradients from `decoupled_grad`."""
    parameter = nn.Parameter(torch.randn(64).bfloat16())
    reference = nn.Parameter(parameter.detach().float())
    options = {"lr": 0.01, "master_weights": master_weights, "use_decoupled_grad": True}
    optimizer, oracle = (
        te.optimizers.FusedAdam([parameter], **options),
        torch.optim.AdamW([reference], lr=0.01, weight_decay=0),
    )
    for step in range(4):
        parameter.decoupled_grad = reference.grad = torch.randn(64, generator=torch.Generator().manual_seed(step))
        if step == 2:
            state, optimizer = optimizer.state_dict(), te.optimizers.FusedAdam([parameter], **options)
            optimizer.load_state_dict(state)
        optimizer.step()
        oracle.step()
        assert torch.allclose(
            optimizer.state[parameter]["exp_avg_sq"], oracle.state[reference]["exp_avg_sq"], rtol=1e-6
        )
        assert torch.equal(parameter, reference.bfloat16()) and parameter.grad is None
        if not master_weights:
            reference.data.copy_(parameter)


def test_states_that_a_script_fills_before_the_first_step_are_those_of_the_step(te) -> None:
    """Masters from the values before quantization, as the examples of Transformer Engine fill them."""
    recipe = te.recipe.Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        linear = te.Linear(32, 32, bias=False)
    optimizer = te.optimizers.FusedAdam(linear.parameters(), lr=0.1, master_weights=True)
    weight = linear.weight
    optimizer.initialize_state(weight, store_param_remainders=False)
    initial = weight.get_high_precision_init_val()
    assert torch.equal(optimizer.get_unscaled_state(weight, "master_param"), initial)
    optimizer.set_scaled_state(weight, "master_param", initial + 1)
    weight.grad = torch.randn(32, 32)
    reference = nn.Parameter(initial + 1)
    reference.grad = weight.grad.clone()
    torch.optim.AdamW([reference], lr=0.1, weight_decay=0).step()
    optimizer.step()
    assert torch.allclose(optimizer.get_unscaled_state(weight, "master_param"), reference, rtol=1e-6)
    assert torch.allclose(weight.dequantize(), reference, rtol=0.07)


@pytest.mark.parametrize("step", ["of the group", "of each parameter"])
def test_the_state_of_an_optimizer_has_the_names_there(te, step: str) -> None:
    """A group counts steps in a checkpoint of Transformer Engine; a plain AdamW of Duotone does not take the names."""
    weight = nn.Parameter(torch.randn(8).bfloat16())
    optimizer = te.optimizers.FusedAdam([weight], master_weights=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    saved = optimizer.state_dict()
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    saved["state"][0]["master_param"] = torch.arange(8.0)
    with pytest.raises(UserError, match="rename its master_param"):
        duotone.optim.AdamW([weight], master_weights=True).load_state_dict(saved)
    if step == "of the group":
        saved["param_groups"][0]["step"] = int(saved["state"][0].pop("step")) + 4
    other = te.optimizers.FusedAdam([weight], master_weights=True)
    other.load_state_dict(saved)
    assert other.state[weight]["step"] == (5 if step == "of the group" else 1)
    assert torch.equal(other.get_unscaled_state(weight, "master_param"), torch.arange(8.0))


def test_a_layer_of_quantized_weights_trains_with_main_grads(te) -> None:
    """All six calls of a script that keeps FP8 weights alone: each linear accumulates, also those of the MLP."""
    with te.quantized_model_init(enabled=True, recipe=te.recipe.Float8CurrentScaling()):
        options = {"fuse_wgrad_accumulation": True, "fuse_qkv_params": True, "params_dtype": torch.bfloat16}
        layer = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, **options)
    quantized = [p for p in layer.parameters() if isinstance(p, te.quantized_tensor.QuantizedTensor)]
    assert len(quantized) == 4
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=1e-2, master_weights=True, use_decoupled_grad=True)
    x, target = torch.randn(8, 2, 32).bfloat16(), torch.randn(8, 2, 32).bfloat16()
    losses = []
    for _ in range(5):
        with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
            loss = nn.functional.mse_loss(layer(x).float(), target.float())
        loss.backward()
        assert all(parameter.main_grad.any() for parameter in quantized)
        for parameter in layer.parameters():
            if parameter.grad is not None:
                parameter.main_grad.copy_(parameter.grad)
            parameter.grad, parameter.decoupled_grad = None, parameter.main_grad
        optimizer.step()
        for parameter in layer.parameters():
            parameter.main_grad.zero_()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]
    assert all(optimizer.state[parameter]["exp_avg"].dtype == torch.float32 for parameter in layer.parameters())


def test_state_dicts_have_the_names_there_and_their_entries_are_the_parameters(te) -> None:
    """A script fills a layer entry by entry, as one that loads a checkpoint of another library does."""
    options = {"bias": False, "normalization": "RMSNorm", "activation": "swiglu", "num_gqa_groups": 2}
    layer = te.TransformerLayer(32, 64, 4, fuse_qkv_params=False, **options)
    state = nn.ModuleList([layer]).state_dict()
    at = "0.self_attention.layernorm_qkv."
    assert set(state) == {
        *(f"{at}{name}" for name in ("layer_norm_weight", "query_weight", "key_weight", "value_weight")),
        *(f"0.layernorm_mlp.{name}" for name in ("layer_norm_weight", "fc1_weight", "fc2_weight")),
        "0.self_attention.proj.weight",
    }
    state["0.layernorm_mlp.fc1_weight"].data[64:] = 3.0
    assert (layer.layernorm_mlp.fc1.weight[64:] == 3).all() and (layer.layernorm_mlp.fc1_weight[:64] != 3).all()
    other = te.TransformerLayer(32, 64, 4, fuse_qkv_params=False, **options)
    other.load_state_dict(layer.state_dict())
    native = duotone.TransformerLayer(32, 64, 4, **options)
    native.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2, 32)
    assert torch.equal(other.eval()(x), layer.eval()(x)) and torch.equal(native.eval()(x), layer(x))


def test_models_are_pickled_without_install() -> None:
    """A class is named as Duotone's, so that the file loads where nothing is installed."""
    code = """
import pickle, sys
from duotone.compat import te; te.install()
import transformer_engine.pytorch as te
pickle.dump(te.TransformerLayer(32, 64, 4, device="cpu"), sys.stdout.buffer)
"""
    data = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert "transformer_engine" not in sys.modules
    assert isinstance(pickle.loads(data), duotone.TransformerLayer)


def test_install_is_refused_beside_the_real_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    with pytest.raises(UserError, match="imported already"):
        compat.install()
    assert compat.FINDER not in sys.meta_path


def test_stars_import_the_names_of_a_module_and_probes_find_nothing() -> None:
    code = """
import importlib.util
import duotone.compat.te
duotone.compat.te.install()
assert importlib.util.find_spec("transformer_engine_jax") is None
from transformer_engine.common.recipe import *
from transformer_engine.pytorch import *
assert DelayedScaling().amax_history_len and Linear(16, 16).weight.shape == (16, 16)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_attention_follows_a_recipe_under_the_names_of_transformer_engine(te) -> None:
    """An adapter must hide no method of the module that it wraps."""
    x, heads = torch.randn(6, 2, 32), torch.randn(3, 6, 2, 4, 8)
    attention, core = (
        te.MultiheadAttention(32, 4, attention_dropout=0.0),
        te.DotProductAttention(4, 8, attention_dropout=0.0),
    )
    plain, plain_core = (
        duotone.MultiheadAttention(32, 4, attention_dropout=0.0),
        duotone.DotProductAttention(4, 8, attention_dropout=0.0),
    )
    plain.load_state_dict(attention.state_dict(), strict=False)
    with duotone.autocast(recipe="mxfp8"):
        assert torch.equal(attention(x), plain(x))
        assert torch.equal(core(*heads), plain_core(*heads))


def test_packed_sequences_are_padded_for_ranks(te) -> None:
    """By hand: sequences of 3, 4 and 1 tokens, up to multiples of 4."""
    module = import_module("transformer_engine.pytorch.attention.dot_product_attention.context_parallel")
    tokens, edges = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), torch.tensor([0, 3, 7, 8], dtype=torch.int32)
    padded = module.pad_thd_sequences_for_cp(tokens, -tokens, edges, 4, padding_token_id=9)
    assert padded[0].tolist() == [1, 2, 3, 9, 4, 5, 6, 7, 8, 9, 9, 9]
    assert padded[1].tolist() == [-1, -2, -3, -100, -4, -5, -6, -7, -8, -100, -100, -100]
    assert padded[2].tolist() == [0, 4, 8, 12] and padded[2].dtype is torch.int32
    positions = module.generate_positional_ids_for_cp(edges, 4)
    assert positions.tolist() == [0, 1, 2, 3] * 3 and positions.dtype is torch.long
    more = module.pad_thd_sequences_for_cp(torch.cat((tokens, tokens), 1), -tokens[0], edges, 4, padding_token_id=9)
    assert torch.equal(more[0], padded[0]) and torch.equal(more[1], padded[1])
    for wrong in ((tokens[:, :5], tokens, edges, 4), (tokens, tokens, edges, 0), (tokens, tokens, edges + 1, 4)):
        with pytest.raises(UserError):
            module.pad_thd_sequences_for_cp(*wrong)
    whole = module.get_batch_on_this_cp_rank(padded[2], *padded[:2])
    assert whole[0] is padded[0] and whole[1] is padded[1] and whole[2] is None
    with pytest.raises(UserError, match="context_parallel"):
        module.AttnFuncWithCPAndKVP2P()


def test_rotary_angles_have_the_arguments_and_the_shape_there(te) -> None:
    """Scripts apply them to heads in "sbhd" on their own."""
    angles = te.RotaryPositionEmbedding(16, 0.5, rotary_base=100.0)(6, offset=2)
    rates = 100.0 ** (-torch.arange(0, 8, 2) / 8)
    expected = torch.outer(torch.arange(2.0, 8.0), rates).repeat(1, 2)
    assert angles.shape == (6, 1, 1, 8)
    torch.testing.assert_close(angles[:, 0, 0], expected)
    t = torch.randn(6, 2, 3, 16)
    half = torch.cat([-t[..., 4:8], t[..., :4]], dim=-1)
    turned = t[..., :8] * angles.cos() + half * angles.sin()
    torch.testing.assert_close(te.apply_rotary_pos_emb(t, angles), torch.cat([turned, t[..., 8:]], dim=-1))


def test_heads_are_turned_as_there_by_their_place_among_ranks(te) -> None:
    """The tokens of rank 1 of 2, in the chunks 1 and 2 of 4, as the whole is turned."""
    t, freqs = torch.randn(8, 1, 2, 4), te.RotaryPositionEmbedding(4)(8)
    whole = duotone.attention.apply_rotary_pos_emb(t, freqs)
    part = te.apply_rotary_pos_emb(t[2:6], freqs, "sbhd", None, False, True, None, 2, 1)
    assert torch.equal(part, whole[2:6]) and torch.equal(te.apply_rotary_pos_emb(t, freqs), whole)
    for option in ({"interleaved": True}, {"start_positions": torch.tensor([1])}):
        with pytest.raises(UserError, match=next(iter(option))):
            te.apply_rotary_pos_emb(t, freqs, **option)
