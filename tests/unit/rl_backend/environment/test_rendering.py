"""What a chat template puts behind a turn, and which tokens its sampled end stands for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.environment.conversation import Conversation, chat_format, id_format
from rl_backend.environment.rendering import ChatRenderer, HistoryCheck, check_history, closing_length
from tests.support.chat_templates import CHATML, MISTRAL, THINKING, chat_tokenizer

CALLS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}"
    "{% if message.tool_call_id is defined %} {{ message.tool_call_id }}{% endif %}{{ '\n' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call {{ call.id }}>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if tools %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "And?"}


def renderer(template: str = CHATML, *tools: Any, **variables: Any) -> ChatRenderer:
    return ChatRenderer(chat_tokenizer(template), variables, tools)


def id_of(mine: ChatRenderer, token: str) -> int:
    return int(mine.tokenizer.convert_tokens_to_ids(token))


def test_what_is_behind_a_turn_begins_with_its_end() -> None:
    mine = renderer()
    expected = "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    assert mine.behind([QUESTION]) == expected
    assert mine.behind([QUESTION, {"role": "system", "content": "s"}]).count("<|im_start|>") == 3
    assert mine.text([QUESTION], generation_prompt=False) == "<|im_start|>user\nAnd?<|im_end|>\n"
    shut = renderer(THINKING, enable_thinking=False)
    assert shut.behind([QUESTION]).endswith("<think>\n\n</think>\n\n")


def test_each_call_has_the_id_of_its_own_result() -> None:
    mine = renderer(CALLS)
    results = [{"role": "tool", "content": str(each), "tool_call_id": f"id{each}"} for each in range(3)]
    rest = mine.behind_calls(["add", "sub"], [*results[:2], QUESTION])
    assert rest.startswith('"}</call><|im_end|>\n<|im_start|>tool id0\n0') and "user\nAnd?" in rest
    seen: list[Any] = []
    text = mine.text

    class Seen(ChatRenderer):
        def text(self, messages: Any, **options: Any) -> str:
            seen.append(messages)
            return text(messages, **options)

    Seen(mine.tokenizer).behind_calls(["add", "sub", "mul"], results[:2])
    calls = seen[-1][1]["tool_calls"]
    assert [each["function"]["name"] for each in calls] == ["add", "sub", "mul"]
    assert [each.get("id") for each in calls] == ["id0", "id1", None]
    assert Seen(mine.tokenizer).calls_end(["add"], results) == '"}</call><|im_end|>\n'
    assert len(seen[-1]) == 2, "nothing follows the calls"
    Seen(mine.tokenizer).behind_calls(["add"], [{"role": "tool", "content": "no id"}])
    assert "id" not in seen[-1][1]["tool_calls"][0]


@pytest.mark.parametrize(
    ("template", "what"),
    [(CHATML.replace("{{ message.content }}", "x"), "leaves out"), (CHATML + "{{ messages[1].content }}", "repeats")],
)
def test_a_template_that_leaves_out_or_repeats_a_turn_is_refused(template: str, what: str) -> None:
    with pytest.raises(BatchError, match=rf"models/mine {what} what the model writes when user, tool follows"):
        renderer(template).behind([QUESTION, {"role": "tool", "content": "x"}])


def test_an_end_is_found_behind_white_space_alone() -> None:
    mine = renderer()
    end, other = id_of(mine, "<|im_end|>"), id_of(mine, "</s>")
    space, word = mine.encode(" \n"), mine.encode("a")
    assert closing_length([end, *space], end, mine) == 1
    assert closing_length([*space, end, end], end, mine) == len(space) + 1
    assert closing_length([*word, end], end, mine) is None
    assert closing_length([other, end], end, mine) is None
    assert closing_length(space, end, mine) is None and closing_length([], end, mine) is None


def test_tools_are_those_of_the_copy_alone() -> None:
    mine = renderer(CALLS)
    shown = mine.with_tools([TOOL])
    assert shown.tools == (TOOL,) and mine.tools == () and shown.tokenizer is mine.tokenizer
    with pytest.raises(ConfigError, match="does not read them"):
        renderer().with_tools([TOOL]).text([QUESTION])


def test_what_a_template_does_with_the_past_is_found_out() -> None:
    assert check_history(renderer()) == HistoryCheck()
    thinking = check_history(renderer(THINKING)).changes
    assert any("an answer with thinking, once a question follows it" in each for each in thinking)
    with_tools = check_history(renderer(CALLS, TOOL))
    assert with_tools.results_behind_text and with_tools.results_behind_calls and with_tools.changes == ()
    no_results = CALLS.replace("{{ message.content }}", "{% if message.role != 'tool' %}{{ message.content }}{% endif %}")
    with pytest.raises(ConfigError, match=r"tools=\['add'\]: the chat template of models/mine does not render messages of"):
        check_history(renderer(no_results, TOOL))
    with pytest.raises(ConfigError, match=r"model='models/mine': its chat template cannot be used for several turns"):
        check_history(renderer(CHATML.replace("{{ message.content }}", "x")))


def test_only_turns_with_calls_count_where_a_template_writes_calls() -> None:
    followed = "not loop.last and messages[loop.index].role == 'tool'"
    changed = "{% if message.role == 'assistant' and not message.tool_calls and " + followed + " %}!{% endif %}"
    check = check_history(renderer(CALLS.replace("{{ message.content }}", changed + "{{ message.content }}"), TOOL))
    assert check.changes == () and check.results_behind_text and check.results_behind_calls


def test_a_template_that_drops_calls_before_questions_says_so() -> None:
    later = "{% if loop.last or messages[loop.index].role == 'tool' and messages[-1].role == 'tool' %}"
    template = CALLS.replace("{% for call", later + "{% for call").replace(
        "</call>{% endfor %}", "</call>{% endfor %}{% endif %}"
    )
    check = check_history(renderer(template, TOOL))
    assert list(check.changes) == ["a call of a tool, once a question follows its result"]
    with pytest.raises(ConfigError, match="history=None: the chat template of models/mine does not leave earlier turns"):
        chat_format(renderer(template, TOOL))


@pytest.mark.parametrize("changes", [(), ("an answer, once a question follows it", "a turn")])
def test_a_choice_is_needed_only_where_the_past_changes(changes: tuple[str, ...]) -> None:
    check = HistoryCheck(changes)
    assert [check.choose(each, "m") for each in ("keep", "branch")] == ["keep", "branch"]
    if not changes:
        assert check.choose(None, "m") == "keep"
        return
    with pytest.raises(ConfigError, match=r"^history=None: the chat template of m .*: an answer, .* it; a turn\. Set keep"):
        check.choose(None, "m")


def test_tokens_that_end_turns_are_those_of_tokenizer_template_and_run_once_each() -> None:
    mine = renderer()
    eos, end, eot = (id_of(mine, each) for each in ("</s>", "<|im_end|>", "<|eot_id|>"))
    assert chat_format(mine).stop_token_ids == (eos, end)
    assert chat_format(mine, stop_token_ids=[eot, end]).stop_token_ids == (eos, end, eot)
    assert id_format(mine, [eot, eos]).stop_token_ids == (eos, eot)
    assert chat_format(renderer(MISTRAL), history="keep").stop_token_ids == (eos,)
    made = chat_format(mine, history="branch", other_end="keep")
    assert (made.history, made.other_end, made.check) == ("branch", "keep", HistoryCheck())
    assert (id_format(mine).history, id_format(mine).other_end) == ("keep", "replace")
    calls = CALLS.replace("</call>{% endfor %}", "</call><|eot_id|>{% endfor %}")
    assert chat_format(renderer(calls, TOOL), history="keep").stop_token_ids == (eos, end)


def test_a_prompt_of_ids_is_its_own_past() -> None:
    mine = Conversation(id_format(renderer()))
    given = mine.format.renderer.encode("abc")
    assert mine.start_with_ids(tuple(given)) == given
    assert mine.add_turn([*mine.format.renderer.encode("d"), id_of(mine.format.renderer, "</s>")], "stop") == "d"
    assert mine.messages == [{"role": "assistant", "content": "d"}]
    assert mine.token_ids[: len(given)] == given and given == mine.format.renderer.encode("abc")
    other = Conversation(id_format(renderer()))
    assert other.messages == [] and other.token_ids == [], "conversations share nothing"


def test_messages_that_are_given_are_not_added_to() -> None:
    mine = Conversation(chat_format(renderer()))
    first = [{"role": "user", "content": "2+2?"}]
    mine.start(first)
    mine.add_turn([*mine.format.renderer.encode("4"), id_of(mine.format.renderer, "<|im_end|>")], "stop")
    mine.go_on([QUESTION])
    assert first == [{"role": "user", "content": "2+2?"}]
    assert json.dumps(mine.messages) == json.dumps([*first, {"role": "assistant", "content": "4"}, QUESTION])
