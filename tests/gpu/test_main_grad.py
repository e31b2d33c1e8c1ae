"""On a CUDA device: weight gradients are added to `main_grad` by the product itself, with one rounding."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import duotone
from duotone import formats, recipes
from duotone.dispatch import gemms
from duotone.dispatch.rule import GemmProblem
from duotone.dispatch.scaled import ScaledProduct
from duotone.dispatch.target import target
from duotone.linear import grouped
from duotone.recipes import Recipe
from duotone.tensor.plane import Plane
from duotone.tensor.plane_encoder import encode_plane

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no CUDA device of capability 9.0; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
K, N = 256, 128
CUDA = {"device": "cuda", "params_dtype": torch.bfloat16, "bias": False}
PAIRS = [
    ("fp8_e4m3_tensor", "fp8_e4m3_tensor"),
    ("fp8_e5m2_tensor", "fp8_e4m3_tensor"),
    ("fp8_e4m3_row", "fp8_e4m3_row"),
    ("fp8_e5m2_row", "fp8_e4m3_tensor"),
    ("fp8_e4m3_1x128", "fp8_e4m3_1x128"),
    ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
    ("fp8_e4m3_128x128", "fp8_e4m3_1x128"),
    ("mxfp8_e4m3", "mxfp8_e4m3"),
    ("nvfp4", "nvfp4"),
    ("identity", "identity"),
]
CUBLAS = 7
"""Of these pairs, the first are multiplied as they are."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each product that cuBLASLt was asked for adds."""
    from duotone.kernels import cublas

    flags: list[bool] = []
    plain = cublas.multiply
    monkeypatch.setattr(cublas, "multiply", lambda *arguments: (flags.append(arguments[-1]), plain(*arguments))[1])
    return flags


def planes(pair: tuple[str, str], m: int, n: int, k: int) -> list[Plane]:
    sizes = zip(pair, ((m, k), (n, k)), strict=True)
    return [encode_plane(formats.get(name), torch.randn(size, device="cuda").bfloat16()) for name, size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(256, 512, 384), (128, 48, 1152), (130, 40, 100), (17, 16, 128)], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_product_is_added_or_written_over_with_one_rounding(pair, shape, dtype, called) -> None:
    m, n, k = shape
    a, b = planes(pair, m, n, k)
    order = 0.0 if pair in PAIRS[:CUBLAS] else 1e-4  # others sum in an order that depends on the result's dtype
    half_ulp = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for fast in (False, True):
        rule, _ = gemms.choose(GemmProblem(a.format, b.format, target("cuda"), torch.bfloat16, fast))
        y = rule.run(a, b, torch.float32)
        over = torch.full((m, n), torch.nan, device="cuda", dtype=dtype)
        rule.run_into(a, b, over, False)
        alone = rule.run(a, b, dtype).double()
        assert ((over.double() - alone).abs() <= 2 * half_ulp * alone.abs() * (order > 0) + order).all()
        before = torch.randn(m, n, device="cuda").to(dtype)
        total = before.clone()
        rule.run_into(a, b, total, True)
        want, size = before.double() + y.double(), before.double().abs() + y.double().abs()
        # y was rounded to fp32, and rules that do not add by themselves round it to `dtype` too
        assert ((total.double() - want).abs() <= (2 * half_ulp + 2.0**-24) * size + order).all()
    whole = not m % 16 or "128" not in pair[0] + pair[1]
    takes = pair in PAIRS[:CUBLAS] and not n % 16 and whole and dtype is not torch.float16
    assert called == [False, True] * 2 * takes


