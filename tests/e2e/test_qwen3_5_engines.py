"""Qwen3.5 in the loop: trained here, pushed into vLLM as a model and as tenants, sampled with the trainer's log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch

from actors import HandleRef, RolloutConfig, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from actors.rollout.sample import Sample
from rl_backend.contracts import NativeConfig, OptimizerConfig, RuntimeConfig, TokenSequence
from rl_backend.contracts.lora import LoRAConfig
from tests.support.qwen3_5 import write_qwen3_5
from tests.support.served_tenants import take_step

PROMPTS = [[7], [5, 6, 7], list(range(20, 80)), [token * 7 % 120 + 2 for token in range(200)]]
SAMPLING = SamplingConfig(n=2, max_new_tokens=24)
OPTIMIZER = OptimizerConfig(lr=1e-2)
SHARED_EXPERT = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate")
DTYPES = {"dense": "float32", "mixture": "float32", "rounded": "bfloat16"}


class Loop(NamedTuple):
    """A trainer of one rank and an engine that started with random weights."""

    train: TrainGroup
    rollout: RolloutGroup
    routed: bool

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


@pytest.fixture(scope="module")
def loops(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Loop]]:
    folder = tmp_path_factory.mktemp("qwen3_5")
    models = {
        "dense": write_qwen3_5(folder / "dense"),
        "mixture": write_qwen3_5(folder / "mixture", moe=True, released=True),
        "rounded": write_qwen3_5(folder / "rounded", released=True),
    }

    def start(name: str) -> Loop:
        config = RolloutConfig(
            model_path=str(models[name]),
            device="cpu",
            dtype=DTYPES[name],  # type: ignore[arg-type]
            load_format="dummy",
            max_model_len=256,
            kv_cache_gib=0.05,
            max_adapters=0 if name == "rounded" else 1,
            return_routed_experts=name == "mixture",
        )
        native = NativeConfig(device="cpu", param_dtype=DTYPES[name], optimizer=OPTIMIZER)  # type: ignore[arg-type]
        train = TrainGroup(RuntimeConfig(hf_path=str(models[name]), backend_cfg=native), num_ranks=1)
        return Loop(stack.enter_context(train), stack.enter_context(RolloutGroup(config)), name == "mixture")

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        yield dict(zip(models, pool.map(start, models), strict=True))


@pytest.mark.shows("weight sync: a Qwen3.5 trained here is served with its log-probs after every push, to 1e-5 in float32")
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_a_model_is_served_as_it_is_trained(loops: dict[str, Loop], name: str) -> None:
    loop = loops[name]
    loop.rollout.forget_weights()
    policy = loop.train.build_model()
    with WeightSync(loop.train, loop.rollout, policy) as sync:
        for step in range(3):
            take_step(loop.train, policy, step)
            assert sync.push().version == loop.train.weight_version(policy)
            assert loop.gaps(policy, loop.sample()).max() <= 1e-5
    if loop.routed:
        samples = loop.sample()
        rows = [
            each.with_routes(TokenSequence.from_prompt_and_response(each.prompt_ids, each.response_ids)) for each in samples
        ]
        recorded = loop.train.forward(policy, rows, router_replay="record").output("routed_experts")
        for row, own in zip(rows, recorded, strict=True):
            served = row.token_fields["routed_experts"].long().sort(-1).values
            assert torch.equal(own.long().sort(-1).values[:-1], served[:-1])


@pytest.mark.shows("lora: a tenant of Qwen3.5 on both mixers and feed-forward blocks is served with the trainer's log-probs")
@pytest.mark.parametrize(("name", "feed_forward"), [("dense", ("feed_forward",)), ("mixture", SHARED_EXPERT)])
def test_a_tenant_is_served_as_it_is_trained(loops: dict[str, Loop], name: str, feed_forward: tuple[str, ...]) -> None:
    loop = loops[name]
    loop.rollout.forget_weights()
    base = loop.train.build_model(trainable=False)
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


def test_in_bfloat16_the_gap_does_not_grow_with_pushes(loops: dict[str, Loop]) -> None:
    loop = loops["rounded"]
    policy = loop.train.build_model()
    gaps = []
    with WeightSync(loop.train, loop.rollout, policy) as sync:
        for step in range(3):
            take_step(loop.train, policy, step)
            sync.push()
            gaps.append(float(loop.gaps(policy, loop.sample()).mean()))
    assert max(gaps) <= 5e-2 and max(gaps) <= 3 * min(gaps)
