"""Which format each tensor gets, as values: built-in recipes, rules, functions, and files."""

from duotone.recipes.builtin import Float8BlockScaling as Float8BlockScaling
from duotone.recipes.builtin import Float8CurrentScaling as Float8CurrentScaling
from duotone.recipes.builtin import Float8RowwiseScaling as Float8RowwiseScaling
from duotone.recipes.builtin import HighPrecision as HighPrecision
from duotone.recipes.builtin import MXFP8BlockScaling as MXFP8BlockScaling
from duotone.recipes.builtin import NVFP4BlockScaling as NVFP4BlockScaling
from duotone.recipes.custom import CustomRecipe as CustomRecipe
from duotone.recipes.library import from_dict as from_dict
from duotone.recipes.library import load as load
from duotone.recipes.library import names as names
from duotone.recipes.recipe import Recipe as Recipe
from duotone.recipes.roles import QuantizerRole as QuantizerRole
from duotone.recipes.rules import OUTPUT_HEAD as OUTPUT_HEAD
from duotone.recipes.rules import Rule as Rule
from duotone.recipes.rules import RuleRecipe as RuleRecipe
