"""verl's names for what a checkpoint has."""

from __future__ import annotations

from rl_backend.contracts import ConfigError

STATE = frozenset({"model", "optimizer", "extra"})
"""Weights, optimizer with schedules, and random state; the last two need the first to be restored."""


def require_contents(field: str, contents: frozenset[str], *, sharded: bool) -> None:
    """Raises :class:`ConfigError` for contents that cannot be restored, or that verl does not know."""
    state, name = contents & STATE, f"checkpoint.{field}"
    if contents - STATE - {"hf_model"}:
        raise ConfigError.of(name, sorted(contents), f"expected {sorted(STATE)} and 'hf_model'")
    if state and state != STATE and (sharded or state != {"model"}):
        alone = "'hf_model'" if sharded else "'model' or 'hf_model'"
        raise ConfigError.of(
            name,
            sorted(contents),
            f"{sorted(STATE)} are one training state, restored together; name all three, or {alone} alone for weights",
        )
