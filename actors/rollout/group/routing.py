"""Routing: which engine has what a prompt begins with in its prefix cache."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

import numpy as np
import xxhash


class PrefixRouter:
    """Remembers the engines of ``most`` sequences; those not asked for longest are forgotten."""

    def __init__(self, most: int = 65536) -> None:
        self._most = most
        self._engines: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._lock = threading.Lock()

    def remember(self, token_ids: Sequence[int], engine: int) -> None:
        """An engine has keys and values of the whole sequence."""
        key = len(token_ids), _digests(token_ids, [len(token_ids)])[0]
        with self._lock:
            if key not in self._engines:
                self._lengths[key[0]] += 1
            self._engines[key] = engine
            self._engines.move_to_end(key)
            if len(self._engines) > self._most:
                (length, _), _ = self._engines.popitem(last=False)
                self._lengths[length] -= 1
                self._lengths += Counter()  # drops lengths that none has

    def find(self, token_ids: Sequence[int], engines: Collection[int]) -> int | None:
        """The one of ``engines`` that has most of what a prompt begins with; None where none is known to have any."""
        with self._lock:
            lengths = sorted(length for length in self._lengths if length <= len(token_ids))
        # The longest first: what it has in its cache begins with all shorter ones.
        for key in reversed(list(zip(lengths, _digests(token_ids, lengths), strict=True))):
            with self._lock:
                engine = self._engines.get(key)
            if engine in engines:
                return engine
        return None


def _digests(token_ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
    # Of each beginning of the sequence; lengths ascend, so that one pass over the tokens is enough.
    ids, digest, start, digests = np.asarray(token_ids, dtype=np.int64), xxhash.xxh3_64(), 0, []
    for length in lengths:
        digest.update(ids[start:length].tobytes())
        digests.append(int(digest.intdigest()))
        start = length
    return digests
