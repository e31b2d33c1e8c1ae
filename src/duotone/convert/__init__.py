"""Models of others to low precision in place, back again, and the table of what will run."""

from duotone.convert.converting import convert as convert
from duotone.convert.converting import revert as revert
from duotone.convert.naming import name_modules as name_modules
from duotone.convert.parameters import convert_parameters as convert_parameters
from duotone.convert.plan import PlanRow as PlanRow
from duotone.convert.plan import plan as plan
