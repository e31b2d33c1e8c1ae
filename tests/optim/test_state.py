"""State dicts: a resumed run has the bits of one that went on; those of torch will do."""

import copy
import io
import pickle

import pytest
import torch
from optim_cases import RATES, all_same, everything, pair, random_parameter
from torch import Tensor, nn

import duotone
from duotone import recipes
from duotone.errors import UserError
from duotone.optim import AdamW
from duotone.tensor.context import FixedScale, QuantizeContext


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(5)
    return [
        random_parameter(pair("fp8_e4m3_tensor")),
        random_parameter(pair("nvfp4", "mxfp8_e4m3"), dtype=torch.float32),
        nn.Parameter(torch.randn(9, 5, dtype=torch.bfloat16)),
        nn.Parameter(torch.randn(7)),
    ]


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def through_a_file(saved: object) -> object:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_resuming_has_the_bits_of_going_on() -> None:
    uninterrupted = AdamW(parameters(), **RATES, master_weights=True)
    for seed in range(3):
        step(uninterrupted, seed)
    saved = through_a_file(uninterrupted.state_dict())
    weights = copy.deepcopy(uninterrupted.param_groups[0]["params"])
    for seed in range(3, 6):
        step(uninterrupted, seed)
    resumed = AdamW(weights, lr=1.0)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == RATES["lr"] and resumed.param_groups[0]["master_weights"]
    for seed in range(3, 6):
        step(resumed, seed)
    assert all_same(everything(uninterrupted), everything(resumed))


def test_what_was_loaded_is_a_copy() -> None:
    optimizer = AdamW(parameters(), master_weights=True)
    step(optimizer, 0)
    saved = optimizer.state_dict()
    other = AdamW(parameters(), master_weights=True)
    other.load_state_dict(saved)
    before = everything(optimizer)
    step(other, 1)
    assert all_same(everything(optimizer), before)


def test_the_layout_is_that_of_torch_and_a_master() -> None:
    optimizer, reference = AdamW(parameters()[2:]), torch.optim.AdamW(parameters()[2:])
    step(optimizer, 0), step(reference, 0)
    state_dict, expected = optimizer.state_dict(), reference.state_dict()
    assert state_dict["state"].keys() == expected["state"].keys()
    assert all(state_dict["state"][i].keys() == expected["state"][i].keys() for i in state_dict["state"])
    assert {"lr", "betas", "eps", "weight_decay", "maximize", "params"} <= state_dict["param_groups"][0].keys()
    step(with_masters := AdamW(parameters(), master_weights=True), 0)
    saved = with_masters.state_dict()["state"]
    assert [set(saved[i]) - {"step", "exp_avg", "exp_avg_sq"} for i in saved] == [{"master"}] * 3 + [set()]


def test_a_checkpoint_of_torch_will_do() -> None:
    """Its moments are taken as they are; masters start from the parameters."""
    reference = torch.optim.AdamW([nn.Parameter(torch.randn(4, 6))], **RATES)
    step(reference, 0)
    saved = reference.state_dict()
    p = nn.Parameter(reference.param_groups[0]["params"][0].detach().bfloat16())
    optimizer = AdamW([p], master_weights=True)
    saved["param_groups"][0]["fused"] = True  # whose step would be on the device
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["master_weights"] = True
    assert torch.equal(optimizer.state[p]["exp_avg"], reference.state_dict()["state"][0]["exp_avg"])
    with torch.no_grad():
        start = p.detach().float()
    step(optimizer, 1)
    oracle = nn.Parameter(start)
    torch_optimizer = torch.optim.AdamW([oracle], **RATES)
    torch_optimizer.load_state_dict(reference.state_dict())
    torch_optimizer.param_groups[0]["fused"] = None
    oracle.grad = p.grad.float()
    torch_optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["master"], oracle.detach(), rtol=2e-6, atol=1e-7)


def test_hooks_see_and_change_what_is_loaded() -> None:
    optimizer = AdamW(parameters(), master_weights=True)
    step(optimizer, 0)
    other = AdamW(parameters(), master_weights=True)

    def doubled(_: torch.optim.Optimizer, state_dict: dict) -> dict:
        state = {i: {name: 2 * value for name, value in slots.items()} for i, slots in state_dict["state"].items()}
        return {**state_dict, "state": state}

    other.register_load_state_dict_pre_hook(doubled)
    other.load_state_dict(optimizer.state_dict())
    first, second = optimizer.param_groups[0]["params"][0], other.param_groups[0]["params"][0]
    assert torch.equal(other.state[second]["master"], 2 * optimizer.state[first]["master"])
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1


