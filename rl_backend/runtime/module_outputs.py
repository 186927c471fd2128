"""Outputs of a model's modules in a forward pass, under their Hugging Face paths."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def module_paths(model: nn.Module, hf_names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Module name in ``model`` -> Hugging Face path, for every submodule that has parameters with Hugging Face names.

    The path is the longest dotted prefix that the names of all its parameters share: ``model.layers.0.self_attn`` for an
    attention block, and also for its one projection of queries, keys and values. Modules without such a prefix (a whole
    model with an ``lm_head``) have no entry.

    Args:
        hf_names: name of a parameter in ``model`` -> its Hugging Face names, several where it is fused out of several.
    """
    parents: dict[str, set[str]] = {}
    for parameter, names in hf_names.items():
        for module in _containers(parameter):
            parents.setdefault(module, set()).update(name.rpartition(".")[0] for name in names)
    existing = dict(model.named_modules())
    paths = {module: _common_prefix(found) for module, found in parents.items() if module in existing}
    return {module: path for module, path in paths.items() if path}


def first_tensor(output: Any) -> Tensor | None:
    """The tensor that a module returned, alone or first in a tuple; None for anything else."""
    if isinstance(output, tuple) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


@contextmanager
def record_outputs(
    model: nn.Module,
    hf_names: Mapping[str, Sequence[str]],
    hidden_size: int,
    *,
    read: Callable[[Any], Tensor | None] = first_tensor,
) -> Generator[dict[str, Tensor]]:
    """Collects the outputs of one forward pass that runs in the context: Hugging Face path -> copy of the output.

    Outputs are as the module gave them, in the order in which modules end; those whose last dimension is not
    ``hidden_size``, or that have no other dimension, are left out. Where modules inside each other share a path, the
    outermost that has such an output counts; of others, the first. Rows are not always tokens: an expert's are what was
    routed to it, so the caller leaves those out.

    Args:
        hf_names: as in :func:`module_paths`.
        read: what a module returned -> its output, or None for nothing to keep.
    """
    outputs: dict[str, Tensor] = {}
    kept: dict[str, str] = {}

    def hook(module: str, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            tensor = read(output)
            if tensor is None or tensor.dim() < 2 or tensor.shape[-1] != hidden_size:
                return
            if path in kept and not _is_within(kept[path], module):
                return
            kept[path] = module
            outputs.pop(path, None)
            outputs[path] = tensor.detach().clone()

        return keep

    modules = dict(model.named_modules())
    hooks = [
        modules[module].register_forward_hook(hook(module, path)) for module, path in module_paths(model, hf_names).items()
    ]
    try:
        yield outputs
    finally:
        for handle in hooks:
            handle.remove()


def _containers(parameter: str) -> Iterable[str]:
    """Names of the modules that hold a parameter, from the model itself (an empty name) inwards."""
    parts = parameter.split(".")[:-1]
    return (".".join(parts[:count]) for count in range(len(parts) + 1))


def _is_within(inner: str, outer: str) -> bool:
    return inner == outer or outer == "" or inner.startswith(outer + ".")


def _common_prefix(paths: Collection[str]) -> str:
    return posixpath.commonpath([path.replace(".", "/") for path in paths]).replace("/", ".") if paths else ""
