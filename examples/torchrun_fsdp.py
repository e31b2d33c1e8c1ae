"""FSDP2 in a training loop of your own: planes travel, and a run that lost a rank goes on from its newest checkpoint.

torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/torchrun_fsdp.py checkpoints
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import duotone
from duotone.distributed import latest, load, save
from duotone_lab.memory.wire import Wire

STEPS, EVERY = 20, 5


def train(folder: Path, device: str) -> None:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)  # the same weights on all ranks
    blocks = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(2)]
    model = nn.Sequential(*blocks).to(device)
    duotone.convert(model, "mxfp8")
    duotone.gather_quantized(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*model, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # fp32 shards are the masters

    newest = latest(folder)
    first = 0 if newest is None else int(load(newest, model, optimizer)["step"])
    torch.manual_seed(1 + dist.get_rank())  # batches of its own on each rank
    data, wire, loss = torch.randn(64, 256, device=device), Wire(), torch.zeros(())
    for step in range(first + 1, STEPS + 1):
        with wire:
            loss = nn.functional.mse_loss(model(data).float(), data)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            save(folder / f"step-{step:08d}", model, optimizer, {"step": torch.tensor(step)})
    if dist.get_rank() == 0:
        print(f"steps {first + 1} to {STEPS}, loss {loss.item():.3f}")
        print(f"{wire.gathered / 2**20:.2f} MiB were gathered, {wire.reduced / 2**20:.2f} MiB reduced")


if __name__ == "__main__":
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    train(Path(sys.argv[1]), kind)
    dist.barrier()
    dist.destroy_process_group()
