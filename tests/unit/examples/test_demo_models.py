"""The models that the demo makes on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from actors.run.command_line import parse_config
from examples.demo.__main__ import DemoConfig
from examples.demo.task import HYBRIDS, MIXTURES, MODEL_TYPES, mixer_fields, write_task
from rl_backend.model import find_model


def test_the_demos_models_have_the_same_tokenizer_and_data(tmp_path: Path) -> None:
    for model in MODEL_TYPES:
        write_task(tmp_path / model, seed=3, model=parse_config(DemoConfig, "", ["--model", model]).model)
        config = json.loads((tmp_path / model / "model" / "config.json").read_text())
        assert config["hidden_size"] == 128
        family = find_model("auto", config)
        decoder = family.parse_config(config)
        assert (family.name, decoder.num_layers) == (model, 3)
        assert (decoder.routed_layers is not None) == (model in MIXTURES)
        assert ({layer.mixer.module for layer in decoder.layers} == {"linear_attn", "self_attn"}) == (model in HYBRIDS)
        for name in ("model/tokenizer.json", "train.jsonl", "held_out.jsonl"):
            assert (tmp_path / "qwen3" / name).read_text() == (tmp_path / model / name).read_text()


def test_every_fourth_layer_of_the_demos_hybrids_or_the_last_of_fewer_has_attention() -> None:
    for layers, expected in ((3, [2]), (4, [3]), (8, [3, 7]), (1, [0])):
        kinds = mixer_fields(layers)["layer_types"]
        assert [index for index, kind in enumerate(kinds) if kind == "full_attention"] == expected
