"""Operations that are called and waited for, or submitted for a future."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, overload


class GroupFuture[R]:
    """Result of a submitted operation."""

    def __init__(self, name: str, wait: Callable[[float | None], R], ready: Callable[[], bool]) -> None:
        self.name = name
        self._wait = wait
        self._ready = ready
        self._lock = threading.Lock()
        self._result: tuple[R] | None = None
        self._error: Exception | None = None

    def result(self, timeout: float | None = None) -> R:
        """Waits for every rank.

        While nobody waits, nobody notices a failure: read the results of what was submitted.

        Args:
            timeout: seconds; the operation continues when they have passed, and ``result`` may be called again.

        Raises:
            TimeoutError: not done in time.
            GroupFailedError: a rank died, or left its peers in a collective; the group is gone.
            Exception: what the ranks raised, when all of them answered; the group continues.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._result is None:
                try:
                    self._result = (self._wait(timeout),)
                except TimeoutError:
                    raise
                except Exception as error:
                    self._error = error
                    raise
            return self._result[0]

    def done(self) -> bool:
        """Whether every rank has answered; does not wait."""
        return self._result is not None or self._error is not None or self._ready()


class BoundOperation[**P, R]:
    """One operation of one group.

    Attributes:
        submit: starts the operation, which runs after those submitted before it.
    """

    def __init__(self, submit: Callable[P, GroupFuture[R]]) -> None:
        self.submit = submit
        functools.update_wrapper(self, submit)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Waits for the result; raises as :meth:`GroupFuture.result`."""
        return self.submit(*args, **kwargs).result()


class operation[G, **P, R]:  # noqa: N801, a decorator
    """Makes a method of a group that returns a future into an operation."""

    def __init__(self, method: Callable[Concatenate[G, P], GroupFuture[R]]) -> None:
        self._method = method
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    @overload
    def __get__(self, group: None, owner: type) -> operation[G, P, R]: ...
    @overload
    def __get__(self, group: G, owner: type) -> BoundOperation[P, R]: ...
    def __get__(self, group: G | None, owner: type) -> Any:
        if group is None:
            return self
        return BoundOperation(functools.wraps(self._method)(functools.partial(self._method, group)))
