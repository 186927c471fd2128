"""Models of a runtime, and where each of their parts is."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn

from rl_backend import contracts
from rl_backend.checkpoint.host_memory import HostMemory
from rl_backend.contracts import HandleError, UnsupportedError
from rl_backend.contracts.atoms import PARTS, Part
from rl_backend.parallel.groups import RankGroups
from rl_backend.runtime.adaptable import Adaptable
from rl_backend.runtime.interface import REPLAY_MODES, RouterReplay

type MovedStorage = tuple[torch.UntypedStorage, Tensor]
"""A storage that is empty, and its contents in host memory."""


@dataclass
class Offload:
    """Where the parts of one handle are.

    A part is moved by emptying and refilling the storages of its tensors: every view and alias (FSDP's shards, Megatron's
    buffers, the optimizer's references) stays valid, nothing is rebuilt, and results are bit-identical. On a CPU it works
    the same way and saves no memory: the copies are in the same memory.
    """

    handle_name: str
    device: torch.device
    _moved: dict[Part, list[MovedStorage]] = field(default_factory=dict)
    _memory: dict[Part, HostMemory] = field(default_factory=dict)

    def require(self, operation: str, *parts: Part) -> None:
        """Raises :class:`HandleError` when one of ``parts`` is in host memory."""
        away = [part for part in parts if part in self._moved]
        if away:
            arguments = ", ".join(f"{part}={part in away}" for part in PARTS)
            raise HandleError(
                f"{operation} on {self.handle_name!r} while its {' and '.join(away)} is in host memory; call "
                f'to(handle, "device", {arguments}) first',
                handle=self.handle_name,
                operation=operation,
                parts=away,
            )

    def offload(self, part: Part, tensors: Iterable[Tensor]) -> None:
        """Moves the storages of ``tensors`` to host memory; nothing to do when the part is there."""
        if part in self._moved:
            return
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        fixed = [storage for storage in storages.values() if storage.nbytes() and not storage.resizable()]
        if fixed:
            raise UnsupportedError(
                f"{len(fixed)} tensors of the {part} of {self.handle_name!r} have memory that cannot be released "
                "(mapped from a file or shared with another library), so they cannot be moved to host memory"
            )
        # On a GPU kept for the next trip: to lock pages costs more than the copy.
        memory = self._memory.setdefault(part, HostMemory(self.device))
        hosts = memory.take([storage.nbytes() for storage in storages.values()])
        moved = list(zip(storages.values(), hosts, strict=True))
        for storage, host in moved:
            host.copy_(_bytes(storage), non_blocking=True)
        self._synchronize()
        for storage, _ in moved:
            storage.resize_(0)
        self._moved[part] = moved
        # Other processes on the device, engines above all, need the memory, which allocators keep.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif (libc := ctypes.CDLL(None)) and hasattr(libc, "malloc_trim"):  # glibc's; others give it back themselves
            libc.malloc_trim(0)

    def reload(self, part: Part) -> None:
        """Moves a part back to the training device; nothing to do when it is there. After an error the whole part is in host
        memory.
        """
        moved = self._moved.get(part, [])
        try:
            for storage, host in moved:
                storage.resize_(host.nbytes)
                _bytes(storage).copy_(host, non_blocking=True)
            self._synchronize()
        except BaseException:
            for storage, _ in moved:
                storage.resize_(0)
            raise
        self.forget(part)

    def forget(self, part: Part) -> None:
        """Gives up the contents of a part whose tensors are being dropped; it counts as on the device again."""
        self._moved.pop(part, None)
        if self.device.type != "cuda":
            self._memory.pop(part, None)

    def clear(self, part: Part) -> None:
        """Brings a part back filled with zeros; nothing to do when it is on the device."""
        for storage, host in self._moved.get(part, ()):
            storage.resize_(host.nbytes)
            _bytes(storage).zero_()
        self.forget(part)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class ScheduledOptimizer(Protocol):
    """An optimizer with a learning-rate schedule; ``learning_rate`` is that of the next step."""

    @property
    def num_steps(self) -> int: ...

    @property
    def learning_rate(self) -> float: ...

    def schedule_step(self) -> float:
        """Advances the schedules and returns the learning rate of the next step."""
        ...


def require_head(head: str) -> None:
    """Raises :class:`ConfigError` for a head that does not exist."""
    if head not in get_args(contracts.Head.__value__):
        known = ", ".join(map(repr, get_args(contracts.Head.__value__)))
        raise contracts.ConfigError.of("head", head, f"expected one of {known}")


@dataclass(eq=False, kw_only=True)
class GuardedHandle[O: ScheduledOptimizer](ABC):
    """One model of a :class:`~rl_backend.runtime.guarded.GuardedRuntime`: a :class:`~rl_backend.contracts.ModelHandle`."""

    name: str
    forward_only: bool
    head: contracts.Head
    config: contracts.RuntimeConfig  # the runtime's, with the ``hf_path`` and optimizer of this model
    groups: RankGroups
    hf_config: Mapping[str, Any]  # ``config.json``
    kept: Mapping[str, tuple[int, ...]]
    vocab_size: int
    max_length: int | None  # longest sequence, in tokens; None where the model sets no limit
    optimizer: O | None  # None for a forward-only handle
    micro_batch_multiple: int = 1
    shares_prefixes: bool = False
    weight_version: int = 0
    base: contracts.ModelHandle | None = None
    lora_id: int = -1
    adaptable: Adaptable | None = None  # what LoRA tenants can adapt; None for a model that is trained itself
    owner: object | None = None  # the runtime that it belongs to; None once it is closed
    data_parallel_rank: int = field(init=False)
    data_parallel_size: int = field(init=False)
    offload: Offload = field(init=False)
    broken: str = ""  # why its gradients cannot be used, until ``zero_grad``
    damaged: str = ""  # why its weights cannot be used, until a checkpoint loads
    loaded: str = ""  # digest of the manifest of the checkpoint that it has loaded

    def __post_init__(self) -> None:
        self.data_parallel_rank, self.data_parallel_size = self.groups.dp_rank, self.groups.dp_size
        self.offload = Offload(self.name, self.groups.device)

    @property
    @abstractmethod
    def routed_layers(self) -> contracts.RoutedLayers | None:
        """Its layers with experts; None where routes cannot be replayed."""

    @property
    def indexed_layers(self) -> contracts.IndexedLayers | None:
        """Its layers that choose keys; None where recorded keys cannot be replayed."""
        return None

    @abstractmethod
    def roots(self) -> Iterable[nn.Module]:
        """The modules that the model consists of on this rank."""

    @property
    @abstractmethod
    def weights(self) -> tuple[contracts.TensorInfo, ...]:
        """Every weight of the whole model in the dtype that it is kept in, in the order of export."""

    @property
    def in_float32(self) -> frozenset[str]:
        """Hugging Face names of weights that are computed with in float32, whatever the dtype of the rest."""
        return self.base.in_float32 if isinstance(self.base, GuardedHandle) else frozenset()

    @property
    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of what a checkpoint holds, by which it knows the model."""
        return {info.name: info.shape for info in self.weights}

    @abstractmethod
    def part_tensors(self) -> Mapping[Part, Sequence[Tensor]]:
        """This rank's tensors of each part that the handle has."""

    @abstractmethod
    def require_schedulable(self, num_micro_batches: int, *, forward_only: bool) -> None:
        """Raises :class:`BatchError` for a number of micro-batches that the engine cannot run."""

    def require_replayable(self, router_replay: RouterReplay) -> None:
        """Raises for a mode that does not exist, or routes of a model whose routers the engine cannot record or replay."""
        if router_replay not in REPLAY_MODES:
            raise contracts.BatchError(
                f"router_replay={router_replay!r}; expected one of {', '.join(REPLAY_MODES)}", router_replay=router_replay
            )
        if router_replay != "off" and (self.routed_layers is None or not self.routed_layers.layers):
            raise contracts.UnsupportedError(
                f"router_replay={router_replay!r}: {self.name} has no routers to record or replay; use 'off'",
                router_replay=router_replay,
            )

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drops all gradients, those in host memory too."""

    @property
    @abstractmethod
    def has_gradients(self) -> bool:
        """Whether this rank has gradients since the last ``zero_grad``."""

    @abstractmethod
    def step(self, adam: contracts.AdamParams | None = None) -> contracts.StepResult:
        """Clips and steps, with the values of this step, or changes nothing."""

    def mark_incomplete(self) -> None:
        self.broken = "forward_backward raised an error in the middle, so its gradients are incomplete"

    def release(self) -> None:
        """Drops every tensor; the handle cannot be used again."""
        self.owner = self.optimizer = None
        self.offload = Offload(self.name, self.groups.device)

    @property
    def trainer(self) -> O:
        """The optimizer of a handle that is trained."""
        assert self.optimizer is not None, f"{self.name!r} is forward-only"
        return self.optimizer

    def require_trained(self, operation: str) -> None:
        """Raises :class:`HandleError` for a forward-only handle."""
        if self.optimizer is None:
            raise contracts.HandleError(
                f"{operation} on {self.name!r}, which is forward-only: it has no gradients and no optimizer; "
                "build it with build_model(forward_only=False)",
                handle=self.name,
                operation=operation,
            )

    def require_gradients(self, operation: str) -> None:
        """Raises :class:`HandleError` for a handle that no complete backward pass has given gradients."""
        if self.broken:
            raise HandleError(f"{operation} on {self.name!r}: {self.broken}; call zero_grad first", handle=self.name)
        if not self.has_gradients:
            raise HandleError(
                f"{operation} on {self.name!r} without gradients; call forward_backward first", handle=self.name
            )

    @contextmanager
    def training(self, enabled: bool) -> Generator[None]:
        """Training or evaluation behaviour of every module inside; may nest."""
        roots = list(self.roots())
        before = [(module, module.training) for root in roots for module in root.modules()]
        for root in roots:
            root.train(enabled)
        try:
            yield
        finally:
            for module, was_training in before:
                module.training = was_training
