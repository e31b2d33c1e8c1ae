"""What inductor replaces in graphs: the calls that it leaves, and their results."""

from typing import Any

import pytest
import torch

import duotone
from duotone import recipes
from duotone.pipeline.row_call import RowCall
from later import Later

inductor = Later("torch._inductor.config")


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
def test_a_row_gets_the_pieces_of_a_joined_weight(recipe: str) -> None:
    """A graph that joined them would copy the weight in each step."""
    options = {"bias": False, "parameters_split": ("query", "key"), "params_dtype": torch.bfloat16}
    layer = duotone.Linear(64, 64, recipe=recipes.load(recipe), **options)
    x, seen = torch.randn(32, 64).bfloat16(), list[tuple[str, Any]]()

    def look(graph: torch.fx.Graph) -> None:
        seen.extend((str(node.target), node.args) for node in graph.nodes if node.op == "call_function" and node.users)

    want = layer(x)
    with inductor.patch(post_grad_custom_post_pass=look):
        y = torch.compile(layer, fullgraph=True)(x)
    rows = [args for name, args in seen if "row.default" in name]
    assert [RowCall.of(args[3]).held for args in rows] == [(4, -2, 4, 4)]
    assert not any("cat" in name for name, _ in seen)
    assert torch.equal(y, want)
