"""On a machine without CUDA, where the tests of this folder cannot run, their files still import."""

import importlib.util
from pathlib import Path

import pytest
import torch

FILES = sorted(path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run here")
def test_every_file_imports() -> None:
    for path in FILES:
        spec = importlib.util.spec_from_file_location(f"gpu_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run `pytest tests/gpu` on one")
def test_a_device_is_there() -> None:
    """Skipped in the place of all tests of this folder."""
    assert torch.cuda.device_count() > 0
