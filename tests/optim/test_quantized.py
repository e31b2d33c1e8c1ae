"""Quantized parameters: masters follow torch.optim.AdamW, planes have the bits of quantizing them anew."""

from contextlib import nullcontext

import pytest
import torch
from optim_cases import QUANTIZERS, RATES, pair, parts, random_parameter, same_bits
from torch import nn

import duotone
from duotone import UserError, recipes
from duotone.linear.plane_source import STEPS
from duotone.optim import AdamW
from duotone.recipes import NVFP4BlockScaling
from duotone.tensor import QuantizeContext, Usage
from duotone.tensor.context import Slot
from interrupting import interrupt
from later import Later

dynamo_testing = Later("torch._dynamo.testing")

every_quantizer = pytest.mark.parametrize("q", QUANTIZERS.values(), ids=QUANTIZERS.keys())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(48, 80), (33, 17), (2, 3, 64), (1, 1)], ids=str)
@every_quantizer
def test_planes_have_the_bits_of_quantizing_the_fp32_master(q, shape, dtype) -> None:
    p = random_parameter(q, shape, dtype)
    twin, reference = p.detach().clone(), nn.Parameter(p.detach().dequantize(torch.float32).clone())
    objects, addresses = id(p), {name: part.data_ptr() for name, part in parts(p).items()}
    optimizer, oracle = AdamW([p], **RATES), torch.optim.AdamW([reference], **RATES)
    for _ in range(3):
        p.grad = torch.randn(shape).to(dtype)
        reference.grad = p.grad.float()
        version = p._version
        optimizer.step(), oracle.step()
        master = optimizer.state[p]["master"]
        torch.testing.assert_close(master, reference.detach(), rtol=2e-6, atol=1e-7)
        q.quantize(master, out=twin)
        for name, part in parts(twin).items():
            assert same_bits(parts(p)[name], part), name
        assert p._version > version
    assert id(p) == objects and {name: part.data_ptr() for name, part in parts(p).items()} == addresses
    assert master.dtype is torch.float32 and not any(same_memory(master, part) for part in parts(p).values())


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("usage", [Usage(True, False), Usage(False, True)], ids=["row", "col"])
def test_only_what_is_held_is_written(usage) -> None:
    p = nn.Parameter(QUANTIZERS["mxfp8"].make(torch.randn(32, 64), usage))
    optimizer = AdamW([p], **RATES)
    p.grad = torch.randn(32, 64)
    optimizer.step()
    assert p.get_usages() == {"rowwise": usage.rowwise, "columnwise": usage.columnwise}
    want = p.quantizer.make(optimizer.state[p]["master"], usage)
    assert all(same_bits(part, parts(p)[name]) for name, part in parts(want).items())


def test_the_master_starts_from_the_preserved_value() -> None:
    p = random_parameter(QUANTIZERS["nvfp4"], preserve=True)
    preserved = p.get_high_precision_init_val().float()
    p.grad = torch.zeros(p.shape, dtype=p.dtype)
    optimizer = AdamW([p], lr=0.0)
    optimizer.step()
    assert torch.equal(optimizer.state[p]["master"], preserved)
    assert p.get_high_precision_init_val() is None


def test_the_master_starts_from_the_values_where_something_was_written_since() -> None:
    """A checkpoint that was loaded, say."""
    p = random_parameter(QUANTIZERS["mxfp8"], preserve=True)
    with torch.no_grad():
        p.copy_(torch.randn(p.shape))
    values = p.dequantize(torch.float32)
    p.grad = torch.zeros(p.shape, dtype=p.dtype)
    optimizer = AdamW([p], lr=0.0)
    optimizer.step()
    assert torch.equal(optimizer.state[p]["master"], values)


def test_models_preserve_what_the_master_starts_from() -> None:
    init = duotone.quantized_model_init(recipe=recipes.load("mxfp8"), preserve_high_precision_init_val=True)
    with init:
        linear = duotone.Linear(32, 32, bias=False)
    converted = nn.Sequential(duotone.Linear(32, 32, bias=False))
    plain = converted[0].weight.detach().clone()
    duotone.convert_parameters(converted, recipes.load("mxfp8"), preserve=True)
    for weight, want in ((linear.weight, linear.weight.get_high_precision_init_val()), (converted[0].weight, plain)):
        optimizer = AdamW([weight], lr=0.0)
        weight.grad = torch.zeros(32, 32)
        optimizer.step()
        assert torch.equal(optimizer.state[weight]["master"], want)


