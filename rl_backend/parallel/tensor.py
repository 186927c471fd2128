"""Tensor parallelism with sequence parallelism (Korthikanti et al., arXiv 2205.05198) for plain modules.

Between blocks each rank has N / tp of the N tokens; a block gathers them, works on its part of the heads or features, and
leaves the sum over the ranks scattered over the tokens again. Parameters become DTensors, so that FSDP2, checkpoints and
exports know what a rank holds, but modules compute with the rank's own part: nothing runs through DTensor's dispatch.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from rl_backend.parallel.collectives import RankOperators, all_gather, all_to_all_rows, sum_over
from rl_backend.parallel.shards import chunk
from rl_backend.primitive.adapters import AdapterRun
from rl_backend.primitive.experts import Experts
from rl_backend.primitive.log_prob import NextToken, VocabularyShard, next_token_log_probs
from rl_backend.primitive.norm import RMSNorm
from rl_backend.primitive.prefix_tree import take_rows
from rl_backend.primitive.value_head import values_of_tenants

type View = Callable[[Tensor], Tensor]
"""Gives the tensor that a module uses in place of this rank's part of a parameter."""


class LinearPart(NamedTuple):
    """What one rank computes of a linear layer or an embedding; ``linear.part`` where tensor parallelism has split it."""

    inputs: tuple[int, int]  # first feature and the one after the last
    outputs: tuple[int, int]
    holds_outputs: bool = False  # the rank keeps the weight of all outputs and computes with a part of it


