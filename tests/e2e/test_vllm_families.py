"""Mixtures with latent attention or sigmoid routers, and gpt-oss, in vLLM's CPU build: right after every push."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from actors.rollout.config import SamplingConfig
from tests.support.deltanet_engines import mean_rounding
from tests.support.family_engines import PROMPTS, FamilyEngines
from tests.support.released_mixtures import YARN

LATENT_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}


@pytest.fixture(scope="module")
def engines(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyEngines]:
    engines = FamilyEngines(tmp_path_factory.mktemp("families"))
    yield engines
    engines.close()


@pytest.mark.long
@pytest.mark.shows(
    "weight sync: DeepSeek-V3, Kimi-K2, GLM-4.5 and 4.7 and MiniMax-M2 are served in float32 with transformers' log-probs"
)
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"rope_parameters": LATENT_YARN, "q_lora_rank": None}),
        ("kimi_k2", {"n_group": 1, "topk_group": 1}),
        ("glm4_moe_lite", {}),
        ("glm4_moe", {}),
        ("minimax_m2", {}),
    ],
)
def test_log_probs_are_transformers_after_every_push(
    engines: FamilyEngines, model_type: str, fields: dict[str, object]
) -> None:
    served = engines.served(model_type, **fields)
    for _ in range(2):
        served.push()
        assert max(served.gaps()) <= 1e-5
        assert max(served.gaps()) <= 1e-5, "from the prefix cache"
    if not fields and model_type == "deepseek_v3":
        in_kernel, as_done = served.rollout.engine_set.call("rounding_of_rotation")[0]
        assert as_done == 0.0, "in torch"
        assert in_kernel > 0.1, "vLLM's kernel rotates views: rotate_views_outside_the_kernel() is not needed any more"
    if model_type == "minimax_m2":
        assert not served.rollout.engine_set.call("routes_by_sigmoid_alone")[0], (
            "route_by_sigmoid_without_groups() is not needed"
        )
        assert not served.rollout.engine_set.call("takes_nameless_loaders")[0], (
            "name_weight_loaders() is not needed any more"
        )


@pytest.mark.shows("rollout: DeepSeek-V3.2 and GLM-5 are served with dense attention while index_topk covers max_model_len")
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.long
def test_sparse_attention_that_covers_every_token_is_served_as_dense(engines: FamilyEngines, model_type: str) -> None:
    served = engines.served(model_type)
    served.push()
    assert max(served.gaps()) <= 1e-5


@pytest.mark.long
@pytest.mark.shows("weight sync: gpt-oss is served in bfloat16, and no expert, bias or sink is stale after a push")
def test_a_push_reaches_every_weight_of_gpt_oss(engines: FamilyEngines) -> None:
    served = engines.served("gpt_oss", "bfloat16")

    def gap_and_rounding() -> tuple[float, float]:
        samples = served.rollout.generate(PROMPTS, SamplingConfig(n=4, max_new_tokens=24))
        gaps = served.trainer.gaps(samples)
        return sum(gaps) / len(gaps), mean_rounding(served.trainer, samples)[1]

    for _ in range(2):
        served.push()
        gap, rounding = gap_and_rounding()
        sys.stdout.write(
            f"gpt-oss, mean gap in nats: {gap:.1e}, transformers in bfloat16 to itself in float32 {rounding:.1e}\n"
        )
        assert gap <= 3 * rounding
    served.rollout.engine_set.call("load_past_loaders", True)
    served.push()
    stale, _ = gap_and_rounding()
    assert stale > 0.1, "vLLM loads gpt-oss right in an update: load_through_loaders() is not needed any more"
    served.rollout.engine_set.call("load_past_loaders", False)
    served.push()
    gap, rounding = gap_and_rounding()
    assert gap <= 3 * rounding
