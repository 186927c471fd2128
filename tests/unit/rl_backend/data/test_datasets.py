"""Rows mean the same whatever they come out of: text files, tables, folders; and what a table cannot say is named."""

from __future__ import annotations

import csv
import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import BatchError
from rl_backend.data.datasets import data_files, open_rows
from rl_backend.data.examples import DataConfig, read_examples
from rl_backend.data.prompts import load_prompts
from rl_backend.data.rows import Row
from rl_backend.data.sft import load_sft_examples
from tests.support.chat_templates import chat_tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for turn in messages %}<|im_start|>{{ turn.role }}{% if turn.name is defined %} {{ turn.name }}{% endif %}"
    "{{ '\n' }}{{ turn.content or '' }}{% for call in turn.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("4", "007", "1.50", "2024-01-31", "2024-01-31T00:00:00Z", "NA", "null", "None", "a, b", 'say "x"', "x\ny", " z ")
CALLS: dict[str, dict[str, Callable[[random.Random], Any]]] = {
    "add": {"a": lambda draw: draw.randint(-9, 9), "b": lambda draw: draw.random() < 0.5},
    "find": {
        "what": lambda draw: draw.choice(WORDS),
        "where": lambda draw: {"city": "Rome", **({"near": [draw.choice(WORDS)] * 2} if draw.random() < 0.5 else {})},
        "words": lambda draw: [draw.choice(WORDS) for _ in range(draw.randint(0, 2))],
    },
}
"""Functions, their arguments, and how values are drawn. A table has one type, and one place, for each argument."""


def some(draw: random.Random, fields: dict[str, Callable[[random.Random], Any]], *, whole: bool = False) -> dict[str, Any]:
    """Some of the fields, in their order."""
    return {name: value(draw) for name, value in fields.items() if whole or draw.random() < 0.5}


def conversation(draw: random.Random, *, whole: bool) -> dict[str, Any]:
    """A row of messages that calls functions. A whole one has all fields, whose order is then that of a table."""
    named = [name for name in CALLS if whole or draw.random() < 0.7]
    schemas = {name: {"properties": {field: {"type": "string"} for field in CALLS[name]}} for name in named}
    tools = [{"type": "function", "function": {"name": name, "parameters": schemas[name]}} for name in named]
    calls = [
        {"type": "function", "function": {"name": name, "arguments": some(draw, CALLS[name], whole=whole)}} for name in named
    ]
    question = {"role": "user", "content": draw.choice(WORDS), **({"name": "Ann"} if whole or draw.random() < 0.3 else {})}
    parts = [{"type": "text", "text": draw.choice(WORDS)} for _ in range(2)]
    called = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": draw.choice(WORDS)}]
    return {
        "messages": [question, *(called if calls else []), {"role": "assistant", "content": draw.choice(WORDS)}],
        **({"tools": tools} if tools else {}),
        "parts": [{"role": "user", "content": parts}],
    }


def text_row(draw: random.Random, *, whole: bool) -> dict[str, Any]:
    return {
        "prompt": f"{draw.choice(WORDS)}\n:",
        "answer": draw.choice(WORDS).rstrip(),
        **({"level": draw.choice(WORDS)} if whole or draw.random() < 0.5 else {}),
    }


