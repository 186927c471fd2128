"""Expected weights: the Hugging Face names, shapes and dtypes that a vLLM engine loads."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import TensorInfo, dtype_from_name
from rl_backend.contracts.errors import listed
from rl_backend.weights.staging import ExpectedWeights

logger = logging.getLogger(__name__)
_SHOWN = 8
# Parameters that vLLM makes of kv_b_proj.weight of latent attention, after each push again: none is sent.
_MADE_OF_OTHERS = (".W_UK_T", ".W_UV")


class EngineParameters(NamedTuple):
    """What an engine's vLLM says of its model.

    Attributes:
        dtypes: name of each of its parameters -> dtype.
        packed_modules: vLLM's ``packed_modules_mapping``, for example ``{"qkv_proj": ["q_proj", "k_proj",
            "v_proj"]}``.
        renamed: name of each tensor of the checkpoint -> what vLLM calls it; None for those that it does not load.
    """

    dtypes: Mapping[str, str]
    packed_modules: Mapping[str, Sequence[str]]
    renamed: Mapping[str, str | None]


def expected_weights(model_path: str, dtype: str, describe: Callable[[Sequence[str]], EngineParameters]) -> ExpectedWeights:
    """The weights that a push into this engine must hold: names and shapes of the directory that vLLM was started from.

    A tensor that no parameter of vLLM's model comes from (a tied ``lm_head.weight``, stored buffers, a vision tower,
    weights of multi-token prediction) is optional, provided that the others account for every parameter; a warning
    names parameters that they do not account for. Weights that are not trained (``WeightManifest.kept``) may be among
    either.

    Args:
        describe: tells the engine the names of the checkpoint's tensors.

    Raises:
        CheckpointError: the directory has no safetensors, or they are truncated or corrupt.
    """
    loaded = dtype_from_name(dtype)
    infos = {name: TensorInfo.of(name, stored.shape, loaded) for name, stored in HFReader(model_path).infos.items()}
    engine = describe(list(infos))
    fused_into = {part: whole for whole, parts in engine.packed_modules.items() for part in parts}
    targets = {name: _target(engine.renamed[name], fused_into) for name in infos}
    # Layers that take adapters have their own parameters one level down.
    plain = {parameter.replace(".base_layer.", "."): held for parameter, held in engine.dtypes.items()}
    units = {_experts_module(parameter) or parameter for parameter in plain}
    alone = sorted(units - set(targets.values()))
    named = [unit for unit in alone if not unit.endswith(_MADE_OF_OTHERS)]
    if named:
        # No error: a model of vLLM's may fill them from tensors of other names.
        logger.warning(
            "vLLM has parameters that no tensor of %s leads to by its name: %s. Unless vLLM's model fills them itself, they "
            "stay as they were made, whatever is pushed, and log-probs are not the trainer's",
            model_path,
            listed(named, _SHOWN),
        )
    required = {name: info for name, info in infos.items() if targets[name] in units or alone}
    groups: dict[str, list[str]] = defaultdict(list)
    for name in required:
        groups[targets[name]].append(name)
    return ExpectedWeights(
        required=required,
        optional={name: info for name, info in infos.items() if name not in required},
        fused_groups=tuple(tuple(group) for group in groups.values() if len(group) > 1),
        in_float32=frozenset(name for name in infos if plain.get(targets[name]) == "float32"),
    )


def _target(name: str | None, fused_into: Mapping[str, str]) -> str:
    # The parameter that a tensor is a part of; for one expert's tensor the module "...experts"; empty where none is loaded.
    if name is None:
        return ""
    return _experts_module(name) or ".".join(fused_into.get(part, part) for part in name.split("."))


def _experts_module(name: str) -> str:
    head, separator, _ = name.partition(".experts.")
    return f"{head}.experts" if separator else ""
