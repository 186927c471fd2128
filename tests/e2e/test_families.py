"""Families other than Qwen3 in the loop: train, push into a vLLM engine that started with other weights, and sample."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from actors import HandleRef, Loss, RankContext, RolloutConfig, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from actors.rollout.tokens import RolloutTokens
from rl_backend.contracts import BatchError, OptimizerConfig, TokenSequence, UnsupportedError
from rl_backend.primitive.router import Router
from rl_backend.runtime.native.handle import NativeHandle
from tests.support.models import write_tiny
from tests.support.sft_batches import random_token_sequences
from tests.support.turns import converse

PAGE = Path(__file__).parents[2] / "docs" / "router_replay.md"
PROMPTS = [[5, 6, 7], list(range(20, 80)), [100, 90, 80, 70]]
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": None,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32},
    },
    "llama": {
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"tie_word_embeddings": False, "sliding_window": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "tie_word_embeddings": False},
    "gpt_neox": {"num_attention_heads": 2, "num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False},
}

EXPORTED = "qwen3_moe"
"""The family whose engine begins with a model that ``rl-backend export`` has written, and that ``make test`` runs."""
FAMILIES = [EXPORTED, *(pytest.param(family, marks=pytest.mark.long) for family in MODELS)]

MIXTURES = {"qwen3_moe": (0, 2), "mixtral": (0, 1)}
"""Families with experts, and in which layers."""


@pytest.fixture(scope="module")
def paths(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    written = {family: write_tiny(family, folder / family, **changes) for family, changes in MODELS.items()}
    return {EXPORTED: mixture, **written}


@pytest.fixture(scope="module")
def tested(request: pytest.FixtureRequest) -> list[str]:
    """Families of the tests that run."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    found = {item.callspec.params["family"] for item in items if hasattr(item, "callspec")}
    return [EXPORTED, *(family for family in MODELS if family in found)]


@pytest.fixture(scope="module")
def engines(
    tested: list[str], paths: dict[str, Path], mixture_engine: RolloutGroup
) -> Iterator[dict[str, Future[RolloutGroup]]]:
    """An engine of each family that is tested, started two at a time while the first ones are.

    They begin with random weights, but for that of ``exported_mixture``.
    """

    def start(family: str) -> RolloutGroup:
        if family == EXPORTED:
            return mixture_engine
        config = RolloutConfig(
            model_path=str(paths[family]),
            device="cpu",
            dtype="float32",
            load_format="dummy",
            max_model_len=256,
            kv_cache_gib=0.25,
            return_routed_experts=family in MIXTURES,
        )
        return stack.enter_context(RolloutGroup(config))

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        yield {family: pool.submit(start, family) for family in tested}


@pytest.fixture(scope="module")
def group(engines: object, one_rank: TrainGroup) -> TrainGroup:
    """One training group for all families, one of which is a third party's, while engines start."""
    return one_rank


@pytest.fixture(scope="module")
def policies(group: TrainGroup, paths: dict[str, Path], tested: list[str]) -> dict[str, HandleRef]:
    optimizer = OptimizerConfig(lr=1e-2)
    return {family: group.build_model(hf_path=paths[family], name=family, optimizer=optimizer) for family in tested}


@pytest.mark.long
@pytest.mark.shows("export: vLLM loads what was exported and samples the tokens that it samples after a push")
def test_vllm_samples_from_an_exported_model_what_it_samples_after_a_push(
    group: TrainGroup, engines: dict[str, Future[RolloutGroup]], exported_mixture: Path
) -> None:
    rollout, greedy = engines[EXPORTED].result(), SamplingConfig(temperature=0.0, max_new_tokens=24)
    loaded = rollout.generate(PROMPTS, greedy)
    policy = group.build_model(hf_path=exported_mixture, name="exported")
    with WeightSync(group, rollout, policy) as sync:
        sync.push()
        pushed = rollout.generate(PROMPTS, greedy)
    assert [sample.response_ids for sample in loaded] == [sample.response_ids for sample in pushed]
    assert [sample.log_probs for sample in loaded] == [sample.log_probs for sample in pushed]


@pytest.mark.shows(
    "weight sync: Qwen2, Llama, Mistral, Qwen3-MoE and Mixtral are served by vLLM with the trainer's log-probs"
)
@pytest.mark.shows("extending: a third party's model folder trains, is saved and is pushed to vLLM without an edit here")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pushed_model_samples_with_the_trainers_log_probs(
    group: TrainGroup, engines: dict[str, Future[RolloutGroup]], policies: dict[str, HandleRef], family: str
) -> None:
    policy = policies[family]
    data = random_token_sequences([12, 20, 9, 31], 128)
    losses = []
    for _ in range(2):
        group.zero_grad(policy)
        losses.append(group.forward_backward(policy, data, Loss("tests.support.losses:nll_loss")).loss)
        assert group.optimizer_step(policy).ok
    rollout = engines[family].result()
    with WeightSync(group, rollout, policy) as sync:
        assert sync.push().version == group.weight_version(policy)
        samples = rollout.generate(PROMPTS, SamplingConfig(n=2, max_new_tokens=24))
    sequences = [TokenSequence.from_prompt_and_response(sample.prompt_ids, sample.response_ids) for sample in samples]
    gaps = [
        abs(float(log_probs[len(sample.prompt_ids) - 1 + index]) - log_prob)
        for sample, log_probs in zip(samples, group.forward(policy, sequences).output("log_probs"), strict=True)
        for index, log_prob in enumerate(sample.log_probs)
    ]
    assert losses[1] < losses[0]
    assert sum(gaps) / len(gaps) <= 1e-5
    assert max(gaps) <= 1e-4


