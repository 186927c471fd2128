"""Parts of layers compiled by torch: one function for all layers of a kind, and for all lengths of sequences."""

import os
import shutil
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from rl_backend.contracts import ConfigError
from rl_backend.parallel.tensor import local_parameters
from rl_backend.primitive.attention import Segments

BACKEND: str | Callable[..., Any] = "inductor"


def require_compiler() -> None:
    """Raises :class:`ConfigError` without the C++ compiler that inductor, torch's backend, runs."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError.of(
            "NativeConfig.compile",
            True,
            f"needs a C++ compiler, and there is no {compiler!r}; install g++, or name one in CXX",
        )


def compiled(part: Callable[..., Any], layer: nn.Module, kind: Hashable, modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """``part``, a method of the layer's class, of ``layer``; layers of one ``kind`` have the same compiled code.

    It takes tensors of at least two rows, tuples of them and :class:`Segments`, and gives what ``part`` gives; arguments for
    which ``part`` has a star are left out. With fewer rows, and on the meta device, ``part`` runs as it is.

    Args:
        modules: those of the layer that ``part`` computes with.
    """
    assert isinstance(part, FunctionType), "a method of a class"
    return partial(_run, _compiled(part, kind, BACKEND), part, layer, modules)


def _run(
    function: Callable[..., Any],
    part: FunctionType,
    layer: nn.Module,
    modules: Sequence[nn.Module],
    x: Tensor,
    *arguments: Any,
) -> Any:
    others = arguments[: part.__code__.co_argcount - 2]
    if x.is_meta or x.shape[0] < 2:
        return part(layer, x, *others)
    hidden = [other.hidden() if isinstance(other, Segments) else other for other in others]
    for tensor in _tensors((x, *hidden)):
        # Rows, or segments.
        torch._dynamo.mark_dynamic(tensor, 0)
    with local_parameters(modules):
        return function(layer, x, *hidden)


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


@lru_cache(maxsize=256)
def _compiled(part: FunctionType, kind: Hashable, backend: str | Callable[..., Any]) -> Callable[..., Any]:
    # Shared prefixes or none, gradients or none, and sizes that are plain numbers at first each take a graph. Set here, not
    # around each call, which would take 40 us of a layer.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    # torch counts compilations by code object, and remembers sizes by name: each kind has its own.
    own = part.__code__.replace(co_name=f"{part.__name__}_{next(_numbers)}")
    function = FunctionType(own, part.__globals__, own.co_name, part.__defaults__, part.__closure__)
    return torch.compile(function, fullgraph=True, backend=backend)


_numbers = iter(range(2**31))