@pytest.mark.parametrize("place", ["strided", "unaligned", "elsewhere", "empty", "float64"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_other_places_get_the_same(pair, place, called) -> None:
    a, b = planes(pair, 64, 32, 0 if place == "empty" else 256)
    rule, _ = gemms.choose(GemmProblem(a.format, b.format, target("cuda"), torch.bfloat16))
    flat = torch.ones(64 * 64 + 1, device="cuda")
    out = {"strided": flat[: 64 * 64].view(64, 64)[:, :32], "unaligned": flat[1:2049].view(64, 32)}.get(place)
    out = flat[:2048].view(64, 32) if out is None else out
    out = out.double() if place == "float64" else out
    if place == "elsewhere":
        out = out.cpu()
        with pytest.raises(RuntimeError, match="device"):
            rule.run_into(a, b, out, True)
        assert (out == 1).all()
    else:
        rule.run_into(a, b, out, True)
        want = rule.run(a, b, torch.float32) + 1
        assert ((out - want).abs() <= 1e-5 * (want.abs() + 16)).all()  # sums of some rules go in another order
    assert not called


def test_experts_that_share_a_buffer_are_added_up_on_the_device() -> None:
    """The kernel writes a place once: an expert whose buffer another has comes after."""
    m, alone = group(RECIPES["fp8-current"]), group(RECIPES["fp8-current"])
    counts = torch.tensor([40, 0, 24], device="cuda")
    for make in (MAKES["fp32"], MAKES["bf16"]):
        places(alone, make, 0.0)
        step(alone, counts, 64)
        want = sum(weight.main_grad.float() for weight in alone.weights)
        main = make().fill_(0.0)
        for weight in m.weights:
            weight.main_grad = main
        step(m, counts, 64)
        assert ((main.float() - want).abs() <= 2.0**-6 * (want.abs() + 1)).all()


def test_shapes_that_come_and_go_leave_no_descriptors(monkeypatch) -> None:
    """Row counts change from step to step: what was made for old ones is given back."""
    from duotone.kernels import cublas

    lost, plain = [], cublas._call
    monkeypatch.setattr(
        cublas, "_call", lambda name, *arguments, **more: (lost.append(name), plain(name, *arguments, **more))[1]
    )
    cublas._product.cache_clear()
    main, rule = torch.zeros(64, 32, device="cuda"), gemms.RULES[1]
    for k in range(16, 16 + 16 * (cublas.REMEMBERED + 8), 16):
        codes = torch.zeros(64, k, device="cuda", dtype=torch.uint8)
        one = Plane(formats.get("fp8_e4m3_tensor"), {"codes": codes, "scale": torch.ones(1, 1, device="cuda")}, (64, k))
        other = Plane(one.format, {"codes": codes[:32], "scale": one.parts["scale"]}, (32, k))
        rule.run_into(one, other, main, True)
    assert lost.count("MatmulDescDestroy") == 8 and lost.count("MatrixLayoutDestroy") == 24


@pytest.mark.parametrize("name", [*recipes.names()])
def test_a_linear_adds_in_fp32_what_autograd_would_have_been_given(name) -> None:
    if "row-scaled" in name:
        pytest.skip("it asks for the types of tensors")
    options = {"recipe": recipes.load(name), **CUDA}
    m = duotone.Linear(K, N, fuse_wgrad_accumulation=True, **options)
    plain = duotone.Linear(K, N, **options)
    plain.load_state_dict(m.state_dict())
    duotone.load_rng_state(plain, duotone.rng_state(m))
    m.weight.main_grad = torch.ones(N, K, device="cuda")
    x, dy = torch.randn(96, K, device="cuda").bfloat16(), torch.randn(96, N, device="cuda").bfloat16()
    for one in (m, plain):
        one(x).backward(dy)
    result, want = m.weight.main_grad - 1, plain.weight.grad.float()
    assert m.weight.grad is None and not torch.equal(result.bfloat16().float(), result)
    # half an ulp of bf16, and the sum with 1 in fp32
    assert ((result - want).abs() <= want.abs() * 2.0**-8 + 2e-5).all()


def test_no_gradient_is_made_on_the_way() -> None:
    """What a backward takes beyond its planes: with main_grad no matrix of the weight's size in fp32."""
    m = duotone.Linear(4096, 4096, recipe=recipes.load("fp8-current"), fuse_wgrad_accumulation=True, **CUDA)
    m.weight.main_grad = torch.zeros(4096, 4096, device="cuda")
    x = torch.randn(256, 4096, device="cuda").bfloat16()
    dy = torch.randn_like(x)
    for _ in range(2):
        y = m(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y.backward(dy)
    assert torch.cuda.max_memory_allocated() - before < 4096 * 4096 * 2  # not in bf16 either


# --- experts

SPLITS = [[128, 256, 384], [130, 0, 70], [17, 1, 24]]
RECIPES = {
    **{name: recipes.load(name) for name in ("fp8-current", "fp8-rowwise")},
    "fp8-delayed": recipes.DelayedScaling(first_scale_from_amax=False),  # a first scale makes the host look once
    "rowwise, fast": recipes.load(str(Path(__file__).parents[2] / "bench/recipes/fp8-rowwise-fast.toml")),
}


def group(recipe: Recipe, seed: int = 0) -> duotone.GroupedLinear:
    torch.manual_seed(seed)
    return duotone.GroupedLinear(3, K, N, recipe=recipe, fuse_wgrad_accumulation=True, **CUDA)


def places(m: duotone.GroupedLinear, make: Callable[[], Tensor], value: float) -> None:
    for weight in m.weights:
        weight.main_grad = make().fill_(value)


def step(m: duotone.GroupedLinear, splits: list[int] | Tensor, rows: int, first: bool | None = None) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, K, device="cuda", generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(rows, N, device="cuda", generator=generator).bfloat16()
    y = m(x, splits, is_first_microbatch=first)
    y.backward(dy)
    return [y.detach(), x.grad]


MAKES: dict[str, Callable[[], Tensor]] = {
    "fp32": lambda: torch.empty(N, K, device="cuda"),
    "bf16": lambda: torch.empty(N, K, device="cuda", dtype=torch.bfloat16),
    "unaligned": lambda: torch.empty(N * K + 3, device="cuda")[3:].view(N, K),
    "strided": lambda: torch.empty(N, 2 * K, device="cuda")[:, :K],
}


@pytest.mark.parametrize("where", MAKES)
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_counts_on_the_device_are_not_waited_for_and_add_what_host_counts_do(name, splits, where, monkeypatch) -> None:
    apart, m = group(RECIPES[name]), group(RECIPES[name])
    with monkeypatch.context() as patch:
        patch.setattr(grouped, "SMALL", 0)
        places(apart, MAKES["fp32"], 2.0)
        want = [step(apart, splits, sum(splits)) for _ in range(2)]
    counts = torch.tensor(splits, device="cuda")
    warm = copy.deepcopy(m)
    places(warm, MAKES[where], 2.0)
    step(warm, counts, sum(splits))  # compiles
    places(m, MAKES[where], 2.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [step(m, counts, sum(splits)) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for result, expected in itertools.chain(*(zip(*pair, strict=True) for pair in zip(results, want, strict=True))):
        assert (result - expected).norm() <= 1e-2 * expected.norm()
    for result, expected, n in zip(m.weights, apart.weights, splits, strict=True):
        assert result.grad is None and expected.grad is None
        a, b = result.main_grad.float() - 2, expected.main_grad - 2
        assert n or not (a.any() or b.any())
        # both sum in fp32, in other orders; bf16 keeps 8 bits of 2 plus the gradient, twice
        bound = 2.0**-7 * (b.abs() + 2) if where == "bf16" else 1e-3 * b.norm() / b.numel() ** 0.5 + 1e-2 * b.abs()
        assert ((a - b).abs() <= bound).all()


def test_first_microbatches_flags_and_frozen_experts_of_counts_on_the_device() -> None:
    m, splits = group(RECIPES["fp8-current"]), [40, 0, 24]
    counts = torch.tensor(splits, device="cuda")
    places(m, MAKES["fp32"], 0.0)
    step(m, counts, 64)
    alone = [weight.main_grad.clone() for weight in m.weights]
    assert alone[0].any() and not alone[1].any()
    m.weights[0].overwrite_main_grad = True  # one of three is written over
    for weight in m.weights:
        weight.main_grad.fill_(8.0)
        weight.grad_added_to_main_grad = False
    step(m, counts, 64)
    assert torch.equal(m.weights[0].main_grad, alone[0])
    for weight, one in zip(m.weights[1:], alone[1:], strict=True):
        assert torch.allclose(weight.main_grad, one + 8, atol=1e-6)  # an fma or a product and a sum
        assert weight.grad_added_to_main_grad and not weight.grad.any()
    places(m, MAKES["fp32"], torch.nan)
    step(m, counts, 64, first=True)
    for weight, one in zip(m.weights, alone, strict=True):
        assert torch.allclose(weight.main_grad, one, atol=1e-6)
    m.weights[2].requires_grad_(False)
    del m.weights[2].main_grad
    step(m, counts, 64, first=False)
    assert torch.allclose(m.weights[0].main_grad, alone[0], atol=1e-6)
    assert torch.allclose(m.weights[1].main_grad, 2 * alone[1], atol=1e-6)


def test_small_experts_of_host_counts_add_in_one_product_too(monkeypatch) -> None:
    calls, plain = [], ScaledProduct.contract_segments_into
    monkeypatch.setattr(
        ScaledProduct, "contract_segments_into", lambda self, *arguments: (calls.append(1), plain(self, *arguments))[1]
    )
    m = group(RECIPES["fp8-current"])
    places(m, MAKES["fp32"], 0.0)
    step(m, [40, 0, 24], 64)
    assert calls and all(weight.main_grad.isfinite().all() for weight in m.weights)
