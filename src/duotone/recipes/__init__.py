"""Which format each tensor gets, as values: built-in recipes, rules, functions, schedules, and files."""

from duotone.recipes.builtin import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    HighPrecision,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    RuleRecipe,
)
from duotone.recipes.custom import CustomRecipe
from duotone.recipes.delayed import DelayedScalingRequest, Format, check_requests
from duotone.recipes.library import from_dict, load, names, schedule_names
from duotone.recipes.recipe import Recipe, RecipeLike, align_size
from duotone.recipes.roles import QuantizerRole, Site
from duotone.recipes.rules import OUTPUT_HEAD, Rule, first_match, unmatched
from duotone.recipes.schedule import Phase, Schedule, any_from_dict, dumps, load_any, load_schedule

__all__ = [
    "OUTPUT_HEAD", "CustomRecipe", "DelayedScaling", "DelayedScalingRequest", "Float8BlockScaling",
    "Float8CurrentScaling", "Float8RowwiseScaling", "Format", "HighPrecision", "MXFP8BlockScaling",
    "NVFP4BlockScaling", "Phase", "QuantizerRole", "Recipe", "RecipeLike", "Rule", "RuleRecipe", "Schedule", "Site",
    "align_size", "any_from_dict", "check_requests", "dumps", "first_match", "from_dict", "load", "load_any",
    "load_schedule", "names", "schedule_names", "unmatched",
]  # fmt: skip
