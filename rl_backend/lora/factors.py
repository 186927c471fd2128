"""Whole tensors of a tenant, gathered from ranks, by their names in peft's format."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts.lora import PEFT_PREFIX, LoRAKind, LoRAPart, part_name
from rl_backend.lora.modules import stack_of
from rl_backend.lora.rows import RowTensor, TenantRows
from rl_backend.parallel.collectives import gather_objects

# peft's name -> whole tensor, float32, at the true rank.
type WholeTensors = Mapping[str, Tensor]


def whole_tensors(rows: TenantRows, row: Tensor, names: Iterable[str], group: dist.ProcessGroup) -> WholeTensors:
    """The tensors of ``names`` in ``row``, one of those of ``rows``. A collective over ``group``, which has all of them."""
    mine = {tensor._replace(start=0): view for tensor, view in rows.views(row)}
    gathered: list[dict[RowTensor, Tensor]] = [mine]
    if group.size() > 1:
        # What several ranks have is sent by the first of them.
        held = gather_objects(list(mine), group)
        sent = {(each.name, each.first) for tensors in held[: group.rank()] for each in tensors}
        own = {each: view.cpu().clone() for each, view in mine.items() if (each.name, each.first) not in sent}
        gathered = gather_objects(own, group)
    found: dict[str, Tensor] = {}
    for of_rank in gathered:
        for tensor, view in of_rank.items():
            whole = found.setdefault(tensor.name, torch.empty(tensor.size, dtype=view.dtype, device=row.device))
            tensor.cut(whole).copy_(view)
    return {name: found[name] for name in names}


def each_weight(
    rows: TenantRows, names: Iterable[str], group: dist.ProcessGroup, *, copy: bool
) -> Iterator[tuple[str, Tensor]]:
    """As :func:`whole_tensors` of the weights; a rank that has all gives views, or copies. A collective at the call."""
    if group.size() > 1:
        return iter(whole_tensors(rows, rows.weights, names, group).items())
    return ((name, rows.own[name].clone() if copy else rows.own[name]) for name in names)


def merged_weights(
    stream: Generator[tuple[str, Tensor]],
    tensors: WholeTensors,
    kinds: Mapping[str, LoRAKind],
    scale: float,
    own: Mapping[str, torch.dtype],
) -> Generator[tuple[str, Tensor]]:
    """The weights of a model with an adapter added to them in float32.

    Args:
        own: Hugging Face names of weights that the tenant trains whole, which come last, and their dtypes.
    """
    with closing(stream):
        for name, weight in stream:
            if name in own:
                continue
            module = name.removesuffix(".weight")
            if module in kinds:
                weight = _merged(weight, module, kinds[module], tensors, scale)
            yield name, weight
    for name, dtype in own.items():
        yield name, tensors[PEFT_PREFIX + name].to(dtype)


def _merged(weight: Tensor, module: str, kind: LoRAKind, tensors: WholeTensors, scale: float) -> Tensor:
    a, b = _factor(tensors, module, kind, "A"), _factor(tensors, module, kind, "B")
    change = b @ a
    merged = weight.float().add(change.t() if kind == "embedding" else change, alpha=scale)
    magnitudes = tensors.get(part_name(module, kind, "magnitude"))
    if magnitudes is not None:
        merged *= (magnitudes / torch.linalg.vector_norm(merged, dim=1))[:, None]
    return merged.to(weight.dtype)


def _factor(tensors: WholeTensors, module: str, kind: LoRAKind, part: LoRAPart) -> Tensor:
    own = tensors.get(part_name(module, kind, part))
    if own is not None:
        return own
    stack, expert = stack_of(module)
    of_experts = tensors[part_name(stack, kind, part)]
    return of_experts[min(expert, len(of_experts) - 1)]


def load_tensors(rows: TenantRows, row: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Puts whole tensors by peft's names, which have been checked, into ``row``."""
    for tensor, view in rows.views(row):
        view.copy_(tensor.cut(tensors[tensor.name]))
