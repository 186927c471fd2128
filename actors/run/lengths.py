"""Lengths of prompts and responses that nobody gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.rollout.lengths import fitting_lengths, positions_of
from actors.run.options import Options, get, has


def fitted_lengths(kind: type[Options], given: Mapping[str, Any], model_path: str) -> dict[str, int]:
    """Lengths of prompts and responses that are not given, where their defaults are more than the model has positions for.

    Args:
        model_path: place of the model's directory.
    """
    prompt, response = "max_prompt_tokens", "sampling.max_new_tokens"
    defaults = {prompt: kind.model_fields[prompt].default, **kind.preset}
    asked = {path: get(given, path) if has(given, path) else defaults[path] for path in (prompt, response)}
    model = get(given, model_path) if has(given, model_path) else None
    positions = positions_of(model) if isinstance(model, str) and model else None
    if positions is None or not all(isinstance(tokens, int) for tokens in asked.values()):
        return {}
    return fitting_lengths(asked, [path for path in asked if not has(given, path)], positions)
