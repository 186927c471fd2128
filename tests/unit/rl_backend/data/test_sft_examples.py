"""What SFT trains on: masks of conversations by chat templates, rows with answers, and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.sft import SFTConfig
from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.chat_template import encode_messages
from rl_backend.data.examples import DataConfig
from rl_backend.data.prompts import endless_batches, epoch_batches, load_prompts
from rl_backend.data.sft import TrainedTokens, _marked, conversation_tokens, load_sft_examples
from tests.support.chat_templates import CHATML, MARKED, OPENED, PHI, TEMPLATES, THINKING, chat_tokenizer
from tests.support.rows import write_rows

CONVERSATION = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\nIt is 4."},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "<think>\nadd again\n</think>\n\nIt is 6."},
]
END = {"llama": "<|eot_id|>", "mistral": "</s>", "phi": "<|end|>"}


def trained_texts(found: list[TrainedTokens], tokenizer: Any) -> list[str]:
    """The text of each run of trained tokens."""
    texts: list[str] = []
    for each in found:
        run: list[int] = []
        for token, trained in zip([*each.token_ids, -1], [*each.trained, False], strict=True):
            if trained:
                run.append(token)
            elif run:
                texts.append(tokenizer.decode(run))
                run = []
    return texts


@pytest.mark.shows("data: SFT trains each turn after exactly the tokens that a rollout's prompt has, its end token included")
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_turn_is_trained_after_what_a_rollout_sees_and_with_its_end(name: str) -> None:
    tokenizer = chat_tokenizer(TEMPLATES[name])
    found = conversation_tokens(CONVERSATION, tokenizer)
    end = END.get(name, "<|im_end|>")
    space = " " if name == "mistral" else ""
    assert trained_texts(found, tokenizer) == [f"{space}{CONVERSATION[turn]['content']}{end}" for turn in (1, 3)]
    for turn in (1, 3):
        prompt = encode_messages(CONVERSATION[:turn], tokenizer)
        (sequence,) = [each for each in found if each.token_ids[: len(prompt)] == prompt and each.trained[len(prompt)]]
        assert not sequence.trained[len(prompt) - 1]
    assert all(each.trained[-1] for each in found)


def test_turns_share_a_sequence_unless_the_template_rewrites_them() -> None:
    counts = {name: len(conversation_tokens(CONVERSATION, chat_tokenizer(text))) for name, text in TEMPLATES.items()}
    assert counts == {"chatml": 1, "marked": 1, "llama": 1, "mistral": 1, "phi": 1, "thinking": 2}
    second = conversation_tokens(CONVERSATION, chat_tokenizer(THINKING))[1]
    text = chat_tokenizer(THINKING).decode(second.token_ids)
    assert "add\n" not in text and "add again" in text


def test_what_a_prompt_opens_is_not_trained_and_what_it_shuts_is_not_there() -> None:
    tokenizer = chat_tokenizer(OPENED)
    found = conversation_tokens(CONVERSATION, tokenizer)
    expected = [CONVERSATION[turn]["content"].removeprefix("<think>\n") + "<|im_end|>" for turn in (1, 3)]
    assert trained_texts(found, tokenizer) == expected
    for turn, each in zip((1, 3), found, strict=True):
        prompt = encode_messages(CONVERSATION[:turn], tokenizer)
        assert each.token_ids[: len(prompt)] == prompt and each.prompt_tokens == len(prompt)
        assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n")
    answers = [{**message, "content": message["content"].split("\n\n")[-1]} for message in CONVERSATION]
    shut = conversation_tokens(answers, tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert trained_texts(shut, tokenizer) == ["It is 4.<|im_end|>", "It is 6.<|im_end|>"]


def test_masks_equal_those_of_a_template_that_marks_what_the_model_writes() -> None:
    marked = chat_tokenizer(MARKED).apply_chat_template(
        CONVERSATION, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    for template in (CHATML, MARKED):
        (found,) = conversation_tokens(CONVERSATION, chat_tokenizer(template))
        assert found.token_ids == marked["input_ids"][: len(found.token_ids)]
        assert found.trained == [bool(each) for each in marked["assistant_masks"][: len(found.token_ids)]]


def test_what_a_template_leaves_unmarked_is_not_trained_but_the_end_is() -> None:
    template = MARKED.replace("{% generation %}{{ message.content }}", "Well: {% generation %}{{ message.content }}")
    tokenizer = chat_tokenizer(template.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"))
    texts = trained_texts(conversation_tokens(CONVERSATION, tokenizer), tokenizer)
    assert texts == [f"{CONVERSATION[turn]['content']}<|im_end|>" for turn in (1, 3)]


def test_only_the_last_turn_is_trained_where_that_is_asked_for() -> None:
    tokenizer = chat_tokenizer(CHATML)
    (found,) = conversation_tokens([*CONVERSATION, {"role": "user", "content": "Thanks"}], tokenizer, "last")
    assert trained_texts([found], tokenizer) == [f"{CONVERSATION[3]['content']}<|im_end|>"]
    assert "Thanks" not in tokenizer.decode(found.token_ids)


def test_no_token_reaches_over_the_border_of_prompt_and_answer() -> None:
    tokenizer = chat_tokenizer(CHATML)
    messages = [CONVERSATION[0], {"role": "assistant", "content": "\nIt is 4."}]
    prompt = encode_messages(messages[:1], tokenizer)
    joint = encode_messages(messages, tokenizer, generation_prompt=False)
    assert joint[: len(prompt)] != prompt  # both line ends are one token
    (found,) = conversation_tokens(messages, tokenizer)
    assert found.token_ids[: len(prompt)] == prompt and found.prompt_tokens == len(prompt)
    assert trained_texts([found], tokenizer) == ["\nIt is 4.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHATML.replace("<|im_end|>", ""), CONVERSATION, "without a special token: a model trained on it would never end"),
        (CHATML, CONVERSATION[:1], "need a turn of the assistant"),
        (CHATML, CONVERSATION[1:], "one before it"),
        (
            CHATML.replace("assistant\n{% endif", "assistant\nWell: {% endif"),
            CONVERSATION,
            "does not render message 2 as an",
        ),
        (
            TEMPLATES["mistral"],
            [{"role": "tool", "content": "x"}, *CONVERSATION],
            "refuses messages of the roles tool, user",
        ),
        (MARKED.replace("== 'assistant'", "== 'user'"), CONVERSATION, "marks nothing of message 2"),
    ],
)
def test_what_cannot_be_trained_as_the_model_meets_it_is_refused(template: str, messages: Any, message: str) -> None:
    with pytest.raises((BatchError, ConfigError), match=message):
        conversation_tokens(messages, chat_tokenizer(template))


def test_one_renderer_gives_sft_the_prompts_of_rollouts(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", {"question": "2+2?", "solution": "4"}, {"question": "3+3?", "solution": "6"})
    tokenizer = chat_tokenizer(THINKING)
    data = DataConfig(
        prompt_column="question",
        answer_column="solution",
        text_prompts="message",
        system_prompt="Be brief.",
        chat_template_kwargs={"enable_thinking": False},
    )
    prompts = load_prompts(path, tokenizer, 64, data)
    examples = load_sft_examples(path, tokenizer, 64, 128, data)
    for prompt, (sequence,) in zip(prompts, examples, strict=True):
        first = int(sequence.token_fields["loss_mask"].argmax()) + 1
        assert sequence.input_ids[:first].tolist() == prompt.token_ids
        answer = tokenizer.decode(sequence.input_ids[sequence.token_fields["loss_mask"].roll(1) > 0])
        assert answer == f"{prompt.example.ground_truth}<|im_end|>"
    assert "Be brief." in tokenizer.decode(prompts[0].token_ids)
    assert tokenizer.decode(prompts[0].token_ids).endswith("<think>\n\n</think>\n\n")


def test_rows_of_messages_train_their_turns_and_answers_of_their_own_column_alone(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(CHATML)
    path = write_rows(
        tmp_path / "train.jsonl",
        {"messages": CONVERSATION},
        {"prompt": CONVERSATION[:3], "answer": "six"},
        {"messages": CONVERSATION[:3]},
    )
    masked = [
        [tokenizer.decode(sequence.input_ids[sequence.token_fields["loss_mask"].roll(1) > 0]) for sequence in sequences]
        for sequences in load_sft_examples(path, tokenizer, 128, 256)
    ]
    first, second = (f"{CONVERSATION[turn]['content']}<|im_end|>" for turn in (1, 3))
    assert masked == [[first + second], ["six<|im_end|>"], [first]]
    with pytest.raises(BatchError, match=r"line 1: the answer is 4; SFT needs text"):
        load_sft_examples(write_rows(tmp_path / "a.jsonl", {"prompt": "x", "answer": 4}), tokenizer, 128, 256)
    with pytest.raises(BatchError, match=r"line 1: there is no answer to imitate; name its column with answer_column"):
        load_sft_examples(write_rows(tmp_path / "a.jsonl", {"prompt": "x"}), tokenizer, 128, 256)


def test_an_answer_that_no_tokenizer_can_read_is_refused_by_its_row(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(CHATML)
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "x", "answer": "4"}, {"prompt": "x", "answer": "4 \ud83d"})
    with pytest.raises(BatchError, match=r"a\.jsonl, line 2: the answer: character 3 is '\\ud83d', half"):
        load_sft_examples(path, tokenizer, 128, 256)
    with pytest.raises(BatchError, match=r"a\.jsonl, line 2: field answer: character 3 is"):
        load_sft_examples(path, tokenizer, 128, 256, DataConfig(answer_column="answer"))
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\ud83d"}]
    with pytest.raises(BatchError, match=r"a\.jsonl, line 1, field messages\[1\]\.content: character 1 is"):
        load_sft_examples(write_rows(path, {"messages": turns}), tokenizer, 128, 256)


def test_of_messages_and_an_answer_the_messages_are_trained_unless_the_column_is_named(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(CHATML)
    path = write_rows(tmp_path / "train.jsonl", {"messages": CONVERSATION[:2], "answer": "4"})
    for data, answer in ((DataConfig(), CONVERSATION[1]["content"]), (DataConfig(answer_column="answer"), "4")):
        ((sequence,),) = load_sft_examples(path, tokenizer, 128, 256, data)
        trained = sequence.input_ids[sequence.token_fields["loss_mask"].roll(1) > 0]
        assert tokenizer.decode(trained) == f"{answer}<|im_end|>"
    write_rows(path, {"messages": CONVERSATION, "gold": "4"}, {"messages": CONVERSATION, "gold": None})
    with pytest.raises(BatchError, match=r"line 2, field gold: missing or null; .*; name its column with answer_column"):
        load_sft_examples(path, tokenizer, 128, 256, DataConfig(answer_column="gold"))


def test_examples_that_are_too_long_are_refused_filtered_or_cut_with_their_count(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(None)
    rows = [{"prompt": "ab", "answer": "z" * length} for length in (3, 40, 3, 50)]
    path = write_rows(tmp_path / "train.jsonl", *rows)
    with pytest.raises(
        BatchError, match=r"2 of 4 examples have more tokens than max_tokens_per_micro_batch=16 \(the first is "
    ):
        load_sft_examples(path, tokenizer, 8, 16)
    filtered = load_sft_examples(path, tokenizer, 8, 16, DataConfig(too_long="filter"))
    assert len(filtered) == 2 and filtered.note.endswith("max_tokens_per_micro_batch=16: filtered")
    cut = load_sft_examples(path, tokenizer, 8, 16, DataConfig(too_long="cut"))
    assert [len(sequence) for (sequence,) in cut] == [len(filtered[0][0]), 16, len(filtered[0][0]), 16]
    whole = load_sft_examples(path, tokenizer, 8, 64)
    assert cut[1][0].input_ids.tolist() == whole[1][0].input_ids[:16].tolist()
    (shortest,) = load_sft_examples(path, tokenizer, 1, 2, DataConfig(too_long="cut"))[0]
    assert len(shortest) == 2 and shortest.token_fields["loss_mask"].tolist() == [1, 0]


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("trained", [range(8, 20), (8, 9, 15, 16, 17), (1, 19)], ids=["an answer", "two turns", "far apart"])
def test_a_cut_keeps_the_same_tokens_trained_whatever_is_cut(trained: Sequence[int], begins: bool) -> None:
    """Every token is its own number, so that what is left says where it stood."""
    tokenizer = SimpleNamespace(bos_token_id=0 if begins else None)
    whole = TrainedTokens(list(range(20)), [token in trained for token in range(20)])
    first = min(trained)
    for most_of_prompt in range(1, 12):
        for most in range(2, 25):
            found = whole.cut(most_of_prompt, most, tokenizer)
            room = min(first, most_of_prompt, most - 1)
            prompt = [0, *range(first - room + 1, first)] if begins and room > 1 else list(range(first - room, first))
            assert found.token_ids == [*prompt, *range(first, 20)][:most]
            sequence = found.sequence()
            imitated = [
                token
                for token, mask in zip(found.token_ids[1:], sequence.token_fields["loss_mask"][:-1], strict=True)
                if mask
            ]
            assert imitated == [token for token in found.token_ids if token in trained]
            assert first in imitated and sequence.token_fields["loss_mask"][-1] == 0


def test_an_epoch_has_every_example_once_in_even_batches() -> None:
    batches = list(islice(epoch_batches(range(10), 4, seed=1), 6))
    assert [len(batch) for batch in batches] == [3, 3, 4, 3, 3, 4]
    assert sorted(chain(*batches[:3])) == sorted(chain(*batches[3:])) == list(range(10))
    assert batches[:3] != batches[3:]
    for in_order in (epoch_batches, endless_batches):
        from_the_start = list(islice(in_order(range(10), 4, seed=1), 9))
        assert list(islice(in_order(range(10), 4, seed=1, start=5), 4)) == from_the_start[5:]


def test_epochs_decide_the_steps() -> None:
    options: dict[str, Any] = {"model": "m", "dataset": "d", "batch_size": 4}
    config = SFTConfig(**options, epochs=3, lr_warmup_steps=200).with_epochs(1000)
    assert config.steps == config.optimizer_steps == 750
    assert config.with_epochs(1000) == config
    assert SFTConfig(**options).with_epochs(1000).steps == 100
    with pytest.raises(ConfigError, match=r"steps=50: epochs=3 of 1000 examples are 750 steps; leave out one"):
        SFTConfig(**options, epochs=3, steps=50).with_epochs(1000)
    with pytest.raises(ConfigError, match=r"would never reach lr"):
        SFTConfig(**options, epochs=1, lr_warmup_steps=200).with_epochs(100)


def test_a_turn_ends_behind_its_own_words_though_the_question_has_them_too() -> None:
    """Phi's template ends the text as well: what is learnt is the end of the turn."""
    tokenizer = chat_tokenizer(PHI)
    for question in ("4", "is it 4 or 5?", "5"):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "4"}]
        (found,) = conversation_tokens(turns, tokenizer)
        first = found.prompt_tokens
        assert tokenizer.decode(found.token_ids[first:]) == "4<|end|>" and all(found.trained[first:])


def test_marks_are_of_the_whole_text_where_an_answer_is_read_by_itself() -> None:
    """Its tokens are a letter each here; the text is the last three of five letters."""

    def letters(text: str, **_: Any) -> dict[str, Any]:
        return {"offset_mapping": [(place, place + 1) for place in range(len(text))]}

    for spans, marked in (
        ([(3, 4)], [False, True, False]),
        ([(0, 2)], [False, False, False]),
        ([(1, 3)], [True, False, False]),
        ([(2, 3), (4, 5)], [True, False, True]),
        ([(3, 3)], [False, False, False]),
    ):
        assert _marked("cde", 5, spans, letters) == marked
        assert _marked("abcde", 5, spans, letters)[2:] == marked
