"""Calls that keep tensors from one to the next, which torch.compile runs as they are.

A module of its own, imported where something is compiled: making the function imports all of Dynamo.
"""

import torch

from duotone.ops.op import run_ops

REASON = (
    "is_first_microbatch, fuse_wgrad_accumulation and delay_wgrad_compute keep tensors between calls: leave them out, "
    "or compile without fullgraph"
)
run_uncompiled = torch.compiler.disable(run_ops, reason=REASON)
