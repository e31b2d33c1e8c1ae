"""The plan of a linear and the one forward and backward that follow it."""

from duotone.linear.core import LinearStage
from duotone.linear.gemm_plan import GemmPlan
from duotone.linear.layout import Layout
from duotone.linear.plan import LinearPlan
from duotone.linear.plan_builder import build_plan
from duotone.linear.plan_request import PlanRequest

__all__ = ["GemmPlan", "Layout", "LinearPlan", "LinearStage", "PlanRequest", "build_plan"]
