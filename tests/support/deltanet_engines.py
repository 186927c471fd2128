"""Engines of models with gated DeltaNet, in whose processes patches can be left out, and the trainer beside them.

Not in the file of their tests because every engine's process imports the file of its class, and because files share them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.engine.engine import RolloutEngine
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import AdapterVersion, EngineInfo, PushedAdapter, Sample
from actors.rollout.placement import NodePlace
from actors.sync.push import WeightSync
from actors.wire.factors import PackedFactors
from rl_backend.contracts.lora import peft_name
from tests.support.engines import EngineOfTurns, slot_bytes
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next
from tests.support.rollout import ReferenceTrainer

LONG = [token * 7 % 120 + 2 for token in range(300)]
PROMPTS = [[7], [5, 6], list(range(10, 60)), LONG[:129], LONG, [9]]
SAMPLING = SamplingConfig(n=2, max_new_tokens=12)
ROUNDED, MIXTURE = "bfloat16", "mixture"
NESTED = (MIXTURE, ROUNDED)
"""Served from directories as Qwen publishes them."""
EPS = 1e-3
"""Of norms. What the first tokens of a sequence read from states may be near 0, and a small one magnifies its rounding: with
1e-6 transformers in float32 was up to 9e-6 nats from itself in float64, and an engine up to 1.2e-5 from it.
"""
_SPREAD = 0.08
"""Of the weights of linear modules."""


class DeltaNetEngine(EngineOfTurns):
    """An engine in which what keeps old states out can be left out."""

    def leave_out(self, what: str) -> None:
        """From now on there is no ``split`` of decodes by whether they have a state, or no ``reset`` of the prefix cache."""
        from vllm.v1.attention.backends import gdn_attn, utils

        if not hasattr(self, "_split"):
            self._split = gdn_attn.split_decodes_and_prefills
        gdn_attn.split_decodes_and_prefills = utils.split_decodes_and_prefills if what == "split" else self._split
        vars(self._vllm.llm).pop("reset_prefix_cache", None)
        if what == "reset":
            self._vllm.llm.reset_prefix_cache = lambda: True

    def forbid_own_operator(self) -> None:
        """From now on only vLLM's own kernel computes gated DeltaNet."""
        from actors.rollout.vllm import deltanet

        def refuse(*_: Any) -> None:
            raise AssertionError("computed outside vLLM's kernel")

        deltanet._compute = refuse

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt come from the prefix cache."""
        from vllm import SamplingParams, TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=list(prompt))]
        (output,) = self._vllm.llm.generate(prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        return int(output.num_cached_tokens or 0)

    def slots(self) -> int:
        """Bytes of all slots for adapters."""
        return slot_bytes(self._vllm.llm)

    def state_dtypes(self) -> list[str]:
        """Of every recurrent state."""
        (dtypes,) = self._vllm.llm.collective_rpc("state_dtypes")
        return list(dtypes)


class DeltaNetGroup(RolloutGroup):
    engine_class = DeltaNetEngine


class EngineOfVllmAlone(RolloutEngine):
    """An engine with vLLM's gated DeltaNet as it is."""

    def start(self, place: NodePlace) -> EngineInfo:
        from actors.rollout import engine

        start = engine.start_vllm

        def start_alone(*args: Any) -> Any:
            from actors.rollout.vllm import deltanet

            deltanet.serve_every_deltanet = lambda: None
            return start(*args)

        engine.start_vllm = start_alone
        return super().start(place)


class GroupOfVllmAlone(RolloutGroup):
    engine_class = EngineOfVllmAlone


class Served(NamedTuple):
    """A model in an engine that started with random weights, and the same model in transformers."""

    model: Path
    rollout: RolloutGroup
    trainer: ReferenceTrainer
    sync: WeightSync

    def largest_gap(self) -> float:
        return max(self.trainer.gaps(self.rollout.generate(PROMPTS, SAMPLING)))

    def push(self) -> None:
        self.rollout.forget_weights()  # of other trainers
        self.trainer.advance(0.3)
        self.sync.push()


