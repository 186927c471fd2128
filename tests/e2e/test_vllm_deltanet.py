"""Gated DeltaNet in vLLM's CPU build: right in every dtype and head size after every push, and states never old."""

from __future__ import annotations

import asyncio
import copy
import re
import sys

import pytest
import torch

from actors.rollout.config import SamplingConfig
from actors.rollout.tokens import RolloutTokens
from actors.sync.push import WeightSync
from rl_backend.contracts import NativeConfig, RLBackendError, RuntimeConfig, WeightCheckError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.environment import Generation
from rl_backend.lab.plan.make import make_plan
from rl_backend.lab.plan.memory import Workload
from tests.support.deltanet_engines import (
    LONG,
    PROMPTS,
    SAMPLING,
    DeltaNetEngines,
    DeltaNetGroup,
    GroupOfVllmAlone,
    config_of,
    mean_rounding,
    push_factors,
    random_adapter,
)
from tests.support.turns import ask, in_the_middle, part_of

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
DELTANET = tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"))
FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SHARED_EXPERT = (*(name.replace("mlp.", "mlp.shared_expert.") for name in FEED_FORWARD), "mlp.shared_expert_gate")


@pytest.mark.shows("weight sync: Qwen3.5 (dense, mixture) and Qwen3-Next are served in float32 with transformers' log-probs")
@pytest.mark.parametrize("name", ["dense", *(pytest.param(name, marks=pytest.mark.long) for name in ("mixture", "next"))])
def test_log_probs_are_transformers_after_every_push(deltanet_engines: DeltaNetEngines, name: str) -> None:
    served = deltanet_engines.served(name)
    assert set(served.rollout.engine_set.call("state_dtypes")[0]) == {"float32"}
    for _ in range(2):
        served.push()
        assert served.largest_gap() <= 1e-5
        assert served.largest_gap() <= 1e-5, "from the prefix cache"


@pytest.mark.shows("weight sync: recurrent states in the prefix cache never outlive the weights that computed them")
def test_a_push_empties_the_prefix_cache_of_states(deltanet_engines: DeltaNetEngines) -> None:
    served = deltanet_engines.served("dense")
    served.push()
    assert served.largest_gap() <= 1e-5
    assert served.rollout.engine_set.call("cached_tokens", LONG)[0] > 0
    served.rollout.engine_set.call("leave_out", "reset")
    served.push()
    assert served.largest_gap() > 1e-3
    served.rollout.engine_set.call("leave_out", "")
    served.push()
    assert served.rollout.engine_set.call("cached_tokens", LONG)[0] == 0
    assert served.largest_gap() <= 1e-5


