"""The renderer: texts, answers and messages with tokenizers and templates of every kind, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl_backend.contracts import BatchError, ConfigError, UnsupportedError
from rl_backend.data.chat_template import (
    ChatTemplate,
    chat_template,
    decode,
    encode_answer,
    encode_messages,
    encode_text,
    known_token_ids,
    marks_answers,
    require_text,
    require_utf8,
    special_token_ids,
    template_variables,
    tool_name,
)
from rl_backend.data.sft import conversation_tokens
from tests.support.chat_templates import CHATML, LLAMA, MARKED, PHI, chat_tokenizer

ASKED = [{"role": "user", "content": "2+2?"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


class Letters:
    """A tokenizer of letters, ids of which are their numbers, that puts ids around a text.

    Args:
        before, behind: what it puts there.
        split: a text that it has as one token, 1, where it stands at the beginning.
    """

    bos_token: str | None = None
    eos_token, eos_token_id, name_or_path = "$", ord("$"), "models/letters"

    def __init__(
        self, before: tuple[int, ...] = (), behind: tuple[int, ...] = (), split: str = "", bos: str | None = None
    ) -> None:
        self.before, self.behind, self.split, self.bos_token = before, behind, split, bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [1, *map(ord, text[len(self.split) :])] if self.split and text.startswith(self.split) else [*map(ord, text)]
        return [*self.before, *ids, *self.behind] if add_special_tokens else ids

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return [chr(each) for each in ids]


def letters(text: str) -> list[int]:
    return [ord(each) for each in text]


@pytest.mark.parametrize("before", [(), (7,), (7, 8), (7, 7)])
@pytest.mark.parametrize("behind", [(), (9,), (9, 10)])
@pytest.mark.parametrize("text", ["a", "abc", "aa"])
def test_what_is_put_before_a_text_stays_and_what_is_put_behind_goes(before: Any, behind: Any, text: str) -> None:
    tokenizer = Letters(before, behind)
    assert encode_text(text, tokenizer) == [*before, *letters(text)]
    own = "".join(map(chr, before))
    assert encode_text(own + text, tokenizer) == [*before, *letters(text)], "not twice"
    assert encode_text("", tokenizer) == list(before) or encode_text("", tokenizer) == []


def test_a_begin_of_text_that_is_read_as_text_is_taken_off() -> None:
    tokenizer = Letters((7,), bos="<s>")
    assert encode_text("<s>ab", tokenizer) == [7, *letters("ab")]
    assert encode_text("a<s>b", tokenizer) == [7, *letters("a<s>b")]
    assert encode_text("<s>ab", Letters((), bos="<s>")) == letters("<s>ab"), "nothing is put there, so it is a text"


def test_a_tokenizer_that_splits_a_text_in_two_ways_is_refused() -> None:
    class Odd(Letters):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [5, *letters(text)] if not add_special_tokens else [7, *letters(text)[1:]]

    with pytest.raises(
        ConfigError, match=r"^model='models/letters': its tokenizer splits 'abcdefghijklmnopqrst' in two ways"
    ):
        encode_text("abcdefghijklmnopqrstuvwxyz", Odd())


@pytest.mark.parametrize("answer", ["cd", "cd$", "cd$ \n", " cd"])
def test_an_answer_ends_once(answer: str) -> None:
    found = encode_answer("ab", answer, Letters((7,), (9,)))
    assert found == ([7, *letters("ab")], [*letters(answer.rstrip().removesuffix("$")), ord("$")])


def test_white_space_behind_an_answer_without_an_end_stays() -> None:
    assert encode_answer("ab", "cd \n", Letters()) == (letters("ab"), [*letters("cd \n"), ord("$")])
    assert encode_answer("ab", "c$d", Letters()) == (letters("ab"), [*letters("c$d"), ord("$")])


def test_an_answer_whose_border_is_inside_of_a_token_is_refused() -> None:
    with pytest.raises(BatchError) as refused:
        encode_answer("xabc", "defg", Letters(split="xabcd"))
    said = str(refused.value)
    assert said.startswith(
        "the prompt ends with 'xabc', the answer begins with 'defg', and their tokens cannot be told apart"
    )
    assert "the prompt alone has ['x', 'a', 'b', 'c'] where both together have ['\\x01', 'e', 'f', 'g']" in said
    for answer in ("", "$", "$\n"):
        with pytest.raises(BatchError, match="the answer has no tokens but its end; there is nothing to imitate"):
            encode_answer("ab", answer, Letters())


def test_text_of_tokens_is_as_it_stands() -> None:
    tokenizer = chat_tokenizer(CHATML)
    ids = tokenizer.encode("a , b<|im_end|>", add_special_tokens=False)
    assert decode(tuple(ids), tokenizer) == "a , b<|im_end|>" and decode(ids, tokenizer, special=False) == "a , b"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([{"type": "image_url", "url": "x"}], (0, "image_url")),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], (1, "input_audio")),
        ([{"text": "a", "video": "b"}], (0, "video")),
        ([{"text": "a"}, {"image": None, "text": "b"}, {"audio": 0}], (2, "audio")),
        ([{"image": None}], None),
        ([{"type": "text", "text": "image"}], None),
        (["image"], None),
        ("image", None),
        (None, None),
    ],
)
def test_a_part_that_is_no_text_is_named(content: Any, found: tuple[int, str] | None) -> None:
    if found is None:
        require_text(content, "m")
        return
    with pytest.raises(UnsupportedError) as refused:
        require_text(content, "m")
    assert str(refused.value).startswith(f"m.content[{found[0]}] is a part with {found[1]!r}: models are sampled")
    with pytest.raises(UnsupportedError, match=r"^messages\[1\]\.content"):
        ChatTemplate(chat_tokenizer(CHATML)).render([*ASKED, {"role": "user", "content": content}])


def test_the_place_of_half_a_character_is_counted_from_one() -> None:
    with pytest.raises(BatchError, match=r"^here\.a\[2\]: character 3 is '.udfff', half of a surrogate pair"):
        require_utf8({"b": "fine", "a": ["x", 3, "ab\udfff"]}, "here")
    for fine in ("\U0001f600", 3, None, {"a": (1, [None])}):
        require_utf8(fine, "here")


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ({"function": {"name": "f"}}, "f"),
        ({"name": "g"}, "g"),
        ({"function": "h"}, "h"),
        ({}, "None"),
    ],
)
def test_a_tool_is_named_below_its_function_or_not(tool: Any, name: str) -> None:
    assert tool_name(tool) == name


def test_a_template_is_the_default_of_several() -> None:
    assert chat_template(SimpleNamespace(chat_template={"default": "a", "tool_use": "b"}, name_or_path="m")) == "a"
    for none in (None, {"tool_use": "b"}):
        with pytest.raises(ConfigError, match=r"^model='m': its tokenizer has no chat template"):
            chat_template(SimpleNamespace(chat_template=none, name_or_path="m"))


def test_variables_and_marks_of_templates() -> None:
    assert template_variables("{% set a = 1 %}{{ a }}{{ b }}{% for c in d %}{{ c }}{% break %}{% endfor %}") == {"b", "d"}
    assert template_variables("{% generation %}{{ x }}{%- endgeneration -%}") == {"x"}
    with pytest.raises(ConfigError, match="the chat template is not Jinja, line 2: "):
        template_variables("a\n{% if %}")
    marks = ("{% generation %}", "{%- generation -%}", "{%+ endgeneration %}", "{%generation%}")
    assert [marks_answers(each) for each in marks] == [True] * 4
    assert not any(marks_answers(each) for each in ("{{ generation }}", "{% generations %}", "{# generation #}", CHATML))
    assert marks_answers(MARKED)


def test_what_a_template_is_given() -> None:
    tokenizer = chat_tokenizer("{{ tools }}{{ documents }}{{ style }}" + CHATML)
    given = {"style": "short"}
    tools, documents = [{"name": "f"}], [{"text": "t"}]
    found = ChatTemplate(tokenizer, given, tools, documents).inputs()
    assert found == {"tools": tools, "documents": documents, "style": "short"} and found["tools"][0] is not tools[0]
    assert ChatTemplate(tokenizer).inputs() == {"tools": None, "documents": None}
    assert given == {"style": "short"}
    with pytest.raises(ConfigError) as refused:
        ChatTemplate(tokenizer, {"loud": 1}, (), ()).inputs()
    assert str(refused.value).endswith("models/mine does not read it; it reads style")
    for name, where in (("messages", "are the row's"), ("documents", "belong in the rows, in the column that documents")):
        with pytest.raises(ConfigError, match=f"chat_template_kwargs.{name}=1: is no option: {name} {where}"):
            ChatTemplate(tokenizer, {name: 1}, (), ()).inputs()
    plain = chat_tokenizer(CHATML)
    with pytest.raises(ConfigError, match=r"^tools=\['f', 'g'\]: "):
        ChatTemplate(plain, {}, [{"name": "f"}, {"function": {"name": "g"}}], ()).inputs()
    with pytest.raises(ConfigError, match=r"^documents=\[\{'text': 'a'\}\]: "):
        ChatTemplate(plain, {}, (), [{"text": "a"}, {"text": "b"}]).inputs()


def test_calls_must_leave_a_trace_wherever_they_are() -> None:
    shows = CHATML.replace(
        "<|im_end|>", "{% for call in message.tool_calls or [] %}!{{ call.function.name }}{% endfor %}<|im_end|>"
    )
    called: list[dict[str, Any]] = [*ASKED, {"role": "assistant", "content": "x", "tool_calls": [CALL]}, *ASKED]
    text = chat_tokenizer(CHATML).decode(encode_messages(called, chat_tokenizer(shows)))
    assert "x!add<|im_end|>" in text
    with pytest.raises(BatchError, match="leaves out tool_calls of message 2; use a model whose template writes calls"):
        encode_messages(called, chat_tokenizer(CHATML))
    encode_messages([*ASKED, {"role": "assistant", "content": "x", "tool_calls": []}], chat_tokenizer(CHATML))
    assert called[1]["tool_calls"] == [CALL]
    needs = CHATML.replace("{{ message.content }}", "{{ message.content }}{% if message.role == 'assistant' %}"
                           "{{ message.tool_calls[0].function.name }}{% endif %}")  # fmt: skip
    assert encode_messages(called, chat_tokenizer(needs)), "a template that fails without the calls writes them"


def test_content_that_is_null_is_refused_where_it_becomes_a_word() -> None:
    null: list[dict[str, Any]] = [{"role": "user", "content": "None"}, {"role": "assistant", "content": None}, *ASKED]
    with pytest.raises(BatchError, match=r"writes the word None for the content of message 2, which is null; give it"):
        ChatTemplate(chat_tokenizer(CHATML)).render(null)
    as_json = CHATML.replace("{{ message.content }}", "{{ message.content | tojson }}")
    with pytest.raises(BatchError, match="writes the word null for the content of message 2"):
        ChatTemplate(chat_tokenizer(as_json)).render(null)
    skips = CHATML.replace("{{ message.content }}", "{{ message.content or '' }}")
    assert "None<|im_end|>\n<|im_start|>assistant\n<|im_end|>" in ChatTemplate(chat_tokenizer(skips)).render(null)
    with pytest.raises(BatchError, match=r"refuses messages of the roles user, None: .*") as refused:
        ChatTemplate(chat_tokenizer(CHATML.replace("message.role", "message.role + ''"))).render([*ASKED, {"content": "x"}])
    assert "null" not in str(refused.value)


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (LLAMA, "<|eot_id|>"), (CHATML.replace("<|im_end|>", "."), None)],
)
def test_the_end_of_a_turn(template: str, end: str | None) -> None:
    tokenizer = chat_tokenizer(template)
    found = ChatTemplate(tokenizer).turn_end([{"role": "user", "content": "The answer is 4."}])
    assert found == (None if end is None else tokenizer.convert_tokens_to_ids(end))


def test_ids_of_special_and_of_all_tokens() -> None:
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.add_tokens(["<word>"])
    (word,) = tokenizer.encode("<word>", add_special_tokens=False)
    special = special_token_ids(tokenizer)
    assert {tokenizer.convert_tokens_to_ids(each) for each in ("<s>", "</s>", "<|end|>")} <= special and word not in special
    assert known_token_ids(tokenizer) == frozenset(range(len(tokenizer)))


def test_the_end_of_a_turn_is_that_of_the_answer_and_not_of_a_question_with_its_words() -> None:
    ends = "{{ '<|eot_id|>' if m.role == 'user' else '<|im_end|>' }}"
    by_role = "{% for m in messages %}{{ m.content }}" + ends + "{% endfor %}"
    tokenizer = chat_tokenizer(by_role)
    found = ChatTemplate(tokenizer).turn_end([{"role": "user", "content": "The answer is 4."}])
    assert found == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(("template", "begins"), [(LLAMA, 1), (PHI, 0)], ids=["llama", "phi"])
def test_a_text_of_a_template_gets_nothing_that_the_tokenizer_puts_around_texts(
    monkeypatch: pytest.MonkeyPatch, template: str, begins: int
) -> None:
    """Llama's tokenizers put their begin-of-text token before every text, and its template has written it already."""
    tokenizer = chat_tokenizer(template)
    plain, question = tokenizer.encode, [{"role": "user", "content": "2+2?"}]
    turns = [*question, {"role": "assistant", "content": "4"}]

    def found() -> tuple[list[int], int | None, list[int], list[bool]]:
        (trained,) = conversation_tokens(turns, tokenizer)
        end = ChatTemplate(tokenizer).turn_end(question)
        return encode_messages(question, tokenizer), end, trained.token_ids, trained.trained

    expected = found()
    around = tokenizer.bos_token_id, tokenizer.eos_token_id

    def with_special_tokens(text: str, add_special_tokens: bool = True) -> list[int]:
        own: list[int] = plain(text, add_special_tokens=False)
        return [around[0], *own, around[1]] if add_special_tokens else own

    monkeypatch.setattr(tokenizer, "encode", with_special_tokens)
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id and found() == expected
    assert expected[0].count(tokenizer.bos_token_id) == begins
