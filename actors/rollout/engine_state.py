"""State of an engine: whether it may sample or be updated.

The engine is a small state machine. ``generate`` is served only in state ``serving``; an update goes ``verify`` ->
``load`` -> ``resume``, and between the last two the engine is ``paused``. A failure after the first load leaves it
``dirty`` for good. Turns of episodes wait where ``generate`` is refused, but for a dirty engine.
"""

from __future__ import annotations

from typing import Any

from actors.rollout.config import RolloutConfig
from actors.rollout.messages import EngineState
from actors.rollout.step_loop import StepLoop
from rl_backend.contracts import UNVERSIONED, EngineDeadError, EngineDirtyError, RolloutError


class VllmInProcess:
    """vLLM in this process, its state, and the version of the weights that it serves.

    Args:
        config: of the group.
        engine: its number in the group.
        device: ``cpu`` or ``cuda``.
    """

    _llm: Any

    def __init__(self, config: RolloutConfig, engine: int, device: str) -> None:
        self._config = config
        self._engine = engine
        self._name = f"engine {engine}"
        self._device = device
        self._cores: tuple[int, ...] = ()
        self._state: EngineState = "serving"
        self._version = UNVERSIONED
        self._failure = ""
        self._loop = StepLoop(self._name)

    def _check_clean(self) -> None:
        if self._state == "dirty":
            raise self._dirty_error()

    def _dirty_error(self) -> EngineDirtyError:
        return EngineDirtyError(
            f"{self._name} is dirty: a weight update failed after it had begun ({self._failure}); restart it and push again",
            engine=self._name,
        )

    def _check_updatable(self) -> None:
        self._check_clean()
        if self._state == "asleep":
            raise RolloutError(f"{self._name} sleeps and cannot take weights: wake_up() first", engine=self._name)

    def _make_dirty(self, failure: str, error: Exception | None = None) -> None:
        """The first failure is kept: those after it follow from it. Requests get ``error``, or that the engine is dirty."""
        if self._state != "dirty":
            self._state, self._failure = "dirty", failure
            self._loop.close(error or self._dirty_error())

    def _during_update(self, call: Any, *args: Any) -> None:
        self._check_clean()
        try:
            self._vllm_call(call, *args)
        except BaseException as error:
            self._make_dirty(f"{type(error).__name__}: {error}")
            raise EngineDirtyError(
                f"{self._name}: a weight update failed after it had begun ({type(error).__name__}: {error}); the engine "
                "refuses requests until it is restarted",
                engine=self._name,
            ) from error

    def _vllm_call(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls something of vLLM on its own thread, between two steps."""
        try:
            return self._loop.call(call, *args, **kwargs)
        except Exception as error:
            found = self.failed(error)
            if found is error:
                raise
            raise found from error

    def failed(self, error: Exception) -> Exception:
        """What to tell a caller of an error that vLLM has raised: itself, unless one of its processes has ended."""
        from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

        if not isinstance(error, VllmEngineDeadError):
            return error
        dead = EngineDeadError(f"{self._name}: a vLLM process ended ({error}); restart it", engine=self._name)
        self._make_dirty(f"a vLLM process ended: {error}", dead)
        return dead
