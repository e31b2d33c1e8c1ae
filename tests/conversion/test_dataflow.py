"""Who reads the output of a norm, as the source of a forward says it."""

import pytest
import torch
from torch import Tensor, nn

from duotone.conversion.dataflow import Flows


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor, other: Tensor | None = None) -> Tensor:
        shape = (*hidden.shape[:-1], -1)
        source = hidden if other is None else other
        return self.o(self.q(hidden).view(shape) + self.k(source))


class Outer(nn.Module):
    """Its subclasses differ in their forward."""

    flag = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.inner = nn.LayerNorm(8), nn.Linear(8, 8), Inner()
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


class Direct(Outer):
    def forward(self, x):
        return x + self.linear(self.norm(x))


class Assigned(Outer):
    def forward(self, x):
        residual, x = x, None
        y = z = self.norm(residual)
        assert y.dtype is z.dtype and y is not None
        x = self.inner(hidden=z) if x is None else x
        return x + self.mlp(y)


class Residual(Outer):
    def forward(self, x):
        x = self.norm(x)
        return x + self.linear(x)


class Augmented(Outer):
    def forward(self, x):
        y = self.norm(x)
        y += 1
        return self.linear(y)


class Returned(Outer):
    def forward(self, x):
        y = self.norm(x)
        return self.linear(y), y


class Captured(Outer):
    def forward(self, x):
        y = self.norm(x)
        parts = [torch.relu(y) for _ in range(2)]
        return self.linear(y) + sum(parts)


class InMethod(Outer):
    def forward(self, x):
        return self.project(self.norm(x))

    def project(self, x):
        return self.linear(x)


class Branch(Outer):
    def forward(self, x, deep=False):
        y = self.norm(x)
        if deep:
            return self.inner(y)
        y = self.linear(y)
        return y * 2


class Flag(Outer):
    def forward(self, x):
        residual = x
        if not self.flag:
            x = self.norm(x)
        y = self.linear(x)
        if self.flag:
            y = self.norm(residual + y)
        return residual + y if not self.flag else y


class Flagged(Flag):
    flag = True


CASES = {
    Direct: ({"linear": True}, []),
    Assigned: ({"inner.q": False, "inner.k": False, "mlp.0": True}, []),
    Residual: ({"linear": True}, ["x + self.linear(x)"]),
    Augmented: ({}, ["y += 1"]),
    Returned: ({"linear": True}, ["(self.linear(y), y)"]),
    Captured: ({"linear": True}, ["torch.relu(y)"]),
    InMethod: ({}, ["self.project"]),
    Branch: ({"inner.q": False, "inner.k": False, "linear": True}, []),
    Flag: ({"linear": True}, []),
    Flagged: ({}, ["return residual + y if not self.flag else y"]),
}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_the_readers_of_a_norm_and_whether_every_call_has_them(kind: type[Outer]) -> None:
    assert Flows(lambda module: isinstance(module, nn.Linear)).readers(kind(), "norm") == CASES[kind]


def test_a_forward_without_source_has_no_readers() -> None:
    scope = {"Outer": Outer}
    exec("class Made(Outer):\n    def forward(self, x):\n        return self.linear(self.norm(x))", scope)
    assert Flows(lambda module: False).readers(scope["Made"](), "norm") == ({}, ["Made.forward, which has no source"])


def test_children_that_read_the_input() -> None:
    assert Flows(lambda module: False).first_readers(Inner()) == ["q", "k"]
    assert Flows(lambda module: False).first_readers(Outer().mlp) == ["0"]
