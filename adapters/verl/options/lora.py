"""LoRA options of a verl role: of Megatron's engine (``model.lora``) or of peft (``model.lora_rank`` and its like)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from adapters.verl.options.decisions import LORA, MODEL, require_supported
from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.checkpoint.peft_files import CONFIG_FILE
from rl_backend.contracts import ConfigError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.model import model_kept_prefixes

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig

_INITIAL = ("xavier", "normal", "kaiming", "zero")
OPTIONS = (
    *("type", "rank", "alpha", "dropout", "dropout_position", "target_modules", "exclude_modules", "lora_A_init_method"),
    *("lora_B_init_method", "dtype", "merge", "adapter_path", "a2a_experimental", "fully_sharded_loras"),
    *("sequence_parallel_input_regather", "normalize_moe_lora", "share_expert_adapters", "experts_shared_outer_loras"),
    *("freeze_vision_model", "freeze_vision_projection", "freeze_language_model"),
)
"""Fields of ``model.lora``."""

_MEGATRON: Mapping[str, tuple[str, str]] = {
    "q_proj": ("linear_qkv", "linear_q"),
    "k_proj": ("linear_qkv", "linear_k"),
    "v_proj": ("linear_qkv", "linear_v"),
    **dict.fromkeys(("o_proj", "dense"), ("linear_proj", "linear_proj")),
    **dict.fromkeys(("gate_proj", "w1"), ("linear_fc1", "linear_fc1_gate")),
    **dict.fromkeys(("up_proj", "w3"), ("linear_fc1", "linear_fc1_up")),
    **dict.fromkeys(("fc1", "c_fc"), ("linear_fc1", "linear_fc1")),
    **dict.fromkeys(("down_proj", "w2", "fc2", "c_proj"), ("linear_fc2", "linear_fc2")),
    **dict.fromkeys(
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), ("in_proj", "in_proj")
    ),
    "out_proj": ("out_proj", "out_proj"),
}
"""Last part of a Hugging Face name -> Megatron's fused layer, and the part of it that Bridge's CanonicalLoRA names."""
# Latent attention has other names, and fuses nothing.
_LATENT: Mapping[str, tuple[str, str]] = {
    "q_proj": ("linear_q_proj", "linear_q_proj"),
    "q_a_proj": ("linear_q_down_proj", "linear_q_down_proj"),
    "q_b_proj": ("linear_q_up_proj", "linear_q_up_proj"),
    "kv_a_proj_with_mqa": ("linear_kv_down_proj", "linear_kv_down_proj"),
    "kv_b_proj": ("linear_kv_up_proj", "linear_kv_up_proj"),
}
# Routers, and indexers, which no gradient of a loss reaches.
_NOT_ADAPTED = re.compile(r".*\.(gate|router|indexer\..+)")

_PLACES = (
    (re.compile(r"self_attn|linear_attn"), "self_attention"),
    (re.compile(r"(mlp|block_sparse_moe)\.experts\.\d+"), "mlp.experts"),
    (re.compile(r"(mlp|block_sparse_moe)\.shared_experts?"), "mlp.shared_experts"),
    (re.compile(r"mlp"), "mlp"),
)
_IN_A_LAYER = re.compile(r"(?:.+\.)?layers\.(\d+)\.(.+)\.([^.]+)")

type Naming = Literal["megatron", "peft", "expression"]
"""``megatron``: as Megatron-Bridge matches names, ``linear_qkv``, or all of one with ``*`` for any characters. ``peft``: the
last parts of Hugging Face names, ``q_proj``. ``expression``: a regular expression of whole Hugging Face names."""


@dataclass(frozen=True)
class TargetModules:
    """Which linear layers have an adapter.

    Attributes:
        field: verl's field, for messages.
        include: names; empty takes every linear layer of attention and of feed-forward blocks, shared experts included.
        experts: whether an empty ``include`` takes layers of experts too.
    """

    field: str
    naming: Naming
    include: tuple[str, ...] = ()
    naming_of_excluded: Naming = "megatron"
    exclude: tuple[str, ...] = ()
    experts: bool = True

    def of_model(self, modules: Sequence[str]) -> tuple[str, ...]:
        """:attr:`~rl_backend.contracts.lora.LoRAConfig.targets` for a model.

        Args:
            modules: Hugging Face names of everything that has a matrix of weights, and of packed experts.

        Raises:
            ConfigError: a name that no module has, or all are excluded.
        """
        megatron = _megatron_names(modules)
        for target in self.include:
            if not any(_matches(target, self.naming, module, names) for module, names in megatron.items()):
                known = [names if self.naming == "megatron" else (module,) for module, names in megatron.items()]
                ends = ", ".join(sorted({_end(name) for names in known for name in names}))
                raise ConfigError.of(self.field, target, f"no linear layer of the model has this name; its names are {ends}")
        chosen = [module for module, names in megatron.items() if self._takes(module, names)]
        if not chosen:
            raise ConfigError.of(self.field, list(self.include), f"excluding {list(self.exclude)} leaves no layer to adapt")
        left_out = {_end(module) for module in set(modules).difference(chosen)}
        return tuple(dict.fromkeys(module if _end(module) in left_out else _end(module) for module in chosen))

    def _takes(self, module: str, megatron: Sequence[str]) -> bool:
        if any(_matches(target, self.naming_of_excluded, module, megatron) for target in self.exclude):
            return False
        if self.include:
            return any(_matches(target, self.naming, module, megatron) for target in self.include)
        is_linear = _IN_A_LAYER.fullmatch(module) is not None and _NOT_ADAPTED.fullmatch(module) is None
        return is_linear and (self.experts or ".experts." not in module)


def _megatron_names(modules: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Module -> full names of Megatron's layer and of its part of that layer; none where Megatron has no such layer."""
    has_latents = any(_end(module) == "kv_a_proj_with_mqa" for module in modules)
    ends = {**_MEGATRON, **_LATENT} if has_latents else _MEGATRON
    found: dict[str, tuple[str, ...]] = dict.fromkeys(modules, ())
    for module in modules:
        parts = _IN_A_LAYER.fullmatch(module)
        place = parts and next((place for pattern, place in _PLACES if pattern.fullmatch(parts[2])), None)
        if parts and place and parts[3] in ends:
            # Layers are counted over the whole model, whatever the stages of a pipeline.
            found[module] = tuple(f"decoder.layers.{parts[1]}.{place}.{name}" for name in ends[parts[3]])
    return found


