"""Qwen3.5 in the loop: trained here, pushed into vLLM as a model and as tenants, sampled with the trainer's log-probs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from actors import HandleRef, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from actors.rollout.messages import Sample
from rl_backend.contracts import NativeConfig, OptimizerConfig, RuntimeConfig, TokenSequence
from rl_backend.contracts.lora import LoRAConfig
from tests.support.deltanet_engines import DeltaNetEngines, mean_rounding
from tests.support.rollout import ReferenceTrainer
from tests.support.served_tenants import take_step

PROMPTS = [[7], [5, 6, 7], list(range(20, 80)), [token * 7 % 120 + 2 for token in range(200)]]
SAMPLING = SamplingConfig(n=2, max_new_tokens=24)
OPTIMIZER = OptimizerConfig(lr=1e-2)
SHARED_EXPERT = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate")


class Loop(NamedTuple):
    """A trainer of one rank beside an engine with other weights."""

    train: TrainGroup
    rollout: RolloutGroup

    def build(self, *, trainable: bool = True) -> HandleRef:
        optimizer = OPTIMIZER if trainable else None
        return self.train.build_model(hf_path=self.rollout.config.model_path, trainable=trainable, optimizer=optimizer)

    def sample(self, adapter: str | None = None) -> list[Sample]:
        return self.rollout.generate(PROMPTS, SAMPLING, adapter=adapter)

    def gaps(self, handle: HandleRef, samples: list[Sample]) -> torch.Tensor:
        """Of every response token, in nats."""
        rows = [TokenSequence.from_prompt_and_response(each.prompt_ids, each.response_ids) for each in samples]
        outputs = self.train.forward(handle, rows).output("log_probs")
        parts = [
            output[len(each.prompt_ids) - 1 : -1] - torch.tensor(each.log_probs)
            for each, output in zip(samples, outputs, strict=True)
        ]
        return torch.cat(parts).abs()


class Loops:
    """Engines and trainers of each model; one in bfloat16 has a trainer of its own."""

    def __init__(self, engines: DeltaNetEngines, train: TrainGroup, stack: ExitStack) -> None:
        self._engines, self._float32, self._stack = engines, train, stack
        self._in_bfloat16 = cache(self._start)

    def loop(self, name: str) -> Loop:
        rollout = self._engines.served(name).rollout
        rollout.forget_weights()
        return Loop(self._in_bfloat16() if name == "bfloat16" else self._float32, rollout)

    def _start(self) -> TrainGroup:
        native = NativeConfig(device="cpu", param_dtype="bfloat16")
        config = RuntimeConfig(hf_path=str(self._engines.model("bfloat16")), backend_cfg=native)
        return self._stack.enter_context(TrainGroup(config, num_ranks=1))


@pytest.fixture(scope="module")
def loops(deltanet_engines: DeltaNetEngines, one_rank: TrainGroup) -> Iterator[Loops]:
    with ExitStack() as stack:
        yield Loops(deltanet_engines, one_rank, stack)


@pytest.mark.shows("weight sync: a Qwen3.5 trained here is served with its log-probs after every push, to 1e-5 in float32")
@pytest.mark.parametrize("name", ["dense", "mixture"])
@pytest.mark.long
def test_a_model_is_served_as_it_is_trained(loops: Loops, name: str) -> None:
    loop = loops.loop(name)
    policy = loop.build()
    with WeightSync(loop.train, loop.rollout, policy) as sync:
        for step in range(3):
            take_step(loop.train, policy, step)
            assert sync.push().version == loop.train.weight_version(policy)
            assert loop.gaps(policy, loop.sample()).max() <= 1e-5
    if loop.rollout.config.return_routed_experts:
        samples = loop.sample()
        rows = [
            each.with_routes(TokenSequence.from_prompt_and_response(each.prompt_ids, each.response_ids)) for each in samples
        ]
        recorded = loop.train.forward(policy, rows, router_replay="record").output("routed_experts")
        for row, own in zip(rows, recorded, strict=True):
            served = row.token_fields["routed_experts"].long().sort(-1).values
            assert torch.equal(own.long().sort(-1).values[:-1], served[:-1])


@pytest.mark.shows("lora: a tenant of Qwen3.5 on both mixers and feed-forward blocks is served with the trainer's log-probs")
@pytest.mark.parametrize(
    ("name", "feed_forward"),
    [("dense", ("feed_forward",)), pytest.param("mixture", SHARED_EXPERT, marks=pytest.mark.long)],
)
def test_a_tenant_is_served_as_it_is_trained(loops: Loops, name: str, feed_forward: tuple[str, ...]) -> None:
    loop = loops.loop(name)
    base = loop.build(trainable=False)
    with WeightSync(loop.train, loop.rollout, base) as of_base:
        of_base.push()
    config = LoRAConfig(rank=4, targets=("attention", *feed_forward))
    tenant = loop.train.create_lora_adapter(base, config, OPTIMIZER, name=f"poet of {name}")
    (info,) = loop.train.list_lora_adapters(base)
    adapted = {module.rpartition(".layers.")[2] for module in info.modules}
    assert {"0.linear_attn.in_proj_qkv", "0.linear_attn.out_proj", "3.self_attn.q_proj"} <= adapted
    assert any(".mlp." in module for module in adapted)
    sync = WeightSync(loop.train, loop.rollout, tenant)
    for step in range(2):
        take_step(loop.train, tenant, step)
        sync.push()
        samples = loop.sample(f"poet of {name}")
        assert loop.gaps(tenant, samples).max() <= 1e-5 < loop.gaps(base, samples).max()
    assert loop.gaps(base, loop.sample()).max() <= 1e-5
    loop.rollout.remove_adapter(f"poet of {name}")


@pytest.mark.long
def test_in_bfloat16_the_gap_is_of_rounding_and_does_not_grow_with_pushes(loops: Loops) -> None:
    loop = loops.loop("bfloat16")
    policy = loop.build()
    with WeightSync(loop.train, loop.rollout, policy) as sync:
        sync.push()
        samples = loop.sample()
        gaps = [float(loop.gaps(policy, samples).mean())]
        _, rounding = mean_rounding(ReferenceTrainer(Path(loop.rollout.config.model_path)), samples)
        sys.stdout.write(
            f"bfloat16, mean gap in nats: trainer to vLLM {gaps[0]:.1e}, transformers to float32 {rounding:.1e}\n"
        )
        assert gaps[0] <= 3 * rounding
        for step in range(3):
            take_step(loop.train, policy, step)
            sync.push()
            gaps.append(float(loop.gaps(policy, loop.sample()).mean()))
    assert max(gaps) <= 3 * min(gaps)
