"""Adapters in peft's format: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_backend.checkpoint.durable_commit import new_directory, write_synced
from rl_backend.checkpoint.training_state import require_free
from rl_backend.contracts import VALUE_HEAD_WEIGHTS, CheckpointError, UnsupportedError
from rl_backend.contracts.lora import PEFT_PREFIX, LoRAConfig, LoRAKind, LoRAPart, part_name

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_FACTOR = re.compile(
    r"^(?P<module>.+)\.lora_((?P<linear>[AB])\.weight|embedding_(?P<embedding>[AB])|(?P<dora>magnitude)_vector)$"
)
# Of experts that share a factor, as stack_of names it: one tensor has all of them.
_STACK = re.compile(r"\.experts\.w[123]$")
_HEAD = VALUE_HEAD_WEIGHTS[0].removesuffix(".weight")
# Parameter that peft adapts as a whole -> what it consists of, in each expert.
_PACKED_EXPERTS = {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)}
_READ = {
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights",
    "modules_to_save", "target_parameters",
}  # fmt: skip
# Fields that change nothing in what saved factors compute: where they came from, how they were found and trained.
_ANY_VALUE = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
    "megatron_config", "megatron_core", "qalora_group_size",
}  # fmt: skip
# Values of init_lora_weights, beside true and false, that leave the base as it is. With others peft has changed it, and the
# factors hold beside what is left of it.
_SAME_BASE = ("gaussian", "orthogonal", "eva", "mica")


class PeftAdapter(NamedTuple):
    """An adapter that was read.

    Attributes:
        parts: Hugging Face name of a module -> A, (rank, in_features), B, (out_features, rank), and with DoRA magnitudes; of
            experts that share a factor, as :class:`LoRAConfig` says.
        kinds: module -> whether it is an embedding or a linear layer.
        scales: module -> factor of ``B @ A``.
        head: Hugging Face name -> tensor, of a critic's head, which is saved whole.
        frozen: weights of the base that came along, by Hugging Face names.
    """

    parts: dict[str, dict[LoRAPart, Tensor]]
    kinds: dict[str, LoRAKind]
    scales: dict[str, float]
    head: dict[str, Tensor]
    frozen: dict[str, Tensor]


def write_peft_directory(path: Path | str, tensors: Iterable[tuple[str, Tensor]], config: LoRAConfig, base: str) -> None:
    """Writes what peft and vLLM load: whole factors by peft's names, and a critic's head. ``base`` is for readers.

    Raises:
        CheckpointError: ``path``, which appears complete or not at all, exists, or the disk is full.
    """
    target = Path(path)
    require_free(target)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    short = [name.removeprefix(PEFT_PREFIX) for name in held]
    modules = sorted({name.rpartition(".lora_")[0] for name in short if name not in VALUE_HEAD_WEIGHTS})
    is_critic = VALUE_HEAD_WEIGHTS[0] in short
    try:
        with new_directory(target) as draft:
            save_file(held, draft / WEIGHTS_FILE, metadata={"format": "pt"})
            write_synced(
                draft / CONFIG_FILE, json.dumps(_peft_config(config, modules, base, is_critic=is_critic), indent=2) + "\n"
            )
    except (OSError, SafetensorError) as error:  # the latter for a full disk
        raise CheckpointError.at(target, f"could not be written: {error}") from error


def _peft_config(config: LoRAConfig, modules: list[str], base: str, *, is_critic: bool) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if is_critic else "CAUSAL_LM",
        "modules_to_save": [_HEAD] if is_critic else None,
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "lora_dropout": config.dropout,
        "target_modules": modules,
        "bias": "none",
        "inference_mode": True,
    }


def read_peft_directory(path: Path | str) -> PeftAdapter:
    """Reads what peft has written, with a rank and an alpha of its own for each module, and the whole head of a critic.

    Raises:
        CheckpointError: a file that is missing or damaged, or a factor without the other.
        UnsupportedError: what makes an adapter more than factors beside its base, or a tensor that is no factor.
    """
    directory = Path(path)
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(directory / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError.at(directory, f"is no adapter in peft's format: {error}") from error
    _require_plain(config, directory)
    head = {name: tensors.pop(PEFT_PREFIX + name).float() for name in VALUE_HEAD_WEIGHTS if PEFT_PREFIX + name in tensors}
    tensors, of_packed = _unpacked(tensors, config)
    parts: dict[str, dict[LoRAPart, Tensor]] = {}
    kinds: dict[str, LoRAKind] = {}
    frozen: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stored = name.removeprefix(PEFT_PREFIX)
        found = _FACTOR.match(stored)
        if found is None and stored.replace(".base_layer", "").endswith(("embed_tokens.weight", "lm_head.weight")):
            # peft saves these with an adapter of theirs, in case the vocabulary has grown.
            frozen[stored.replace(".base_layer", "")] = tensor
            continue
        if found is None or tensor.dim() != (1 if found["dora"] else 3 if _STACK.search(found["module"]) else 2):
            raise UnsupportedError(f"{directory / WEIGHTS_FILE}: {name} is no factor of a linear layer or embedding")
        part = cast(LoRAPart, found["linear"] or found["embedding"] or found["dora"])
        parts.setdefault(found["module"], {})[part] = tensor.to(torch.float32)
        if not found["dora"]:
            kinds[found["module"]] = "embedding" if found["embedding"] else "attention"
    scales = {}
    expected = {"A", "B", "magnitude"} if config.get("use_dora") else {"A", "B"}
    for module, held in parts.items():
        rank, alpha = (_of_module(config, field, of_packed.get(module, module)) for field in ("r", "lora_alpha"))
        if held.keys() != expected or not rank == held["A"].shape[-2] == held["B"].shape[-1]:
            found_ranks = ", ".join(f"{part} of shape {tuple(each.shape)}" for part, each in held.items())
            raise CheckpointError.at(
                directory, f"is damaged: {module} has {found_ranks}; expected {', '.join(sorted(expected))} of rank {rank:g}"
            )
        scales[module] = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return PeftAdapter(parts, kinds, scales, head, frozen)


def _require_plain(config: Mapping[str, Any], directory: Path) -> None:
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type={config.get('peft_type')!r}; only LORA is read")
    for name, value in config.items():
        # A field of a later peft is refused unless it is empty: nobody here knows what it does.
        if name not in _READ | _ANY_VALUE and value and (name, value) != ("bias", "none"):
            problems.append(f"{name}={value!r} is not read; train without it")
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower() not in _SAME_BASE:
        problems.append(
            f"init_lora_weights={initial!r} is not read, only true, false, {', '.join(_SAME_BASE)}: its factors belong to a "
            "base that peft has changed; let peft convert them, with "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    # peft adds the names of both to what it trains of a model for token classification.
    if whole := set(config.get("modules_to_save") or ()) - {_HEAD, "classifier"}:
        problems.append(f"modules_to_save has {min(whole)!r}; only the head of a critic, {_HEAD!r}, is read")
    targets = config.get("target_parameters") or ()
    if unknown := [target for target in targets if not any(each.endswith(target) for each in _PACKED_EXPERTS)]:
        problems.append(f"target_parameters={unknown!r} is not read, only {', '.join(_PACKED_EXPERTS)}")
    if problems:
        raise UnsupportedError(f"{directory / CONFIG_FILE}: {'; '.join(problems)}")


def _unpacked(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Factors of packed experts as those of each expert's modules, and for each module the name that patterns go by.

    peft adapts a parameter (experts, out, in) by A, (experts * rank, in), and B, (out, rank * experts), the experts fastest.
    Of two in one module, that of the first is in ``base_layer``.
    """
    wanted = [each for each in _PACKED_EXPERTS if each.endswith(tuple(config.get("target_parameters") or ()))]
    parameters = dict(zip((".mlp.experts.base_layer", ".mlp.experts")[-len(wanted) :], wanted, strict=bool(wanted)))
    found, of_packed = dict[str, Tensor](), dict[str, str]()
    for name, tensor in tensors.items():
        owner, _, factor = name.rpartition(".lora_")
        parameter = next((each for place, each in parameters.items() if owner.endswith(place)), None)
        if parameter is None:
            found[name] = tensor
            continue
        packed = owner.removesuffix(".base_layer")
        name_in_patterns = f"{packed.removeprefix(PEFT_PREFIX)}.{parameter.rpartition('.')[2]}"
        names, rank = _PACKED_EXPERTS[parameter], int(_of_module(config, "r", name_in_patterns))
        is_a = factor == "A.weight"
        of_experts = tensor.unflatten(0, (-1, rank)) if is_a else tensor.unflatten(1, (rank, -1)).permute(2, 0, 1)
        for expert, own in enumerate(of_experts):
            shares = (own,) * len(names) if is_a else own.chunk(len(names))
            for module, share in zip(names, shares, strict=True):
                whole = f"{packed}.{expert}.{module}"
                found[f"{whole}.lora_{factor}"] = share.clone()
                of_packed[whole.removeprefix(PEFT_PREFIX)] = name_in_patterns
    return found, of_packed


