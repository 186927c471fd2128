"""Samples in a report: the model's first and last responses."""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from markupsafe import Markup

from rl_backend.lab.picture import render
from rl_backend.lab.report.run_data import Sample
from rl_backend.lab.text import as_number, short

PROMPTS, RESPONSES, CHARACTERS = 6, 3, 1500
TEXTS = ("prompt", "response", "reward", "step", "turns", "segments")


def draw_samples(kind: str, first: Sequence[Sample], last: Sequence[Sample]) -> Markup:
    """Two columns; prompts that both steps have come first, side by side, those with the largest change of reward on top.

    Args:
        kind: the title, for example "Samples".
    """
    before, after = _by_prompt(first), _by_prompt(last)
    shared = [prompt for prompt in before if prompt in after]
    shared.sort(key=lambda prompt: -abs(_mean_reward(after[prompt]) - _mean_reward(before[prompt])))
    left = [*shared, *(prompt for prompt in before if prompt not in after)][:PROMPTS]
    right = [*shared, *(prompt for prompt in after if prompt not in before)][:PROMPTS]
    # Between the lowest and the highest reward, for the colours; None when there is nothing to tell apart.
    rewards = _rewards([*first, *last], finite=True)
    middle = (min(rewards) + max(rewards)) / 2 if rewards and min(rewards) < max(rewards) else None
    columns = [(left, before), (right, after)] if last else [(left, before)]
    rows = zip_longest(*([_cell(prompt, of[prompt], middle) for prompt in prompts] for prompts, of in columns))
    if not last:
        note = "All samples are of one step."
    elif shared:
        note = f"Of {len(shared)} prompts that both steps had, those whose rewards changed most."
    else:
        note = "The two steps had no prompt in common."
    if any(len(responses) > 1 for responses in before.values()):
        note += f" Of each prompt: its best, its middle and its worst of up to {RESPONSES} responses."
    heads = [(_step(samples), f"{len(samples)} samples{_mean_text(samples)}") for samples in (first, last) if samples]
    return render("samples.html", kind=kind, both=bool(last), note=note, heads=heads, rows=rows, most=CHARACTERS)


def _by_prompt(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(str(sample.get("prompt", "")), []).append(sample)
    return found


def _rewards(samples: Sequence[Sample], *, finite: bool = False) -> list[float]:
    rewards = (as_number(sample.get("reward")) for sample in samples)
    return [reward for reward in rewards if reward is not None and (not finite or math.isfinite(reward))]


def _mean_reward(samples: Sequence[Sample]) -> float:
    rewards = _rewards(samples, finite=True)
    return sum(rewards) / len(rewards) if rewards else 0.0


def _mean_text(samples: Sequence[Sample]) -> str:
    rewards = _rewards(samples)
    return f", mean reward {short(sum(rewards) / len(rewards))}" if rewards else ""


def _step(samples: Sequence[Sample]) -> str:
    step = samples[0].get("step")
    return "Before the first step" if step == 0 else f"Step {step}"


def _cell(prompt: str, samples: Sequence[Sample], middle: float | None) -> dict[str, Any]:
    rewards = _rewards(samples)
    ordered = sorted(samples, key=lambda sample: -(as_number(sample.get("reward")) or 0.0))
    if len(ordered) > RESPONSES:
        # Best, middle and worst.
        ordered = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
    return {
        "step": _step(samples),
        "mean": f"mean of {len(rewards)}: {short(sum(rewards) / len(rewards))}" if len(rewards) > 1 else None,
        "prompt": prompt,
        "responses": [_response(sample, middle) for sample in ordered],
    }


def _response(sample: Sample, middle: float | None) -> dict[str, Any]:
    reward = as_number(sample.get("reward"))
    facts = ", ".join(
        _versions(value) if name == "version_spans" else f"{name.replace('_', ' ')} {_plain(value)}"
        for name, value in [*sample.items(), *_reward_info(sample)]
        if name not in TEXTS and not isinstance(value, dict) and not (isinstance(value, list) and len(value) > 8)
    )
    side = "" if middle is None or reward is None else " good" if reward > middle else " bad"
    return {
        "reward": reward,
        "side": side,
        "facts": facts,
        "text": str(sample.get("response", "")),
        "segments": _segments(sample),
        "turns": _turns(sample),
    }


def _segments(sample: Sample) -> list[list[tuple[str, bool]]]:
    """Of an episode: text and whether it was trained, piece by piece; the whole history, as a sequence has it."""
    segments = sample.get("segments")
    return [
        [(str(piece[0]), bool(piece[1])) for piece in segment if isinstance(piece, list) and len(piece) == 2]
        for segment in (segments if isinstance(segments, list) else ())
        if isinstance(segment, list)
    ]


def _turns(sample: Sample) -> list[str]:
    """Of an episode: what its tools were asked and answered, and what turns were rewarded with."""
    turns = sample.get("turns")
    found = []
    for number, turn in enumerate((each for each in turns if isinstance(each, dict)) if isinstance(turns, list) else (), 1):
        calls = turn.get("calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                asked = f"{call.get('name') or '?'}({_plain(call.get('arguments'))})"
                found.append(f"turn {number}: {asked} → {call.get('status')}: {call.get('answer')}")
        reward = as_number(turn.get("reward"))
        if reward:
            found.append(f"turn {number}: reward {short(reward)}")
    return found


def _reward_info(sample: Sample) -> Iterator[tuple[str, Any]]:
    """What reward functions returned beside their scores; of several functions with names."""
    info = sample.get("reward_info")
    for name, value in info.items() if isinstance(info, dict) else ():
        if isinstance(value, dict):
            yield from ((f"{name} {key}", each) for key, each in value.items())
        else:
            yield name, value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _versions(spans: Any) -> str:
    """``[[3, 10], [4, 2]]``, the first 10 tokens by version 3 and 2 by version 4, as ``weight version 3, then 4``."""
    try:
        return f"weight version {', then '.join(str(version) for version, _ in spans)}"
    except (TypeError, ValueError):
        return f"version spans {_plain(spans)}"
