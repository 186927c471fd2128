"""The process that has verifiers: its settings, and the thread that listens to it."""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import Field

from adapters.verifiers.child import KEY_VARIABLE
from rl_backend.child_process import start_script
from rl_backend.contracts import BaseConfig, ConfigError, EpisodeFailedError

_CHILD = Path(__file__).with_name("child.py")
_PLUGINS = Path(__file__).with_name("plugins")
_ENDING_SECONDS = 5.0
# Our harness: those of verifiers begin with a script that downloads packages.
_ROLE_DEFAULTS = {"harness": {"id": "rl_backend_chat"}, "runtime": {"type": "subprocess"}}


class VerifiersSettings(BaseConfig):
    """An environment of verifiers.

    Attributes:
        python: of the virtual environment that has verifiers 0.4, and the packages of the environment.
        environment: as a run of verifiers takes it under ``env``: ``{"taskset": {"id": ..., ...}, ...}``.
        roles: of the environment, such as ``agent``, ``player``; each gets our harness and runs without a container, unless
            ``environment`` says otherwise.
        tokenizer: folder of the model's tokenizer.
        renderer: of the package renderers; ``{"name": "default"}`` uses the tokenizer's chat template.
        stop_token_ids: end a turn, beside those of the renderer; the default one has the eos_token alone.
        path: further folders in which that Python looks for modules.
        most_tasks: tasks that are taken; needed for tasksets without end.
        start_seconds: for the process to be ready.
    """

    python: str
    environment: dict[str, Any]
    roles: tuple[str, ...] = ("agent",)
    tokenizer: str
    renderer: dict[str, Any] = Field(default_factory=lambda: {"name": "default"})
    stop_token_ids: tuple[int, ...] = ()
    path: tuple[str, ...] = ()
    most_tasks: int = Field(default=10_000, ge=1)
    start_seconds: float = Field(default=120.0, gt=0)

    def configured(self) -> dict[str, Any]:
        roles = {role: {**_ROLE_DEFAULTS, **self.environment.get(role, {})} for role in self.roles}
        return {**self.environment, **roles}


class VerifiersProcess:
    """``child.py`` in the Python that has verifiers.

    Args:
        url: of the endpoint.
        settle: is given what it answers.
        lose: called when it has ended.

    Attributes:
        tasks: names of the environment's tasks.

    Raises:
        ConfigError: it cannot be started, or verifiers cannot load the environment.
    """

    def __init__(
        self,
        settings: VerifiersSettings,
        url: str,
        settle: Callable[[dict[str, Any]], None],
        lose: Callable[[], None],
    ) -> None:
        # A key of our own: verifiers then reads no settings of its makers' services.
        environment = {**os.environ, KEY_VARIABLE: "unused", "HF_HUB_OFFLINE": "1"}
        try:
            self._process, self._connection = start_script(settings.python, _CHILD, environment)
        except OSError as error:
            raise ConfigError.of("python", settings.python, f"cannot be run: {error}") from None
        self._sending = threading.Lock()
        try:
            self.tasks: Sequence[str] = self._ready(settings, url)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        threading.Thread(target=self._read, args=(settle, lose), name="verifiers", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(json.dumps(message).encode())
        except (OSError, ValueError) as error:
            raise EpisodeFailedError(f"the process of verifiers has ended: {error}; see its output above") from error

    def end(self) -> None:
        # The environment may end what it serves, for a while.
        with suppress(EpisodeFailedError, subprocess.TimeoutExpired):
            self.send({"end": True})
            self._process.wait(_ENDING_SECONDS)
        self._process.kill()
        self._process.wait()

    def _ready(self, settings: VerifiersSettings, url: str) -> Sequence[str]:
        self.send(
            {
                "environment": settings.configured(),
                "renderer": settings.renderer,
                "tokenizer": str(Path(settings.tokenizer).resolve()),
                "path": [*settings.path, str(_PLUGINS)],
                "most_tasks": settings.most_tasks,
                "base_url": url,
            }
        )
        if not self._connection.poll(settings.start_seconds):
            problem = "the environment was not ready by then; raise it"
            raise ConfigError.of("start_seconds", settings.start_seconds, problem)
        ready = received(self._connection)
        if ready is None or not ready["ready"]:
            problem = "its process ended; see its output above" if ready is None else ready["problem"]
            raise ConfigError.of("environment", settings.environment, f"verifiers cannot load it: {problem}")
        tasks: Sequence[str] = ready["tasks"]
        return tasks

    def _read(self, settle: Callable[[dict[str, Any]], None], lose: Callable[[], None]) -> None:
        while (message := received(self._connection)) is not None:
            settle(message)
        lose()


def received(connection: Connection) -> dict[str, Any] | None:
    """A message; None once the other side has ended."""
    try:
        message: dict[str, Any] = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return message
