"""Patterns that inductor finds in graphs: the calls that they leave."""

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from duotone.dispatch.graph_patterns import find_patterns
from later import Later

post_grad = Later("torch._inductor.fx_passes.post_grad")

ops = torch.ops.duotone
X, GAMMA = torch.randn(4, 16), torch.randn(16)


def calls(function: Callable[..., object], *inputs: Tensor) -> list[str]:
    """What a graph calls after the patterns, without look-ups of results."""
    find_patterns()
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    for patterns in post_grad.pass_patterns:
        patterns.apply(graph)
    graph.lint()
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    return [f"{node.target} of {len(node.args)}".replace(".default", "") for node in nodes]


def gradients(x: Tensor, gamma: Tensor, needs: bool = True) -> list[Tensor]:
    return ops.norm_gradients("RMSNorm", x, x, gamma, None, [gamma], [needs, True, False])


def test_a_norm_adds_the_gradient_that_goes_around_it() -> None:
    def first(x: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
        dx, dgamma = gradients(x, gamma)
        total = dx + x
        return total, total.cos(), dgamma

    def second(x: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
        around = x.sin()
        dx, dgamma = gradients(x, gamma)
        return around + dx, around, dgamma

    assert calls(first, X, GAMMA) == ["duotone.norm_gradients of 8", "aten.cos of 1"]
    assert calls(second, X, GAMMA) == ["aten.sin of 1", "duotone.norm_gradients of 8"]


def test_other_sums_stay() -> None:
    def later(x: Tensor, gamma: Tensor) -> Tensor:
        dx, dgamma = gradients(x, gamma)
        return dx + dgamma.expand(4, 16).cos()

    def read_twice(x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        dx, _ = gradients(x, gamma)
        return dx + x, dx

    def of_gamma(x: Tensor, gamma: Tensor) -> Tensor:
        return gradients(x, gamma, needs=False)[0] + gamma

    def broadcast(x: Tensor, gamma: Tensor) -> Tensor:
        return gradients(x, gamma)[0] + gamma

    def scaled(x: Tensor, gamma: Tensor) -> Tensor:
        return torch.add(gradients(x, gamma)[0], x, alpha=2)

    for function in (later, read_twice, of_gamma, broadcast, scaled):
        assert "duotone.norm_gradients of 7" in calls(function, X, GAMMA), function


def test_a_cast_reads_matrices_one_below_the_other_where_they_lie() -> None:
    names = "fp8_e4m3_tensor", "fp8_e4m3_tensor", True

    def current(x: Tensor, y: Tensor) -> list[Tensor]:
        return ops.cast_planes(torch.cat([x, y]), *names, None)

    def delayed(x: Tensor, y: Tensor) -> list[Tensor]:
        place = torch.zeros(1, dtype=torch.int64), "plan", 0, "weight", 0
        return ops.traced_planes(torch.cat([x, y]), *place, *names)

    def both_parts(x: Tensor, y: Tensor) -> list[Tensor]:
        whole = torch.cat([x, y])
        return [*ops.cast_planes(whole, *names, None), whole]

    def scaled(x: Tensor, y: Tensor) -> list[Tensor]:
        return ops.cast_planes(torch.cat([x, y]), *names, x[0, :1].clone())

    assert calls(current, X, X) == ["duotone.produced_planes of 6"]
    assert calls(delayed, X, X)[-1] == "duotone.traced_produced of 11"
    assert calls(both_parts, X, X)[0] == "aten.cat of 1"
    assert calls(scaled, X, X)[0] == "aten.cat of 1"
    assert calls(lambda x, y: ops.cast_planes(torch.cat([x, y], 1), *names, None), X, X)[0] == "aten.cat of 2"
