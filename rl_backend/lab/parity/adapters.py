"""peft's adapters in a model of transformers, for comparisons of LoRA."""

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from rl_backend.contracts import ConfigError, UnsupportedError
from rl_backend.contracts.lora import PEFT_PREFIX, LoRAConfig, LoRAKind
from rl_backend.lab.parity.config import start_of


def add_peft_adapter(
    model: PreTrainedModel, config: LoRAConfig, seed: int, in_files: Callable[[str], str]
) -> dict[str, nn.Parameter]:
    """Puts peft's adapters into ``model``, frozen itself from now on; name beside those of files -> parameter.

    Args:
        in_files: name of a module in ``model`` -> in the files of its weights.

    Raises:
        UnsupportedError: peft is not installed, or targets among experts, which transformers keeps as one parameter.
        ConfigError: targets that the model does not have.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise UnsupportedError("peft is not installed; the transformers side of a comparison of LoRA needs it") from None
    kinds = _kinds(model)
    for target in config.targets:
        if "experts" in target.split("."):
            raise UnsupportedError(
                f"LoRAConfig.targets has {target!r}: transformers keeps experts as one parameter, which peft adapts in "
                "another form; compare two runtimes",
                target=target,
            )
        if not any(config.replace(targets=(target,)).selects(name, kind) for name, kind in kinds.items()):
            raise ConfigError.of("LoRAConfig.targets", target, "no module of transformers' model")
    modules = [name for name, kind in kinds.items() if config.selects(name, kind)]
    inject_adapter_in_model(
        PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft takes any number
            use_rslora=config.use_rslora,
            target_modules=modules,
        ),
        model,
    )
    adapters = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            stored = PEFT_PREFIX + in_files(name.replace(".default", ""))
            parameter.data = start_of(stored, parameter.shape, seed).to(parameter.device, model.dtype)
            adapters[stored] = parameter
    return adapters


def _kinds(model: PreTrainedModel) -> dict[str, LoRAKind]:
    """What each linear layer, and the embedding, is part of; without experts and routers."""
    found: dict[str, LoRAKind] = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if module is model.get_input_embeddings():
            found[name] = "embedding"
        elif module is model.get_output_embeddings():
            found[name] = "head"
        elif isinstance(module, nn.Linear) and "experts" not in parts and parts[-1] != "gate":
            found[name] = "feed_forward" if "mlp" in parts else "attention"
    return found
