"""The atoms of distributed training that every runtime offers."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend import contracts
from rl_backend.contracts.atoms import ANY_STATE, ITS_WEIGHTS, TRAINED, Atom, Needs
from rl_backend.contracts.lora import LoRAConfig, LoRAInfo
from rl_backend.contracts.result import BackendInfo, OptimizerState, OptimizerStateInfo
from rl_backend.runtime.router_replay import RouterReplay


@dataclass(frozen=True)
class RankPlace:
    """What a rank is in the layout, the same for every model of its runtime.

    Attributes:
        device: what it trains on.
        data_parallel_rank, data_parallel_size: place among the ranks that see different data.
        data_parallel_group: the corresponding ranks of the other replicas; for a source rank, all source ranks.
        is_source: whether it is the rank of its replica whose ``ForwardResult`` has outputs.
    """

    device: torch.device
    data_parallel_rank: int
    data_parallel_size: int
    data_parallel_group: dist.ProcessGroup
    is_source: bool


class Runtime[H](ABC):
    """One rank's part of a training job. Every method is a collective over the handle's ranks unless it says otherwise.

    Each atom is declared here, once: its signature, and in its decorator what it needs of a model and how a group of ranks
    runs it. ``H`` names a model: a :class:`~rl_backend.contracts.ModelHandle` on a rank, a reference in a group's driver.

    A runtime raises :class:`~rl_backend.contracts.HandleError` for a handle of another runtime.

    LoRA tenants, which a runtime may offer, share the frozen weights of one model, ``build_model(trainable=False)``. Each
    has weights, an optimizer, schedules, a weight version and random state of its own, and its handle is taken by every atom
    of a model: ``forward_backward``, ``to``, ``zero_grad``, ``optimizer_step`` and ``lr_scheduler_step`` (these three take a
    list of them as well), ``save_checkpoint`` and ``load_checkpoint`` of the tenant alone, ``export_weights`` and
    ``save_checkpoint(hf=True)`` of the base with the adapter added.

    ``forward_backward`` on the base takes sequences of several tenants in one pass: the sequence field
    :data:`~rl_backend.contracts.lora.LORA_FIELD` says whose each is, ``loss_fn`` is one for each by its name, and
    ``ForwardResult.tenants`` has each one's part. A loss that raises is an ``error`` there, and touches no other.
    """

    def __init__(self, config: contracts.RuntimeConfig) -> None:
        self.config = config

    @property
    def place(self) -> RankPlace:
        """This rank's place, known before a model is built.

        Raises:
            UnsupportedError: a runtime that does not offer it.
        """
        raise self._not_offered("place")

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
            trainable: False freezes the model for LoRA tenants (``create_lora_adapter``): it has no gradients, no moments
                and is forward-only itself.
            name: for messages; empty takes one from the order of building.
            head: ``values`` builds a critic: in place of the language-model head a linear layer with bias on the final
                normalised hidden state gives ``ModelOutput.values``. It is ``score.weight`` and ``score.bias`` of the
                directory; what the directory lacks of them is 0: values start at 0, or at those of a reward model
                without bias. A stored ``lm_head.weight`` is not read.
            hf_path: the directory; None takes ``config.hf_path``. The model family follows from its ``config.json``.
            optimizer: None takes that of the configuration.

        Raises:
            ConfigError: a ``head`` that does not exist, or an ``optimizer`` for a forward-only model.
            UnsupportedError: the model family, a head that it does not have, a feature that its configuration asks for, or
                weights that are quantised.
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
            router_replay: ``record`` adds ``routed_experts`` to the outputs, (L, layers with experts, top_k) of a sequence,
                in :func:`~rl_backend.contracts.route_dtype`. ``replay`` has every token go to the experts that ``data`` says
                (:mod:`rl_backend.contracts.replay`); their weights, and so gradients of the router, are still those
                of its own scores, and tokens without routes go where the router sends them.

        Raises:
            BatchError: no micro-batches, another number on another rank, a loss that is not a 0-d tensor with a gradient, or
                routes that are missing or not of this model.
            UnsupportedError: recording or replaying routes of a model without routers.
            HandleError: a backward pass asked of a forward-only handle.
        """

    @overload
    def optimizer_step(  # type: ignore[overload-overlap]
        self, handle: Sequence[H], *, adam: Sequence[contracts.AdamParams | None] | None = None
    ) -> list[contracts.StepResult]: ...
    @overload
    def optimizer_step(self, handle: H, *, adam: contracts.AdamParams | None = None) -> contracts.StepResult: ...
    @Atom(Needs(("model", "optimizer", "grad"), trained=True, whole_gradients=True))
    @abstractmethod
    def optimizer_step(self, handle: Any, *, adam: Any = None) -> Any:
        """Clips and steps, or, when any rank's gradient is not finite, changes nothing and returns ``ok=False``.

        Of several LoRA tenants a list of results, in their order; each is skipped by itself.

        Args:
            adam: values of this step alone, of several tenants those of each; None takes the optimizer's.

        Raises:
            HandleError: no gradients; then nothing has changed, of several tenants none.
        """

    @overload
    def lr_scheduler_step(self, handle: Sequence[H]) -> list[float]: ...  # type: ignore[overload-overlap]
    @overload
    def lr_scheduler_step(self, handle: H) -> float: ...
    @Atom(TRAINED)
    @abstractmethod
    def lr_scheduler_step(self, handle: Any) -> Any:
        """Advances the schedules by one step and returns the learning rate of the next optimizer step, of one handle or of
        each of several. Not a collective.

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
        """Yields (Hugging Face name, full tensor) in one order on every rank.

        A tensor is valid until the next one is taken. Closing the iterator early on one rank ends it on every rank: the
        others raise :class:`~rl_backend.contracts.ExportInterruptedError`.

        Args:
            dtype: None keeps what the runtime exports from: float32 masters in ``native``, ``param_dtype`` in ``bridge``.
                What ``native`` computes with in float32, whatever the dtype of the rest, is exported in no less.
            byte_budget: largest number of bytes gathered at one time; must hold the largest tensor.
            names: only these; unknown names raise :class:`~rl_backend.contracts.ConfigError` before anything is gathered.
        """

    @Atom(ITS_WEIGHTS, takes="models", join=None)
    def export_shards(self, handle: H, *, dtype: torch.dtype | None = None) -> Iterator[contracts.WeightShard]:
        """Yields this rank's share of every weight, in one order on every rank.

        A tensor is valid until the next one is taken.

        Args:
            dtype: as for :meth:`export_weights`.

        Raises:
            UnsupportedError: a runtime that does not offer it.
        """
        raise self._not_offered("export_shards")

    @Atom(Needs(("grad",), trained=True, whole_gradients=True), join=None)
    def export_gradients(self, handle: H, *, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, full float32 gradient) in the order of :meth:`export_weights`.

        Gradients are averaged over data parallelism and not yet clipped: what ``optimizer_step`` is going to take the norm
        of. A weight that no loss reached may be absent. As with weights, a tensor is valid until the next one is taken.

        Args:
            names: only these; unknown names raise :class:`~rl_backend.contracts.ConfigError` before anything is gathered.

        Raises:
            HandleError: a forward-only handle, or one without gradients.
            UnsupportedError: a runtime that does not offer it.
        """
        raise self._not_offered("export_gradients")

    @Atom(ITS_WEIGHTS, join=None)
    def activations(self, handle: H, data: Sequence[contracts.PackedBatch]) -> list[Mapping[str, Tensor]]:
        """Hidden states between the modules of the model: a forward pass without gradients in evaluation mode.

        Args:
            data: micro-batches, as for :meth:`forward_backward`.

        Returns:
            For each micro-batch, Hugging Face path of a module (``model.layers.0.input_layernorm``) -> its output, (T,
            hidden_size) float32 on the host, tokens in the batch's order, modules in the order of computation. The same on
            every source rank (``is_mp_src_rank_with_outputs``) of a model replica; empty on the others.

        Raises:
            BatchError: as :meth:`forward_backward`.
            UnsupportedError: a runtime that does not offer it.
        """
        raise self._not_offered("activations")

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
            hf: write ``config.json``, tokenizer files and safetensors in the dtype that ``export_weights`` gives. A critic's
                is one of transformers' ``AutoModelForTokenClassification`` with one label.
            asynchronous: return once the state is copied to host memory, which is kept for the next copy; files are written
                in the background. The next save of this handle, load or :meth:`wait_for_checkpoint` waits for it and raises
                its error on every rank, unless :meth:`checkpoint_is_pending` has on all; a close waits and raises too. Saves
                of several handles do not wait for each other, and are written one after the other.
            extra: what the caller wants to find again (where it is in its data, say), of what JSON has. Rank 0's is kept.

        Raises:
            CheckpointError: ``path`` exists, a rank could not write, or JSON does not keep ``extra`` as it is; then there is
                no ``path``.
            ConfigError: ``extra`` with ``hf``, which has no place for it.
            HandleError: training state of a forward-only handle.
        """

    @Atom(ANY_STATE)
    @abstractmethod
    def wait_for_checkpoint(self, handle: H) -> None:
        """Waits until an asynchronous save of this handle is complete; raises its error, on every rank."""

    @Atom(ANY_STATE, join="any")
    @abstractmethod
    def checkpoint_is_pending(self, handle: H) -> bool:
        """Whether an asynchronous save of this handle is still being written; raises its error. Not a collective.

        False on one rank means that the checkpoint is committed. An error that only some ranks have asked for is raised
        again, on every rank, by what waits for the save next.
        """

    @Atom(Needs(("model", "optimizer"), weights=False))
    @abstractmethod
    def load_checkpoint(self, handle: H, path: Path | str) -> dict[str, Any]:
        """Restores what ``save_checkpoint`` wrote: weights, optimizer, schedules, random state, weight version.

        A forward-only handle takes the weights and their version. Gradients are dropped. The layout may be another one.

        Returns:
            The ``extra`` of the save.

        Raises:
            CheckpointError: not a complete checkpoint, a file that is missing or damaged, or another model's, or of another
                head.
        """

    @Atom(builds=True)
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
                head whole, which starts as that of ``build_model(head="values")`` and is called ``score`` in exports. Actor,
                critic and reference then stand on one base. A base that is a critic itself has no policies as tenants.

        Raises:
            HandleError: a model that was not built with ``trainable=False``.
            ConfigError: targets or a head that the model does not have, or a name that is taken.
            UnsupportedError: a runtime that does not offer it, or no value heads of tenants.
        """
        raise self._not_offered("create_lora_adapter")

    @Atom(ANY_STATE, takes="tenants", frees=True)
    def remove_lora_adapter(self, handle: H) -> None:
        """Frees a tenant; its handle cannot be used again.

        A collective where the tenant has saved asynchronously and nothing has waited for that yet; not otherwise. It waits
        for the save then. If that failed, its error is raised, as by :meth:`wait_for_checkpoint`, and the tenant stays: save
        it again, or remove it with another call.

        Raises:
            CheckpointError: an asynchronous save of the tenant failed.
        """
        raise self._not_offered("remove_lora_adapter")

    @Atom(ANY_STATE, takes="tenants")
    def get_lora_adapter(self, handle: H) -> LoRAInfo:
        """Facts about a tenant. Not a collective."""
        raise self._not_offered("get_lora_adapter")

    @Atom(ANY_STATE)
    def list_lora_adapters(self, handle: H) -> list[LoRAInfo]:
        """The tenants of a model in the order of making. Not a collective."""
        raise self._not_offered("list_lora_adapters")

    @Atom(Needs(("model", "optimizer"), trained=True))
    def get_optimizer_state(self, handle: H) -> OptimizerState:
        """Steps, learning rate and whole moments of a tenant, or of a model that is trained itself. A collective.

        Raises:
            HandleError: a model that is not trained.
            UnsupportedError: a runtime that does not offer it, or whose parameters are no Hugging Face tensors.
        """
        raise self._not_offered("get_optimizer_state")

    @Atom(ANY_STATE)
    def list_optimizer_states(self, handle: H) -> list[OptimizerStateInfo]:
        """Of the model, where it is trained, and of its tenants. Not a collective."""
        raise self._not_offered("list_optimizer_states")

    @Atom(ANY_STATE)
    def get_backend_info(self, handle: H) -> BackendInfo:
        """What runs the model, or the base of a tenant, and for whom. Not a collective."""
        raise self._not_offered("get_backend_info")

    @Atom(ITS_WEIGHTS, takes="tenants", join=None)
    def export_lora_adapter(self, handle: H, *, copy: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields (peft's name, whole factor) in one order, float32, at the true rank. A collective over a model replica.

        Take all of them before the tenant's next step: a single rank reads each when it is taken.

        Args:
            copy: False is for factors that are read at once: a single rank gives the tenant's own memory, which its next
                step changes.
        """
        raise self._not_offered("export_lora_adapter")

    @Atom(Needs(("model", "optimizer"), trained=True), takes="tenants")
    def import_lora_adapter(
        self, handle: H, tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | Path | str
    ) -> None:
        """Takes the factors that :meth:`export_lora_adapter` gives, or those of a directory that peft has written.

        The optimizer stays. Modules of a smaller rank, or of another scale, in a directory are brought to the tenant's.
        A collective.

        Raises:
            UnsupportedError: what a directory has beside plain factors.
            WeightCheckError: a name, shape or value that does not fit; nothing has changed then.
        """
        raise self._not_offered("import_lora_adapter")

    @Atom(join=None)
    @abstractmethod
    def is_mp_src_rank_with_outputs(self, handle: H) -> bool:
        """Whether this rank is the one of its model-parallel group whose ``ForwardResult`` has outputs. Not a collective."""

    @abstractmethod
    def close(self) -> None:
        """Frees every handle, and the process group if this runtime made it. Further calls raise HandleError."""

    def _not_offered(self, operation: str) -> contracts.UnsupportedError:
        return contracts.UnsupportedError(
            f"the runtime {self.config.backend!r} does not offer {operation}; implement it in {type(self).__name__}",
            backend=self.config.backend,
            operation=operation,
        )
