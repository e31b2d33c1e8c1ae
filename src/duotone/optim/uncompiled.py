"""Steps of AdamW that write masters, which torch.compile leaves uncompiled.

This module is imported only if something is compiled: to create the function imports all of Dynamo.
"""

import torch

from duotone.optim.adamw import AdamW

step_uncompiled = torch.compiler.disable(
    AdamW._step,
    reason="steps of duotone.optim.AdamW with masters run outside of graphs: compile without fullgraph",
)
