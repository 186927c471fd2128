"""What forward passes record: the routes of tokens, and outputs of modules under their Hugging Face paths."""

import posixpath
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend.contracts import PackedBatch, RoutedLayers
from rl_backend.parallel.collectives import all_gather, gather_objects


def routes_to_replay(batch: PackedBatch, routers: RoutedLayers) -> Tensor:
    """(T, layers with experts, top_k) int16, or int32 for more experts; -1 for the tokens for which the router chooses."""
    routes, mask = routers.routes_of(batch)
    signed = routes.to(torch.promote_types(routers.dtype, torch.int16))
    return signed if mask is None else signed.masked_fill(~mask.view(-1, 1, 1), -1)


def gather_rows(routes: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(N, layers, top_k) of every rank -> (ranks * N, layers, top_k), in the order of the ranks."""
    # gloo has no 16-bit integers.
    return all_gather(routes.contiguous().view(torch.uint8), group, sum_gradients=False).view(routes.dtype)


def gather_stages(
    chosen: Mapping[tuple[int, int], Tensor],
    data: Sequence[PackedBatch],
    places: Sequence[Sequence[int]],
    routers: RoutedLayers,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """The routes of all ranks of a pipeline, on each of them: (L, layers with experts of the model, top_k) of each sequence.

    Args:
        chosen: (micro-batch, stage) -> (T, layers, top_k), of this rank's stages with experts.
        places: for each rank, the places of its layers among the layers with experts.
    """
    tokens = sum(batch.num_tokens for batch in data)
    # Ranks may have different numbers of layers, none included.
    mine = torch.zeros(tokens, max(map(len, places)), routers.top_k, dtype=routers.dtype, device=device)
    stages = [
        torch.cat([chosen[index, stage] for index in range(len(data))]) for stage in sorted({key[1] for key in chosen})
    ]
    if stages:
        mine[:, : sum(stage.shape[1] for stage in stages)] = torch.cat(stages, dim=1)
    of_ranks = gather_rows(mine, group).view(group.size(), *mine.shape)
    routes = mine.new_empty(tokens, len(routers.layers), routers.top_k)
    for rank, layers in enumerate(places):
        routes[:, torch.tensor(layers, dtype=torch.int64, device=device)] = of_ranks[rank, :, : len(layers)]
    lengths = [length for batch in data for length in batch.seq_lens.tolist()]
    return [part.clone() for part in routes.split(lengths)]


def module_paths(model: nn.Module, hf_names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Module name in ``model`` -> Hugging Face path: the longest dotted prefix that the names of all its parameters share.

    ``hf_names`` are, of a parameter in ``model``, its Hugging Face names, several where it is fused out of several.
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
    """What the ranks of a pipeline have recorded, by micro-batch, in order. A collective over ``group``."""
    found = {key: outputs for rank in gather_objects(here, group) for key, outputs in rank.items()}
    gathered: list[dict[str, Tensor]] = [{} for _ in range(num_micro_batches)]
    for micro_batch, stage in sorted(found):
        gathered[micro_batch] |= found[micro_batch, stage]
    return gathered


@contextmanager
def record_outputs(
    model: nn.Module, hf_names: Mapping[str, Sequence[str]], hidden_size: int
) -> Generator[dict[str, Tensor]]:
    """Collects what modules give in one forward pass in the context, (..., ``hidden_size``): Hugging Face path -> copy of
    it.

    Outputs are in the order in which modules end. Rows are not always tokens: an expert's are what was routed to it.
    """
    outputs: dict[str, Tensor] = {}
    kept: dict[str, str] = {}

    def keep(name: str, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.shape[-1] != hidden_size:
            return
        # Of modules inside each other that share a path the outermost counts; of others, the first.
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
