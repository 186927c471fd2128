"""verl's engines on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from rl_backend.contracts import OptimizerConfig, RuntimeConfig
from rl_backend.data import prefixes
from rl_backend.runtime.native.engine import NativeRuntime, native_runtime

if TYPE_CHECKING:
    from adapters.verl.engine import RuntimeEngine

torch.set_num_threads(1)

SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Ours -> verl's name."""


@contextmanager
def open_engine(
    model: Path | str,
    *,
    backend: str = "native",
    layout: Mapping[str, int] | None = None,
    head: str = "language_model",
    backend_options: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    contents: tuple[str, ...] = ("model", "optimizer", "extra"),
    router_replay: str = "disabled",
    async_save: bool = False,
    lora: Mapping[str, Any] | None = None,
    exact: bool = False,
    grouped: bool = False,
    **engine: Any,
) -> Iterator[RuntimeEngine]:
    """An engine that verl's registry would build from these configurations, initialised.

    Args:
        lora: fields of verl's model configuration.
        exact: masters, passes and gradients are float64, which no configuration can ask for.
        grouped: with verl's ``use_prefix_grouper``, and so that a single token which sequences begin with is shared.
    """
    from adapters.verl.cpu_platform import register

    register()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreOptimizerConfig
    from verl.workers.config.engine import EngineRouterReplayConfig

    from adapters.verl import engine as module
    from adapters.verl.engine import LanguageModelEngine, ValueModelEngine
    from adapters.verl.engine_config import RLBackendEngineConfig

    config = RLBackendEngineConfig(
        dtype="float32",
        backend=backend,
        backend_options={"device": "cpu", **(backend_options or {})},
        router_replay=EngineRouterReplayConfig(mode=router_replay),
        **{SIZES[name]: size for name, size in (layout or {}).items()},
        **({"use_prefix_grouper": True} if grouped else {}),
        **engine,
    )
    optimizer = {"lr": 1e-3, "lr_decay_style": "linear", "total_training_steps": 10, **(optimizer or {})}
    with ExitStack() as undo:
        patch = undo.enter_context(pytest.MonkeyPatch.context())
        if grouped:
            patch.setattr(prefixes, "SHORTEST_RUN", 1)
        if exact:
            patch.setattr(module, "create_runtime", _in_float64)
            # Another optimizer than the runtime's would have the configuration checked again.
            patch.setattr(module, "optimizer_settings", lambda config: None)
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        made = (LanguageModelEngine if head == "language_model" else ValueModelEngine)(
            HFModelConfig(path=str(model), load_tokenizer=False, model_type=head, **(lora or {})),
            config,
            None if config.forward_only else McoreOptimizerConfig(**optimizer),
            CheckpointConfig(save_contents=list(contents), load_contents=list(contents), async_save=async_save),
        )
        undo.callback(made.close)
        made.initialize()
        yield made


def _in_float64(config: RuntimeConfig) -> NativeRuntime:
    update = {"param_dtype": "float64", "reduce_dtype": "float64", "optimizer": OptimizerConfig(lr=1e-3)}
    exact = config.backend_cfg.model_copy(update=update)
    return native_runtime(config.model_copy(update={"backend_cfg": exact}))


def mean_loss(engine: RuntimeEngine, output: Mapping[str, Any]) -> float:
    """The loss that verl's worker reports, from the source ranks to all."""
    found = torch.zeros(1, dtype=torch.float64)
    if engine.is_mp_src_rank_with_outputs():
        found += sum(output["loss"]) / engine.get_data_parallel_size()
    dist.all_reduce(found)
    return found.item()
