"""Two ranks save in the background, and the second is killed while it writes. The first is told."""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import checks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard

import duotone
from duotone.dispatch import stages
from duotone.distributed import async_save, save


def network() -> nn.Module:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    return duotone.convert_parameters(duotone.convert(m, "mxfp8", rules=()), "mxfp8")


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(sys.argv[3])
    stages.COMPILE_FROM = 1 << 30
    checks.start(folder, 2, rank, timedelta(seconds=30))
    torch.set_default_device(checks.DEVICE)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    m = fully_shard(network())
    save(folder / "step-1", m)
    die = mock.patch.object(FileSystemWriter, "write_data", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if rank == 1:
        die.start()
    try:
        async_save(folder / "step-2", m, group=group).result()
    except Exception as error:
        print(json.dumps({"name": "told", "failures": [str(error)]}), flush=True)
    os._exit(0)  # the group cannot end without the other rank
