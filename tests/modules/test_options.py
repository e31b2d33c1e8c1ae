"""Options of the linears that users rely on, each alone and some in pairs, against the module without them."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import MissingPlaneError, UserError, recipes
from duotone.modules import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from duotone.tensor.quantizer import Quantizer

DTYPE = torch.bfloat16
MX, NV = recipes.load("mxfp8"), recipes.load("nvfp4")
DELAYED = recipes.load("fp8-delayed")
SPLITS = [9, 0, 23]
CLASSES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **flags: Linear(64, 96, **flags),
    "LayerNormLinear": lambda **flags: LayerNormLinear(64, 96, **flags),
    "LayerNormMLP": lambda **flags: LayerNormMLP(64, 96, activation="swiglu", **flags),
    "GroupedLinear": lambda **flags: GroupedLinear(3, 64, 96, **flags),
}
every_class = pytest.mark.parametrize("kind", CLASSES)


def make(kind: str, **options) -> nn.Module:
    torch.manual_seed(11)
    return CLASSES[kind](**{"params_dtype": DTYPE, "recipe": MX, "name": "m", **options})


def call(m: nn.Module, x: Tensor, **options):
    return m(x, SPLITS, **options) if isinstance(m, GroupedLinear) else m(x, **options)


def rows() -> Tensor:
    return torch.randn(32, 64).to(DTYPE)


def matrices(m: nn.Module) -> list[nn.Parameter]:
    return [p for p in m.parameters() if p.dim() > 1]


def vectors(m: nn.Module) -> list[nn.Parameter]:
    return [p for p in m.parameters() if p.dim() == 1]


def first_of(y) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


def backward(m: nn.Module, x: Tensor, **options) -> list[Tensor]:
    """The output and the gradient of the input; parameters accumulate theirs."""
    leaf = x.clone().requires_grad_()
    y = first_of(call(m, leaf, **options))
    torch.manual_seed(5)
    y.backward(torch.randn(y.shape).to(y.dtype))
    return [y.detach(), leaf.grad]


def equal(a: list, b: list) -> bool:
    return len(a) == len(b) and all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def grads(parameters) -> list[Tensor | None]:
    return [p.grad for p in parameters]


def twin(m: nn.Module, kind: str, **options) -> nn.Module:
    """The module without the option, with the same values and seeds."""
    other = make(kind, **options)
    other.load_state_dict(m.state_dict())
    duotone.load_rng_state(other, duotone.rng_state(m))
    return other


# --- is_first_microbatch


@pytest.fixture
def encoded(monkeypatch) -> list[tuple]:
    """Shapes that any quantizer encodes."""
    calls: list[tuple] = []
    encode = Quantizer.encode
    monkeypatch.setattr(
        Quantizer, "encode", lambda s, x, *a, **k: (calls.append(tuple(x.shape)), encode(s, x, *a, **k))[1]
    )
    return calls


def weight_encodes(calls: list[tuple], m: nn.Module) -> int:
    shapes = {tuple(w.shape[-2:]) for w in matrices(m)} - {(32, 64)}
    shapes |= {tuple(m.weight.shape)} if hasattr(m, "a_weight") else set()  # pieces are encoded as one
    result = sum(shape in shapes for shape in calls)
    calls.clear()
    return result


@pytest.mark.parametrize("option", [{}, {"parameters_split": ("a", "b")}, {"single_grouped_weight": True}], ids=str)
@every_class
def test_weights_are_encoded_once_per_step(kind, option, encoded) -> None:
    """core 74, hybrid 59: counts, and the same outputs and gradients as without the cache."""
    kinds = {"parameters_split": ("Linear", "LayerNormLinear"), "single_grouped_weight": ("GroupedLinear",)}
    if any(kind not in kinds[name] for name in option):
        pytest.skip("the module has no such option")
    m = make(kind, **option)
    count = 3 if kind == "GroupedLinear" else 2 if kind == "LayerNormMLP" else 1
    for _ in range(2):
        x = rows()
        expected = backward(m, x)
        assert weight_encodes(encoded, m) == count
        for first, times in ((True, count), (False, 0), (False, 0)):
            assert equal(backward(m, x, is_first_microbatch=first), expected)
            assert weight_encodes(encoded, m) == times
        with torch.no_grad():
            for weight in matrices(m):
                weight.mul_(0.5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["mxfp8", "fp8-current", "fp8-block", "nvfp4", "bf16"])
@every_class
def test_a_cache_is_right_after_evaluation_and_after_every_write_that_leaves_a_version(kind, name, mode) -> None:
    """core 74: train, eval, train; optimizer steps and copy_ in between; never a stale weight."""
    m = make(kind, recipe=recipes.load(name))
    reference = twin(m, kind, recipe=recipes.load(name))

    def compare(**flags) -> None:
        x = rows()
        for module in (m, reference):
            module.zero_grad()
        duotone.load_rng_state(reference, duotone.rng_state(m))
        assert equal(backward(m, x, **flags), backward(reference, x))
        assert equal(grads(m.parameters()), grads(reference.parameters()))

    def evaluate(**flags) -> None:
        x = rows()
        with mode():
            assert torch.equal(call(m.eval(), x, **flags), call(reference.eval(), x))
        m.train()
        reference.train()

    evaluate(is_first_microbatch=True)
    compare(is_first_microbatch=False)
    compare(is_first_microbatch=True)
    evaluate(is_first_microbatch=False)
    compare(is_first_microbatch=False)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (m, reference)]
    for optimizer in optimizers:
        optimizer.step()
    compare(is_first_microbatch=False)  # a forgotten True
    evaluate()
    with torch.no_grad():
        for weight, expected in zip(matrices(m), matrices(reference), strict=True):
            values = torch.randn(weight.shape).to(DTYPE) / 8
            weight.copy_(values)
            expected.copy_(values)
    compare(is_first_microbatch=False)
    with mode():
        call(m, rows(), is_first_microbatch=False)
    compare(is_first_microbatch=False)


@every_class
def test_writes_through_data_need_a_first_microbatch_or_an_invalidation(kind) -> None:
    m, x = make(kind), rows()
    call(m, x, is_first_microbatch=True)
    for refresh in ("first", "invalidate"):
        for weight in matrices(m):
            weight.data.mul_(0.5)
        if refresh == "invalidate":
            parts = (m.fc1, m.fc2) if kind == "LayerNormMLP" else (m,)
            for part in parts:
                part.invalidate_weight_cache()
        result = call(m, x, is_first_microbatch=refresh == "first")
        assert torch.equal(result, call(m, x))


@every_class
def test_other_memory_behind_a_weight_is_encoded_anew(kind) -> None:
    m, x = make(kind), rows()
    call(m, x, is_first_microbatch=True)

    def assign() -> None:
        for weight in matrices(m):
            weight.data = weight.detach() * -2

    def fill_from_vector() -> None:
        parameters = [*m.parameters()]
        nn.utils.vector_to_parameters(-2 * nn.utils.parameters_to_vector(parameters).detach(), parameters)

    for write in (assign, fill_from_vector, lambda: m.half().to(DTYPE)):
        write()
        assert torch.equal(call(m, x, is_first_microbatch=False), call(m, x))


def test_every_module_with_a_cache_can_be_told_to_forget_it() -> None:
    assert all(hasattr(make(kind), "invalidate_weight_cache") for kind in CLASSES)


def test_a_cache_follows_recipe_dtype_parameter_and_copy() -> None:
    m, x = make("Linear"), rows()
    m(x, is_first_microbatch=True)
    other = copy.deepcopy(m)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert not other(x, is_first_microbatch=False).any() and m(x, is_first_microbatch=False).any()
    with duotone.autocast(recipe=recipes.load("fp8-current")):
        want = m(x)
        assert torch.equal(m(x, is_first_microbatch=False), want)
    m.weight = nn.Parameter(m.weight.detach() * 2)
    assert torch.equal(m(x, is_first_microbatch=False), m(x))
    m.float()
    assert torch.equal(m(x.float(), is_first_microbatch=False), m(x.float()))


@pytest.mark.parametrize("piece", ["a", "b"])
def test_a_cache_of_split_parameters_sees_a_write_to_any_piece(piece) -> None:
    m, x = make("Linear", parameters_split=("a", "b")), rows()
    m(x, is_first_microbatch=True)
    for _ in range(5):
        with torch.no_grad():
            m._parameters[f"{piece}_weight"].add_(0.5)
        assert torch.equal(m(x, is_first_microbatch=False), m(x))


@pytest.mark.parametrize("recipe", [MX, NV, DELAYED], ids=lambda recipe: recipe.name)
@every_class
def test_planes_that_are_kept_have_no_graph(kind, recipe) -> None:
    """Leaving inference mode turns gradients on: the stages of a cast would keep what it is made of for a backward."""
    saved = []
    for first in (None, True, False):
        m, seen = make(kind, recipe=recipe), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: (seen.append(t), t)[1], lambda t: t):
            call(m, rows().requires_grad_(), is_first_microbatch=first)
        saved.append(sorted((t.shape, str(t.dtype)) for t in seen))
    assert saved[0] == saved[1] == saved[2]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", [MX, DELAYED], ids=lambda recipe: recipe.name)
@every_class
def test_microbatches_under_checkpoint_have_the_gradients_without(kind, recipe, reentrant) -> None:
    m, twin = make(kind, recipe=recipe), make(kind, recipe=recipe)
    for first in (True, False):
        x, dy = rows(), torch.randn(32, 64 if kind == "LayerNormMLP" else 96).to(DTYPE)
        results = []
        for one, run in ((m, checkpoint), (twin, lambda f, x, **_: f(x))):
            leaf = x.clone().requires_grad_()
            options = {"use_reentrant": reentrant}
            y = run(lambda x, m=one, first=first: first_of(call(m, x, is_first_microbatch=first)), leaf, **options)
            y.backward(dy)
            results.append([y, leaf.grad, *(p.grad for p in one.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_delayed_amaxes_of_a_cached_weight_are_not_recorded_again() -> None:
    """core 74."""
    m = make("Linear", recipe=DELAYED)
    backward(m, rows(), is_first_microbatch=True)
    with duotone.autocast(recipe=DELAYED):
        m(rows(), is_first_microbatch=False)
        assert m.duotone_forward.amax_history[0, 2] == 0 and m.duotone_forward.amax_history[0, 0] > 0


# --- fuse_wgrad_accumulation


def give_main_grad(m: nn.Module, value: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
    for weight in matrices(m):
        weight.main_grad = torch.full(weight.shape, value, dtype=dtype)


def exact(m: nn.Module, kind: str, x: Tensor, **options) -> list[Tensor]:
    """Gradients of the weights as an fp32 product: those of `main_grad` after one backward from zero."""
    one = make(kind, fuse_wgrad_accumulation=True, **options)
    one.load_state_dict(m.state_dict())
    duotone.load_rng_state(one, duotone.rng_state(m))
    give_main_grad(one)
    backward(one, x)
    return [weight.main_grad for weight in matrices(one)]


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "fp8-current"])
@every_class
def test_main_grad_is_the_gradient_in_fp32_and_grad_stays_empty(kind, name) -> None:
    """core 83: rounded to bf16 it is autograd's gradient, and it was not rounded before; the input's and the bias's are
    as ever.

    A bf16 rounding moves a value by 2^-8 of it at most; a CPU's fp32 and bf16 products sum in different orders.
    """
    options = {"recipe": recipes.load(name)}
    m, x = make(kind, fuse_wgrad_accumulation=True, **options), rows()
    give_main_grad(m)
    plain = twin(m, kind, **options)
    assert equal(backward(m, x), backward(plain, x))
    for weight, expected in zip(matrices(m), matrices(plain), strict=True):
        assert weight.grad is None and weight.main_grad.dtype == torch.float32
        assert torch.allclose(weight.main_grad, expected.grad.float(), rtol=2**-8, atol=1e-5)
        assert not expected.grad.any() or not torch.equal(weight.main_grad.to(DTYPE).float(), weight.main_grad)
    assert equal(grads(vectors(m)), grads(vectors(plain)))


@every_class
def test_main_grad_accumulates_and_a_first_microbatch_overwrites(kind) -> None:
    """core 83, 5.4: None and False add, True writes, overwrite_main_grad always writes."""
    m, xs = make(kind, fuse_wgrad_accumulation=True), [rows() for _ in range(3)]
    parts = [exact(m, kind, x) for x in xs]
    for firsts, terms in (((None, None), (0, 1)), ((True, False, False), (0, 1, 2)), ((False, True, False), (1, 2))):
        give_main_grad(m, 0.0)
        for x, first in zip(xs, firsts, strict=False):
            backward(m, x, is_first_microbatch=first)
        for i, weight in enumerate(matrices(m)):
            total = torch.zeros(weight.shape)
            for term in terms:
                total += parts[term][i]
            assert torch.equal(weight.main_grad, total)
    for weight in matrices(m):
        weight.overwrite_main_grad = True
    for x, first in zip(xs, (None, False, None), strict=True):
        backward(m, x, is_first_microbatch=first)
    assert equal([w.main_grad for w in matrices(m)], parts[2])


@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("turns", ["d1 d0 f1", "d1 f1", "f1 d1", "f1 f0", "f1 d1 f0", "d1 f1 d0"])
def test_options_that_change_between_calls_count_from_the_next_call(turns: str, first: bool | None) -> None:
    """f is fuse_wgrad_accumulation, d is delay_wgrad_compute."""
    names = {"f": "fuse_wgrad_accumulation", "d": "delay_wgrad_compute"}

    def step(m: duotone.Linear) -> list[Tensor | None]:
        m.weight.grad, m.weight.main_grad = None, torch.zeros(m.weight.shape)
        m(torch.ones(16, 32), is_first_microbatch=first).sum().backward()
        m.backward_dw()
        return [m.weight.grad, m.weight.main_grad]

    torch.manual_seed(0)
    m = duotone.Linear(32, 32, recipe="mxfp8")
    step(m)
    for turn in turns.split():
        setattr(m, names[turn[0]], turn[1] == "1")
        fresh = duotone.Linear(32, 32, recipe="mxfp8")
        fresh.load_state_dict(m.state_dict())
        for name in names.values():
            setattr(fresh, name, getattr(m, name))
        for left, right in zip(step(m), step(fresh), strict=True):
            assert (left is None) == (right is None)
            assert left is None or torch.equal(left, right), turn


@every_class
def test_the_flag_is_set_and_autograd_gets_zeros_so_that_hooks_fire(kind) -> None:
    m, x, fired = make(kind, fuse_wgrad_accumulation=True), rows(), []
    give_main_grad(m)
    want = exact(m, kind, x)
    for weight in matrices(m):
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    for turn in (1, 2):
        backward(m, x)
        for weight, one in zip(matrices(m), want, strict=True):
            assert (
                weight.grad_added_to_main_grad is True and not weight.grad.any() and weight.grad.shape == weight.shape
            )
            assert torch.equal(weight.main_grad, one if turn == 1 else one + one)
        assert len(fired) == turn * len(want)
        for weight in matrices(m):
            weight.grad.zero_()  # no two elements share memory


def test_get_main_grad_comes_before_the_attribute() -> None:
    m, x = make("Linear", fuse_wgrad_accumulation=True), rows()
    buffer = torch.zeros(96, 64)
    m.weight.get_main_grad = lambda: buffer
    backward(m, x)
    assert torch.equal(buffer, exact(m, "Linear", x)[0])


@every_class
def test_a_missing_or_wrong_main_grad_is_an_error_in_forward_that_changes_nothing(kind) -> None:
    m, x = make(kind, fuse_wgrad_accumulation=True, recipe=NV), rows()
    before = duotone.rng_state(m)
    for wrong in (None, [1], torch.zeros(3, 3)):
        for weight in matrices(m):
            if wrong is not None:
                weight.main_grad = wrong
        with pytest.raises(MissingPlaneError, match=r"needs weight.main_grad of shape .*; got (none|list|\(3, 3\))"):
            call(m, x)
    assert all(torch.equal(v, before[k]) for k, v in duotone.rng_state(m).items())


@every_class
def test_evaluation_and_frozen_weights_need_no_main_grad(kind) -> None:
    """Where no gradient will come, no buffer is asked for."""
    m, x = make(kind, fuse_wgrad_accumulation=True), rows()
    with torch.no_grad():
        call(m, x)
    for weight in matrices(m):
        weight.requires_grad_(False)
    call(m, x)


@pytest.mark.parametrize("wrong", [torch.zeros(96, 64, device="meta"), torch.zeros(96, 64, dtype=torch.int32)], ids=str)
def test_a_main_grad_that_holds_no_gradient_is_an_error_in_forward(wrong) -> None:
    m, x = make("Linear", fuse_wgrad_accumulation=True), rows()
    m.weight.main_grad = wrong
    with pytest.raises(MissingPlaneError, match=r"in floating point on cpu; got \(96, 64\) in .* on (meta|cpu)$"):
        call(m, x)


@pytest.mark.parametrize("fuse", [False, True])
@every_class
def test_gradients_that_were_put_off_have_no_graph(kind, fuse) -> None:
    """In high precision the kept input is the caller's own, which may have a graph; nor does autocast cast."""
    m = make(kind, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    give_main_grad(m)
    before = torch.nn.Linear(64, 64, dtype=DTYPE)
    for _ in range(2):
        call(m, before(rows())).sum().backward()
        with torch.autocast("cpu", dtype=torch.float16):
            m.backward_dw()
    for weight in matrices(m):
        result = weight.main_grad if fuse else weight.grad
        assert not result.requires_grad and result.grad_fn is None


def test_a_gradient_that_was_put_off_waits_until_it_is_stored(monkeypatch) -> None:
    """Out of memory while it is added to `.grad`: the next call takes the same one."""
    m = make("Linear", delay_wgrad_compute=True)
    m.weight.grad = torch.zeros_like(m.weight)
    backward(m, rows())
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "add_", lambda *operands: (_ for _ in ()).throw(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            m.backward_dw()
    m.backward_dw()
    assert m.weight.grad.any()


def test_one_weight_used_twice_in_a_first_microbatch_keeps_both_gradients() -> None:
    """Overwriting is for what an earlier step left, not for the other use: tied weights, and a module called twice."""
    a, b = (Linear(64, 64, bias=False, fuse_wgrad_accumulation=True) for _ in range(2))
    b.weight = a.weight
    plain, x = nn.Linear(64, 64, bias=False), torch.randn(8, 64)
    plain.weight = nn.Parameter(a.weight.detach().clone())
    plain(plain(x)).sum().backward()
    for second in (a, b):
        a.weight.main_grad = torch.full((64, 64), 9.0)
        second(a(x, is_first_microbatch=True), is_first_microbatch=True).sum().backward()
        assert torch.allclose(a.weight.main_grad, plain.weight.grad, atol=1e-4)


# --- delay_wgrad_compute


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4", "fp8-delayed"])
@every_class
def test_delayed_weight_gradients_equal_those_that_are_not(kind, name, fuse) -> None:
    """core 84: several microbatches, oldest first, accumulated; biases and inputs at once."""
    options = {"recipe": recipes.load(name), "fuse_wgrad_accumulation": fuse}
    m = make(kind, delay_wgrad_compute=True, **options)
    plain = twin(m, kind, **options)
    if fuse:
        give_main_grad(m, 1.0)
        give_main_grad(plain, 1.0)
    xs, after = [rows() for _ in range(3)], []
    for x in xs:
        want = backward(plain, x)
        assert equal(backward(m, x), want)
        after.append([w.main_grad.clone() if fuse else w.grad.clone() for w in matrices(plain)])
    assert equal(grads(vectors(m)), grads(vectors(plain)))
    assert all(w.grad is None for w in matrices(m))
    for expected in after:
        m.backward_dw()
        assert equal([w.main_grad if fuse else w.grad for w in matrices(m)], expected)
    with pytest.raises(MissingPlaneError, match="no weight gradient waits"):
        m.backward_dw()
    assert equal([w.main_grad if fuse else w.grad for w in matrices(m)], after[-1])


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear"])
def test_hooks_fire_once_per_backward_dw(kind) -> None:
    m, fired = make(kind, delay_wgrad_compute=True), []
    m.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append([w.grad is not None for w in matrices(m)]))
    for _ in range(2):
        backward(m, rows())
    assert not fired and all(w.skip_backward_post_hook for w in matrices(m))
    m.backward_dw()
    m.backward_dw()
    assert fired == [[True] * len(matrices(m))] * 2


@every_class
def test_backward_dw_without_the_option_does_nothing(kind) -> None:
    m = make(kind)
    backward(m, rows())
    before = [g.clone() for g in grads(m.parameters())]
    m.backward_dw()
    assert equal(grads(m.parameters()), before)


def test_a_frozen_weight_delays_nothing_and_stops_no_other() -> None:
    m = make("LayerNormMLP", delay_wgrad_compute=True)
    plain, x = twin(m, "LayerNormMLP"), rows()
    for module in (m, plain):
        module.fc1.weight.requires_grad_(False)
        backward(module, x)
    m.backward_dw()
    assert torch.equal(m.fc2.weight.grad, plain.fc2.weight.grad) and m.fc1.weight.grad is None


def test_a_frozen_expert_delays_nothing_and_stops_no_other() -> None:
    for frozen in range(3):
        m = make("GroupedLinear", delay_wgrad_compute=True)
        plain, x = twin(m, "GroupedLinear"), rows()
        for module in (m, plain):
            module._parameters[f"weight{frozen}"].requires_grad_(False)
            backward(module, x)
        m.backward_dw()
        for i in set(range(3)) - {frozen}:
            want = make("GroupedLinear")
            want.load_state_dict(m.state_dict())
            backward(want, x)
            assert torch.equal(m._parameters[f"weight{i}"].grad, want._parameters[f"weight{i}"].grad)
        assert m._parameters[f"weight{frozen}"].grad is None


# --- save_original_input


def saved(m: nn.Module, x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        call(m, x)
    return seen


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear"])
@pytest.mark.parametrize("name", recipes.names())
def test_the_original_input_gives_the_bits_of_its_planes(kind, name) -> None:
    """core 6.1, hybrid 58; also stochastic ones, whose seed is taken again, and delayed ones, whose scale moves."""
    recipe = recipes.load(name)
    m = make(kind, save_original_input=True, recipe=recipe)
    plain = twin(m, kind, recipe=recipe)
    for _ in range(2):
        x = rows()
        assert equal(backward(m, x), backward(plain, x)) and equal(grads(m.parameters()), grads(plain.parameters()))
    assert duotone.rng_state(m).keys() == duotone.rng_state(plain).keys()


def test_the_very_input_is_kept_and_no_plane_of_it() -> None:
    x = rows()
    m = make("Linear", save_original_input=True)
    saved_values = saved(m, x)
    assert x.data_ptr() in [t.data_ptr() for t in saved_values] and all(t.shape != (64, 32) for t in saved_values)
    m.weight.requires_grad_(False)
    assert x.data_ptr() not in [t.data_ptr() for t in saved(m, x.requires_grad_())]
    grouped = saved(make("GroupedLinear", save_original_input=True), x.detach())
    pieces = [t for t in grouped if t.dtype == DTYPE and t.shape[-1] == 64]
    assert {t.untyped_storage().data_ptr() for t in pieces} == {x.untyped_storage().data_ptr()}


@pytest.mark.parametrize(("override", "keeps"), [("high_precision", True), ("dequantized", False)])
def test_a_backward_override_decides_before_the_option(override, keeps) -> None:
    """hybrid 94."""
    recipe, x = recipes.MXFP8BlockScaling(backward_override=override), rows()
    for option in (True, False):
        m = make("Linear", save_original_input=option, recipe=recipe)
        assert (x.data_ptr() in [t.data_ptr() for t in saved(m, x)]) == keeps


# --- parameters_split


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
@pytest.mark.parametrize("splits", [("q", "k", "v"), {"q": 48, "kv": 32, "z": 16}], ids=str)
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4", "fp8-delayed"])
def test_split_parameters_train_as_one(kind, splits, name) -> None:
    """core 80: names, sizes, gradients, and an optimizer's steps seen by the next forward."""
    recipe = recipes.load(name)
    m, plain = make(kind, parameters_split=splits, recipe=recipe), make(kind, recipe=recipe)
    sizes = dict(splits) if isinstance(splits, dict) else dict.fromkeys(splits, 32)
    pieces = {n: tuple(p.shape) for n, p in m.named_parameters() if not n.startswith("layer_norm")}
    assert pieces == {
        **{f"{n}_weight": (s, 64) for n, s in sizes.items()},
        **{f"{n}_bias": (s,) for n, s in sizes.items()},
    }
    assert torch.equal(m.weight, plain.weight) and torch.equal(m.bias, plain.bias)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (m, plain)]
    for _ in range(3):
        x = rows()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert equal(backward(m, x), backward(plain, x))
        for end in ("weight", "bias"):
            joined = torch.cat([m._parameters[f"{n}_{end}"].grad for n in sizes])
            assert torch.equal(joined, plain._parameters[end].grad)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(m.weight, plain.weight)


def test_split_parameters_are_views_of_one_buffer() -> None:
    m = make("Linear", parameters_split=("q", "k", "v"), bias=False)
    assert m.weight.data_ptr() == m.q_weight.data_ptr() and m.bias is None
    assert len({p.untyped_storage().data_ptr() for p in m.parameters()}) == 1
    m.k_weight.requires_grad_(False)
    backward(m, rows())
    assert m.q_weight.grad is not None and m.k_weight.grad is None


@pytest.mark.parametrize(
    "splits",
    [{"q": 48, "k": 32}, {"q": 97, "k": -1}, ("q", "q"), (), {}, ("q",) * 5, {"q": 48.0, "k": 48}, {"a.b": 48, "": 48}],
    ids=str,
)
def test_wrong_splits_are_one_line(splits) -> None:
    with pytest.raises(UserError) as error:
        make("Linear", parameters_split=splits)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("init", [None, lambda w: nn.init.constant_(w, 2.0)], ids=["default", "init_method"])
@pytest.mark.parametrize("how", ["meta", "to_empty", "bfloat16", "deepcopy"])
def test_split_parameters_are_initialised_wherever_they_come_from(how, init) -> None:
    """core 8.9: pieces that no longer lie in one buffer are filled too."""
    m = Linear(
        64, 96, parameters_split=("a", "b"), init_method=init, device="meta" if how in ("meta", "to_empty") else None
    )
    if how == "to_empty":
        m.to_empty(device="cpu")
    m = {"bfloat16": lambda: m.bfloat16(), "deepcopy": lambda: copy.deepcopy(m)}.get(how, lambda: m)()
    if how != "meta":
        with torch.no_grad():
            for parameter in m.parameters():
                parameter.fill_(77.0)
    m.reset_parameters()
    real = Linear(64, 96, init_method=init)
    whole = torch.cat([m.a_weight, m.b_weight]).detach().float()
    assert torch.isfinite(whole).all() and whole.abs().max() <= 1.01 * real.weight.abs().max()
    assert init is not None or abs(whole.std() / real.weight.std() - 1) < 0.1
    assert torch.cat([m.a_bias, m.b_bias]).abs().max() <= 1.01 * 64**-0.5


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
def test_split_parameters_get_their_gradients_or_the_pair_is_refused(option) -> None:
    """core 80 in pairs: never a gradient that is lost."""
    try:
        m = make("Linear", parameters_split=("a", "b"), **{option: True})
    except UserError:
        return
    for piece in matrices(m):
        piece.main_grad = torch.zeros(piece.shape)
    plain, x = make("Linear"), rows()
    backward(plain, x)
    backward(m, x)
    m.backward_dw()
    result = torch.cat([p.main_grad if option.startswith("fuse") else p.grad for p in matrices(m)])
    assert torch.equal(result.to(DTYPE), plain.weight.grad)


# --- return_bias, init_method, params_dtype, meta


@pytest.mark.parametrize(
    "option",
    [{}, {"parameters_split": ("a", "b")}, {"delay_wgrad_compute": True}, {"save_original_input": True}],
    ids=str,
)
@every_class
def test_a_returned_bias_is_not_added_and_gets_its_gradient_where_it_is(kind, option) -> None:
    if option and kind != "Linear":
        pytest.skip("one module stands for all in pairs")
    m, x = make(kind, return_bias=True, **option), rows()
    y, bias = call(m, x)
    plain = make(kind)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "bias" in name and "layer_norm" not in name and "fc1" not in name:
                parameter.zero_()
    assert torch.equal(y, call(plain, x))
    biases = bias if isinstance(bias, list) else [bias]
    assert [tuple(b.shape) for b in biases] == (
        [(96,)] * 3 if kind == "GroupedLinear" else [(64,)] if kind == "LayerNormMLP" else [(96,)]
    )
    (y.sum() + sum(b.sum() for b in biases)).backward()
    assert all(
        (p.grad == 1).all() for n, p in m.named_parameters() if "bias" in n and "layer_norm" not in n and "fc1" not in n
    )
    without = call(make(kind, return_bias=True, bias=False, **option), x)
    assert isinstance(without, tuple) and without[1] in (None, [None] * 3)  # as many results as with a bias


@every_class
def test_init_method_fills_weights_alone(kind) -> None:
    m = make(kind, init_method=lambda w: nn.init.constant_(w, 0.25))
    assert all((w == 0.25).all() for w in matrices(m))
    assert all((b == 0).all() for n, b in m.named_parameters() if "bias" in n)
    assert all((g == 1).all() for n, g in m.named_parameters() if n == "layer_norm_weight")


def test_the_output_layer_of_an_mlp_may_have_an_init_method_of_its_own() -> None:
    m = make("LayerNormMLP", init_method=lambda w: w.data.fill_(1), output_layer_init_method=lambda w: w.data.fill_(2))
    assert (m.fc1.weight == 1).all() and (m.fc2.weight == 2).all()


@pytest.mark.parametrize(
    "option", [{}, {"init_method": lambda w: nn.init.constant_(w, 0.5)}], ids=["default", "init_method"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, DTYPE], ids=str)
@every_class
def test_a_module_on_meta_becomes_the_module_that_was_asked_for(kind, dtype, option) -> None:
    """core 81, in pairs with params_dtype and init_method."""
    m = make(kind, device="meta", params_dtype=dtype, **option)
    assert all(p.is_meta and p.dtype == dtype for p in m.parameters())
    m.reset_parameters()
    torch.manual_seed(3)
    m.reset_parameters()
    torch.manual_seed(3)
    real = make(kind, params_dtype=dtype, **option)
    torch.manual_seed(3)
    real.reset_parameters()
    assert equal([p.detach() for p in m.parameters()], [p.detach() for p in real.parameters()])
    x = torch.randn(32, 64).to(dtype)
    assert torch.equal(call(m, x), call(real, x))


@every_class
def test_a_held_module_on_meta_becomes_real_in_its_formats(kind) -> None:
    with duotone.quantized_model_init(recipe=MX):
        m = make(kind, device="meta")
    m.reset_parameters()
    assert all(isinstance(w, duotone.QuantizedTensor) for w in matrices(m))
    y = call(m, rows())
    assert torch.isfinite(y).all() and y.any()


# --- tied weights, frozen parts, nothing to do


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "fp8-delayed"])
def test_tied_weights_get_both_gradients_and_stay_one_parameter(name, is_quantized) -> None:
    recipe = recipes.load(name)
    a, b = Linear(64, 64, params_dtype=DTYPE, recipe=recipe), Linear(64, 64, params_dtype=DTYPE, recipe=recipe)
    b.weight = a.weight
    model, x = nn.Sequential(a, b), rows()
    if is_quantized:
        duotone.convert_parameters(model, recipe)
    assert a.weight is b.weight
    separate = copy.deepcopy(model)
    if not is_quantized:
        separate[1].weight = nn.Parameter(separate[0].weight.detach().clone())
        for module in (model, separate):
            leaf = x.clone().requires_grad_()
            module(leaf).sum().backward()
        assert torch.equal(a.weight.grad, separate[0].weight.grad + separate[1].weight.grad)
    else:
        model(x).sum().backward()
        assert torch.isfinite(a.weight.grad).all()
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight
    for first in (True, False):
        assert torch.isfinite(b(a(x, is_first_microbatch=first), is_first_microbatch=first)).all()


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "high_precision", "dequantized"])
@every_class
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(kind, name, needs) -> None:
    """core 86: input, weights and biases in all 8 combinations."""
    recipe = recipes.MXFP8BlockScaling(backward_override=name) if "_" in name or name[0] == "d" else recipes.load(name)
    m, x = make(kind, recipe=recipe), rows()
    whole = twin(m, kind, recipe=recipe)
    everything = backward(whole, x)
    for parameter in matrices(m):
        parameter.requires_grad_(needs[1])
    for parameter in vectors(m):
        parameter.requires_grad_(needs[2])
    leaf = x.clone().requires_grad_(needs[0])
    y = call(m, leaf)
    assert torch.equal(y, everything[0]) and y.requires_grad == any(needs)
    if any(needs):
        torch.manual_seed(5)
        y.backward(torch.randn(y.shape).to(y.dtype))
    assert leaf.grad is None if not needs[0] else torch.equal(leaf.grad, everything[1])
    for result, want in zip(m.parameters(), whole.parameters(), strict=True):
        needed = needs[1] if result.dim() > 1 else needs[2]
        assert result.grad is None if not needed else torch.equal(result.grad, want.grad)