def write_jsonl(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: Sequence[Row]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    library = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    library.disable_progress_bars()
    return library


@pytest.fixture
def parquet() -> Any:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    return pytest.importorskip("pyarrow.parquet")


def sources(folder: Path, rows: Sequence[Row], datasets: Any, parquet: Any, *, texts: bool) -> Iterator[Path]:
    """The same rows in files of every kind that holds them, and in folders with such files."""
    import pyarrow

    folder.mkdir()
    yield write_jsonl(folder / "rows.jsonl", rows)
    yield write_jsonl(folder / "lines.json", rows)
    listed = folder / "list.json"
    listed.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    yield listed
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    yield folder / "rows.parquet"
    datasets.Dataset.from_list(list(rows)).save_to_disk(folder / "saved")
    yield folder / "saved"
    for name, file in (("json", "list.json"), ("jsonl", "rows.jsonl"), ("parquet", "rows.parquet")):
        inner = folder / f"folder_{name}"
        inner.mkdir()
        (inner / f"train.{name}").write_bytes((folder / file).read_bytes())
        yield inner
    if texts:
        yield write_csv(folder / "rows.csv", rows)
        inner = folder / "folder_csv"
        inner.mkdir()
        yield write_csv(inner / "train.csv", rows).parent


@pytest.mark.shows("data: the same rows have the same tokens out of jsonl, json, csv, parquet and folders of datasets")
@pytest.mark.parametrize("texts", [False, True], ids=["conversations", "texts"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_rows_have_the_same_tokens_out_of_every_source(
    tmp_path: Path, datasets: Any, parquet: Any, seed: int, texts: bool
) -> None:
    draw, tokenizer = random.Random(seed), chat_tokenizer(TEMPLATE)
    rows = [(text_row if texts else conversation)(draw, whole=not index) for index in range(12)]
    found: dict[str, Any] = {}
    for source in sources(tmp_path / "data", rows, datasets, parquet, texts=texts):
        sequences = [
            [(each.input_ids.tolist(), each.token_fields["loss_mask"].tolist()) for each in example]
            for example in load_sft_examples(source, tokenizer, 4000, 4000)
        ]
        prompts = load_prompts(source, tokenizer, 4000)
        tokens = [prompt.token_ids for prompt in prompts]
        answers = [prompt.example.ground_truth for prompt in prompts]
        others = [prompt.example.extra_info.get("level") for prompt in prompts]
        asked = (
            None if texts else load_prompts(source, tokenizer, 4000, DataConfig(prompt_column="parts"), require_answer=False)
        )
        parts = [prompt.token_ids for prompt in asked] if asked else []
        found[source.name] = [sequences, tokens, answers, others, parts]
    right = found.pop("rows.jsonl")
    assert len(found) == (9 if texts else 7)
    for name, each in found.items():
        assert each == right, name


def test_nulls_of_other_rows_fields_stay_in_what_rewards_are_given_and_are_named_once(
    tmp_path: Path, datasets: Any, parquet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "a", "reward_model": {"ground_truth": {"x": 1, "y": [{"u": 1}]}}, "extra_info": {"k": 1}, "ability": "m"},
        {
            "prompt": "b",
            "reward_model": {"ground_truth": {"x": 2, "z": "q", "y": [{"v": 1}]}},
            "extra_info": {"n": {"o": 1}},
        },
    ]
    *_, tables = sources(tmp_path / "data", rows, datasets, parquet, texts=False)
    truth = "reward_model.ground_truth"
    named = f"{truth}.y.u, {truth}.y.v, {truth}.z, extra_info.k, extra_info.n"
    for source in (tmp_path / "data" / "rows.parquet", tmp_path / "data" / "saved", tables):
        for load in (lambda source: load_prompts(source, chat_tokenizer(None), 9), read_examples):
            caplog.clear()
            examples = [getattr(each, "example", each) for each in load(source)]
            assert examples[0].ground_truth == {"x": 1, "y": [{"u": 1, "v": None}], "z": None}
            assert examples[1].extra_info == {"k": None, "n": {"o": 1}}
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            assert record.getMessage().startswith(f"{source}: {named} are null in some rows; a table cannot say which")
    caplog.clear()
    (example, _) = read_examples(tmp_path / "data" / "rows.jsonl")
    assert example.ground_truth == rows[0]["reward_model"]["ground_truth"] and not caplog.records


def test_nulls_inside_of_messages_are_not_named_and_those_of_jsonl_are_what_the_row_says(
    tmp_path: Path, parquet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import pyarrow

    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": None, "b": 1}, {"c": 2})]
    turns = [
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}] for call in calls
    ]
    rows = [{"messages": [*each, {"role": "user", "content": "y"}], "answer": "z"} for each in turns]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines, table = read_examples(write_jsonl(tmp_path / "a.jsonl", rows)), read_examples(tmp_path / "a.parquet")
    assert [each.prompt[1]["tool_calls"] for each in lines] == [[calls[0]], [calls[1]]]  # type: ignore[index]
    assert table[0].prompt[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {"b": 1}}}]  # type: ignore[index]
    assert table[1] == lines[1]
    assert not caplog.records