def test_a_model_that_is_converted_back_keeps_its_masters() -> None:
    model = nn.Sequential(duotone.Linear(32, 32, bias=False, params_dtype=torch.bfloat16))
    duotone.convert_parameters(model, recipes.load("mxfp8"))
    weight = model[0].weight
    optimizer = AdamW([weight], **RATES)
    weight.grad = torch.randn(32, 32, dtype=torch.bfloat16)
    optimizer.step()
    duotone.convert_parameters(model, recipes.load("bf16"), masters={"0.weight": optimizer.state[weight]["master"]})
    weight.grad = torch.randn(32, 32, dtype=torch.bfloat16)
    optimizer.step()
    assert type(weight) is nn.Parameter and optimizer.state[weight]["step"] == 2
    assert same_bits(weight, optimizer.state[weight]["master"].bfloat16())


def test_a_weight_that_is_quantized_later_gets_a_master_and_moments_in_fp32() -> None:
    model = nn.Sequential(duotone.Linear(32, 32, bias=False, params_dtype=torch.bfloat16))
    weight = model[0].weight
    optimizer = AdamW([weight], **RATES)
    for _ in range(2):
        weight.grad = torch.randn(32, 32, dtype=torch.bfloat16)
        optimizer.step()
        duotone.convert_parameters(model, recipes.load("mxfp8"))
    state = optimizer.state[weight]
    assert state["step"] == 2
    assert all(state[name].dtype is torch.float32 for name in ("master", "exp_avg", "exp_avg_sq"))


class Recording(Slot):
    """A slot that counts what it records."""

    def __init__(self) -> None:
        self.recorded: list[float] = []

    def scale_for(self, x: torch.Tensor) -> torch.Tensor:
        self.recorded.append(float(x.abs().max()))
        return torch.tensor([16.0])


def test_a_write_records_one_amax_and_uses_the_scale_of_its_slot() -> None:
    q, slot = QUANTIZERS["delayed"], Recording()
    p = random_parameter(q)
    p.context = QuantizeContext(slots=(slot, None))
    p.grad = torch.randn(p.shape, dtype=p.dtype)
    optimizer = AdamW([p], **RATES)
    optimizer.step()
    master = optimizer.state[p]["master"]
    assert slot.recorded == [float(master.abs().max())]
    assert float(p.rowwise_scale) == 1 / 16
    assert torch.equal(p.dequantize(), ((master * 16).clamp(-448, 448).to(torch.float8_e4m3fn).float() / 16).bfloat16())


def test_delayed_states_roll_once_for_a_write_and_the_forward_after_it() -> None:
    recipe = recipes.load("fp8-delayed")
    with duotone.quantized_model_init(recipe=recipe):
        model = duotone.Linear(32, 32, bias=False)
    state, x = model.duotone_forward, torch.randn(8, 32)
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        with duotone.autocast(recipe=recipe):
            y = model(x)
        y.sum().backward()
        before = state.amax_history.clone(), state.scale.clone()
        optimizer.step()
        amax = optimizer.state[model.weight]["master"].abs().max()
        assert torch.equal(state.amax_history[1:], before[0][1:]) and torch.equal(state.scale, before[1])
        assert (state.amax_history[0] == amax).any()
    with duotone.autocast(recipe=recipe):
        model(x)
    assert (state.amax_history[-1] == amax).any() and not state.amax_history[0].any()


@pytest.mark.parametrize("region", [True, False], ids=["region", "model"])
def test_a_step_inside_of_the_backward_moves_the_scale_of_a_weight(region: bool) -> None:
    """As torch's tutorial on optimizers in the backward: the largest weights stayed clipped at their first maximum."""
    recipe, runs = recipes.load("fp8-delayed"), []
    x, target = torch.randn(32, 32).bfloat16(), 40 * torch.randn(32, 32)
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = duotone.convert(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).bfloat16(), recipe)
        duotone.convert_parameters(model, recipe)
        optimizers = {p: AdamW([p], lr=3e-2) for p in model.parameters()}

        def step(p: torch.Tensor, optimizers: dict[torch.Tensor, AdamW] = optimizers) -> None:
            optimizers[p].step()
            p.grad = None

        for p in optimizers if in_backward else ():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(12):
            with duotone.autocast(recipe=recipe) if region else nullcontext():
                y = model(x)
            (y.float() - target).square().mean().backward()
            for p in () if in_backward else optimizers:
                step(p)
        weight = model[0].weight
        master = optimizers[weight].state[weight]["master"]
        # E4M3 rounds by 1/16 of a value at the most, and by a third of that on average.
        assert (weight.dequantize().float() - master).norm() < master.norm() / 16
        state = model[0].duotone_forward  # it rolls with the next backward
        runs.append([weight.dequantize(), state.scale.clone(), state.amax_history.clone()])
    if region:
        for behind, within in zip(*runs, strict=True):
            assert torch.equal(behind, within)


