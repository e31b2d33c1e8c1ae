"""Plans: seeds that no two tensors share."""

import itertools

import pytest
import torch

from duotone import CustomRecipe, Quantizer, formats
from duotone.linear import Setting, build_plan

SR, NEAREST = formats.get("nvfp4_sr"), formats.get("nvfp4")


@pytest.mark.parametrize("stochastic", list(itertools.product([True, False], repeat=3)), ids=str)
def test_every_stochastic_tensor_of_every_step_has_a_seed_of_its_own(stochastic) -> None:
    chosen = dict(zip(("input", "weight", "grad_output"), stochastic, strict=True))

    def factory(role):
        fmt = SR if role is not None and chosen.get(role.tensor_type) else NEAREST
        return Quantizer(fmt, fmt)

    plan = build_plan(Setting(CustomRecipe(qfactory=factory), (), "up", "linear", "cpu", torch.bfloat16))
    seen, seed = [], torch.tensor([10])
    for _ in range(3):
        streams = plan.streams(seed if plan.seeds else None)
        assert [stream is not None for stream in streams] == list(stochastic)
        seen += [int(stream) for stream in streams if stream is not None]
        seed = seed + plan.seeds
    assert len(set(seen)) == len(seen) == 3 * sum(stochastic)
    assert seen == list(range(10, 10 + len(seen)))
