"""Facts of a Hugging Face ``config.json`` that are read of a model of any family."""

from collections.abc import Mapping
from typing import Any

_FP8: Mapping[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn", None),
    # Of what is multiplied with the weights, which training does not quantise.
    "activation_scheme": ("dynamic", None),
    # What factors were rounded to; they are stored as numbers either way.
    "scale_fmt": ("ue8m0", "float32", None),
}
_MXFP4 = "mxfp4"
_BLOCK_SIZE = "weight_block_size"
_WHICH_WEIGHTS = ("modules_to_not_convert", "ignored_layers")
"""Which weights are quantised is known from their dtypes."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of which a mixture's text configuration has one: the number of a layer's routed experts."""


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``text_config`` of a model that has other parts too, else all. Sizes are there, not the directory's type."""
    nested = hf_config.get("text_config")
    return nested if isinstance(nested, Mapping) else hf_config


def weight_blocks(hf_config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks of weights in FP8 with a factor for each block, as of DeepSeek-V3; None for others."""
    given = hf_config.get("quantization_config")
    if not given or quantisation_problem(hf_config) or stores_mxfp4(hf_config):
        return None
    rows, columns = given[_BLOCK_SIZE]
    return rows, columns


def stores_mxfp4(hf_config: Mapping[str, Any]) -> bool:
    """Whether experts are stored in MXFP4, as gpt-oss is published."""
    given = hf_config.get("quantization_config")
    return isinstance(given, Mapping) and given.get("quant_method") == _MXFP4 and not quantisation_problem(hf_config)


def quantisation_problem(hf_config: Mapping[str, Any]) -> str:
    """What ``quantization_config`` says that is not read here; empty for plain weights, and for both formats above."""
    given = hf_config.get("quantization_config")
    if not given:
        return ""
    if not isinstance(given, Mapping):
        return "expected an object"
    if given.get("quant_method") == _MXFP4:
        unknown = sorted(set(given) - {"quant_method", *_WHICH_WEIGHTS})
        return f"{', '.join(unknown)} is not known in MXFP4" if unknown else ""
    for field, honoured in _FP8.items():
        if given.get(field) not in honoured:
            known = " or ".join(repr(value) for value in honoured if value is not None)
            return f"{field}={given.get(field)!r} is not read; only {known} is"
    size = given.get(_BLOCK_SIZE)
    if not isinstance(size, list) or len(size) != 2 or any(type(each) is not int or each < 1 for each in size):
        return f"{_BLOCK_SIZE}={size!r} is not read; only FP8 with a factor for each block of [rows, columns] is"
    unknown = sorted(set(given) - {*_FP8, _BLOCK_SIZE, *_WHICH_WEIGHTS})
    return f"{', '.join(unknown)} is not known in FP8 by blocks" if unknown else ""
