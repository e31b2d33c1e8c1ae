"""Samples of the operands of every linear, from one forward and one backward in high precision."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from duotone.conversion.default_rules import with_default_rules
from duotone.conversion.naming import named_modules, require_model, sites_of
from duotone.errors import UserError
from duotone.observe.unchanged import as_before, device_of
from duotone.recipes.roles import QuantizerRole, Site
from duotone.recipes.rules import OUTPUT_HEAD, first_rule
from duotone.state import autocast
from duotone.tensor import QuantizedTensor
from duotone.text import in_units

MOST_ROWS = 256
BLOCK = 128
"""Sampled rows lie side by side in groups of this size, as the longest blocks of formats want it."""

SHARE = 4
"""Samples may take the free memory divided by this."""


@dataclass
class LinearSample:
    """Rows of the operands of one linear: "input" (rows, in), "weight" (out, in), "grad_output" (rows, out).

    `tokens` is how many rows the step had.
    """

    name: str
    site: Site
    operands: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears that `convert` would convert: without output heads, adapters and routers."""
    sites, rules = sites_of(model), with_default_rules(OUTPUT_HEAD, model, [])
    return {
        name: module
        for name, module in named_modules(model)
        if isinstance(module, nn.Linear)
        and first_rule(rules, QuantizerRole("linear", "weight", name), sites[name]) is None
    }


def sample_operands(
    model: nn.Module, step: Callable[[], Tensor], memory: int | None = None
) -> tuple[list[LinearSample], list[str]]:
    """Run `step`, which returns the loss, and its backward. Gradients and random state are restored afterwards.

    Returns a sample of each linear that ran, and a note if memory limits their rows.

    Samples take at most `memory` bytes, by default a quarter of the free memory. UserError for a loss that is no scalar
    with a gradient, for a model whose linears do not run, or if no row fits.
    """
    require_model("advise", model)
    linears, device = linears_of(model), device_of(model)
    row = sum((linear.in_features + linear.out_features) * linear.weight.element_size() for linear in linears.values())
    room = _free(device) // SHARE if memory is None else memory
    rows = min(MOST_ROWS, room // max(1, row))
    while True:
        if rows < 1:
            sizes_text = f"{in_units(row)}, and {in_units(room)} may be taken"
            raise UserError(
                f"one row of the operands of {len(linears)} linears takes {sizes_text}: advise on a part of them"
            )
        try:
            samples = _sample(model, linears, step, rows, device)
            break
        except torch.OutOfMemoryError:
            rows //= 2
    tokens = max(sample.tokens for sample in samples)
    if rows < min(MOST_ROWS, tokens):
        return samples, [
            f"memory holds {rows} of {tokens} rows of each operand: the statistics are those of fewer rows"
        ]
    return samples, []


def _sample(
    model: nn.Module, linears: dict[str, nn.Linear], step: Callable[[], Tensor], rows: int, device: torch.device
) -> list[LinearSample]:
    sites = sites_of(model)
    samples = {name: LinearSample(name, sites[name]) for name in linears}
    with ExitStack() as stack:
        for name, linear in linears.items():
            stack.enter_context(linear.register_forward_hook(_watcher(samples[name], rows), with_kwargs=True))
        stack.enter_context(as_before(model, device))
        if "torch._dynamo" in sys.modules:  # a graph calls no hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(autocast(enabled=False))
        stack.enter_context(torch.enable_grad())
        loss = step()
        _require_loss(loss)
        loss.backward()
    ran = [sample for sample in samples.values() if sample.operands]
    forward = [(sample, kind) for sample in ran for kind in ("input", "weight")]
    backward = [(sample, "grad_output") for sample in reversed(ran) if "grad_output" in sample.operands]
    for sample, kind in (*forward, *backward):  # the first one that is not finite is the origin
        operand = sample.operands[kind]
        where = f"in the {kind} of {sample.name}"  # formats would not differ in any statistic
        if not operand.numel():
            raise UserError(f"advise met no rows {where}; give a batch that is not empty")
        if not bool(torch.isfinite(operand).all()):
            raise UserError(f"advise met NaN or infinities {where}; give a batch and weights that are finite")
    if not ran:
        raise UserError("no linear of the model ran: advise on a model that calls its nn.Linear modules, before fuse")
    return ran


Hook = Callable[[nn.Linear, tuple[Tensor, ...], dict[str, Tensor], Tensor | tuple[Tensor, ...]], None]


def _watcher(sample: LinearSample, rows: int) -> Hook:
    """A forward hook that fills the sample with the operands of the first call."""

    def part(x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1, x.shape[-1])
        return flat[spread_rows(flat.shape[0], rows).to(flat.device)].clone()

    def watch(
        module: nn.Linear, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], result: Tensor | tuple[Tensor, ...]
    ) -> None:
        if sample.operands:
            return
        x = args[0] if args else next(iter(kwargs.values()))
        y = result[0] if isinstance(result, tuple) else result
        weight = module.weight.detach()
        sample.tokens = x.numel() // x.shape[-1]
        sample.operands |= {
            "input": part(x),
            "weight": weight.dequantize() if isinstance(weight, QuantizedTensor) else weight,
        }
        if y.requires_grad:
            y.register_hook(lambda gradient: sample.operands.update(grad_output=part(gradient)))

    return watch


def spread_rows(count: int, rows: int) -> Tensor:
    """The indices of at most `rows` of `count` rows, in groups that are spread evenly, int64."""
    if rows >= count:
        return torch.arange(count)
    block = min(BLOCK, rows)
    starts = torch.linspace(0, count - block, rows // block).long()
    return (starts[:, None] + torch.arange(block)).flatten()


def _require_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        if isinstance(loss, Tensor) and loss.numel() == 1:
            got = "a number without a gradient"
        raise UserError(f"advise needs a loss, one number that backward can start from; got {got}: change `loss`")


def _free(device: torch.device) -> int:
    """Bytes of free memory on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
