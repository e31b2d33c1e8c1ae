"""The ledger: bytes of every module, and a peak whose prediction and measurement agree."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import duotone
import duotone_lab
from duotone import QuantizeContext, Quantizer, formats, ops, recipes
from duotone.dispatch import casts
from duotone.state.delayed import DelayedState
from duotone.tensor import plane
from duotone_lab.memory.memory_ledger import module_rows
from duotone_lab.memory.storages import LiveStorages

BF16 = torch.bfloat16
HYBRID = "mxfp8-fwd-nvfp4-bwd"
NAMES = ("bf16", "mxfp8", "nvfp4", "fp8-current", HYBRID)
SELDOM = ("bf16", "nvfp4", "fp8-current", HYBRID, "fp8-block", "fp8-delayed", "mxfp8-fwd-high-precision-bwd")


def converted(name: str, model: nn.Module, **fields) -> nn.Module:
    return duotone.convert(model.to(BF16), replace(recipes.load(name), **fields), rules=())


def batch(rows: int, cols: int, *, grad: bool = True) -> torch.Tensor:
    return torch.randn(rows, cols).to(BF16).requires_grad_(grad)


def saved(model: nn.Module, x: torch.Tensor) -> int:
    return sum(row.saved for row in module_rows(model, lambda: model(x)))


@pytest.mark.parametrize("name", ["mxfp8", *(pytest.param(name, marks=pytest.mark.rest) for name in SELDOM)])
def test_the_peak_of_a_linear_is_predicted_within_five_percent(name: str) -> None:
    size = 512
    m, x = converted(name, nn.Linear(size, size)), batch(size // 2, size)
    result = duotone_lab.ledger(m, lambda: m(x))
    assert result.predicted_peak == pytest.approx(result.measured_peak, rel=0.05)
    # Weight, input and their gradients live at once in backward; nothing less would be believable.
    assert result.measured_peak >= 4 * size * size + 4 * size * size // 2


@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["LayerNormMLP", "LayerNormLinear", "Sequential"])
def test_the_peak_of_fused_modules_is_predicted_because_counting_leaves_them_fused(name: str, kind: str) -> None:
    options = {"recipe": recipes.load(name), "params_dtype": BF16}
    results: dict[str, Callable[[], nn.Module]] = {
        "LayerNormMLP": lambda: duotone.LayerNormMLP(256, 512, activation="swiglu", **options),
        "LayerNormLinear": lambda: duotone.LayerNormLinear(256, 512, **options),
        "Sequential": lambda: ops.Sequential(
            ops.RMSNorm(256, dtype=BF16), ops.Linear(256, 512, **options), ops.GELU(), ops.Linear(512, 256, **options)
        ),
    }
    m, x = results[kind](), batch(256, 256)
    result = duotone_lab.ledger(m, lambda: m(x))
    assert result.predicted_peak == pytest.approx(result.measured_peak, rel=0.01)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_the_peak_under_a_backward_override_is_predicted_within_five_percent(override: str) -> None:
    m, x = converted("mxfp8", nn.Linear(512, 256), backward_override=override), batch(256, 512)
    result = duotone_lab.ledger(m, lambda: m(x))
    assert result.predicted_peak == pytest.approx(result.measured_peak, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_of_a_quantized_parameter_model_is_predicted_within_five_percent(name: str) -> None:
    m = converted(name, nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)))
    duotone.convert_parameters(m, recipes.load(name))
    x = batch(256, 256, grad=False)
    result = duotone_lab.ledger(m, lambda: m(x))
    assert result.predicted_peak == pytest.approx(result.measured_peak, rel=0.05)


def test_a_peak_in_a_loss_outside_of_modules_is_predicted_too_low_and_shown() -> None:
    m, x = converted("bf16", nn.Linear(64, 1024)), batch(512, 64)
    result = duotone_lab.ledger(m, lambda: m(x).float().square().mean())
    assert result.predicted_peak < result.measured_peak
    off = 100 * (result.predicted_peak / result.measured_peak - 1)
    assert f"({off:+.1f} %)" in str(result)
    assert result.rows()[-1] == {
        "module": "(outside)",
        "weights": 0,
        "caches": 0,
        "saved": 4 * 512 * 1024,
        "total": 4 * 512 * 1024,
    }


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(x), target)


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_a_loss_that_is_a_module_counts(name: str) -> None:
    m = WithLoss(converted(name, nn.Linear(256, 1000)))
    x, target = batch(512, 256, grad=False), torch.randint(0, 1000, (512,))
    result = duotone_lab.ledger(m, lambda: m(x, target))
    assert result.predicted_peak == pytest.approx(result.measured_peak, rel=0.05)


def test_rows_have_the_bytes_counted_by_hand() -> None:
    m = converted("mxfp8", nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 32)))
    x = batch(96, 64, grad=False)
    result = duotone_lab.ledger(m, lambda: m(x))
    rows = {row["module"]: row for row in result.rows()}
    assert set(rows) == {"0", "1", "2"} and module_rows(m, lambda: m(x)) == result.modules
    assert rows["0"]["weights"] == 2 * 64 * 128 and rows["2"]["weights"] == 2 * (128 * 32 + 32)
    assert rows["0"]["caches"] == rows["2"]["caches"] == 8  # the seed
    # Columnwise MXFP8 planes: one byte an element and one for each 32 along the contraction.
    assert rows["0"]["saved"] == 64 * 96 + 64 * 3  # the input alone: it needs no gradient itself
    assert rows["1"]["saved"] == 2 * 96 * 128
    assert rows["2"]["saved"] == (128 * 96 + 128 * 3) + (128 * 32 + 128)
    assert result.total == sum(row["total"] for row in rows.values())
    assert result.inputs == 2 * 96 * 64


def test_a_tied_weight_counts_once_and_delayed_states_count_with_their_linear() -> None:
    m = converted("fp8-delayed", nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)))
    m[1].weight = m[0].weight
    x = batch(32, 64)
    rows = {row["module"]: row for row in duotone_lab.ledger(m, lambda: m(x)).rows()}
    assert set(rows) == {"0", "1"}
    assert (rows["0"]["weights"], rows["1"]["weights"]) == (2 * 64 * 64, 0)
    states = [s for s in m[1].children() if isinstance(s, DelayedState)]
    assert len(states) == 2
    assert rows["1"]["caches"] >= 8 + sum(b.nbytes for s in states for b in s.buffers())


def test_a_weight_held_only_in_mxfp8_rowwise_costs_at_most_1_04_bytes_an_element() -> None:
    with duotone.quantized_model_init(recipe=recipes.load("mxfp8")), torch.no_grad():
        m = duotone.Linear(1024, 1024, bias=False, params_dtype=BF16)
    assert m.weight.get_usages() == {"rowwise": True, "columnwise": False}
    x = batch(64, 1024, grad=False)
    offset = nn.Parameter(torch.zeros(1, dtype=BF16))
    m.weight.requires_grad_(False)
    row = duotone_lab.ledger(m, lambda: m(x) * offset).rows()[0]
    assert 1.0 < row["weights"] / 1024**2 <= 1.04


@pytest.mark.parametrize(("name", "ratio"), [("mxfp8-fwd-bf16-bwd", (1 + 1 / 32) / 2), ("mxfp8", 1.0)])
def test_a_dequantized_override_keeps_the_bytes_of_rowwise_planes(name: str, ratio: float) -> None:
    """hybrid 103: less than None where backward is in high precision; as much where both planes share a format, because
    None keeps one plane of each operand, the columnwise one, and not two as elsewhere."""
    x = batch(512, 512)
    saved_values = {
        o: saved(converted(name, nn.Linear(512, 512), backward_override=o), x) for o in (None, "dequantized")
    }
    planes = 2 * 512 * 512 * (1 + 1 / 32)
    assert saved_values["dequantized"] == planes
    assert saved_values[None] == planes / ratio


def test_a_high_precision_override_keeps_no_quantized_workspace() -> None:
    """hybrid 103: the input itself is kept, and the weight as the parameter that it is."""
    x = batch(512, 512)
    m = converted("mxfp8", nn.Linear(512, 512), backward_override="high_precision")
    assert saved(m, x) == x.nbytes


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_what_needs_no_gradient_is_not_saved(override: str | None) -> None:
    """core 86: a census of saved bytes for all four combinations of input and weight that need a gradient."""
    saved = {}
    for input_grad in (True, False):
        for weight_grad in (True, False):
            m = converted("mxfp8", nn.Linear(128, 256, bias=False), backward_override=override)
            m.weight.requires_grad_(weight_grad)
            x, scale = batch(64, 128, grad=input_grad), nn.Parameter(torch.ones((), dtype=BF16))
            result = duotone_lab.ledger(m, lambda m=m, x=x, scale=scale: m(x).sum() * scale)
            saved[input_grad, weight_grad] = sum(r["saved"] for r in result.rows() if r["module"] == "")
    of_weight, of_input = saved[True, False], saved[False, True]
    assert saved[False, False] == 0
    assert saved[True, True] == of_weight + of_input
    planes = {"of_input": 64 * 128 + 64 * 128 // 32, "of_weight": 256 * 128 + 256 * 128 // 32}
    expected = {None: planes, "dequantized": planes, "high_precision": {"of_input": 2 * 64 * 128, "of_weight": 0}}
    assert {"of_input": of_input, "of_weight": of_weight} == expected[override]


def test_recompute_of_a_dequantized_override_saves_no_column_data() -> None:
    """hybrid 104: a checkpointed block keeps its input alone, and neither run of its forward asks for a column."""
    m, x = converted("mxfp8", nn.Linear(256, 256, bias=False), backward_override="dequantized"), batch(256, 256)

    def step() -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False)

    result = duotone_lab.ledger(m, step)
    assert sum(row["saved"] for row in result.rows()) == x.nbytes
    plan = m.plan_for(x)
    assert not plan.input.usage.columnwise and not plan.weight.usage.columnwise


@pytest.mark.parametrize("name", ["nvfp4", "fp8-delayed"])
def test_a_ledger_leaves_the_next_step_as_it_would_have_been(name: str) -> None:
    m = converted(name, nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 32)))
    x = batch(32, 64)
    m(x).sum().backward()
    twin, x_twin = copy.deepcopy(m), x.detach().clone().requires_grad_()
    x_twin.grad = x.grad.clone()
    for parameter, reference in zip(m.parameters(), twin.parameters(), strict=True):
        reference.grad = parameter.grad.clone()
    state = torch.get_rng_state()
    duotone_lab.ledger(m, lambda: m(x))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x.grad, x_twin.grad)
    for parameter, reference in zip(m.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad)
    outputs = []
    for model, inputs in ((m, x), (twin, x_twin)):
        torch.set_rng_state(state)
        outputs.append(model(inputs))
        outputs[-1].sum().backward()
    assert torch.equal(*outputs) and torch.equal(x.grad, x_twin.grad)
    buffers = zip(m.named_buffers(), twin.named_buffers(), strict=True)
    # Seeds depend on the module alone; scales and histories on what was recorded.
    assert all(torch.equal(a[1], b[1]) for a, b in buffers)


def test_a_step_that_fails_leaves_gradients_and_buffers_and_no_hooks() -> None:
    m, x = converted("nvfp4", nn.Linear(32, 32)), batch(32, 32)
    m(x).sum().backward()
    before = {name: t.clone() for name, t in [*m.named_buffers(), ("grad", m.weight.grad), ("x", x.grad)]}

    def fails() -> torch.Tensor:
        m(x)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        duotone_lab.ledger(m, fails)
    after = dict([*m.named_buffers(), ("grad", m.weight.grad), ("x", x.grad)])
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not m._forward_hooks and not m._forward_pre_hooks


def test_a_table_lines_up_and_names_every_module() -> None:
    m, x = converted("mxfp8", nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))), batch(32, 64)
    text = str(duotone_lab.ledger(m, lambda: m(x)))
    table = text.split("\n\n")[0].splitlines()
    assert table[0].split() == ["module", "weights", "caches", "saved", "total"]
    assert [line.split()[0] for line in table[1:]] == ["0", "1", "total"]
    assert len({len(line) for line in table}) == 1
    assert "predicted" in text and "measured" in text and "\t" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, lambda: torch.ones(1)), "takes a module .* got NoneType"),
        ((nn.Linear(2, 2), 3), "takes a module .* got int"),
        ((nn.Linear(2, 2), lambda: None), "it returned NoneType"),
        ((nn.Linear(2, 2), lambda: torch.ones(1)), "a tensor without a gradient"),
        ((nn.Linear(2, 2, device="meta"), lambda: None), "one device that holds data"),
    ],
)
def test_what_no_ledger_can_be_made_of_is_said_in_one_line(arguments, words) -> None:
    with pytest.raises(duotone.UserError, match=words) as caught:
        duotone_lab.ledger(*arguments)
    assert "\n" not in str(caught.value)


def test_a_zero_size_batch_has_a_ledger() -> None:
    m = converted("mxfp8", nn.Linear(64, 64))
    x = torch.empty(0, 64, dtype=BF16, requires_grad=True)
    assert saved(m, x) == 64 * 64 + 64 * 2


@pytest.mark.parametrize(
    "names",
    [
        ("fp8_e4m3_tensor", "fp8_e5m2_tensor"),
        ("mxfp8_e4m3", "mxfp8_e4m3"),
        ("nvfp4", "nvfp4_rht_sr"),
        ("fp8_e4m3_128x128", "fp8_e4m3_1x128"),
    ],
)
def test_on_cuda_a_prediction_counts_what_a_cast_kernel_allocates(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel writes parts alone. Stages in plain torch need several times as much, such as fp32 copies."""
    for module in (casts, plane):
        monkeypatch.setattr(module, "runs_kernels", lambda index: index >= 0)
    row, col = map(formats.get, names)
    specs = [*row.parts(256, 512).values(), *col.parts(512, 256).values()]
    with FakeTensorMode():
        x = torch.empty(256, 512, device="cuda", dtype=BF16)
        ctx = QuantizeContext(seed=torch.empty(1, dtype=torch.int64, device="cuda"))
        with LiveStorages([x]) as live:
            before = live.live
            planes = Quantizer(row, col).encode(x, ctx=ctx)
            assert live.peak - before == sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
            assert planes.rowwise is not None and planes.columnwise is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run pytest tests/lab/test_ledger.py on one")
@pytest.mark.parametrize("name", [*NAMES, "fp8-block", "fp8-delayed"])
def test_on_cuda_the_prediction_agrees_with_the_allocator(name: str) -> None:
    # Without a bias: the sum that is its gradient takes memory of its own there, which is the peak of native products.
    m = converted(name, nn.Linear(2048, 2048, bias=False)).cuda()
    x = batch(2048, 2048).detach().cuda().requires_grad_()
    result = duotone_lab.ledger(m, lambda: m(x))
    assert result.predicted_peak == pytest.approx(result.measured_peak, rel=0.05)
