"""On a CUDA device: the same codes, scales and values as on the CPU, and products of what the formats decode to."""

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import formats, recipes
from duotone.recipes.roles import TENSOR_TYPES, QuantizerRole
from duotone.tensor import QuantizeContext

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)


def bits(t: Tensor) -> Tensor:
    t = t.detach().cpu().contiguous()
    if not t.is_floating_point():
        return t
    return torch.where(torch.isnan(t), torch.full_like(t, torch.nan), t).float().reshape(-1).view(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", formats.names())
def test_cuda_encodes_and_decodes_the_bits_of_the_cpu(name, dtype, awkward) -> None:
    fmt, x = formats.get(name), awkward.to(dtype)
    for view, other in ((x, x.cuda()), (x.t(), x.cuda().t()), (x[1:, :150], x.cuda()[1:, :150])):
        cpu, cuda = fmt.encode(view, seed=5), fmt.encode(other, seed=5)
        for part, value in cpu.items():
            assert torch.equal(bits(cuda[part]), bits(value)), part
        for target in (torch.float32, torch.bfloat16):
            assert torch.equal(bits(fmt.decode(cuda, target)), bits(fmt.decode(cpu, target)))


@pytest.mark.parametrize("name", recipes.names())
def test_a_linear_on_cuda_multiplies_what_its_formats_decode_to(name) -> None:
    recipe = recipes.load(name)
    if name == "fp8-delayed":  # a format alone knows no amax, and encodes under a scale of 1
        recipe = recipes.DelayedScaling(first_scale_from_amax=False)
    module = nn.Linear(256, 192, device="cuda", dtype=torch.bfloat16)
    x, dy = torch.randn(128, 256, device="cuda").bfloat16(), torch.randn(128, 192, device="cuda").bfloat16()
    duotone.convert(module, recipe)
    seed, weight = module.duotone_seed.clone(), module.weight.detach()
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.backward(dy)

    def planes(index: int, t: Tensor) -> tuple[Tensor, Tensor]:
        results = [recipe(QuantizerRole("linear", each, "")) for each in TENSOR_TYPES]
        drawn = sum(each.is_stochastic for each in results[:index])  # the seeds that earlier tensors took
        row, col = results[index].encode(t, ctx=QuantizeContext(seed=seed + drawn))
        return row.dequantize(torch.float32).double(), col.dequantize(torch.float32).double()

    (xr, xc), (wr, wc), (gr, gc) = (
        planes(0, x),
        planes(1, weight),
        planes(2, dy),
    )
    for result, a, b, extra in (
        (y, xr, wr.t(), module.bias),
        (leaf.grad, gr, wc.t(), None),
        (module.weight.grad, gc.t().t(), xc.t(), None),
    ):
        exact = a @ b + (0 if extra is None else extra.double())
        assert (result.double() - exact).abs().max() <= 2.0**-7 * (a.abs() @ b.abs()).max()
