"""What a weight sync sends and how it is proved to have arrived: layout, digests, finite values, comparison."""

from rl_backend.weights.announced import as_announced
from rl_backend.weights.compare import ExpectedWeights, check_manifest, find_mismatches
from rl_backend.weights.dtypes import dtype_from_name, name_of_dtype, tensor_info
from rl_backend.weights.finite import has_non_finite, refuse_non_finite
from rl_backend.weights.layout import ALIGNMENT, plan_layout
from rl_backend.weights.staging import check_staged, find_intact, read_tensor, write_tensors

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
