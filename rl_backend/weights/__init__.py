"""Weights on the move: layout, digests, finite values, and comparison with what an engine loads."""

from rl_backend.weights.compare import (
    ExpectedWeights,
    as_announced,
    check_manifest,
    dtype_from_name,
    find_mismatches,
    name_of_dtype,
    tensor_info,
)
from rl_backend.weights.finite import has_non_finite, refuse_non_finite
from rl_backend.weights.staging import ALIGNMENT, check_staged, find_intact, plan_layout, read_tensor, write_tensors

__all__ = [
    "ALIGNMENT",
    "ExpectedWeights",
    "as_announced",
    "check_manifest",
    "check_staged",
    "dtype_from_name",
    "find_intact",
    "find_mismatches",
    "has_non_finite",
    "name_of_dtype",
    "plan_layout",
    "read_tensor",
    "refuse_non_finite",
    "tensor_info",
    "write_tensors",
]
