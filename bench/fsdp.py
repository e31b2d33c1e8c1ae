"""How fast does FSDP2 train, how much does it hold and send, with weights in bf16, gathered as planes, or quantized?

PYTHONPATH=src torchrun --nproc-per-node 2 -m bench.fsdp --shape 4096x4096x14336x8 --recipe fp8-current

TOKENS of each rank x WIDTH x HIDDEN of its SwiGLU x LAYERS. Every candidate is a Llama-like model with compiled blocks.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import duotone
from bench.subjects import layer
from bench.subjects.train import HEAD_WIDTH, LEARNING_RATE, Decoder, compile_between, compile_blocks
from duotone import recipes
from duotone.lab.presets import ModelConfig

FORMS = ("plain", "gathered", "quantized")
"""Weights that travel in bf16, that each rank encodes for a gather, and that are quantized parameters."""

GATHERS, REDUCTIONS = (
    ("all_gather_into_tensor", "all_gather_single"),
    ("reduce_scatter_tensor", "reduce_scatter_single"),
)
"""Collectives of `torch.distributed` as FSDP2 calls them, under the names of several releases."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x4096x14336x8")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--recipe", action="append", help="a recipe by name, several times; fp8-current by default")
    parser.add_argument("--form", action="append", choices=FORMS, help="several times; all by default")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--eager", action="store_true", help="also leave the linears eager, and compile the rest")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", help="append the records to this file")
    return parser.parse_args()


def model(options: argparse.Namespace, device: torch.device) -> Decoder:
    _, dim, hidden, layers = map(int, options.shape.split("x"))
    config = ModelConfig(
        layers=layers, dim=dim, heads=max(1, dim // HEAD_WIDTH), hidden=hidden, context=options.sequence, tied=False
    )
    torch.manual_seed(0)
    with torch.device(device):
        made = Decoder(config, options.vocabulary).to(layer.DTYPE)
    for parameter in made.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return made


def converted(m: Decoder, recipe: str, form: str) -> Decoder:
    """The linears of the blocks under a recipe; the head stays."""
    duotone.convert(m, recipes.load(recipe))
    if form == "quantized":
        duotone.convert_parameters(m, recipes.load(recipe))
    return duotone.gather_quantized(m) if form == "gathered" else m  # type: ignore[return-value]


def shard(m: Decoder) -> Decoder:
    for block in m.layers:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return fully_shard(m, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))  # type: ignore[return-value]


@contextmanager
def traffic() -> Iterator[dict[str, float]]:
    """The MiB that this rank gives to gathers of parameters, and to reductions of gradients."""
    sent = {"gathered_mib": 0.0, "reduced_mib": 0.0}
    real = {name: getattr(dist, name) for name in (*GATHERS, *REDUCTIONS) if hasattr(dist, name)}

    def counting(name: str, key: str) -> Callable[..., Any]:
        def run(*tensors: torch.Tensor, **options: Any) -> Any:
            sent_tensor: Any = tensors[1] if len(tensors) > 1 else options.get("input_tensor", options.get("input"))
            sent[key] += sent_tensor.nbytes / layer.MIB
            return real[name](*tensors, **options)

        return run

    for name in real:
        setattr(dist, name, counting(name, "gathered_mib" if name in GATHERS else "reduced_mib"))
    try:
        yield sent
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def measure(m: Decoder, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    count = int(options.shape.split("x")[0])
    sequence = min(options.sequence, count)
    tokens = torch.randint(options.vocabulary, (count // sequence, sequence + 1), device=device)
    fused = {"fused": True} if options.optimizer == "adamw" and not has_planes(m) else {"foreach": True}
    optimizer = OPTIMIZERS[options.optimizer](m.parameters(), lr=LEARNING_RATE, **fused)

    def step() -> None:
        m(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    for _ in range(3):
        step()
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with traffic() as sent:
        step()
    wait()
    start = time.perf_counter()
    for _ in range(options.steps):
        step()
    host = time.perf_counter() - start
    wait()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    rate = dist.get_world_size() * tokens[:, 1:].numel() * options.steps / seconds
    per_step = {"ms": 1e3 * seconds / options.steps, "host_ms": 1e3 * host / options.steps}
    return {"tokens_per_s": round(rate), **per_step, "peak_gib": peak, **sent}


def has_planes(m: nn.Module) -> bool:
    return any(isinstance(p.to_local(), duotone.QuantizedTensor) for p in m.parameters())  # type: ignore[operator]


def candidates(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Callable[[], Decoder]]]:
    yield "torch bf16, compiled", lambda: compile_blocks(model(options, device))
    for recipe in options.recipe or ["fp8-current"]:
        for form in options.form or FORMS:

            def build(recipe: str = recipe, form: str = form) -> Decoder:
                return converted(model(options, device), recipe, form)

            yield f"{recipe}, {form}, compiled", lambda build=build: compile_blocks(build())
            if options.eager:
                yield f"{recipe}, {form}, the rest compiled", lambda build=build: compile_between(build())


def main() -> None:
    options = parse()
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    name = torch.cuda.get_device_name() if on_cuda else "cpu"
    base = 0.0
    for what, build in candidates(options, device):
        torch._dynamo.reset()
        began = time.perf_counter()
        m = shard(build())
        row = {"what": what, "ranks": dist.get_world_size(), "shape": options.shape, "optimizer": options.optimizer}
        row |= {"device": name, "torch": torch.__version__} | measure(m, options, device)
        base = base or row["tokens_per_s"]
        row |= {"ratio": row["tokens_per_s"] / base, "seconds": time.perf_counter() - began}
        if dist.get_rank() == 0:
            line = json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
            print(line, flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    file.write(line + "\n")
        del m
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