def wrong_shape(saved: dict) -> None:
    saved["state"][0]["master"] = torch.zeros(3, 3)


def amsgrad(saved: dict) -> None:
    saved["param_groups"][0]["amsgrad"] = True


def negative(saved: dict) -> None:
    saved["param_groups"][0]["lr"] = -1.0


@pytest.mark.parametrize("spoil", [wrong_shape, amsgrad, negative])
def test_a_state_that_does_not_fit_changes_nothing(spoil) -> None:
    optimizer = AdamW(parameters(), master_weights=True)
    step(optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    before = everything(optimizer)
    with pytest.raises(UserError) as raised:
        optimizer.load_state_dict(saved)
    assert "\n" not in str(raised.value)
    assert all_same(everything(optimizer), before) and optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda original: pickle.loads(pickle.dumps(original))], ids=["deep", "pickle"]
)
def test_copies_go_on_alike(copied) -> None:
    optimizer = AdamW(parameters(), master_weights=True)
    step(optimizer, 0)
    other = copied(optimizer)
    step(optimizer, 1), step(other, 1)
    assert all_same(everything(optimizer), everything(other))


def test_a_model_and_its_optimizer_resume() -> None:
    recipe = recipes.load("mxfp8")

    def built() -> tuple[nn.Module, AdamW]:
        with duotone.quantized_model_init(recipe=recipe):
            model = nn.Sequential(duotone.Linear(32, 32), duotone.Linear(32, 16))
        return model, AdamW(model.parameters(), lr=1e-2)

    def trained(model: nn.Module, optimizer: AdamW, x: Tensor) -> float:
        optimizer.zero_grad()
        with duotone.autocast(recipe=recipe):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    x = torch.randn(32, 32)
    model, optimizer = built()
    for _ in range(2):
        trained(model, optimizer, x)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    uninterrupted = [trained(model, optimizer, x) for _ in range(3)]
    other, resumed = built()
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert [trained(other, resumed, x) for _ in range(3)] == uninterrupted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("step"), "a saved state without step"),
        (lambda s: s.pop("exp_avg"), "a saved state without exp_avg"),
        (lambda s: s.update(step="x"), "a saved step is 'x'"),
        (lambda s: s.update(step=-1), "a saved step is -1"),
        (lambda s: s.update(step=float("inf")), "a saved step is inf"),
        (lambda s: s.update(step=torch.zeros((), device="meta")), "a saved step is tensor"),
        (lambda s: s.update(exp_avg=[1]), "a saved exp_avg that is a list"),
        (lambda s: s.update(exp_avg=torch.zeros(1)), r"a saved exp_avg of shape \(1,\) for a parameter of shape"),
        (lambda s: s.update(exp_avg_sq=torch.zeros(0)), r"a saved exp_avg_sq of shape \(0,\) for a parameter"),
        (lambda s: s.update(exp_avg=s["exp_avg"].mT), r"a saved exp_avg of shape \(5, 9\) for a parameter"),
        (lambda s: s.update(exp_avg=s["exp_avg"].to(torch.complex64)), "a saved exp_avg is torch.complex64, torch.str"),
        (lambda s: s.update(exp_avg=s["exp_avg"].to_sparse()), "torch.sparse_coo, for a parameter of"),
        (lambda s: s.update(exp_avg=s["exp_avg"].to("meta")), "a saved exp_avg is torch.*, meta, for a parameter"),
        (lambda s: s.update(exp_avg_sq=s["exp_avg_sq"].int()), "a saved exp_avg_sq is torch.int32; it must be a floa"),
    ],
)
def test_a_state_that_is_none_changes_nothing(change, message) -> None:
    """A kernel would read and write past a moment that is too small."""
    optimizer = AdamW(parameters())
    step(optimizer, 0)
    before, bad = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    change(bad["state"][2])
    bad["param_groups"][0]["lr"] = 5.0
    with pytest.raises(UserError, match=message):
        optimizer.load_state_dict(bad)
    assert optimizer.param_groups[0]["lr"] == before["param_groups"][0]["lr"]
    for name, value in before["state"][2].items():
        assert torch.equal(optimizer.state_dict()["state"][2][name], value)