@pytest.mark.shows("rollout: a prompt of one token starts from an empty recurrent state, whatever its slot held before")
@pytest.mark.parametrize("name", ["dense", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_vllm_starts_a_prompt_of_one_token_from_an_old_state_without_the_patch(
    deltanet_engines: DeltaNetEngines, name: str
) -> None:
    served = deltanet_engines.served(name)
    greedy, ones = SamplingConfig(temperature=0.0, max_new_tokens=4), [[7]]

    def log_probs(what: str) -> list[float]:
        served.rollout.engine_set.call("leave_out", what)
        served.rollout.generate([[token, *LONG[:40]] for token in range(60)], greedy)
        return served.rollout.generate(ones, greedy)[0].log_probs

    served.push()
    right, wrong = log_probs(""), log_probs("split")
    assert right == log_probs("")
    assert abs(wrong[0] - right[0]) > 1e-3


def test_seeds_decide_alone_when_prompts_are_computed_in_pieces(deltanet_engines: DeltaNetEngines) -> None:
    served = deltanet_engines.served("dense")
    with pytest.raises(RuntimeError):
        torch.Generator().get_offset()  # what vLLM asks for; turn_generators_back() is needed for as long
    served.push()
    seeds, sampling = range(len(PROMPTS)), SamplingConfig(max_new_tokens=12)
    in_pieces = served.rollout.generate(PROMPTS, sampling, seeds=seeds)
    from_cache = served.rollout.generate(PROMPTS, sampling, seeds=seeds)
    alone = [
        served.rollout.generate([prompt], sampling, seeds=[seed])[0] for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    tokens = [[sample.response_ids for sample in samples] for samples in (in_pieces, from_cache, alone)]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.long
@pytest.mark.shows("weight sync: in bfloat16 vLLM's gap is at most three times that of transformers to its own float32")
def test_bfloat16_is_computed_by_vllms_own_kernel(deltanet_engines: DeltaNetEngines) -> None:
    served = deltanet_engines.served("bfloat16")
    assert set(served.rollout.engine_set.call("state_dtypes")[0]) == {"float32"}
    served.rollout.engine_set.call("forbid_own_operator")
    for _ in range(2):
        served.push()
        samples = served.rollout.generate(PROMPTS, SAMPLING)
        in_bfloat16, rounding = mean_rounding(served.trainer, samples)
        gap = in_bfloat16.mean_gap(samples)
        sys.stdout.write(f"bfloat16, mean gap in nats: vLLM to transformers {gap:.1e}, of that to float32 {rounding:.1e}\n")
        assert gap <= 3 * rounding


@pytest.mark.long
@pytest.mark.shows("lora: tenants on attention, DeltaNet projections and feed-forward of Qwen3.5 are served on a CPU")
@pytest.mark.parametrize(("name", "feed_forward"), [("dense", FEED_FORWARD), ("mixture", SHARED_EXPERT)])
def test_adapters_of_every_kind_of_module(
    deltanet_engines: DeltaNetEngines, name: str, feed_forward: tuple[str, ...]
) -> None:
    served = deltanet_engines.served(name)
    served.push()
    modules = [module for module, _ in served.trainer.model.named_modules()]
    for number, ends in enumerate((DELTANET, (*ATTENTION, *DELTANET, *feed_forward)), 1):
        factors, merged = random_adapter(served.trainer, [module for module in modules if module.endswith(ends)])
        assert push_factors(served.rollout, factors, number) is None
        samples = served.rollout.generate(PROMPTS, SAMPLING, adapter="poet")
        assert max(merged.gaps(samples)) <= 1e-5 < 1e-3 < max(served.trainer.gaps(samples))
    assert served.largest_gap() <= 1e-5
    served.trainer.advance(0.3)
    served.sync.push()  # drops them in vLLM, and loads them again
    _, merged = random_adapter(served.trainer, [module for module in modules if module.endswith(ends)])
    assert max(merged.gaps(served.rollout.generate(PROMPTS, SAMPLING, adapter="poet"))) <= 1e-5
    served.rollout.remove_adapter("poet")


@pytest.mark.long
def test_adapters_in_bfloat16(deltanet_engines: DeltaNetEngines) -> None:
    served = deltanet_engines.served("bfloat16")
    served.push()
    modules = [module for module, _ in served.trainer.model.named_modules()]
    adapted = [module for module in modules if module.endswith((*ATTENTION, *DELTANET, *FEED_FORWARD))]
    factors, merged = random_adapter(served.trainer, adapted)
    assert push_factors(served.rollout, factors, 1) is None
    samples = served.rollout.generate(PROMPTS, SAMPLING, adapter="poet")
    in_bfloat16, rounding = mean_rounding(merged, samples)
    gap, without = in_bfloat16.mean_gap(samples), served.trainer.mean_gap(samples)
    sys.stdout.write(f"bfloat16 with an adapter, mean gap in nats: vLLM to transformers {gap:.1e}, of that {rounding:.1e}\n")
    assert gap <= 3 * rounding < without
    served.rollout.remove_adapter("poet")


def test_slots_of_engines_take_what_a_plan_says(deltanet_engines: DeltaNetEngines) -> None:
    served = deltanet_engines.served("dense")
    rollout = served.rollout.config
    config = RuntimeConfig(hf_path=rollout.model_path, backend_cfg=NativeConfig(device="cpu"))
    lora = LoRAConfig(rank=rollout.max_adapter_rank)
    work = {"sequence_length": 8, "micro_batch_tokens": 8, "num_micro_batches": 1}
    plan = make_plan(config, 1, Workload(**work, sync_dtype="float32", tenants=rollout.max_adapters, lora=lora))
    assert served.rollout.engine_set.call("slots") == {0: plan.engine_slots}


@pytest.mark.parametrize(
    ("name", "ends", "refusal"),
    [
        ("dense", ("in_proj_z",), r"linear_attn\.in_proj_z takes an adapter beside \S+in_proj_qkv only.*merged=True"),
        pytest.param(
            *("mixture", ("mlp.gate",), r"mlp\.gate takes no adapters in this engine .*merged=True"), marks=pytest.mark.long
        ),
    ],
)
def test_adapters_that_are_refused(
    deltanet_engines: DeltaNetEngines, name: str, ends: tuple[str, ...], refusal: str
) -> None:
    served = deltanet_engines.served(name)
    modules = [module for module, _ in served.trainer.model.named_modules() if module.endswith(ends)]
    factors, _ = random_adapter(served.trainer, modules, rank=1)
    outcome = push_factors(served.rollout, factors, 99)
    assert isinstance(outcome, WeightCheckError) and re.search(refusal, str(outcome))


@pytest.mark.long
@pytest.mark.shows(
    "rollout: an engine of two workers, which share the heads of gated DeltaNet and adapters, has transformers' log-probs"
)
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_workers_share_the_heads(deltanet_engines: DeltaNetEngines, name: str) -> None:
    one = deltanet_engines.served(name)
    config = config_of(name, one.model, tensor_parallel=2, cores=((0, 1),))
    ends = (*ATTENTION, *DELTANET, *(FEED_FORWARD if name == "dense" else SHARED_EXPERT))
    adapted = [module for module, _ in one.trainer.model.named_modules() if module.endswith(ends)]
    with DeltaNetGroup(config) as rollout, WeightSync(one.trainer.source, rollout) as sync:
        for _ in range(2):
            one.trainer.advance(0.3)
            sync.push()
            assert max(one.trainer.gaps(rollout.generate(PROMPTS, SAMPLING))) <= 1e-5
        factors, merged = random_adapter(one.trainer, adapted)
        assert push_factors(rollout, factors, 1) is None
        samples = rollout.generate(PROMPTS, SAMPLING, adapter="poet")
        assert max(merged.gaps(samples)) <= 1e-5 < 1e-3 < max(one.trainer.gaps(samples))


@pytest.mark.long
def test_vllm_alone_does_not_serve_float32(deltanet_engines: DeltaNetEngines) -> None:
    """When it does, :mod:`actors.rollout.vllm.deltanet` has done its time for heads of 64."""
    config = config_of("next", deltanet_engines.model("next"), load_format="auto")
    with pytest.raises(RLBackendError), GroupOfVllmAlone(config) as rollout:
        rollout.generate(PROMPTS, SAMPLING)


def test_turns_pause_for_a_push_and_go_on_with_states_of_its_weights(deltanet_engines: DeltaNetEngines) -> None:
    served = deltanet_engines.served("dense")
    served.push()
    served.rollout.engine_set.call("set_turns_at_push", "pause")
    old, before = copy.copy(served.trainer), served.trainer.source.version
    old.model = served.trainer.copy_of_model()
    served.trainer.advance(0.3)

    async def play() -> Generation:
        (turn,), _ = await in_the_middle(
            served.rollout, [ask(RolloutTokens(served.rollout), LONG, 1, 200)], served.sync.push
        )
        assert isinstance(turn, Generation)
        return turn

    turn = asyncio.run(play())
    served.rollout.engine_set.call("set_turns_at_push", "finish")
    kept = list(turn.versions).count(before)
    assert 0 < kept < 200 and set(turn.versions[kept:]) == {before + 1}
    assert max(old.gaps([part_of(turn, LONG, 0, kept)])) <= 1e-5
    assert max(served.trainer.gaps([part_of(turn, LONG, kept, 200)])) <= 1e-5