def _of_module(config: Mapping[str, Any], field: str, module: str) -> float:
    """``r`` or ``lora_alpha`` of a module, as peft's patterns say: regular expressions of the ends of names."""
    patterns = config.get({"r": "rank_pattern", "lora_alpha": "alpha_pattern"}[field]) or {}
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return float(value)
    return float(config[field])


def fitted_to(
    adapter: PeftAdapter, config: LoRAConfig, path: Path | str, first: Callable[[str], Tensor | None]
) -> dict[str, Tensor]:
    """The tensors by peft's names, factors at the rank and scale of ``config``.

    Args:
        first: the factor of a name that a new tenant has, None where it has none. What a module lacks in rank is of these:
            it changes nothing yet, and can be trained; of zeros in both factors neither would ever have a gradient.
    """
    found = {PEFT_PREFIX + name: tensor for name, tensor in adapter.head.items()}
    for module, parts in adapter.parts.items():
        rank, kind = parts["A"].shape[-2], adapter.kinds[module]
        if rank > config.rank or ("magnitude" in parts) is not config.use_dora:
            raise UnsupportedError(
                f"{path}: {module} has rank {rank} and use_dora={'magnitude' in parts}, the tenant has LoRAConfig.rank="
                f"{config.rank} and use_dora={config.use_dora}; make one that has at least this rank, and the same use_dora"
            )
        scale = adapter.scales[module] / config.scale
        found |= {part_name(module, kind, part): tensor for part, tensor in parts.items()}
        a, b = (part_name(module, kind, part) for part in ("A", "B"))
        found[a] = _with_ranks_of(first(a), parts["A"], -2)
        found[b] = _with_ranks_of(first(b), parts["B"] if scale == 1.0 else parts["B"] * scale, -1)
    return found


def _with_ranks_of(whole: Tensor | None, factor: Tensor, dim: int) -> Tensor:
    """``factor``, and behind it what ``whole`` has more of ``dim``; one of another size as it is, to be refused by that."""
    if whole is None or whole.select(dim, 0).shape != factor.select(dim, 0).shape:
        return factor
    return torch.cat((factor, whole.narrow(dim, factor.shape[dim], whole.shape[dim] - factor.shape[dim])), dim)