class TensorParallel:
    """Lays modules out over the ranks of ``mesh``, of one dimension, in place. Modules may be on the meta device."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = self.group.size()
        self.rank = self.group.rank()
        self.operators = RankOperators(self.group)

    def column(self, linear: nn.Linear) -> None:
        """Splits the outputs: (N, in_features) of all tokens -> (N, this rank's out_features)."""
        self.split_rows(linear)
        compute_on_local(linear, {})

    def row(self, linear: nn.Linear) -> None:
        """Splits the inputs: (N, this rank's in_features) of all tokens -> (N / tp, out_features)."""
        _distribute(linear, "weight", self.mesh, [Shard(1)])
        views: dict[str, View] = {}
        if linear.bias is not None:
            _distribute(linear, "bias", self.mesh, [Replicate()])
            # The outputs of the ranks are added up, and the bias must be in the sum once.
            counted = float(self.rank == 0)
            views["bias"] = lambda bias: bias * counted
        _keep_part(linear, LinearPart(self._mine(linear.in_features), (0, linear.out_features)))
        compute_on_local(linear, views)
        self._scatter_output(linear)

    def key_or_value(self, linear: nn.Linear, kv_heads: int) -> None:
        """Splits the heads of a projection of keys or values, as :meth:`column` does; or, where there are fewer heads than
        ranks, keeps a copy of all of them on every rank, which computes the one that its queries belong to.
        """
        if kv_heads % self.size == 0:
            self.column(linear)
            return
        of_this_head = self._head(linear.out_features, kv_heads)
        _keep_part(linear, LinearPart((0, linear.in_features), (of_this_head.start, of_this_head.stop), holds_outputs=True))
        self.replicate(linear, dict.fromkeys(_names(linear), lambda parameter: parameter[of_this_head]))

    def rows(self, module: nn.Module) -> None:
        """Splits the first dimension of the module's own parameters, of which it computes with this rank's part."""
        for name in _names(module):
            _distribute(module, name, self.mesh, [Shard(0)])
        compute_on_local(module, {})

    def norm_over_heads(self, norm: RMSNorm, heads: int) -> None:
        """Splits a norm over the features of all ``heads`` as :meth:`key_or_value` does their projection."""
        copies = 1
        if heads % self.size == 0:
            _distribute(norm, "weight", self.mesh, [Shard(0)])
            compute_on_local(norm, {})
        else:
            of_this_head, copies = self._head(norm.dim, heads), self.size // heads
            self.replicate(norm, {"weight": lambda weight: weight[of_this_head]})
        # Ranks that have a copy of one head count together as the one that has it.
        norm.sum_over_ranks = lambda squares: self.operators.all_reduce(squares) / copies

    def replicate(self, module: nn.Module, views: Mapping[str, View] | None = None, *, partial: bool = True) -> None:
        """Keeps a copy of the module's own parameters on every rank; see :func:`compute_on_local`."""
        for name in _names(module):
            _distribute(module, name, self.mesh, [Replicate()])
        compute_on_local(module, views or {}, partial=partial)

    def replicate_for_own_tokens(self, linear: nn.Linear) -> None:
        """As :meth:`replicate`, of a layer that each rank applies to its part of the tokens alone."""
        self.replicate(linear)
        setattr(linear, "token_share", (self.rank, self.size))  # noqa: B010 - as in _keep_part

    def gather_input(self, module: nn.Module, *, sum_gradients: bool = True) -> None:
        """Gives ``module`` all tokens in its first argument: (N / tp, ...) -> (N, ...), as :func:`all_gather` does."""
        module.register_forward_pre_hook(
            lambda _, args: (self.operators.all_gather(args[0], sum_gradients=sum_gradients), *args[1:])
        )

    def vocabulary(self, embedding: nn.Embedding) -> None:
        """Splits the vocabulary: (N,) tokens -> (N / tp, dim)."""
        _distribute(embedding, "weight", self.mesh, [Shard(0)])
        start, stop = self._mine(embedding.num_embeddings)
        _keep_part(embedding, LinearPart((start, stop), (0, embedding.embedding_dim)))
        forward = embedding.forward

        def look_up(input: Tensor) -> Tensor:
            weight = embedding.weight
            rows = input - start
            elsewhere = (rows < 0) | (rows >= weight.shape[0])
            # A rank without rows takes part all the same: its weight has a gradient as on the other ranks.
            if weight.shape[0] == 0:
                return weight.new_zeros((*rows.shape, weight.shape[1])) + weight.sum()
            return forward(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere[:, None], 0.0)

        setattr(embedding, "forward", look_up)  # noqa: B010 - a method
        compute_on_local(embedding, {})
        self._scatter_output(embedding)

    def vocabulary_head(self, vocab_size: int) -> Callable[..., NextToken]:
        """:func:`~rl_backend.primitive.log_prob.next_token_log_probs` for (N / tp, hidden_size) and a split weight."""
        shard = vocabulary_shard(self.group, self._mine(vocab_size)[0], vocab_size)

        @wraps(next_token_log_probs)
        def log_probs(hidden: Tensor, weight: Tensor, *args: Any, bias: Tensor | None = None, **options: Any) -> NextToken:
            rows, of_rows = (_to_local(each, True) if isinstance(each, DTensor) else each for each in (weight, bias))
            assert rows is not None, "as the weight is"
            whole = all_gather(hidden, self.group, sum_gradients=True)
            return next_token_log_probs(whole, rows, *args, bias=of_rows, shard=shard, **options)

        return log_probs

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """(N / tp, ...) -> (len(rows), ...): those of the N rows of all ranks, other ones on each."""
        return take_rows(all_gather(x, self.group, sum_gradients=True), rows)

    def tenant_heads(self, hidden: Tensor, others: Tensor, runs: Sequence[AdapterRun]) -> Tensor:
        """:func:`~rl_backend.primitive.value_head.values_of_tenants` of (N / tp, hidden_size)."""
        # All ranks compute all rows: those of a tenant are added up in one order. One rank has the gradients of heads.
        whole = all_gather(hidden, self.group, sum_gradients=False)
        return values_of_tenants(whole, others, runs, counts=self.rank == 0)

    def split_rows(self, linear: nn.Linear) -> None:
        """As :meth:`column`, of a language-model head, whose own forward :meth:`vocabulary_head` replaces."""
        _keep_part(linear, LinearPart((0, linear.in_features), self._mine(linear.out_features)))
        for name in _names(linear):
            _distribute(linear, name, self.mesh, [Shard(0)])

    def _scatter_output(self, module: nn.Module) -> None:
        module.register_forward_hook(lambda _, __, output: self.operators.reduce_scatter(output))

    def _head(self, features: int, heads: int) -> slice:
        head, rows = self.rank * heads // self.size, features // heads
        return slice(head * rows, (head + 1) * rows)

    def _mine(self, features: int) -> tuple[int, int]:
        part = chunk(slice(0, features), self.size, self.rank)
        return int(part.start), int(part.stop)


def vocabulary_shard(group: dist.ProcessGroup, start: int, vocab_size: int) -> VocabularyShard:
    """This rank's part of a vocabulary that is split over the ranks of ``group``; see :class:`VocabularyShard`."""
    largest = partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=group)
    return VocabularyShard(
        start, vocab_size, largest, sum_over(group), partial(all_gather, group=group, sum_gradients=False)
    )


