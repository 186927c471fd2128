from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rl_backend.environment import Generation
from rl_backend.environment.conversation import Conversation, chat_format
from rl_backend.environment.rendering import ChatRenderer
from rl_backend.environment.sampler import EpisodeRecord
from tests.support.chat_templates import CHATML, MISTRAL, THINKING, chat_tokenizer
from tests.support.token_sources import WrittenSource, generation
from tests.unit.rl_backend.environment.test_stepping import CALL, TOKENIZER, Calculator, Guess, play, written

FIRST = [{"role": "user", "content": "2+2?"}]
NEXT = [{"role": "user", "content": "3+3?"}]


def conversation(template: str = CHATML, **options: Any) -> Conversation:
    return Conversation(chat_format(ChatRenderer(chat_tokenizer(template)), **options))


def id_of(conversation: Conversation, token: str) -> int:
    return int(conversation.format.renderer.tokenizer.convert_tokens_to_ids(token))


def played(conversation: Conversation, turn: list[int], finish: Any) -> EpisodeRecord:
    """The record of two turns, the second of one token."""
    record = EpisodeRecord()
    record.add(conversation.start(FIRST), generation(turn))
    conversation.add_turn(turn, finish)
    record.add(conversation.go_on(NEXT), generation([id_of(conversation, "<|im_end|>")]))
    return record


@pytest.mark.shows("environments: an end that was sampled is trained, one that was added after a cut is masked")
def test_the_end_of_a_turn_is_trained_if_it_was_sampled() -> None:
    mine = conversation()
    end, written = id_of(mine, "<|im_end|>"), mine.format.renderer.encode("It is 4.")
    stopped, cut = (
        played(conversation(), [*written, end], "stop").segments(),
        played(conversation(), written, "length").segments(),
    )
    assert len(stopped) == len(cut) == 1
    assert stopped[0].token_ids == cut[0].token_ids, "both read as the template has it"
    place = len(mine.start(FIRST)) + len(written)
    assert stopped[0].token_ids[place] == end
    assert stopped[0].sampled[place] and not cut[0].sampled[place]
    assert stopped[0].sampled[:place] == cut[0].sampled[:place]
    assert not any(stopped[0].sampled[place + 1 : -1]), "white space and the next question were not sampled"


@pytest.mark.shows("environments: another stop token than the template's begins a new segment, or stays, as chosen")
def test_another_end_than_the_templates() -> None:
    replaced, kept = conversation(), conversation(other_end="keep")
    other, own = id_of(replaced, "</s>"), id_of(replaced, "<|im_end|>")
    assert {other, own} <= set(replaced.format.stop_token_ids)
    turn = [*replaced.format.renderer.encode("It is 4."), other]
    first, second = played(replaced, turn, "stop").segments()
    assert first.token_ids[-1] == other and first.sampled[-1]
    (segment,) = played(kept, turn, "stop").segments()
    place = len(first.token_ids) - 1
    assert second.token_ids[place] == own and segment.token_ids[place] == other
    assert second.token_ids[:place] == segment.token_ids[:place]
    assert second.token_ids[place + 1 :] == segment.token_ids[place + 1 :]
    assert sum(second.sampled) == 1 and sum(segment.sampled) == len(turn) + 1


@pytest.mark.shows(
    "environments: what a stop string, or a stop token that is text, ends stays text; the template's end follows"
)
@pytest.mark.parametrize("other_end", ["replace", "keep"])
@pytest.mark.parametrize("history", ["keep", "branch"])
@pytest.mark.parametrize("by_id", [False, True])
def test_an_end_that_is_text_stays_in_the_turn(other_end: Any, history: Any, by_id: bool) -> None:
    mine = conversation(other_end=other_end, history=history)
    turn = mine.format.renderer.encode("It is 4;")
    if by_id:
        mine = conversation(other_end=other_end, history=history, stop_token_ids=turn[-1:])
    prompt = mine.start(FIRST)
    assert mine.add_turn(turn, "stop") == "It is 4;"
    following = mine.go_on(NEXT)
    assert following[: len(prompt) + len(turn)] == [*prompt, *turn] and mine.branches == 0
    assert following[len(prompt) + len(turn)] == id_of(mine, "<|im_end|>")
    assert len(played(mine, turn, "stop").segments()) == 1


def test_white_space_before_the_templates_end_is_not_given_twice() -> None:
    spaced = MISTRAL.replace("{{ message.content }}{{ eos_token }}", "{{ message.content }} {{ eos_token }}")
    mine = conversation(spaced, history="keep")
    turn = [*mine.format.renderer.encode("4"), id_of(mine, "</s>")]
    prompt = mine.start(FIRST)
    mine.add_turn(turn, "stop")
    assert mine.go_on(NEXT) == [*prompt, *turn, *mine.format.renderer.encode("[INST] 3+3? [/INST]")]


@pytest.mark.shows("environments: ids that text does not encode to are kept as they were sampled")
def test_ids_that_encoding_would_change_stay() -> None:
    mine = conversation()
    renderer = mine.format.renderer
    odd = [renderer.encode(each)[0] for each in "think"]
    assert renderer.encode(renderer.decode(odd)) != odd, "a tokenizer that would hide the mistake"
    turn = [*odd, id_of(mine, "<|im_end|>")]
    prompt = mine.start(FIRST)
    assert mine.add_turn(turn, "stop") == "think"
    assert mine.go_on(NEXT)[: len(prompt) + len(turn)] == [*prompt, *turn]


def test_thinking_is_kept_or_the_segment_branches() -> None:
    text = "<think>\nhm\n</think>\n\n4"
    for history, segments in (("keep", 1), ("branch", 2)):
        mine = conversation(THINKING, history=history)
        turn = [*mine.format.renderer.encode(text), id_of(mine, "<|im_end|>")]
        found = played(mine, turn, "stop").segments()
        assert len(found) == segments and mine.branches == segments - 1
        assert ("hm" in mine.format.renderer.decode(mine.token_ids)) == (history == "keep")
        assert sum(sum(segment.sampled) for segment in found) == len(turn) + 1


def test_a_turn_that_the_template_does_not_change_does_not_branch() -> None:
    mine = conversation(THINKING, history="branch")
    odd = [mine.format.renderer.encode(each)[0] for each in "think"]
    assert len(played(mine, [*odd, id_of(mine, "<|im_end|>")], "stop").segments()) == 1


def test_a_history_that_begins_anew() -> None:
    mine = conversation()
    record = EpisodeRecord()
    record.add(mine.start(FIRST), generation([5]))
    mine.add_turn([5], "length")
    record.add(mine.start(NEXT), generation([6]))
    assert mine.messages == NEXT and len(record.segments()) == 2


def test_a_call_that_a_stop_string_ends_is_read() -> None:
    class Stops(WrittenSource):
        async def generate(self, token_ids: Sequence[int], **options: Any) -> Generation:
            found = await super().generate(token_ids, **options)
            return replace(found, finish="stop")  # as an engine that found its text

    Guess.made = []
    source = Stops(written(CALL, "4", ended=False).write)
    episode = play(Calculator, source)
    assert [call.status for call in episode.turns[0].calls] == ["ok"] and episode.reward == 1.0
    assert len(episode.segments) == 1 and "</tool_call><|im_end|>" in TOKENIZER.decode(source.prompts[1])
