"""Engines of models with gated DeltaNet, in whose processes patches can be left out, and the trainer beside them.

Not in the file of their tests because every engine's process imports the file of its class.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.rollout.engine import RolloutEngine
from actors.rollout.group import RolloutGroup
from actors.rollout.messages import AdapterVersion, EngineInfo, PushedAdapter
from actors.rollout.placement import NodePlace
from actors.wire.factors import PackedFactors
from rl_backend.contracts.lora import peft_name
from tests.support.rollout import ReferenceTrainer


class DeltaNetEngine(RolloutEngine):
    """An engine in which what keeps old states out can be left out."""

    def leave_out(self, what: str) -> None:
        """From now on there is no ``split`` of decodes by whether they have a state, or no ``reset`` of the prefix cache."""
        from vllm.v1.attention.backends import gdn_attn, utils

        if not hasattr(self, "_split"):
            self._split = gdn_attn.split_decodes_and_prefills
        gdn_attn.split_decodes_and_prefills = utils.split_decodes_and_prefills if what == "split" else self._split
        vars(self._llm).pop("reset_prefix_cache", None)
        if what == "reset":
            self._llm.reset_prefix_cache = lambda: True

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
        (output,) = self._llm.generate(prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        return int(output.num_cached_tokens or 0)

    def state_dtypes(self) -> list[str]:
        """Of every recurrent state."""
        (dtypes,) = self._llm.collective_rpc("state_dtypes")
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
        b = torch.randn(weight.shape[0], rank, generator=generator) * weight.detach().std()
        weight.data += b @ a
        name = nested_name(module) if isinstance(trainer, NestedTrainer) else module
        factors |= {peft_name(name, is_a=True): a, peft_name(name, is_a=False): b}
    return factors, merged


def push_factors(group: RolloutGroup, factors: Mapping[str, Tensor], number: int) -> Any:
    """Gives every engine a tenant ``poet``; None, or the first engine's error."""
    rank = min(len(tensor) for name, tensor in factors.items() if "lora_A" in name)
    adapter = AdapterVersion("poet", number, number, rank)
    packed = PackedFactors.of({name: (tensor, 1.0) for name, tensor in factors.items()}, group.config.dtype)
    (outcome,) = group.call("push_adapter", adapter, packed, packed.digest).values()
    if outcome is None:
        group.switch_adapter(PushedAdapter(adapter, packed, packed.digest))
    return outcome
