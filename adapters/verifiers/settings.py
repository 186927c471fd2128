"""Settings of a verifiers environment, and of the Python that it runs in."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rl_backend.contracts import BaseConfig

HARNESS = "rl_backend_chat"
"""The harness of ours. Those of verifiers begin with a script that downloads packages."""
ROLE_DEFAULTS = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}


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
        """The environment with what we set for each role."""
        roles = {role: {**ROLE_DEFAULTS, **self.environment.get(role, {})} for role in self.roles}
        return {**self.environment, **roles}
