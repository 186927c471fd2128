"""Losses by their importable names, and how a loss is sent to the ranks once."""

import importlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import ray
import xxhash
from ray import ObjectRef, cloudpickle
from torch import Tensor

from rl_backend.contracts import ConfigError, ConfigurableLoss, Losses, LossFn, MetricValue, ModelOutput, PackedBatch

# A loop has a few losses; a closure with new state at every step would fill the object store.
KEPT_LOSSES = 16


class Loss:
    """A loss function that crosses to the training ranks as its name and keyword arguments.

    It is itself a :class:`~rl_backend.contracts.LossFn`, so a runtime in this process takes it too::

        group.forward_backward(policy, sequences, Loss("my_project.losses:clipped", clip_ratio_low=0.2))

    Args:
        target: ``package.module:function``, importable on every node. The function takes ``model_output``, ``data``,
            ``dp_group=None`` and the keyword arguments.
        keywords: bound to every call; each must be picklable. A :class:`~rl_backend.contracts.ConfigurableLoss` checks them
            here.

    Raises:
        ConfigError: a name that cannot be imported, an object that cannot be called, or keyword arguments that the
            function does not take or that it misses.
    """

    def __init__(self, target: str, /, **keywords: Any) -> None:
        self.target = target
        self.keywords = keywords
        self._function, self._bound = _import(target), keywords
        described = self._function
        try:
            if isinstance(self._function, ConfigurableLoss):
                described = type(self._function)
                self._function, self._bound = self._function.with_options(**keywords), {}
            inspect.signature(self._function).bind(None, None, dp_group=None, **self._bound)
        except TypeError as error:
            raise ConfigError(
                f"Loss({target!r}): {error}; the function is called as "
                f"function(model_output, data, dp_group=..., **{sorted(keywords)}) and its signature is "
                f"{inspect.signature(described)}",
                target=target,
                keywords=sorted(keywords),
            ) from None

    def __call__(
        self, model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[Tensor | None, Mapping[str, MetricValue]]:
        return self._function(model_output, data, dp_group=dp_group, **self._bound)  # type: ignore[no-any-return]

    def plain(self) -> LossFn:
        """The function with its keyword arguments, for a caller who passes ``dp_group`` by its place; else this loss."""
        third = list(inspect.signature(self._function).parameters.values())[2:3]
        by_place = any(each.name == "dp_group" and each.kind == each.POSITIONAL_OR_KEYWORD for each in third)
        return partial(self._function, **self._bound) if by_place else self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.target, self.keywords))

    def __repr__(self) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in self.keywords.items())
        return f"Loss({self.target!r}{arguments})"


def _rebuild(target: str, keywords: Mapping[str, Any]) -> Loss:
    return Loss(target, **keywords)


def _import(target: str) -> Callable[..., Any]:
    module_name, _, attribute = target.partition(":")
    value: Any = None
    try:
        module = importlib.import_module(module_name)
        value = attrgetter(attribute)(module)
        problem = f"a {type(value).__name__} cannot be called"
    except SystemExit as error:
        problem = f"{module_name} ends the process when imported, {error!r}"
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        problem = f"cannot be imported ({error})"
    if not callable(value):
        raise ConfigError.of("Loss", target, f"{problem}; expected 'package.module:function'")
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SentLoss:
    """A loss by the digest of its pickle; a rank fetches it once."""

    digest: str
    # One reference, in a list so that Ray does not fetch it with the call.
    pickled: list[ObjectRef]


class LossSender:
    def __init__(self) -> None:
        self._sent: OrderedDict[str, SentLoss] = OrderedDict()

    def send(self, loss: Losses) -> SentLoss:
        """Raises :class:`~rl_backend.contracts.ConfigError` for a loss that cannot be called or pickled."""
        several = isinstance(loss, Mapping) and bool(loss) and all(map(callable, loss.values()))
        if not callable(loss) and not several:
            raise ConfigError(f"loss is a {type(loss).__name__}; expected a callable or Loss('package.module:function')")
        try:
            # At every call, because its state may have changed.
            pickled = cloudpickle.dumps(loss)
        except Exception as error:
            problem = f"cannot be pickled ({type(error).__name__}: {error}); pass Loss('package.module:function', ...)"
            raise ConfigError(f"loss {loss!r} {problem}") from error
        digest = xxhash.xxh3_128_hexdigest(pickled)
        if digest not in self._sent:
            self._sent[digest] = SentLoss(digest, [ray.put(pickled)])
            if len(self._sent) > KEPT_LOSSES:
                self._sent.popitem(last=False)
        self._sent.move_to_end(digest)
        return self._sent[digest]


class LossReceiver:
    def __init__(self) -> None:
        self._losses: OrderedDict[str, LossFn] = OrderedDict()

    def receive(self, sent: SentLoss) -> LossFn:
        if sent.digest not in self._losses:
            loss = cloudpickle.loads(ray.get(sent.pickled[0]))
            self._losses[sent.digest] = loss.plain() if isinstance(loss, Loss) else loss
            if len(self._losses) > KEPT_LOSSES:
                self._losses.popitem(last=False)
        self._losses.move_to_end(sent.digest)
        return self._losses[sent.digest]
