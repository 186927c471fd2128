"""Weight updates of gpt-oss in vLLM 0.30.

During an update vLLM replaces parameters by placeholders and gathers what their loaders are given. Its gpt-oss writes whole
stacks of experts, and the sinks of attention, past those loaders into the placeholders: experts and sinks stay as they were,
without an error. Experts that come one by one, and sinks that are given to the loader, arrive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import wraps
from typing import Any

from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.gpt_oss import GptOssModel

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.((?:w13|w2)_(?:weight|bias))")
"""vLLM's names of a layer's experts, all in one tensor."""


def load_through_loaders() -> None:
    """From now on updates of gpt-oss reach every parameter. A model that is being started loads as before."""
    load = GptOssModel.load_weights

    @wraps(load)
    def load_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        in_update = any(parameter.is_meta for parameter in model.parameters())
        loaded: set[str] = load(model, _as_loaders_take_them(model, weights) if in_update else weights)
        return loaded

    GptOssModel.load_weights = load_weights


def _as_loaders_take_them(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Single experts in place of stacks; sinks are loaded here."""
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        experts = _EXPERTS.fullmatch(name)
        if experts is not None:
            for number, expert in enumerate(tensor):
                yield f"{experts[1]}.{number}.{experts[2]}", expert
        elif name.endswith(".attn.sinks"):
            sinks, heads = parameters[name], len(parameters[name])
            sinks.weight_loader(sinks, tensor.narrow(0, heads * get_tensor_model_parallel_rank(), heads))
        else:
            yield name, tensor
