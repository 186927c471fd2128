"""Handles of models, and the atoms that run on them. Each atom declares its needs and how a group of ranks runs it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

type Head = Literal["log_probs", "values"]
"""``log_probs``: a language-model head (a policy, a reference). ``values``: one number per token (a critic)."""

VALUE_HEAD_WEIGHTS = ("score.weight", "score.bias")
"""Hugging Face names of a critic's head, (1, hidden_size) and (1,), as in transformers' ``...ForTokenClassification``."""


class ModelHandle(Protocol):
    """What every atom takes. A runtime's own handle has these attributes, and keeps the model and its optimizer.

    Attributes:
        name: for messages.
        forward_only: no optimizer and no gradients (a reference policy).
        weight_version: a whole number that a successful ``optimizer_step`` advances and a checkpoint keeps.
        data_parallel_rank, data_parallel_size: this rank's place among those that see different data.
        head: its output: ``log_probs`` of the next token, or ``values`` (a critic).
        micro_batch_multiple: ``forward_backward`` takes a multiple of so many micro-batches (an interleaved pipeline).
        base: the model whose frozen weights a LoRA tenant shares; None for a model of its own.
        lora_id: of a tenant, for the sequence field :data:`~rl_backend.contracts.lora.LORA_FIELD`; -1 for a model.
        kept: Hugging Face name -> shape of weights that its directory has and nothing trains: a saved model takes them from
            there, and so has an engine that was started from the directory.
    """

    name: str
    forward_only: bool
    weight_version: int
    data_parallel_rank: int
    data_parallel_size: int
    head: Head
    micro_batch_multiple: int
    base: "ModelHandle | None"
    lora_id: int
    kept: Mapping[str, tuple[int, ...]]


type Part = Literal["model", "optimizer", "grad"]
"""A part of a model that can be moved to host memory by itself."""

PARTS: tuple[Part, ...] = get_args(Part.__value__)

type Split = Literal["same", "sequences"]
"""``same``: every rank gets the arguments as they are. ``sequences``: each data-parallel rank gets its own micro-batches."""

type Join = Literal["first", "any", "equal", "all", "forward_result", "model"]
"""One result of those of all ranks: that of rank 0, whether any is true, the one that all agree on, the list of them, the
outputs in the caller's order, or the name of a model that all ranks have built."""


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


_A_MODEL = Needs()


@dataclass(frozen=True)
class Atom:
    """One operation on a model.

    Attributes:
        needs: of the model.
        flag, with_flag: an argument, and what the call needs instead when it is true.
        split, join: how a group of ranks runs it; ``join`` is None for what a group does not offer.
        builds: makes a model. A lost group is built again from these operations.
        frees: ends the model that it is given, which is not built again.
    """

    needs: Needs = _A_MODEL
    flag: str = ""
    with_flag: Needs = _A_MODEL
    split: Split = "same"
    join: Join | None = None
    builds: bool = False
    frees: bool = False

    def needs_with(self, flag: Any) -> Needs:
        """What a call needs that gives this value to the argument ``flag``."""
        return self.with_flag if flag else self.needs


_EXPORT = Needs(("model",))

ATOMS: Mapping[str, Atom] = {
    "build_model": Atom(join="model", builds=True),
    "train_mode": Atom(Needs(trained=True)),
    "eval_mode": Atom(),
    "zero_grad": Atom(Needs(trained=True), join="first"),
    "forward_backward": Atom(
        Needs(("model", "grad"), trained=True, whole_gradients=True, form=" with a backward pass"),
        flag="forward_only",
        with_flag=Needs(("model",)),
        split="sequences",
        join="forward_result",
    ),
    "optimizer_step": Atom(Needs(("model", "optimizer", "grad"), trained=True, whole_gradients=True), join="first"),
    "lr_scheduler_step": Atom(Needs(trained=True), join="first"),
    "to": Atom(Needs(weights=False), join="first"),
    "weight_version": Atom(join="equal"),
    "weight_infos": Atom(),
    "export_weights": Atom(_EXPORT),
    "export_shards": Atom(_EXPORT),
    "export_gradients": Atom(Needs(("grad",), trained=True, whole_gradients=True)),
    "activations": Atom(_EXPORT),
    "save_checkpoint": Atom(
        Needs(("model", "optimizer"), trained=True, form=" of training state"),
        flag="hf",
        with_flag=_EXPORT,
        join="first",
    ),
    "wait_for_checkpoint": Atom(Needs(weights=False), join="first"),
    "checkpoint_is_pending": Atom(Needs(weights=False), join="any"),
    "load_checkpoint": Atom(Needs(("model", "optimizer"), weights=False), join="first"),
    "is_mp_src_rank_with_outputs": Atom(),
    "create_lora_adapter": Atom(join="model", builds=True),
    "remove_lora_adapter": Atom(Needs(weights=False), join="first", frees=True),
    "list_lora_adapters": Atom(Needs(weights=False), join="first"),
    "get_optimizer_state": Atom(Needs(("model", "optimizer"), trained=True), join="first"),
    "list_optimizer_states": Atom(Needs(weights=False), join="first"),
    "get_backend_info": Atom(Needs(weights=False), join="first"),
    "export_lora_adapter": Atom(_EXPORT, join="first"),
    "import_lora_adapter": Atom(Needs(("model", "optimizer"), trained=True), join="first"),
    "run_on_ranks": Atom(join="all"),
    "shutdown": Atom(join="all"),
}
"""Every operation by name. The last two are a group's own: they need no model."""


@dataclass(frozen=True)
class Operation:
    """One call of an atom as a value: it is sent to the ranks of a group and kept in its journal.

    Attributes:
        name: in :data:`ATOMS`.
        arguments: by name, the model's ``handle`` among them.
        number: among the operations of its group; of one that builds a model, also the key of the model.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0
