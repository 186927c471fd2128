"""Engines of mixtures of experts, in whose processes what this project adds to vLLM can be left out.

Not in the file of their tests because every engine's process imports the file of its class.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.engine.engine import RolloutEngine
from actors.rollout.group.group import RolloutGroup
from actors.sync.push import WeightSync
from actors.sync.source import WeightSource
from rl_backend.checkpoint.hf_reader import read_hf_config
from tests.support.released_mixtures import randomise, write_mixture
from tests.support.rollout import ReferenceTrainer

PROMPTS = [[7], [5, 6, 7], list(range(20, 80)), [token * 7 % 120 + 2 for token in range(150)]]
SAMPLING = SamplingConfig(n=2, max_new_tokens=24)
_AS_V3 = ("kimi_k2", "deepseek_v32", "glm_moe_dsa")


class FamilyEngine(RolloutEngine):
    """An engine whose process answers questions about vLLM as it is."""

    def rounding_of_rotation(self) -> tuple[float, float]:
        """Largest differences between rotations of views and those in torch: in vLLM's kernel, and as they are done."""
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        model = self._vllm.llm.apply_model(_rotary_embedding)[0]
        positions, wide = torch.arange(5), torch.randn(5, 4, 128)
        found = []
        for rotate in (RotaryEmbedding.forward_cpu.__wrapped__, RotaryEmbedding.forward_cpu):
            query, key = (wide.clone()[:, heads, 64:] for heads in (slice(4), slice(1)))
            exact = model.forward_native(positions, query.clone(), key.clone())
            rotated = rotate(model, positions, query, key)
            found.append(max(float((one - other).abs().max()) for one, other in zip(rotated, exact, strict=True)))
        return found[0], found[1]

    def routes_by_sigmoid_alone(self) -> bool:
        """Whether vLLM's router for a CPU takes sigmoid scores without groups."""
        from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

        router = CPURouter.__new__(CPURouter)
        CPURouter.__init__.__wrapped__(router, 2, 4, scoring_func="sigmoid")
        try:
            router._compute_routing(torch.randn(3, 8), torch.randn(3, 4), None)
        except AssertionError:
            return False
        return True

    def takes_nameless_loaders(self) -> bool:
        """Whether vLLM's update asks no loader of a weight for its name."""
        from vllm.model_executor.model_loader.reload import layerwise

        tensor = torch.zeros(1)
        vars(tensor)["weight_loader"] = partial(print)
        return hasattr(layerwise._get_weight_loader(tensor), "__name__")

    def load_past_loaders(self, past: bool) -> None:
        """From now on gpt-oss is loaded as vLLM does it, or as this project does."""
        from vllm.model_executor.models.gpt_oss import GptOssModel

        if not hasattr(self, "_load"):
            self._load = GptOssModel.load_weights
        GptOssModel.load_weights = self._load.__wrapped__ if past else self._load


def _rotary_embedding(model: Any) -> Any:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    return next(module for module in model.modules() if isinstance(module, RotaryEmbedding))


class FamilyGroup(RolloutGroup):
    engine_class = FamilyEngine


class FamilyTrainer(ReferenceTrainer):
    """A transformers model in the engine's dtype, with other weights at every push, under the names of its directory.

    Types that transformers does not have are DeepSeek-V3's; indexers keep their weights, and nothing reads them.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        fields = read_hf_config(path)
        known = fields["model_type"] not in _AS_V3
        config = AutoConfig.from_pretrained(path) if known else DeepseekV3Config(**{**fields, "model_type": "deepseek_v3"})
        model_class: Any = AutoModelForCausalLM if known else DeepseekV3ForCausalLM
        self.model = model_class.from_pretrained(path, config=config, dtype=torch.float32, attn_implementation="eager")
        self.dtype = dtype
        self.source = WeightSource(self.named_weights)
        stored = load_file(path / "model.safetensors")
        self._indexers = {name: tensor for name, tensor in stored.items() if ".indexer." in name}

    def advance(self, scale: float = 0.1) -> None:
        self.source.version += 1
        randomise(self.model, self.source.version)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(self.dtype).float()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            weights = load_file(Path(folder) / "model.safetensors")
        for name, tensor in {**weights, **self._indexers}.items():
            yield name, tensor if name.endswith("e_score_correction_bias") else tensor.to(self.dtype)


class ServedFamily(NamedTuple):
    """An engine that started with random weights, and the model that is pushed to it."""

    model: Path
    rollout: RolloutGroup
    trainer: FamilyTrainer
    sync: WeightSync

    def push(self) -> None:
        self.trainer.advance()
        self.sync.push()

    def gaps(self) -> list[float]:
        """Between log-probs of the engine's samples and transformers', in nats."""
        return self.trainer.gaps(self.rollout.generate(PROMPTS, SAMPLING))


class FamilyEngines:
    """One engine at a time: the next family takes the memory of the last."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self.write = cache(self._write)

    def served(self, model_type: str, dtype: str = "float32", **fields: Any) -> ServedFamily:
        self.close()
        model = self._write(model_type, **fields)
        config = RolloutConfig(
            model_path=str(model),
            device="cpu",
            dtype=dtype,
            load_format="dummy",
            max_model_len=256,
            kv_cache_gib=0.05,
            return_routed_experts=True,
        )
        rollout = self._stack.enter_context(FamilyGroup(config))
        trainer = FamilyTrainer(model, getattr(torch, dtype))
        return ServedFamily(model, rollout, trainer, self._stack.enter_context(WeightSync(trainer.source, rollout)))

    def close(self) -> None:
        self._stack.close()

    def _write(self, model_type: str, **fields: Any) -> Path:
        return write_mixture(self._folder / model_type, model_type, **fields)