def distribute_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Splits packed experts over the ranks of ``mesh``, which is ep, or ep by etp."""
    # What the parts of an expert return is added up, and what it adds itself must be in the sum once.
    counted, views = float(mesh.ndim == 1 or mesh.get_local_rank(1) == 0), dict[str, View]()
    for name, dim in experts.intermediate_dims.items():
        placements = [Shard(0), Replicate() if dim is None else Shard(dim)]
        _distribute(experts, name, mesh, placements[: mesh.ndim])
        if dim is None and mesh.ndim > 1:
            views[name] = lambda parameter: parameter * counted
    compute_on_local(experts, views)


def compute_on_local(module: nn.Module, views: Mapping[str, View], *, partial: bool = True) -> None:
    """Makes the module's forward see this rank's part of its own DTensor parameters as plain tensors.

    Args:
        views: parameter name -> what is computed with instead of the local part.
        partial: gradients of replicated parameters are this rank's contribution, to be added up over the ranks; otherwise
            they are whole already.
    """
    forward = module.forward

    @wraps(forward)
    def on_local(*args: Any, **kwargs: Any) -> Any:
        # Compiled code knows plain tensors alone: who calls it has put them there.
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with local_parameters([module]):
            return forward(*args, **kwargs)

    module.forward = on_local
    setattr(module, _LOCAL, (views, partial))


_LOCAL = "parameters_on_local"


@contextmanager
def local_parameters(modules: Iterable[nn.Module]) -> Generator[None]:
    """What modules that :func:`compute_on_local` has changed compute with is in place of their parameters; others stay."""
    changed = [(module, dict(module._parameters)) for module in modules if _LOCAL in module.__dict__]
    try:
        for module, held in changed:
            views, partial = getattr(module, _LOCAL)
            for name, parameter in held.items():
                if isinstance(parameter, DTensor):
                    local = _to_local(parameter, partial)
                    module._parameters[name] = views[name](local) if name in views else local
        yield
    finally:
        for module, held in changed:
            module._parameters.update(held)


def _to_local(parameter: DTensor, partial: bool) -> Tensor:
    placements = [Partial() if partial and placement.is_replicate() else placement for placement in parameter.placements]
    local: Tensor = _Local.apply(parameter, placements)
    return local


class _Local(torch.autograd.Function):
    # DTensor.to_local makes zeros of a gradient that there is none of.
    @staticmethod
    def forward(ctx: Any, parameter: DTensor, placements: list[Placement]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layout = parameter.device_mesh, placements, parameter.shape, parameter.stride()
        local: Tensor = parameter.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        mesh, placements, shape, stride = ctx.layout
        return DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride), None


def _keep_part(linear: nn.Module, part: LinearPart) -> None:
    setattr(linear, "part", part)  # noqa: B010 - nn.Module's own type of attributes has no such


def _names(module: nn.Module) -> list[str]:
    return [name for name, parameter in module._parameters.items() if parameter is not None]


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Replaces a parameter by a DTensor, of which this rank allocates its own part on the same device."""
    parameter = module._parameters[name]
    assert parameter is not None, "callers name parameters that are there"
    shape = list(parameter.shape)
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Shard):
            whole_dim = slice(0, shape[placement.dim])
            part = chunk(whole_dim, mesh.size(dimension), mesh.get_local_rank(dimension))
            shape[placement.dim] = part.stop - part.start
    local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
    module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


class FusedProjections:
    """Outputs of one linear layer that are several projections end to end, each of which is cut by heads on its own.

    A rank keeps neighbouring rows of the matrix, as of every other: a rectangle, which is what checkpoints, exports and
    adapters know. These are not the rows of its heads, so outputs change ranks before heads are computed.

    Args:
        sizes: features of each projection; the ranks divide them.
    """

    def __init__(self, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        self.group = group
        rank, ranks = group.rank(), range(group.size())
        wanted = [_features_of_heads(sizes, group.size(), each) for each in ranks]
        held = [chunk(slice(0, sum(sizes)), group.size(), each) for each in ranks]
        self._mine = wanted[rank]
        sent = [[number for part in parts for number in _common(part, held[rank])] for parts in wanted]
        self._sent = [len(numbers) for numbers in sent]
        self._received = [sum(len(_common(part, other)) for part in self._mine) for other in held]
        self._order = torch.tensor([number - held[rank].start for numbers in sent for number in numbers], device="cpu")

    def of_my_heads(self, outputs: Tensor) -> Tensor:
        """(N, this rank's outputs) -> (N, features of its heads), projection after projection. A collective, both ways."""
        self._order = self._order.to(outputs.device)
        features = outputs.t().index_select(0, self._order)
        # From the ranks in their order come ascending features: all of mine in their order.
        return all_to_all_rows(features, self._sent, self._received, self.group).t()

    def rows_of_my_heads(self, weight: Tensor) -> Tensor:
        """(features of all heads, ...) -> (features of this rank's heads, ...)."""
        return torch.cat([weight[part] for part in self._mine])


def _features_of_heads(sizes: Sequence[int], ranks: int, rank: int) -> list[slice]:
    """Where the features of a rank's heads are, in each projection."""
    return [chunk(slice(start, end), ranks, rank) for start, end in pairwise(accumulate(sizes, initial=0))]


def _common(first: slice, second: slice) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))
