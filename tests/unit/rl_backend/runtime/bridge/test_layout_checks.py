"""Layouts that do not fit a model are refused before anything is built, with sizes that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import ConfigError, RuntimeConfig
from rl_backend.runtime import check_config
from rl_backend.runtime.bridge.checks import COUNTED_AS_LAYERS, LayerSizes, require_layout
from rl_backend.runtime.bridge.config import BridgeConfig
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.sparse_models import write_sparse


def check(model: Path, num_ranks: int, **parallel: int) -> None:
    check_config(RuntimeConfig(hf_path=str(model), backend_cfg={"parallel": parallel}), num_ranks)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(
        "qwen3", tmp_path_factory.mktemp("dense"), num_attention_heads=12, num_key_value_heads=4, intermediate_size=96
    )


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe, dense layers between", tmp_path_factory.mktemp("mixture"), moe_intermediate_size=48)


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"tp": 4}, {"tp": 12}, {"cp": 3}, {"tp": 2, "cp": 2}])
def test_sizes_that_divide_the_model_are_taken(dense: Path, sizes: dict[str, int]) -> None:
    check(dense, 12, **sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 5}, r"ParallelConfig\.tp=5: does not divide num_attention_heads=12 \(12 / 5 = 2\.40\); use 4 or 6"),
        ({"tp": 3}, r"ParallelConfig\.tp=3: num_key_value_heads=4 is no multiple of it \(4 / 3 = 1\.33.*use 2 or 4"),
        ({"ep": 2}, r"ParallelConfig\.ep=2: this model has no experts; use 1"),
        ({"etp": 2}, r"ParallelConfig\.etp=2: this model has no experts; use 1"),
    ],
    ids=str,
)
def test_a_dense_model_refuses_sizes_that_do_not_divide_it(dense: Path, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(dense, 60, **sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ep": 4}, r"ParallelConfig\.ep=4: does not divide num_experts=6 \(6 / 4 = 1\.50\); use 3 or 6"),
        ({"etp": 5}, r"ParallelConfig\.etp=5: does not divide moe_intermediate_size=48 .*; use 4 or 6"),
    ],
    ids=str,
)
def test_a_mixture_refuses_sizes_that_do_not_divide_its_experts(mixture: Path, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(mixture, 60, **sizes)


def test_the_intermediate_size_of_dense_layers_counts(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path, hidden_size=96, num_attention_heads=6, num_key_value_heads=6, intermediate_size=64)
    with pytest.raises(ConfigError, match=r"tp=3: does not divide intermediate_size=64 .*; use 2 or 4"):
        check(model, 3, tp=3)


def of_bridge(num_layers: int, parallel: dict[str, int], *counted: str) -> None:
    sizes = LayerSizes(num_layers, None, None, None, num_experts=0)
    options = BridgeConfig(parallel=parallel, override_transformer_config=dict.fromkeys(counted, True))
    require_layout(options, sizes, transformer_engine=False)


def test_what_megatron_counts_as_a_layer_decides_which_stages_the_bridge_takes() -> None:
    embedding, loss = COUNTED_AS_LAYERS
    of_bridge(15, {"pp": 2, "vpp": 4}, loss)
    of_bridge(94, {"pp": 8}, embedding, loss)
    with pytest.raises(ConfigError, match=rf"pp=2: 8 layers, counted as 9 with {loss}, do not divide into .* = 2 stages"):
        of_bridge(8, {"pp": 2}, loss)
    with pytest.raises(ConfigError, match=rf"pp=8: 94 layers do not divide into .*, {embedding}, {loss} in override_"):
        of_bridge(94, {"pp": 8})


def test_the_number_of_ranks_is_checked_first(dense: Path) -> None:
    with pytest.raises(ConfigError, match=r"world size 3 is not a multiple of tp\*pp\*cp = 2\*1\*1 = 2; use 2 or 4 ranks"):
        check(dense, 3, tp=2)


@pytest.mark.parametrize(
    ("native", "message"),
    [
        ({"parallel": {"tp": 2}}, r"tp=2: model family 'bigram' is not laid out like that.*ModelFamily\.check_layout"),
        ({"parallel": {"vpp": 2}}, r"vpp=2: model family 'bigram' is not laid out like that"),
        ({"pipeline_schedule": "zb-h1"}, r"pipeline_schedule='zb-h1': model family 'bigram' has no stages"),
    ],
    ids=str,
)
def test_a_family_that_says_nothing_of_layouts_is_data_parallel_only(
    tmp_path: Path, native: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bigram", "vocab_size": 16}')
    config = RuntimeConfig(hf_path=str(tmp_path), plugins=("tests.support.outside_plugin",), backend_cfg=native)
    with pytest.raises(ConfigError, match=message):
        check_config(config, 2 if "tp" in native.get("parallel", {}) else 1)


def test_a_directory_on_another_node_is_left_to_the_ranks(tmp_path: Path) -> None:
    check(tmp_path / "elsewhere", 4, tp=4)


@pytest.mark.shows(
    "sparse attention: a stage that begins with a layer which shares keys is refused before any process starts"
)
def test_stages_of_every_rank_begin_with_a_layer_that_chooses_keys(tmp_path: Path) -> None:
    model = write_sparse(tmp_path, "glm_moe_dsa")
    check(model, 2, pp=2)
    with pytest.raises(ConfigError, match=r"pipeline_layers=1: .*begin with layers of \[0, 2\]"):
        check(model, 2, pp=2, vpp=2)
