"""What the model wrote at first and at last."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl_backend.lab.picture import Html, join, tag
from rl_backend.lab.text import as_number, short

PROMPTS, RESPONSES, CHARACTERS = 6, 3, 1500
TEXTS = ("prompt", "response", "reward", "step")

type Sample = Mapping[str, Any]


def draw_samples(kind: str, first: Sequence[Sample], last: Sequence[Sample]) -> Html:
    """Two columns; prompts that both steps have come first, side by side, those with the largest change of reward on top.

    Args:
        kind: the title, for example "Samples".
    """
    before, after = _by_prompt(first), _by_prompt(last)
    shared = [prompt for prompt in before if prompt in after]
    shared.sort(key=lambda prompt: -abs(_mean_reward(after[prompt]) - _mean_reward(before[prompt])))
    left = [*shared, *(prompt for prompt in before if prompt not in after)][:PROMPTS]
    right = [*shared, *(prompt for prompt in after if prompt not in before)][:PROMPTS]
    middle = _middle([*first, *last])
    rows: list[Html] = []
    for index in range(max(len(left), len(right))):
        cells = [
            _cell(prompts[index], samples[prompts[index]], middle) if index < len(prompts) else tag("div")
            for prompts, samples in ((left, before), (right, after) if last else (left, {}))
            if samples
        ]
        rows.append(tag("div", *cells, class_="pair"))
    heads = [_head(first), _head(last) if last else None]
    if not last:
        note = "All samples are of one step."
    elif shared:
        note = f"Of {len(shared)} prompts that both steps had, those whose rewards changed most."
    else:
        note = "The two steps had no prompt in common."
    return tag(
        "section",
        tag("h2", f"{kind} before and after" if last else kind),
        tag("p", note, _choice(first), class_="note"),
        tag("div", *heads, class_="pair heads"),
        *rows,
        id=kind.lower().replace(" ", "-"),
        class_="" if last else "single",
    )


def _by_prompt(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(str(sample.get("prompt", "")), []).append(sample)
    return found


def _choice(samples: Sequence[Sample]) -> str:
    if all(len(responses) == 1 for responses in _by_prompt(samples).values()):
        return ""
    return f" Of each prompt: its best, its middle and its worst of up to {RESPONSES} responses."


def _mean_reward(samples: Sequence[Sample]) -> float:
    rewards = [reward for sample in samples if (reward := _reward(sample)) is not None and math.isfinite(reward)]
    return sum(rewards) / len(rewards) if rewards else 0.0


def _head(samples: Sequence[Sample]) -> Html:
    rewards = [reward for sample in samples if (reward := _reward(sample)) is not None]
    mean = f", mean reward {short(sum(rewards) / len(rewards))}" if rewards else ""
    return tag("h3", _step(samples), tag("span", f"{len(samples)} samples{mean}", class_="unit"))


def _step(samples: Sequence[Sample]) -> str:
    step = samples[0].get("step")
    return "Before the first step" if step == 0 else f"Step {step}"


def _middle(samples: Sequence[Sample]) -> float | None:
    """Between the lowest and the highest reward, for the colours; None when there is nothing to tell apart."""
    rewards = [reward for sample in samples if (reward := _reward(sample)) is not None and math.isfinite(reward)]
    return (min(rewards) + max(rewards)) / 2 if rewards and min(rewards) < max(rewards) else None


def _cell(prompt: str, samples: Sequence[Sample], middle: float | None) -> Html:
    rewards = [reward for sample in samples if (reward := _reward(sample)) is not None]
    several = len(rewards) > 1
    mean = tag("span", f"mean of {len(rewards)}: {short(sum(rewards) / len(rewards))}", class_="unit") if several else None
    return tag(
        "article",
        tag("div", tag("span", f"{_step(samples)}: prompt", class_="unit"), mean, class_="bar-line"),
        tag("pre", _clipped(prompt), class_="prompt"),
        *(_response(sample, middle) for sample in _best_middle_worst(samples)),
    )


def _best_middle_worst(samples: Sequence[Sample]) -> list[Sample]:
    ordered = sorted(samples, key=lambda sample: -(_reward(sample) or 0.0))
    if len(ordered) <= RESPONSES:
        return ordered
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def _response(sample: Sample, middle: float | None) -> Html:
    reward = _reward(sample)
    facts = ", ".join(
        _versions(value) if name == "version_spans" else f"{name.replace('_', ' ')} {_plain(value)}"
        for name, value in sample.items()
        if name not in TEXTS and not isinstance(value, dict) and not (isinstance(value, list) and len(value) > 8)
    )
    badge = None
    if reward is not None:
        side = "" if middle is None else " good" if reward > middle else " bad"
        badge = tag("span", short(reward), class_=f"reward{side}", title="reward")
    return tag(
        "div",
        tag("div", badge, tag("span", _clipped(facts, 200), class_="unit"), class_="bar-line"),
        tag("pre", _clipped(str(sample.get("response", "")))),
        class_="response",
    )


def _reward(sample: Sample) -> float | None:
    reward = as_number(sample.get("reward"))
    return None if reward is None else float(reward)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _versions(spans: Any) -> str:
    """``[[3, 10], [4, 2]]``, the first 10 tokens by version 3 and 2 by version 4, as ``weight version 3, then 4``."""
    try:
        return f"weight version {', then '.join(str(version) for version, _ in spans)}"
    except (TypeError, ValueError):
        return f"version spans {_plain(spans)}"


def _clipped(characters: str, most: int = CHARACTERS) -> Html | str:
    left = len(characters) - most
    return join(characters[:most], tag("em", f" … {left} more characters")) if left > 0 else characters