@pytest.mark.parametrize(
    "option",
    [{}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}, {"save_original_input": True}],
    ids=lambda o: next(iter(o), "plain"),
)
@every_class
def test_an_empty_batch_gives_zero_gradients(kind, option) -> None:
    if kind == "LayerNormMLP" and "save_original_input" in option:
        pytest.skip("the module has no such option")
    m = make(kind, **option)
    give_main_grad(m, 3.0)
    x = torch.zeros(0, 64, dtype=DTYPE, requires_grad=True)
    y = m(x, [0, 0, 0]) if kind == "GroupedLinear" else m(x)
    y.sum().backward()
    m.backward_dw()
    assert y.shape[0] == 0 and x.grad.shape == (0, 64)
    if "fuse_wgrad_accumulation" in option:
        assert all((w.main_grad == 3).all() for w in matrices(m))
    else:
        assert all(w.grad is not None and not w.grad.any() for w in matrices(m))
    assert not any(v.grad.any() for v in vectors(m))


def test_identity_under_every_option_is_f_linear() -> None:
    """The options move gradients; they change none of them."""
    x, weight = torch.randn(8, 64, requires_grad=True), None
    for option in ({}, {"save_original_input": True}, {"delay_wgrad_compute": True}, {"parameters_split": ("a", "b")}):
        m = Linear(64, 96, **option)
        y = m(x)
        weight = m.weight.detach().clone().requires_grad_()
        bias = m.bias.detach().clone()
        want = F.linear(x.detach(), weight, bias)
        y.sum().backward()
        m.backward_dw()
        want.sum().backward()
        result = torch.cat([p.grad for p in matrices(m)])
        assert torch.equal(y, want) and torch.equal(result, weight.grad)


