"""verl's engines on the runtimes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, override

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils.device import get_device_name
from verl.workers.engine.base import BaseEngine, BaseEngineCtx
from verl.workers.engine.spec import ShardSpec
from verl.workers.engine.utils import enable_full_determinism, hf_delta_export

from adapters.verl.batches import BatchRoutes, MicroBatchLoss, VerlLoss, as_verl_output, cut_batch, router_replay
from adapters.verl.checkpoints import EngineCheckpoints, own_tokenizer
from adapters.verl.cpu_platform import require_device
from adapters.verl.engine_model import EngineModel, Exported, delta_entry, shards_with_specs
from adapters.verl.options.settings import engine_settings, optimizer_settings
from rl_backend.runtime import Runtime, create_runtime

if TYPE_CHECKING:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig


class RuntimeEngine(BaseEngine):
    """A model of verl's ``TrainingWorker`` on a runtime of this package. Its process groups exist once it is made.

    Raises:
        ConfigError: a configuration that cannot be honoured, before anything is loaded.
    """

    model_type: str

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: McoreEngineConfig,
        optimizer_config: McoreOptimizerConfig | None,
        checkpoint_config: CheckpointConfig | None,
    ) -> None:
        super().__init__()
        require_device()
        self.settings = engine_settings(
            model_config, engine_config, optimizer_config, checkpoint_config, model_type=self.model_type
        )
        self._optimizer_config = optimizer_config
        self._export_dtype: torch.dtype = getattr(torch, engine_config.dtype)
        self._checkpoints = EngineCheckpoints(
            self.settings.save_contents,
            self.settings.load_contents,
            own_tokenizer(model_config),
            sharded=engine_config.use_dist_checkpointing,
            asynchronous=bool(checkpoint_config and checkpoint_config.async_save),
            last_step=getattr(optimizer_config, "total_training_steps", 0),
            lora=self.settings.lora is not None,
        )
        if self.settings.full_determinism:
            enable_full_determinism(self.settings.runtime.seed)
        self._runtime: Runtime[Any] = create_runtime(self.settings.runtime)
        self._model: EngineModel | None = None
        self.mode: str | None = None
        # verl's prime_delta_snapshots fills it: name -> this rank's share as it was last sent.
        self._delta_shard_snap: dict[str, Tensor] = {}

    @override
    def initialize(self) -> None:
        self._build(None)

    def _build(self, hf_path: str | None) -> None:
        settings = self.settings
        if self._model is not None:
            self.close()
            self._runtime = create_runtime(settings.runtime)
        config = None if settings.forward_only else self._optimizer_config
        optimizer = None if config is None else optimizer_settings(config)
        self._model = EngineModel(self._runtime, settings, optimizer, hf_path)
        self._rest()

    @property
    def model(self) -> EngineModel:
        assert self._model is not None, "verl calls initialize() first"
        return self._model

    @property
    def handle(self) -> Any:
        return self.model.trained

    @property
    def module(self) -> list[nn.Module]:
        return list(self.model.base.roots())

    @property
    def optimizer(self) -> Any:
        return self.handle.optimizer

    @property
    @override
    def is_param_offload_enabled(self) -> bool:
        return self.settings.param_offload

    @property
    @override
    def is_optimizer_offload_enabled(self) -> bool:
        return self.settings.optimizer_offload

    @override
    def train_mode(self, **options: Any) -> EngineMode:
        return EngineMode(self, "train", **options)

    @override
    def eval_mode(self, **options: Any) -> EngineMode:
        return EngineMode(self, "eval", **options)

    def runtime_mode(self, mode: str) -> AbstractContextManager[None]:
        enter = self._runtime.train_mode if mode == "train" else self._runtime.eval_mode
        return enter(self.handle)

    @override
    def forward_backward_batch(self, data: TensorDict, loss_function: VerlLoss | None, forward_only: bool = False) -> Any:
        """Runs verl's batch, cut as verl or ``use_prefix_grouper`` cuts it, with verl's loss on verl's own micro-batches.

        Returns:
            on a source rank that of :func:`~adapters.verl.batches.as_verl_output`; elsewhere an empty dictionary.
        """
        self._checkpoints.poll(self._runtime, self.handle)
        # A reference never replays, whether it is another model or this one without its adapter.
        model = self.model.at_work
        mode = self.settings.router_replay if model is self.handle else "disabled"
        replay = router_replay(data, mode, forward_only=forward_only)
        place, cp_size = self._runtime.place, self.settings.runtime.backend_cfg.parallel.cp
        routes = BatchRoutes(mode, len(model.routed_layers.sparse)) if replay == "replay" else None
        batch = cut_batch(
            data,
            place,
            multiple=model.micro_batch_multiple,
            cp_size=cp_size,
            routes=routes,
            by_computed=self.settings.use_prefix_grouper and model.shares_prefixes,
        )
        loss = None if loss_function is None else MicroBatchLoss(loss_function)
        result = self._runtime.forward_backward(model, batch.packed, loss, forward_only=forward_only, router_replay=replay)
        return as_verl_output(result, batch, loss) if self.is_mp_src_rank_with_outputs() else {}

    @override
    def optimizer_zero_grad(self) -> None:
        self._runtime.zero_grad(self.handle)

    @override
    def optimizer_step(self) -> float:
        """The gradient norm before clipping; when it is not finite nothing has changed, and the runtime has logged why."""
        return float(self._runtime.optimizer_step(self.handle).grad_norm)

    @override
    def lr_scheduler_step(self) -> float:
        return float(self._runtime.lr_scheduler_step(self.handle))

    @override
    def get_data_parallel_size(self) -> int:
        return self._runtime.place.data_parallel_size

    @override
    def get_data_parallel_rank(self) -> int:
        return self._runtime.place.data_parallel_rank

    @override
    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup:
        return self._runtime.place.data_parallel_group

    @override
    def is_mp_src_rank_with_outputs(self) -> bool:
        return self._runtime.place.is_source

    @override
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves parts by hand. On a CPU, verl's device is the host: they come back from where modes have put them."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        where: Literal["cpu", "device"] = "device" if device == get_device_name() else "cpu"
        self.move(where, model=model, optimizer=optimizer, grad=grad)

    def move(self, where: Literal["cpu", "device"], *, model: bool, optimizer: bool, grad: bool) -> None:
        self.model.move(where, model=model, optimizer=optimizer, grad=grad)

    @override
    def get_per_tensor_param(self, layered_summon: bool = False, base_sync_done: bool | None = None, **_: Any) -> Exported:
        """Every weight under its Hugging Face name, whole, in verl's ``dtype``, on every rank in one order.

        Of LoRA that is not merged, the base (``base_sync_done=False``) or the adapter by peft's names; None is refused.
        ``layered_summon`` is of no effect: weights are gathered a few at a time.
        """
        self.move("device", model=True, optimizer=False, grad=False)
        return self.model.for_rollout(self._export_dtype, base_sync_done=base_sync_done)

    @override
    def get_per_tensor_param_shard(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor, ShardSpec]], None]:
        """This rank's share of every weight (:meth:`~rl_backend.runtime.Runtime.export_shards`)."""
        self.move("device", model=True, optimizer=False, grad=False)
        return shards_with_specs(self.model.shards(self._export_dtype)), None

    @override
    def get_per_tensor_param_delta_shard(self, **_: Any) -> tuple[Iterator[Any], None]:
        """Changes in this rank's shares since the last export, or since ``prime_delta_snapshots``."""
        return hf_delta_export(self.get_per_tensor_param_shard()[0], self._delta_shard_snap, delta_entry), None

    @override
    def disable_adapter(self) -> AbstractContextManager[None]:
        return self.model.without_adapter()

    @override
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        self.move("device", model=True, optimizer=True, grad=False)
        try:
            self._checkpoints.save(self._runtime, self.handle, local_path, hdfs_path, max_ckpt_to_keep, step=global_step)
        finally:
            self._rest()

    @override
    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:
        """Restores what ``save_checkpoint`` wrote; None, as in verl's engines, only finishes a save in the background."""
        if local_path is None:
            self._checkpoints.finish(self._runtime, self.handle)
            return
        weights = self._checkpoints.weights_directory(local_path, hdfs_path)
        if weights is not None and self.settings.lora is None:
            self._build(str(weights))
            return
        self.move("device", model=True, optimizer=True, grad=False)
        if weights is None:
            self._checkpoints.load(self._runtime, self.handle, local_path, hdfs_path)
        else:
            self._checkpoints.finish(self._runtime, self.handle)
            self.model.renew_tenant(str(weights))
        self._rest()

    def close(self) -> None:
        try:
            if self._model is not None:
                self._checkpoints.finish(self._runtime, self.handle)
        finally:
            self._runtime.close()

    def _rest(self) -> None:
        if self.mode is None:
            settings = self.settings
            self.move("cpu", model=settings.param_offload, optimizer=settings.optimizer_offload, grad=settings.param_offload)


