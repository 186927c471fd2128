"""The text of tokens is the same whoever is told it, with tokenizers that take spaces out of what they decode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.collect.held_out import HeldOutEpisodes, HeldOutResult, HeldOutSet
from actors.collect.sample_metrics import score
from actors.collect.transcripts import describe_episodes, describe_samples, transcript
from rl_backend.data.chat_template import decode
from rl_backend.data.examples import PromptExample
from rl_backend.data.prompts import Prompt
from rl_backend.data.rewards import RewardConfig
from rl_backend.environment import Turn
from rl_backend.environment.rendering import ChatRenderer
from rl_backend.environment.reward_environment import answering
from tests.support.claims import ROOT
from tests.support.episodes import episode, segment

TEXT = "x != ' ' and y , z do n't ."
END = "</s>"
REWARD = (
    "def seen(data_source, solution_str, ground_truth, extra_info=None):\n    return {'score': 1, 'text': solution_str}\n"
)


def cleaning_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """One that is saved with ``clean_up_tokenization_spaces``, of which transformers spares byte-level BPE alone."""
    characters = sorted(set(TEXT.replace(" ", "")))
    words = [END, "<unk>", "\u2581", *characters]
    model: Any = models.Unigram([(word, -1.0) for word in words], unk_id=1)
    if kind == "BPE":
        model = models.BPE({word: place for place, word in enumerate(words)}, [], unk_token="<unk>")
    if kind == "WordLevel":
        model = models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>")
    made = Tokenizer(model)
    metaspace: Any = pre_tokenizers.Metaspace(prepend_scheme="never")
    characters_alone = pre_tokenizers.Split(pattern="", behavior="isolated")
    made.pre_tokenizer = metaspace if kind != "WordLevel" else pre_tokenizers.Sequence([metaspace, characters_alone])  # type: ignore[assignment]
    made.decoder = decoders.Metaspace(prepend_scheme="never")  # type: ignore[assignment]
    made.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    forced = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, unk_token="<unk>", clean_up_tokenization_spaces=True, **forced
    )


@pytest.fixture(params=["Unigram", "WordLevel", "BPE"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    found = cleaning_tokenizer(request.param)
    ids = found.encode(TEXT, add_special_tokens=False)
    assert found.decode(ids) != TEXT == decode(ids, found), "the tokenizer itself takes spaces out"
    return found


@pytest.fixture
def reward(tmp_path: Path) -> RewardConfig:
    (tmp_path / "my_reward.py").write_text(REWARD)
    return RewardConfig(functions=f"{tmp_path / 'my_reward.py'}:seen")


def sampled(tokenizer: Any) -> list[int]:
    return [*tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.eos_token_id]


@pytest.mark.shows("rewards: the text that is judged and logged is the text that was sampled, in every kind of sample")
def test_responses_are_judged_and_logged_as_they_were_sampled(tokenizer: Any, reward: RewardConfig) -> None:
    ids = sampled(tokenizer)
    sample: Any = SimpleNamespace(prompt_ids=ids[:-1], response_ids=ids, version_spans=[], finish_reason="stop")
    prompt = Prompt(PromptExample(TEXT, "4", "d"), ids[:-1])
    with reward.load() as scorer:
        scores = score([sample], [prompt], tokenizer, scorer)
    assert scores[0].info["text"] == TEXT
    (line,) = describe_samples([sample], [prompt], scores, tokenizer)
    assert (line["prompt"], line["response"]) == (TEXT, TEXT + END)
    held_out: Any = SimpleNamespace(name="s", prompts=[prompt], sampling=SimpleNamespace(n=1))
    (line,) = HeldOutResult(held_out, [sample], scores).lines(tokenizer)
    assert (line["prompt"], line["response"]) == (TEXT, TEXT + END)


def test_episodes_are_judged_and_logged_as_they_were_sampled(tokenizer: Any, reward: RewardConfig) -> None:
    ids = sampled(tokenizer)
    with reward.load() as scorer:
        environment: Any = answering(scorer, tokenizer)({"prompt": TEXT, "ground_truth": "4"}, 0)
        environment.start()
        seen: list[str] = []
        scorer.begin = _telling(scorer.begin, seen)  # type: ignore[method-assign]
        environment.step(Turn(None, ids, [0.0] * len(ids), "stop"))
    assert seen == [TEXT]
    assert ChatRenderer(tokenizer).decode(ids) == TEXT + END
    turn = Turn(None, ids, [0.0] * len(ids), "stop")
    played = replace(episode(segment([("given", ids[:-1]), ("sampled", ids)])), turns=[turn])
    (line,) = describe_episodes([played], tokenizer)
    assert (line["prompt"], line["response"], line["turns"][0]["text"]) == (TEXT, TEXT + END, TEXT + END)
    assert line["segments"] == [[[TEXT, False], [TEXT + END, True]]]
    assert f"{TEXT}[{TEXT}{END}]" in transcript(played, tokenizer)
    held_out = HeldOutEpisodes(HeldOutSet("s", [], None, (1,)), (), [], [played])  # type: ignore[arg-type]
    assert held_out.lines(tokenizer)[0]["response"] == TEXT + END


def test_special_tokens_are_left_out_where_nobody_asks_for_them(tokenizer: Any) -> None:
    assert decode(sampled(tokenizer), tokenizer, special=False) == TEXT
    assert decode(tuple(sampled(tokenizer)), tokenizer) == TEXT + END


def _telling(begin: Any, seen: list[str]) -> Any:
    def told(calls: Sequence[Any]) -> Any:
        seen.extend(call.solution_str for call in calls)
        return begin(calls)

    return told


def test_nobody_else_decodes() -> None:
    """Whatever becomes text goes through :func:`decode`."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("actors", "rl_backend", "adapters", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"tokenizer\.(batch_)?decode\(", line)
    ]
    assert len(found) == 1 and found[0].startswith("rl_backend/data/chat_template.py")
