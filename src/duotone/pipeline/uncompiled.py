"""Calls with DTensors, which torch.compile runs as they are.

This module is imported only if something is compiled: making the function imports all of Dynamo.
"""

from functools import partial

import torch

from duotone.pipeline.op import run

run_uncompiled = torch.compiler.disable(
    partial(run, may_trace=False),
    reason="Duotone runs DTensors outside of graphs: compile without fullgraph",
)
