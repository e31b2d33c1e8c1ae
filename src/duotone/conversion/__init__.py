"""Converts existing models to low precision in place and back, and shows what will run."""

from duotone.conversion.converting import convert, revert
from duotone.conversion.fusing import fuse
from duotone.conversion.model_plan import Plan, PlanDiff, PlanRow, plan
from duotone.conversion.naming import assign_names
from duotone.conversion.parameters import convert_parameters

__all__ = ["Plan", "PlanDiff", "PlanRow", "assign_names", "convert", "convert_parameters", "fuse", "plan", "revert"]