def watch_routers(context: RankContext, ref: HandleRef) -> None:
    """Keeps what the routers of every later pass choose, layer after layer."""
    handle = context.handle(ref)
    assert isinstance(handle, NativeHandle)
    chosen: list[torch.Tensor] = []
    context.state["chosen"] = chosen
    for module in handle.model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, routing: chosen.append(routing.experts))


def take_chosen(context: RankContext) -> torch.Tensor:
    """What the routers chose since the last call, (T, layers with experts, top_k)."""
    chosen: list[torch.Tensor] = context.state["chosen"]
    taken = torch.stack(chosen, dim=1)
    chosen.clear()
    return taken


def sets_differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(T, layers): where two routes, (T, layers, top_k), have other experts."""
    return (one.long().sort(-1).values != other.long().sort(-1).values).any(-1)


@pytest.mark.shows("router replay: every token but a sample's last goes where vLLM sent it (R3), with dense layers between")
@pytest.mark.parametrize("family", [EXPORTED, pytest.param("mixtral", marks=pytest.mark.long)])
def test_a_trainer_sends_tokens_where_vllm_sent_them(
    group: TrainGroup, engines: dict[str, Future[RolloutGroup]], policies: dict[str, HandleRef], family: str
) -> None:
    policy, rollout = policies[family], engines[family].result()
    assert rollout.infos[0].moe_layers == MIXTURES[family]
    data = random_token_sequences([12, 20, 9, 31], 128)

    def step() -> None:
        group.zero_grad(policy)
        group.forward_backward(policy, data, Loss("tests.support.losses:nll_loss"))
        assert group.optimizer_step(policy).ok

    with WeightSync(group, rollout, policy) as sync:
        # The second time the engine has seen the prompts before, with other weights.
        for _ in range(2):
            step()
            version = sync.push().version
            samples = rollout.generate(PROMPTS, SamplingConfig(n=2, max_new_tokens=24))
            # The second turn has most of its prompt from the cache.
            samples += asyncio.run(converse(RolloutTokens(rollout), list(range(3, 103)) * 2, 1, turns=2, most=8))
            assert {sample.routes.weight_version for sample in samples if sample.routes} == {version}
            sequences = [
                sample.with_routes(TokenSequence.from_prompt_and_response(sample.prompt_ids, sample.response_ids))
                for sample in samples
            ]
            recorded = group.forward(policy, sequences, router_replay="record").output("routed_experts")
            for sequence, own in zip(sequences, recorded, strict=True):
                assert not sets_differ(own, sequence.token_fields["routed_experts"])[:-1].any()

    for _ in range(3):
        step()
    group.run_on_ranks(watch_routers, policy)
    meta = {"routed_experts_layers": "moe"}
    moved = 0
    for sequence in sequences:
        routes = sequence.token_fields["routed_experts"]
        group.forward(policy, [sequence])
        (own,) = group.run_on_ranks(take_chosen)
        group.forward(policy, [sequence], meta=meta, router_replay="replay")
        (chosen,) = group.run_on_ranks(take_chosen)
        assert torch.equal(chosen[:-1], routes[:-1].long())
        moved += int(sets_differ(own, chosen)[:-1].sum())
    assert moved > 100

    stale = sequences[0].with_fields(sequence_fields={"routed_experts_version": torch.tensor(version - 1)})
    with pytest.raises(BatchError, match=f"computed with weights of version {version - 1}"):
        group.forward(policy, [stale], meta=meta, router_replay="replay")


def test_routes_of_a_dense_model_are_refused_before_it_is_loaded(
    engines: dict[str, Future[RolloutGroup]], paths: dict[str, Path]
) -> None:
    config = RolloutConfig(model_path=str(paths["llama"]), device="cpu", return_routed_experts=True, max_model_len=256)
    (refused,) = engines["qwen3_moe"].result().engine_set.call("start_another", config).values()
    assert isinstance(refused, UnsupportedError)
    assert f"{paths['llama']} has no experts" in str(refused)


def test_the_steps_of_the_page_on_router_replay_run_as_they_stand(
    group: TrainGroup, engines: dict[str, Future[RolloutGroup]], policies: dict[str, HandleRef]
) -> None:
    policy, rollout = policies["qwen3_moe"], engines["qwen3_moe"].result()
    names: dict[str, Any] = {
        "trainer": group,
        "policy": policy,
        "rollout": rollout,
        "prompts": PROMPTS,
        "sampling": SamplingConfig(n=2, max_new_tokens=8),
        "advantages": lambda samples: torch.ones(len(samples)).unbind(),
        "loss": Loss("rl_backend.algorithm:grpo_loss"),
        "TokenSequence": TokenSequence,
    }
    with WeightSync(group, rollout, policy) as sync:
        sync.push()
        code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
        exec(compile(code, PAGE.name, "exec"), names)
    assert group.optimizer_step(policy).ok
