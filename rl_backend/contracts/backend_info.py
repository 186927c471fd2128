"""Facts about a backend and its optimizers."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rl_backend.contracts.lora import LoRAInfo


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """What AdamW knows of a model, or of a LoRA tenant.

    Attributes:
        step: optimizer steps taken.
        learning_rate: of the next step.
        exp_avg, exp_avg_sq: name -> whole moment, float32, on the CPU. Hugging Face names of a model, peft's of a tenant.
    """

    step: int
    learning_rate: float
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]


@dataclass(frozen=True)
class OptimizerStateInfo:
    """Attributes:
    name: of the tenant, or of the model.
    step: optimizer steps taken.
    bytes: that this rank holds of its state.
    """

    name: str
    step: int
    bytes: int


@dataclass(frozen=True)
class BackendInfo:
    """What runs a model.

    Attributes:
        runtime: ``RuntimeConfig.backend``.
        device: type of the devices that it trains on.
        layout: ``world``, ``dp`` and the sizes of ``ParallelConfig``.
        base: name of the model.
        hf_path: its Hugging Face directory.
        model_type: of its ``config.json``.
        head: of its outputs.
        tenants: those of the model.
        bit_exact: whether tenants compute the same alone and beside others to the last bit, as far as this process has tried
            matrix products in the base's dtype. False on a GPU.
        installed: package -> version, of those that the backend knows.
    """

    runtime: str
    device: str
    layout: Mapping[str, int]
    base: str
    hf_path: str
    model_type: str
    head: str
    tenants: tuple[LoRAInfo, ...]
    bit_exact: bool
    installed: Mapping[str, str]
