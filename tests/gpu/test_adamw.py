"""On a CUDA device: steps of AdamW have the bits of those on the CPU, states and planes alike."""

from unittest import mock

import pytest
import torch
from comparing import awkward_matrix, bits, same
from torch import Tensor, nn

import duotone
from duotone import formats, recipes
from duotone.optim import AdamW
from duotone.state.delayed import DelayedState
from duotone.state.delayed_slot import DelayedSlot
from duotone.state.rolling import pending
from duotone.tensor import Quantizer, Usage
from duotone.tensor.context import QuantizeContext
from duotone.tensor.history import History

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
RATES = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FORMATS = [
    "fp8_e4m3_delayed",
    "fp8_e5m2_delayed",
    "fp8_e4m3_tensor",
    "fp8_e4m3_row",
    "fp8_e4m3_128x128",
    "fp8_e4m3_1x128",
    "mxfp8_e4m3",
    "nvfp4",
    "nvfp4_16x16",
    "identity",
]
SHAPES = [(192, 128), (130, 193), (1, 16), (17, 1), (3, 64, 96)]
USAGES = [Usage(True, True), Usage(True, False), Usage(False, True)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
DEVICES = ("cpu", "cuda")
STEPS = 3


def values(shape: tuple[int, ...], step: int) -> Tensor:
    """Spread over many binades; the gradients of the second step hold infinities and NaN too."""
    result = awkward_matrix(shape[0], torch.Size(shape[1:]).numel(), torch.float32).view(shape) * (step + 1)
    return result if step == 1 else result.nan_to_num(0.5, 1.0, -1.0).clamp(-1e4, 1e4)


def stepped(parameter: nn.Parameter, grads: list[Tensor], **options: object) -> dict[str, Tensor]:
    """The state after a step for each gradient."""
    optimizer = AdamW([parameter], **RATES, **options)
    for grad in grads:
        parameter.grad = grad.to(parameter.device)
        optimizer.step()
    return optimizer.state[parameter]


def same_states(cpu: dict[str, Tensor], cuda: dict[str, Tensor]) -> None:
    assert cpu.keys() == cuda.keys()
    for name, value in cpu.items():
        assert torch.equal(bits(cuda[name]), bits(value)), name


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_have_the_bits_of_the_cpu(dtype, shape, maximize) -> None:
    grads = [values(shape, step).to(dtype) for step in range(STEPS)]
    start = values(shape, 0).to(dtype)
    results = {device: nn.Parameter(start.to(device)) for device in DEVICES}
    states = [stepped(results[device], grads, maximize=maximize, master_weights=True) for device in DEVICES]
    same_states(*states)
    assert torch.equal(bits(results["cuda"]), bits(results["cpu"]))
    assert torch.equal(bits(results["cuda"]), bits(states[1]["master"].to(dtype)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_planes_have_the_bits_of_the_cpu(name, dtype, shape) -> None:
    quantizer = Quantizer(formats.get(name), formats.get(name))
    start, grads = values(shape, 0).to(dtype), [values(shape, step).to(dtype) for step in range(STEPS)]
    for usage in USAGES:
        results = {device: nn.Parameter(quantizer.make(start.to(device), usage)) for device in DEVICES}
        for parameter in results.values():  # under a mark, codes of NVFP4 are not those of the other device
            parameter.context = QuantizeContext(propagate=False)
        addresses = [part.data_ptr() for plane in results["cuda"].planes if plane for part in plane.parts.values()]
        states = [stepped(results[device], grads) for device in DEVICES]
        same_states(*states)
        for cpu, cuda in zip(results["cpu"].planes, results["cuda"].planes, strict=True):
            same(cpu, cuda)
        twin = results["cuda"].detach().clone()
        twin.copy_(states[1]["master"])
        for cpu, cuda in zip(twin.planes, results["cuda"].planes, strict=True):
            same(cpu, cuda)
        saved = [part.data_ptr() for plane in results["cuda"].planes if plane for part in plane.parts.values()]
        assert saved == addresses


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_delayed_weight_is_written_by_the_step_under_the_scale_of_its_slot(dtype, shape) -> None:
    """And its amax is recorded, of what was encoded."""
    from duotone.kernels import adamw

    fmt = formats.get("fp8_e4m3_delayed")
    grads = [values(shape, step).to(dtype) for step in range(2)]
    results, states = {}, {}
    for device in DEVICES:
        states[device] = state = DelayedState(1, History(amax_history_len=4), device)
        state.scale.fill_(24.0)
        results[device] = nn.Parameter(Quantizer(fmt, fmt).make(values(shape, 0).to(device, dtype)))
        results[device].context = QuantizeContext(slots=(DelayedSlot(state.number, 0), None))
    with mock.patch.object(adamw, "update_planes", wraps=adamw.update_planes) as one_pass:
        same_states(*(stepped(results[device], grads) for device in DEVICES))
    assert one_pass.call_count == len(grads)
    for cpu, cuda in zip(results["cpu"].planes, results["cuda"].planes, strict=True):
        same(cpu, cuda)
    assert torch.equal(bits(states["cuda"].amax_history), bits(states["cpu"].amax_history))
    assert states["cuda"].amax_history[0].item() > 0
    pending().backward.clear()


def test_planes_that_share_memory_are_written_together() -> None:
    """A parameter that was made on the CPU: its columnwise plane is a view."""
    fmt = formats.get("fp8_e4m3_delayed")
    cpu = nn.Parameter(Quantizer(fmt, fmt).make(torch.randn(48, 80)))
    cuda = nn.Parameter(cpu.detach().to("cuda"))
    grads = [torch.randn(48, 80)]
    same_states(stepped(cpu, grads), stepped(cuda, grads))
    for a, b in zip(cpu.planes, cuda.planes, strict=True):
        same(a, b)


STRIDES = {
    "turned": lambda g: g.t().contiguous().t(),
    "gaps": lambda g: g.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda g: g[:1].expand(g.shape),
}


@pytest.mark.parametrize("name", ["fp8_e4m3_delayed", "fp8_e4m3_tensor", "mxfp8_e4m3"])
@pytest.mark.parametrize("strided", STRIDES.values(), ids=STRIDES.keys())
def test_gradients_of_any_strides_give_equal_planes(strided, name) -> None:
    quantizer, grad = Quantizer(formats.get(name), formats.get(name)), torch.randn(64, 96).bfloat16()
    results, states = (
        [nn.Parameter(quantizer.make(torch.ones(64, 96, device=device).bfloat16())) for device in DEVICES],
        [],
    )
    for parameter in results:
        parameter.grad = strided(grad.to(parameter.device))
        assert not parameter.grad.is_contiguous()
        optimizer = AdamW([parameter], **RATES)
        optimizer.step()
        states.append(optimizer.state[parameter])
    same_states(*states)
    for cpu, cuda in zip(results[0].planes, results[1].planes, strict=True):
        same(cpu, cuda)


def test_a_parameter_of_any_strides_keeps_them() -> None:
    start, grad = torch.randn(24, 40).bfloat16(), torch.randn(40, 24).bfloat16()
    results = [nn.Parameter(start.to(device).t()) for device in DEVICES]
    same_states(*(stepped(p, [grad], master_weights=True) for p in results))
    assert torch.equal(bits(results[0]), bits(results[1])) and results[1].stride() == (1, 40)


def test_versions_count_writes_by_kernels() -> None:
    plain = nn.Parameter(torch.ones(8, 8, device="cuda").bfloat16())
    fmt = formats.get("fp8_e4m3_delayed")
    quantized = nn.Parameter(Quantizer(fmt, fmt).make(torch.ones(8, 8, device="cuda")))
    for parameter in (plain, quantized):
        written = parameter, *(parameter.planes.buffers if parameter is quantized else ())
        before = [each._version for each in written]
        stepped(parameter, [torch.ones(8, 8, dtype=parameter.dtype)], master_weights=True)
        assert all(each._version > version for each, version in zip(written, before, strict=True))


@pytest.mark.parametrize("moments", [None, torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("masters", [torch.float32, None], ids=str)
def test_a_captured_step_has_the_bits_of_eager_ones(masters, moments) -> None:
    """Planes, masters and moments, whose numbers the device computes in each replay."""

    def parameters() -> list[nn.Parameter]:
        torch.manual_seed(0)
        quantizers = [Quantizer(formats.get(name), formats.get(name)) for name in ("fp8_e4m3_tensor", "mxfp8_e4m3")]
        quantized = [quantizer.make(torch.randn(256, 384).cuda().bfloat16()) for quantizer in quantizers]
        return [nn.Parameter(p, False) for p in (*quantized, torch.randn(130, 257).cuda().bfloat16())]

    options = {**RATES, "master_weights": True, "master_dtype": masters, "moment_dtype": moments}
    eager, captured = parameters(), parameters()
    grads = [torch.zeros(p.shape, device="cuda", dtype=torch.bfloat16) for p in eager]
    optimizers = AdamW(eager, **options), AdamW(captured, **options, capturable=True)
    for p, q, grad in zip(eager, captured, grads, strict=True):
        p.grad = q.grad = grad
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for step in range(5):
        for grad in grads:
            grad.copy_(torch.randn(grad.shape, generator=torch.Generator().manual_seed(step)))
        if step < 2:
            with torch.cuda.stream(side):
                optimizers[1].step()
            torch.cuda.synchronize()
        elif step == 2:
            with torch.cuda.graph(graph):
                optimizers[1].step()
        optimizers[0].step()
        if step >= 2:
            graph.replay()
        same_states(
            *(
                {f"{n} {k}": v.cpu() for n, p in enumerate(result) for k, v in of.state[p].items()}
                for result, of in zip((eager, captured), optimizers, strict=True)
            )
        )
        for p, q in zip(eager[:2], captured[:2], strict=True):
            for cpu, cuda in zip(p.planes, q.planes, strict=True):
                same(cpu, cuda)
        assert torch.equal(bits(eager[2]), bits(captured[2]))


@pytest.mark.parametrize("converts", [False, True], ids=["built", "converted"])
@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_a_quantized_model_learns(name, converts) -> None:
    recipe = recipes.load(name)
    if converts:
        layers = [nn.Linear(256, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        duotone.convert_parameters(duotone.convert(nn.Sequential(*layers), recipe), recipe)
    else:
        with duotone.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            layers = [duotone.Linear(256, 256, params_dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    model = nn.Sequential(*layers)
    optimizer = AdamW(model.parameters(), lr=2e-3, master_weights=True)
    x, target = (torch.randn(128, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def step() -> float:
        with duotone.autocast(recipe=recipe):
            loss = (model(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = [step() for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    for layer in layers:
        state = optimizer.state[layer.weight]
        assert state["step"].device.type == "cpu" and state["master"].dtype is torch.float32
        if not any(layer.weight.quantizer.delayed):
            twin = layer.weight.detach().clone()
            twin.copy_(state["master"])
            for a, b in zip(twin.planes, layer.weight.planes, strict=True):
                same(a, b)
