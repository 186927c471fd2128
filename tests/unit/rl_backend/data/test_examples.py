"""What is taken out of a row, field by field, and which examples of a data set are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from rl_backend.contracts import BatchError, UnsupportedError
from rl_backend.data.examples import (
    DataConfig,
    Examples,
    Length,
    PromptExample,
    UntoldCalls,
    json_objects,
    read_example,
    short_repr,
    shown_objects,
    warn_of_padding,
)
from rl_backend.data.rows import Rows
from rl_backend.environment.stepping import require_given

ASKED = [{"role": "user", "content": "2+2?"}]
FUNCTION = {"name": "f"}
ANSWER = {"role": "assistant", "content": "4"}


class Listed(Rows):
    """Rows of a list, whose padding is taken out of what ``padded`` names."""

    def __init__(self, *rows: Mapping[str, Any], padded: Sequence[str] = ()) -> None:
        super().__init__("here", "mine")
        self.rows, self.padded, self.left_out, self.asked = rows, padded, [], []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> Mapping[str, Any]:
        return self.rows[index]

    def without_padding(self, path: str, value: Any) -> Any:
        self.asked.append(path)
        return super().without_padding(path, value)

    def padded_fields(self, left_out: Collection[str]) -> list[str]:
        self.left_out.append(set(left_out))
        return list(self.padded)


def read(row: Mapping[str, Any], **data: Any) -> PromptExample:
    return read_example(Listed(row), 0, DataConfig(**data))


@pytest.mark.parametrize(
    ("row", "data", "expected"),
    [
        ({"prompt": "p", "answer": 0}, {}, PromptExample("p", 0, "mine")),
        ({"prompt": "p", "answer": False, "ground_truth": None}, {}, PromptExample("p", False, "mine")),
        ({"prompt": "p", "answer": "a", "ground_truth": ""}, {}, PromptExample("p", "", "mine", {"answer": "a"})),
        (
            {"prompt": "p", "reward_model": {"ground_truth": 0, "x": 1}, "ground_truth": 5},
            {},
            PromptExample("p", 0, "mine", {"ground_truth": 5}),
        ),
        (
            {"prompt": "p", "answer": "a", "extra_info": {"a": 1, "b": None}, "a": 1, "b": 2, "data_source": "s"},
            {},
            PromptExample("p", "a", "s", {"a": 1, "b": 2}),
        ),
        (
            {"prompt": "p", "messages": ASKED, "answer": "a"},
            {},
            PromptExample("p", "a", "mine", {"messages": ASKED}),
        ),
        (
            {"q": {"text": "p", "more": 1}, "answer": "a"},
            {"prompt_column": "q.text"},
            PromptExample("p", "a", "mine", {"q": {"text": "p", "more": 1}}),
        ),
        (
            {"q.text": "dotted", "q": {"text": "p"}, "answer": "a"},
            {"prompt_column": "q.text"},
            PromptExample("dotted", "a", "mine", {"q": {"text": "p"}}),
        ),
        (
            {"q": {"a": {"b": {"c": "p"}}}, "answer": "x", "gold": {"v": [0]}},
            {"prompt_column": "q.a.b.c", "answer_column": "gold.v"},
            PromptExample("p", [0], "mine", {"q": {"a": {"b": {"c": "p"}}}, "answer": "x", "gold": {"v": [0]}}),
        ),
        (
            {"messages": [*ASKED, ANSWER], "tools": [FUNCTION], "documents": '[{"t": 1}]'},
            {},
            PromptExample(
                ASKED, "4", "mine", {"tools": [FUNCTION], "documents": '[{"t": 1}]'}, ANSWER, (FUNCTION,), ({"t": 1},)
            ),
        ),
        ({"prompt": "p", "answer": "a", "image": "", "videos": [], "audio": None}, {}, PromptExample("p", "a", "mine")),
    ],
)  # fmt: skip
def test_what_is_taken_out_of_a_row(row: dict[str, Any], data: dict[str, Any], expected: PromptExample) -> None:
    before = {**row, "extra_info": dict(row["extra_info"])} if "extra_info" in row else dict(row)
    assert read(row, **data) == expected
    assert row == before, "the row stays as it is"


@pytest.mark.parametrize("name", ["images", "videos", "audios", "image", "video", "audio"])
@pytest.mark.parametrize("value", ["a.png", ["a"], {}, 0, {"bytes": 1}])
def test_every_column_of_media_is_refused_unless_it_is_empty(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"^here, row 1, field '{name}': models are sampled and trained with text"):
        read({"prompt": "p", "answer": "a", name: value})


@pytest.mark.parametrize(
    ("row", "data", "message"),
    [
        ({"question": "p"}, {}, r"field prompt: missing or null; the row has \['question'\]; name its column with prompt_"),
        ({"prompt": None, "messages": None}, {}, r"field prompt: missing or null; the row has \['messages', 'prompt'\]"),
        ({"q": {"x": 1}}, {"prompt_column": "q.y"}, r"field q\.y: missing"),
        ({"q": "text"}, {"prompt_column": "q.y.z"}, r"field q\.y\.z: missing"),
        ({"prompt": {"a": 1}}, {}, "field prompt: is {'a': 1}; expected text or a list of chat messages, not empty"),
        ({"prompt": [*ASKED, 5]}, {}, r"field prompt\[1\]: is 5; expected a message with role and content"),
        ({"prompt": [*ASKED, {"role": None, "content": ""}]}, {}, r"field prompt\[1\]\.role: is None; expected text"),
        ({"prompt": [{"role": "user", "content": []}]}, {}, r"field prompt\[0\]\.content: is \[\]; expected text"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": 3}]}]},
            {},
            r"field prompt\[0\]\.content: is \[",
        ),
        ({"messages": [ANSWER]}, {}, "field messages: has nothing before the assistant's message"),
        ({"prompt": "p", "reward_model": [1]}, {}, r"field reward_model: is \[1\]; expected an object with ground_truth"),
        ({"prompt": "p", "gold": None}, {"answer_column": "gold"}, "field gold: missing or null; .* with answer_column"),
        ({"prompt": "p", "answer": "a", "data_source": 0}, {}, "field data_source: is 0; expected text"),
        ({"prompt": "p", "answer": "a", "extra_info": []}, {}, r"field extra_info: is \[\]; expected an object"),
        (
            {"prompt": "p", "answer": "a", "extra_info": {"b": 0}, "b": 1},
            {},
            "field b: is 1; expected the same as extra_info.b=0, or another name",
        ),
        (
            {"messages": "text", "answer": "a"},
            {},
            "field messages: is 'text'; expected a list of chat messages, or its JSON",
        ),
        (
            {"prompt": "p", "documents": [{"a": 1}], "answer": ""},
            {},
            "field documents: the prompt is text, .* documents_col",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_by_field(row: dict[str, Any], data: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=f"^here, row 1, {message}"):
        read(row, **data)


def test_messages_keep_what_they_have_but_nulls() -> None:
    call = {"function": {"name": "f", "arguments": {"a": None}}}
    given = [
        {"role": "user", "content": [{"text": "a"}, {"type": "text", "text": "b"}], "name": "Ann", "tool_calls": None},
        {"role": "assistant", "tool_calls": [call], "content": None, "thought": ""},
        {"role": "tool", "content": ""},
    ]
    assert read({"prompt": given, "answer": "x"}).prompt == [
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "tool_calls": [call], "content": None, "thought": ""},
        {"role": "tool", "content": ""},
    ]
    example = read({"messages": [*ASKED, ANSWER]})
    assert example.messages == [*ASKED, ANSWER] and read({"prompt": "p", "answer": "a"}).messages == []


def test_tools_of_the_run_are_those_of_rows_without_and_padding_is_taken_out() -> None:
    rows = Listed({"prompt": ASKED, "answer": "a", "tools": [], "f": {"d": [{"x": 1}]}})
    example = read_example(rows, 0, DataConfig(documents_column="f.d"), [{"name": "run"}])
    assert list(example.tools) == [{"name": "run"}] and example.documents == ({"x": 1},)
    assert rows.asked == ["prompt", "tools", "f.d"]
    own = read_example(
        Listed({"prompt": ASKED, "tools": [{"name": "own"}], "answer": "a"}), 0, DataConfig(), [{"name": "run"}]
    )
    assert list(own.tools) == [{"name": "own"}]
    assert read({"prompt": ASKED, "tools": 5, "answer": "a"}, tools_column=None).extra_info == {"tools": 5}


@pytest.mark.parametrize("padded", [(), ("a.b", "c.d")])
def test_padding_is_told_of_once_without_what_the_template_reads(
    padded: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = Listed(padded=padded)
    warn_of_padding(rows, DataConfig(prompt_column="q", documents_column=None, tools_column="t"))
    warn_of_padding(rows, DataConfig())
    assert rows.left_out == [{"q", "messages", "t"}, {"prompt", "messages", "tools", "documents"}]
    said = "here: a.b, c.d are null in some rows; a table cannot say which rows leave them out, so reward functions get None"
    assert caplog.messages == ([said] * 2 if padded else [])


def lengths_of(*rows: Sequence[int]) -> Any:
    """What makes examples of rows with these lengths, of which the first may be at most 5, and the second 7."""
    return lambda index: (
        f"e{index}",
        [
            Length(n, f"o{place}", most, f"do {place}")
            for place, (n, most) in enumerate(zip(rows[index], (5, 7), strict=False))
        ],
    )


def test_examples_are_kept_by_their_lengths() -> None:
    rows, seen = Listed({}, {}, {}, {}), []
    make = lengths_of((5, 7), (1, 8), (9, 9), (2,))
    kept = Examples(rows, make, "filter", see=lambda example, where: seen.append((example, where)))
    assert list(kept) == ["e0", "e3"] and len(kept) == 2 and kept[-1] == "e3" and kept[:1] == ["e0"]
    assert seen == [("e0", "here, row 1"), ("e3", "here, row 4")]
    assert kept.note == "1 of 4 prompts has more tokens than o1=7; 1 of 4 prompts has more tokens than o0=5: filtered"
    cut = Examples(rows, make, "cut", "example")
    assert list(cut) == ["e0", "e1", "e2", "e3"] and cut.note.endswith("; 1 of 4 examples has more tokens than o0=5: cut")
    assert cut[1:3] == ["e1", "e2"]
    with pytest.raises(IndexError):
        kept[2]
    with pytest.raises(BatchError) as refused:
        Examples(rows, lengths_of((6, 7), (1, 8), (9, 9), (2,)), "refuse")
    assert str(refused.value) == (
        "here: 2 of 4 prompts have more tokens than o0=5 (the first is here, row 1 with 6, the longest has 9); do 0; 1 of 4 "
        "prompts has more tokens than o1=7 (the first is here, row 2 with 8, the longest has 8); do 1, or set too_long to "
        "filter or cut"
    )
    with pytest.raises(
        BatchError, match=r"1 of 1 prompts has more tokens than o1=7 \(.* with 8, the longest has 8\); do 1$"
    ):
        Examples(Listed({}), lengths_of((1, 8)), "filter")
    assert Examples(rows, lengths_of((5,), (5, 7), (0, 0), ()), "refuse").note == ""


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, ()),
        ("null", ()),
        ([], ()),
        ("[]", ()),
        ([{"a": 1}, {}], ({"a": 1}, {})),
        ('[{"a": 1}]', ({"a": 1},)),
    ],
)
def test_objects_of_a_list_or_its_text(value: Any, found: tuple[Any, ...]) -> None:
    assert json_objects(value, "p", "w") == found


@pytest.mark.parametrize("value", ["", "x", "{}", '[{"a": 1}', 0, {}, [1], [{}, None], ({},), "[" * 100_000])
def test_what_is_no_list_of_objects_is_refused(value: Any) -> None:
    with pytest.raises(BatchError) as refused:
        json_objects(value, "p", "w")
    assert str(refused.value) == f"p: is {short_repr(value)}; expected a list of w, each an object, or its JSON text"
    require_given(value, [])


def test_long_values_are_cut_to_eighty_characters() -> None:
    assert short_repr("x" * 78) == repr("x" * 78) and short_repr("x" * 79) == "'" + "x" * 76 + "..."


@pytest.mark.parametrize("option", ["tools_column", "documents_column"])
def test_objects_that_no_template_would_show_are_refused_with_their_option(option: Any) -> None:
    given = [{"name": "f"}]
    assert shown_objects(given, "p", option, "text", DataConfig(text_prompts="message")) == tuple(given)
    assert shown_objects(given, "p", option, ASKED, DataConfig()) == tuple(given)
    assert shown_objects([], "p", option, "text", DataConfig()) == ()
    with pytest.raises(BatchError, match=f"^p: the prompt is text, .* set text_prompts to message, or {option} to none"):
        shown_objects(given, "p", option, "text", DataConfig())
    with pytest.raises(BatchError, match="expected a list of JSON schemas" if "tools" in option else "list of documents"):
        shown_objects(5, "p", option, ASKED, DataConfig())


def test_tools_that_the_environment_does_not_give_are_all_named() -> None:
    require_given([{"name": "a"}], ["a", "b"])
    with pytest.raises(BatchError, match="the row has b, c, and the environment gives a; the model"):
        require_given([{"name": "b"}, {"name": "a"}, {"function": {"name": "c"}}], ["a"])
    with pytest.raises(BatchError, match="the row has b, and the environment gives no tools"):
        require_given([{"name": "b"}], [])


def test_rows_that_call_untold_tools_are_counted() -> None:
    untold = UntoldCalls()
    for messages, tools, where in (
        (ASKED, (), "1"),
        ([*ASKED, {"role": "assistant", "tool_calls": [{}]}], [{"name": "f"}], "2"),
        ([{"role": "tool", "content": "x"}], (), "3"),
        ([*ASKED, {"role": "assistant", "tool_calls": [{}]}], (), "4"),
        ([*ASKED, {"role": "assistant", "tool_calls": []}], (), "5"),
    ):
        untold.add(messages, tools, where)  # type: ignore[arg-type]
    assert (untold.rows, untold.first) == (2, "3")
    with pytest.warns(UserWarning, match="^s: 2 of 9 rows call tools .*, the first is 3; put .* column fs, or for all rows"):
        untold.warn("s", 9, DataConfig(tools_column="fs"))
    with pytest.warns(UserWarning, match="into the column tools, or"):
        untold.warn("s", 9, DataConfig(tools_column=None))
    UntoldCalls().warn("s", 9, DataConfig())