@pytest.mark.parametrize("move", [copy.deepcopy, lambda m: m.bfloat16()])
def test_a_checkpoint_outlives_a_copy_and_a_conversion(move) -> None:
    """The value from before the parameter was quantized is not what it stands for any more."""
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with duotone.quantized_model_init(recipe=recipes.load("mxfp8"), preserve_high_precision_init_val=True):
            results.append(duotone.Linear(64, 64, bias=False))
    m, other = results
    m.load_state_dict(other.state_dict())
    want = m.weight.dequantize().float()
    m = move(m)
    m.weight.grad = torch.zeros(64, 64, dtype=m.weight.dtype)
    AdamW(m.parameters(), lr=0.0, weight_decay=0.0).step()
    assert torch.equal(m.weight.dequantize().float(), want)
    fresh = move(results[1])
    assert fresh.weight.get_high_precision_init_val() is not None


def both_kinds() -> list[nn.Parameter]:
    return [
        random_parameter(pair("mxfp8_e4m3")),
        random_parameter(pair("fp8_e4m3_delayed")),
        nn.Parameter(torch.randn(9, 5).bfloat16()),
    ]


WRITES = {
    "load_state_dict": lambda p, x: loaded(p, x),
    "copy_": lambda p, x: p.copy_(x),
    "in place": lambda p, x: p.mul_(0).add_(x),
    "detached": lambda p, x: p.detach().copy_(x),
    "data": lambda p, x: setattr(p, "data", x),
    "vector_to_parameters": lambda p, x: nn.utils.vector_to_parameters(x.flatten(), [p]),
}


def loaded(p: nn.Parameter, x: Tensor) -> None:
    module = nn.Module()
    module.p = p
    module.load_state_dict({"p": x})


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_what_others_write_after_a_step_becomes_the_master(write) -> None:
    """Without it the next step would write the old weights over a checkpoint."""
    for p in both_kinds():
        optimizer = AdamW([p], lr=0.0, master_weights=True)
        step(optimizer, 0)
        x = torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            write(p, x.bfloat16())
        values = p.dequantize(torch.float32) if hasattr(p, "planes") else p.detach().float()
        master = optimizer.state[p]["master"]
        step(optimizer, 1)
        assert torch.equal(optimizer.state[p]["master"], values) and optimizer.state[p]["master"] is master
        assert torch.equal(p.detach().float(), values)  # lr is 0: encoding the values again gives them
        before = master.clone()
        step(optimizer, 2)
        assert torch.equal(master, before)


