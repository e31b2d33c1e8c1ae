"""Calls with DTensors, which torch.compile leaves uncompiled.

This module is imported only if something is compiled: to create the function imports all of Dynamo.
"""

from functools import partial

import torch

from duotone.pipeline.op import run

run_uncompiled = torch.compiler.disable(
    partial(run, may_trace=False),
    reason="Duotone runs DTensors outside of graphs: compile without fullgraph",
)
