"""Experts in the layout of torchtitan follow a recipe: rows sorted by expert, three 3-D parameters."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import duotone


class GroupedExperts(nn.Module):
    """As torchtitan's, but with a loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w1_EFD = nn.Parameter(torch.randn(3, 64, 32) / 6)
        self.w2_EDF = nn.Parameter(torch.randn(3, 32, 64) / 8)
        self.w3_EFD = nn.Parameter(torch.randn(3, 64, 32) / 6)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        rows = x.bfloat16().split(counts.tolist())
        return torch.cat([self.expert(i, part) for i, part in enumerate(rows)]).type_as(x)

    def expert(self, i: int, x: Tensor) -> Tensor:
        w1, w2, w3 = (w[i].bfloat16().T for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        return (F.silu(x @ w1) * (x @ w3)) @ w2


class Clamped(GroupedExperts):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return super().forward(x, counts).clamp(-1, 1)


def run(experts: nn.Module) -> dict[str, Tensor]:
    x = torch.randn(96, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = experts(x, torch.tensor([32, 0, 64]))
    y.square().mean().backward()
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in experts.named_parameters()}


def converted(recipe: str) -> nn.Module:
    return duotone.convert(nn.Sequential(GroupedExperts()), recipe)[0]


def test_bf16_gives_what_the_loop_gives() -> None:
    grouped, loop = run(converted("bf16")), run(GroupedExperts())
    assert grouped.keys() == loop.keys()
    for name, tensor in loop.items():
        torch.testing.assert_close(grouped[name], tensor, rtol=0.02, atol=0.02 * tensor.abs().max().item(), msg=name)


def test_mxfp8_rounds_every_linear_and_keeps_the_state_dict() -> None:
    experts, loop = converted("mxfp8"), run(GroupedExperts())
    assert experts.state_dict().keys() == GroupedExperts().state_dict().keys()
    for name, tensor in run(experts).items():
        error = (tensor - loop[name]).norm() / loop[name].norm()
        assert 0.01 < error < 0.1, name


def test_a_copy_follows_the_recipe_and_revert_gives_the_class_back() -> None:
    model = nn.Sequential(converted("mxfp8"))
    twin = copy.deepcopy(model)
    assert torch.equal(run(twin[0])["y"], run(model[0])["y"])
    assert type(duotone.revert(model)[0]) is GroupedExperts
    assert torch.equal(run(model[0])["y"], run(GroupedExperts())["y"])


def test_experts_with_another_forward_are_left_alone_with_a_reason() -> None:
    model = duotone.convert(nn.Sequential(nn.Linear(32, 32), Clamped()), "mxfp8")
    assert type(model[1]) is Clamped
    assert "Clamped has another forward" in str(duotone.plan(model))
