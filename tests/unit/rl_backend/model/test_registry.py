"""Families by name and by model type, and what a family says where it leaves something out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from pydantic import Field

from rl_backend.contracts import MODEL_CONFIGS, ModelOptions, UnsupportedError
from rl_backend.model import (
    MODEL_FAMILIES,
    QWEN3,
    ModelFamily,
    find_model,
    model_kept_prefixes,
    model_positions,
    register_model,
)

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "rope_scaling": {"type": "linear", "factor": 2.0},
}


class Options(ModelOptions):
    size: int = Field(default=3)


def parse(hf_config: Mapping[str, Any]) -> Any:
    if "bad" in hf_config:
        raise UnsupportedError("bad")
    return ("parsed", hf_config["model_type"])


def with_size(parsed: Any, options: Any) -> Any:
    return (*parsed, options.size)


PLAIN = ModelFamily(
    name="plain",
    hf_model_types=("plain_a", "plain_b"),
    options_type=Options,
    parse_config=parse,
    build=QWEN3.build,
    parallelize=QWEN3.parallelize,
    weight_names=QWEN3.weight_names,
)


@pytest.fixture
def plain() -> Iterator[ModelFamily]:
    register_model(PLAIN)
    yield PLAIN
    MODEL_FAMILIES.remove("plain")
    MODEL_CONFIGS.remove("plain")


def test_a_family_is_found_by_its_name_or_by_each_of_its_model_types(plain: ModelFamily) -> None:
    assert find_model("plain", {"model_type": "qwen3"}) is plain
    for kind in ("plain_a", "plain_b"):
        assert find_model("auto", {"model_type": kind}) is plain
    assert MODEL_CONFIGS.get("plain") is Options


@pytest.mark.parametrize("model_type", [None, 7, ["qwen3"], "plain"])
def test_a_model_type_that_nobody_claims_is_refused_with_those_that_are(plain: ModelFamily, model_type: Any) -> None:
    with pytest.raises(UnsupportedError) as refused:
        find_model("auto", {} if model_type is None else {"model_type": model_type})
    message = str(refused.value)
    assert message.startswith(f"model_type={model_type!r}: no registered model family; the native runtime has ")
    assert (
        "deepseek_v3, " in message
        and "plain_a, plain_b, qwen2" in message
        and refused.value.details == {"model_type": model_type}
    )


def test_options_change_an_architecture_and_their_defaults_stand_for_none() -> None:
    fields = {"model_type": "plain_a"}
    assert PLAIN.architecture(fields, Options(size=9)) == ("parsed", "plain_a")
    family = replace(PLAIN, configured=with_size)
    assert family.architecture(fields, Options(size=9)) == ("parsed", "plain_a", 9)
    assert family.architecture(fields, None) == ("parsed", "plain_a", 3)


def test_heads_that_a_family_does_not_have_are_refused() -> None:
    PLAIN.require_head("log_probs")
    QWEN3.require_head("values")
    with pytest.raises(
        UnsupportedError, match=r"head='values': model family 'plain' has only 'log_probs'; add a family"
    ) as e:
        PLAIN.require_head("values")
    assert e.value.details == {"family": "plain", "head": "values"}


def test_kept_weights_are_those_of_the_architecture() -> None:
    assert PLAIN.kept_prefixes("anything") == ()
    assert replace(PLAIN, kept_weights=lambda parsed: (parsed, "x.")).kept_prefixes("y.") == ("y.", "x.")


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("fields", "model", "expected"),
    [
        (CONFIG, "auto", 128),
        ({**CONFIG, "model_type": "unknown"}, "auto", 64),
        ({**CONFIG, "hidden_act": "gelu"}, "auto", 64),
        ({**CONFIG, "model_type": "plain_a"}, "auto", 64),
        ({**CONFIG, "model_type": "unknown"}, "qwen3", 128),
        ({"model_type": "plain_a"}, "auto", None),
        ({"model_type": "plain_a", "max_position_embeddings": 0}, "auto", None),
        ({"model_type": "plain_a", "max_position_embeddings": "9"}, "auto", None),
        ({"model_type": "plain_a", "max_position_embeddings": 1}, "auto", 1),
        ({"model_type": "unknown", "text_config": {"max_position_embeddings": 7}}, "auto", 7),
    ],
    ids=str,
)
def test_the_longest_sequence_is_the_familys_or_what_the_directory_says(
    fields: dict[str, Any], model: str, expected: int | None
) -> None:
    assert model_positions(fields, model) == expected


@pytest.mark.usefixtures("plain")
def test_kept_prefixes_of_a_directory_are_none_where_no_family_reads_it() -> None:
    draft = {"num_nextn_predict_layers": 1, "model_type": "qwen3_5_text"}
    assert model_kept_prefixes({**CONFIG, **draft, "head_dim": 8, "rope_scaling": None}) == ("model.visual.", "mtp.")
    assert model_kept_prefixes({**CONFIG, "model_type": "unknown"}) == ()
    assert model_kept_prefixes({**CONFIG, **draft, "head_dim": 8, "rope_scaling": None, "attention_bias": True}) == ()
    assert model_kept_prefixes(CONFIG) == () == model_kept_prefixes({"model_type": "plain_b"})
    assert model_kept_prefixes({"model_type": "plain_b", "bad": 1}) == ()
