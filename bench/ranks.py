"""How fast do ranks train, how much do they hold and send? FSDP2, tensor parallelism and experts, bf16 and converted.

PYTHONPATH=src torchrun --nproc-per-node 2 -m bench.ranks --shape 4096x4096x14336x8 --recipe fp8-current

TOKENS of each rank x WIDTH x HIDDEN x LAYERS. `fsdp` is a Llama-like model whose weights travel in bf16, are encoded
for a gather, or are quantized parameters. `tp` cuts MLPs, with sequence parallelism, over all ranks. `ep` spreads
mixtures of 8 experts, of which a token takes 2; it stays eager, and other blocks are compiled. The first line of each
is its baseline in bf16.

`gathered_mib` is what all gathers of a step bring, `one_gather_mib` the gather that occurs most: that of the linears
of a block, without embedding and head. Shares are of the baseline.
"""

import argparse
import cProfile
import gc
import itertools
import json
import os
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import duotone
from bench.subjects import layer
from bench.subjects.train import HEAD_WIDTH, LEARNING_RATE, Decoder, compile_between, compile_blocks
from duotone import recipes
from duotone_lab.memory.wire import Wire
from duotone_lab.training.presets import ModelConfig

FORMS = ("plain", "gathered", "quantized", "masterless")
"""Weights that travel in bf16, that each rank encodes for a gather, and that are quantized parameters: with moments and
masters in fp32, or with first moments in FP8 and no masters."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=("fsdp", "tp", "ep"), default=["fsdp"])
    parser.add_argument("--shape", default="4096x4096x14336x8")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--recipe", action="append", help="a recipe by name, several times; fp8-current by default")
    parser.add_argument("--form", action="append", choices=FORMS, help="several times; all by default")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--prefetch", type=int, default=0, help="blocks whose weights `fsdp` gathers ahead in forward")
    parser.add_argument("--eager", action="store_true", help="also leave the linears eager, and compile the rest")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print the functions in which the host of rank 0 is")
    parser.add_argument("--out", help="append the records to this file")
    return parser.parse_args()


def model(options: argparse.Namespace, device: torch.device) -> Decoder:
    _, dim, hidden, layers = map(int, options.shape.split("x"))
    config = ModelConfig(
        layers=layers, dim=dim, heads=max(1, dim // HEAD_WIDTH), hidden=hidden, context=options.sequence, tied=False
    )
    torch.manual_seed(0)
    with torch.device(device):
        decoder = Decoder(config, options.vocabulary).to(layer.DTYPE)
    for parameter in decoder.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return decoder


def converted(m: Decoder, recipe: str, form: str) -> Decoder:
    """The linears of the blocks under a recipe; the head stays."""
    duotone.convert(m, recipes.load(recipe))
    if form in ("quantized", "masterless"):
        duotone.convert_parameters(m, recipes.load(recipe))
    return duotone.gather_quantized(m) if form == "gathered" else m  # type: ignore[return-value]


def shard(m: Decoder, prefetch: int) -> Decoder:
    blocks: Any = [fully_shard(b, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)) for b in m.layers]
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + prefetch])
    return fully_shard(m, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))  # type: ignore[return-value]


def fsdp_step(m: Decoder, form: str, options: argparse.Namespace, device: torch.device) -> Callable[[], object]:
    """A step of the model, with its optimizer."""
    m = shard(m, options.prefetch)
    count = int(options.shape.split("x")[0])
    sequence = min(options.sequence, count)
    tokens = torch.randint(options.vocabulary, (count // sequence, sequence + 1), device=device)
    fused = {"fused": True} if options.optimizer == "adamw" else {"foreach": True}
    optimizer: torch.optim.Optimizer
    if options.optimizer == "adamw" and form in ("quantized", "masterless"):
        state = {"master_dtype": None, "moment_dtype": torch.float8_e4m3fn} if form == "masterless" else {}
        optimizer = duotone.optim.AdamW(m.parameters(), lr=LEARNING_RATE, **state)
    else:
        optimizer = OPTIMIZERS[options.optimizer](m.parameters(), lr=LEARNING_RATE, **fused)

    def step() -> None:
        m(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Residual(nn.Module):
    """x + body(norm(x)) over tokens (T, width)."""

    def __init__(self, width: int, body: nn.Module) -> None:
        super().__init__()
        self.norm, self.body = nn.RMSNorm(width), body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


class MLP(nn.Module):
    """Two linears and a GELU, of torch if there is no recipe. Each rank has its part of both, and of the tokens."""

    def __init__(self, width: int, hidden: int, recipe: str) -> None:
        super().__init__()
        pair: Any = (nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False))
        if recipe:
            how = {"bias": False, "tp_group": dist.group.WORLD, "sequence_parallel": True, "recipe": recipe}
            pair = (
                duotone.Linear(width, hidden, parallel_mode="column", **how),
                duotone.Linear(hidden, width, parallel_mode="row", **how),
            )
        self.up, self.down = pair

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def layers_step(what: str, recipe: str, compiles: bool, options: argparse.Namespace) -> Callable[[], object]:
    """A forward and a backward of LAYERS blocks of one kind."""
    tokens, width, hidden, count = map(int, options.shape.split("x"))
    torch.manual_seed(0)
    torch.set_default_dtype(layer.DTYPE)
    if what == "tp":
        blocks = [Residual(width, MLP(width, hidden, recipe)) for _ in range(count)]
    else:
        how = {"top_k": 2, "ep_group": dist.group.WORLD, "recipe": recipe or None}
        blocks = [Residual(width, duotone.MoE(width, hidden, 8, **how)) for _ in range(count)]
    if what == "tp" and not recipe:
        mesh = init_device_mesh(blocks[0].norm.weight.device.type, (dist.get_world_size(),))
        styles = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
        for block in blocks:
            parallelize_module(block.body, mesh, styles)
    torch.set_default_dtype(torch.float32)
    called = [layer.compile_module(block) if compiles else block for block in blocks]
    x = torch.randn(tokens, width, dtype=layer.DTYPE, requires_grad=True)
    leaves = [x, *(parameter for block in blocks for parameter in block.parameters())]

    def step() -> None:
        y = x
        for block in called:
            y = block(y)
        y.backward(x.detach())
        for leaf in leaves:
            leaf.grad = None

    return step


def measure(step: Callable[[], object], options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    for _ in range(options.warmups):
        step()
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(options.steps):
        step()
    host = time.perf_counter() - start
    wait()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    rate = dist.get_world_size() * int(options.shape.split("x")[0]) * options.steps / seconds
    if options.profile:
        profile(step)
    with Wire() as wire:  # last, because a graph that runs in a mode is traced anew
        step()
    wait()
    sent = {f"{what}_mib": getattr(wire, what) / layer.MIB for what in ("gathered", "exchanged", "reduced")}
    sent["one_gather_mib"] = statistics.mode(wire.gathers or [0]) / layer.MIB
    per_step = {"ms": 1e3 * seconds / options.steps, "host_ms": 1e3 * host / options.steps}
    return {"tokens_per_s": round(rate), **per_step, "peak_gib": peak, **sent}


def profile(step: Callable[[], object]) -> None:
    """Print where the host is in a step: the functions with the most time of their own, in us."""
    with cProfile.Profile() as calls:
        step()
    if dist.get_rank() == 0:
        stats: Any = pstats.Stats(calls)
        print(f"{stats.total_calls} calls")
        for (file, line, name), (_, count, internal, total, _) in sorted(
            stats.stats.items(), key=lambda one: -one[1][2]
        )[:45]:
            print(f"{internal * 1e6:8.0f} {total * 1e6:8.0f} {count:6d} {'/'.join(file.split('/')[-2:])}:{line} {name}")


Candidate = tuple[str, Callable[[], Callable[[], object]]]


def candidates(options: argparse.Namespace, device: torch.device) -> Iterator[Candidate]:
    """What runs, by name, and what builds its step."""
    names = options.recipe or ["fp8-current"]
    for what in options.what:
        if what == "fsdp":
            yield from of_fsdp(options, device, names)
            continue
        for recipe, compiles in itertools.product(("", *names), (True, False)):
            if compiles == (what == "tp") or options.eager:
                name = f"{what}, {recipe or 'bf16'}{', compiled' if compiles else ''}"
                yield name, lambda args=(what, recipe, compiles): layers_step(*args, options)


def of_fsdp(options: argparse.Namespace, device: torch.device, names: list[str]) -> Iterator[Candidate]:
    def step(build: Callable[[], Decoder], form: str = "") -> Callable[[], object]:
        return fsdp_step(build(), form, options, device)

    yield "fsdp, bf16, compiled", lambda: step(lambda: compile_blocks(model(options, device)))
    for recipe in names:
        for form in options.form or FORMS:

            def build(recipe: str = recipe, form: str = form) -> Decoder:
                return converted(model(options, device), recipe, form)

            def compiled(build: Callable[[], Decoder] = build) -> Decoder:
                return compile_blocks(build())

            yield f"fsdp, {recipe}, {form}, compiled", lambda build=compiled, form=form: step(build, form)
            if options.eager:

                def between(build: Callable[[], Decoder] = build) -> Decoder:
                    return compile_between(build())

                yield f"fsdp, {recipe}, {form}, the rest compiled", lambda build=between, form=form: step(build, form)


def main() -> None:
    options = parse()
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    name = torch.cuda.get_device_name() if on_cuda else "cpu"
    base: dict[str, dict[str, Any]] = {}
    """Of each kind, the first candidate."""
    for what, build in candidates(options, device):
        torch._dynamo.reset()
        began = time.perf_counter()
        with torch.device(device):
            step = build()
        row = {"what": what, "ranks": dist.get_world_size(), "shape": options.shape, "optimizer": options.optimizer}
        row["prefetch"] = options.prefetch
        row |= {"device": name, "torch": torch.__version__} | measure(step, options, device)
        first = base.setdefault(what.split(",")[0], row)
        shares = {f"{key}_share": row[f"{key}_mib"] / (first[f"{key}_mib"] or 1) for key in ("gathered", "one_gather")}
        row |= {"ratio": row["tokens_per_s"] / first["tokens_per_s"], "seconds": time.perf_counter() - began, **shares}
        if dist.get_rank() == 0:
            line = json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
            print(line, flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    file.write(line + "\n")
        del step
        gc.collect()  # frees views that hold their base in C++
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
