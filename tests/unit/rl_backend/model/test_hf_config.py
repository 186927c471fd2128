"""Fields of ``config.json``, read one by one: what stands for nothing, what is refused, and how a refusal reads."""

from __future__ import annotations

from typing import Any

import pytest

from rl_backend.contracts import UnsupportedError
from rl_backend.model.hf_config import HFConfig, is_finite, read_rotary
from rl_backend.primitive.rope import LinearScaling, Llama3Scaling, Rotary, YarnScaling


def config_of(**fields: Any) -> HFConfig:
    return HFConfig(fields, "llama")


@pytest.mark.parametrize(
    ("value", "finite"),
    [
        (1, True),
        (-2.5, True),
        (0, True),
        (True, False),
        ("1", False),
        (None, False),
        (float("nan"), False),
        (10**400, False),
    ],
)
def test_numbers_are_what_a_float_holds(value: Any, finite: bool) -> None:
    assert is_finite(value) is finite
    assert is_finite(float("inf")) is is_finite(float("-inf")) is False


def test_null_is_no_value_but_0_and_false_are() -> None:
    config = config_of(null=None, zero=0, no=False, empty=[])
    assert [config.get(field, 7) for field in ("null", "missing", "zero", "no", "empty")] == [7, 7, 0, False, []]
    assert config.get("missing") is None
    assert config_of(n=None).positive_int("n", 3) == 3 and config_of(n=2).positive_int("n", 3) == 2
    assert config_of(x=None).positive_float("x", 0.5) == 0.5 and config_of(x=2).positive_float("x") == 2.0
    assert isinstance(config_of(x=2).positive_float("x"), float)
    # transformers takes null for false whatever the default.
    assert config_of(f=None).flag("f", True) is False and config_of().flag("f", True) is True
    assert config_of().flag("f") is False and config_of(f=True).flag("f") is True


@pytest.mark.parametrize("value", [0, -1, 1.0, "3", True, [1], None])
def test_what_is_no_positive_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedError) as refused:
        config_of(n=value).positive_int("n")
    assert str(refused.value) == (
        f"config.json: n={value!r}: expected a positive whole number in the native llama family; use a model without it, or "
        "register_model(...) a family that has it"
    )
    assert refused.value.details == {"field": "n", "value": repr(value)}


@pytest.mark.parametrize("value", [0, 0.0, -1e-9, "0.1", True, float("inf"), float("nan"), None])
def test_what_is_no_positive_number_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"x=.*: expected a positive, finite number in the native llama family"):
        config_of(x=value).positive_float("x")


@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_what_is_no_flag_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"f=.*: expected true or false"):
        config_of(f=value).flag("f")


