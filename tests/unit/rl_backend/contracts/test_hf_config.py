"""What is read of a ``config.json`` that says how weights are stored, and every way in which it is not understood."""

from __future__ import annotations

from typing import Any

import pytest

from rl_backend.contracts.hf_config import quantisation_problem, stores_mxfp4, text_config, weight_blocks

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 64]}
MXFP4 = {"quant_method": "mxfp4"}


def test_the_language_model_is_described_by_its_own_part_or_by_all() -> None:
    whole = {"model_type": "vl", "vocab_size": 9}
    assert text_config(whole) is whole
    assert text_config({**whole, "text_config": {"vocab_size": 5}}) == {"vocab_size": 5}
    for odd in (None, "text", 3):
        assert text_config({**whole, "text_config": odd})["vocab_size"] == 9


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({}, (128, 64)),
        ({"fmt": "float8_e4m3fn"}, (128, 64)),
        ({"fmt": None}, (128, 64)),
        ({"activation_scheme": None}, (128, 64)),
        ({"scale_fmt": "ue8m0"}, (128, 64)),
        ({"scale_fmt": "float32"}, (128, 64)),
        ({"weight_block_size": [1, 7]}, (1, 7)),
        ({"modules_to_not_convert": ["lm_head"], "ignored_layers": []}, (128, 64)),
    ],
)
def test_blocks_are_rows_and_columns(changes: dict[str, Any], blocks: tuple[int, int]) -> None:
    config = {"quantization_config": {**FP8, **changes}}
    assert quantisation_problem(config) == ""
    assert weight_blocks(config) == blocks
    assert not stores_mxfp4(config)


def test_a_field_that_is_left_out_counts_as_null() -> None:
    assert weight_blocks({"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 3]}}) == (2, 3)


@pytest.mark.parametrize("names", [[], ["modules_to_not_convert"], ["ignored_layers"]])
def test_mxfp4_is_known_with_the_modules_that_are_left_out(names: list[str]) -> None:
    config = {"quantization_config": {**MXFP4, **{key: ["lm_head"] for key in names}}}
    assert stores_mxfp4(config) and quantisation_problem(config) == "" and weight_blocks(config) is None


@pytest.mark.parametrize("given", [None, {}])
def test_plain_weights_have_no_problem_and_no_blocks(given: Any) -> None:
    for config in ({}, {"quantization_config": given}):
        assert quantisation_problem(config) == "" and weight_blocks(config) is None and not stores_mxfp4(config)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("fp8", "expected an object"),
        (["fp8"], "expected an object"),
        ({**FP8, "quant_method": "awq"}, "quant_method='awq' is not read; only 'fp8' is"),
        ({"weight_block_size": [1, 1]}, "quant_method=None is not read; only 'fp8' is"),
        ({**FP8, "fmt": "e5m2"}, "fmt='e5m2' is not read; only 'e4m3' or 'float8_e4m3fn' is"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme='static' is not read; only 'dynamic' is"),
        ({**FP8, "scale_fmt": "e8"}, "scale_fmt='e8' is not read; only 'ue8m0' or 'float32' is"),
        *(
            (
                {**FP8, "weight_block_size": size},
                f"weight_block_size={size!r} is not read; only FP8 with a factor for each block of [rows, columns] is",
            )
            for size in (None, 128, (128, 128), [128], [1, 2, 3], [0, 128], [128, 0], [128, 1.0], [True, 128], ["1", 2])
        ),
        ({**FP8, "zeros": 1, "bits": 8}, "bits, zeros is not known in FP8 by blocks"),
        ({**MXFP4, "weight_block_size": [1, 2], "bits": 4}, "bits, weight_block_size is not known in MXFP4"),
    ],
)
def test_what_is_not_read_is_said_and_nothing_is_made_of_it(given: Any, problem: str) -> None:
    config = {"quantization_config": given}
    assert quantisation_problem(config) == problem
    assert weight_blocks(config) is None and not stores_mxfp4(config)
