"""Samples of operands, and steps whose operands all reach a sampler."""

import copy

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import formats, recipes
from duotone.observe.sampling import Sampler, spread
from duotone.observe.tapped_recipe import sampled_step
from duotone.tensor import Plane

BF16 = torch.bfloat16


@pytest.mark.parametrize("shape", [(40, 96), (300, 1000), (513, 2055)])
@pytest.mark.parametrize("name", formats.names())
def test_a_sample_decodes_to_the_elements_that_it_was_taken_from(name: str, shape: tuple[int, int]) -> None:
    fmt, x = formats.get(name), torch.randn(shape).to(BF16)
    plane = Plane(fmt, fmt.encode(x, **({"seed": 1} if fmt.is_stochastic else {})), shape)
    places, _ = spread(torch.arange(x.numel(), dtype=torch.int32).view(shape), plane, 8192)
    values, sample = spread(x, plane, 8192)
    index = places.long()
    assert tuple(values.shape) == sample.shape
    assert torch.equal(values, x.flatten()[index])
    assert torch.equal(sample.dequantize(torch.float32), plane.dequantize(torch.float32).flatten()[index])
    ceilings = (fmt.ceiling(each.parts)[:, : each.shape[1]] for each in (sample, plane))
    assert torch.equal(next(ceilings), next(ceilings).flatten()[index])


def test_a_sample_lies_evenly_over_rows_and_columns() -> None:
    fmt, x = formats.get("mxfp8_e4m3"), torch.randn(4096, 2048).to(BF16)
    plane = Plane(fmt, fmt.encode(x), (4096, 2048))
    places, _ = spread(torch.arange(x.numel()).view(x.shape), plane, 8192)
    rows, columns = (places // 2048).unique(), (places % 2048).unique()
    assert 8192 <= places.numel() <= 2 * 8192
    assert len(rows) >= 16 and rows.diff().unique().numel() == 1 and rows[-1] >= 4096 * 0.9
    assert columns[-1] >= 2048 * 0.8


class Names(Sampler):
    """What reached it, by role and the planes that were encoded."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bool, bool]] = []

    def take(self, role, x, planes, slots) -> None:
        self.seen.append((role.name, role.tensor_type, planes.rowwise is not None, planes.columnwise is not None))


def train(model: nn.Module, sampler: Sampler | None, region: bool = False) -> list[Tensor]:
    """Outputs and gradients of three steps, the second one sampled if there is a sampler."""
    torch.manual_seed(0)
    results: list[Tensor] = []
    for number in range(3):
        x = torch.randn(32, 64).to(BF16).requires_grad_()
        recipe = duotone.autocast(recipe=recipes.load("fp8-delayed")) if region else torch.enable_grad()
        if sampler is not None and number == 1:
            with sampled_step(model, sampler):
                with recipe:
                    y = model(x)
                y.square().mean().backward()
        else:
            with recipe:
                y = model(x)
            y.square().mean().backward()
        results += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    return results


def mlp(recipe: str) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 96, dtype=BF16), nn.GELU(), nn.Linear(96, 64, dtype=BF16))
    return duotone.convert(model, recipes.load(recipe), rules=())


@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize("recipe", recipes.names())
def test_a_sampled_step_computes_the_same_bits(recipe: str, region: bool) -> None:
    model, sampler = mlp(recipe), Names()
    plain = train(copy.deepcopy(model), None, region)
    sampled = train(model, sampler, region)
    assert all(torch.equal(a, b) for a, b in zip(plain, sampled, strict=True))
    assert {role for _, role, _, _ in sampler.seen} >= {"input", "weight"}


def test_only_the_steps_in_the_block_are_sampled() -> None:
    model, sampler = mlp("mxfp8"), Names()
    train(model, sampler)
    roles = [(name, role) for name, role, _, _ in sampler.seen]
    forward = [(name, role) for name in ("0", "2") for role in ("input", "weight")]
    assert roles == [*forward, ("2", "grad_output"), ("0", "grad_output")]


def test_compiled_code_runs_eager_in_the_block_and_compiled_after_it() -> None:
    model, sampler = mlp("mxfp8"), Names()
    graphs: list[object] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(32, 64).to(BF16)
    plain = compiled(x)
    before = len(graphs)
    with sampled_step(model, sampler):
        sampled = compiled(x)
    assert torch.equal(plain, sampled) and len(sampler.seen) == 4
    assert torch.equal(compiled(x), plain) and len(graphs) == before == 1 and len(sampler.seen) == 4


def test_a_block_that_fails_leaves_no_tap_behind() -> None:
    model, sampler = mlp("mxfp8"), Names()
    with pytest.raises(ZeroDivisionError), sampled_step(model, sampler):
        raise ZeroDivisionError
    model(torch.randn(32, 64).to(BF16))
    assert sampler.seen == []