def test_only_honoured_values_pass_and_null_counts_as_absent() -> None:
    honoured: dict[str, tuple[Any, ...]] = {"first": (0, 0.0), "second": ("a", "b"), "third": ()}
    for fields in ({}, {"first": 0, "second": "b"}, {"first": None, "second": None, "third": None}, {"other": 1}):
        config_of(**fields).require(honoured)
    for fields, message in (
        ({"first": 1}, "first=1: only 0 or 0.0 is implemented in"),
        ({"first": 0, "second": "c"}, "second='c': only 'a' or 'b' is implemented in"),
        ({"third": 4}, "third=4: it is not implemented in"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            config_of(**fields).require(honoured)


def test_weights_that_are_no_plain_numbers_are_refused_with_what_they_are() -> None:
    config_of().require_readable_weights()
    config_of(quantization_config=None).require_readable_weights()
    with pytest.raises(UnsupportedError, match=r"quantization_config=\{'quant_method': 'awq'\}"):
        config_of(quantization_config={"quant_method": "awq"}).require_readable_weights()


LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


def rotary(scaling: dict[str, Any] | None, head_dim: int = 8, part: float | None = None, **fields: Any) -> Any:
    named = {} if scaling is None else {"rope_scaling": scaling}
    return read_rotary(
        config_of(**{"max_position_embeddings": 64, "rope_theta": 5.0, **named, **fields}), head_dim, None, part
    )


@pytest.mark.parametrize(
    ("scaling", "fields", "expected", "longest"),
    [
        (None, {}, None, 64),
        ({}, {}, None, 64),
        ({"rope_type": "default"}, {}, None, 64),
        ({"type": "linear", "factor": 1}, {}, LinearScaling(1.0), 64),
        ({"type": "linear", "factor": 2.5}, {}, LinearScaling(2.5), 160),
        # The newer name of the type counts.
        ({"type": "linear", "rope_type": "llama3", **LLAMA3}, {}, Llama3Scaling(8.0, 1.0, 4.0, 64), 64),
        ({"type": "llama3", **LLAMA3, "original_max_position_embeddings": 16}, {}, Llama3Scaling(8.0, 1.0, 4.0, 16), 64),
        (
            {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 16},
            {"original_max_position_embeddings": 32},
            Llama3Scaling(8.0, 1.0, 4.0, 32),
            64,
        ),
        ({"type": "yarn", "factor": 1.0}, {}, YarnScaling(1.0, 64, 1.0), 64),
        ({"type": "yarn", "factor": 2.0, "attention_factor": 0.5}, {}, YarnScaling(2.0, 64, 0.5), 128),
        (
            {"type": "yarn", "original_max_position_embeddings": 16, "attention_factor": 0.5},
            {},
            YarnScaling(4.0, 16, 0.5),
            64,
        ),
        (
            {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "attention_factor": 0.5},
            {},
            YarnScaling(2.0, 16, 0.5),
            64,
        ),
        (
            {"type": "yarn", "factor": 2, "attention_factor": 3, "beta_fast": 9, "beta_slow": 0.25, "truncate": False},
            {},
            YarnScaling(2.0, 64, 3.0, 9.0, 0.25, False),
            128,
        ),
        ({"type": "yarn", "factor": 2, "mscale": 0.7, "mscale_all_dim": 0.7}, {}, YarnScaling(2.0, 64, 1.0), 128),
    ],
    ids=str,
)
def test_a_scaling_and_the_longest_sequence_are_read(
    scaling: dict[str, Any] | None, fields: dict[str, Any], expected: Any, longest: int
) -> None:
    found = rotary(scaling, **fields)
    assert found == (Rotary(8, 5.0, expected), longest)
    assert rotary(None if scaling is None else {**scaling, "rope_theta": 7}, **fields).rotary.theta == (
        5.0 if scaling is None else 7.0
    )


def test_a_theta_has_a_default_only_where_a_family_has_one() -> None:
    config = config_of(max_position_embeddings=4)
    assert read_rotary(config, 4, 100.0) == (Rotary(4, 100.0), 4)
    with pytest.raises(UnsupportedError, match="rope_theta=None"):
        read_rotary(config, 4)


@pytest.mark.parametrize(
    ("part", "scaling", "fields", "expected"),
    [
        (None, None, {}, 8),
        (None, None, {"partial_rotary_factor": 1.0}, 8),
        (0.5, None, {}, 4),
        (0.5, None, {"partial_rotary_factor": 0.25}, 2),
        (0.5, {"partial_rotary_factor": 1.0}, {}, 8),
        (0.5, {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.75}, 2),
        (0.5, {"type": "linear", "factor": 2, "partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.25}, 2),
        (0.5, {"type": "linear", "factor": 2, "partial_rotary_factor": 0.25}, {}, 2),
    ],
    ids=str,
)
def test_a_part_of_a_head_is_rotated(
    part: float | None, scaling: dict[str, Any] | None, fields: dict[str, Any], expected: int
) -> None:
    assert rotary(scaling, 8, part, **fields).rotary.head_dim == expected


@pytest.mark.parametrize(
    ("part", "head_dim", "scaling", "fields", "message"),
    [
        (None, 8, None, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: only a partial_rotary_factor of 1.0"),
        (None, 8, {"partial_rotary_factor": 0.5}, {}, "rope_scaling=.*only a partial_rotary_factor of 1.0"),
        (0.5, 8, None, {"partial_rotary_factor": 0}, "partial_rotary_factor=0: expected .* above 0 and at most 1"),
        (0.5, 8, {"partial_rotary_factor": 1.25}, {}, "rope_scaling=.*above 0 and at most 1"),
        (0.5, 8, {"partial_rotary_factor": "half"}, {}, "rope_scaling=.*above 0 and at most 1"),
        (0.5, 6, None, {}, "head_dim=6: rotary embedding needs an even number, and rotates 3 with 0.5"),
        (0.1, 8, None, {}, "head_dim=8: .* rotates 0 with 0.1"),
        (None, 7, None, {}, "head_dim=7: rotary embedding needs an even number in the native"),
        (
            0.5,
            8,
            {"type": "linear", "factor": 2, "partial_rotary_factor": 0.25},
            {"partial_rotary_factor": 0.75},
            "partial_rotary_factor=0.75: rope_scaling says 0.25; make them the same",
        ),
        (None, 8, {"type": "linear", "factor": 0.99}, {}, "factor is 0.99; expected a finite number at least 1"),
        (None, 8, {"type": "linear"}, {}, "factor is None; expected a finite number at least 1"),
        (None, 8, {"type": "linear", "factor": "2"}, {}, "factor is '2'"),
        (None, 8, {"type": "linear", "factor": 2, "beta_fast": 1, "a": 2}, {}, "this rope_type has no a, beta_fast"),
        (None, 8, {"type": "default", "factor": 2}, {}, "this rope_type has no factor"),
        (None, 8, {"type": "yarn", "factor": 2, "low_freq_factor": 1}, {}, "this rope_type has no low_freq_factor"),
        (None, 8, {"type": "yarn", "factor": 2, "truncate": 1}, {}, "truncate must be true or false"),
        (None, 8, {"type": "yarn", "factor": 2, "beta_slow": 0}, {}, "beta_slow is 0; expected a finite number above 0"),
        (None, 8, {"type": "yarn", "factor": 2, "attention_factor": 0}, {}, "attention_factor is 0; .* above 0"),
        (None, 8, {"type": "yarn", "factor": 2, "mscale": -1}, {}, "mscale is -1; expected a finite number at least 0"),
        (
            None,
            8,
            {"type": "yarn", "original_max_position_embeddings": 65},
            {},
            "without a factor, max_position_embeddings=64 must be at least the original 65",
        ),
        (
            None,
            8,
            {"type": "yarn", "factor": 2},
            {"original_max_position_embeddings": 0},
            "original_max_position_embeddings=0",
        ),
        (None, 8, {"type": "llama3", **LLAMA3, "low_freq_factor": 5}, {}, "high_freq_factor must be above low_freq_factor"),
        (None, 8, {"type": "llama3", **LLAMA3, "low_freq_factor": 0}, {}, "low_freq_factor is 0; .* above 0"),
        (None, 8, {"type": 3}, {}, "rope_type 3 is not one of default, linear, llama3 and yarn"),
        (None, 8, {"rope_theta": -1}, {}, "rope_theta is -1; expected a finite number above 0"),
        (None, 8, None, {"max_position_embeddings": None}, "max_position_embeddings=None"),
        (None, 8, None, {"rope_parameters": [1]}, r"rope_parameters=\[1\]: expected an object"),
        (None, 8, None, {"rope_scaling": "yarn"}, "rope_scaling='yarn': expected an object"),
    ],
    ids=str,
)
def test_an_embedding_that_cannot_be_is_refused_by_name(
    part: float | None, head_dim: int, scaling: dict[str, Any] | None, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        rotary(scaling, head_dim, part, **fields)


def test_the_object_that_is_there_is_read_and_equal_ones_are_one() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    both: list[dict[str, Any]] = [{"rope_parameters": linear}, {"rope_scaling": linear}]
    for fields in (*both, both[0] | both[1]):
        assert rotary(None, **fields) == (Rotary(8, 5.0, LinearScaling(2.0)), 128)
    assert rotary(None, rope_parameters=None, rope_scaling=linear).rotary.scaling == LinearScaling(2.0)


def test_one_is_a_number_of_heads_and_the_smallest_numbers_are_numbers() -> None:
    assert config_of(n=1).positive_int("n") == 1 and config_of().positive_int("n", 1) == 1
    assert config_of(x=5e-324).positive_float("x") == 5e-324


def test_yarn_needs_waves_that_grow() -> None:
    yarn = {"type": "yarn", "factor": 2.0, "attention_factor": 1.0}
    with pytest.raises(UnsupportedError, match=r"rope_theta=1\.0: yarn needs a number above 1"):
        rotary(yarn, rope_theta=1.0)
    assert rotary(yarn, rope_theta=1.5).rotary.theta == 1.5 and rotary(None, rope_theta=1.0).rotary.theta == 1.0