def test_a_cached_weight_notices_a_step() -> None:
    recipe = recipes.load("mxfp8")
    model = duotone.convert(nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)), recipe, ())
    layer, x = model[0], torch.randn(32, 64, dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=0.5, master_weights=True)
    first = layer(x, is_first_microbatch=True)
    first.sum().backward()
    assert torch.equal(layer(x, is_first_microbatch=False), first)
    optimizer.step()
    assert torch.equal(layer(x, is_first_microbatch=False), layer(x))
    assert not torch.equal(layer(x), first)


TRAINED = [
    *map(recipes.load, ("fp8-current", "fp8-block", "mxfp8")),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
]


@pytest.mark.parametrize("recipe", TRAINED, ids=lambda recipe: type(recipe).__name__)
def test_a_quantized_model_trains_with_the_bits_of_one_that_casts_its_weights(recipe) -> None:
    """Both encode the fp32 master, in the step or in the forward; and the loss falls."""
    torch.manual_seed(3)
    cast = nn.Sequential(*[duotone.Linear(64, 64, recipe=recipe) for _ in range(2)])
    torch.manual_seed(3)
    with duotone.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        holds = nn.Sequential(*[duotone.Linear(64, 64) for _ in range(2)])
    assert hasattr(holds[0].weight, "planes") and not hasattr(cast[0].weight, "planes")
    x, target = torch.randn(32, 64), torch.randn(32, 64)
    losses: list[list[float]] = []
    for model in (cast, holds):
        optimizer, messages = AdamW(model.parameters(), lr=3e-3, master_weights=True), []
        for _ in range(12):
            with duotone.autocast(recipe=recipe):
                loss = (model(x) - target).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            messages.append(loss.item())
        losses.append(messages)
    assert losses[1][-1] < 0.9 * losses[1][0]
    assert losses[0] == losses[1]


def test_small_updates_add_up_in_the_master() -> None:
    """Each is less than half a step of the codes, where in-place updates of the codes stall."""
    q = pair("fp8_e4m3_128x128")
    start = torch.full((16, 16), 0.5)
    start[0, 0] = 1.0
    lost, saved = (nn.Parameter(q.make(start.bfloat16())) for _ in range(2))
    for p, optimizer in ((lost, torch.optim.SGD([lost], lr=5e-3)), (saved, AdamW([saved], lr=5e-3, weight_decay=0.0))):
        with pytest.warns(UserWarning, match="of this update is lost") if p is lost else nullcontext():
            for _ in range(20):
                p.grad = torch.ones(16, 16, dtype=torch.bfloat16)
                optimizer.step()
    assert torch.equal(lost.dequantize(), start.bfloat16())
    assert (saved.dequantize() < 0.45).sum() == 255


def test_the_second_moment_falls_with_the_gradients_whatever_the_dtype_of_moments() -> None:
    """Stored in bf16, 0.999 of it would round back to it."""
    parameter, reference = nn.Parameter(torch.zeros(8).bfloat16()), nn.Parameter(torch.zeros(8))
    optimizer = AdamW([parameter], master_weights=True, moment_dtype=torch.bfloat16)
    oracle = torch.optim.AdamW([reference])
    for step in range(200):
        reference.grad = torch.full((8,), 1.0 if step < 50 else 0.125)
        parameter.grad = reference.grad.bfloat16()
        optimizer.step(), oracle.step()
    torch.testing.assert_close(
        optimizer.state[parameter]["exp_avg_sq"], oracle.state[reference]["exp_avg_sq"], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16, None], ids=str)
