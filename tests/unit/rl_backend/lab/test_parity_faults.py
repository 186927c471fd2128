"""A comparison names the first place where two sides part. Both sides run here, in this process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_backend.checkpoint.hf_reader import HFReader, read_hf_config
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.data import pack_plan, prefixes
from rl_backend.lab.parity import rank
from rl_backend.lab.parity.compare import Comparison, SideRecord, Tolerances, compare, merge_ranks, merge_steps
from rl_backend.lab.parity.config import DType, ParityConfig, ParitySide, make_sequences, plan_batch
from rl_backend.lab.parity.rank import record_again, record_alone, record_training
from rl_backend.lab.parity.run import required_modules
from tests.support import faulty_runtime
from tests.support.matrix import sampled
from tests.support.models import write_tiny


def make_config(model: Path, candidate: ParitySide, **changes: Any) -> ParityConfig:
    return ParityConfig(
        model=str(model), reference=ParitySide(runtime="transformers"), candidate=candidate, device="cpu", **changes
    )


def train_transformers(config: ParityConfig) -> SideRecord:
    return merge_ranks([record_training(config, config.reference)], plan_batch(config, 1))


def train_runtime(config: ParityConfig) -> SideRecord:
    return merge_ranks([record_training(config, config.candidate)], plan_batch(config, 1))


@pytest.fixture(scope="module")
def reference(tied_model: Path) -> SideRecord:
    return train_transformers(make_config(tied_model, ParitySide(runtime="native")))


def compare_with_fault(model: Path, reference: SideRecord, fault: faulty_runtime.Fault) -> Comparison:
    candidate = ParitySide(runtime="faulty", options={"fault": fault})
    return compare_on(model, reference, train_runtime(make_config(model, candidate)))


def compare_on(model: Path, reference: SideRecord, candidate: SideRecord, dtype: DType = "float32") -> Comparison:
    checkpoint = HFReader(model)
    modules = required_modules(checkpoint.config, checkpoint.infos)
    return compare(reference, candidate, Tolerances.of(dtype), modules)


@pytest.mark.shows("parity: a deliberate fault in a norm, loss, gradient, decay group or Adam's betas is found and named")
@pytest.mark.parametrize(
    ("fault", "stage", "step", "name"),
    [
        ("loaded weight", "loaded weights", 0, "model.layers.1.input_layernorm.weight"),
        ("norm eps", "activations", 0, "model.layers.1.post_attention_layernorm"),
        ("missing layer", "activations", 0, "model.layers.1"),
        ("loss", "loss", 0, ""),
        ("gradient", "gradient", 0, "model.layers.1.self_attn.o_proj.weight"),
        ("missing gradient", "gradient", 0, "model.layers.1.mlp.up_proj.weight"),
        ("decay groups", "weights", 0, "model.layers.0.input_layernorm.weight"),
        ("log-probs", "loss", 0, ""),
        ("late", "loss", 2, ""),
    ],
)
def test_the_first_place_where_two_sides_part_is_named(
    tied_model: Path, reference: SideRecord, fault: faulty_runtime.Fault, stage: str, step: int, name: str
) -> None:
    divergence = compare_with_fault(tied_model, reference, fault).first_divergence
    assert divergence is not None
    assert (divergence.stage, divergence.step, divergence.difference.name) == (stage, step, name)
    assert divergence.difference.missing_from == ("candidate" if fault.startswith("missing") else None)
    assert divergence.difference.excess > 2


@pytest.mark.shows("parity: each step starts from the reference's weights, so a wrong step is told from one that follows it")
@pytest.mark.parametrize(
    ("runtime", "lora"),
    [("transformers", None), ("native", None), ("transformers", LoRAConfig(rank=4, targets=("q_proj",)))],
    ids=["transformers", "native", "LoRA"],
)
def test_each_step_is_taken_from_the_weights_that_the_reference_had(
    tied_model: Path, tmp_path: Path, runtime: str, lora: LoRAConfig | None
) -> None:
    """With other betas the weights differ from the third step on, but no step that starts from the same."""
    side = ParitySide(runtime=runtime)
    candidate = ParitySide(runtime="faulty", options={"fault": "betas" if lora is None else "none"})
    config = make_config(tied_model, candidate, steps=4, lr=1e-3, lora=lora).replace(reference=side)
    whole = merge_steps([record_again(config, side, tmp_path)], 1)
    alone = merge_steps([record_alone(config, config.candidate, tmp_path)], 1)
    assert alone.losses == pytest.approx(whole.losses[1:], rel=1e-6)
    assert alone.grad_norms == pytest.approx(whole.grad_norms[1:], rel=1e-5)
    assert whole.losses[0] > whole.losses[1] > whole.losses[2] > whole.losses[3]
    if lora is None:
        running = record_training(config, config.candidate)
        assert running.losses[2:] != pytest.approx(whole.losses[2:], rel=1e-5)
    else:
        theirs = merge_steps([record_alone(config, side, tmp_path)], 1)
        assert theirs.losses == pytest.approx(whole.losses[1:], rel=1e-6)


def test_betas_show_in_a_later_step_because_adams_first_has_one_size_whatever_they_are(
    tied_model: Path, reference: SideRecord
) -> None:
    comparison = compare_with_fault(tied_model, reference, "betas")
    assert all(stage.first_over is None for stage in comparison.stages)
    assert comparison.first_divergence is not None
    assert comparison.first_divergence.step == 2


@pytest.mark.shows("parity: native against transformers, float32: loss to 1e-6 and grad norm to 1e-5 over 5 steps")
@pytest.mark.parametrize("family", sampled(["qwen3", "qwen2", "llama", "mistral", "qwen3_moe"], "qwen2", "qwen3_moe"))
def test_native_and_transformers_train_alike(tmp_path: Path, family: str) -> None:
    size = {"hidden_size": 128, "num_hidden_layers": 3, "tie_word_embeddings": family == "qwen2"}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    model = write_tiny(family, tmp_path, pad_token_id=7, **size, **experts)
    config = make_config(model, ParitySide(runtime="native"))
    comparison = compare_on(model, train_transformers(config), train_runtime(config))
    assert comparison.first_divergence is None, str(comparison.first_divergence)
    assert comparison.max_loss_difference < 1e-6
    assert comparison.max_grad_norm_difference < 1e-5
    assert comparison.loss_fall > 0.05
    assert {stage.stage: stage.compared for stage in comparison.stages}["activations"] >= 3 * 7 + 2


@pytest.mark.shows("parity: with shared prefixes computed once, native trains as transformers does, token by token")
def test_shared_prefixes_are_compared_token_by_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 2)
    # Of so few tokens many sequences begin alike.
    model = write_tiny("qwen3", tmp_path, vocab_size=4)
    config = make_config(model, ParitySide(runtime="native"))
    (batches,) = pack_plan(make_sequences(config, read_hf_config(model)), plan_batch(config, 1))
    trees = [prefixes.shared_prefixes(batch, replays=False) for batch in batches]
    assert sum(tree is not None for tree in trees) > 2
    shared, alone = (
        train_runtime(make_config(model, ParitySide(runtime="native", options={"share_prefixes": share})))
        for share in ("auto", "off")
    )
    for reference in (train_transformers(config), alone):
        comparison = compare_on(model, reference, shared)
        assert comparison.first_divergence is None, str(comparison.first_divergence)
    assert shared.activations.keys() == alone.activations.keys()
    assert {len(rows) for rows in shared.activations.values()} == {sum(batch.num_tokens for batch in batches)}


@pytest.mark.parametrize("top_k", [1, 3])
def test_sizes_that_are_no_multiple_of_anything_train_alike(tmp_path: Path, top_k: int) -> None:
    """With one expert and normalised weights a router has no gradient but rounding."""
    sizes = {"vocab_size": 131, "hidden_size": 45, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 22}
    experts = {"num_experts": 5, "num_experts_per_tok": top_k, "moe_intermediate_size": 19, "norm_topk_prob": True}
    model = write_tiny("qwen3_moe", tmp_path, **sizes, **experts)
    config = make_config(model, ParitySide(runtime="native"))
    assert compare_on(model, train_transformers(config), train_runtime(config)).first_divergence is None


def test_bfloat16_is_compared_within_tolerances_of_its_own(tied_model: Path) -> None:
    config = make_config(tied_model, ParitySide(runtime="native"), dtype="bfloat16")
    reference, candidate = train_transformers(config), train_runtime(config)
    assert compare_on(tied_model, reference, candidate, "bfloat16").first_divergence is None
    assert compare_on(tied_model, reference, candidate).first_divergence is not None


def test_experts_that_transformers_holds_as_one_tensor_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = write_tiny("qwen3_moe", tmp_path, **experts)
    record = train_transformers(make_config(model, ParitySide(runtime="native"), steps=1))
    assert record.gradients.keys() == record.weights.keys() == record.loaded_weights.keys()
    assert record.gradients["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (32, 64)
    assert list(record.gradients)[-1] == "model.norm.weight"


@pytest.mark.parametrize(
    ("role", "recorder", "is_reference"),
    [
        ("reference", "record_training", True),
        ("candidate", "record_training", False),
        ("again", "record_again", True),
        ("alone", "record_alone", False),
    ],
)
def test_each_process_records_its_own_side(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, recorder: str, is_reference: bool
) -> None:
    config = make_config(tied_model, ParitySide(runtime="native"), steps=2)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    sides = list[ParitySide]()

    def record(_: ParityConfig, side: ParitySide, *__: Path) -> SimpleNamespace:
        sides.append(side)
        return SimpleNamespace(save=Path.touch)

    monkeypatch.setattr(f"rl_backend.lab.parity.rank.{recorder}", record)
    assert rank.main(str(tmp_path / "config.json"), role, str(tmp_path / "record"), str(tmp_path)) == 0
    assert sides == [config.reference if is_reference else config.candidate] and config.reference != config.candidate
    assert (tmp_path / "record").exists()