class Ranks:
    """What a layout asks of a process group."""

    group_name = "two"

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: duotone.Linear(8, 8, parallel_mode="column", tp_size=2), "needs a tp_group, also beside tp_size"),
        (
            lambda: duotone.Linear(8, 8, parallel_mode="row", tp_group=Ranks(), tp_size=4),
            "tp_size is 4 and tp_group has 2 ranks; leave tp_size out",
        ),
        (lambda: duotone.LayerNormMLP(8, 8, set_parallel_mode=True, tp_size=2), "needs a tp_group"),
        (lambda: duotone.TransformerLayer(8, 8, 2, set_parallel_mode=True, tp_size=2), "needs a tp_group"),
        (
            lambda: duotone.GroupedLinear(2, 8, 8, tp_size=2),
            "tp_size is 2; leave it out, or give parallel_mode 'column' or 'row' and the tp_group",
        ),
    ],
)
def test_a_number_of_ranks_without_their_group_is_refused(make, message) -> None:
    """core 6.1: a size alone says nobody to talk to."""
    with pytest.raises(duotone.UserError, match=message):
        make()


def test_a_number_of_ranks_may_repeat_the_groups() -> None:
    assert duotone.Linear(8, 8, parallel_mode="column", tp_group=Ranks(), tp_size=2).weight.shape == (4, 8)
    for wrong in (2, 0, "x"):
        with pytest.raises(UserError, match="give parallel_mode 'column' or 'row' and the tp_group"):
            duotone.Linear(8, 8, tp_size=wrong)
    assert duotone.TransformerLayer(8, 8, 2, tp_size=1).self_attention.proj.layout.mode is None