def test_maps_and_json_text_of_tables_are_objects_with_the_nulls_of_their_row(
    tmp_path: Path, parquet: Any, datasets: Any
) -> None:
    import pyarrow

    arguments = [{"a": None, "b": 1}, {"c": 2}]
    functions = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    for name, column in (
        ("map", pyarrow.array([list(each.items()) for each in arguments], functions)),
        ("json", pyarrow.array([json.dumps(each) for each in arguments], pyarrow.json_())),
    ):
        calls = pyarrow.StructArray.from_arrays([column, pyarrow.array([1, None])], ["arguments", "other"])
        roles = pyarrow.array(["user", "user"])
        messages = pyarrow.StructArray.from_arrays([roles, roles, calls], ["role", "content", "call"])
        lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2], pyarrow.int32()), messages)
        parquet.write_table(pyarrow.table({"prompt": lists, "extra": column}), tmp_path / f"{name}.parquet")
        examples = read_examples(tmp_path / f"{name}.parquet", require_answer=False)
        assert [each.prompt[0]["call"] for each in examples] == [  # type: ignore[index]
            {"arguments": arguments[0], "other": 1},
            {"arguments": arguments[1]},
        ]
        assert [each.extra_info["extra"] for each in examples] == arguments
    features = datasets.Features({"prompt": datasets.List(datasets.Json()), "answer": datasets.Value("string")})
    rows = [{"prompt": [{"role": "user", "content": "x", "k": {"a": None}}], "answer": "1"}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    assert read_examples(tmp_path / "saved")[0].prompt == rows[0]["prompt"]


def test_the_format_that_a_data_set_was_saved_with_changes_no_row(tmp_path: Path, datasets: Any) -> None:
    rows = [{"prompt": "x", "answer": 4}, {"prompt": "y", "answer": 5}]
    saved = datasets.Dataset.from_list(rows)
    saved.set_format("numpy", columns=["answer"])
    saved.save_to_disk(tmp_path / "saved")
    assert [dict(row) for row in open_rows(tmp_path / "saved")] == [
        {"prompt": "x", "answer": 4},
        {"prompt": "y", "answer": 5},
    ]


def test_numbers_dates_and_missing_fields_in_text_files_of_a_folder_are_as_written(tmp_path: Path, datasets: Any) -> None:
    del datasets
    rows: list[Row] = [{"prompt": "a", "answer": 1, "at": "2024-01-31"}, {"prompt": "b", "answer": 1.5, "at": "2024-02-01"}]
    for name in ("train", "test"):
        write_jsonl(tmp_path / f"{name}-00000-of-00002.jsonl", rows[:1])
        write_jsonl(tmp_path / f"{name}-00001-of-00002.jsonl", rows[1:])
    found = open_rows(tmp_path)
    assert list(found) == rows and isinstance(found[0]["answer"], int)
    assert found.where(1) == f"{tmp_path}/train-00001-of-00002.jsonl, line 1" and found.name == tmp_path.name
    assert data_files(f"{tmp_path}::test") == [tmp_path / f"test-0000{part}-of-00002.jsonl" for part in range(2)]


def test_options_of_a_folders_loader_are_left_to_the_library(
    tmp_path: Path, datasets: Any, caplog: pytest.LogCaptureFixture
) -> None:
    del datasets
    (tmp_path / "train.csv").write_text("prompt;answer\n2+2=;4\n")
    (tmp_path / "README.md").write_text('---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  sep: ";"\n---\n')
    assert list(open_rows(tmp_path)) == [{"prompt": "2+2=", "answer": 4}]
    assert not caplog.records


def test_texts_that_the_library_takes_for_times_are_named(
    tmp_path: Path, datasets: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import gzip

    del datasets
    row = json.dumps({"prompt": "when?", "answer": "2024-01-31"})
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(row.encode()))
    open_rows(folder)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{folder}: the datasets library reads the texts of answer as times")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.json", '[{"prompt": "x"},\n {"prompt": }]', r"a\.json: not JSON: Expecting value: line 2 column 13 .*; repair"),
        ("a.json", '[{"prompt": "x"}', r"a\.json: not JSON: Expecting ',' or '\]' behind an object of the list: line 1"),
        ("a.json", '[{"prompt": "x"}] 3', r"a\.json: not JSON: Extra data behind the list"),
        ("a.json", '[{"prompt": "x"},]', r"a\.json: not JSON: "),
        ("a.json", '[{"prompt": "x", "answer": "1"}, 3]', r"a\.json, row 2: a int; expected a list of JSON objects"),
        ("a.json", "[" * 100_000, r"a\.json: not JSON: maximum recursion depth"),
        ("a.json", '{"prompt":\n "x"}', r"line 1: not JSON: .*; expected one JSON object per line, or a list of objects"),
        ("a.json", " [ ] \n", r"a\.json: no rows"),
        ("a.csv", "prompt,answer\n", r"a\.csv: no rows"),
        (
            "a.csv",
            "prompt,answer\nx,1\n\ny\n",
            r"a\.csv, line 4: not CSV: .*; expected a cell for each of the 2",
        ),
        ("a.csv", "prompt,prompt\nx,1\n", r"a\.csv: not CSV: the first line names a column twice: prompt, prompt"),
        ("a.csv", 'prompt,answer\n"x"y,1\n', r"a\.csv: not CSV: ',' expected after '\"'; repair the file"),
        ("a.csv", 'prompt,answer\n"x,1\n', r"a\.csv: not CSV: unexpected end of data; repair the file"),
    ],
)
def test_damaged_text_files_are_refused_by_file_and_place(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BatchError, match=problem):
        read_examples(tmp_path / name)


