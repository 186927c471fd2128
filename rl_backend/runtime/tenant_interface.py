"""The atoms of LoRA tenants that a runtime may offer."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from rl_backend.contracts import Head, ModelHandle, OptimizerConfig, UnsupportedError
from rl_backend.contracts.backend_info import BackendInfo, OptimizerState, OptimizerStateInfo
from rl_backend.contracts.lora import LoRAConfig, LoRAInfo


class TenantAtoms[H: ModelHandle]:
    """Tenants share the frozen weights of one model, ``build_model(trainable=False)``.

    Each has weights, an optimizer, schedules, a weight version and random state of its own, and its handle is taken by every
    atom of a model: ``forward_backward``, ``to``, ``zero_grad``, ``optimizer_step`` and ``lr_scheduler_step`` (these three
    take a list of them as well), ``save_checkpoint`` and ``load_checkpoint`` of the tenant alone, ``export_weights`` and
    ``save_checkpoint(hf=True)`` of the base with the adapter added.

    ``forward_backward`` on the base takes sequences of several tenants in one pass: the sequence field
    :data:`~rl_backend.contracts.lora.LORA_FIELD` says whose each is, ``loss_fn`` is one for each by its name, and
    ``ForwardResult.tenants`` has each one's part. A loss that raises is an ``error`` there, and touches no other.
    """

    def create_lora_adapter(
        self,
        handle: H,
        lora: LoRAConfig,
        optimizer: OptimizerConfig | None = None,
        *,
        name: str = "",
        head: Head | None = None,
    ) -> ModelHandle:
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
        raise self._no_tenants("create_lora_adapter")

    def remove_lora_adapter(self, handle: ModelHandle) -> None:
        """Frees a tenant; its handle cannot be used again. Not a collective."""
        raise self._no_tenants("remove_lora_adapter")

    def list_lora_adapters(self, handle: H) -> list[LoRAInfo]:
        """The tenants of a model in the order of making. Not a collective."""
        raise self._no_tenants("list_lora_adapters")

    def get_optimizer_state(self, handle: ModelHandle) -> OptimizerState:
        """Steps, learning rate and whole moments of a tenant, or of a model that is trained itself. A collective.

        Raises:
            HandleError: a model that is not trained.
            UnsupportedError: a runtime that does not offer it, or whose parameters are no Hugging Face tensors.
        """
        raise self._no_tenants("get_optimizer_state")

    def list_optimizer_states(self, handle: ModelHandle) -> list[OptimizerStateInfo]:
        """Of the model, where it is trained, and of its tenants. Not a collective."""
        raise self._no_tenants("list_optimizer_states")

    def get_backend_info(self, handle: ModelHandle) -> BackendInfo:
        """What runs the model, or the base of a tenant, and for whom. Not a collective."""
        raise self._no_tenants("get_backend_info")

    def export_lora_adapter(self, handle: ModelHandle, *, copy: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields (peft's name, whole factor) in one order, float32, at the true rank. A collective over a model replica.

        Take all of them before the tenant's next step: a single rank reads each when it is taken.

        Args:
            copy: False is for factors that are read at once: a single rank gives the tenant's own memory, which its next
                step changes.
        """
        raise self._no_tenants("export_lora_adapter")

    def import_lora_adapter(
        self, handle: ModelHandle, tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | Path | str
    ) -> None:
        """Takes the factors that :meth:`export_lora_adapter` gives, or those of a directory that peft has written.

        The optimizer stays. Modules of a smaller rank, or of another scale, in a directory are brought to the tenant's.
        A collective.

        Raises:
            UnsupportedError: what a directory has beside plain factors.
            WeightCheckError: a name, shape or value that does not fit; nothing has changed then.
        """
        raise self._no_tenants("import_lora_adapter")

    def _no_tenants(self, operation: str) -> UnsupportedError:
        return UnsupportedError(
            f"{type(self).__name__} does not offer {operation}: it has no LoRA tenants; use backend='native' or 'bridge'",
            operation=operation,
        )
