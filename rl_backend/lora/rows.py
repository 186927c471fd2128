"""A tenant on one rank: its tensors, their gradients and two moments, each as one flat row; and tensors gathered whole."""

import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from operator import add
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts.lora import BASE_ONLY, PEFT_PREFIX, LoRAConfig, LoRAKind, LoRAPart, part_name
from rl_backend.lora.modules import AdaptedModule, stack_of, stack_sizes
from rl_backend.parallel.collectives import gather_objects
from rl_backend.primitive.adapters import AdapterRun, Factors, OwnHead, SumOverRanks

# Ranks are padded to 16 times a power of two. Padding a smaller rank further would change the bits of products; and kernels
# for groups of matrices ask for rows of 16 bytes.
_ALIGNMENT = 16


class RowTensor(NamedTuple):
    """One tensor of a tenant on this rank.

    Attributes:
        role: ``a``, ``b`` or ``magnitude`` of an adapter, or the name of a parameter that is trained whole.
        name: peft's.
        size: of the whole tensor.
        first: where this rank's part of it begins, in each dimension.
        held: shape of this rank's part.
        padding: how many zeros follow in each dimension.
        summed: whether this rank has a part of its gradient, to be added up over the ranks that cut the module.
        start: its place in the row.
        experts: modules whose factors it holds, one after the other in its first dimension, or that share the only one;
            empty where it is of ``module``.
    """

    module: AdaptedModule
    role: str
    name: str
    size: tuple[int, ...]
    first: tuple[int, ...]
    held: tuple[int, ...]
    padding: tuple[int, ...]
    summed: bool
    start: int = 0
    experts: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """In memory."""
        return tuple(map(add, self.held, self.padding))

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole tensor."""
        return whole[tuple(slice(first, first + held) for first, held in zip(self.first, self.held, strict=True))]

    def memory(self, row: Tensor) -> Tensor:
        """What lies in ``row``, padding included: a view of :attr:`shape`."""
        return row[self.start : self.stop].view(self.shape)


class Section(NamedTuple):
    """Neighbours in a row whose gradients are added up over the same ranks; experts have others."""

    start: int
    stop: int
    of_experts: bool
    summed: bool


def factors_of(module: AdaptedModule, config: LoRAConfig) -> list[RowTensor]:
    """A, (rank, inputs), B, (outputs, rank), and with DoRA magnitudes, (outputs,)."""
    rank = config.rank
    padding = padded_rank(rank) - rank
    (inputs, outputs), (start, stop) = (module.in_features, module.out_features), module.inputs
    low, high = (0, outputs) if module.holds_outputs else module.outputs
    name, whole = partial(part_name, module.name, module.kind), not module.cuts_outputs
    found = [
        RowTensor(
            module, "a", name("A"), (rank, inputs), (0, start), (rank, stop - start), (padding, 0), not module.cuts_inputs
        ),
        RowTensor(module, "b", name("B"), (outputs, rank), (low, 0), (high - low, rank), (0, padding), whole),
    ]
    if config.use_dora:
        found.append(RowTensor(module, "magnitude", name("magnitude"), (outputs,), (low,), (high - low,), (0,), whole))
    return found


def factors_of_rank(modules: Iterable[AdaptedModule], config: LoRAConfig, kinds: Mapping[str, LoRAKind]) -> list[RowTensor]:
    """:func:`factors_of` each of a rank's modules, with those of experts in stacks where they share one.

    Args:
        kinds: of the modules of all ranks.
    """
    found, stacks = list[RowTensor](), dict[str, list[AdaptedModule]]()
    for module in modules:
        if config.experts_share_factor and module.kind == "experts":
            stacks.setdefault(stack_of(module.name)[0], []).append(module)
        else:
            found += factors_of(module, config)
    sizes: Mapping[str, int] = stack_sizes(kinds) if stacks else {}
    for stack, experts in stacks.items():
        found += _stacked(stack, sorted(experts, key=lambda each: stack_of(each.name)[1]), config, sizes[stack])
    return found


def _stacked(stack: str, experts: Sequence[AdaptedModule], config: LoRAConfig, num_experts: int) -> Iterator[RowTensor]:
    names, first_expert = tuple(each.name for each in experts), stack_of(experts[0].name)[1]
    for own in factors_of(replace(experts[0], name=stack), config):
        # Whichever rank has an expert has a part of the gradient of what all share: it is summed as those of other layers.
        shared = own.role == ("b" if stack.endswith(".w2") else "a")
        number, first, held = (1, 0, 1) if shared else (num_experts, first_expert, len(experts))
        yield own._replace(
            module=replace(own.module, is_expert=not shared),
            size=(number, *own.size),
            first=(first, *own.first),
            held=(held, *own.held),
            padding=(0, *own.padding),
            experts=names,
        )


def saved_parameter(module: AdaptedModule, role: str, size: tuple[int, ...]) -> RowTensor:
    """A parameter that every tensor-parallel rank holds and trains whole, as those of peft's ``modules_to_save``."""
    nothing = (0,) * len(size)
    return RowTensor(module, role, f"{PEFT_PREFIX}{module.name}.{role}", size, nothing, size, nothing, summed=True)