def test_state_is_stored_in_its_dtype_and_computed_in_fp32(masters, moments) -> None:
    """The oracle is torch's AdamW in fp32, started anew from what is stored. Roundings differ by one place."""
    options = {**RATES, "master_dtype": masters, "moment_dtype": moments}
    p = random_parameter(QUANTIZERS["mxfp8"])
    reference = nn.Parameter(torch.zeros(p.shape))
    optimizer, oracle = AdamW([p], **options), torch.optim.AdamW([reference], **RATES)
    for step in range(3):
        state = optimizer.state[p]
        with torch.no_grad():
            reference.copy_(state.get("master", p.dequantize(torch.float32)))
            for name in ("exp_avg", "exp_avg_sq") if step else ():
                oracle.state[reference][name].copy_(state[name])
        p.grad = torch.randn(p.shape).bfloat16()
        reference.grad = p.grad.float()
        optimizer.step(), oracle.step()
        for name in ("exp_avg", "exp_avg_sq"):
            dtype = moments if name == "exp_avg" else torch.float32
            assert state[name].dtype == dtype
            want = oracle.state[reference][name].to(dtype)
            torch.testing.assert_close(state[name], want, rtol=2**-7 if dtype != torch.float32 else 2e-6, atol=1e-7)
        if masters is None:
            assert "master" not in state
            same = p.dequantize(torch.float32) == p.quantizer.quantize(reference.detach()).dequantize(torch.float32)
            assert same.float().mean() > 0.99
        else:
            assert state["master"].dtype == masters
            rtol = 2**-7 if masters != torch.float32 else 2e-6
            torch.testing.assert_close(state["master"], reference.detach().to(masters), rtol=rtol, atol=1e-7)
    reloaded = AdamW([p], **options)
    reloaded.load_state_dict(optimizer.state_dict())
    assert {name: value.dtype for name, value in reloaded.state[p].items()} == {k: v.dtype for k, v in state.items()}


@pytest.mark.filterwarnings("ignore:.*of this update is lost")
@pytest.mark.parametrize("name", ["current", "row", "128x128", "mxfp8", "nvfp4_16x16"])
def test_an_optimizer_of_whole_matrices_works_on_dequantized_weights(name) -> None:
    """Muon orthogonalizes. Its update of a weight of zeros is exact in bf16, and is the oracle here."""
    p = random_parameter(QUANTIZERS[name], (64, 64))
    twin = nn.Parameter(torch.zeros(64, 64).bfloat16())
    options = {"lr": 2**-4, "weight_decay": 0.0}
    muon, oracle = torch.optim.Muon([p], **options), torch.optim.Muon([twin], **options)
    for _ in range(3):
        p.grad = torch.randn(64, 64).bfloat16()
        twin.grad = p.grad.clone()
        with torch.no_grad():
            twin.zero_()
        want = p.detach().clone()
        muon.step(), oracle.step()
        want.copy_(want.dequantize(torch.float32))  # the decay, by 1
        want.copy_(want.dequantize(torch.float32) + twin.detach().float())
        assert all(same_bits(part, parts(want)[key]) for key, part in parts(p).items())


def test_one_graph_serves_all_steps_without_masters() -> None:
    """The first step, too: Dynamo creates its state outside of the trace, as that of torch's optimizers.

    A weight cache marks each step, and no graph may depend on how many it has marked.
    """
    STEPS.register()
    counter, values = dynamo_testing.CompileCounterWithBackend("aot_eager"), []
    for kind in (torch.optim.AdamW, AdamW):
        torch.manual_seed(5)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in ((8, 8), (8,))]
        step = torch.compile(kind(parameters, **RATES).step, backend=counter)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape)
            step()
        values.append([p.detach() for p in parameters])
    assert counter.frame_count == 2
    for result, expected in zip(*values, strict=True):  # torch's graph computes the powers of beta as for a CUDA graph
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_compiled_step_counts_from_the_first_gradient_of_each_parameter(late: int) -> None:
    """In groups, where Dynamo reads the state of all parameters once. torch's AdamW is the oracle."""
    counts = []
    for kind in (torch.optim.AdamW, AdamW):
        parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
        optimizer = kind([{"params": parameters[:1]}, {"params": parameters[1:]}])
        step = torch.compile(optimizer.step, backend="eager") if kind is AdamW else optimizer.step
        for at in range(4):
            for p in parameters:
                p.grad = torch.ones_like(p)
            if at == 0:
                parameters[late].grad = None
            step()
        counts.append([int(optimizer.state[p]["step"]) for p in parameters])
    assert counts[0] == counts[1]


def test_a_compiled_step_that_writes_masters_has_the_bits_of_eager() -> None:
    """A graph would hold the numbers of one step, so such a step runs outside of graphs and compiles nothing again."""
    counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
    values = []
    for compiles in (False, True):
        torch.manual_seed(5)
        parameters = [random_parameter(QUANTIZERS["mxfp8"]), nn.Parameter(torch.randn(16, 32).bfloat16())]
        optimizer = AdamW(parameters, **RATES, master_weights=True)
        step = torch.compile(optimizer.step, backend=counter) if compiles else optimizer.step
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape).bfloat16()
            step()
            with torch.no_grad():
                parameters[1].add_(1)  # the master adopts it
        values.append([*parts(parameters[0]).values(), parameters[1].detach()])
    assert counter.frame_count == 0 and all(map(same_bits, *values))