def resumed(p: nn.Parameter, optimizer: AdamW) -> tuple[nn.Parameter, AdamW]:
    """From a checkpoint of both, the model first."""
    new = copy.deepcopy(p)
    with torch.no_grad():
        new.add_(1.0)
    loaded(new, p.detach().clone())
    other = AdamW([new], lr=0.0, master_weights=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return new, other


def reloaded(p: nn.Parameter, optimizer: AdamW) -> tuple[nn.Parameter, AdamW]:
    """As Accelerate prepares an optimizer."""
    optimizer.load_state_dict(optimizer.state_dict())
    return p, optimizer


def restated(p: nn.Parameter, optimizer: AdamW) -> tuple[nn.Parameter, AdamW]:
    optimizer.__setstate__(optimizer.__getstate__())
    return p, optimizer


def pickled(*pair: object) -> object:
    buffer = io.BytesIO()
    torch.save(pair, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


MOVES = {
    "resume": resumed,
    "reload": reloaded,
    "state": restated,
    "deepcopy": lambda *pair: copy.deepcopy(pair),
    "pickle": pickled,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_what_others_write_outlives_a_copy_and_a_checkpoint(move) -> None:
    """A master that is saved between a write and the next step would bring the old weights back."""
    for p in both_kinds():
        optimizer = AdamW([p], lr=0.0, master_weights=True)
        step(optimizer, 0)
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
        values = p.detach().clone().float()
        p, optimizer = move(p, optimizer)
        step(optimizer, 1)
        assert torch.equal(p.detach().float(), values)


def test_a_checkpoint_beside_swapped_weights_leaves_the_masters() -> None:
    """The weights are those of an average while a trainer saves, and are swapped back then."""
    for p in both_kinds():
        optimizer = AdamW([p], lr=1e-3, master_weights=True)
        step(optimizer, 0)
        master, own = optimizer.state[p]["master"].clone(), p.detach().clone()
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
            saved = optimizer.state_dict()["state"][0]["master"]
            values = p.detach().clone()
            assert torch.equal(p.copy_(saved).float(), values.float())
            p.copy_(own)
        assert torch.equal(optimizer.state_dict()["state"][0]["master"], master)
        assert torch.equal(optimizer.state[p]["master"], master)


@pytest.mark.parametrize("model_first", [True, False])
def test_a_loaded_master_counts_in_either_order(model_first) -> None:
    """The master has bits that the weights have not."""
    source = both_kinds()
    optimizer = AdamW(source, **RATES, master_weights=True)
    step(optimizer, 0)
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in source]
    step(optimizer, 1)
    want = everything(optimizer)
    step(optimizer, 2)
    for load_model in (model_first, not model_first):
        if load_model:
            for p, w in zip(source, weights, strict=True):
                loaded(p, w)
        else:
            optimizer.load_state_dict(saved)
    step(optimizer, 1)
    assert all_same(everything(optimizer), want)


def test_memory_that_a_plain_parameter_is_set_to_becomes_the_master() -> None:
    p = nn.Parameter(torch.randn(9, 5).bfloat16())
    optimizer = AdamW([p], lr=0.0, master_weights=True)
    step(optimizer, 0)
    both = torch.randn(2, 9, 5).bfloat16()
    for x, want in zip(both, both.float(), strict=True):  # memory of one storage, which the step writes
        with torch.no_grad():
            p.set_(x)
        step(optimizer, 1)
        assert torch.equal(optimizer.state[p]["master"], want)


MOVES = {
    "clone": lambda p: setattr(p, "data", p.data.clone()),
    "wider": lambda p: setattr(p, "data", p.data.float()),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_other_memory_with_the_same_values_keeps_the_bits_of_the_master(move) -> None:
    for p in both_kinds():
        optimizer = AdamW([p], lr=1e-6, weight_decay=0.0, master_weights=True)
        step(optimizer, 0)
        before = optimizer.state[p]["master"].clone()
        assert not torch.equal(before, p.detach().float())
        move(p)
        optimizer.param_groups[0]["lr"] = 0.0
        step(optimizer, 1)
        assert torch.equal(optimizer.state[p]["master"], before)


def test_a_master_beyond_its_delayed_scale_outlives_a_move_and_a_load() -> None:
    """The codes clip the master, which is no write of others."""
    p = random_parameter(pair("fp8_e4m3_delayed"))
    p.context = QuantizeContext(slots=(FixedScale(torch.tensor([256.0])), None))
    optimizer = AdamW([p], lr=0.0, master_weights=True)
    step(optimizer, 0)
    before = optimizer.state[p]["master"].clone()
    assert before.abs().max() > 448 / 256 == p.dequantize().abs().max()
    MOVES["clone"](p)
    step(optimizer, 1)
    assert torch.equal(optimizer.state[p]["master"], before)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loaded(p, p.detach().clone())
    step(optimizer, 2)
    assert torch.equal(optimizer.state[p]["master"], before)


def test_another_model_that_is_loaded_after_the_optimizer_becomes_the_master() -> None:
    for p in both_kinds():
        optimizer = AdamW([p], lr=0.0, master_weights=True)
        step(optimizer, 0)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with torch.no_grad():
            loaded(p, torch.randn(p.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
        values = p.dequantize(torch.float32) if hasattr(p, "planes") else p.detach().float()
        step(optimizer, 1)
        assert torch.equal(p.detach().float(), values)


def test_what_is_loaded_after_a_copy_of_the_optimizer_becomes_the_master() -> None:
    for p in both_kinds():
        optimizer = AdamW([p], lr=0.0, master_weights=True)
        step(optimizer, 0)
        module, other = copy.deepcopy((nn.ParameterList([p]), optimizer))
        x = torch.randn(p.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        with torch.no_grad():
            module[0].copy_(x)
        values = module[0].dequantize(torch.float32) if hasattr(p, "planes") else x.float()
        step(other, 1)
        assert torch.equal(module[0].detach().float(), values)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("before", ["mxfp8", "bf16"])
def test_what_is_loaded_around_a_conversion_becomes_the_master(before: str, order: int) -> None:
    m = duotone.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, recipe=before)
    m = duotone.convert_parameters(m, before)
    optimizer = AdamW(m.parameters(), lr=0.0, weight_decay=0.0, master_weights=True)
    step(optimizer, 0)
    x = 64 + torch.randn(32, 32).bfloat16()  # no old master rounds to such a value, and is kept by chance
    changes = [
        lambda: duotone.convert_parameters(m, "fp8-current"),
        lambda: m.load_state_dict({"weight": x}, strict=False),
    ]
    for change in changes[::order]:
        change()
    values = m.weight.dequantize(torch.float32)
    step(optimizer, 1)
    assert torch.equal(optimizer.state[m.weight]["master"], values)
    duotone.convert_parameters(duotone.convert_parameters(m, "fp8-block"), "mxfp8")
    step(optimizer, 2)
    assert torch.equal(optimizer.state[m.weight]["master"], values)  # nothing was written


def test_values_that_data_is_set_to_replace_the_first_ones() -> None:
    with duotone.quantized_model_init(recipe="mxfp8", preserve_high_precision_init_val=True):
        m = duotone.Linear(32, 32, bias=False)
    m.weight.data = torch.full((32, 32), 2.0)
    optimizer = AdamW(m.parameters(), lr=0.0, weight_decay=0.0)
    step(optimizer, 0)
    assert m.weight.get_high_precision_init_val() is None
    assert torch.equal(optimizer.state[m.weight]["master"], torch.full((32, 32), 2.0))


def test_a_loaded_master_counts_alone() -> None:
    """The parameter was not written since, so the master decides what it becomes."""
    for p in both_kinds():
        optimizer = AdamW([p], lr=0.0, master_weights=True)
        step(optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["master"] *= 2
        optimizer.load_state_dict(saved)
        step(optimizer, 1)
        assert torch.equal(optimizer.state[p]["master"], saved["state"][0]["master"])


def test_a_step_without_other_writes_keeps_the_bits_of_the_master() -> None:
    for p in both_kinds():
        optimizer = AdamW([p], lr=1e-6, weight_decay=0.0, master_weights=True)
        for seed in range(3):
            step(optimizer, seed)
        assert not torch.equal(optimizer.state[p]["master"], p.detach().float())


@pytest.mark.parametrize("groups", [1, 2])
def test_pieces_of_one_weight_keep_the_masters_of_the_whole(groups: int) -> None:
    """Pieces are views of one buffer and share its version, so that a write of one looks like a write of all."""
    whole = duotone.Linear(16, 32, bias=False, params_dtype=torch.bfloat16)
    split = duotone.Linear(16, 32, bias=False, params_dtype=torch.bfloat16, parameters_split=("a", "b"))
    with torch.no_grad():
        split.a_weight.copy_(whole.weight[:16]), split.b_weight.copy_(whole.weight[16:])
    a, b = split.parameters()
    optimizers = AdamW([whole.weight], master_weights=True), AdamW([a, b], master_weights=True)
    if groups == 2:
        optimizers = optimizers[0], AdamW([{"params": [a]}, {"params": [b]}], master_weights=True)
    for seed in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for module, optimizer in zip((whole, split), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).float().square().mean().backward()
            optimizer.step()
    masters = [optimizers[1].state[p]["master"] for p in (a, b)]
    assert torch.equal(torch.cat(masters), optimizers[0].state[whole.weight]["master"])
    assert torch.equal(torch.cat([a, b]), whole.weight)


@pytest.mark.parametrize("writer", ["step", "group", "optimizer"])
def test_a_piece_keeps_its_master_while_others_are_written(writer: str) -> None:
    """Steps without its gradient, a group without masters and another optimizer write the piece beside it alone."""
    a, b = duotone.Linear(16, 32, bias=False, params_dtype=torch.bfloat16, parameters_split=("a", "b")).parameters()
    alone = nn.Parameter(b.detach().clone())
    groups = [{"params": [a], "master_weights": writer != "group"}, {"params": [b]}]
    cut = [groups] if writer != "optimizer" else [[each] for each in groups]
    optimizers = [AdamW(each, lr=1e-4, master_weights=True) for each in [*cut, [alone]]]
    for seed in range(3):
        a.grad, grad = torch.randn(2, *a.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        b.grad = alone.grad = None if seed == 1 and writer == "step" else grad
        for optimizer in optimizers:
            optimizer.step()
    states = [optimizers[at].state[p]["master"] for at, p in ((-2, b), (-1, alone))]
    assert torch.equal(*states) and torch.equal(b, alone)
    assert not torch.equal(states[0], b.detach().float())


def test_a_write_into_a_piece_reaches_its_master() -> None:
    a, b = duotone.Linear(16, 32, bias=False, params_dtype=torch.bfloat16, parameters_split=("a", "b")).parameters()
    optimizer = AdamW([a, b], lr=0.0, master_weights=True)
    for seed in range(2):
        for p in (a, b):
            p.grad = torch.zeros_like(p)
        optimizer.step()
        if seed == 0:
            master = optimizer.state[b]["master"].clone()
            with torch.no_grad():
                a.fill_(2.0)
    assert (optimizer.state[a]["master"] == 2.0).all() and torch.equal(optimizer.state[b]["master"], master)