ASKS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "grad": lambda loss, x: torch.autograd.grad(loss, x),
    "inputs": lambda loss, x: loss.backward(inputs=[x]),
}


@every_class
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_a_backward_for_the_input_alone_stores_no_gradient_of_a_weight(kind, ask, option) -> None:
    """Its products waited in the queue, and each later step got the gradient of an earlier one."""
    m, plain = make(kind, **{option: True}), make(kind)
    for p in m.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    x = rows().requires_grad_()
    ASKS[ask](call(m, x).square().sum(), x)
    for each in (m, plain):
        call(each, x.detach() * 2).square().sum().backward()
    m.backward_dw()
    for p, q in zip(m.parameters(), plain.parameters(), strict=True):
        if option == "delay_wgrad_compute" or p.dim() == 1:
            assert torch.equal(p.grad, q.grad)
        else:
            assert torch.equal(p.main_grad.bfloat16(), q.grad)


@every_class
def test_a_backward_that_fails_leaves_no_gradient_behind(kind) -> None:
    m, x = make(kind, delay_wgrad_compute=True), rows()

    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    def step(stops: bool) -> list[Tensor]:
        m.zero_grad()
        h = (x * (1 + stops)).requires_grad_() * 1
        if stops:
            h.register_hook(interrupt)  # after the products of the module
        call(m, h).square().sum().backward()
        m.backward_dw()
        return [p.grad.clone() for p in m.parameters()]

    expected = step(False)
    with pytest.raises(KeyboardInterrupt):
        step(True)
    assert all(map(torch.equal, step(False), expected))
    with pytest.raises(MissingPlaneError, match="no weight gradient waits"):
        m.backward_dw()


