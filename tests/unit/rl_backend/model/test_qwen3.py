"""The native Qwen3 against transformers', packed or alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_backend.contracts import BatchError
from rl_backend.contracts.runtime_config import Checkpointing
from rl_backend.model import QWEN3
from rl_backend.model.decoder import checkpoint_layers
from tests.support.families import load_native, load_transformers, pack, random_sequences, run_native, run_transformers
from tests.support.models import write_tiny_qwen3

LENGTHS = (7, 1, 70, 12, 12, 2, 130, 33)


@pytest.fixture(params=["tied_model", "untied_model"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.mark.shows("model: dense Qwen3, tied and untied, equals transformers' log-probs to 1e-5, packed or alone")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_log_probs_and_entropy_equal_transformers(model_dir: Path, temperature: float) -> None:
    sequences = random_sequences(LENGTHS)
    with torch.no_grad():
        native = run_native(load_native(model_dir), sequences, temperature)
        reference = run_transformers(load_transformers(model_dir), sequences, temperature)
    torch.testing.assert_close(native.log_probs, reference.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(native.entropy, reference.entropy, atol=1e-5, rtol=0)


def test_each_sequence_alone_gives_what_it_gives_in_a_pack(model_dir: Path) -> None:
    sequences = random_sequences(LENGTHS)
    model = load_native(model_dir)
    with torch.no_grad():
        packed = run_native(model, sequences).log_probs
        alone = torch.cat([run_native(model, [sequence]).log_probs for sequence in sequences])
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=1e-6)


@pytest.mark.shows("model: gradients of dense Qwen3 equal transformers' to 1e-5")
def test_gradients_equal_transformers(model_dir: Path) -> None:
    sequences = random_sequences(LENGTHS, seed=1)
    weights = torch.randn(2, sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    native, reference = load_native(model_dir), load_transformers(model_dir)
    for output in (run_native(native, sequences, 0.8), run_transformers(reference, sequences, 0.8)):
        ((output.log_probs * weights[0]).sum() + (output.entropy * weights[1]).sum()).backward()
    names = QWEN3.weight_names(native.spec, "log_probs")
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in native.named_parameters():
        scale = float(expected[names[name]].abs().max())
        torch.testing.assert_close(
            parameter.grad, expected[names[name]], atol=1e-5 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_changing_one_sequence_leaves_every_other_one_as_it_was(tied_model: Path) -> None:
    model = load_native(tied_model)
    sequences = random_sequences(LENGTHS)
    changed = [*sequences]
    changed[3] = (sequences[3] + 1) % 128
    with torch.no_grad():
        before = pack(sequences).split(run_native(model, sequences).log_probs)
        after = pack(changed).split(run_native(model, changed).log_probs)
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if index == 3:
            assert not torch.equal(old, new)
        else:
            torch.testing.assert_close(new, old, atol=1e-6, rtol=1e-6)


@pytest.mark.shows("model: packed sequences never see each other")
def test_no_gradient_flows_from_one_sequence_into_the_tokens_of_another(untied_model: Path) -> None:
    model = load_native(untied_model)
    first, second = torch.arange(2, 40), torch.arange(60, 100)
    run_native(model, [first, second]).log_probs[: len(first)].sum().backward()
    gradient = model.embed_tokens.weight.grad.abs().sum(1)
    assert gradient[first[:-1]].min() > 0
    assert gradient[second].max() == 0


def test_a_temperature_for_each_token_is_that_sequences_temperature(tied_model: Path) -> None:
    model = load_native(tied_model)
    sequences = random_sequences((9, 20), seed=3)
    temperatures = torch.cat([torch.full((9,), 0.5), torch.full((20,), 1.5)])
    with torch.no_grad():
        both = run_native(model, sequences, temperatures)
        cold, warm = run_native(model, sequences[:1], 0.5), run_native(model, sequences[1:], 1.5)
    torch.testing.assert_close(both.log_probs, torch.cat([cold.log_probs, warm.log_probs]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(both.entropy, torch.cat([cold.entropy, warm.entropy]), atol=1e-6, rtol=1e-6)


def test_entropy_is_absent_unless_asked_for(tied_model: Path) -> None:
    assert run_native(load_native(tied_model), random_sequences((5,)), calculate_entropy=False).entropy is None


@pytest.mark.parametrize("kept", ["selective", "full"])
def test_activation_checkpointing_recomputes_layers_and_changes_no_gradient(tied_model: Path, kept: Checkpointing) -> None:
    plain, recomputing = load_native(tied_model), load_native(tied_model)
    checkpoint_layers(list(recomputing.layers.values()), kept)
    calls = []
    recomputing.layers["0"].self_attn.register_forward_hook(lambda *_: calls.append(1))
    for model in (plain, recomputing):
        run_native(model, random_sequences((30, 5))).log_probs.sum().backward()
    assert len(calls) == 2
    for (name, expected), parameter in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, msg=name)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 32), (6, 2, 32), (4, 1, 64)])
def test_head_layouts_equal_transformers(tmp_path: Path, heads: int, kv_heads: int, head_dim: int) -> None:
    path = write_tiny_qwen3(
        tmp_path / "model", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, rope_theta=1e6
    )
    sequences = random_sequences((90, 3), seed=5)
    with torch.no_grad():
        native = run_native(load_native(path), sequences)
        reference = run_transformers(load_transformers(path), sequences)
    torch.testing.assert_close(native.log_probs, reference.log_probs, atol=1e-5, rtol=0)


def test_export_names_are_those_of_the_hugging_face_model(model_dir: Path) -> None:
    native, reference = load_native(model_dir), load_transformers(model_dir)
    names = QWEN3.weight_names(native.spec, "log_probs")
    assert set(names) == {name for name, _ in native.named_parameters()}
    assert set(names.values()) == {name for name, _ in reference.named_parameters()}
    for name, parameter in native.named_parameters():
        assert torch.equal(parameter, reference.get_parameter(names[name]))


def test_a_model_built_on_meta_has_no_buffers_to_lose(tied_model: Path) -> None:
    assert list(load_native(tied_model).buffers()) == []


def test_bfloat16_log_probs_stay_close_to_float32(tied_model: Path) -> None:
    model = load_native(tied_model)
    sequences = random_sequences((40, 9), seed=2)
    with torch.no_grad():
        exact = run_native(model, sequences).log_probs
        rounded = run_native(model.to(torch.bfloat16), sequences).log_probs
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.5
    assert (rounded - exact).abs().mean() < 0.1


def test_a_sequence_longer_than_the_model_allows_is_refused(tied_model: Path) -> None:
    with pytest.raises(BatchError, match="513 tokens is longer than the model's 512 positions"):
        run_native(load_native(tied_model), random_sequences((513,)))


def test_a_token_outside_the_vocabulary_is_refused(tied_model: Path) -> None:
    with pytest.raises(BatchError, match="reach from 3 to 128; the vocabulary has 128"):
        run_native(load_native(tied_model), [torch.tensor([3, 128])])
