"""Plans of GLM-4.5, gpt-oss and MiniMax-M2: parameters of the released sizes, layouts, the largest tensor of a push."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.lab.plan.make import make_plan
from rl_backend.lab.plan.memory import Workload
from rl_backend.model import BuildSettings, find_model
from tests.support.drafting import write_drafting
from tests.support.matrix import sampled
from tests.support.moe import write_moe
from tests.support.native import make_config
from tests.unit.rl_backend.model.test_mixtures import PUBLISHED

WORKLOAD = Workload(sequence_length=512, micro_batch_tokens=1280, num_micro_batches=4)
_AIR = {
    **PUBLISHED["GLM-4.5"],
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_hidden_layers": 46,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
}
RELEASED: Mapping[str, tuple[dict[str, Any], float, float]] = {
    "GLM-4.5": (PUBLISHED["GLM-4.5"], 352.8, 32.9),
    "GLM-4.5-Air": (_AIR, 106.9, 12.8),
    "gpt-oss-20b": (PUBLISHED["gpt-oss-20b"], 20.9, 3.6),
    "gpt-oss-120b": ({**PUBLISHED["gpt-oss-20b"], "num_hidden_layers": 36, "num_local_experts": 128}, 116.8, 5.1),
    "MiniMax-M2": (PUBLISHED["MiniMax-M2"], 228.7, 10.4),
}
"""Name -> ``config.json``, billions of parameters, and of those that a token passes, without embeddings."""


@pytest.mark.shows("plan: parameters of every released size of GLM-4.5, gpt-oss and MiniMax-M2 are counted")
@pytest.mark.parametrize("name", RELEASED)
def test_a_released_model_has_its_number_of_parameters(name: str) -> None:
    config, total, active = RELEASED[name]
    family = find_model("auto", config)
    architecture = family.parse_config(config)
    with torch.device("meta"):
        model = family.build(architecture, BuildSettings(family.options_type(), "log_probs", 1024))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    router = architecture.layers[-1].feed_forward.router
    part = router.top_k / router.num_experts
    passed = [size * (part if ".experts." in name else 1) for name, size in sizes.items() if "embed_tokens" not in name]
    assert (round(sum(sizes.values()) / 1e9, 1), round(sum(passed) / 1e9, 1)) == (total, active)


@pytest.mark.parametrize(
    ("model", "parallel"),
    sampled(
        [
            (model, parallel)
            for model in ("glm4_moe", "gpt_oss", "minimax_m2")
            for parallel in ({"tp": 2, "pp": 2, "ep": 2}, {"cp": 2, "ep": 2, "etp": 2})
        ],
        *(("gpt_oss", {"tp": 2, "pp": 2, "ep": 2}), ("minimax_m2", {"cp": 2, "ep": 2, "etp": 2})),
    ),
)
def test_a_mixture_is_planned_in_layouts(tmp_path: Path, model: str, parallel: dict[str, int]) -> None:
    path = write_moe(model, tmp_path, num_hidden_layers=4)
    whole = make_plan(make_config(path), 1, WORKLOAD)
    cut = make_plan(make_config(path, parallel=parallel), 4, WORKLOAD)
    assert cut.num_parameters == whole.num_parameters
    for rank in cut.ranks:
        assert 0 < rank.weights < whole.ranks[0].weights
        assert 0 < rank.flops < whole.ranks[0].flops


def test_a_layer_for_multi_token_prediction_is_planned_where_it_is_trained(tmp_path: Path) -> None:
    path = write_drafting(tmp_path / "model", "glm4_moe", num_hidden_layers=4)
    own = {name: math.prod(info.shape) for name, info in HFReader(path).infos.items() if name.startswith("model.layers.4.")}
    pushed = sum(size * (4 if name.endswith("e_score_correction_bias") else 2) for name, size in own.items())
    kept = make_plan(make_config(path), 1, WORKLOAD)
    for parallel in ({}, {"pp": 2}):
        config = make_config(path, model="glm4_moe", model_cfg={"mtp": "joint"}, parallel=parallel)
        trained = make_plan(config, 2 if parallel else 1, WORKLOAD)
        assert trained.sync_bytes == kept.sync_bytes + pushed, "its copies are pushed too"
    assert trained.ranks[1].weights > trained.ranks[0].weights, "on the last stage, with a copy of the embeddings"


def test_a_push_of_gpt_oss_holds_all_experts_of_a_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["gpt-oss-20b"], "num_hidden_layers": 2}))
    plan = make_plan(make_config(tmp_path, param_dtype="bfloat16", parallel={"ep": 8}), 8, WORKLOAD)
    assert plan.ranks[0].sync_bucket > 32 * 2880 * 5760 * 2
