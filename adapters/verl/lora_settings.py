"""The LoRA options of a verl role: of Megatron's engine (``model.lora``), or peft's (``model.lora_rank`` and its like)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from adapters.verl.field_decisions import Decision, require_supported
from adapters.verl.lora_modules import Naming, TargetModules
from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.checkpoint.peft_files import CONFIG_FILE
from rl_backend.contracts import ConfigError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.model import model_kept_prefixes

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig

_WHERE = "HFModelConfig"
_TYPES = ("lora", "canonical_lora", "dora")
_INITIAL = ("xavier", "normal", "kaiming", "zero")

LORA: Mapping[str, Decision] = {
    "type": Decision(
        "mapped",
        "`lora` and `canonical_lora` are one: q, k, v, gate and up have factors of their own, where Megatron's `lora` "
        "shares A among layers that it fuses; `dora`: `LoRAConfig.use_dora`, and rollouts need merge; others are refused",
    ),
    "rank": Decision("mapped", "`LoRAConfig.rank`; 0 trains every weight"),
    "alpha": Decision("mapped", "`LoRAConfig.alpha`"),
    "dropout": Decision("mapped", "`LoRAConfig.dropout`"),
    "dropout_position": Decision("refused", "dropout is of an adapter's input", ("pre",)),
    **dict.fromkeys(
        ("target_modules", "exclude_modules"),
        Decision(
            "mapped",
            "`LoRAConfig.targets`: Megatron's names of layers and of their parts, or whole names with wildcards, which "
            "count layers over all stages; a target that no layer has is refused. `linear_fc1` and `linear_fc2` are "
            "those of experts too",
        ),
    ),
    **dict.fromkeys(
        ("lora_A_init_method", "lora_B_init_method"),
        Decision(
            "mapped", "the first factors: `xavier`, `normal`, `kaiming` or `zero`, drawn from the seed and the layer's name"
        ),
    ),
    "dtype": Decision(
        "mapped", "null or the engine's dtype: products are in it, the factors themselves float32; others are refused"
    ),
    "merge": Decision("mapped", "whether the rollout gets merged weights, or the base once and then the adapter alone"),
    "adapter_path": Decision(
        "mapped", "a directory in peft's format that the adapter starts from; Megatron's own format is refused"
    ),
    "a2a_experimental": Decision(
        "refused", "how Megatron's adapters communicate; these need nothing of their own", (False,)
    ),
    "fully_sharded_loras": Decision("no meaning", "configures verl's rollouts"),
    "sequence_parallel_input_regather": Decision("no meaning", "when Megatron keeps an adapter's input"),
    "normalize_moe_lora": Decision("refused", "adapters of experts have the rank of the others", (False,)),
    "share_expert_adapters": Decision("refused", "each expert has an adapter of its own, whatever the layout", (False,)),
    "experts_shared_outer_loras": Decision(
        "refused", "each expert has an adapter of its own, whatever the layout", (False,)
    ),
    **dict.fromkeys(
        ("freeze_vision_model", "freeze_vision_projection", "freeze_language_model"),
        Decision("no meaning", "read with type vlm_lora only, which is refused"),
    ),
}
"""Of ``model.lora``."""


@dataclass(frozen=True)
class LoRASettings:
    """The adapter of an engine.

    Attributes:
        config: for ``create_lora_adapter``, but for its targets, which :meth:`for_model` finds.
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
        """The tenant's configuration over the model of a directory, of which headers of files are read.

        Raises:
            ConfigError: a module that this model does not have.
            CheckpointError: no model.
        """
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
        """verl's ``peft_config`` beside the tensors of an adapter."""
        from verl.utils.megatron_peft_utils import build_peft_config_for_vllm

        config = self.config
        found: dict[str, Any] = build_peft_config_for_vllm(
            {"rank": config.rank, "alpha": config.alpha, "dropout": config.dropout}
        )
        return found


def lora_settings(model: HFModelConfig, *, dtype: str, seed: int) -> LoRASettings | None:
    """None where every weight is trained.

    As verl's trainers and rollouts do, ``lora.rank`` is read first, and ``lora_rank`` where that is 0.

    Args:
        dtype: of the engine.

    Raises:
        ConfigError: an option that cannot be honoured.
    """
    options = dict(model.lora or {})
    rank = options.get("rank", 0)
    if rank > 0:
        if model.lora_rank not in (0, rank):
            raise ConfigError.of(f"{_WHERE}.lora_rank", model.lora_rank, f"lora.rank={rank} is read; leave this one at 0")
        return _megatron_settings(model, options, dtype, seed)
    if model.lora_rank > 0:
        return _peft_settings(model, options, seed)
    for name, value in (("lora.adapter_path", options.get("adapter_path")), ("lora_adapter_path", model.lora_adapter_path)):
        if value:
            raise ConfigError.of(
                f"{_WHERE}.{name}", value, "needs the adapter's rank, and alpha; set lora.rank and lora.alpha"
            )
    return None


