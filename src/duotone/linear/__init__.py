"""The plan of a linear and the one forward and backward that follow it."""

from duotone.linear.core import LinearStage as LinearStage
from duotone.linear.layout import Layout as Layout
from duotone.linear.plan import GemmPlan as GemmPlan
from duotone.linear.plan import LinearPlan as LinearPlan
from duotone.linear.plan import Setting as Setting
from duotone.linear.plan import build_plan as build_plan
