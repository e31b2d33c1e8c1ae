"""Models of others to low precision in place, back again, and the table of what will run."""

from duotone.conversion.converting import convert as convert
from duotone.conversion.converting import revert as revert
from duotone.conversion.model_plan import PlanRow as PlanRow
from duotone.conversion.model_plan import plan as plan
from duotone.conversion.naming import name_modules as name_modules
from duotone.conversion.parameters import convert_parameters as convert_parameters
