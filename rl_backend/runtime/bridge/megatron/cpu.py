"""Megatron without CUDA: its calls of CUDA, answered by the CPU inside :func:`on_cpu` only.

Megatron-Core names the device ``cuda`` in many places and calls ``torch.cuda`` for streams, random state and
synchronisation. Every patch stands in :data:`PATCHES` with what it is for; a test takes each one away and sees Megatron
fail. Outside the context torch is as it was.
"""

import contextlib
import importlib
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rl_backend.runtime.bridge.megatron import deltanet
from rl_backend.runtime.bridge.megatron.local_layers import NormMapping


class Patch(NamedTuple):
    """``owner`` is the object, or the name of the module, that has the attribute; ``why`` is who in Megatron asks for it."""

    owner: Any
    attribute: str
    replacement: Any
    why: str


class _Stream:
    """A CUDA stream, or its event, with nothing to wait for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record_event(self, *args: object) -> Self:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


_tensor_type = torch.Tensor.type


def _cuda_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``torch.FloatTensor`` as ``torch.cuda.FloatTensor``; conversions are as before."""
    result = _tensor_type(self, *args, **kwargs)
    # Under a TorchFunctionMode torch looks the method up by its name, and so comes here a second time.
    if isinstance(result, str) and not result.startswith("torch.cuda."):
        return result.replace("torch.", "torch.cuda.", 1)
    return result


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_RANDOM = "megatron.core.tensor_parallel.random"
_DELTANET = "megatron.core.ssm.gated_delta_net"
_MINIMAX = "megatron.bridge.models.minimax_m2.minimax_m2_bridge"

PATCHES = (
    Patch(torch.cuda, "current_device", lambda: torch.device("cpu"), "the device of every buffer that Megatron makes"),
    Patch(torch.cuda, "current_stream", lambda *_: _Stream(), "gradient buffers wait for the stream of the backward pass"),
    Patch(torch.cuda, "Stream", _Stream, "the MoE dispatcher makes one for copies to the host"),
    Patch(torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state(), "seeding keeps the state that it found"),
    Patch(torch.cuda, "manual_seed", torch.manual_seed, "each tensor-parallel rank has its own random states"),
    Patch(_RANDOM, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state(), "the tracker of states reads it"),
    Patch(_RANDOM, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state), "and sets it"),
    Patch(_DISPATCHER, "maybe_move_tensor_to_cpu", _on_host, "sizes of the all-to-all as numbers of the host"),
    Patch(torch.Tensor, "cuda", lambda self, *_, **__: self, "tied embeddings, summed over the first and the last stage"),
    Patch(torch.Tensor, "type", _cuda_type, "the distributed optimizer takes tensors of CUDA types only"),
    Patch(f"{_DELTANET}.common", "HAVE_FLA", True, "no layer is made without flash-linear-attention, which needs CUDA"),
    Patch(f"{_DELTANET}.common", "l2norm", deltanet.l2norm, "its kernels are called for queries and keys"),
    Patch(f"{_DELTANET}.gdn", "causal_conv1d", deltanet.causal_conv1d, "for the short convolution"),
    Patch(f"{_DELTANET}.gdn", "chunk_gated_delta_rule", deltanet.chunk_gated_delta_rule, "and for the rule itself"),
    Patch(_MINIMAX, "_FullDimQKNormMapping", NormMapping, "it broadcasts weights of norms between CUDA devices"),
)


class _OnCpu(TorchFunctionMode):
    """``device="cuda"`` in any torch call means the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **(kwargs or {}))


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


_inside = threading.local()
_lock = threading.Lock()
_users = 0
# Patches are the process's: they hold until the last thread inside leaves.
_undone = contextlib.ExitStack()


@contextmanager
def on_cpu(device: torch.device) -> Generator[None]:
    """Inside, Megatron runs on ``device``: on a CPU the patches hold, on CUDA nothing is changed. Nests."""
    global _users
    if device.type != "cpu" or getattr(_inside, "value", False):
        yield
        return
    with _lock:
        _users += 1
        if _users == 1:
            # Megatron marks small functions for torch.compile, which on a CPU needs a C++ compiler and most of a minute.
            _undone.enter_context(torch.compiler.set_stance("force_eager"))
        for patch in PATCHES if _users == 1 else ():
            owner = importlib.import_module(patch.owner) if isinstance(patch.owner, str) else patch.owner
            _undone.callback(setattr, owner, patch.attribute, getattr(owner, patch.attribute))
            setattr(owner, patch.attribute, patch.replacement)
    _inside.value = True
    try:
        with _OnCpu():
            yield
    finally:
        _inside.value = False
        with _lock:
            _users -= 1
            if _users == 0:
                _undone.close()


def iterate_on_cpu[T](device: torch.device, items: Generator[T]) -> Generator[T]:
    """``items``, each made inside :func:`on_cpu`; the consumer runs outside. Closing it closes ``items``."""
    try:
        while True:
            with on_cpu(device):
                item = next(items, None)
            if item is None:
                return
            yield item
    finally:
        with on_cpu(device):
            items.close()
