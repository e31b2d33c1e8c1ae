"""The report: one HTML page, complete in itself, about what a comparison of recipes did."""

from duotone_lab.report.page import render, write_report

__all__ = ["render", "write_report"]
