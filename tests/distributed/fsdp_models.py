"""The model of the FSDP2 workers."""

import torch
from torch import nn

import duotone
from duotone.recipes import Recipe, Rule, RuleRecipe

HYBRID = RuleRecipe(rules=(Rule(fprop="mxfp8_e4m3", dgrad="fp8_e4m3_tensor", wgrad="mxfp8_e4m3"),))


def model(recipe: Recipe, *, is_quantized: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    result = nn.Sequential(nn.Linear(128, 256, bias=False), nn.ReLU(), nn.Linear(256, 256)).bfloat16()
    with torch.no_grad():
        for layer in (result[0], result[2]):
            layer.weight[:128] *= 4  # the shards' own amaxes differ
    duotone.convert(result, recipe)
    if is_quantized:
        duotone.convert_parameters(result, recipe)
    return result
