"""The plan of a linear and the one forward and backward that follow it."""

from duotone.linear.core import LinearStage
from duotone.linear.plan import GemmPlan, LinearPlan, PlanRequest
from duotone.linear.plan_builder import build_plan
from duotone.sharding.layout import Layout

__all__ = ["GemmPlan", "Layout", "LinearPlan", "LinearStage", "PlanRequest", "build_plan"]
