"""Sending a loss to the ranks once."""

from __future__ import annotations

from collections import OrderedDict

import ray
import xxhash
from ray import cloudpickle

from actors.train.worker import KEPT_LOSSES, SentLoss
from rl_backend.contracts import ConfigError, LossFn


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