def padded_rank(rank: int) -> int:
    """The rank that memory is kept for."""
    return _ALIGNMENT << max(math.ceil(rank / _ALIGNMENT) - 1, 0).bit_length()


def head_parameters(module: AdaptedModule) -> tuple[RowTensor, RowTensor]:
    return (
        saved_parameter(module, "weight", (module.out_features, module.in_features)),
        saved_parameter(module, "bias", (module.out_features,)),
    )


def lay_out_row(tensors: Sequence[RowTensor]) -> tuple[list[RowTensor], list[Section]]:
    """The tensors with their places, and the sections that they make."""
    placed, sections, start = list[RowTensor](), list[Section](), 0

    def section(tensor: RowTensor) -> tuple[bool, bool]:
        return tensor.module.is_expert, not tensor.summed

    # Of a section those come last whose weights do not decay: spans() then needs one pass.
    ordered = sorted(tensors, key=lambda each: (*section(each), len(each.size) == 1))
    for (of_experts, cut), own in groupby(ordered, section):
        first = start
        for tensor in own:
            placed.append(tensor._replace(start=start))
            start = placed[-1].stop
        sections.append(Section(first, start, of_experts, not cut))
    return placed, sections


@dataclass(eq=False)
class TenantRows:
    """A tenant's numbers on this rank. Padding is 0 and stays 0.

    Attributes:
        weights, gradients, exp_avg, exp_avg_sq: the rows, float32.
        num_steps: () float32, optimizer steps taken.
        num_draws: passes in training with dropout so far, by which it is drawn; the same on every rank.
        sum_over_inputs: for a module whose inputs are cut, what adds a tensor up over its ranks, in place.
    """

    config: LoRAConfig
    tensors: Sequence[RowTensor]
    sections: Sequence[Section]
    weights: Tensor
    gradients: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    num_steps: Tensor
    num_draws: int = 0
    training: bool = True
    sum_over_inputs: Callable[[AdaptedModule], SumOverRanks | None] = lambda module: None
    _modules: Mapping[str, Factors] = field(default_factory=dict)
    _head: OwnHead | None = None

    @classmethod
    def new(
        cls,
        config: LoRAConfig,
        tensors: Sequence[RowTensor],
        device: torch.device,
        initial: Mapping[str, Tensor],
        sum_over_inputs: Callable[[AdaptedModule], SumOverRanks | None],
    ) -> "TenantRows":
        """A tenant with A as peft draws it, B of zeros, and other tensors as in ``initial``, whole ones by peft's names."""
        placed, sections = lay_out_row(tensors)
        size = placed[-1].stop if placed else 0
        # Memory of its own for each: parts of a model are moved one by one.
        weights, gradients, exp_avg, exp_avg_sq = (torch.zeros(size, device=device) for _ in range(4))
        tenant = cls(config, placed, sections, weights, gradients, exp_avg, exp_avg_sq, torch.zeros((), device=device))
        tenant.sum_over_inputs = sum_over_inputs
        for tensor, view in tenant.views(weights):
            whole = initial[tensor.name] if tensor.name in initial else initial_factor(config, tensor)
            view.copy_(tensor.cut(whole))
        return tenant

    def views(self, row: Tensor) -> Iterator[tuple[RowTensor, Tensor]]:
        """Each tensor and its numbers, without padding: a view of ``row``."""
        for tensor in self.tensors:
            yield tensor, tensor.memory(row)[tuple(map(slice, tensor.held))]

    @cached_property
    def own(self) -> Mapping[str, Tensor]:
        """Views of the weights as in :meth:`views`, by peft's names, for a rank that has all of the tenant."""
        return {tensor.name: view for tensor, view in self.views(self.weights)}

    def run(self, start: int, stop: int, draw: int | None, key: int = BASE_ONLY) -> AdapterRun:
        """This tenant, whose ``lora_id`` is ``key``, at work on the rows from ``start`` to ``stop``."""
        return AdapterRun(start, stop, self.modules, draw, self._head, key)

    @property
    def modules(self) -> Mapping[str, Factors]:
        """What layers compute with, by the names of their modules."""
        if not self._modules:
            self._bind()
        return self._modules

    def _bind(self) -> None:
        held: dict[str, dict[str, Any]] = {}
        for tensor in self.tensors:
            module, is_a = tensor.module, tensor.role == "a"
            used = slice(*module.outputs) if module.holds_outputs and not is_a else slice(None)
            rows = (("", self.weights), ("grad_", self.gradients))
            memory = {prefix + tensor.role: tensor.memory(row)[used] for prefix, row in rows}
            for place, name in enumerate(tensor.experts or (module.name,)):
                own = held.setdefault(name, {})
                for role, whole in memory.items():
                    own[role] = whole[min(place, len(whole) - 1)] if tensor.experts else whole
                if is_a:
                    own["seed"] = _seed(self.config.seed, f"{name} dropout {tensor.first[-1]}")
                    own["sum_over_inputs"] = self.sum_over_inputs(module)
        scale, dropout = self.config.scale, self.config.dropout
        # A head has no A.
        self._modules = {name: Factors(**own, scale=scale, dropout=dropout) for name, own in held.items() if "a" in own}
        self._head = next((OwnHead(**own) for own in held.values() if "a" not in own), None)

    def spans(self) -> Iterator[tuple[slice, bool]]:
        """Parts of a row that end to end are all of it, and whether their weights decay: not those of one dimension."""
        for decays, tensors in groupby(self.tensors, lambda each: len(each.size) > 1):
            first, *others = tensors
            yield slice(first.start, (others or [first])[-1].stop), decays

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in (self.weights, self.gradients, self.exp_avg, self.exp_avg_sq))


def initial_factor(config: LoRAConfig, tensor: RowTensor) -> Tensor:
    """The whole factor of a new tenant, as peft starts it: for a linear layer A uniform in ``1 / sqrt(in_features)``
    (Kaiming with a = sqrt(5)) and B zero, for an embedding A zero and B standard normal.
    """
    module = tensor.module
    if (tensor.role == "a") == (module.kind == "embedding"):
        return torch.zeros(tensor.size)
    generator = torch.Generator().manual_seed(_seed(config.seed, module.name))
    if module.kind == "embedding":
        return torch.randn(tensor.size, generator=generator)
    bound = 1.0 / math.sqrt(module.in_features)
    return torch.empty(tensor.size).uniform_(-bound, bound, generator=generator)


def _seed(seed: int, name: str) -> int:
    # Of the name: neither layout nor other targets change it.
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest())


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
