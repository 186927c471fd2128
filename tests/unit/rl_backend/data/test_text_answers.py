"""Texts and the answers that follow them, with every kind of tokenizer: no space too many, and special tokens once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import BatchError
from rl_backend.data.chat_template import encode_answer, encode_text
from rl_backend.data.examples import DataConfig
from rl_backend.data.prompts import load_prompts
from rl_backend.data.sft import conversation_tokens, load_sft_examples
from rl_backend.environment import answering
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.rows import write_rows
from tests.support.tokenizer_kinds import KINDS

PAIRS = [("2+2=", "4"), ("so:", " it is"), ("it is", " so"), ("2+2=4\n", "5=5"), ("is", " is is\n")]


@pytest.fixture(params=sorted(KINDS), scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


def without_ends(text: str, tokenizer: Any) -> list[int]:
    """As the tokenizer encodes a text, without the special tokens that it puts behind one."""
    found: list[int] = tokenizer.encode(text)
    alone: list[int] = tokenizer.encode(text, add_special_tokens=False)
    while found[-len(alone) :] != alone:
        found = found[:-1]
    return found


def sft_tokens(path: Path, tokenizer: Any, row: int = 0) -> tuple[list[int], list[int]]:
    """Tokens of a row before the first that is trained, and from there on."""
    (sequence,) = load_sft_examples(path, tokenizer, 200, 400)[row]
    first = int(sequence.token_fields["loss_mask"].argmax()) + 1
    assert sequence.token_fields["loss_mask"][first - 1 : -1].all()
    ids = sequence.input_ids.tolist()
    return ids[:first], ids[first:]


@pytest.mark.shows("data: an answer behind a text has the tokens of both together, with every kind of tokenizer")
def test_an_answer_has_the_tokens_that_prompt_and_answer_have_together(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", *({"prompt": prompt, "answer": answer} for prompt, answer in PAIRS))
    prompts = load_prompts(path, tokenizer, 200)
    for row, (prompt, answer) in enumerate(PAIRS):
        before, trained = sft_tokens(path, tokenizer, row)
        assert before == prompts[row].token_ids == without_ends(prompt, tokenizer)
        assert [*before, *trained] == [*without_ends(prompt + answer, tokenizer), tokenizer.eos_token_id]


def test_an_answer_is_written_as_it_is_inside_of_a_longer_text(tokenizer: Any) -> None:
    """Without a look at the tokens of a text that begins: behind many words, an answer has its tokens wherever it stands."""
    for prompt, longer, answer in (("so:", "it is so so:", " it"), ("2+2=", "so: 2+2=4+4=", "4"), ("is", "so is", " so")):
        assert encode_answer(prompt, answer, tokenizer)[1] == encode_answer(longer, answer, tokenizer)[1]


def test_a_row_whose_border_of_prompt_and_answer_is_inside_of_a_token_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    generator = random.Random(7)
    pieces = ["it", " is", "is", " ", "so", ":", "2", "+", "=", "\n", "4"]
    refused = 0
    for _ in range(60):
        prompt, answer = ("".join(generator.choices(pieces, k=generator.randint(1, 5))) for _ in range(2))
        if not (prompt.strip() and answer.strip()):
            continue
        before, whole = without_ends(prompt, tokenizer), without_ends(prompt + answer, tokenizer)
        if whole == before:  # several words that a tokenizer of words does not know are one
            continue
        if whole[: len(before)] == before:
            assert encode_answer(prompt, answer, tokenizer) == (before, [*whole[len(before) :], tokenizer.eos_token_id])
        else:
            refused += 1
            path = write_rows(tmp_path / "a.jsonl", {"prompt": "2+2=", "answer": "4"}, {"prompt": prompt, "answer": answer})
            with pytest.raises(BatchError, match=r"a\.jsonl, line 2: the prompt ends with .* the prompt alone has \["):
                load_sft_examples(path, tokenizer, 200, 400)
    assert refused < 50


@pytest.mark.shows("data: a text that begins or ends with special tokens does not get them twice")
def test_texts_with_special_tokens_of_their_own_have_them_once(tmp_path: Path, tokenizer: Any) -> None:
    bos, eos = tokenizer.bos_token or "", tokenizer.eos_token
    path = write_rows(
        tmp_path / "a.jsonl",
        {"prompt": "2+2=", "answer": "4"},
        *({"prompt": prompt, "answer": answer} for prompt in ("2+2=", f"{bos}2+2=") for answer in (f"4{eos}", f"4{eos}\n")),
    )
    plain, _ = sft_tokens(path, tokenizer)
    prompts = load_prompts(path, tokenizer, 200)
    for row, prompt in enumerate(prompts):
        before, trained = sft_tokens(path, tokenizer, row)
        assert before == prompt.token_ids
        assert trained.count(tokenizer.eos_token_id) == 1 and trained[-1] == tokenizer.eos_token_id
        if bos and tokenizer.bos_token_id in plain:
            assert before.count(tokenizer.bos_token_id) == 1
        assert tokenizer.decode(before, skip_special_tokens=True) == tokenizer.decode(plain, skip_special_tokens=True)
    # Episodes of one turn are given what rollouts are.
    row = {"prompt": f"{bos}2+2=", "ground_truth": "4"}
    environment = answering(None, tokenizer, DataConfig())(row, 0)  # type: ignore[arg-type]
    assert environment.start() == encode_text(f"{bos}2+2=", tokenizer) == prompts[3].token_ids


def test_only_what_a_tokenizer_puts_before_a_text_is_put_there(tokenizer: Any) -> None:
    """Not what it puts behind one; and a prompt that ends with a special token keeps it."""
    found = encode_text("2+2=4", tokenizer)
    assert found == without_ends("2+2=4", tokenizer)
    assert tokenizer.eos_token_id not in found[1:]
    text = f"2+2=4{tokenizer.eos_token}"
    if tokenizer.encode(text, add_special_tokens=False)[-1] == tokenizer.eos_token_id:
        assert encode_text(text, tokenizer) == [*found, tokenizer.eos_token_id]


@pytest.mark.parametrize("kind", ["llama", "llama, legacy", "byte-level, prefix space"])
def test_a_turn_that_would_get_a_space_is_refused_and_one_that_gets_none_is_trained(kind: str) -> None:
    for name, refused in ((kind, True), ("byte-level", False)):
        tokenizer = KINDS[name]()
        end = tokenizer.eos_token
        tokenizer.chat_template = (
            "{% for turn in messages %}{{ turn.content if turn.role == 'user' else 'i' ~ turn.content }}"
            f"{end}{{% endfor %}}{{% if add_generation_prompt %}}i{{% endif %}}"
        )
        messages = [{"role": "user", "content": "it"}, {"role": "assistant", "content": "s so"}]
        if refused:
            with pytest.raises(
                BatchError, match=r"message 2 begins with 's so.*', which the tokenizer joins with the end of"
            ):
                conversation_tokens(messages, tokenizer)
        else:
            (found,) = conversation_tokens(messages, tokenizer)
            pieces = tokenizer.convert_ids_to_tokens(found.token_ids[found.prompt_tokens :])
            assert pieces == ["s", "\u0120", "s", "o", end]
        messages[1]["content"] = " so"
        (found,) = conversation_tokens(messages, tokenizer)
        assert tokenizer.decode(found.token_ids[found.prompt_tokens :]).strip() == f"so{end}"


def test_a_turn_that_ends_with_its_own_end_is_refused() -> None:
    tokenizer = chat_tokenizer(CHATML)
    for content in ("4<|im_end|>", "4<|im_end|>\n"):
        messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": content}]
        template = CHATML.replace("message.content", "message.content | trim")
        with pytest.raises(
            BatchError, match=r"message 2 ends with <\|im_end\|>, which the chat template .* writes behind it"
        ):
            conversation_tokens(messages, chat_tokenizer(template) if content.endswith("\n") else tokenizer)


def test_an_answer_without_tokens_is_refused_by_its_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "2+2=", "answer": "4"}, {"prompt": "2+2=", "answer": ""})
    with pytest.raises(BatchError, match=r"a\.jsonl, line 2: the answer has no tokens but its end"):
        load_sft_examples(path, KINDS["gemma"](), 200, 400)
