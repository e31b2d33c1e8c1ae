"""Calls that keep tensors from one to the next, which torch.compile runs as they are.

This module is imported only if something is compiled: making the function imports all of Dynamo.
"""

from functools import partial

import torch

from duotone.pipeline.op import KEEPS, run

run_uncompiled = torch.compiler.disable(
    partial(run, may_trace=False), reason=f"{KEEPS}: leave them out, or compile without fullgraph"
)
