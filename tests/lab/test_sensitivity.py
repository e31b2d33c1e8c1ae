"""Effects of single GEMMs, against products of torch's own casts."""

import pytest
import torch

from duotone.observe import speeds
from duotone.observe.candidates import load_candidates
from duotone.recipes import HighPrecision
from duotone_lab.training.gemm_options import options_of
from duotone_lab.training.sensitivity import Effect, effects
from duotone_lab.training.trainer import Trainer

MODULE = "layers.1.mlp.down"


@pytest.fixture
def trainer(config, corpus):
    trainer = Trainer(config, HighPrecision(), corpus)
    trainer.step()
    return trainer


def measured(trainer, names, only=None, earlier=()):
    options = options_of(trainer.config, load_candidates("", names), speeds.measured(), None)
    picked = {gemm: choices for gemm, choices in options.items() if only in (None, gemm[0])}
    return {(e.module, e.gemm, e.recipe): e for e, _ in effects(trainer, picked, earlier)}


def operands(trainer):
    """Input, weight, gradient of the output of MODULE in the step that comes next, and all gradients."""
    caught = {}
    module = trainer.model.get_submodule(MODULE)

    def catch(module, args, output):
        caught["x"] = args[0].detach().flatten(0, 1).float()
        output.register_hook(lambda gradient: caught.update(dy=gradient.flatten(0, 1).float()))

    hook = module.register_forward_hook(catch)
    preset = trainer.config.preset
    batch = trainer.corpus.batch(trainer.config.seed, 1, count=preset.batch, context=preset.model.context)
    trainer.model(*batch).backward()
    hook.remove()
    gradients = {name: p.grad.float() for name, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    return caught["x"], module.weight.detach().float(), caught["dy"], gradients


def in_fp8(x, dtype):
    scale = torch.finfo(dtype).max / x.abs().max()
    return (x * scale).to(dtype).float() / scale


def test_a_forward_error_counts_half_the_tokens_times_its_squares_along_the_gradients(trainer):
    x, weight, dy, _ = operands(trainer)
    error = in_fp8(x, torch.float8_e4m3fn) @ in_fp8(weight, torch.float8_e4m3fn).T - x @ weight.T
    expected = len(x) / 2 * sum((row @ gradient) ** 2 for row, gradient in zip(error, dy, strict=True)).item()
    effect = measured(trainer, ["fp8-current"], MODULE)[MODULE, "fprop", "fp8-current"]
    assert effect.forward == pytest.approx(expected, rel=0.1) and effect.backward == 0.0  # outputs are bf16


def test_a_backward_error_counts_as_the_angle_that_it_turns_a_gradient_by(trainer):
    x, _, dy, gradients = operands(trainer)
    exact = gradients[f"{MODULE}.weight"].flatten()
    turned = (in_fp8(dy, torch.float8_e5m2).T @ in_fp8(x, torch.float8_e4m3fn)).flatten()
    lost = 1 - (exact @ turned / exact.norm() / turned.norm()).item()
    share = exact.abs().sum() / sum(gradient.abs().sum() for gradient in gradients.values())
    effect = measured(trainer, ["fp8-current"], MODULE)[MODULE, "wgrad", "fp8-current"]
    assert effect.backward == pytest.approx(lost * share.item(), rel=0.1) and effect.forward == 0.0


def test_bf16_costs_nothing_and_four_bits_cost_more_than_eight(trainer):
    all_effects = measured(trainer, ["mxfp8", "nvfp4"], MODULE)
    for gemm, direction in (("fprop", "forward"), ("dgrad", "backward"), ("wgrad", "backward")):
        costs = [getattr(all_effects[MODULE, gemm, name], direction) for name in ("bf16", "mxfp8", "nvfp4")]
        assert costs[0] == 0.0 < 4 * costs[1] < costs[2]


def test_it_goes_on_from_known_effects_with_the_same_numbers_and_leaves_no_trace(trainer):
    parameters = [p.detach().clone() for p in trainer.model.parameters()]
    whole = list(measured(trainer, ["nvfp4"]).values())
    resumed = measured(trainer, ["nvfp4"], earlier=whole[:11])
    assert list(resumed.values()) == whole[11:] and len(whole) == 2 * 4 * 3 * 2
    assert all(
        torch.equal(p, q) and p.grad is None for p, q in zip(trainer.model.parameters(), parameters, strict=True)
    )
    assert isinstance(whole[0], Effect) and trainer.completed == 1
