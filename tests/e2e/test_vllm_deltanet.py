"""Gated DeltaNet in vLLM's CPU build: right in every dtype and head size after every push, and states never old."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.group import RolloutGroup
from actors.sync.push import WeightSync
from rl_backend.contracts import RLBackendError, WeightCheckError
from tests.support.deltanet_engines import (
    DeltaNetGroup,
    GroupOfVllmAlone,
    NestedTrainer,
    push_factors,
    random_adapter,
)
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next
from tests.support.rollout import ReferenceTrainer

LONG = [token * 7 % 120 + 2 for token in range(300)]
PROMPTS = [[7], [5, 6], list(range(10, 60)), LONG[:129], LONG, [9]]
SAMPLING = SamplingConfig(n=2, max_new_tokens=12)
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
DELTANET = tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"))
FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SHARED_EXPERT = (*(name.replace("mlp.", "mlp.shared_expert.") for name in FEED_FORWARD), "mlp.shared_expert_gate")


class Served(NamedTuple):
    """A model in an engine that started with random weights, and the same model in transformers."""

    rollout: RolloutGroup
    trainer: ReferenceTrainer
    sync: WeightSync

    def largest_gap(self) -> float:
        return max(self.trainer.gaps(self.rollout.generate(PROMPTS, SAMPLING)))

    def push(self) -> None:
        self.trainer.advance(0.3)
        self.sync.push()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("deltanet")
    heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 48}
    return {
        "dense": write_qwen3_5(folder / "dense", **heads),
        "mixture": write_qwen3_5(folder / "mixture", moe=True, released=True, packed=True),
        "next": write_qwen3_next(folder / "next"),
        "bfloat16": write_qwen3_5(folder / "bfloat16", released=True),
    }


@pytest.fixture(scope="module")
def engines(ray_cluster: None, models: dict[str, Path]) -> Iterator[dict[str, Future[Served]]]:
    """Started two at a time while the first ones are tested."""

    def start(name: str) -> Served:
        rollout = stack.enter_context(DeltaNetGroup(config_of(name, models[name])))
        trainer = (NestedTrainer if name in ("mixture", "bfloat16") else ReferenceTrainer)(models[name])
        return Served(rollout, trainer, stack.enter_context(WeightSync(trainer.source, rollout)))

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(start, name) for name in models}


def config_of(name: str, model: Path, **changes: Any) -> RolloutConfig:
    fields: dict[str, Any] = {
        "device": "cpu",
        "dtype": "bfloat16" if name == "bfloat16" else "float32",
        "load_format": "dummy",
        "max_model_len": 512,
        # So little that slots of earlier sequences come round again.
        "kv_cache_gib": 0.02,
        "max_adapters": 1 if name in ("dense", "mixture") else 0,
        "return_routed_experts": name == "mixture",
    }
    return RolloutConfig(model_path=str(model), **(fields | changes))


@pytest.mark.shows("weight sync: Qwen3.5 (dense, mixture) and Qwen3-Next are served in float32 with transformers' log-probs")
@pytest.mark.parametrize("name", ["dense", "mixture", "next"])
def test_log_probs_are_transformers_after_every_push(engines: dict[str, Future[Served]], name: str) -> None:
    served = engines[name].result()
    assert set(served.rollout.call("state_dtypes")[0]) == {"float32"}
    for _ in range(2):
        served.push()
        assert served.largest_gap() <= 1e-5
        assert served.largest_gap() <= 1e-5, "from the prefix cache"


@pytest.mark.shows("weight sync: recurrent states in the prefix cache never outlive the weights that computed them")
def test_a_push_empties_the_prefix_cache_of_states(engines: dict[str, Future[Served]]) -> None:
    served = engines["dense"].result()
    served.push()
    assert served.largest_gap() <= 1e-5
    assert served.rollout.call("cached_tokens", LONG)[0] > 0
    served.rollout.call("leave_out", "reset")
    served.push()
    assert served.largest_gap() > 1e-3
    served.rollout.call("leave_out", "")
    served.push()
    assert served.rollout.call("cached_tokens", LONG)[0] == 0
    assert served.largest_gap() <= 1e-5


@pytest.mark.shows("rollout: a prompt of one token starts from an empty recurrent state, whatever its slot held before")
@pytest.mark.parametrize("name", ["dense", "bfloat16"])
def test_vllm_starts_a_prompt_of_one_token_from_an_old_state_without_the_patch(
    engines: dict[str, Future[Served]], name: str
) -> None:
    served = engines[name].result()
    greedy, ones = SamplingConfig(temperature=0.0, max_new_tokens=4), [[7]]

    def log_probs(what: str) -> list[float]:
        served.rollout.call("leave_out", what)
        served.rollout.generate([[token, *LONG[:40]] for token in range(60)], greedy)
        return served.rollout.generate(ones, greedy)[0].log_probs

    served.push()
    right, wrong = log_probs(""), log_probs("split")
    assert right == log_probs("")
    assert abs(wrong[0] - right[0]) > 1e-3


def test_seeds_decide_alone_when_prompts_are_computed_in_pieces(engines: dict[str, Future[Served]]) -> None:
    served = engines["dense"].result()
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


@pytest.mark.shows("weight sync: in bfloat16 vLLM's gap is at most three times that of transformers to its own float32")
def test_bfloat16_is_computed_by_vllms_own_kernel(engines: dict[str, Future[Served]]) -> None:
    served = engines["bfloat16"].result()
    assert set(served.rollout.call("state_dtypes")[0]) == {"float32"}
    served.rollout.call("forbid_own_operator")
    in_bfloat16 = copy.copy(served.trainer)
    for _ in range(2):
        served.push()
        samples = served.rollout.generate(PROMPTS, SAMPLING)
        in_bfloat16.model = copy.deepcopy(served.trainer.model).to(torch.bfloat16)
        assert in_bfloat16.mean_gap(samples) <= 3 * mean_difference(in_bfloat16, served.trainer, samples)


def mean_difference(one: ReferenceTrainer, other: ReferenceTrainer, samples: Any) -> float:
    differences = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            both = [each.model(ids).logits[0, :-1].double().log_softmax(-1) for each in (one, other)]
        chosen = [each.gather(1, ids[0, 1:, None])[len(sample.prompt_ids) - 1 :] for each in both]
        differences += (chosen[0] - chosen[1]).abs().flatten().tolist()
    return sum(differences) / len(differences)


@pytest.mark.shows("lora: tenants on attention, DeltaNet projections and feed-forward of Qwen3.5 are served on a CPU")
@pytest.mark.parametrize(("name", "feed_forward"), [("dense", FEED_FORWARD), ("mixture", SHARED_EXPERT)])
def test_adapters_of_every_kind_of_module(
    engines: dict[str, Future[Served]], name: str, feed_forward: tuple[str, ...]
) -> None:
    served = engines[name].result()
    served.push()
    modules = [module for module, _ in served.trainer.model.named_modules()]
    for number, ends in enumerate((ATTENTION, DELTANET, feed_forward, (*ATTENTION, *DELTANET, *feed_forward)), 1):
        factors, merged = random_adapter(served.trainer, [module for module in modules if module.endswith(ends)])
        assert push_factors(served.rollout, factors, number) is None
        samples = served.rollout.generate(PROMPTS, SAMPLING, adapter="poet")
        assert max(merged.gaps(samples)) <= 1e-5 < 1e-3 < max(served.trainer.gaps(samples))
    assert served.largest_gap() <= 1e-5
    served.push()  # drops them in vLLM, and loads them again
    _, merged = random_adapter(served.trainer, [module for module in modules if module.endswith(ends)])
    assert max(merged.gaps(served.rollout.generate(PROMPTS, SAMPLING, adapter="poet"))) <= 1e-5
    served.rollout.remove_adapter("poet")


@pytest.mark.parametrize(
    ("name", "ends", "refusal"),
    [
        ("dense", ("in_proj_z",), r"linear_attn\.in_proj_z takes an adapter beside \S+in_proj_qkv only.*merged=True"),
        ("mixture", ("mlp.gate",), r"mlp\.gate takes no adapters in this engine .*merged=True"),
    ],
)
def test_adapters_that_are_refused(
    engines: dict[str, Future[Served]], name: str, ends: tuple[str, ...], refusal: str
) -> None:
    served = engines[name].result()
    modules = [module for module, _ in served.trainer.model.named_modules() if module.endswith(ends)]
    factors, _ = random_adapter(served.trainer, modules, rank=1)
    outcome = push_factors(served.rollout, factors, 99)
    assert isinstance(outcome, WeightCheckError) and re.search(refusal, str(outcome))


def test_vllm_alone_does_not_serve_float32(ray_cluster: None, models: dict[str, Path]) -> None:
    """When it does, :mod:`actors.rollout.vllm.deltanet` has done its time for heads of 64."""
    config = config_of("next", models["next"], load_format="auto")
    with pytest.raises(RLBackendError), GroupOfVllmAlone(config) as rollout:
        rollout.generate(PROMPTS, SAMPLING)
