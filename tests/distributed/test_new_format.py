"""One file adds a format and a quantizer of its user's own, and both do all that the shipped ones do.

Run as a script on each of two ranks it makes the checks below; pytest reports each of them.
"""

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path

import checks
import torch
import torch.distributed as dist
from checks import check, same
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import duotone
from duotone import CustomRecipe, Quantizer, formats, observe
from duotone.formats.elements import Element
from duotone.formats.geometry import Block
from duotone.formats.scaled_format import ScaledFormat
from duotone.formats.scales import E8M0Scale
from duotone.tensor import BOTH, LOCAL, Planes, QuantizeContext, Usage

WORKER = "test_new_format.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures, check) -> None:
    assert not failures(WORKER, check)


E3M4 = Element("e3m4", 3, 4, 3, 15.5, 0x7F)
"""1-3-4 bits; the magnitudes of ml_dtypes.float8_e3m4 up to its largest finite one."""

NEW = ScaledFormat("mx_e3m4_1x64", E3M4, Block(1, 64), E8M0Scale())
LIMIT = 4.0


@dataclass(frozen=True)
class ClippingQuantizer(Quantizer):
    """Clamps to +-`limit` before it encodes."""

    limit: float = LIMIT

    def encode(self, x: Tensor, usage: Usage = BOTH, ctx: QuantizeContext = LOCAL) -> Planes:
        return super().encode(x.clamp(-self.limit, self.limit), usage, ctx)


def factory(role: duotone.QuantizerRole | None) -> Quantizer:
    return ClippingQuantizer(NEW, NEW)


RECIPE = CustomRecipe(qfactory=factory)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    result = nn.Sequential(nn.Linear(128, 128, bias=False), nn.ReLU(), nn.Linear(128, 128)).bfloat16()
    return duotone.convert(result, RECIPE)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return 3 * torch.randn(64, 128).bfloat16(), torch.randn(64, 128).bfloat16()


def grads(m: nn.Module, run=None) -> list[Tensor]:  # type: ignore[no-untyped-def]
    x, dy = batch()
    m.zero_grad()
    y = (run or m)(x.requires_grad_())
    y.backward(dy)
    return [y.detach(), x.grad, *[p.grad.clone() for p in m.parameters()]]


@check
def encodes_and_decodes(folder: Path) -> None:
    import ml_dtypes  # its absence elsewhere stops no other check
    import numpy as np

    x = torch.randn(96, 160)
    x[3, 5], x[7] = 0.0, 2.0**-20
    parts = NEW.encode(x)
    scale = torch.ldexp(torch.ones(()), parts["scale"].int() - 127)
    codes = parts["codes"].cpu().numpy().view(ml_dtypes.float8_e3m4).astype(np.float32)
    blocks = torch.from_numpy(codes).to(x) * scale.repeat_interleave(64, 1)[:, :160]
    same(NEW.decode(parts, torch.float32), blocks, "decode")
    padded = nn.functional.pad(x, (0, 32)).view(96, 3, 64)
    scaled = padded / scale[..., None]
    assert scaled.abs().max() <= 15.5 and (scaled.abs().amax(-1) > 15.5 / 2).all(), "scale is the smallest that fits"
    nearest = torch.from_numpy(scaled.cpu().numpy().astype(ml_dtypes.float8_e3m4).astype(np.float32)).to(x)
    same(NEW.decode(parts, torch.float32), (nearest * scale[..., None]).view(96, 192)[:, :160], "nearest")
    assert duotone.formats.get("mx_e3m4_1x64") is NEW


@check
def multiplies(folder: Path) -> None:
    m = model()
    assert {row.kernel for row in duotone.plan(m)} == {"decode, bf16 product"}
    dy = batch()[1]
    layer = m[2]
    h = torch.relu(torch.randn(64, 128)).bfloat16()
    leaf = h.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    (hr, hc), (wr, wc), (gr, gc) = (
        [plane.dequantize(torch.float64) for plane in ClippingQuantizer(NEW, NEW).encode(t)]
        for t in (h, layer.weight.detach(), dy)
    )
    for result, a, b, extra in (
        (y, hr, wr.t(), layer.bias),
        (leaf.grad, gr, wc.t(), None),
        (layer.weight.grad, gc, hc.t(), None),
    ):
        exact = a @ b + (0 if extra is None else extra.double())
        assert (result.double() - exact).abs().max() <= 2.0**-8 * (a.abs() @ b.abs()).max()  # one bf16 rounding


@check
def is_tapped(folder: Path) -> None:
    store = observe.Tap()
    m = model()
    with duotone.autocast(recipe=observe.with_statistics(RECIPE, store)):
        tapped = grads(m)
    for result, want in zip(tapped, grads(m), strict=True):
        same(result, want)
    rows = store.rows()
    assert len(rows) == 12 and {row["format"] for row in rows} == {"mx_e3m4_1x64"}
    x = batch()[0].double().clamp(-LIMIT, LIMIT)
    clipped = ((batch()[0].double() - x) ** 2).sum() / (batch()[0].double() ** 2).sum()
    row = next(r for r in rows if (r["module"], r["role"], r["plane"]) == ("0", "input", "rowwise"))
    assert row["snr_db"] < -10 * torch.log10(clipped).item(), "the clipping counts as noise"


@check
def saves_and_loads(folder: Path) -> None:
    quantizer = ClippingQuantizer(NEW, NEW)
    t = nn.Parameter(quantizer.quantize(torch.randn(64, 128)))
    path = folder / f"new-{dist.get_rank()}.pt"
    torch.save(t, path)
    for loaded in (torch.load(path, weights_only=True), pickle.loads(pickle.dumps(t)), copy.deepcopy(t)):
        same(loaded.dequantize().detach(), t.dequantize().detach())
        assert loaded.quantizer == quantizer
        with torch.no_grad():
            loaded.copy_(torch.full((64, 128), 100.0))
        same(loaded.dequantize().detach(), torch.full((64, 128), LIMIT))


@check
def shards(folder: Path) -> None:
    sharded = duotone.convert_parameters(model(), RECIPE)
    single = copy.deepcopy(sharded)
    mesh = checks.mesh()
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x, target = batch()
    losses = []
    for m in (sharded, single):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
        for _ in range(3):
            loss = ((m(x) - target).float() ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    for result, want in zip(losses[:3], losses[3:], strict=True):
        same(result, want)
    for parameter, whole in zip(sharded.parameters(), single.parameters(), strict=True):
        piece = whole.chunk(dist.get_world_size())[dist.get_rank()]
        same(parameter._local_tensor.detach().clone().to(torch.float32), piece.detach().to(torch.float32))


@check
def compiles_whole(folder: Path) -> None:
    if dist.get_rank():
        return  # the first rank compiles for both
    eager = model()
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for result, want in zip(grads(compiled, run), grads(eager), strict=True):
        same(result, want)


if __name__ == "__main__":
    formats.register(NEW)
    checks.main()