def _matches(target: str, naming: Naming, module: str, megatron: Sequence[str]) -> bool:
    if naming == "peft":
        return f".{module}".endswith(f".{target}")
    if naming == "expression":
        return re.fullmatch(target, module) is not None
    pattern = ".*".join(map(re.escape, target.split("*")))
    return any(_end(name) == target or re.fullmatch(pattern, name) for name in megatron)


def _end(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass(frozen=True)
class LoRASettings:
    """An engine's adapter.

    Attributes:
        config: for ``create_lora_adapter``, without targets, which :meth:`for_model` finds.
        targets: which layers.
        initial: how A and B are drawn, by Megatron-Bridge's names.
        merge: the rollout gets merged weights, and no adapter.
        adapter_path: a directory in peft's format that training starts from.
    """

    config: LoRAConfig
    targets: TargetModules
    initial: tuple[str, str]
    merge: bool
    adapter_path: str | None

    def for_model(self, hf_path: Path | str) -> LoRAConfig:
        """The tenant's configuration for the model of a directory, from the headers of its files."""
        reader = HFReader(hf_path)
        kept = model_kept_prefixes(reader.config)
        modules = [
            name.removesuffix(".weight")
            for name, info in reader.infos.items()
            if (len(info.shape) == 2 and name.endswith(".weight")) or (len(info.shape) > 2 and ".experts." in name)
            if not name.startswith(kept)
        ]
        return self.config.replace(targets=self.targets.of_model(modules))

    def for_rollout(self) -> dict[str, Any]:
        from verl.utils.megatron_peft_utils import build_peft_config_for_vllm

        config = self.config
        found: dict[str, Any] = build_peft_config_for_vllm(
            {"rank": config.rank, "alpha": config.alpha, "dropout": config.dropout}
        )
        return found


def lora_settings(model: HFModelConfig, *, dtype: str, seed: int) -> LoRASettings | None:
    """The adapter of an engine of this dtype; None where every weight is trained."""
    options = dict(model.lora or {})
    # As in verl's trainers and rollouts lora_rank is read where this is 0.
    rank = options.get("rank", 0)
    if rank > 0 and model.lora_rank not in (0, rank):
        raise ConfigError.of(f"{MODEL}.lora_rank", model.lora_rank, f"lora.rank={rank} is read; leave this one at 0")
    adapter_path = _adapter_path(model, options)
    if rank > 0:
        return _megatron_settings(options, adapter_path, dtype, seed)
    return _peft_settings(model, options, adapter_path, seed) if model.lora_rank > 0 else None


def _adapter_path(model: HFModelConfig, options: Mapping[str, Any]) -> str | None:
    """Where the first adapter comes from: either field with Megatron's rank, ``lora_adapter_path`` with peft's."""
    named = {"lora.adapter_path": options.get("adapter_path"), "lora_adapter_path": model.lora_adapter_path}
    given = {name: value for name, value in named.items() if value}
    read = named if options.get("rank", 0) > 0 else ("lora_adapter_path",) if model.lora_rank > 0 else ()
    for name, value in given.items():
        if len(given) > 1 or name not in read or not (Path(value) / CONFIG_FILE).is_file():
            raise ConfigError.of(
                f"{MODEL}.{name}",
                value,
                f"expected one directory in peft's format, which has {CONFIG_FILE} (Megatron's own format is not read), and "
                "the adapter's rank and alpha: lora.rank and lora.alpha, or lora_rank and lora_alpha for lora_adapter_path",
            )
        return str(value)
    return None


def _megatron_settings(options: Mapping[str, Any], adapter_path: str | None, dtype: str, seed: int) -> LoRASettings:
    require_supported(LORA, options)
    is_dora = options.get("type") == "dora"
    expected: dict[str, Sequence[Any]] = {
        "type": ("lora", "canonical_lora", "dora"),
        "lora_A_init_method": _INITIAL,
        # Magnitudes of DoRA start as those of the frozen weights, so its first change must be none.
        "lora_B_init_method": ("zero",) if is_dora else _INITIAL,
        "dtype": (None, dtype, f"torch.{dtype}"),
    }
    wrong: list[tuple[str, Any, str]] = []
    for name, value in options.items():
        allowed = expected.get(name, (value,)) if name in OPTIONS else ()
        if value not in allowed:
            problem = f"expected one of {allowed}" if allowed else f"verl's options are {', '.join(OPTIONS)}"
            wrong.append((f"{LORA}.{name}", value, problem))
    include, exclude = (_names_of(f"{LORA}.{name}", options.get(name)) for name in ("target_modules", "exclude_modules"))
    if include and exclude:
        problem = "read with an empty target_modules only, as in Megatron"
        wrong.append((f"{LORA}.exclude_modules", list(exclude), problem))
    ConfigError.refuse_all(wrong)
    return LoRASettings(
        LoRAConfig(
            rank=options["rank"],
            alpha=options.get("alpha", 32),
            dropout=options.get("dropout", 0.0),
            use_dora=is_dora,
            seed=seed,
        ),
        TargetModules(f"{LORA}.target_modules", "megatron", include, "megatron", exclude),
        (options.get("lora_A_init_method", "xavier"), options.get("lora_B_init_method", "zero")),
        bool(options.get("merge", False)),
        adapter_path,
    )


def _peft_settings(model: HFModelConfig, options: Mapping[str, Any], adapter_path: str | None, seed: int) -> LoRASettings:
    targets, every = model.target_modules, "all-linear"
    include_naming, include = ("peft", ()) if targets in (every, None) else _expression("target_modules", targets)
    exclude_naming, exclude = _expression("exclude_modules", model.exclude_modules)
    return LoRASettings(
        LoRAConfig(rank=model.lora_rank, alpha=model.lora_alpha, seed=seed),
        TargetModules(f"{MODEL}.target_modules", include_naming, include, exclude_naming, exclude, experts=False),
        ("kaiming", "zero"),
        bool(options.get("merge", False)),
        adapter_path,
    )


def _expression(field: str, value: Any) -> tuple[Naming, tuple[str, ...]]:
    if not isinstance(value, str):
        return "peft", _names_of(f"{MODEL}.{field}", value)
    # One that is no expression fails here, on every rank, before the model is loaded.
    return "expression", (re.compile(value).pattern,)


def _names_of(field: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise ConfigError.of(field, value, "expected a list of names")
    return tuple(value)
