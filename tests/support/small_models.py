"""A small random directory of every model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.support.deepseek import write_latent
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next
from tests.support.sparse_models import write_sparse
from tests.support.variants import VARIANTS, write_variant

WRITERS: Mapping[str, Callable[[Path], Path]] = {
    **{family: partial(write_tiny, family) for family in ("llama", "mistral", "qwen2", "qwen3")},
    **{family: partial(write_variant, family) for family in VARIANTS},
    **{family: partial(write_moe, family) for family in ("mixtral", "qwen3_moe", "gpt_oss", "minimax_m2", "glm4_moe")},
    "qwen3_moe, dense layers between": partial(write_moe, "qwen3_moe, dense layers between"),
    "glm4_moe, two shared experts": partial(write_moe, "glm4_moe, no biases, no norms, two shared experts"),
    **{family: partial(write_latent, family) for family in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")},
    "deepseek_v3, no latent of queries": partial(write_latent, "deepseek_v3", q_lora_rank=None),
    **{family: partial(write_sparse, model_type=family) for family in ("deepseek_v32", "glm_moe_dsa")},
    "qwen3_5": partial(write_qwen3_5, moe=False),
    "qwen3_5_moe": partial(write_qwen3_5, moe=True),
    "qwen3_next": write_qwen3_next,
}
"""Family, or family and what is special about the model -> a function that writes a directory."""

FAMILIES = tuple(name for name in WRITERS if "," not in name)