def test_text_files_of_other_programs_are_read(tmp_path: Path) -> None:
    """With a byte order mark, other line ends, empty lines, and rows over several lines."""
    row = {"prompt": "é\n2", "answer": "4"}
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.jsonl").write_bytes(mark + json.dumps(row).encode() + b"\r\n\r\n" + json.dumps(row).encode())
    (tmp_path / "a.json").write_bytes(mark + f" [{json.dumps(row, ensure_ascii=False)} ,\r\n{json.dumps(row)}]\r\n".encode())
    (tmp_path / "a.csv").write_bytes(mark + 'prompt,answer,\r\n"é\n2",4,\r\n\r\n"é\n2",4,\r\n'.encode())
    for name in ("a.jsonl", "a.json"):
        assert list(open_rows(tmp_path / name)) == [row, row]
    table = open_rows(tmp_path / "a.csv")
    assert list(table) == [{**row, "": None}] * 2
    assert [table.where(index).rpartition(", ")[2] for index in range(2)] == ["line 2", "line 5"]


@pytest.mark.parametrize("name", ["a.json", "a.csv"])
def test_a_change_of_a_text_file_is_seen(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": "2"}]
    path = tmp_path / name
    path.write_text(json.dumps(rows)) if name == "a.json" else write_csv(path, rows)
    found = open_rows(path)
    content = path.read_bytes().replace(b"2", b"3")
    with path.open("r+b") as file:
        file.write(content)
    assert found[0] == rows[0]
    with pytest.raises(BatchError, match="was changed while it was in use"):
        found[1]
