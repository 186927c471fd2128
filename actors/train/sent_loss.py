"""Sending a loss to the ranks once."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import ray
import xxhash
from ray import ObjectRef, cloudpickle

from rl_backend.contracts import ConfigError, LossFn

KEPT_LOSSES = 16


@dataclass(frozen=True)
class SentLoss:
    """A loss by the digest of its pickle; a rank fetches it once.

    Attributes:
        pickled: one reference, in a list so that Ray does not fetch it with the call.
    """

    digest: str
    pickled: list[ObjectRef]


class LossSender:
    """Pickles a loss at every call, so that one whose state changed is sent anew, and puts each pickle into Ray once."""

    def __init__(self) -> None:
        self._sent: OrderedDict[str, SentLoss] = OrderedDict()

    def send(self, loss: LossFn) -> SentLoss:
        """Raises :class:`~rl_backend.contracts.ConfigError` for a loss that cannot be called or pickled."""
        if not callable(loss):
            raise ConfigError(f"loss is a {type(loss).__name__}; expected a callable or Loss('package.module:function')")
        try:
            pickled = cloudpickle.dumps(loss)
        except Exception as error:
            raise ConfigError(
                f"loss {loss!r} cannot be pickled ({type(error).__name__}: {error}); pass "
                "Loss('package.module:function', ...)"
            ) from error
        digest = xxhash.xxh3_128_hexdigest(pickled)
        if digest not in self._sent:
            self._sent[digest] = SentLoss(digest, [ray.put(pickled)])
            if len(self._sent) > KEPT_LOSSES:
                self._sent.popitem(last=False)
        self._sent.move_to_end(digest)
        return self._sent[digest]


class LossReceiver:
    """The losses that a rank was sent last."""

    def __init__(self) -> None:
        self._losses: OrderedDict[str, LossFn] = OrderedDict()

    def receive(self, sent: SentLoss) -> LossFn:
        """The loss, fetched when its digest is not one of the last few."""
        if sent.digest not in self._losses:
            self._losses[sent.digest] = cloudpickle.loads(ray.get(sent.pickled[0]))
            if len(self._losses) > KEPT_LOSSES:
                self._losses.popitem(last=False)
        self._losses.move_to_end(sent.digest)
        return self._losses[sent.digest]