def _megatron_settings(model: HFModelConfig, options: Mapping[str, Any], dtype: str, seed: int) -> LoRASettings:
    where = f"{_WHERE}.lora"
    for name, value in options.items():
        if name not in LORA:
            raise ConfigError.of(f"{where}.{name}", value, f"verl has no such option; expected one of {', '.join(LORA)}")
    require_supported(where, SimpleNamespace(**options), LORA)
    for name, expected in (
        ("type", _TYPES),
        ("lora_A_init_method", _INITIAL),
        ("lora_B_init_method", _INITIAL),
        ("dtype", (None, dtype, f"torch.{dtype}")),
    ):
        value = options.get(name, expected[0])
        if value not in expected:
            raise ConfigError.of(f"{where}.{name}", value, f"expected one of {', '.join(map(repr, expected))}")
    if model.lora_adapter_path and options.get("adapter_path"):
        raise ConfigError.of(f"{_WHERE}.lora_adapter_path", model.lora_adapter_path, "lora.adapter_path is given; set one")
    include, exclude = (_names_of(f"{where}.{name}", options.get(name)) for name in ("target_modules", "exclude_modules"))
    if include and exclude:
        raise ConfigError.of(
            f"{where}.exclude_modules", list(exclude), "read with an empty target_modules only, as in Megatron"
        )
    is_dora = options.get("type") == "dora"
    if is_dora and options.get("lora_B_init_method", "zero") != "zero":
        raise ConfigError.of(
            f"{where}.lora_B_init_method",
            options["lora_B_init_method"],
            "with type dora magnitudes start as those of the frozen weights; leave it at 'zero'",
        )
    return LoRASettings(
        LoRAConfig(
            rank=options["rank"],
            alpha=options.get("alpha", 32),
            dropout=options.get("dropout", 0.0),
            use_dora=is_dora,
            seed=seed,
        ),
        TargetModules(f"{where}.target_modules", "megatron", include, "megatron", exclude),
        (options.get("lora_A_init_method", "xavier"), options.get("lora_B_init_method", "zero")),
        bool(options.get("merge", False)),
        _adapter_directory("lora.adapter_path", options.get("adapter_path"))
        or _adapter_directory("lora_adapter_path", model.lora_adapter_path),
    )


def _peft_settings(model: HFModelConfig, options: Mapping[str, Any], seed: int) -> LoRASettings:
    if options.get("adapter_path"):
        raise ConfigError.of(
            f"{_WHERE}.lora.adapter_path", options["adapter_path"], "read with lora.rank only; set lora_adapter_path"
        )
    targets, every = model.target_modules, "all-linear"
    include_naming, include = ("peft", ()) if targets in (every, None) else _expression("target_modules", targets)
    exclude_naming, exclude = _expression("exclude_modules", model.exclude_modules)
    return LoRASettings(
        LoRAConfig(rank=model.lora_rank, alpha=model.lora_alpha, seed=seed),
        TargetModules(f"{_WHERE}.target_modules", include_naming, include, exclude_naming, exclude, experts=False),
        ("kaiming", "zero"),
        bool(options.get("merge", False)),
        _adapter_directory("lora_adapter_path", model.lora_adapter_path),
    )


def _expression(field: str, value: Any) -> tuple[Naming, tuple[str, ...]]:
    """peft's names, or its regular expression."""
    if not isinstance(value, str):
        return "peft", _names_of(f"{_WHERE}.{field}", value)
    try:
        re.compile(value)
    except re.error as error:
        raise ConfigError.of(
            f"{_WHERE}.{field}", value, f"is no regular expression ({error}); a list takes names"
        ) from error
    return "expression", (value,)


def _names_of(field: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise ConfigError.of(field, value, "expected a list of names")
    return tuple(value)


def _adapter_directory(field: str, value: str | None) -> str | None:
    if not value:
        return None
    if not (Path(value) / CONFIG_FILE).is_file():
        raise ConfigError.of(
            f"{_WHERE}.{field}",
            value,
            f"is no directory in peft's format, with {CONFIG_FILE}; a checkpoint of Megatron's is not read",
        )
    return str(value)
