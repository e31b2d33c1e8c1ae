"""Entries of other libraries over two ranks against one process."""

import functools
import sys
from pathlib import Path

import checks
import torch
import torch.distributed as dist
from checks import check
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "conversion"))
from causal import batch, llama

import duotone

EVEN = {"num_key_value_heads": 2, "intermediate_size": 128, "num_hidden_layers": 1}
"""Sizes whose parts on two ranks end on blocks."""


def close(got: Tensor, want: Tensor, what: str, within: float = 1e-5) -> None:
    """Equal up to the order of sums."""
    assert (got - want).norm() <= within * want.norm(), f"{what}: {(got - want).norm() / want.norm()}"


@functools.cache
def plain(folder: Path) -> Path:
    """The folder of a plain model, which the first rank writes."""
    path = folder / "plain"
    if dist.get_rank() == 0:
        llama(**EVEN).save_pretrained(path)
    dist.barrier()
    return path


@functools.cache
def pair(folder: Path, recipe: str, quantize: bool = False) -> tuple[nn.Module, nn.Module]:
    """A model under a tensor parallel plan of transformers, and that of one process."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from duotone.integrations.transformers import DuotoneConfig

    options = {"quantization_config": DuotoneConfig(recipe, quantize_parameters=quantize)}
    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    spread = AutoModelForCausalLM.from_pretrained(plain(folder), **options, distributed_config=plan)
    return spread.train(), AutoModelForCausalLM.from_pretrained(plain(folder), **options).train()


@check
def a_tensor_parallel_plan_of_transformers_gives_the_values_of_one_process(folder: Path) -> None:
    for recipe in ("mxfp8", "fp8-current", "fp8-delayed", "nvfp4"):
        spread, one = pair(folder, recipe)
        assert str(duotone.plan(spread)) == str(duotone.plan(one)), recipe
        for at in range(2):
            loss, want = (m(input_ids=batch(at), labels=batch(at)).loss for m in (spread, one))
            close(loss, want, recipe)
            loss.backward()
            want.backward()
        for (name, got), want in zip(spread.named_parameters(), one.parameters(), strict=True):
            if recipe != "nvfp4" and want.grad is not None:  # each rank rounds at random
                close(
                    getattr(got.grad, "full_tensor", lambda got=got: got.grad)(), want.grad, f"{recipe}, {name}", 2e-3
                )
        with torch.no_grad():
            close(spread(batch(2)).logits, one(batch(2)).logits, recipe)


@check
def it_generates_is_saved_and_dequantized_as_in_one_process(folder: Path) -> None:
    spread, one = pair(folder, "mxfp8", True)
    tokens = [m.eval().generate(batch(2)[:, :8], max_new_tokens=4, do_sample=False) for m in (spread, one)]
    assert torch.equal(*tokens)
    spread.save_pretrained(folder / "saved")
    dist.barrier()
    saved = type(one).from_pretrained(folder / "saved")
    for (name, got), want in zip(saved.named_parameters(), one.parameters(), strict=True):
        checks.same(got, want.dequantize() if isinstance(want, duotone.QuantizedTensor) else want, name)
    assert type(spread.dequantize().model.layers[0].mlp.up_proj) is nn.Linear
    close(spread(batch(2)).logits, one.dequantize()(batch(2)).logits, "dequantized")


if __name__ == "__main__":
    checks.main()
