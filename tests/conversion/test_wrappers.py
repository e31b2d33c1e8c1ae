"""Names and layers under wrappers of torch are those of the model inside. Wrappers are told by their class."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import duotone
from duotone import observe
from duotone.recipes import Rule, RuleRecipe

RULES = tuple(Rule(format="identity", **place) for place in ({"module": "first"}, {"layer": "-1:"}, {"module": "last"}))
HIGH = ["first", "layers.3", "last"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 16)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


class Own(nn.Module):
    """A module of one's own whose child is called `module`, as in wrappers of torch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def compiled(m: nn.Module) -> nn.Module:
    return torch.compile(m, backend="eager")  # type: ignore[return-value]


def parallel(m: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(m)


WRAPPERS = {
    "none": lambda m: m,
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": parallel,
    "AveragedModel": AveragedModel,
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "nested": lambda m: AveragedModel(nn.DataParallel(compiled(m))),
    "compiled from outside": lambda m: compiled(parallel(checkpoint_wrapper(m))),
}
wrappers = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


@pytest.fixture(autouse=True)
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def high(m: nn.Module) -> list[str]:
    """The linears that run in high precision, by the names in the plan."""
    return [row.module for row in duotone.plan(m) if row.gemm == "fprop" and row.runs == "high precision"]


@wrappers
def test_rules_mean_the_model_inside(wrap) -> None:
    """Rules of convert, and rules of the recipe."""
    names = [row.module for row in duotone.plan(wrap(Net()))]
    assert names == [row.module for row in duotone.plan(Net())]
    for recipe, rules in (("fp8-current", RULES), (RuleRecipe(rules=RULES, base="fp8-current"), ())):
        m = duotone.convert(wrap(Net()), recipe, rules)
        assert sorted(high(m)) == sorted(HIGH)
        linears = [part for part in m.modules() if isinstance(part, nn.Linear)]
        x = {width: torch.randn(16, width) for width in (32, 64)}
        plain = [
            part.module_name
            for part in linears
            if torch.equal(part(x[part.in_features]), nn.functional.linear(x[part.in_features], part.weight, part.bias))
        ]
        assert sorted(plain) == sorted(HIGH)
    assert {type(part) for part in duotone.revert(m).modules() if isinstance(part, nn.Linear)} == {nn.Linear}


@wrappers
def test_seeds_are_those_of_the_model_inside(wrap) -> None:
    seeds = [
        [part.duotone_seed.tolist() for part in duotone.convert(m, "nvfp4", ()).modules() if hasattr(part, "plans")]
        for m in (Net(), wrap(Net()))
    ]
    assert seeds[0] == seeds[1]


@wrappers
def test_heads_are_those_of_the_model_inside(wrap) -> None:
    parts = {"embed": nn.Embedding(8, 32), "first": nn.Linear(32, 32), "score": nn.Linear(32, 16)}
    assert high(duotone.convert(wrap(nn.ModuleDict(parts)), "mxfp8")) == ["score"]


@wrappers
def test_advice_and_the_monitor_name_the_model_inside(wrap, tmp_path) -> None:
    x, names = torch.randn(32, 32), {"first", "last", *(f"layers.{index}" for index in range(4))}
    assert {row.module for row in observe.advise(wrap(Net()), (x,), lambda y: y.square().sum()).rows} == names
    m = duotone.convert(wrap(Net()), "mxfp8", ())
    with observe.Monitor(m, tmp_path / "x.jsonl", every=1) as monitor:
        m(x).sum().backward()
        monitor.step()
    assert {json.loads(line)["module"] for line in (tmp_path / "x.jsonl").read_text().splitlines()} == names


@pytest.mark.parametrize("wrap", [Own, lambda m: Own(nn.DataParallel(m))], ids=["alone", "around DataParallel"])
def test_a_child_called_module_is_a_name_in_modules_of_others(wrap) -> None:
    rules = [Rule(module="first", format="identity"), Rule(module="module.last", format="identity")]
    with pytest.warns(UserWarning, match="'module': 'first'.* matches no tensor of the model"):
        m = duotone.convert(wrap(Net()), "mxfp8", rules)
    assert high(m) == ["module.last"]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, compiled], ids=["none", "DataParallel", "compile"])
def test_a_sequential_of_one_model_counts_the_layers_inside(depth: int, wrap) -> None:
    """Its own name stays in the names."""
    m: nn.Module = Net()
    for _ in range(depth):
        m = nn.Sequential(wrap(m))
    m, start = duotone.convert(wrap(m), "mxfp8", RULES[1:2]), "0." * depth
    assert high(m) == [f"{start}layers.3"]
    assert {f"{start}first", f"{start}last"} <= {row.module for row in duotone.plan(m)}


def test_a_sequential_of_one_layer_is_the_stack_where_no_other_is_inside() -> None:
    for m in (nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.ModuleDict({"up": nn.Linear(32, 32)}))):
        assert len(high(duotone.convert(m, "mxfp8", RULES[1:2]))) == 1
    stack = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    assert high(duotone.convert(stack, "mxfp8", RULES[1:2])) == ["0.1"]


def test_a_model_with_one_layer_has_that_layer() -> None:
    """Its experts, or a Sequential in it, are parts of the layer and no layers."""
    m = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))])})
    assert high(duotone.convert(m, "mxfp8", [Rule(layer=0, format="identity")])) == ["layers.0.0", "layers.0.1"]
