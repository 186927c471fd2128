"""A plugin as a third party writes it: a model family and a runtime, added through the public interface alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rl_backend import (
    BackendConfig,
    BuildSettings,
    ModelFamily,
    ModelInput,
    ModelOptions,
    ModelOutput,
    NativeConfig,
    register_model,
    register_runtime,
)
from rl_backend.contracts import Head
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.runtime.guarded import GuardedRuntime
from rl_backend.runtime.native.engine import NativeEngine
from rl_backend.runtime.native.handle import NativeHandle


class BigramOptions(ModelOptions):
    """``scale`` multiplies all logits."""

    scale: float = 1.0


class Bigram(nn.Module):
    """Log-probs of the next token from a table, with biases."""

    def __init__(self, vocab_size: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.table = nn.Embedding(vocab_size, vocab_size)
        self.out = nn.Linear(vocab_size, vocab_size)

    def forward(self, inputs: ModelInput) -> ModelOutput:
        logits: Tensor = self.scale * self.out(self.table(inputs.input_ids)).float() / inputs.temperature
        log_probs = logits.log_softmax(-1)
        known = inputs.labels >= 0
        chosen = log_probs.gather(-1, inputs.labels.clamp(min=0)[:, None])[:, 0] * known
        entropy = -(log_probs.exp() * log_probs).sum(-1) * known if inputs.calculate_entropy else None
        return ModelOutput(log_probs=chosen, entropy=entropy)


def _build(vocab_size: int, settings: BuildSettings) -> nn.Module:
    assert isinstance(settings.options, BigramOptions)
    return Bigram(vocab_size, settings.options.scale)


def _parallelize(module: nn.Module, groups: ParallelGroups, config: NativeConfig) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=groups.fsdp_mesh)


def _parse_config(hf_config: Mapping[str, Any]) -> int:
    return int(hf_config["vocab_size"])


def _weight_names(vocab_size: int, head: Head) -> Mapping[str, str]:
    return {"table.weight": "bigram.table", "out.weight": "bigram.out.weight", "out.bias": "bigram.out.bias"}


BIGRAM = ModelFamily("bigram", ("bigram",), BigramOptions, _parse_config, _build, _parallelize, _weight_names)
register_model(BIGRAM)


class CountingConfig(BackendConfig):
    """Options of :class:`CountingRuntime`."""

    greeting: str = "hello"


class CountingRuntime(GuardedRuntime[NativeHandle]):
    """A runtime of another's making that builds on ours."""

    def __init__(self, config: Any) -> None:
        assert isinstance(config.backend_cfg, CountingConfig)
        self.greeting = config.backend_cfg.greeting
        native = config.replace(backend="native", backend_cfg=NativeConfig(device="cpu"))
        super().__init__(native, NativeEngine(native))
        self.steps = 0

    def optimizer_step(self, handle: Any) -> Any:
        self.steps += 1
        return super().optimizer_step(handle)


register_runtime("counting", CountingConfig, CountingRuntime)


def write_bigram(path: Any, vocab_size: int = 128) -> None:
    """A Hugging Face directory of the family."""
    import json

    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "bigram", "vocab_size": vocab_size}))
    generator = torch.Generator().manual_seed(0)
    shapes = {"bigram.table": (vocab_size,) * 2, "bigram.out.weight": (vocab_size,) * 2, "bigram.out.bias": (vocab_size,)}
    tensors = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
