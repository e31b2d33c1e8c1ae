"""`uses` reads from a script what becomes of its calls; each verdict is what happens when the call runs."""

import textwrap
from pathlib import Path

import pytest

from duotone.compat.te_script import Use, uses
from duotone.compat.transformer_engine.names import MODULES, NATIVE
from duotone.errors import UserError

HEAD = (
    "import torch\nimport transformer_engine.pytorch as te\nfrom transformer_engine.common import recipe\nflag = True\n"
)
CALLS = {
    "te.Linear(32, 16)": "runs",
    "te.Linear(32, 16, atomic_gemm=True)": "refused",
    "te.Linear(32, 16, atomic_gemm=False)": "runs",
    "te.Linear(32, 16, atomic_gemm=flag)": "depends",
    "te.Linear(32, 16, ub_overlap_ag=False, ub_name='qkv')": "runs",
    "te.Linear(32, 16, **{'atomic_gemm': True})": "depends",
    "te.TransformerLayer(32, 64, 4, seq_length=8, micro_batch_size=2)": "runs",
    "te.DotProductAttention(2, 16, softmax_type='learnable')": "refused",
    "te.fp8_autocast(enabled=True)": "runs",
    "te.moe_permute(1, 2)": "refused",
    "recipe.DelayedScaling(interval=1, amax_history_len=4)": "runs",
    "recipe.DelayedScaling(interval=16)": "refused",
    "recipe.Float8BlockScaling(x_block_scaling_dim=2)": "refused",
    "recipe.NVFP4BlockScaling(disable_rht=True)": "runs",
    "te.optimizers.FusedAdam([torch.ones(1, requires_grad=True)], lr=0.1)": "runs",
    "te.optimizers.FusedAdam([torch.ones(1, requires_grad=True)], capturable=True)": "runs",
    "te.optimizers.FusedSGD([torch.ones(1, requires_grad=True)], master_weights=True)": "refused",
    "te.get_cpu_offload_context(enabled=False)": "runs",
    "te.fp8.check_fp8_support()": "runs",
    "recipe.NVFP4BlockScaling(fp4_format=recipe.Format.E2M1)": "runs",
    "te.Nothing()": "refused",
    "te.checkpoint(te.Linear(8, 8), torch.eye(8).requires_grad_(), distribute_saved_activations=True)": "refused",
    "te.checkpoint(te.Linear(8, 8), torch.eye(8).requires_grad_(), distribute_saved_activations=False)": "runs",
    "te.get_cpu_offload_context(True, 1, 2, offload_weights=True)": "refused",
    "te.make_graphed_callables(te.Linear(8, 8), (torch.ones(1, 8),), fp8_weight_caching=True)": "refused",
    "te.make_graphed_callables(te.Linear(8, 8), (torch.ones(1, 8),), fp8_enabled=False)": "runs",
    "te.TransformerLayer(64, 128, 4, tp_size=2)": "refused",
    "te.TransformerLayer(64, 128, 4, tp_size=1)": "runs",
    "te.Linear(64, 64, parallel_mode='column', tp_size=2)": "runs",
    "te.TransformerLayer(64, 128, 4, hidden_droput=0.0)": "depends",
    "te.DotProductAttention(2, 16, tp_group=None, get_rng_state_tracker=None, attention_type='self')": "runs",
    "te.LayerNorm(hidden_size=8, sequence_parallel=True)": "runs",
    "te.get_cpu_offload_context(True, 1, 2, True, True)": "refused",
    "te.get_cpu_offload_context(*(True, 1, 2))": "runs",
    "te.RotaryPositionEmbedding(16, 0.5)": "runs",
    "te.RotaryPositionEmbedding(16, 1.0, 2)": "refused",
    "te.RotaryPositionEmbedding(16, interleaved=True)": "refused",
    "Layer = te.Linear\nLayer(8, 8, tp_size=2)": "refused",
    "Layer = te.Linear\nLayer(8, 8, tp_size=1)": "runs",
    "class Mine(te.Linear): ...\nMine(8, 8, tp_size=2)": "refused",
    "class Mine(te.Linear):\n def __init__(self):\n  super().__init__(8, 8, tp_size=2)\nMine()": "refused",
    "class Mine(te.Linear):\n def __init__(self, tp_size):\n  super().__init__(8, 8)\nMine(tp_size=2)": "runs",
    "class Mine(te.Linear):\n def __init__(self):\n  te.Linear.__init__(self, 8, 8, tp_size=2)\nMine()": "refused",
    "import functools\nfunctools.partial(te.Linear, 8, 8, tp_size=2)()": "refused",
    "from functools import partial\nlayer = partial(te.Linear, 8, 8)\nlayer(tp_size=2)": "refused",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_verdict_is_what_happens(te, call: str) -> None:
    verdict = CALLS[call]
    assert {use.after_install for use in uses(HEAD + call)} - {"runs"} == {verdict} - {"runs"}
    if verdict == "runs":
        exec(HEAD + call, {})
    else:
        with pytest.raises((UserError, AttributeError)):
            exec(HEAD + call, {})


SCRIPT = """
import transformer_engine.pytorch as engine
from transformer_engine.pytorch import LayerNormMLP as MLP
from transformer_engine.common.recipe import Format, DelayedScaling
import transformer_engine_torch as tex
from transformer_engine.pytorch import *

mlp = MLP(64, 128)
with engine.fp8_autocast(fp8_recipe=DelayedScaling(fp8_format=Format.E4M3)):
    y = mlp(inp=x)
print(other.Linear(1), tex.gemm(y))
RMSNorm(8)
"""


def test_names_are_followed_through_imports() -> None:
    rows = {(use.line, use.call): use for use in uses(SCRIPT)}
    assert [line for line, _ in rows] == [6, 8, 9, 9, 9, 10, 11, 12]
    assert rows[8, "LayerNormMLP"] == Use(8, "LayerNormMLP", "runs", NATIVE["LayerNormMLP"])
    assert rows[10, "mlp(inp=)"].write.startswith("name it x")
    assert rows[11, "gemm"].after_install == "refused" and "Quantizer" in rows[11, "gemm"].write
    assert rows[6, "from transformer_engine.pytorch import *"].after_install == "runs"
    assert rows[12, "RMSNorm"].after_install == "runs"


def test_literal_names_are_followed_through_getattr_and_import_module() -> None:
    script = """
    import importlib
    import transformer_engine.pytorch as te
    kind = getattr(te, "Linear")
    other = importlib.import_module("transformer_engine.pytorch")
    layer = other.Linear(8, 8, atomic_gemm=True)
    other.onnx_export(True)
    getattr(te, dynamic)
    """
    rows = [(use.line, use.call, use.after_install) for use in uses(textwrap.dedent(script))]
    assert rows == [
        (4, "Linear", "runs"),
        (6, "Linear", "runs"),
        (6, "Linear(atomic_gemm=True)", "refused"),
        (7, "onnx_export", "refused"),
    ]


def test_a_linear_of_ops_has_advice_of_its_own() -> None:
    """te.ops.Linear starts uniform, as torch does, and te.Linear normal."""
    rows = uses("import transformer_engine.pytorch as te\nte.Linear(8, 8)\nte.ops.Linear(8, 8)\n")
    assert [use.write for use in rows] == [
        "duotone.Linear, with init_method= for normal weights",
        "duotone.ops.Linear, with zeros in its bias",
    ]


def test_scripts_without_transformer_engine_have_no_rows() -> None:
    assert uses("import torch\nfrom . import transformer_engine\ntorch.nn.Linear(1, 2)(inp)") == []
    assert [use.call for use in uses("import transformer_engine.pytorch as te\nclass Mine(te.Linear): ...")] == [
        "Linear"
    ]
    with pytest.raises(UserError, match="no Python"):
        uses("def", "x.py")


def test_own_scripts_run_and_so_say_their_rows() -> None:
    for path in (Path(__file__).parent / "te_scripts").glob("*.py"):
        rows = uses(path.read_text())
        assert rows and {use.after_install for use in rows} == {"runs"}


def test_native_spellings_are_of_names_that_there_are() -> None:
    places = {place for names in MODULES.values() for place in names.values()}
    assert set(NATIVE) <= set().union(*MODULES.values()) | places
