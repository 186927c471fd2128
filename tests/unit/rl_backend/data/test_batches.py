"""Tokenizers and prompts as they are loaded, cuts, and the order in which training sees examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.examples import DataConfig, PromptExample, as_messages, cut_prompt
from rl_backend.data.prompts import (
    batches_per_epoch,
    encode_prompt,
    endless_batches,
    epoch_batches,
    load_prompts,
    load_tokenizer,
)
from rl_backend.data.sft import TrainedTokens, conversation_tokens, example_tokens, load_sft_examples
from tests.support.chat_templates import CHATML, THINKING, chat_tokenizer
from tests.support.rows import write_rows

ASKED = [{"role": "user", "content": "2+2?"}]


@pytest.mark.parametrize(
    ("most", "bos", "expected"),
    [
        (6, 0, [0, 1, 2, 3, 4]),
        (5, 0, [0, 1, 2, 3, 4]),
        (4, 0, [0, 2, 3, 4]),
        (2, 0, [0, 4]),
        (1, 0, [4]),
        (4, None, [1, 2, 3, 4]),
        (4, 9, [1, 2, 3, 4]),
        (1, None, [4]),
    ],
)
def test_a_cut_keeps_the_end_and_the_token_that_begins_texts(most: int, bos: int | None, expected: list[int]) -> None:
    given = [0, 1, 2, 3, 4]
    assert cut_prompt(given, most, SimpleNamespace(bos_token_id=bos)) == expected and given == [0, 1, 2, 3, 4]


def test_a_sequence_has_its_mask_on_the_predictions_of_trained_tokens() -> None:
    whole = TrainedTokens([5, 6, 7, 8], [False, False, True, True])
    assert whole.prompt_tokens == 2
    sequence = whole.sequence()
    assert sequence.input_ids.tolist() == [5, 6, 7, 8] and sequence.token_fields["loss_mask"].tolist() == [0, 1, 1, 0]
    tokenizer = SimpleNamespace(bos_token_id=5)
    assert whole.cut(2, 3, tokenizer) == TrainedTokens([5, 6, 7], [False, False, True])
    assert whole.cut(1, 9, tokenizer) == TrainedTokens([6, 7, 8], [False, True, True])
    assert whole.cut(9, 2, tokenizer) == TrainedTokens([6, 7], [False, True])


@pytest.mark.parametrize(
    ("items", "size", "sizes"), [(10, 4, [3, 3, 4]), (8, 4, [4, 4]), (3, 4, [3]), (9, 2, [1, 2, 2, 2, 2])]
)
def test_an_epoch_has_every_item_once(items: int, size: int, sizes: list[int]) -> None:
    assert batches_per_epoch(items, size) == len(sizes)
    found = list(islice(epoch_batches(range(items), size, seed=3), 2 * len(sizes)))
    assert [len(batch) for batch in found] == sizes * 2 and max(sizes) <= size
    for epoch in (found[: len(sizes)], found[len(sizes) :]):
        assert sorted(each for batch in epoch for each in batch) == list(range(items))


@pytest.mark.parametrize("start", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("in_order", [endless_batches, epoch_batches])
def test_batches_that_are_left_out_are_not_looked_at_and_seeds_differ(in_order: Any, start: int) -> None:
    class Noted(list[int]):
        asked: list[int] = []  # noqa: RUF012, of this class alone

        def __getitem__(self, index: Any) -> Any:
            self.asked.append(index)
            return super().__getitem__(index)

    items = Noted(range(11))
    Noted.asked = []
    batches: Iterator[list[int]] = in_order(items, 3, 8, start=start)
    first = next(batches)
    assert Counter(Noted.asked) == Counter(first)
    whole = list(islice(in_order(range(11), 3, 8), 12))
    assert [first, *islice(batches, 11 - start)] == whole[start:]
    assert whole != list(islice(in_order(range(11), 3, 9), 12))
    if in_order is endless_batches:
        assert {len(batch) for batch in whole} == {3}, "what is left of a pass is left out"
        assert all(len({each for batch in whole[at : at + 3] for each in batch}) == 9 for at in (0, 3, 6))


def test_a_batch_may_be_all_items_and_not_more() -> None:
    assert sorted(next(endless_batches(range(3), 3, 1))) == [0, 1, 2]
    with pytest.raises(ConfigError, match="a batch of 4 needs at least as many examples; the data has 3"):
        endless_batches(range(3), 4, 1)


@pytest.mark.parametrize(
    ("option", "value"), [("system_prompt", "s"), ("chat_template_kwargs", {"a": 1}), ("tools_file", "t.json")]
)
def test_an_option_of_templates_is_refused_for_a_text_that_goes_on(option: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        as_messages("text", DataConfig(**{option: value}), "row 3")
    assert str(refused.value) == (
        f"{option}={value!r}: row 3 is text, which is continued as it stands; set text_prompts to message, or leave it out"
    )
    assert as_messages("text", DataConfig(), "row 3") is None
    data = DataConfig(text_prompts="message", **{option: value})
    messages = as_messages("text", data, "row 3")
    assert messages is not None and messages[-1] == {"role": "user", "content": "text"}
    assert (len(messages) == 2) == (option == "system_prompt")
    assert as_messages(ASKED, data, "row 3") == [*messages[:-1], *ASKED]


def test_a_prompt_is_encoded_as_text_or_by_the_template_and_needs_a_token() -> None:
    tokenizer = chat_tokenizer(THINKING)
    data = DataConfig(chat_template_kwargs={"enable_thinking": False}, text_prompts="message", system_prompt="s")
    text = tokenizer.decode(encode_prompt("2+2?", tokenizer, data))
    assert text.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n2+2?") and text.endswith("</think>\n\n")
    assert encode_prompt("a b", tokenizer, DataConfig()) == tokenizer.encode("a b")
    with pytest.raises(BatchError, match=r"^row 7: a prompt of 0 tokens; remove the row$"):
        encode_prompt("", tokenizer, DataConfig(), "row 7")
    with pytest.raises(BatchError, match=r"^row 7: the chat template of models/mine "):
        encode_prompt([*ASKED, {"role": "assistant", "content": None}], chat_tokenizer(CHATML), DataConfig(), "row 7")


def test_prompts_at_their_limit_are_kept_and_all_that_are_kept_are_seen(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", *({"prompt": "z" * n, "answer": str(n)} for n in (4, 5, 3)))
    seen: list[tuple[int, str]] = []
    prompts = load_prompts(
        path,
        chat_tokenizer(None),
        4,
        DataConfig(too_long="filter"),
        see=lambda prompt, where: seen.append((len(prompt.token_ids), where.rpartition(", ")[2])),
    )
    assert [each.example.ground_truth for each in prompts] == ["4", "3"] and seen == [(4, "line 1"), (3, "line 3")]
    cut = load_prompts(path, chat_tokenizer(None), 4, DataConfig(too_long="cut"))
    assert [len(each.token_ids) for each in cut] == [4, 4, 3] and cut[1].example.prompt == "zzzzz"


@pytest.mark.parametrize(
    ("positions", "most", "message"),
    [
        (None, 9, r"max_tokens_per_micro_batch=9 .*; raise it, or set"),
        (12, 9, r"max_tokens_per_micro_batch=9 .*; raise it, or set"),
        (9, 9, r"max_tokens_per_micro_batch=9 .*; raise it, or set"),
        (8, 9, r"the model's positions=8 .*; shorten them, or set"),
    ],
)
def test_the_lesser_of_budget_and_positions_limits_sequences(
    tmp_path: Path, positions: int | None, most: int, message: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "ab", "answer": "z" * 20})
    with pytest.raises(BatchError, match=f"1 of 1 examples has more tokens than {message}"):
        load_sft_examples(path, chat_tokenizer(None), 5, most, positions=positions)
    ((cut,),) = load_sft_examples(path, chat_tokenizer(None), 5, most, DataConfig(too_long="cut"), positions=positions)
    assert len(cut) == min(most, positions or most)
    with pytest.raises(BatchError, match=r"more tokens than max_prompt_tokens=1 .* line 1 with 2, the longest has 2"):
        load_sft_examples(path, chat_tokenizer(None), 1, 100, positions=positions and 100)


def test_lengths_of_every_sequence_of_a_row_are_looked_at(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "<think>\n" + "e" * 90 + "\n</think>\n\nf"},
    ]
    path = write_rows(tmp_path / "a.jsonl", {"messages": turns})
    tokenizer = chat_tokenizer(THINKING)
    first, second = load_sft_examples(path, tokenizer, 200, 400)[0]
    assert len(first) < len(second)
    with pytest.raises(BatchError, match=f"the longest has {len(second)}"):
        load_sft_examples(path, tokenizer, 200, len(second) - 1)
    (last,) = load_sft_examples(path, tokenizer, 200, 400, train_on="last")[0]
    assert last.input_ids.tolist() == second.input_ids.tolist()
    before = int(second.token_fields["loss_mask"].argmax()) + 1
    with pytest.raises(BatchError, match=f"max_prompt_tokens={before - 1} .* with {before}, the longest has {before}"):
        load_sft_examples(path, tokenizer, before - 1, 400)


def test_what_of_an_example_is_trained() -> None:
    tokenizer = chat_tokenizer(CHATML)
    turns = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]
    answer = {"role": "assistant", "content": "yes"}

    def trained(example: PromptExample, train_on: Any = "all", **data: Any) -> list[str]:
        found = example_tokens(example, tokenizer, DataConfig(**data), train_on)
        return [
            tokenizer.decode([token for token, own in zip(each.token_ids, each.trained, strict=True) if own])
            for each in found
        ]

    both = PromptExample(turns, "yes", "s", {}, answer)
    assert trained(both) == ["4<|im_end|>yes<|im_end|>"] and trained(both, "last") == ["yes<|im_end|>"]
    assert trained(PromptExample(turns, "no", "s", {}, answer), answer_column="x") == ["no<|im_end|>"]
    assert trained(PromptExample(turns, "no", "s")) == ["no<|im_end|>"], "of other rows it is the answer"
    assert trained(PromptExample(turns[:2], None, "s")) == ["4<|im_end|>"]
    assert trained(PromptExample("so", "4", "s"), text_prompts="message") == ["4<|im_end|>"]
    for truth in (4, ["4"], False):
        with pytest.raises(BatchError, match=r"the answer is .*; SFT needs text"):
            trained(PromptExample(turns, truth, "s"))
    with pytest.raises(BatchError, match="there is no answer to imitate; name its column with answer_column"):
        trained(PromptExample("so", None, "s"))
    with pytest.raises(BatchError, match="need a turn of the assistant, and one before it"):
        conversation_tokens([answer, *turns], tokenizer)


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer \(none of tokenizer.json, .*\); add tokenizer.json and"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"has no tokenizer that can be loaded, \w+: .*; check tokenizer.json and"):
        load_tokenizer(str(tmp_path))
    good = tmp_path / "good"
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.save_pretrained(good)
    assert load_tokenizer(str(good)).eos_token == "</s>"
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(ConfigError, match="its tokenizer has no eos_token; responses would never end; set it in"):
        load_tokenizer(str(tmp_path / "endless"))


def test_held_out_rows_are_named_by_their_own_option(tmp_path: Path) -> None:
    tokenizer, gone = chat_tokenizer(None), tmp_path / "gone.jsonl"
    for held_out, option in ((True, "eval_dataset"), (False, "dataset")):
        for load in (load_prompts, lambda *given, **options: load_sft_examples(*given, 9, **options)):
            with pytest.raises(ConfigError, match=f"^{option}="):
                load(gone, tokenizer, 5, held_out=held_out)
