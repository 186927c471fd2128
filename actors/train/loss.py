"""Losses by their importable names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rl_backend.contracts import ConfigError, MetricValue, ModelOutput, PackedBatch


class Loss:
    """A loss function that crosses to the training ranks as its name and keyword arguments.

    It is itself a :class:`~rl_backend.contracts.LossFn`, so a runtime in this process takes it too::

        group.forward_backward(policy, sequences, Loss("my_project.losses:clipped", clip_ratio_low=0.2))

    Args:
        target: ``package.module:function``, importable on every node. The function takes ``model_output``, ``data``,
            ``dp_group=None`` and the keyword arguments.
        keywords: bound to every call; each must be picklable.

    Raises:
        ConfigError: a name that cannot be imported, an object that cannot be called, or keyword arguments that the
            function does not take or that it misses.
    """

    def __init__(self, target: str, /, **keywords: Any) -> None:
        self.target = target
        self.keywords = keywords
        self._function = _import(target)
        try:
            inspect.signature(self._function).bind(None, None, dp_group=None, **keywords)
        except TypeError as error:
            raise ConfigError(
                f"Loss({target!r}): {error}; the function is called as "
                f"function(model_output, data, dp_group=..., **{sorted(keywords)}) and its signature is "
                f"{inspect.signature(self._function)}",
                target=target,
                keywords=sorted(keywords),
            ) from None

    def __call__(
        self, model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[Tensor | None, Mapping[str, MetricValue]]:
        return self._function(model_output, data, dp_group=dp_group, **self.keywords)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.target, self.keywords))

    def __repr__(self) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in self.keywords.items())
        return f"Loss({self.target!r}{arguments})"


def _rebuild(target: str, keywords: Mapping[str, Any]) -> Loss:
    return Loss(target, **keywords)


def _import(target: str) -> Callable[..., Any]:
    module_name, separator, attribute = target.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError.of("Loss", target, "expected 'package.module:function'")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError.of("Loss", target, f"{module_name} cannot be imported ({error})") from None
    except SystemExit as error:
        raise ConfigError.of("Loss", target, f"{module_name} ends the process when imported, {error!r}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError.of("Loss", target, f"{module_name} has no {attribute}")
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError.of("Loss", target, f"a {type(value).__name__} cannot be called")
    return value  # type: ignore[no-any-return]
