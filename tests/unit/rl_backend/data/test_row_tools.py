"""Tools and documents that the chat template is given: of rows, of a run, and what is refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from actors.collect.stop_tokens import Ends
from actors.rollout.config import SamplingConfig
from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.chat_template import encode_messages
from rl_backend.data.examples import DataConfig
from rl_backend.data.prompts import load_prompts
from rl_backend.data.sft import conversation_tokens, load_sft_examples
from rl_backend.environment.stepping import require_given
from tests.support.chat_templates import CHATML, MARKED, chat_tokenizer, marker_tokenizer, trl_templates
from tests.support.rows import write_rows

SHOWN = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
READ = "{% for each in documents or [] %}<|im_start|>{{ each.title }}\n{{ each.text }}<|im_end|>\n{% endfor %}"
CALLS = "{% for call in message.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}<|im_end|>"
TEMPLATE = SHOWN + READ + CHATML.replace("<|im_end|>", CALLS)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
SUBTRACT = {"type": "function", "function": {"name": "subtract", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
DOCUMENTS = [{"title": "Sums", "text": "1+2 is 3"}]
ASKED = [{"role": "user", "content": "1+2?"}]
CALLED = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


def prompts(path: Path, data: DataConfig | None = None, template: str = TEMPLATE) -> list[str]:
    tokenizer = chat_tokenizer(template)
    return [tokenizer.decode(each.token_ids) for each in load_prompts(path, tokenizer, 500, data, require_answer=False)]


def sequences(path: Path, data: DataConfig | None = None, template: str = TEMPLATE) -> list[str]:
    tokenizer = chat_tokenizer(template)
    found = load_sft_examples(path, tokenizer, 500, 900, data)
    return [tokenizer.decode(each.input_ids) for example in found for each in example]


def rendered(template: str, messages: Any, *, answered: bool = False, **inputs: Any) -> str:
    text = chat_tokenizer(template).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=not answered, **inputs
    )
    return str(text).removesuffix("\n") if answered else str(text)


@pytest.mark.shows("data: a row's tools and documents reach the chat template in prompts, in SFT and in held-out rows")
@pytest.mark.parametrize("written", [list, json.dumps])
@pytest.mark.parametrize(
    "template",
    [TEMPLATE, SHOWN + READ + MARKED.replace("{{ message.content }}<", "{{ message.content }}" + CALLS[:-10] + "<")],
)
def test_tools_and_documents_of_a_row_are_what_the_template_makes_of_them(
    tmp_path: Path, written: Any, template: str
) -> None:
    row = {"tools": written([ADD, SUBTRACT]), "documents": written(DOCUMENTS)}
    inputs: dict[str, Any] = {"tools": [ADD, SUBTRACT], "documents": DOCUMENTS}
    path = write_rows(tmp_path / "a.jsonl", {"messages": ASKED, **row}, {"messages": ASKED})
    assert prompts(path, template=template) == [rendered(template, ASKED, **inputs), rendered(template, ASKED)]
    (held_out, _) = load_prompts(path, chat_tokenizer(template), 500, require_answer=False, held_out=True)
    assert held_out.token_ids == encode_messages(ASKED, chat_tokenizer(template), **inputs)
    assert held_out.example.extra_info == row
    path = write_rows(tmp_path / "b.jsonl", {"messages": CALLED, **row})
    assert sequences(path, template=template) == [rendered(template, CALLED, answered=True, **inputs)]


def test_columns_of_tools_and_documents_are_named_and_left_to_the_reward_function_where_they_are_none(
    tmp_path: Path,
) -> None:
    row = {"messages": ASKED, "functions": [ADD], "facts": {"pages": DOCUMENTS}, "tools": ["a name"], "documents": "a text"}
    path = write_rows(tmp_path / "a.jsonl", row)
    named = DataConfig(tools_column="functions", documents_column="facts.pages")
    assert prompts(path, named) == [rendered(TEMPLATE, ASKED, tools=[ADD], documents=DOCUMENTS)]
    data = DataConfig(tools_column=None, documents_column=None)
    assert prompts(path, data) == [rendered(TEMPLATE, ASKED)]
    (example,) = load_prompts(path, chat_tokenizer(TEMPLATE), 500, data, require_answer=False)
    assert example.example.extra_info == {name: value for name, value in row.items() if name != "messages"}


def test_tools_of_a_file_are_those_of_rows_without_any(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([SUBTRACT]))
    data = DataConfig(tools_file=str(file))
    rows: list[Any] = [{"messages": CALLED}, {"messages": CALLED, "tools": [ADD]}, {"messages": CALLED, "tools": None}]
    whole = [rendered(TEMPLATE, CALLED, answered=True, tools=[tool]) for tool in (SUBTRACT, ADD, SUBTRACT)]
    assert sequences(write_rows(tmp_path / "a.jsonl", *rows), data) == whole
    asked = [{**row, "messages": ASKED} for row in rows]
    expected = [rendered(TEMPLATE, ASKED, tools=[tool]) for tool in (SUBTRACT, ADD, SUBTRACT)]
    assert prompts(write_rows(tmp_path / "b.jsonl", *asked), data) == expected
    for content, problem in (("[]", "has no tools"), ("{}", "expected a list of JSON schemas"), ("[1]", "each an object")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=rf"tools_file='.*': .*{problem}"):
            prompts(tmp_path / "b.jsonl", data)
    with pytest.raises(ConfigError, match=r"tools_file='missing\.json': cannot be used"):
        prompts(tmp_path / "b.jsonl", DataConfig(tools_file="missing.json"))


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        (
            {"messages": ASKED, "tools": ["add"]},
            TEMPLATE,
            r"line 1, field tools: is \['add'\]; expected a list of JSON schemas",
        ),
        ({"messages": ASKED, "tools": "add"}, TEMPLATE, "line 1, field tools: is 'add'"),
        ({"messages": ASKED, "documents": {"text": "x"}}, TEMPLATE, "line 1, field documents: is .* list of documents"),
        ({"messages": ASKED, "tools": '[{"name": "\\ud83d"}]'}, TEMPLATE, r"field tools\[0\]\.name: .* surrogate"),
        (
            {"prompt": "1+2", "tools": [ADD]},
            TEMPLATE,
            "field tools: the prompt is text, .* text_prompts to message, or tools_co",
        ),
        (
            {"messages": ASKED, "tools": [ADD]},
            CHATML,
            r"^tools=\['add'\]: .* does not read them: .* set tools_column to none",
        ),
        ({"messages": ASKED, "tools": [ADD["function"]]}, CHATML, r"^tools=\['add'\]"),
        (
            {"messages": ASKED, "documents": DOCUMENTS},
            CHATML,
            "^documents=.* does not read them: .* set documents_column to none",
        ),
    ],
)
def test_tools_and_documents_that_cannot_reach_the_model_are_refused(
    tmp_path: Path, row: Any, template: str, message: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"answer": "3", **row})
    for read in (prompts, sequences):
        with pytest.raises((BatchError, ConfigError), match=message):
            read(path, template=template)


@pytest.mark.parametrize("name", ["tools", "documents", "messages", "add_generation_prompt"])
def test_what_the_renderer_gives_the_template_is_no_variable_of_it(tmp_path: Path, name: str) -> None:
    data = DataConfig(chat_template_kwargs={name: []})
    path = write_rows(tmp_path / "a.jsonl", {"messages": ASKED, "answer": "3"})
    for read in (prompts, sequences):
        with pytest.raises(ConfigError, match=rf"^chat_template_kwargs\.{name}=\[\]: is no option: {name} "):
            read(path, data)


@pytest.mark.shows("data: rows that call tools of which the model is not told are counted in one warning for each file")
def test_rows_that_call_tools_nobody_is_told_of_are_counted_once_a_file(tmp_path: Path) -> None:
    told, untold = {"messages": CALLED, "tools": [ADD]}, {"messages": CALLED}
    path = write_rows(tmp_path / "a.jsonl", told, untold, {"messages": ASKED, "answer": "3"}, untold)
    for read in (prompts, sequences):
        with pytest.warns(UserWarning, match="call tools") as caught:
            read(path)
        (warning,) = [str(each.message) for each in caught if each.category is UserWarning]
        assert "a.jsonl: 2 of 4 rows call tools that the model is not told of, the first is" in warning
        assert "a.jsonl, line 2;" in warning and "tools_file" in warning
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sequences(write_rows(tmp_path / "b.jsonl", told, {"messages": ASKED, "answer": "3"}))


def test_the_end_of_an_answer_is_that_of_the_template_with_the_row_s_tools(tmp_path: Path) -> None:
    template = TEMPLATE.replace(
        "<|im_end|>\n{% endfor %}{% if add", "{{ '<|eot_id|>' if tools else '<|im_end|>' }}\n{% endfor %}{% if add"
    )
    assert template != TEMPLATE
    tokenizer = chat_tokenizer(template)
    path = write_rows(tmp_path / "a.jsonl", {"messages": ASKED, "tools": [ADD]}, {"messages": ASKED})
    found = []
    for prompt in load_prompts(path, tokenizer, 500, require_answer=False):
        ends = Ends(str(tmp_path), tokenizer, DataConfig())
        ends.see(prompt, "row")
        found.append(tokenizer.convert_ids_to_tokens(ends.added_to(SamplingConfig()).stop_token_ids[-1]))
    assert found == ["<|eot_id|>", "<|im_end|>"]
    both = Ends(str(tmp_path), tokenizer, DataConfig())
    for number in (0, 1):
        both.see(load_prompts(path, tokenizer, 500, require_answer=False)[number], "row")
    assert {*found} <= {*tokenizer.convert_ids_to_tokens(both.added_to(SamplingConfig()).stop_token_ids)}


def test_the_tools_of_an_environment_are_those_of_its_row() -> None:
    require_given([ADD], ["add", "subtract"])
    require_given(None, ["add"])
    require_given(["search", "add"], ["add"])  # names, which are the environment's own business
    for tools in ([ADD, SUBTRACT], json.dumps([ADD, SUBTRACT]), [SUBTRACT["function"]]):
        with pytest.raises(BatchError, match="field tools: the row has subtract, and the environment gives add;"):
            require_given(tools, ["add"])


NULL = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
ASKS_NULL = CHATML.replace(
    "{{ message.content }}",
    "{% if message.content is none %}{% for call in message.tool_calls %}[{{ call.function.name }}]{% endfor %}"
    "{% else %}{{ message.content }}{% endif %}",
)


@pytest.mark.shows("data: content that is null beside calls stays null, and a template that writes it as a word is refused")
@pytest.mark.parametrize("messages", [NULL, [{k: v for k, v in each.items() if v is not None} for each in NULL]])
def test_content_that_is_null_beside_calls_is_what_the_template_makes_of_null(tmp_path: Path, messages: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"messages": messages, "tools": [ADD]})
    template = SHOWN + ASKS_NULL
    assert sequences(path, template=template) == [rendered(template, NULL, answered=True, tools=[ADD])]
    asked = write_rows(tmp_path / "b.jsonl", {"messages": messages[:3], "tools": [ADD]})
    assert prompts(asked, template=template) == [rendered(template, NULL[:3], tools=[ADD])]


def test_null_that_becomes_a_word_or_that_the_template_refuses_is_refused_by_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"messages": NULL, "tools": [ADD], "answer": "3"})
    added = TEMPLATE.replace("{{ message.content }}", "{{ message.content + '' }}")
    for template, problem in (
        (TEMPLATE, "writes the word None for the content of message 2"),
        (added, "message 2 is null: if"),
    ):
        for read in (prompts, sequences):
            with pytest.raises(BatchError, match=rf"a\.jsonl, line 1: .*{problem}.* ''"):
                read(path, template=template)
    with pytest.raises(BatchError, match=r"field messages\[1\]\.content: is None; expected text"):
        prompts(write_rows(tmp_path / "b.jsonl", {"messages": [*ASKED, {"role": "assistant", "content": None}, *ASKED]}))


def test_a_conversation_that_ends_with_a_call_has_no_text_as_its_answer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"messages": NULL[:2], "tools": [ADD]})
    tokenizer = chat_tokenizer(SHOWN + ASKS_NULL)
    (prompt,) = load_prompts(path, tokenizer, 500, require_answer=False)
    assert prompt.example.ground_truth is None
    with pytest.raises(BatchError, match="ground_truth or answer: missing"):
        load_prompts(path, tokenizer, 500)


@pytest.mark.shows("data: a turn of which only the token that ends it would be trained is refused by its row")
@pytest.mark.parametrize(
    ("row", "template", "left_out"),
    [
        ({"messages": ASKED, "answer": ""}, CHATML, "content"),
        ({"messages": ASKED, "answer": " \n"}, CHATML, "content"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "", "thought": "x"}]}, MARKED, "content and thought"),
    ],
)
def test_a_turn_of_its_end_alone_is_refused_by_row(tmp_path: Path, row: Any, template: str, left_out: str) -> None:
    path = write_rows(
        tmp_path / "a.jsonl", {"messages": [*ASKED, {"role": "assistant", "content": "3"}], "tools": None}, row
    )
    with pytest.raises(BatchError, match=rf"a\.jsonl, line 2: message 2 has nothing to imitate .* out {left_out}; remove"):
        sequences(path, template=template)


@pytest.mark.parametrize("template", [SHOWN + CHATML, SHOWN + ASKS_NULL])
@pytest.mark.parametrize("content", ["", "Let me add."])
def test_a_call_that_the_template_leaves_out_is_refused_by_row(tmp_path: Path, template: str, content: str) -> None:
    called = [CALLED[0], {**CALLED[1], "content": content}, *CALLED[2:]]
    path = write_rows(tmp_path / "a.jsonl", {"messages": called, "tools": [ADD], "answer": "3"})
    reads = (prompts, sequences) if template == SHOWN + CHATML else (sequences,)
    for read in reads:
        with pytest.raises(BatchError, match=r"a\.jsonl, line 1: .* leaves out tool_calls of message 2; use a model"):
            read(path, template=template)


@pytest.mark.parametrize("name", sorted(trl_templates()))
@pytest.mark.parametrize("content", ["", None])
def test_no_template_drops_a_call_silently(name: str, content: str | None) -> None:
    template = trl_templates()[name]
    day = {"strftime_now": "2026-01-31"} if "strftime_now" in template else {}
    call = {"id": "abcdefgh1", **CALL}
    messages = [*ASKED, {"role": "assistant", "content": content, "tool_calls": [call]}]
    tokenizer = marker_tokenizer(template)
    try:
        (found,) = conversation_tokens(messages, tokenizer, chat_template_kwargs=day, tools=[ADD])
    except (BatchError, ConfigError):
        return
    trained = [token for token, on in zip(found.token_ids, found.trained, strict=True) if on]
    assert "add" in tokenizer.decode(trained) and "None" not in tokenizer.decode(trained)
