"""Whether an engine may sample or be updated, and the version of the weights that it serves."""

from __future__ import annotations

from typing import Literal

from actors.rollout.messages import AdapterVersion, EngineState
from rl_backend.contracts import UNVERSIONED, EngineDirtyError, RolloutError, WeightVersionError

type Action = Literal["sample", "take weights", "continue an update", "sleep", "wake up"]

_FROM: dict[Action, tuple[EngineState, ...]] = {
    "sample": ("serving",),
    # An engine whose update another driver left open is asked for one more, which vLLM refuses.
    "take weights": ("serving", "paused"),
    "continue an update": ("paused",),
    "sleep": ("serving", "asleep"),
    "wake up": ("serving", "asleep"),
}
_WHY_NOT: dict[EngineState, str] = {
    "serving": "no weight update has begun",
    "paused": "a weight update is in progress",
    "asleep": "it is asleep; call wake_up() first",
}


class ServingState:
    """The state machine of an engine.

    It samples only while it is ``serving``. An update goes :meth:`pause` -> :meth:`finish` -> :meth:`resume`, between which
    it is ``paused``. A failure after :meth:`pause` leaves it ``dirty`` for good. Turns of episodes wait where calls are
    refused, except those of a dirty engine.

    Args:
        name: of the engine, for messages.
        require_push: refuse to sample until weights have been pushed.
    """

    def __init__(self, name: str, *, require_push: bool = False) -> None:
        self._name = name
        self._state: EngineState = "serving"
        self._version = UNVERSIONED
        self._require_push = require_push
        self._update_is_open = False
        self._failure = ""

    @property
    def state(self) -> EngineState:
        """As :class:`~actors.rollout.messages.EngineInfo` tells it."""
        return self._state

    @property
    def version(self) -> int:
        """Of the weights served."""
        return self._version

    @property
    def lacks_weights(self) -> bool:
        """Whether weights must be pushed before it samples."""
        return self._require_push and self._version == UNVERSIONED

    def pause(self) -> None:
        """An update begins; from ``serving`` or ``paused``."""
        self.check("take weights")
        self._state, self._update_is_open = "paused", True

    def finish(self, version: int) -> None:
        """All weights of the update are loaded; from ``paused``."""
        self.check("continue an update")
        self._version, self._update_is_open = version, False

    def resume(self) -> None:
        """Serves after an update; from ``paused``. In any other state there is nothing to do.

        Raises:
            RolloutError: the update has begun and is not finished.
        """
        if self._state != "paused":
            return
        if self._update_is_open:
            self.check("sample")
        self._state = "serving"

    def sleep(self) -> None:
        """From ``serving`` or ``asleep``."""
        self.check("sleep")
        self._state = "asleep"

    def wake(self) -> None:
        """From ``serving`` or ``asleep``."""
        self.check("wake up")
        self._state = "serving"

    def fail(self, failure: str) -> bool:
        """Makes it dirty; from any state. Keeps the first failure, as later ones are consequences; False for those."""
        if self._state == "dirty":
            return False
        self._state, self._failure = "dirty", failure
        return True

    def require_push(self) -> None:
        """Refuses to sample until weights have been pushed."""
        self._require_push = True

    def forget_version(self) -> None:
        """Refuses to sample until the next push, whose version may be any; from any state but ``dirty``."""
        self.check_clean()
        self._version, self._require_push = UNVERSIONED, True

    def check(self, action: Action) -> None:
        """Raises :class:`~rl_backend.contracts.RolloutError` where the state does not allow it."""
        self.check_clean()
        if self._state not in _FROM[action]:
            raise RolloutError(
                f"{self._name} cannot {action} now: {_WHY_NOT[self._state]}", engine=self._name, state=self._state
            )

    def check_clean(self) -> None:
        """Raises :class:`~rl_backend.contracts.EngineDirtyError` after an update that failed once it had begun."""
        if self._state == "dirty":
            raise self.dirty_error()

    def check_weights(self) -> None:
        """Raises :class:`~rl_backend.contracts.RolloutError` where it lacks weights."""
        if self.lacks_weights:
            raise RolloutError(
                f"{self._name} has no weights of the trainer yet (UNVERSIONED): push before sampling", engine=self._name
            )

    def check_version(self, adapter: AdapterVersion | None, required: int | None) -> None:
        """Raises :class:`~rl_backend.contracts.WeightVersionError` where the adapter, or without one the weights, are older
        than ``required``.
        """
        version = self._version if adapter is None else adapter.version
        if required is not None and version < required:
            what = "weights of" if adapter is None else f"{adapter.tenant!r} at"
            raise WeightVersionError(
                f"{self._name} serves {what} version {version}, version {required} is required: push first",
                engine=self._name,
                version=version,
                required=required,
            )

    def dirty_error(self) -> EngineDirtyError:
        """That a dirty engine raises."""
        return EngineDirtyError(
            f"{self._name} is dirty: a weight update failed after it had begun ({self._failure}); restart it and push again",
            engine=self._name,
        )