class EngineMode(BaseEngineCtx):
    """Brings the engine's parts to the device, sets the mode, and undoes both. May nest: the outermost one undoes.

    Args:
        disable_auto_offload: leave the parts where they are.
        zero_grad_on_exit: drop gradients after training; after an error they are dropped in any case.
    """

    engine: RuntimeEngine

    def __init__(self, engine: RuntimeEngine, mode: str, **options: Any) -> None:
        super().__init__(engine, mode, **options)
        self._outer_mode: str | None = None
        self._undo = ExitStack()
        self._leaving = False

    def __enter__(self) -> None:
        self._outer_mode = self.engine.mode
        with ExitStack() as undo:
            undo.enter_context(self.engine.runtime_mode(self.mode))
            undo.callback(setattr, self.engine, "mode", self._outer_mode)
            super().__enter__()
            self._undo = undo.pop_all()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.close()
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        self._leaving = True
        super().__exit__(kind, error, trace)
        self.engine.mode = self._outer_mode

    def _context_switch(self, device: str) -> None:
        # verl names the device to go to, which on a CPU does not say whether parts are wanted or not any more.
        if self.disable_auto_offload or (self._leaving and self._outer_mode is not None):
            return
        training, settings = self.mode == "train", self.engine.settings
        self.engine.move(
            "cpu" if self._leaving else "device",
            model=settings.param_offload,
            optimizer=training and settings.optimizer_offload,
            grad=training and settings.param_offload,
        )


class LanguageModelEngine(RuntimeEngine):
    """Log-probs and entropy."""

    model_type = "language_model"


class ValueModelEngine(RuntimeEngine):
    """Values, of a critic."""

    model_type = "value_model"

    @override
    def disable_adapter(self) -> AbstractContextManager[None]:
        # A critic is no reference; verl's trainer leaves the actor's request in its batch.
        return nullcontext()
