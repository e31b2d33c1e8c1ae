"""What AdamW refuses, each in one line and before anything changes."""

from unittest import mock

import pytest
import torch
from optim_cases import RATES, all_same, everything, pair, random_parameter
from torch import nn

from duotone.errors import MissingPlaneError, UserError
from duotone.optim import AdamW
from duotone.tensor import QuantizeContext


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"lr": torch.ones(2)},
        {"lr": float("nan")},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"betas": (0.9,)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
    ],
    ids=str,
)
def test_hyperparameters_out_of_range(wrong) -> None:
    with pytest.raises(UserError) as raised:
        AdamW([nn.Parameter(torch.ones(2))], **wrong)
    assert "\n" not in str(raised.value) and "AdamW takes" in str(raised.value)


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(UserError, match="weight_decay"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "weight_decay": -1})
    with pytest.raises(TypeError, match="ordered"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.ones(2))}})
    assert len(optimizer.param_groups) == 1


def test_params_may_be_named_and_come_from_a_generator() -> None:
    model = nn.Linear(4, 4)
    assert AdamW(model.named_parameters()).param_groups[0]["param_names"] == ["weight", "bias"]
    assert len(AdamW(p for p in model.parameters()).param_groups[0]["params"]) == 2


def sparse() -> nn.Parameter:
    p = nn.Parameter(torch.ones(4, 3))
    p.grad = torch.eye(4, 3).to_sparse()
    return p


def shell() -> nn.Parameter:
    p = random_parameter(pair("mxfp8_e4m3"))
    p.update_usage(rowwise=False, columnwise=False)
    return p


def piece() -> nn.Parameter:
    return nn.Parameter(random_parameter(pair("fp8_e4m3_tensor"), (64, 64)).detach()[:32])


def stochastic() -> nn.Parameter:
    q = pair("nvfp4_sr")
    tensor = q.make(torch.randn(32, 64), ctx=QuantizeContext(seed=torch.tensor([3])))
    return nn.Parameter(tensor)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (sparse, UserError, "sparse"),
        (shell, MissingPlaneError, "no plane"),
        (piece, MissingPlaneError, "piece"),
        (stochastic, UserError, "seed"),
    ],
)
def test_a_parameter_that_cannot_be_written_leaves_all_others_as_they_were(make, error, words) -> None:
    first = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    quantized, last = random_parameter(pair("mxfp8_e4m3")), make()
    optimizer = AdamW([{"params": [first, quantized]}, {"params": [last]}], **RATES, master_weights=True)
    for p in (first, quantized, last):
        p.grad = torch.ones(p.shape, dtype=p.dtype) if p.grad is None else p.grad
    before = everything(optimizer)
    with pytest.raises(error, match=words) as raised:
        optimizer.step()
    assert "\n" not in str(raised.value)
    assert all_same(everything(optimizer), before) and not any(optimizer.state.values())


@pytest.mark.parametrize("name", ["moment_dtype", "master_dtype"])
def test_a_dtype_that_is_written_into_a_group_is_one_line_that_names_the_remedy(name) -> None:
    p = random_parameter(pair("mxfp8_e4m3"))
    p.grad = torch.ones(p.shape, dtype=p.dtype)
    optimizer = AdamW([p], **RATES)
    optimizer.param_groups[0][name] = torch.bfloat16
    before = everything(optimizer)
    with pytest.raises(UserError, match=r'^AdamW takes .* write group\["moment_dtype"\] = "torch.bfloat16"; got .*$'):
        optimizer.step()
    assert all_same(everything(optimizer), before) and not any(optimizer.state.values())
    optimizer.param_groups[0][name] = "torch.bfloat16"
    optimizer.step()
    assert optimizer.state[p]["exp_avg" if name == "moment_dtype" else "master"].dtype == torch.bfloat16


def test_stochastic_rounding_takes_the_seed_of_the_context() -> None:
    p = stochastic()
    p.context = QuantizeContext(seed=torch.tensor([11]))
    p.grad = torch.randn(p.shape)
    optimizer = AdamW([p], **RATES)
    optimizer.step()
    want = p.quantizer.make(optimizer.state[p]["master"], ctx=p.context)
    assert torch.equal(p.dequantize(), want.dequantize())


def test_a_step_inside_of_a_cuda_graph() -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    optimizer = AdamW([p])
    with (
        mock.patch("duotone.optim.adamw.is_capturing", return_value=True),
        pytest.raises(MissingPlaneError, match="CUDA graph"),
    ):
        optimizer.step()
    assert torch.equal(p, torch.ones(4))


@pytest.mark.parametrize(
    "options",
    [
        {"moment_dtype": torch.float16},
        {"master_dtype": torch.int8},
        {"lr": "x"},
        {"lr": True},
        {"betas": 0.9},
        {"betas": (0.9, "x")},
        {"eps": None},
    ],
)
def test_a_hyperparameter_that_is_no_number_is_one_line_and_adds_nothing(options) -> None:
    optimizer = AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(UserError, match=r"^AdamW takes"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **options})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(UserError, match=r"^AdamW takes"):
        AdamW([torch.nn.Parameter(torch.ones(2))], **options)
