"""A native model and transformers' of one directory, and both run on the same sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.parity_float64 import Widened
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.checkpoint.hf_weights import load_weights
from rl_backend.contracts import Head, ModelOutput, PackedBatch
from rl_backend.model import BuildSettings, ModelInput, find_model
from rl_backend.primitive.attention import Segments


def load_native(path: Path, chunk_tokens: int = 16, head: Head = "log_probs") -> nn.Module:
    """Built on the meta device and loaded, as the runtime does it."""
    config = read_hf_config(path)
    family = find_model("auto", config)
    architecture = family.parse_config(config)
    with torch.device("meta"):
        model = family.build(architecture, BuildSettings(family.options_type(), head, chunk_tokens))
    model.to_empty(device="cpu")
    names, kept = family.weight_names(architecture, head), family.kept_prefixes(architecture)
    load_weights(path, dict(model.named_parameters()), names, kept=kept)
    return model


def load_transformers(path: Path) -> nn.Module:
    model, report = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model  # type: ignore[no-any-return]


def random_sequences(lengths: Sequence[int], vocab_size: int = 128, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


def pack(sequences: Sequence[Tensor]) -> PackedBatch:
    return PackedBatch(torch.cat(list(sequences)), torch.tensor([len(sequence) for sequence in sequences]))


def run_native(
    model: nn.Module, sequences: Sequence[Tensor], temperature: float | Tensor = 1.0, calculate_entropy: bool = True
) -> ModelOutput:
    """One packed forward pass over all sequences."""
    batch = pack(sequences)
    output: ModelOutput = model(
        ModelInput(
            batch.input_ids,
            batch.position_ids,
            Segments.of_sequences(batch.cu_seqlens, batch.seq_lens.tolist()),
            max(batch.seq_lens.tolist()),
            batch.labels,
            temperature,
            calculate_entropy,
        )
    )
    return output


def run_transformers(model: nn.Module, sequences: Sequence[Tensor], temperature: float = 1.0) -> ModelOutput:
    """One forward pass for each sequence, and a full softmax; packed as the native output is."""
    log_probs, entropies = [], []
    for sequence in sequences:
        distribution = (model(sequence[None]).logits[0] / temperature).log_softmax(-1)
        last = torch.zeros(1)
        log_probs += [distribution[:-1].gather(1, sequence[1:, None]).squeeze(1), last]
        entropies += [-(distribution.exp() * distribution).sum(-1)[:-1], last]
    return ModelOutput(log_probs=torch.cat(log_probs), entropy=torch.cat(entropies))


def mixed_outputs(model: nn.Module, sequences: Sequence[Tensor], mix: Tensor) -> Tensor:
    """transformers' log-probs and entropy, weighted by (2, T) numbers and added up."""
    outputs = run_transformers(model, sequences, 0.8)
    return (outputs.log_probs * mix[0]).sum() + (outputs.entropy * mix[1]).sum()


class Float64Gradients:
    """Gradients of transformers in float64, which say whose rounding it is when two float32 sides differ by more than 1e-5.

    Args:
        path: of the model.
        run: from a model to what is differentiated.
    """

    def __init__(self, path: Path, run: Callable[[nn.Module], Tensor]) -> None:
        self._path, self._run = path, run

    @cached_property
    def by_name(self) -> dict[str, Tensor]:
        options: Any = {"dtype": torch.float64, "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(self._path, **options)
        with Widened():
            self._run(model).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def assert_close(self, name: str, found: Tensor, reference: Tensor) -> None:
        """Within 1e-5 of the largest element; or both rounded, and ``found`` at most three times as far from float64."""
        scale, difference = float(reference.abs().max()), float((found - reference).abs().max())
        if difference <= 1e-5 * scale:
            return
        exact = self.by_name[name]
        ours, theirs = (float((side - exact).abs().max()) for side in (found, reference))
        said = f"{name}: of {scale:.2e}, differ by {difference:.2e}; from float64 {ours:.2e}, transformers {theirs:.2e}"
        assert ours < 2e-5 * scale and ours < 3 * theirs, said


def gradients_by_transformers_name(path: Path, native: nn.Module) -> dict[str, Tensor]:
    """Of what is trained, in the shapes of transformers' parameters in memory, where experts are packed."""
    config = read_hf_config(path)
    family = find_model("auto", config)
    names = family.weight_names(family.parse_config(config), "log_probs")
    found = {}
    for name, parameter in native.named_parameters():
        if not parameter.requires_grad:
            continue
        stored = names[name]
        assert parameter.grad is not None, name
        gradient = parameter.grad.flatten(1, 2) if name.endswith("gate_up_proj") else parameter.grad
        found[stored if isinstance(stored, str) else f"model.{name}"] = gradient
    return found


def assert_equal_packed_and_alone(path: Path, lengths: Sequence[int], reference_path: Path | None = None) -> None:
    """Log-probs, entropy and every gradient, of sequences in one pass and in a pass each.

    Args:
        reference_path: the same model for transformers, where that does not read ``path``.
    """
    sequences = random_sequences(lengths)
    mix = torch.rand(2, sum(lengths), generator=torch.Generator().manual_seed(0))
    reference_path = reference_path or path
    reference = load_transformers(reference_path)
    expected = run_transformers(reference, sequences, 0.8)
    ((expected.log_probs * mix[0]).sum() + (expected.entropy * mix[1]).sum()).backward()
    gradients = dict(reference.named_parameters())
    exact = Float64Gradients(reference_path, partial(mixed_outputs, sequences=sequences, mix=mix))
    native = load_native(path)
    packed = [run_native(native, sequences, 0.8)]
    alone = [run_native(native, [sequence], 0.8) for sequence in sequences]
    for outputs in (packed, alone):
        native.zero_grad()
        log_probs, entropy = (torch.cat([getattr(out, name) for out in outputs]) for name in ("log_probs", "entropy"))
        torch.testing.assert_close(log_probs, expected.log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, expected.entropy, atol=1e-5, rtol=0)
        ((log_probs * mix[0]).sum() + (entropy * mix[1]).sum()).backward()
        found = gradients_by_transformers_name(path, native)
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            assert gradients[name].grad.any(), name
            exact.assert_close(name, gradient, gradients[name].grad)
