"""A result as a comparison writes it: five recipes and a noise run, with curves from a seed."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

Run = dict[str, Any]
MODULES = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
ROLES = ("input", "weight", "grad_output")
SIGNAL = {"fp8_e4m3_tensor": 31.0, "fp8_e5m2_tensor": 25.0, "mxfp8_e4m3": 32.0, "nvfp4": 19.5}
GEMMS = {
    "fprop": (("input", "rowwise"), ("weight", "rowwise")),
    "dgrad": (("grad_output", "rowwise"), ("weight", "columnwise")),
    "wgrad": (("grad_output", "columnwise"), ("input", "columnwise")),
}
UNIFORM = {
    "bf16": ("identity", "identity", "identity", "identity"),
    "bf16 (noise)": ("identity", "identity", "identity", "identity"),
    "fp8_current": ("fp8_e4m3_tensor", "fp8_e4m3_tensor", "fp8_e5m2_tensor", "fp8_e4m3_tensor"),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3"),
    "nvfp4": ("nvfp4", "nvfp4", "nvfp4", "nvfp4"),
    "hybrid": ("mxfp8_e4m3", "mxfp8_e4m3", "nvfp4", "nvfp4"),
}
GAPS = {"bf16": 0.0, "bf16 (noise)": 0.05, "fp8_current": 0.21, "mxfp8": 0.04, "nvfp4": 1.12, "hybrid": 0.63}

SLOWDOWN = {"bf16": 1.0, "bf16 (noise)": 1.01, "fp8_current": 1.6, "mxfp8": 1.9, "nvfp4": 3.2, "hybrid": 2.7}


def module_names(layers: int) -> list[str]:
    return [f"layers.{layer}.{name}" for layer in range(layers) for name in MODULES]


def format_of(recipe: str, role: str, plane: str) -> str:
    """Of the four formats of a recipe: forward, weight, gradient, and what the weight is read as in dgrad."""
    forward, weight, gradient, weight_columnwise = UNIFORM[recipe]
    if role == "weight":
        return weight if plane == "rowwise" else weight_columnwise
    return gradient if role == "grad_output" or plane == "columnwise" else forward


def plan_of(recipe: str, layers: int) -> list[dict[str, Any]]:
    rows = []
    for module in [*module_names(layers), "head"]:
        for gemm, (left, right) in GEMMS.items():
            a, b = (format_of(recipe, *side) for side in (left, right))
            reason = "no CPU kernel multiplies these codes; operands are decoded and multiplied in bf16"
            if module == "head":
                a = b = "identity"
                reason = "the output head stays in high precision by default"
            elif a == b == "identity":
                reason = "the recipe asks for no quantization"
            kernel = "bf16" if a == b == "identity" else "emulated-bf16"
            operands = {"module": module, "gemm": gemm, "a": a, "b": b}
            rows.append({**operands, "kernel": kernel, "native": kernel == "bf16", "reason": reason})
    return rows


def statistics_of(recipe: str, layers: int, rng: random.Random) -> list[dict[str, Any]]:
    rows = []
    for module in module_names(layers):
        for role in ROLES:
            for plane in ("rowwise", "columnwise"):
                name = format_of(recipe, role, plane)
                signal = SIGNAL.get(name)
                coarse = name == "nvfp4"
                row = {"module": module, "role": role, "plane": plane, "format": name, "samples": 3}
                row["snr_db"] = signal and signal + rng.gauss(0, 0.8) - 2.5 * (role == "grad_output")
                row["underflow"] = abs(rng.gauss(0.06 if coarse else 0.003, 0.002)) if signal else 0.0
                row["saturation"] = abs(rng.gauss(0, 2e-4)) if signal and rng.random() < 0.4 else 0.0
                row["amax"] = rng.uniform(0.5, 9.0) * (1e-4 if role == "grad_output" else 1.0)
                rows.append(row)
    return rows


def curve(steps: int, gap: float, rng: random.Random, noise: float) -> list[list[float]]:
    points = []
    for step in range(1, steps + 1):
        base = 2.31 + 3.24 * math.exp(-step / 14) + 0.45 * math.exp(-step / 60)
        swing = rng.gauss(0, noise)
        points.append([step, (base + swing) * (1 + gap / 100 * (1 - math.exp(-step / 30)))])
    return points


def run_of(recipe: str, steps: int, layers: int) -> Run:
    rng, gap = random.Random(recipe), GAPS[recipe]
    shared = random.Random(0)
    train = curve(steps, gap, shared, 0.045)
    train = [[step, loss * (1 + rng.gauss(0, 0.0006 if gap else 0.0))] for step, loss in train]
    whole = curve(steps, gap, random.Random(1), 0.008)
    heldout = [point for point in whole if point[0] % max(1, steps // 6) == 0]
    slow = SLOWDOWN[recipe]
    return {
        "name": recipe,
        "recipe": {"name": recipe, "roles": {role: format_of(recipe, role, "rowwise") for role in ROLES}},
        "is_reference": recipe == "bf16",
        "is_noise": recipe == "bf16 (noise)",
        "train_loss": train,
        "heldout_loss": heldout,
        "final_train_loss": train[-1][1],
        "final_heldout_loss": heldout[-1][1],
        "gap_percent": gap,
        "step_ms": 93.1 * slow,
        "tokens_per_second": 2048 / (0.0931 * slow),
        "peak_memory_bytes": int(61.5 * 2**20 * (1.0 + 0.09 * slow)),
        "weight_bytes": int(4.9 * 2**20 * (1.0 if slow < 1.1 else 1.9)),
        "saved_activation_bytes": int(27.5 * 2**20 * (1.0 if slow < 1.1 else 0.72)),
        "plan": plan_of(recipe, layers),
        "statistics": statistics_of(recipe, layers, rng),
        "error": None,
    }


def make_result(steps: int = 120, layers: int = 4) -> dict[str, Any]:
    return {
        "duotone": "0.1.0",
        "created": "2026-11-21T10:00:00+00:00",
        "partial": False,
        "machine": {
            "torch": "2.13.0+cpu",
            "device": "cpu",
            "processor": "AMD Ryzen 7 PRO 7840U",
            "threads": 2,
            "compiled_casts": True,
        },
        "settings": {
            "command": "duotone compare --recipes bf16 fp8_current mxfp8 nvfp4 hybrid --out runs/demo",
            "preset": "demo",
            "model": "d 128, 4 layers, 4 heads, SwiGLU 384, tied head",
            "parameters": 1_283_712,
            "data": "Python's own documentation and standard library",
            "data_bytes": 4_411_221,
            "steps": steps,
            "tokens_per_step": 2048,
            "context": 128,
            "seed": 0,
            "learning_rate": 0.001,
            "noise": {"perturbation": 1e-6},
        },
        "runs": [run_of(recipe, steps, layers) for recipe in UNIFORM],
    }


@pytest.fixture
def result() -> dict[str, Any]:
    return make_result()


@pytest.fixture
def build() -> Callable[..., dict[str, Any]]:
    """`build(steps=, layers=)` makes a result of another size."""
    return make_result


@pytest.fixture
def unstarted() -> Run:
    """A run that was never begun: every list empty, every number missing."""
    lists = ("train_loss", "heldout_loss", "plan", "statistics")
    blank: Run = dict.fromkeys(run_of("nvfp4", 1, 1)) | {name: [] for name in lists}
    return blank | {"name": "late", "recipe": {}, "is_reference": False, "is_noise": False}


def observe_run(run: Run, modules: list[str]) -> None:
    """What the journal of a run tells: step 20 clips, and channel 7 of the last module stands out."""
    sides = [(role, plane) for role in ROLES for plane in ("rowwise", "columnwise")]
    run["spreads"] = [
        {"role": role, "plane": plane, "lowest": -9, "counts": [0, 100, 300, 600], "scales": [0, 0, 50, 950]}
        for role, plane in sides
    ]
    run["drift"] = [
        {"step": step, "role": role, "plane": plane, "snr_db": 20.0, "amax": 8.0, "limit": limit, "clipped": clipped}
        for step, limit, clipped in ((20, 4.0, 0.02), (40, 16.0, 0.0))
        for role, plane in sides
    ]
    channels = {"channels": 64, "largest_channel": 7}
    run["operands"] = [
        {
            **channels,
            "module": module,
            "role": role,
            "disagreement": 0.05 * (at + 1) / len(modules),
            "outliers": 3 * (module == modules[-1] and role == "input"),
            "over_median": 40.0 if module == modules[-1] else 2.0,
        }
        for at, module in enumerate(modules)
        for role in ("input", "weight", "grad_output")
    ]


@pytest.fixture
def observe() -> Callable[[Run, list[str]], None]:
    """`observe(run, modules)` gives a run what its journal tells."""
    return observe_run