def test_a_compiled_step_is_that_of_eager_after_one_without_masters() -> None:
    """Frames that Dynamo gives up are run piece by piece, and compiled pieces took the state of another parameter."""
    counts, values = [], []
    for has_masters, compiles in ((False, True), (True, False), (True, True)):
        torch.manual_seed(5)
        parameters = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((8, 8), (8,))]
        optimizer, hooks = AdamW(parameters, **RATES, master_weights=has_masters), []
        optimizer.register_step_pre_hook(lambda *_, hooks=hooks: hooks.append(1))
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape).bfloat16()
            step()
        counts.append((len(hooks), *(float(optimizer.state[p]["step"]) for p in parameters)))
        values.append([p.detach() for p in parameters])
    assert counts == [(3, 3.0, 3.0)] * 3 and all(map(same_bits, *values[1:]))


@pytest.mark.parametrize("q", [None, *QUANTIZERS.values()], ids=["plain", *QUANTIZERS.keys()])
def test_two_parameters_in_one_memory_are_refused_before_a_step(q) -> None:
    """The master of each was written over the other one, and the update of one of them was lost whole."""
    whole = torch.randn(64, 64).bfloat16()
    tensors = (whole, whole) if q is None else (one := q.quantize(whole), one.detach())
    a, b = (nn.Parameter(each) for each in tensors)
    optimizer = AdamW([a, b], lr=0.02, master_weights=True)
    a.grad, b.grad, before = torch.ones(64, 64).bfloat16(), torch.zeros(64, 64).bfloat16(), whole.clone()
    with pytest.raises(UserError, match=r"two parameters of shape \(64, 64\) share their memory.*tie modules by one"):
        optimizer.step()
    assert torch.equal(whole, before) and not any("master" in state for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["fp8-current", "fp8-rowwise", "mxfp8", "nvfp4"])
def test_masters_are_rounded_once_when_they_become_quantized_parameters(name, dtype) -> None:
    """They were rounded to the dtype of the weight before, and the next step took the result for their values."""
    torch.manual_seed(0)
    m = duotone.Linear(128, 128, bias=False, params_dtype=dtype, recipe=recipes.load(name), name="m")
    root = nn.ModuleDict({"m": m})
    master = torch.randn(128, 128)
    duotone.convert_parameters(root, name, masters={"m.weight": master})
    codes = [part.clone() for part in m.weight.parts]
    with torch.no_grad():
        m.weight.copy_(master)
    assert all(same_bits(a, b) for a, b in zip(codes, m.weight.parts, strict=True))


WRITING = "_step", "_prepare", "_state_of", "_write", "_update", "write", "write_all", "copy_"
"""Functions of a step that change something. To interrupt at all lines takes 15 s."""


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("earlier", [0, 2], ids=["first step", "third step"])
def test_a_step_that_is_interrupted_anywhere_leaves_no_half_written_weight_in_its_master(name, earlier) -> None:
    """Ctrl-C may leave codes beside old scales. The next step writes them from a master that never took them."""

    def training() -> tuple[nn.Parameter, AdamW]:
        torch.manual_seed(0)
        p = nn.Parameter(QUANTIZERS[name].quantize(torch.randn(16, 32)))
        optimizer = AdamW([p], **RATES | {"lr": 0.5, "weight_decay": 0.0})
        for _ in range(earlier):
            p.grad = torch.randn(16, 32)
            optimizer.step()
        p.grad = torch.randn(16, 32)
        return p, optimizer

    p, optimizer = training()
    before = optimizer.state[p]["master"].clone() if earlier else p.dequantize(torch.float32)
    lines = interrupt(optimizer.step, 0, WRITING)
    after, twin = optimizer.state[p]["master"].clone(), p.detach().clone()
    for at in range(1, lines + 1):
        p, optimizer = training()
        interrupt(optimizer.step, at, WRITING)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        master = optimizer.state[p]["master"]
        assert torch.all((master == before) | (master == after)), at
        QUANTIZERS[name].quantize(master, out=twin)
        assert all(same_bits(part, parts(p)[name]) for name, part in parts(twin).items()), at
