"""Layouts and directories that the bridge refuses by name before anything is built."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_backend.contracts import ConfigError, RuntimeConfig
from rl_backend.runtime.bridge import checks as bridge_checks
from rl_backend.runtime.bridge.checks import LayerSizes, _names_in_bridges, check_config, require_layout
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.bridge.installed import hidden

SIZES = LayerSizes(
    num_layers=6,
    num_attention_heads=12,
    num_key_value_heads=4,
    ffn_hidden_size=36,
    num_experts=6,
    shared_expert_size=24,
    linear_num_key_heads=8,
)


@pytest.mark.parametrize(
    ("parallel", "changes", "engine", "refused"),
    [
        ({"tp": 4}, {}, True, ""),
        ({"tp": 4}, {}, False, ""),
        ({"ep": 3}, {}, False, ""),
        ({"pp": 3, "vpp": 2}, {}, False, ""),
        ({"pp": 4}, {"num_layers": None}, False, ""),
        ({"cp": 2, "ep": 4}, {}, True, r"cp=2: .*; use 1; BridgeConfig\.parallel\.ep=4: does not divide"),
        ({"cp": 2}, {}, True, r"cp=2: the bridge runtime does not split packed sequences"),
        ({"cp": 2}, {}, False, r"cp=2: Megatron's own attention has no context parallelism"),
        ({"tp": 5}, {}, True, r"tp=5: does not divide num_attention_heads=12, .*, num_key_value_heads=4; use 4$"),
        ({"tp": 4}, {"ffn_hidden_size": 30}, True, r"tp=4: does not divide ffn_hidden_size=30"),
        ({"tp": 4}, {"shared_expert_size": 6}, True, r"tp=4: does not divide shared_expert_size=6"),
        ({"tp": 4}, {"linear_num_key_heads": 2}, True, r"tp=4: does not divide linear_num_key_heads=2"),
        # Transformer Engine copies heads of keys where there are fewer of them than ranks.
        ({"tp": 4}, {"num_key_value_heads": 2}, True, ""),
        ({"tp": 4}, {"num_key_value_heads": 2}, False, r"tp=4: does not divide num_key_value_heads=2"),
        ({"tp": 4}, {"num_key_value_heads": 3}, True, r"tp=4: does not divide num_key_value_heads=3"),
        ({"tp": 4}, {"num_key_value_heads": None}, False, ""),
        ({"ep": 4}, {}, False, r"ep=4: does not divide experts=6.*use 3 or 6"),
        ({"ep": 2}, {"num_experts": 0}, False, r"ep=2: this model has no experts; use 1"),
        ({"etp": 2}, {"num_experts": 0}, False, r"etp=2: this model has no experts; use 1"),
        ({"pp": 4}, {}, False, r"pp=4: 6 layers do not divide into pp\*vpp = 4\*1 = 4 stages; use a"),
        ({"pp": 2, "vpp": 2}, {}, False, r"pp=2: 6 layers do not divide into pp\*vpp = 2\*2 = 4 stages"),
        ({"tp": 2}, {"model_type": "minimax_m2"}, True, r"tp=2: minimax_m2: Megatron-Bridge's norm over all heads"),
        ({"tp": 2}, {"model_type": "minimax_m2"}, False, ""),
        ({"tp": 1}, {"model_type": "minimax_m2"}, True, ""),
        ({"tp": 2}, {"model_type": "deepseek_v3"}, False, r"tp=2: deepseek_v3: Megatron's own layers give other gradients"),
        ({"tp": 2}, {"model_type": "glm4_moe_lite"}, False, r"tp=2: glm4_moe_lite: .*; use 1, or backend='native'"),
        ({"tp": 2}, {"model_type": "deepseek_v3"}, True, ""),
    ],
    ids=str,
)  # fmt: skip
def test_a_layout_is_refused_by_what_it_does_not_divide(
    parallel: dict[str, int], changes: dict[str, Any], engine: bool, refused: str
) -> None:
    options, sizes = BridgeConfig(parallel=parallel), SIZES._replace(**changes)
    if not refused:
        require_layout(options, sizes, transformer_engine=engine)
        return
    with pytest.raises(ConfigError, match=rf"^BridgeConfig\.parallel\.{refused}"):
        require_layout(options, sizes, transformer_engine=engine)


def test_stages_that_a_user_lays_out_need_not_be_even() -> None:
    for name in bridge_checks.UNEVEN_STAGES:
        options = BridgeConfig(parallel={"pp": 4}, override_transformer_config={name: 1})
        require_layout(options, SIZES, transformer_engine=False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, LayerSizes(None, None, None, None, 0, None, None, "qwen3")),
        (
            {
                "num_hidden_layers": 3,
                "num_attention_heads": 8,
                "intermediate_size": 40,
                "num_experts": 0,
                "n_routed_experts": 5,
                "shared_expert_intermediate_size": 7,
                "linear_num_key_heads": 9,
            },
            LayerSizes(3, 8, 8, 40, 5, 7, 9, "qwen3"),
        ),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 4, "num_hidden_layers": True},
            LayerSizes(None, 8, 2, None, 4, None, None, "qwen3"),
        ),
        (
            {"num_experts": 6, "num_local_experts": 4, "intermediate_size": -3, "num_hidden_layers": "2"},
            LayerSizes(None, None, None, None, 6, None, None, "qwen3"),
        ),
    ],
)
@pytest.mark.parametrize(("device", "engine"), [("cpu", False), ("auto", True), ("cuda", True)])
def test_sizes_are_read_from_the_directory_whose_ranks_may_be_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], expected: LayerSizes, device: str, engine: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **fields}))
    found: list[Any] = []
    monkeypatch.setattr(bridge_checks, "require_layout", lambda *args, **options: found.append((*args, options)))
    config = RuntimeConfig(backend="bridge", hf_path=str(tmp_path), backend_cfg=BridgeConfig(device=device))  # type: ignore[arg-type]
    check_config(config)
    assert [(sizes, options) for _, sizes, options in found] == [(expected, {"transformer_engine": engine})]


@pytest.fixture
def asked_anew() -> Iterator[None]:
    _names_in_bridges.cache_clear()
    yield
    _names_in_bridges.cache_clear()


def test_bridges_are_known_by_the_names_in_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_anew: None
) -> None:
    for folder, text in (
        ("one/models", "AForCausalLM, x"),
        ("two/models/deep", "BForThing\n_CForD"),
        ("two/other", "EForF"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.py").write_text(text)
    places: Any = None

    def find(name: str) -> Any:
        if places == "missing":
            raise ModuleNotFoundError(name)
        return None if places is None else SimpleNamespace(submodule_search_locations=places)

    monkeypatch.setattr(bridge_checks.importlib.util, "find_spec", find)
    both = [str(tmp_path / "one"), str(tmp_path / "two")]
    for found, expected in (("missing", set()), (None, set()), ([], set()), (both, {"AForCausalLM", "BForThing", "_CForD"})):
        places = found
        _names_in_bridges.cache_clear()
        assert _names_in_bridges() == expected
    # Where it is not installed, nothing is known to be missing.
    places = "missing"
    _names_in_bridges.cache_clear()
    bridge_checks.require_bridge("model", {"model_type": "gpt_neox"})


def test_a_package_is_hidden_from_megatron_alone_and_only_where_it_was_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with hidden("wave"), pytest.raises(ImportError):
        importlib.import_module("wave")
    found = importlib.import_module("wave")
    with hidden("wave"):
        assert importlib.import_module("wave") is found
    assert sys.modules["wave"] is found
