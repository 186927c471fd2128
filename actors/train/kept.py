"""Operations that a training group keeps, to run them again on new ranks: those since each model's last boundary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash
from ray import cloudpickle
from torch import Tensor

from actors.train.context import HandleRef, refs_in
from actors.train.loss import SentLoss
from actors.train.order import OperationHeader
from rl_backend.contracts import RLBackendError
from rl_backend.contracts.atoms import Operation
from rl_backend.weights.inspection import tensor_digest

if TYPE_CHECKING:
    from actors.train.passes import Pass
    from actors.train.ranks import TrainRanks

type Role = Literal["builds", "changes", "reads", "pinned"]
"""``builds``: makes or frees a model. ``changes``: its state. ``reads``: leaves all as it is. ``pinned``: means nothing to
other ranks than those that it was sent to."""

type Facts = tuple[Role, frozenset[int], Path | None]
"""How an operation is kept: its role, the keys of its models (none where that is not known), where it saves."""


type Call = bytes | Pass
"""What ranks are sent, pickled: all of them the same, or each its share."""

# After these no gradients are left that the next step would take.
_WITHOUT_GRADIENTS = ("optimizer_step", "zero_grad", "load_checkpoint")

CHANGES: Facts = ("changes", frozenset(), None)
READS: Facts = ("reads", frozenset(), None)


@dataclass(eq=False)
class Kept:
    """One operation as it was sent.

    Attributes:
        models: keys of the models that it works on; empty where that is not known.
        saves_to: where it writes a checkpoint.
        boundary: of a load, the state in memory that it loads.
        refs: what each rank answers, and what it stores.
        ranks: those that it was sent to last.
        answered: its result has come, or its error; ``digest`` is that of a result that new ranks must have again.
        deaths: how often ranks died in it.
    """

    header: OperationHeader
    call: Call
    loss: SentLoss | None
    role: Role
    models: frozenset[int]
    saves_to: Path | None
    refs: Sequence[tuple[Any, Any]]
    ranks: TrainRanks
    answered: bool = False
    failed: bool = False
    digest: str = ""
    deaths: int = 0
    boundary: Any = None

    @property
    def number(self) -> int:
        return self.header.number

    @property
    def title(self) -> str:
        return f"operation {self.number} ({self.header.name})"

    @property
    def outcomes(self) -> list[Any]:
        return [outcome for outcome, _ in self.refs]

    @property
    def nbytes(self) -> int:
        return sum(map(len, [self.call] if isinstance(self.call, bytes) else self.call.shares))

    def note(self, values: Sequence[Any]) -> None:
        """Notes the results of the ranks; raises where they were others before: a repeat that is none."""
        # Of a caller's function nobody knows whether its results are numbers alone.
        repeats = self.role in ("builds", "changes") and not self.header.name.startswith("run_on_ranks")
        found = digest(values) if repeats else ""
        if self.digest and found != self.digest:
            raise RLBackendError(
                f"{self.title} has another result on the new ranks than it had on those that died: what was trained since "
                "the state that they loaded cannot be computed again in the same bits; continue from the newest checkpoint "
                "with resume=auto, and set recover=off where kernels do not repeat their results",
                number=self.number,
            )
        self.answered, self.digest = True, found


class KeptOperations:
    """In the order of their numbers. A boundary of a model is its state on disk or in memory: what came before need not run
    again.
    """

    def __init__(self) -> None:
        self._kept: list[Kept] = []
        self._boundaries: dict[int, int] = {}
        self._gone = set[int]()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, kept: Kept) -> None:
        self._kept.append(kept)
        self.nbytes += kept.nbytes

    def forget(self, kept: Kept) -> None:
        """What leaves models as they are is kept until it is answered."""
        if kept.role in ("reads", "pinned") and kept in self._kept:
            self._kept.remove(kept)
            self.nbytes -= kept.nbytes

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = 0

    def unanswered(self) -> list[Kept]:
        return [kept for kept in self._kept if not kept.answered]

    def to_repeat(self) -> list[Kept]:
        return [kept for kept in self._kept if kept.role in ("builds", "changes") or not kept.answered]

    def bound(self, handle: HandleRef, saved: Path, committed: Path) -> None:
        """The checkpoint that an operation has written to ``saved`` is complete, and lies at ``committed`` from now on.

        It is no boundary where gradients were left when it was saved: a checkpoint has none.
        """
        found = [kept for kept in self._kept if kept.saves_to == saved and handle.key in kept.models]
        if not found or self.has_gradients(handle.key, found[-1].number):
            return
        save = found[-1]
        load = Operation("load_checkpoint", {"handle": handle, "path": committed})
        # In its place: what others did before and after it stays in order.
        save.call, save.saves_to, save.digest = cloudpickle.dumps(load), None, ""
        save.header, save.answered = replace(save.header, name=load.name), True
        self._bounded(handle.key, save)

    def bound_in_memory(self, load: Kept) -> None:
        """``load`` brings back a model as it was after an operation of its number: a step that left no gradients."""
        (model,) = load.models
        self._kept = sorted([*self._kept, load], key=lambda kept: kept.number)
        self._bounded(model, load)

    def boundaries(self) -> list[Any]:
        return [kept.boundary for kept in self._kept if kept.boundary is not None]

    def boundary_of(self, model: int) -> int:
        """The number of its boundary; 0 without one."""
        return self._boundaries.get(model, 0)

    def in_another_layout(self) -> None:
        """Ranks of other numbers answer with other results, each of which may be asked of them as if for the first time."""
        for kept in self._kept:
            kept.digest, kept.deaths = "", 0

    def is_saving(self, model: int) -> bool:
        """Whether a checkpoint is being written, which ranks that die now must write again, from the state that it had."""
        saves = (kept.saves_to for kept in self._kept if model in kept.models and not kept.failed)
        return any(path is not None and not path.exists() for path in saves)

    def forget_model(self, model: int) -> None:
        """It is freed: what only it was asked need not run again."""
        self._gone.add(model)
        self._boundaries.pop(model, None)
        self._drop_what_is_over()

    def repeats(self, kept: Kept) -> bool:
        """Whether new ranks have its models as they were. A pass of several tenants stays for some of them, while the others
        have left, or have a boundary after it.
        """
        return not any(model in self._gone or kept.number < self._boundaries.get(model, -1) for model in kept.models)

    def _bounded(self, model: int, load: Kept) -> None:
        self._boundaries[model] = load.number
        self._drop_what_is_over()

    def _drop_what_is_over(self) -> None:
        known = {*self._boundaries}.union(*(kept.models for kept in self._kept if kept.role == "changes")) - self._gone
        self._kept = [kept for kept in self._kept if not self._is_over(kept, known)]
        self.nbytes = sum(kept.nbytes for kept in self._kept)

    def _is_over(self, kept: Kept, known: Set[int]) -> bool:
        # A result that nobody has read yet stays where it is.
        if kept.role == "builds" or not (kept.answered or kept.ranks.ready(kept.outcomes)):
            return False
        # The load of a boundary itself is over with the next one.
        models = kept.models - self._gone if kept.models else known
        return bool(kept.models or known) and all(kept.number < self._boundaries.get(model, -1) for model in models)

    def has_gradients(self, model: int, before: float = math.inf) -> bool:
        """Whether a model is left with gradients by operations of smaller numbers."""
        left = False
        for kept in self._kept:
            if kept.number < before and kept.role == "changes" and (model in kept.models or not kept.models):
                left = kept.header.name == "forward_backward" or (left and kept.header.name not in _WITHOUT_GRADIENTS)
        return left


def calls_of(call: Call, num_ranks: int) -> Sequence[bytes]:
    """What each rank is sent; the same object where it is the same."""
    return [call] * num_ranks if isinstance(call, bytes) else call.calls


def facts_of(operation: Operation) -> Facts:
    atom, arguments = operation.atom, operation.arguments
    role: Role = "builds" if atom.builds or atom.frees else "reads" if atom.reads else "changes"
    saves = Path(arguments["path"]) if operation.name == "save_checkpoint" else None
    return role, models_in(arguments.values()), saves


def models_in(arguments: Iterable[Any]) -> frozenset[int]:
    refs = list(refs_in(arguments))
    # A pass of a frozen base may be one of any of its tenants.
    return frozenset() if any(ref.forward_only for ref in refs) else frozenset(ref.key for ref in refs)


def digest(value: Any) -> str:
    """Of results: numbers, texts, tensors on the CPU, and what is made of them."""
    found = xxhash.xxh3_128()
    for part in _parts(value):
        found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> Iterable[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}{tensor_digest(value.detach().contiguous())}".encode()
    elif isinstance(value, Mapping):
        for name in value:
            yield from _parts(name)
            yield from _parts(value[name])
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _parts(getattr(value, each.name))
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}".encode()
        for each in value:
            yield from _parts(each)
    else:
        yield f"{value!r};".encode()
