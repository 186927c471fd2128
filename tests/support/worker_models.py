"""vLLM's model of one worker of several, built in this process alone: its groups say who it is, and send nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype

import actors.rollout.vllm.worker  # noqa: F401, the patches
from actors.rollout.vllm.capabilities import config_folder
from actors.rollout.vllm.patches import name_weight_loaders
from rl_backend.checkpoint.hf_reader import read_hf_config


class _Group:
    """What a worker asks of a group of ``size`` while its model is built and loaded."""

    device = torch.device("cpu")

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.local_rank = self.rank_in_group = rank
        self.world_size = size
        self.ranks = list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = SimpleNamespace(rank=lambda: rank, size=lambda: size)


@contextmanager
def worker_model(
    path: Path, rank: int, size: int, *, device: str = "cpu", **engine_args: Any
) -> Iterator[tuple[nn.Module, Any]]:
    """The model of worker ``rank`` of ``size``, with random weights that no kernel packs, and vLLM's configuration of it."""
    with config_folder(read_hf_config(path)) as folder:
        config = _vllm_config(path, size, hf_config_path=folder, **engine_args)
    alone, shared = _Group(0, 1), _Group(rank, size)
    groups: dict[str, Any] = {
        "_WORLD": shared,
        "_TP": shared,
        "_EP": shared,
        "_PP": alone,
        "_DP": alone,
        "_DCP": alone,
        "_PCP": alone,
    }
    with (
        mock.patch.multiple(parallel_state, **groups),
        set_current_vllm_config(config),
        set_default_torch_dtype(torch.float32),
        torch.device(device),
    ):
        model = initialize_model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        for module in model.modules():
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading = lambda layer: None
        yield model, config


def _vllm_config(path: Path, size: int, **engine_args: Any) -> Any:
    # vLLM imports itself in another process to look at a model's class, which takes longer than all else here.
    in_process = mock.patch.object(registry, "_run_in_subprocess", lambda look: look())
    arguments = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, **engine_args}
    with in_process:
        return EngineArgs(model=str(path), tensor_parallel_size=size, **arguments).create_engine_config()


def update(model: nn.Module, config: Any, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Loads weights as a push does, and returns copies of all that the model has then."""
    with torch.no_grad():
        name_weight_loaders(model)
        initialize_layerwise_reload(model)
        model.load_weights(weights)  # type: ignore[operator]
        finalize_layerwise_reload(model, config.model_config)
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
