"""The atoms of distributed training that every runtime offers."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args, overload

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend import contracts
from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.state_in_memory import StateInMemory
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.contracts.atoms import ANY_STATE, ITS_WEIGHTS, TRAINED, Atom, Needs
from rl_backend.contracts.lora import LoRAConfig, LoRAInfo
from rl_backend.contracts.result import BackendInfo, OptimizerState, OptimizerStateInfo

type RouterReplay = Literal["off", "record", "replay"]
REPLAY_MODES: tuple[RouterReplay, ...] = get_args(RouterReplay.__value__)


def _optional[M: Callable[..., Any]](method: M) -> M:
    """Of an atom that a runtime need not have: unless it is overridden, calls raise :class:`UnsupportedError`."""

    @functools.wraps(method)
    def refused(self: "Runtime[Any]", *_: Any, **__: Any) -> Any:
        name, backend = method.__name__, self.config.backend
        raise contracts.UnsupportedError(
            f"the runtime {backend!r} does not offer {name}; implement it in {type(self).__name__}",
            backend=backend,
            operation=name,
        )

    return cast(M, refused)


@dataclass(frozen=True)
class RankPlace:
    """What a rank is in the layout, the same for every model of its runtime."""

    device: torch.device  # what it trains on
    data_parallel_rank: int  # place among the ranks that see different data
    data_parallel_size: int
    data_parallel_group: dist.ProcessGroup  # the same ranks of other replicas; for a source rank, all source ranks
    is_source: bool  # whether it is the rank of its replica whose ``ForwardResult`` has outputs


class Runtime[H](ABC):
    """One rank's part of a training job. Every method is a collective over the handle's ranks unless it says otherwise.

    Each atom is declared here, once: its signature, and in its decorator what it needs of a model and how a group of
    ranks runs it. ``H`` names a model: a :class:`~rl_backend.contracts.ModelHandle` on a rank, a reference in a group's
    driver. A handle of another runtime raises :class:`~rl_backend.contracts.HandleError`.

    LoRA tenants share the frozen weights of one model, ``build_model(trainable=False)``. Each has weights, an optimizer,
    schedules, a version and random state, and its handle is taken by every atom of a model; ``zero_grad``,
    ``optimizer_step`` and ``lr_scheduler_step`` take a list of them as well. Checkpoints are of the tenant alone;
    ``export_weights`` and ``save_checkpoint(hf=True)`` give the base with the adapter added.

    ``forward_backward`` on the base takes sequences of several tenants in one pass: the sequence field
    :data:`~rl_backend.contracts.lora.LORA_FIELD` says whose each is, ``loss_fn`` is one for each by its name, and
    ``ForwardResult.tenants`` has each one's part. A loss that raises is an ``error`` there, and touches no other.
    """

    def __init__(self, config: contracts.RuntimeConfig) -> None:
        self.config = config

    @property
    @_optional
    def place(self) -> RankPlace:
        """This rank's place, known before a model is built."""

    @Atom(builds=True)
    @abstractmethod
    def build_model(
        self,
        *,
        forward_only: bool = False,
        trainable: bool = True,
        name: str = "",
        head: contracts.Head = "log_probs",
        hf_path: Path | str | None = None,
        optimizer: contracts.OptimizerConfig | None = None,
    ) -> H:
        """Builds the model of a Hugging Face directory and loads its weights.

        Args:
            forward_only: no optimizer, no gradients.
            trainable: False freezes the model for LoRA tenants; it is forward-only itself.
            name: for messages; empty takes one from the order of building.
            head: ``values`` builds a critic: a linear layer with bias on the final hidden state gives
                ``ModelOutput.values``. It is ``score.weight`` and ``score.bias`` of the directory, 0 where they are
                missing; ``lm_head.weight`` is not read.
            hf_path: None takes ``config.hf_path``. The model family follows from its ``config.json``.
            optimizer: None takes that of the configuration.

        Raises:
            ConfigError: a ``head`` that does not exist, or an ``optimizer`` for a forward-only model.
            UnsupportedError: the model family, a head or feature that it does not have, or quantised weights.
            CheckpointError: a weight file or tensor that is missing or of another shape, or a critic's directory without
                ``head="values"``.
        """

    @Atom(TRAINED, join=None)
    @abstractmethod
    def train_mode(self, handle: H) -> AbstractContextManager[None]:
        """Training behaviour inside the context; may nest. Not a collective."""

    @Atom(join=None)
    @abstractmethod
    def eval_mode(self, handle: H) -> AbstractContextManager[None]:
        """Evaluation behaviour inside the context; may nest. Not a collective."""

    @Atom(TRAINED)
    @abstractmethod
    def zero_grad(self, handle: H | Sequence[H]) -> None:
        """Drops all gradients, of one handle or several. Not a collective."""

    @Atom(
        Needs(("model", "grad"), trained=True, whole_gradients=True, form=" with a backward pass"),
        flag="forward_only",
        with_flag=ITS_WEIGHTS,
        join=None,
    )
    @abstractmethod
    def forward_backward(
        self,
        handle: H,
        data: Sequence[contracts.PackedBatch],
        loss_fn: contracts.Losses | None,
        *,
        forward_only: bool = False,
        router_replay: RouterReplay = "off",
    ) -> contracts.ForwardResult:
        """Runs every micro-batch forward and, unless ``forward_only``, backward; gradients add up until ``zero_grad``.

        Args:
            data: micro-batches, as many on every data-parallel rank.
            loss_fn: may be None in a forward-only pass. For sequences of several LoRA tenants one of each, by its name.
            router_replay: ``record`` adds ``routed_experts`` to the outputs, (L, layers with experts, top_k) of a
                sequence, in :func:`~rl_backend.contracts.route_dtype`. ``replay`` sends tokens to the experts that
                ``data`` says (:mod:`rl_backend.contracts.replay`), with weights and gradients of the router's own
                scores; tokens without routes go where the router sends them.

        Raises:
            BatchError: no micro-batches, another number on another rank, a loss that is not a 0-d tensor with a gradient,
                or routes that are missing or not of this model.
            UnsupportedError: recording or replaying routes of a model without routers.
        """

    @overload
    def optimizer_step(  # type: ignore[overload-overlap]
        self, handle: Sequence[H], *, adam: Sequence[contracts.AdamParams | None] | None = None, zero_grad: bool = False
    ) -> list[contracts.TenantStep]: ...
    @overload
    def optimizer_step(
        self, handle: H, *, adam: contracts.AdamParams | None = None, zero_grad: bool = False
    ) -> contracts.StepResult: ...
    @Atom(Needs(("model", "optimizer", "grad"), trained=True))
    @abstractmethod
    def optimizer_step(self, handle: Any, *, adam: Any = None, zero_grad: bool = False) -> Any:
        """Clips and steps, or, when any rank's gradient is not finite, changes nothing and returns ``ok=False``.

        Of several LoRA tenants a list of :class:`~rl_backend.contracts.TenantStep`, in their order; each is skipped by
        itself, and one without gradients of a complete pass has that as its ``error``.

        Args:
            adam: values of this step alone, of several tenants those of each; None takes the optimizer's.
            zero_grad: drops the gradients then, also those of a step that was skipped.

        Raises:
            HandleError: of a single handle, no gradients, or those of a pass that failed.
        """

    @overload
    def lr_scheduler_step(self, handle: Sequence[H]) -> list[float]: ...  # type: ignore[overload-overlap]
    @overload
    def lr_scheduler_step(self, handle: H) -> float: ...
    @Atom(TRAINED)
    @abstractmethod
    def lr_scheduler_step(self, handle: Any) -> Any:
        """Advances the schedules by one step and returns the learning rate of the next optimizer step. Not a collective.

        They count these calls, even after a refused optimizer step: rates follow the steps of the loop, as verl's do.
        """

    @Atom(ANY_STATE)
    @abstractmethod
    def to(
        self, handle: H, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Moves the chosen parts to host memory (``cpu``) or back to the training device (``device``). Not a collective."""

    @Atom(join=None)
    @abstractmethod
    def weight_infos(self, handle: H, *, dtype: torch.dtype | None = None) -> tuple[contracts.TensorInfo, ...]:
        """Name, shape and dtype of what ``export_weights`` yields, in its order, without moving data. Not a collective."""

    @Atom(ITS_WEIGHTS, join=None)
    @abstractmethod
    def export_weights(
        self,
        handle: H,
        *,
        dtype: torch.dtype | None = None,
        byte_budget: int | None = None,
        names: Collection[str] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, full tensor) in one order on every rank. A tensor is valid until the next one is taken.

        Closing the iterator early on one rank ends it on all: the others raise
        :class:`~rl_backend.contracts.ExportInterruptedError`.

        Args:
            dtype: None keeps what the runtime exports from: float32 masters in ``native``, ``param_dtype`` in ``bridge``.
                What ``native`` computes with in float32 is exported in no less.
            byte_budget: largest number of bytes gathered at one time; must hold the largest tensor.
            names: only these; unknown names raise :class:`~rl_backend.contracts.ConfigError` before anything is gathered.
        """

    @Atom(ITS_WEIGHTS, takes="models", join=None)
    @_optional
    def export_shards(
        self, handle: H, *, dtype: torch.dtype | None = None, held: bool = False
    ) -> Iterator[contracts.WeightShard]:
        """Yields this rank's share of every weight, in one order on every rank. A tensor is valid until the next one is
        taken.

        Args:
            dtype: as for :meth:`export_weights`.
            held: yields what :meth:`shard_infos` has of this rank instead, several rectangles of a weight or none, and
                gathers nothing that ranks hold as rectangles.
        """

    @Atom(join=None)
    def shard_infos(self, handle: H, *, dtype: torch.dtype | None = None) -> tuple[contracts.TensorPart, ...]:
        """The rectangles that ``export_shards(held=True)`` yields on all ranks, which are each weight once, in the order of
        ``weight_infos``. The same on every rank. With ``bridge`` a collective.

        Empty of a LoRA tenant, which has no rectangles of merged weights.
        """
        return ()

    @Atom(Needs(("grad",), trained=True, whole_gradients=True), join=None)
    @_optional
    def export_gradients(self, handle: H, *, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, full float32 gradient) in the order of :meth:`export_weights`, averaged over data
        parallelism and not yet clipped. A weight that no loss reached may be absent. A tensor is valid until the next one
        is taken.

        Args:
            names: only these; unknown names raise :class:`~rl_backend.contracts.ConfigError` before anything is gathered.

        Raises:
            HandleError: a forward-only handle, or one without gradients.
        """

    @Atom(ITS_WEIGHTS, join=None)
    @_optional
    def activations(self, handle: H, data: Sequence[contracts.PackedBatch]) -> list[Mapping[str, Tensor]]:
        """Hidden states between the modules of the model: a forward pass without gradients in evaluation mode.

        Returns:
            For each micro-batch, Hugging Face path of a module (``model.layers.0.input_layernorm``) -> its output, (T,
            hidden_size) float32 on the host, tokens in the batch's order, modules in the order of computation. The same
            on every source rank (``is_mp_src_rank_with_outputs``) of a model replica; empty on the others.
        """

    @Atom(
        Needs(("model", "optimizer"), trained=True, form=" of training state"),
        flag="hf",
        with_flag=ITS_WEIGHTS,
    )
    @abstractmethod
    def save_checkpoint(
        self,
        handle: H,
        path: Path | str,
        *,
        hf: bool = False,
        asynchronous: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a new directory: training state, or with ``hf`` a Hugging Face directory.

        ``path`` must not exist; it appears, complete, only when every rank has written its part.

        Args:
            hf: write ``config.json``, tokenizer files and safetensors in the dtype that ``export_weights`` gives. A
                critic's is one of transformers' ``AutoModelForTokenClassification`` with one label.
            asynchronous: return once the state is copied to host memory, which is kept for the next copy. The next save
                of this handle, load or :meth:`wait_for_checkpoint` waits for the files and raises the error on every
                rank, unless :meth:`checkpoint_is_pending` has on all; a close waits and raises too. Saves of several
                handles are written one after the other.
            extra: what the caller wants to find again, of what JSON has. Rank 0's is kept.

        Raises:
            CheckpointError: ``path`` exists, a rank could not write, or JSON does not keep ``extra``; then there is no
                ``path``.
            ConfigError: ``hf`` with ``extra`` or ``asynchronous``.
            HandleError: training state of a forward-only handle.
        """

    @Atom(ANY_STATE, reads=True)
    @abstractmethod
    def wait_for_checkpoint(self, handle: H) -> None:
        """Waits until an asynchronous save of this handle is complete; raises its error, on every rank."""

    @Atom(ANY_STATE, join="any", reads=True)
    @abstractmethod
    def checkpoint_is_pending(self, handle: H) -> bool:
        """Whether an asynchronous save of this handle is still being written; raises its error. Not a collective.

        False on one rank means that the checkpoint is committed. An error that only some ranks have raised is raised
        again, on every rank, by what waits for the save next.
        """

    @Atom(Needs(("model", "optimizer"), trained=True), join=None)
    @_optional
    def training_state(self, handle: H) -> tuple[StateTensors, TrainingManifest]:
        """What :meth:`save_checkpoint` would write: this rank's tensors themselves, valid until the model changes, and the
        facts beside them, of use on rank 0.
        """

    @Atom(Needs(("model", "optimizer"), weights=False))
    @abstractmethod
    def load_checkpoint(self, handle: H, path: Path | StateInMemory | str, *, optimizer: bool = True) -> dict[str, Any]:
        """Restores what ``save_checkpoint`` wrote, in any layout: weights, optimizer, schedules, random state, weight
        version.

        A forward-only handle takes the weights and their version. Gradients are dropped. Returns the ``extra`` of the save.

        Args:
            path: a directory, or what ranks have copied of :meth:`training_state` to memory.
            optimizer: False begins the optimizer and schedules of a LoRA tenant anew; the seed and dropout of its
                ``LoRAConfig`` may then be others than those saved.

        Raises:
            CheckpointError: not a complete checkpoint, a damaged file, another model's, or of another head.
            UnsupportedError: ``optimizer=False`` for a model that is no tenant.
        """

    @Atom(Needs(("optimizer",), trained=True), takes="tenants")
    @_optional
    def reset_optimizer(self, handle: H) -> None:
        """Sets the moments and the step count of a LoRA tenant to 0; its schedules continue. Not a collective."""

    @Atom(builds=True)
    @_optional
    def create_lora_adapter(
        self,
        handle: H,
        lora: LoRAConfig,
        optimizer: contracts.OptimizerConfig | None = None,
        *,
        name: str = "",
        head: contracts.Head | None = None,
    ) -> H:
        """Makes a tenant that leaves the model as it is, B being 0. A collective.

        Args:
            optimizer: None takes that of the configuration.
            name: unique among the tenants of ``handle``; empty takes one from the order of making.
            head: of its outputs; None takes the base's. ``values`` makes a critic: beside its adapters it trains a value
                head whole, which starts as that of ``build_model(head="values")`` and is called ``score`` in exports. A
                base that is a critic itself has no policies as tenants.

        Raises:
            HandleError: a model that was not built with ``trainable=False``.
            ConfigError: targets or a head that the model does not have, or a name that is taken.
            UnsupportedError: a runtime that does not offer it, or no value heads of tenants.
        """

    @Atom(ANY_STATE, takes="tenants", frees=True)
    @_optional
    def remove_lora_adapter(self, handle: H) -> None:
        """Frees a tenant; its handle cannot be used again. A collective only where an asynchronous save has to be waited
        for.

        Raises:
            CheckpointError: that save failed; the tenant stays: save it again, or remove it with another call.
        """

    @Atom(ANY_STATE, takes="tenants", reads=True)
    @_optional
    def get_lora_adapter(self, handle: H) -> LoRAInfo:
        """Facts about a tenant. Not a collective."""

    @Atom(ANY_STATE, reads=True)
    @_optional
    def list_lora_adapters(self, handle: H) -> list[LoRAInfo]:
        """The tenants of a model in the order of making. Not a collective."""

    @Atom(Needs(("model", "optimizer"), trained=True), reads=True)
    @_optional
    def get_optimizer_state(self, handle: H) -> OptimizerState:
        """Steps, learning rate and whole moments of a tenant, or of a model that is trained itself. A collective.

        Raises:
            UnsupportedError: a runtime that does not offer it, or whose parameters are no Hugging Face tensors.
        """

    @Atom(ANY_STATE, reads=True)
    @_optional
    def list_optimizer_states(self, handle: H) -> list[OptimizerStateInfo]:
        """Of the model, where it is trained, and of its tenants. Not a collective."""

    @Atom(ANY_STATE, reads=True)
    @_optional
    def get_backend_info(self, handle: H) -> BackendInfo:
        """What runs the model, or the base of a tenant, and for whom. Not a collective."""

    @Atom(ITS_WEIGHTS, takes="tenants", join=None)
    @_optional
    def export_lora_adapter(self, handle: H, *, copy: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields (peft's name, whole factor) in one order, float32, at the true rank. A collective over a model replica.

        Args:
            copy: False gives a single rank the tenant's own memory, which its next step changes.
        """

    @Atom(Needs(("model", "optimizer"), trained=True), takes="tenants")
    @_optional
    def import_lora_adapter(
        self, handle: H, tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | Path | str
    ) -> None:
        """Takes the factors that :meth:`export_lora_adapter` gives, or those of a directory that peft has written. A
        collective.

        The optimizer stays. Modules of a smaller rank, or of another scale, in a directory are brought to the tenant's.

        Raises:
            UnsupportedError: what a directory has beside plain factors.
            WeightCheckError: a name, shape or value that does not fit; nothing has changed then.
        """

    @Atom(join=None)
    @abstractmethod
    def is_mp_src_rank_with_outputs(self, handle: H) -> bool:
        """Whether this rank is the one of its model-parallel group whose ``ForwardResult`` has outputs. Not a collective."""

    @abstractmethod
    def close(self) -> None:
        """Frees every handle, and the process group if this runtime made it. Further calls raise HandleError."""
