"""Models of others to low precision in place, back again, and the table of what will run."""

from duotone.conversion.converting import convert, revert
from duotone.conversion.model_plan import PlanRow, plan
from duotone.conversion.naming import name_modules
from duotone.conversion.parameters import convert_parameters

__all__ = ["PlanRow", "convert", "convert_parameters", "name_modules", "plan", "revert"]
