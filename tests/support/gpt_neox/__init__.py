"""GPT-NeoX, the architecture of Pythia; importing this package registers it."""

from __future__ import annotations

from torch import nn

from rl_backend import BuildSettings, ModelFamily, register_model
from tests.support.gpt_neox.config import GPTNeoXArchitecture, GPTNeoXOptions, parse_config
from tests.support.gpt_neox.model import GPTNeoX
from tests.support.gpt_neox.parallelize import parallelize
from tests.support.gpt_neox.weights import STORED_BUFFERS, weight_names


def build(arch: GPTNeoXArchitecture, settings: BuildSettings) -> nn.Module:
    return GPTNeoX(arch, settings.log_prob_chunk_tokens)


register_model(
    ModelFamily(
        name="gpt_neox",
        hf_model_types=("gpt_neox",),
        options_type=GPTNeoXOptions,
        parse_config=parse_config,
        build=build,
        parallelize=parallelize,
        weight_names=weight_names,
        stored_buffers=STORED_BUFFERS,
    )
)
