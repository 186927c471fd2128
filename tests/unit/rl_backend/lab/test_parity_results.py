"""What both sides of a comparison start from, and its result as text and JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from rl_backend.contracts import ConfigError, LoRAConfig, ParallelConfig
from rl_backend.lab.parity import run as module
from rl_backend.lab.parity.compare import SideRecord
from rl_backend.lab.parity.config import ParityConfig, ParitySide, make_sequences, plan_batch, start_of
from rl_backend.lab.parity.run import ParityResult, as_json, as_text, required_modules
from tests.support.parity_records import SAME, compared, record, times, values


def config(**changes: Any) -> ParityConfig:
    sides = {"reference": ParitySide(runtime="transformers"), "candidate": ParitySide(runtime="native")}
    return ParityConfig.model_validate({"model": "m", **sides, "device": "cpu", **changes})


def test_a_batch_has_every_length_and_no_padding_and_is_the_seeds() -> None:
    given = config(num_sequences=9, min_length=2, max_length=10, seed=3)
    hf_config = {"text_config": {"vocab_size": 5, "pad_token_id": 2, "max_position_embeddings": 10}}
    rows = make_sequences(given, hf_config)
    assert sorted(map(len, rows)) == list(range(2, 11)) and [len(row) for row in rows] != list(range(2, 11))
    seen = set(torch.cat([row.input_ids for row in rows]).tolist())
    assert seen == {0, 1, 3, 4}
    assert all(row.token_fields["loss_mask"].tolist() == [1.0] * (len(row) - 1) + [0.0] for row in rows)
    again, other = make_sequences(given, hf_config), make_sequences(given.replace(seed=4), hf_config)
    assert all(torch.equal(row.input_ids, same.input_ids) for row, same in zip(rows, again, strict=True))
    assert any(len(row) != len(one) for row, one in zip(rows, other, strict=True))
    for odd, message in (
        ({"vocab_size": 5, "max_position_embeddings": 9}, r"ParityConfig.max_length=10: the model has 9 positions"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_sequences(given, odd)


def test_sequences_are_dealt_out_in_turn() -> None:
    plan = plan_batch(config(num_sequences=7, num_micro_batches=2), 3)
    assert plan.micro_batches == (((0, 6), (3,)), ((1,), (4,)), ((2,), (5,)))


def test_what_an_adapter_starts_from_is_of_its_name_and_seed() -> None:
    first = start_of("a", (3, 4), 1)
    assert first.shape == (3, 4) and first.dtype == torch.float32 and 0 < float(first.abs().max()) < 0.3
    assert torch.equal(first, start_of("a", (3, 4), 1))
    assert not torch.equal(first, start_of("b", (3, 4), 1)) and not torch.equal(first, start_of("a", (3, 4), 2))
    assert 0.7 < float(start_of("a", (9,), 1).min()) < 1.3, "a vector multiplies"


@pytest.mark.parametrize(
    ("names", "layers", "expected"),
    [
        (
            ["model.embed.weight", "model.layers.0.a.weight", "model.layers.1.a.weight", "model.norm.weight", "head.weight"],
            2,
            ("model.embed", "model.norm", "model.layers.0", "model.layers.1"),
        ),
        (["e.weight", "h.0.a.b", "h.2.a.b"], 1, ("e", "h.0")),
    ],
)
def test_required_are_the_layers_and_what_stands_beside_them(
    names: list[str], layers: int, expected: tuple[str, ...]
) -> None:
    assert required_modules({"num_hidden_layers": layers}, names) == expected
    with pytest.raises(ConfigError, match=f"config.json num_hidden_layers={layers + 5}: the checkpoint has no layer"):
        required_modules({"num_hidden_layers": layers + 5}, names)


def result(candidate: SideRecord, **changes: Any) -> ParityResult:
    sides = {"candidate": ParitySide(runtime="native", parallel=ParallelConfig(tp=2))}
    versions: Any = {"reference": {"torch": "1"}, "candidate": {"torch": "2"}}
    return ParityResult(config(**sides, **changes), 123, compared(candidate), versions)


def test_the_text_says_what_was_compared_and_how_it_went() -> None:
    lines = as_text(result(record(), lora=LoRAConfig(rank=4, alpha=8))).splitlines()
    assert lines[0].startswith("m: float32 on cpu, lr 0.0001, 16 sequences of 123 tokens in 4 micro-batches")
    assert lines[1].startswith("  LoRA of rank 4, scale 2, on ") and lines[1].endswith("; all else is frozen")
    assert lines[2:4] == ["  reference  transformers (1 rank)", "  candidate  native tp=2 (2 ranks)"]
    assert lines[-1] == "no divergence: all within the tolerances" and lines[-2].endswith("the loss fell by 50.0%")
    scaled = record(activations={**times(SAME.activations, "layer.0.mlp", 3.0), **{f"x{n}": values(n, 2) for n in range(5)}})
    text = as_text(result(scaled, lr=1e-6))
    assert "  not compared, on one side only: x0, x1, x2, x3 and 1 more\n" in text
    assert "  ends elsewhere, what follows agrees: layer.0.mlp (" in text
    assert "with lr below 1e-05, the weights' tolerance may hide" in text and "say little" not in text
    flat = as_text(result(record(losses=[2.0, 1.5, 1.0 + 1e-3], grad_norms=[4.0, 3.0, 2.5])))
    assert "<- loss and grad norm over" in flat and flat.endswith("over the tolerance 1e-06")
    assert "first divergence: loss (step 2): relative difference 1.0e-03" in flat


@pytest.mark.parametrize("farthest", range(2))
def test_a_stage_names_what_is_farthest_over_its_tolerance_beside_that_difference(farthest: int) -> None:
    names = list(SAME.gradients)[:2]
    factors = [1.5 if place == farthest else 1.01 for place in range(2)]
    changed = times(times(SAME.gradients, names[0], factors[0]), names[1], factors[1])
    row = next(line for line in as_text(result(record(gradients=changed))).splitlines() if line.startswith("  gradient"))
    assert row.split()[2:5] == ["5.0e-01", "1e-04", names[farthest]] and row.endswith("<- over")


def test_a_loss_that_hardly_falls_says_little() -> None:
    slow = record(losses=[2.0, 2.0, 1.91])
    found = ParityResult(config(), 1, compared(slow, slow), {"reference": {}, "candidate": {}})
    assert f"that is less than {module.LEAST_LOSS_FALL:.0%}, so the later steps say little" in as_text(found)


def test_json_has_every_step_of_both_sides_and_null_for_what_is_infinite() -> None:
    report = as_json(result(record(losses=[2.0, math.nan, 1.0], grad_norms=[4.0, 3.3, 2.0])))
    json.dumps(report, allow_nan=False)
    assert [step["candidate"] for step in report["steps"]] == [
        {"loss": 2.0, "grad_norm": 4.0},
        {"loss": None, "grad_norm": 3.3},
        {"loss": 1.0, "grad_norm": 2.0},
    ]
    assert report["steps"][1]["reference"] == {"loss": 1.5, "grad_norm": 3.0}
    assert report["steps"][1]["grad_norm_rel_diff"] == pytest.approx(0.1) and report["steps"][1]["loss_rel_diff"] is None
    assert (report["steps"][0]["loss_tolerance"], report["steps"][0]["grad_norm_tolerance"]) == (1e-6, 1e-5)
    assert report["first_divergence"]["stage"] == "loss" and report["first_divergence"]["step"] == 1
    assert report["candidate"]["world_size"] == 2 and report["candidate"]["versions"] == {"torch": "2"}
    assert report["reference"]["runtime"] == "transformers" and report["num_tokens"] == 123
    assert as_json(result(record()))["first_divergence"] is None
