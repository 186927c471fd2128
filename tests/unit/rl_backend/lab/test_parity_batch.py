"""The batch that both sides of a comparison train on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from rl_backend.lab.parity.config import PASSAGE, ParityConfig, ParitySide, make_sequences, plan_batch


def test_lengths_go_from_the_shortest_to_the_longest_and_all_but_the_first_token_is_trained() -> None:
    sides = {"reference": ParitySide(runtime="transformers"), "candidate": ParitySide(runtime="native")}
    config = ParityConfig(model="tiny", min_length=1, max_length=9, num_sequences=9, num_micro_batches=1, **sides)
    sequences = make_sequences(config, {"vocab_size": 11, "pad_token_id": 3})
    assert sorted(map(len, sequences)) == list(range(1, 10))
    for sequence in sequences:
        assert sequence.token_fields["loss_mask"].tolist() == [1.0] * (len(sequence) - 1) + [0.0]
        assert 3 not in sequence.input_ids.tolist()
    assert min(map(len, make_sequences(config.replace(min_length=2), {"vocab_size": 11}))) == 2


@pytest.mark.parametrize(("vocab_size", "is_text"), [(400, True), (200, False)])
def test_a_model_with_a_tokenizer_is_compared_on_text_of_its_vocabulary(
    tmp_path: Path, vocab_size: int, is_text: bool
) -> None:
    words = re.findall(r"\w+|[^\w\s]+", PASSAGE.read_text())
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(dict.fromkeys(words))}, unk_token="The"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sides = {"reference": ParitySide(runtime="transformers"), "candidate": ParitySide(runtime="native")}
    config = ParityConfig(model=str(tmp_path), seed=1, **sides)
    rows = make_sequences(config, {"vocab_size": vocab_size, "pad_token_id": 3})
    text = [word for word in words if word != words[3]]
    read = [" ".join(tokenizer.id_to_token(int(token)) for token in row.input_ids) for row in rows]
    assert all(line in " ".join(text + text) for line in read) == is_text
    assert len({line for line in read if len(line) > 20}) > 10


def test_another_order_has_the_same_sequences_in_other_micro_batches() -> None:
    sides = {"reference": ParitySide(runtime="transformers"), "candidate": ParitySide(runtime="native", dp=2)}
    config = ParityConfig(model="m", num_sequences=13, num_micro_batches=3, **sides)
    usual, other = plan_batch(config, 2), plan_batch(config, 2, otherwise=True)
    for plan in (usual, other):
        assert sorted(index for rank in plan.micro_batches for batch in rank for index in batch) == list(range(13))
        assert all(len(rank) == 3 and all(1 <= len(batch) <= 3 for batch in rank) for rank in plan.micro_batches)
    batches = [{frozenset(batch) for rank in plan.micro_batches for batch in rank} for plan in (usual, other)]
    assert not batches[0] & batches[1]
