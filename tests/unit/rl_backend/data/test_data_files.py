"""Data files and reward functions in verl's formats."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_backend.contracts import BatchError, ConfigError, RLBackendError, UnsupportedError
from rl_backend.data.chat_template import encode_messages
from rl_backend.data.examples import PromptExample, read_examples
from rl_backend.data.rewards import load_reward, score_value

GSM8K_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 = ?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0, "answer": "1 + 1 = 2 #### 2"},
}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_a_verl_parquet_row_is_read_whole(tmp_path: Path) -> None:
    (example,) = read_examples(write_parquet(tmp_path / "train.parquet", [GSM8K_ROW]))
    assert example == PromptExample(
        prompt=GSM8K_ROW["prompt"],
        ground_truth="2",
        data_source="openai/gsm8k",
        extra_info={**GSM8K_ROW["extra_info"], "ability": "math"},
    )


def test_a_verl_row_reads_the_same_from_jsonl(tmp_path: Path) -> None:
    assert read_examples(write_jsonl(tmp_path / "a.jsonl", [GSM8K_ROW])) == read_examples(
        write_parquet(tmp_path / "a.parquet", [GSM8K_ROW])
    )


def test_what_parquet_fills_with_null_is_absent(tmp_path: Path) -> None:
    tool_row = {**GSM8K_ROW, "prompt": [{"role": "user", "content": "hi", "name": "x"}], "note": "kept"}
    first, second = read_examples(write_parquet(tmp_path / "a.parquet", [tool_row, GSM8K_ROW]))
    assert first.prompt == [{"role": "user", "content": "hi", "name": "x"}]
    assert second.prompt == GSM8K_ROW["prompt"]
    assert first.extra_info["note"] == "kept"
    assert "note" not in second.extra_info


def test_plain_jsonl_rows_keep_their_other_fields(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "sums.jsonl",
        [{"prompt": "3+4=", "answer": "7", "level": 2}, {"prompt": "1+1=", "ground_truth": 2, "answer": "two"}],
    )
    path.write_text("\n" + path.read_text() + "\n\n")
    assert read_examples(path) == [
        PromptExample("3+4=", "7", "sums", {"level": 2}),
        PromptExample("1+1=", 2, "sums", {"answer": "two"}),
    ]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"answer": "7"}, "field prompt: missing"),
        ({"prompt": "", "answer": "7"}, "field prompt: is ''"),
        ({"prompt": 3, "answer": "7"}, "field prompt: is 3"),
        ({"prompt": [], "answer": "7"}, "field prompt: is"),
        ({"prompt": ["hi"], "answer": "7"}, r"field prompt\[0\]: is 'hi'"),
        ({"prompt": [{"role": "user"}], "answer": "7"}, r"field prompt\[0\].content: is None"),
        ({"prompt": [{"content": "x", "role": 1}], "answer": "7"}, r"field prompt\[0\].role: is 1"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}], "answer": "7"}, r"prompt\[0\].content"),
        ({"prompt": "x"}, "field reward_model.ground_truth, ground_truth or answer: missing"),
        ({"prompt": "x", "answer": None}, "ground_truth or answer: missing"),
        ({"prompt": "x", "reward_model": {"style": "rule"}}, "field reward_model.ground_truth: missing"),
        ({"prompt": "x", "reward_model": "rule"}, "field reward_model: is 'rule'"),
        ({"prompt": "x", "answer": "7", "data_source": 5}, "field data_source: is 5"),
        ({"prompt": "x", "answer": "7", "extra_info": [1]}, r"field extra_info: is \[1\]"),
        ({"prompt": "x", "answer": "7", "level": 1, "extra_info": {"level": 2}}, "field level: is 1"),
        ({"prompt": "a \ud83d", "answer": "7"}, r"field prompt: character 3 is '\\ud83d', half of a surrogate pair"),
        ({"prompt": [{"role": "user", "content": "\udc00"}], "answer": "7"}, r"field prompt\[0\]\.content: character 1 is"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": ["\ud83d"]}]},
            r"field messages\[1\]\.tool_calls\[0\]: character 1 is",
        ),
        ([1, 2], "a list; expected one JSON object"),
    ],
)
def test_a_bad_row_is_refused_by_file_row_and_field(tmp_path: Path, row: Any, field: str) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "ok", "answer": "1"}, row])
    with pytest.raises(BatchError, match=field) as caught:
        read_examples(path)
    assert str(caught.value).startswith(f"{path}, line 2")


def test_rows_of_parquet_are_counted_from_one_as_lines_are(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "bad.parquet", [GSM8K_ROW, {**GSM8K_ROW, "reward_model": {"style": "rule"}}])
    with pytest.raises(BatchError, match=r"bad.parquet, row 2, field reward_model.ground_truth"):
        read_examples(path)


def test_a_line_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "x", "answer": "1"}\n{"prompt": \n')
    with pytest.raises(BatchError, match=r"broken.jsonl, line 2: not JSON"):
        read_examples(path)


def test_a_line_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": ' + "[" * 100_000 + "\n")
    with pytest.raises(BatchError, match="line 1: not JSON: maximum recursion depth"):
        read_examples(path)


def test_media_are_refused_but_an_empty_media_column_is_not(tmp_path: Path) -> None:
    row = {"prompt": "x", "answer": "1"}
    assert len(read_examples(write_jsonl(tmp_path / "a.jsonl", [{**row, "images": []}]))) == 1
    with pytest.raises(UnsupportedError, match=r"line 1, field 'images'"):
        read_examples(write_jsonl(tmp_path / "a.jsonl", [{**row, "images": ["a.png"]}]))


@pytest.mark.shows("data: images, video and audio are refused by name, in columns and in messages")
@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image", "image": "a.png"}, "image"),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "image_url"),
        ({"type": None, "text": None, "video": [1]}, "video"),
        ({"type": "input_audio", "input_audio": "a.wav"}, "input_audio"),
    ],
)
def test_messages_with_media_are_refused_by_the_part(tmp_path: Path, part: dict[str, Any], named: str) -> None:
    text = {"type": "text", "text": "What is this?", "image": None}
    rows = [{"prompt": [{"role": "user", "content": content}], "answer": "1"} for content in ([text], [text, part])]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert len(read_examples(write_jsonl(tmp_path / "b.jsonl", rows[:1]))) == 1
    problem = rf"line 2, field prompt\[0\]\.content\[1\] is a part with '{named}': .* text alone"
    with pytest.raises(UnsupportedError, match=problem):
        read_examples(path)
    # Templates of models that read images would render it.
    with pytest.raises(UnsupportedError, match=rf"messages\[0\]\.content\[1\] is a part with '{named}'"):
        encode_messages(rows[1]["prompt"], None)


def test_files_that_cannot_be_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_examples(tmp_path / "missing.jsonl")
    (tmp_path / "a.tsv").write_text("prompt\tanswer\n")
    with pytest.raises(ConfigError, match=r"a\.tsv': is no \.jsonl, \.json, \.csv or \.parquet file; .* folder of its own"):
        read_examples(tmp_path / "a.tsv")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BatchError, match="no rows"):
        read_examples(tmp_path / "empty.jsonl")
    (tmp_path / "not_ours.jsonl").symlink_to("/proc/self/mem")  # a file whose beginning nobody can read, root included
    with pytest.raises(
        ConfigError, match=r"^dataset='\S+/not_ours.jsonl': cannot be read: .+; give a file that this user may"
    ):
        read_examples(tmp_path / "not_ours.jsonl")
    (tmp_path / "broken.parquet").write_text("not parquet")
    with pytest.raises(BatchError, match="not a readable parquet file"):
        read_examples(tmp_path / "broken.parquet")


REWARDS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Scale:
    value: float = 2.0

def exact(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": Scale().value * (solution_str == ground_truth), "data_source": data_source}

def any_keywords(**kwargs):
    return 1

def too_few(solution_str, ground_truth):
    return 1.0

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

number = 3
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return path


def test_a_reward_function_is_loaded_from_a_file(rewards: Path) -> None:
    exact = load_reward(f"{rewards}:exact").function
    assert score_value(exact(data_source="s", solution_str="7", ground_truth="7", extra_info=None)) == 2.0
    any_keywords = load_reward(f"{rewards}:any_keywords").function
    assert any_keywords(data_source="s", solution_str="7", ground_truth="7", extra_info=None) == 1


def test_a_reward_function_is_loaded_from_a_module(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(rewards.parent)
    assert load_reward("my_rewards:exact").function("s", "6", "7")["score"] == 0.0
    monkeypatch.delitem(sys.modules, "my_rewards")


def test_verls_own_reward_function_can_be_loaded() -> None:
    pytest.importorskip("verl", reason="verl is not installed")
    compute_score = load_reward("verl.utils.reward_score:default_compute_score").function
    solution = "The answer is #### 72"
    score = compute_score(data_source="openai/gsm8k", solution_str=solution, ground_truth="72", extra_info=None)
    assert score_value(score) == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "must take"),
        ("number", "no function 'number'"),
        ("missing", "no function 'missing'; it has exact, any_keywords, too_few, later"),
        ("", "expected package.module:function"),
    ],
)
def test_what_cannot_be_called_as_verl_calls_it_is_refused_when_loaded(rewards: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(f"{rewards}:{name}")


def test_a_module_or_file_that_cannot_be_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails.py").write_text("raise RuntimeError('boom')\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    for spec, message in {
        "no_such_package.rewards:exact": "no_such_package",
        f"{tmp_path}/none.py:exact": "No such file",
        f"{tmp_path}/fails.py:exact": "RuntimeError: boom",
        f"{tmp_path}/leaves.py:exact": "leaves.py failed: SystemExit: 0",
        "leaves:exact": "cannot import leaves: SystemExit: 0",
        "fails:exact": r"^reward function='fails:exact': cannot import fails: RuntimeError: boom$",
        "just_a_name": "expected package.module:function",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_reward(spec)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"to name a file give leaves\.py:exact; cannot import leaves: SystemExit: 0"):
        load_reward("leaves:exact")


NO_NUMBERS = [None, "1.0", {"acc": 1.0}, {"score": "high"}, float("nan"), {"score": float("inf")}]


@pytest.mark.parametrize(
    "result",
    [*NO_NUMBERS, np.array([1.0, 2.0]), torch.ones(2), 10**400, {"score": -(10**400)}],
    ids=lambda result: repr(result)[:24],
)
def test_a_result_without_a_finite_score_is_refused(result: Any) -> None:
    with pytest.raises(RLBackendError, match="the reward function returned"):
        score_value(result)


@pytest.mark.parametrize(
    "result", [10**5000, -(10**5000), {"score": 10**5000}, [{"score": 10**5000}]], ids=lambda result: type(result).__name__
)
def test_whole_numbers_that_python_does_not_write_are_refused_by_their_size(result: Any) -> None:
    with pytest.raises(BatchError, match=r"the reward function returned .*<int of 16610 bits>"):
        score_value(result)


@pytest.mark.filterwarnings("error")  # numpy only warns that a part is lost
@pytest.mark.parametrize("result", [1 + 2j, np.complex128(1 + 2j), {"score": np.array(1 + 0j)}, torch.tensor(1 + 0j)])
def test_complex_numbers_are_no_scores(result: Any) -> None:
    with pytest.raises(BatchError, match=r"the reward function returned .*; expected a real number"):
        score_value(result)


@pytest.mark.parametrize("result", [True, 1, 1.0, {"score": 1, "acc": True}, np.float32(1), np.int64(1), torch.tensor(1)])
def test_numbers_and_mappings_with_a_score_are_scores(result: Any) -> None:
    assert score_value(result) == 1.0
