"""A model whose layers wait for a fixed time in place of computing, so that ranks do not compete for cores."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from rl_backend.contracts import ConfigError, Head, ModelOptions, ModelOutput, NativeConfig, ParallelConfig
from rl_backend.model import BuildSettings, ModelFamily, ModelInput, register_model
from rl_backend.parallel.fsdp import apply_fsdp
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.primitive.deferred import weight_gradient

NAME = "timed"
VOCAB_SIZE = 16
HIDDEN = 1024


class TimedPass(torch.autograd.Function):
    """Waits for ``seconds`` in the forward pass, in the backward pass for the input and in the one for the weight.

    ``keep`` gives what is kept alive from the forward pass to the end of the last.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, seconds: float, keep: Callable[[], object]) -> Tensor:
        time.sleep(seconds)
        ctx.weight, ctx.seconds, ctx.kept = weight, seconds, keep()
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        time.sleep(ctx.seconds)
        compute = partial(_wait_for_weight, ctx.seconds, ctx.kept, torch.ones_like(ctx.weight))
        return grad.clone(), weight_gradient(ctx.weight, compute), None, None


def _wait_for_weight(seconds: float, kept: object, gradient: Tensor) -> Tensor:
    """The backward pass for the weight; what waits to call it keeps ``kept`` alive."""
    time.sleep(seconds)
    return gradient


class TimedOptions(ModelOptions):
    """Attributes:
    seconds: of one pass of one layer.
    """

    seconds: float = Field(gt=0.0)


class TimedLayer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = seconds

    def forward(self, hidden: Tensor) -> Tensor:
        passed: Tensor = TimedPass.apply(hidden, self.weight, self.seconds, object)
        return passed


class TimedStage(nn.Module):
    """Timed layers between an embedding and the mean of each hidden state, which stands for the token's log-prob."""

    def __init__(self, first: bool, layers: range, last: bool, seconds: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, HIDDEN) if first else None
        self.layers = nn.ModuleDict({str(index): TimedLayer(seconds) for index in layers})
        self.last = last

    def forward(self, inputs: ModelInput) -> Tensor | ModelOutput:
        hidden = inputs.hidden if self.embed is None else self.embed(inputs.input_ids)
        for layer in self.layers.values():
            hidden = layer(hidden)
        assert hidden is not None, "a stage that is not the first gets hidden states"
        return ModelOutput(log_probs=hidden.float().mean(-1)) if self.last else hidden


def _build(num_layers: int, settings: BuildSettings) -> nn.Module:
    assert isinstance(settings.options, TimedOptions), "the family's options_type"
    assert settings.stage is not None, "the model is for pipelines"
    return TimedStage(*settings.stage, settings.options.seconds)


def _parallelize(module: nn.Module, groups: ParallelGroups, config: NativeConfig) -> None:
    assert isinstance(module, TimedStage), "what _build made"
    apply_fsdp(module, list(module.layers.values()), groups, config)


def _weight_names(num_layers: int, head: Head) -> dict[str, str]:
    names = ["embed.weight", *(f"layers.{index}.weight" for index in range(num_layers))]
    return {name: f"model.{name}" for name in names}


def _num_layers(num_layers: int) -> int:
    return num_layers


def _parse(hf_config: Mapping[str, Any]) -> int:
    return int(hf_config["num_hidden_layers"])


def _check_layout(num_layers: int, parallel: ParallelConfig) -> None:
    if parallel.model_parallel_size != parallel.pp:
        raise ConfigError.of("ParallelConfig", parallel, "the timed model has pipeline ranks only")


register_model(
    ModelFamily(
        name=NAME,
        hf_model_types=(NAME,),
        options_type=TimedOptions,
        parse_config=_parse,
        build=_build,
        parallelize=_parallelize,
        weight_names=_weight_names,
        num_layers=_num_layers,
        check_layout=_check_layout,
    )
)


def write_timed(path: Path, num_layers: int) -> None:
    """Writes a directory of the family."""
    config = {"model_type": NAME, "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "num_hidden_layers": num_layers}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {f"model.layers.{index}.weight": torch.ones(1) for index in range(num_layers)}
    save_file(weights | {"model.embed.weight": torch.ones(VOCAB_SIZE, HIDDEN)}, path / "model.safetensors")
