"""Compilation of layers in tests: graphs that are counted, by a backend that needs no C++ compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl_backend.model import compiled


@contextmanager
def counted_graphs() -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that layers are compiled into in the context, one for each compilation. None is known before."""
    import torch._dynamo
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    before, compiled.BACKEND = compiled.BACKEND, backend
    try:
        # Tests with vLLM, in the same process, may have said otherwise.
        with torch._dynamo.config.patch(disable=False):
            yield graphs
    finally:
        compiled.BACKEND = before


def calls(graph: torch.fx.GraphModule) -> list[str]:
    """Names of the functions that a graph calls, itself or in the functions with a backward pass that it holds."""
    held = [each for each in graph.modules() if isinstance(each, torch.fx.GraphModule)]
    return [str(node.target) for each in held for node in each.graph.nodes if node.op == "call_function"]
