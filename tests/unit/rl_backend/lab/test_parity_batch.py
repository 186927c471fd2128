"""The batch that both sides of a comparison train on."""

from __future__ import annotations

from rl_backend.lab.parity.config import ParityConfig, ParitySide, make_sequences


def test_lengths_go_from_the_shortest_to_the_longest_and_all_but_the_first_token_is_trained() -> None:
    sides = {"reference": ParitySide(runtime="transformers"), "candidate": ParitySide(runtime="native")}
    config = ParityConfig(model="tiny", min_length=1, max_length=9, num_sequences=9, num_micro_batches=1, **sides)
    sequences = make_sequences(config, {"vocab_size": 11, "pad_token_id": 3})
    assert sorted(map(len, sequences)) == list(range(1, 10))
    for sequence in sequences:
        assert sequence.token_fields["loss_mask"].tolist() == [1.0] * (len(sequence) - 1) + [0.0]
        assert 3 not in sequence.input_ids.tolist()
    assert min(map(len, make_sequences(config.replace(min_length=2), {"vocab_size": 11}))) == 2
