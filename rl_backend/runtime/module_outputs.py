"""Outputs of a model's modules in a forward pass, under their Hugging Face paths."""

import posixpath
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch.distributed as dist
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
        # From the model itself, with an empty name, inwards.
        for module in accumulate(parameter.split(".")[:-1], lambda outer, name: f"{outer}.{name}".lstrip("."), initial=""):
            parents.setdefault(module, set()).update(name.rpartition(".")[0].replace(".", "/") for name in names)
    existing = dict(model.named_modules())
    paths = {module: posixpath.commonpath(found) for module, found in parents.items() if found and module in existing}
    return {module: path.replace("/", ".") for module, path in paths.items() if path}


def gather_outputs_of_stages(
    here: Mapping[tuple[int, int], Mapping[str, Tensor]], num_micro_batches: int, group: dist.ProcessGroup
) -> list[dict[str, Tensor]]:
    """What the ranks of a pipeline have recorded, by micro-batch, in the order of the stages. A collective over ``group``.

    Args:
        here: (micro-batch, stage of the whole model) -> path -> output on the host.
    """
    ranks: list[Mapping[tuple[int, int], Mapping[str, Tensor]]] = [here]
    if group.size() > 1:
        ranks = [{} for _ in range(group.size())]
        dist.all_gather_object(ranks, here, group=group)
    found = {key: outputs for rank in ranks for key, outputs in rank.items()}
    gathered: list[dict[str, Tensor]] = [{} for _ in range(num_micro_batches)]
    for micro_batch, stage in sorted(found):
        gathered[micro_batch] |= found[micro_batch, stage]
    return gathered


@contextmanager
def record_outputs(
    model: nn.Module, hf_names: Mapping[str, Sequence[str]], hidden_size: int
) -> Generator[dict[str, Tensor]]:
    """Collects what the modules in ``model`` give in one forward pass in the context: Hugging Face path -> copy of it.

    Outputs are tensors as the module gave them, alone or first in a tuple, in the order in which modules end; those whose
    last dimension is not ``hidden_size``, or that have no other dimension, are left out. Where modules inside each other
    share a path, the outermost that has such an output counts; of others, the first. Rows are not always tokens: an
    expert's are what was routed to it, so the caller leaves those out.

    Args:
        hf_names: as in :func:`module_paths`.
    """
    outputs: dict[str, Tensor] = {}
    kept: dict[str, str] = {}

    def keep(name: str, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.shape[-1] != hidden_size:
            return
        if path in kept and not f"{kept[path]}.".startswith(f"{name}."):
            return
        kept[path] = name
        outputs.pop(path, None)
        outputs[path] = tensor.detach().clone()

    modules = dict(model.named_modules())
    with ExitStack() as hooks:
        for name, path in module_paths(model, hf_names).items():
            if not name:
                # A stage is no module of the whole model, whatever its parameters have in common.
                continue
            hooks.enter_context(modules[name].register_forward_hook(partial(keep, name, path)))
        yield outputs
