"""Models of others to low precision in place, back again, and the table of what will run."""

from duotone.convert.converting import convert as convert
from duotone.convert.converting import revert as revert
from duotone.convert.plan import PlanRow as PlanRow
from duotone.convert.plan import plan as plan
