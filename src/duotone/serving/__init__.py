"""Trained models as files that servers read, and back."""

from duotone.serving.exported_weight import ExportReport, ExportRow
from duotone.serving.exporting import export
from duotone.serving.importing import load

__all__ = ["ExportReport", "ExportRow", "export", "load"]
