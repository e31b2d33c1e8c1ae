"""Calls that torch.compile leaves uncompiled. Each message says why, and what a user does.

This module is imported only if something is compiled: to create the functions imports all of Dynamo.
"""

import operator

import torch

call_with_dtensors = torch.compiler.disable(
    operator.call, reason="Duotone runs DTensors outside of graphs: compile without fullgraph"
)
call_with_masters = torch.compiler.disable(
    operator.call,
    reason="steps of duotone.optim.AdamW with masters run outside of graphs: compile without fullgraph",
)
