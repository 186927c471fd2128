"""Lengths of sequences within the positions of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.rollout.config import RolloutConfig, fitting_lengths, more_than, positions_of, within_model
from rl_backend.contracts import ConfigError


@pytest.mark.parametrize(
    ("asked", "left", "positions", "expected"),
    [
        ({"prompt": 60, "response": 40}, ["prompt", "response"], 100, {}),
        ({"prompt": 60, "response": 41}, ["prompt", "response"], 100, {"response": 41, "prompt": 59}),
        ({"prompt": 20, "response": 90}, ["prompt", "response"], 100, {"prompt": 20, "response": 80}),
        ({"prompt": 90, "response": 90}, ["prompt", "response"], 101, {"prompt": 50, "response": 51}),
        ({"prompt": 70, "response": 90}, ["response"], 100, {"response": 30}),
        ({"prompt": 70, "response": 90}, ["prompt"], 100, {"prompt": 10}),
        ({"prompt": 70, "response": 90}, ["prompt"], 91, {"prompt": 1}),
        ({"prompt": 70, "response": 90}, ["prompt"], 90, {}),
        ({"prompt": 70, "response": 90}, [], 100, {}),
        ({"a": 5, "b": 50, "c": 50}, ["a", "b", "c"], 60, {"a": 5, "b": 27, "c": 28}),
        ({"a": 5, "b": 50, "c": 50}, ["a", "b", "c"], 3, {"a": 1, "b": 1, "c": 1}),
        ({"a": 5, "b": 50, "c": 50}, ["a", "b", "c"], 2, {}),
    ],
)
def test_lengths_that_nobody_gave_are_what_fits(
    asked: dict[str, int], left: list[str], positions: int, expected: dict[str, int]
) -> None:
    before = dict(asked)
    found = fitting_lengths(asked, left, positions)
    assert found == expected and asked == before
    if found:
        assert sum({**asked, **found}.values()) <= positions


def test_the_positions_of_a_model_are_those_of_its_config(tmp_path: Path) -> None:
    assert positions_of(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 320}))
    assert positions_of(str(tmp_path)) == positions_of(str(tmp_path), "qwen3") == 320
    (tmp_path / "config.json").write_text("{")
    assert positions_of(str(tmp_path)) is None


def test_a_default_length_is_the_models_and_one_that_was_given_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 320}))
    model = str(tmp_path)
    assert within_model(RolloutConfig(model_path=model, seed=4)) == RolloutConfig(
        model_path=model, seed=4, max_model_len=320
    )
    for length in (319, 320):
        given = RolloutConfig(model_path=model, max_model_len=length)
        assert within_model(given) is given
    with pytest.raises(ConfigError, match=rf"max_model_len=321: {model} has 320 positions .*; use at most 320$"):
        within_model(RolloutConfig(model_path=model, max_model_len=321))
    assert more_than("m", 7) == "m has 7 positions for prompt and response together; use at most 7"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096}))
    assert within_model(RolloutConfig(model_path=model)).max_model_len == 2048
