"""Frequencies of rotary embeddings against transformers', in the configuration formats of versions 4 and 5."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl_backend.contracts import UnsupportedError
from rl_backend.model.hf_config import HFConfig, RotaryContext, read_rotary
from rl_backend.primitive.rope import rotary_cos_sin

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {"factor": 2.5}),
    "llama3": ("llama3", LLAMA3),
    "llama3 of 3.2": ("llama3", {**LLAMA3, "factor": 32.0}),
    "llama3 without the original length": ("llama3", {**LLAMA3, "original_max_position_embeddings": None}),
    "yarn": ("yarn", YARN),
    "yarn without the original length": ("yarn", {"factor": 4.0}),
    "yarn, factor 1": ("yarn", {**YARN, "factor": 1.0}),
    "yarn, attention factor": ("yarn", {**YARN, "attention_factor": 0.7}),
    "yarn, betas": ("yarn", {**YARN, "beta_fast": 20, "beta_slow": 2.5}),
    "yarn, not truncated": ("yarn", {**YARN, "truncate": False}),
    "yarn, mscale": ("yarn", {**YARN, "mscale": 0.707, "mscale_all_dim": 1.1}),
    "yarn, one mscale": ("yarn", {**YARN, "mscale": 0.707}),
    "yarn, every dimension kept": ("yarn", {**YARN, "original_max_position_embeddings": 3}),
}


def as_json(rope: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 16384, **fields, **rope}


def read(config: dict[str, Any], head_dim: int = 64) -> RotaryContext:
    return read_rotary(HFConfig(config, "llama"), head_dim)


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_and_attention_factor_equal_transformers_in_either_format(scaling: str, theta: float) -> None:
    kind, fields = SCALINGS[scaling]
    fields = {name: value for name, value in fields.items() if value is not None}
    parameters = {"rope_type": kind, "rope_theta": theta, **fields}
    reference = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=dict(parameters)
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](reference, torch.device("cpu"))
    for config in (
        as_json({"rope_parameters": parameters}),
        as_json({"rope_scaling": {"rope_type": kind, **fields}}, rope_theta=theta),
        as_json({"rope_scaling": {"type": kind, **fields}}, rope_theta=theta),
    ):
        rotary = read(config).rotary
        assert rotary.scaling is not None
        torch.testing.assert_close(rotary.frequencies(), expected, rtol=1e-6, atol=0)
        assert rotary.scaling.attention_factor == pytest.approx(factor, rel=1e-12)
        cos, sin = rotary_cos_sin(torch.tensor([0, 3]), rotary, torch.float32)
        torch.testing.assert_close((cos**2 + sin**2), torch.full_like(cos, factor**2), rtol=1e-5, atol=0)


def test_the_original_length_beside_the_scaling_takes_precedence_as_in_transformers() -> None:
    config = as_json({"rope_scaling": {"type": "yarn", **YARN}}, rope_theta=1e4, original_max_position_embeddings=2048)
    scaling = read(config).rotary.scaling
    assert scaling is not None and scaling.original_max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 16384),
        ({"rope_type": "linear", "factor": 2.0}, 32768),
        ({"rope_type": "llama3", **LLAMA3}, 16384),
        ({"rope_type": "yarn", **YARN}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}, 65536),
    ],
    ids=str,
)
def test_the_longest_sequence_follows_from_the_scaling(rope: dict[str, Any], longest: int) -> None:
    assert read(as_json({"rope_parameters": {"rope_theta": 1e4, **rope}})).max_length == longest


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "proportional"])
def test_other_scalings_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"rope_scaling=.*{kind}.*not one of default, linear, llama3 and yarn"):
        read(as_json({"rope_scaling": {"type": kind, "factor": 2.0}}, rope_theta=1e4))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1" + "0" * 400])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rope_theta", '{"rope_theta": NUMBER}'),
        ("rope_theta", '{"rope_parameters": {"rope_type": "default", "rope_theta": NUMBER}}'),
        ("factor", '{"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": NUMBER}}'),
        ("beta_fast", '{"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": NUMBER}}'),
    ],
)
def test_numbers_of_json_that_are_not_finite_are_refused_by_name(name: str, text: str, number: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}.*expected a .*finite number"):
        read(as_json(json.loads(text.replace("NUMBER", number))))


@pytest.mark.parametrize(
    ("scaling", "changes", "message"),
    [
        ({"type": "yarn", **YARN}, {"rope_theta": 1.0}, "rope_theta=1.0: yarn needs a number above 1"),
        ({"type": "yarn", "original_max_position_embeddings": 32768}, {}, "max_position_embeddings=16384 must be at least"),
        (
            {"type": "yarn", "factor": None, "original_max_position_embeddings": 0.5},
            {},
            "is 0.5; expected a finite number at least 1",
        ),
        ({"type": "yarn", "factor": 1e308}, {}, "a factor of 1e.308 makes 16384 tokens more than can be counted"),
        ({"type": "linear", "factor": 1e308}, {}, "a factor of 1e.308 makes 16384 tokens more than can be counted"),
    ],
    ids=str,
)
def test_scalings_whose_frequencies_or_length_do_not_exist_are_refused(
    scaling: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read(as_json({"rope_theta": 1e4, "rope_scaling": scaling, **changes}))


def test_two_descriptions_that_differ_are_refused() -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert read(as_json({"rope_parameters": linear, "rope_scaling": linear})).max_length == 32768
    with pytest.raises(UnsupportedError, match=r"rope_scaling=.*rope_parameters says something else"):
        read(as_json({"rope_parameters": linear, "rope_scaling": {**linear, "factor": 3.0}}))
