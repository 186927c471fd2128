"""Handles of models, and what an atom declares beside its signature: its needs, and how a group of ranks runs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

type Head = Literal["log_probs", "values"]
"""``log_probs``: a language-model head (a policy, a reference). ``values``: one number per token (a critic)."""

VALUE_HEAD_WEIGHTS = ("score.weight", "score.bias")
"""Hugging Face names of a critic's head, (1, hidden_size) and (1,), as in transformers' ``...ForTokenClassification``."""


class ModelHandle(Protocol):
    """What every atom takes. A runtime's own handle has these attributes, and keeps the model and its optimizer.

    Attributes:
        forward_only: no optimizer and no gradients (a reference policy).
        weight_version: a successful ``optimizer_step`` advances it and a checkpoint keeps it.
        data_parallel_rank, data_parallel_size: this rank's place among those that see different data.
        micro_batch_multiple: ``forward_backward`` takes a multiple of so many micro-batches (an interleaved pipeline).
        shares_prefixes: tokens with which several sequences of a micro-batch begin are computed once, and count once.
        base: the model whose frozen weights a LoRA tenant shares; None for a model of its own.
        lora_id: of a tenant, for the sequence field :data:`~rl_backend.contracts.lora.LORA_FIELD`; -1 for a model.
        kept: Hugging Face name -> shape of weights that its directory has and nothing trains.
    """

    name: str
    forward_only: bool
    weight_version: int
    data_parallel_rank: int
    data_parallel_size: int
    head: Head
    micro_batch_multiple: int
    shares_prefixes: bool
    base: "ModelHandle | None"
    lora_id: int
    kept: Mapping[str, tuple[int, ...]]


type Part = Literal["model", "optimizer", "grad"]
"""Parts of a model that can be moved to host memory by themselves."""

PARTS: tuple[Part, ...] = get_args(Part.__value__)

type Join = Literal["first", "any"]
"""How a group makes one result of those of its ranks: that of rank 0, or whether any is true."""


class Needs(NamedTuple):
    """What a call needs of a model; a runtime refuses the call with ``HandleError`` without it.

    Attributes:
        parts: what must be on the training device.
        trained: the model has gradients and an optimizer.
        whole_gradients: no pass has failed in the middle since the last ``zero_grad``.
        weights: no load of a checkpoint has failed in the middle.
        form: what to call this form of the operation when a forward-only model is refused.
    """

    parts: tuple[Part, ...] = ()
    trained: bool = False
    whole_gradients: bool = False
    weights: bool = True
    form: str = ""


A_MODEL = Needs()
ANY_STATE = Needs(weights=False)
ITS_WEIGHTS = Needs(("model",))
TRAINED = Needs(trained=True)


@dataclass(frozen=True)
class Atom:
    """One operation on a model: decorates the method of a :class:`~rl_backend.runtime.Runtime` that is its signature.

    Attributes:
        flag, with_flag: a keyword argument, and what the call needs instead when it is true.
        takes: LoRA tenants alone, models alone, or both.
        join: how a group of ranks answers; None for what cannot leave a rank, and is not offered by a group.
        builds: makes the model that it returns. A lost group is built again from these operations.
        frees: ends the model that it is given, which is not built again.
        reads: leaves models as they are: a group that is built again need not run it again.
    """

    needs: Needs = A_MODEL
    flag: str = ""
    with_flag: Needs = A_MODEL
    takes: Literal["both", "models", "tenants"] = "both"
    join: Join | None = "first"
    builds: bool = False
    frees: bool = False
    reads: bool = False
    name: str = ""

    def __call__[M: Callable[..., Any]](self, method: M) -> M:
        # The method stays as it is: the signature that callers read is the one that is declared.
        ATOMS[method.__name__] = replace(self, name=method.__name__)
        return method

    def needs_with(self, flag: Any) -> Needs:
        return self.with_flag if flag else self.needs


ATOMS: dict[str, Atom] = {}


@dataclass(frozen=True)
class Operation:
    """One call of an atom as a value: it is sent to the ranks of a group and kept in its journal.

    ``arguments`` has the model's ``handle`` too; ``number`` of one that builds a model is the key of the model.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0

    @property
    def atom(self) -> Atom:
        return ATOMS[self.name]
