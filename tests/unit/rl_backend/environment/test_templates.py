"""Every chat template that TRL ships: what is put behind a turn equals the whole conversation rendered, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rl_backend.contracts import ConfigError
from rl_backend.environment.conversation import ChatFormat, Conversation, chat_format
from rl_backend.environment.rendering import ChatRenderer
from tests.support.chat_templates import marker_tokenizer, trl_templates

TEMPLATES = trl_templates()
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "a number"}},
            "required": ["x"],
        },
    },
}
NEEDS_PARTS = {"idefics3", "llava_next", "smolvlm"}
"""Of models that see images: they take content as parts alone."""
NO_TOOLS = {
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "llama3", "llava_next", "phi3",
    "phi3_5", "qwen2_5_vl", "smolvlm",
}  # fmt: skip
CHANGES_ANSWERS = {
    "glm4moe", "glm4moe_training", "gptoss", "gptoss_training", "muse_glimmer", "muse_glimmer_training", "qwen3_5_nothink",
    "qwen3_training",
}  # fmt: skip
"""They render an answer without thinking otherwise than it was sampled, once another question follows."""
FIRST = {"role": "user", "content": "What is 2+2?"}
NEXT = {"role": "user", "content": "And 3+3?"}


def renderer(name: str, *tools: dict[str, Any]) -> ChatRenderer:
    day = {"strftime_now": "2026-01-31"} if "strftime_now" in TEMPLATES[name] else {}
    return ChatRenderer(marker_tokenizer(TEMPLATES[name]), day, tools)


def base(name: str) -> str:
    return name.removesuffix("_training")


def made(name: str, *tools: dict[str, Any], history: Any = None) -> ChatFormat:
    try:
        return chat_format(renderer(name, *tools), history=history)
    except ConfigError as error:
        if error.details["field"] != "history" or history is not None:
            raise
        return chat_format(renderer(name, *tools), history="keep")


def ended(format: ChatFormat, text: str) -> list[int]:
    """A turn with the token by which its template ends it."""
    end = format.stop_token_ids[1] if len(format.stop_token_ids) > 1 else format.stop_token_ids[0]
    return [*format.renderer.encode(text), end]


def test_all_templates_are_there() -> None:
    assert len(TEMPLATES) == 72 and {"qwen3", "gptoss", "deepseekv3", "glm4moe", "llama3_1"} <= TEMPLATES.keys()


@pytest.mark.shows(
    "environments: for every chat template of TRL, ids behind a turn equal the whole rendered, or it is refused"
)
@pytest.mark.parametrize("name", [name for name in TEMPLATES if base(name) not in NEEDS_PARTS])
def test_a_question_behind_an_answer_is_what_the_whole_conversation_has(name: str) -> None:
    format = made(name)
    changes = [each for each in format.check.changes if each == "an answer, once a question follows it"]
    assert bool(changes) == (name in CHANGES_ANSWERS)
    thinks = format.renderer.text([FIRST]).rstrip().endswith("<think>")
    answer = "hm\n</think>\n\nIt is 4." if thinks else "It is 4."
    conversation = Conversation(format)
    prompt = conversation.start([FIRST])
    turn = ended(format, answer)
    assert conversation.add_turn(turn, "stop") == answer
    after = conversation.go_on([NEXT])
    assert after[: len(prompt) + len(turn)] == [*prompt, *turn]
    assert "And 3+3?" in format.renderer.decode(after[len(prompt) + len(turn) :])
    whole = format.renderer.text([FIRST, {"role": "assistant", "content": answer}, NEXT])
    stable = not changes and not (thinks and format.check.changes)
    assert (after == format.renderer.encode(whole)) == stable


@pytest.mark.parametrize("name", [name for name in TEMPLATES if base(name) not in NEEDS_PARTS])
def test_a_template_that_changes_the_past_is_refused_until_one_says_what_to_do(name: str) -> None:
    found = renderer(name)
    format = made(name)
    if not format.check.changes:
        assert chat_format(found).history == "keep"
        return
    with pytest.raises(ConfigError, match="does not leave earlier turns as they were sampled: an answer"):
        chat_format(found)
    branching = Conversation(made(name, history="branch"))
    prompt = branching.start([FIRST])
    thought = "hm\n</think>\n\nIt is 4."
    if not format.renderer.text([FIRST]).rstrip().endswith("<think>"):
        thought = f"<think>\n{thought}"
    turn = ended(format, thought)
    branching.add_turn(turn, "stop")
    after = branching.go_on([NEXT])
    assert after == found.encode(found.text([FIRST, {"role": "assistant", "content": thought}, NEXT]))
    kept = after[: len(prompt) + len(turn)] == [*prompt, *turn]
    assert branching.branches == (not kept)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if base(name) in NEEDS_PARTS])
def test_a_template_that_takes_no_text_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"its chat template cannot be used for several turns: .*(leaves out|refuses)"):
        chat_format(renderer(name))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_result_of_a_tool_behind_a_call_is_what_the_whole_conversation_has(name: str) -> None:
    if base(name) in NO_TOOLS:
        with pytest.raises(ConfigError, match=r"tools=.*does not read them"):
            chat_format(renderer(name, TOOL))
        return
    format = made(name, TOOL)
    mine = format.renderer
    result = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "abcdefgh1"}
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "add", "arguments": {"x": "2"}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    if not format.check.results_behind_calls:
        assert name.startswith("lfm2") and format.check.results_behind_text
        calling = {"role": "assistant", "content": "[add(x=2)]"}
    whole, prompt = mine.text([FIRST, calling, result]), mine.text([FIRST])
    conversation = Conversation(format)
    start = conversation.start([FIRST])
    if not whole.startswith(prompt):
        assert "a call of a tool, once its result follows it" in format.check.changes
        written = "<tool_call>x</tool_call>"
    else:
        end = mine.text([FIRST, calling], generation_prompt=False).rstrip()[-12:]
        written = whole[len(prompt) : whole.index(end, len(prompt)) + len(end)]
    turn = mine.encode(written)
    if turn[-1] not in format.stop_token_ids:  # GLM's end is the next marker
        turn.append(
            next(
                each
                for each in format.stop_token_ids
                if "observation" in mine.decode([each]) or "end" in mine.decode([each])
            )
        )
    conversation.add_turn(turn, "stop")
    after = conversation.go_on([result], {**calling})
    assert after[: len(start) + len(turn)] == [*start, *turn]
    behind = mine.decode(after[len(start) + len(turn) :])
    assert "4" in behind and behind.count("4") == 1
    if whole.startswith(prompt):
        assert mine.decode(after) == whole
        added = len(after) - len(start) - len(turn)
        assert after[-added:] == mine.encode(whole)[-added:]