def test_a_computed_weight_and_gradients_that_are_put_off_are_refused() -> None:
    m = make("Linear", delay_wgrad_compute=True)
    torch.nn.utils.parametrizations.weight_norm(m)
    with pytest.raises(UserError, match=r"m: delay_wgrad_compute gives gradients to parameters"):
        m(rows())
    with torch.no_grad():
        m(rows())


def view_of_bank(m: nn.Module) -> None:
    m.weight.data = torch.cat([m.weight.data, m.weight.data + 1])[: len(m.weight)]
    m(rows(), is_first_microbatch=True)
    whole = m.weight.data.untyped_storage()
    m.weight.data = torch.empty(0, dtype=DTYPE).set_(whole, m.weight.numel(), m.weight.shape)


def transposed(m: nn.Module) -> None:
    m.weight.data = m.weight.data.t()


MOVES: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module], None]]] = {
    "another part of its storage": (lambda: make("Linear"), view_of_bank),
    "its transpose": (lambda: Linear(64, 64, params_dtype=DTYPE, recipe=MX), transposed),
    "pieces exchanged": (
        lambda: Linear(64, 96, params_dtype=DTYPE, recipe=MX, parameters_split=("a", "b")),
        lambda m: torch.utils.swap_tensors(m.a_weight, m.b_weight),
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_weight_that_moves_within_its_memory_is_encoded_anew(move) -> None:
    build, change = MOVES[move]
    m, x = build(), rows()
    m(x, is_first_microbatch=True)
    change(m)
    assert torch.equal(m(x, is_first_microbatch=False), m(x))
