"""What ``config.json`` leaves out is what the installed transformers fills in, in every family."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from rl_backend.contracts import UnsupportedError
from rl_backend.model.registry import MODEL_FAMILIES, find_model
from tests.support.small_models import FAMILIES

# Not all that is registered: other test files register families when they are imported.
KINDS = [kind for name in FAMILIES for kind in MODEL_FAMILIES.get(name).hf_model_types]
LIKE = {"kimi_k2": "deepseek_v3", "deepseek_v32": "deepseek_v3"}
"""``model_type`` that transformers does not have -> the one whose class vLLM reads it with."""
NESTED = ("text_config", "rope_parameters")
NOT_READ = ("model_type", "transformers_version", "_name_or_path", "architectures")
SMALL: Mapping[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "intermediate_size": 40,
    "vocab_size": 64,
    "rms_norm_eps": 3e-3,
    "layer_types": None,
    "mlp_layer_types": None,
    "indexer_types": None,
}
"""Other sizes than a family's own: what is filled in may be made of them."""
KEY_HEADS = ("deepseek_v3", "kimi_k2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
"""transformers fills in a number of key heads that other numbers of heads do not run with; no weight depends on it."""


def parse(fields: Mapping[str, Any]) -> Any:
    """What the family reads; the message where it refuses."""
    try:
        return find_model("auto", fields).parse_config(fields)
    except UnsupportedError as error:
        return str(error)


def written(config: PreTrainedConfig, kind: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**fields, "model_type": kind}


def without(fields: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    first, *rest = path
    left = {name: value for name, value in fields.items() if name != first or rest}
    return {**left, first: without(fields[first], tuple(rest))} if rest else left


def paths(fields: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        if name not in NOT_READ:
            yield (*at, name)
            if name in NESTED and isinstance(value, Mapping):
                yield from paths(value, (*at, name))


def filled_in(kind: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """With what transformers' class of the family makes of absent fields; None where it refuses the rest."""
    of_class = type(AutoConfig.for_model(LIKE.get(kind, kind)))
    try:
        return written(of_class(**{name: value for name, value in fields.items() if name != "model_type"}), kind)
    except (StrictDataclassError, KeyError, TypeError):
        return None


def bases(kind: str) -> list[dict[str, Any]]:
    """The family's default configuration, and one of other sizes."""
    plain = written(AutoConfig.for_model(LIKE.get(kind, kind)), kind)
    if kind == "glm4_moe":
        plain["head_dim"] = 128  # else it is refused: 96 heads do not divide the hidden size
    inside = plain.get("text_config", plain)
    sizes = {name: value for name, value in SMALL.items() if name in inside}
    if "q_lora_rank" not in inside:
        sizes["num_key_value_heads"] = 4
    elif "num_key_value_heads" in inside:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    small = filled_in(kind, {**plain, "text_config": {**inside, **sizes}} if "text_config" in plain else {**plain, **sizes})
    assert small is not None
    return [plain, small]


@pytest.mark.shows(
    "models: a field that config.json leaves out is what the installed transformers fills in, in every family"
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_field_left_out_is_what_transformers_fills_in(kind: str) -> None:
    for base in bases(kind):
        assert not isinstance(parse(base), str), parse(base)
        for path in paths(base):
            given = without(base, path)
            found, whole = parse(given), filled_in(kind, given)
            expected = None if whole is None else parse(whole)
            if expected is None:
                continue
            if path[-1] == "num_nextn_predict_layers" and not isinstance(expected, str):
                # Newer releases fill in one layer, whether or not there are weights of it.
                expected = replace(expected, mtp=None)
            if isinstance(expected, str):
                assert isinstance(found, str) or (path[-1] == "num_key_value_heads" and kind in KEY_HEADS), path
            else:
                assert found == expected or isinstance(found, str), path


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_false_where_transformers_lets_it_stand_for_a_flag(kind: str) -> None:
    (base, _) = bases(kind)
    for name in (name for name, value in base.items() if isinstance(value, bool)):
        if filled_in(kind, {**base, name: None}) is not None:
            assert parse({**base, name: None}) == parse({**base, name: False}), name
