import dataclasses

import pytest
import torch

from duotone.errors import UserError
from duotone_lab.training import model, models, presets

TINY = presets.get("tiny")


def test_the_default_model_is_the_gpt():
    default, direct = models.build(models.DEFAULT, TINY, 3), model.build(TINY.model, 3)
    assert type(default) is model.GPT
    assert all(torch.equal(a, b) for a, b in zip(default.parameters(), direct.parameters(), strict=True))


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_of_the_registry_follows_the_preset(name):
    """Its outline has no weights and the same parameters; it gives a loss near that of guessing bytes."""
    outline, model = models.outline(name, TINY), models.build(name, TINY, 0)
    assert all(parameter.is_meta for parameter in outline.parameters())
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (outline, model)]
    assert shapes[0] == shapes[1]
    tokens = torch.randint(0, 256, (2, TINY.model.context))
    assert abs(model(tokens, tokens.roll(-1, 1)).item() - 5.545) < 0.1
    assert models.describe(name, TINY).startswith(f"{name}: 2 layers of 64, ")


@pytest.mark.parametrize("name", models.MODELS)
def test_weights_depend_on_the_seed_and_a_perturbation_moves_them(name):
    first, same_seed, other = (models.build(name, TINY, seed) for seed in (5, 5, 6))
    perturbed = models.build(name, TINY, 5, perturbation=1e-3)
    for a, b, c, d in zip(*(m.parameters() for m in (first, same_seed, perturbed, other)), strict=True):
        assert torch.equal(a, b)
        assert 2e-4 < (c / a - 1).abs().mean() < 2e-3
        assert a.dim() < 2 or not torch.equal(a, d)


def test_a_tied_head_counts_once_among_the_parameters():
    untied = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, tied=False))
    count = models.parameter_count("gpt", TINY)
    assert count == sum(p.numel() for p in models.build("gpt", TINY, 0).parameters())
    assert models.parameter_count("gpt", untied) == count + 256 * TINY.model.dim


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(UserError, match=r"unknown model 'llama': choose one of gpt.*, or hf:PATH_OR_CLASS"):
        models.get("llama")
