"""Samples as lines of ``samples.jsonl`` and ``held_out.jsonl``: responses, or turns, tool calls and what was trained."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from actors.rollout.messages import Sample
from rl_backend.data.chat_template import decode
from rl_backend.data.prompts import Prompt
from rl_backend.data.rewards import Score
from rl_backend.data.rewards.function import for_json
from rl_backend.environment import Episode, Segment, ToolCall, Turn

STATUS_OK = "ok"
_DEEPEST = 32


def describe_samples(
    samples: Sequence[Sample], prompts: Sequence[Prompt], scores: Sequence[Score], tokenizer: Any
) -> list[dict[str, Any]]:
    """Lines of ``samples.jsonl``; ``version_spans`` are (weight version, tokens) in the order of the response."""
    return [
        {
            "prompt": decode(sample.prompt_ids, tokenizer),
            "response": decode(sample.response_ids, tokenizer),
            "reward": score.value,
            "ground_truth": for_json(prompt.example.ground_truth),
            "version_spans": [list(span) for span in sample.version_spans],
            "finish_reason": sample.finish_reason,
            **({"reward_info": dict(score.info)} if score.info else {}),
            **({"reward_failures": list(score.failures)} if score.failures else {}),
        }
        for sample, prompt, score in zip(samples, prompts, scores, strict=True)
    ]


def describe_episodes(episodes: Iterable[Episode], tokenizer: Any, *, dropped: bool = False) -> list[dict[str, Any]]:
    """A line for each episode: ``prompt`` is its first, ``response`` what follows in its last segment.

    ``turns`` has for each turn the messages before it (``given``), what the model wrote (``text``), its ``calls``,
    ``reward`` and ``finish``; ``segments`` for each sequence its pieces of text, as ``[text, trained]``.
    """
    return [_line(episode, tokenizer, dropped) for episode in episodes]


def _line(episode: Episode, tokenizer: Any, dropped: bool) -> dict[str, Any]:
    pieces = [_pieces(segment, tokenizer) for segment in episode.segments]
    first = pieces[0][0][0] if pieces else ""
    last = pieces[-1] if pieces else []
    return {
        "prompt": first,
        "response": "".join(text for text, _ in (last[1:] if len(pieces) == 1 else last)),
        "reward": episode.reward,
        "stop": episode.stop,
        **({"error": episode.error} if episode.error else {}),
        **({"dropped": True} if dropped else {}),
        "version_spans": _version_spans(episode),
        "turns": [_turn(turn, tokenizer) for turn in episode.turns],
        "segments": pieces,
        "metrics": dict(episode.metrics),
    }


def _turn(turn: Turn, tokenizer: Any) -> dict[str, Any]:
    return {
        "given": [{"role": str(each.get("role", "")), "content": _text(each.get("content"))} for each in turn.given],
        "text": decode(turn.token_ids, tokenizer),
        "calls": [_call(call) for call in turn.calls],
        "reward": turn.reward,
        "finish": turn.finish,
    }


def _call(call: ToolCall) -> dict[str, Any]:
    written = {"raw": call.raw} if call.status != STATUS_OK else {}
    return {
        "name": call.name,
        "arguments": _as_json(call.arguments),
        "status": call.status,
        "answer": call.answer,
        **written,
    }


def _as_json(value: Any, depth: int = 0) -> Any:
    # What a model wrote, by whatever parser: values that JSON does not have, and nesting as deep as it likes.
    nested = isinstance(value, Mapping | list | tuple)
    if nested and depth == _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        return {str(name): _as_json(each, depth + 1) for name, each in value.items()}
    if nested:
        return [_as_json(each, depth + 1) for each in value]
    return value if value is None or isinstance(value, str | int | float) else repr(value)


def _pieces(segment: Segment, tokenizer: Any) -> list[list[Any]]:
    # Each run is decoded by itself, so that a reader sees where training begins; the first was given.
    runs = groupby(zip(segment.token_ids, segment.sampled, strict=True), key=lambda pair: bool(pair[1]))
    return [[decode([token for token, _ in run], tokenizer), trained] for trained, run in runs]


def _version_spans(episode: Episode) -> list[list[int]]:
    versions = (version for turn in episode.turns for version in turn.versions)
    return [[version, len(list(run))] for version, run in groupby(versions)]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else str(content)


def transcript(episode: Episode, tokenizer: Any) -> str:
    """An episode for people."""
    (line,) = describe_episodes([episode], tokenizer)
    shown = []
    for number, turn in enumerate(line["turns"], 1):
        shown += [f"{each['role']}: {each['content']}" for each in turn["given"]]
        shown.append(f"model, turn {number} ({turn['finish']}, reward {turn['reward']:g}): {turn['text']}")
        shown += [
            f"  {each['name'] or '?'}({each['arguments']}) -> {each['status']}: {each['answer']}" for each in turn["calls"]
        ]
    reason = f": {episode.error}" if episode.error else ""
    shown.append(f"ended: {episode.stop}{reason}; reward {episode.reward:g} in {len(episode.turns)} turns")
    trained = "".join(f"[{text}]" if chosen else text for segment in line["segments"] for text, chosen in segment)
    return "\n".join([*shown, f"trained tokens in brackets: {trained}"])