class DeltaNetEngines:
    """One engine for each model, started when it is asked for first.

    ``dense`` has heads that vLLM's kernel refuses, ``mixture`` and ``bfloat16`` are as released, ``next`` is Qwen3-Next.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.served = cache(self._start)
        self.model = cache(self._write)

    def _start(self, name: str) -> Served:
        rollout = self._stack.enter_context(DeltaNetGroup(config_of(name, self.model(name))))
        trainer = (NestedTrainer if name in NESTED else ReferenceTrainer)(self.model(name))
        return Served(self.model(name), rollout, trainer, self._stack.enter_context(WeightSync(trainer.source, rollout)))

    def _write(self, name: str) -> Path:
        path = self._folder / name
        if name == "next":
            return write_qwen3_next(path, rms_norm_eps=EPS)
        if name == MIXTURE:
            return write_qwen3_5(path, moe=True, released=True, packed=True, rms_norm_eps=EPS)
        heads = {} if name == ROUNDED else {"linear_key_head_dim": 32, "linear_value_head_dim": 48}
        return write_qwen3_5(path, released=name == ROUNDED, rms_norm_eps=EPS, **heads)


def config_of(name: str, model: Path, **changes: Any) -> RolloutConfig:
    fields: dict[str, Any] = {
        "device": "cpu",
        "dtype": "bfloat16" if name == ROUNDED else "float32",
        "load_format": "dummy",
        "max_model_len": 512,
        # So little that slots of earlier sequences come round again.
        "kv_cache_gib": 0.02,
        "max_adapters": 1 if name in ("dense", MIXTURE, ROUNDED) else 0,
        "return_routed_experts": name == MIXTURE,
    }
    return RolloutConfig(model_path=str(model), **(fields | changes))


def mean_rounding(trainer: ReferenceTrainer, samples: Sequence[Sample]) -> tuple[ReferenceTrainer, float]:
    """A model in bfloat16, and the mean difference between its log-probs of responses and those in its own dtype."""
    rounded, differences = copy.copy(trainer), []
    rounded.model = copy.deepcopy(trainer.model).to(torch.bfloat16)
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            both = [each.model(ids).logits[0, :-1].double().log_softmax(-1) for each in (rounded, trainer)]
        chosen = [each.gather(1, ids[0, 1:, None])[len(sample.prompt_ids) - 1 :] for each in both]
        differences += (chosen[0] - chosen[1]).abs().flatten().tolist()
    return rounded, sum(differences) / len(differences)


class NestedTrainer(ReferenceTrainer):
    """A trainer of the text model of a released directory, whose names it uses."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().named_weights():
            yield nested_name(name), tensor


def nested_name(name: str) -> str:
    """What a released directory calls a tensor or module of the text model."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def random_adapter(
    trainer: ReferenceTrainer, modules: Sequence[str], rank: int = 4
) -> tuple[dict[str, Tensor], ReferenceTrainer]:
    """Factors of linear modules by peft's names, and a trainer of the model with them merged into it.

    Factors of the same modules are the same whatever the weights.

    Args:
        modules: transformers' names.
    """
    generator = torch.Generator().manual_seed(len(modules))
    merged = copy.copy(trainer)
    merged.model = copy.deepcopy(trainer.model)
    factors: dict[str, Tensor] = {}
    for module in modules:
        weight = merged.model.get_submodule(module).weight
        a = torch.randn(rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        b = torch.randn(weight.shape[0], rank, generator=generator) * _SPREAD
        weight.data += b @ a
        name = nested_name(module) if isinstance(trainer, NestedTrainer) else module
        factors |= {peft_name(name, is_a=True): a, peft_name(name, is_a=False): b}
    return factors, merged


def push_factors(group: RolloutGroup, factors: Mapping[str, Tensor], number: int) -> Any:
    """Gives every engine a tenant ``poet``; None, or the first engine's error."""
    rank = min(len(tensor) for name, tensor in factors.items() if "lora_A" in name)
    adapter = AdapterVersion("poet", number, number, rank)
    packed = PackedFactors.of({name: (tensor, 1.0) for name, tensor in factors.items()}, group.config.dtype)
    (outcome,) = group.engine_set.call("push_adapter", adapter, packed, packed.digest).values()
    if outcome is None:
        group.lora.switch(PushedAdapter(adapter, packed, packed.digest))
    return outcome
