"""Log-probs and attention on CUDA against transformers and against exact attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import TokenSequence
from rl_backend.data.micro_batches import pack
from rl_backend.primitive.attention import Segments, packed_attention
from tests.gpu.conftest import MakeRuntime
from tests.support.critic import transformers_values, write_critic
from tests.support.families import load_transformers, run_transformers
from tests.support.models import write_tiny
from tests.support.sft_batches import random_token_sequences

pytestmark = pytest.mark.gpu

LENGTHS = (5, 64, 2, 64, 129, 17)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}


def transformers_log_probs(model: Path, sequence: TokenSequence) -> Tensor:
    """(L,) float32 of each next token by transformers in float32 on CUDA; 0 at the last position."""
    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").cuda().eval()
    ids = sequence.input_ids.cuda()
    with torch.no_grad():
        logits = reference(input_ids=ids[None]).logits[0].float()
    log_probs = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return torch.cat([log_probs, log_probs.new_zeros(1)])


@pytest.mark.parametrize("model_fixture", ["tied_model", "untied_model"])
def test_float32_log_probs_equal_those_of_transformers_packed_or_alone(
    model_fixture: str, request: pytest.FixtureRequest, make_runtime: MakeRuntime
) -> None:
    model = request.getfixturevalue(model_fixture)
    runtime = make_runtime(model)
    handle = runtime.build_model(forward_only=True)
    sequences = random_token_sequences(LENGTHS, vocab_size=128)
    together = runtime.forward_backward(handle, [pack(sequences)], None, forward_only=True).output("log_probs")
    for sequence, packed in zip(sequences, together, strict=True):
        expected = transformers_log_probs(model, sequence)
        (alone,) = runtime.forward_backward(handle, [pack([sequence])], None, forward_only=True).output("log_probs")
        assert packed.device.type == "cuda"
        torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)


def test_float32_attention_with_grouped_queries_keeps_no_square_of_the_length() -> None:
    length, heads = 4096, 8
    query, key, value = (torch.randn(length, count, 64, device="cuda", requires_grad=True) for count in (heads, 2, 2))
    starts = torch.tensor([0, length], device="cuda", dtype=torch.int32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed_attention(query, key, value, Segments.of_sequences(starts, [length])).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < heads * length * length * 4 / 2


@pytest.mark.parametrize("key_lens", [LENGTHS, (5, 192, 3, 64, 300, 18)], ids=["whole sequences", "last tokens"])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (4, 4, 128), (4, 2, 32)])
def test_bfloat16_variable_length_attention_equals_exact_attention_with_its_gradients(
    heads: int, kv_heads: int, head_dim: int, window: int | None, key_lens: tuple[int, ...]
) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    cumulative = [torch.tensor([0, *lens], device="cuda").cumsum(0).to(torch.int32) for lens in (LENGTHS, key_lens)]
    segments = Segments(LENGTHS, key_lens, *cumulative)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, head_dim, device="cuda", generator=generator).to(torch.bfloat16)

    inputs = [random(sum(LENGTHS), heads), random(sum(key_lens), kv_heads), random(sum(key_lens), kv_heads)]
    weight = random(sum(LENGTHS), heads).float()
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in inputs]
        output = packed_attention(*leaves, segments, window)
        assert output.dtype == dtype
        assert output.shape == (sum(LENGTHS), heads, head_dim)
        (output.float() * weight).sum().backward()
        results.append([output.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)])
    assert [len(result) for result in results] == [4, 4]
    for fast, exact in zip(*results, strict=True):
        assert (fast - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "head_dim": None}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
        ("mistral", {"sliding_window": 20}),
    ],
)
def test_every_family_gives_transformers_log_probs_and_a_critic_its_values(
    tmp_path: Path, make_runtime: MakeRuntime, family: str, changes: dict[str, Any]
) -> None:
    path = write_tiny(family, tmp_path / "model", tie_word_embeddings=False, **changes)
    sequences = random_token_sequences(LENGTHS, vocab_size=128)
    ids = [sequence.input_ids for sequence in sequences]
    runtime = make_runtime(path)
    policy = runtime.build_model(forward_only=True)
    found = runtime.forward_backward(policy, [pack(sequences)], None, forward_only=True).output("log_probs")
    with torch.no_grad():
        expected = run_transformers(load_transformers(path), ids)
    torch.testing.assert_close(torch.cat(list(found)).cpu(), expected.log_probs, rtol=0, atol=1e-5)
    critic_dir = write_critic(tmp_path / "critic", path)
    critic = runtime.build_model(head="values", hf_path=critic_dir)
    values = runtime.forward_backward(critic, [pack(sequences)], None, forward_only=True).output("values")
    torch.testing.assert_close(torch.cat(list(values)).cpu(), transformers_values(critic_dir, ids), rtol=0, atol=1e-5)


def test_bfloat16_packed_sequences_do_not_see_each_other(untied_model: Path, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(untied_model, param_dtype="bfloat16")
    handle = runtime.build_model(forward_only=True)
    first, other, second = random_token_sequences((64, 64, 33), vocab_size=128)

    def second_after(sequence: TokenSequence) -> Tensor:
        return runtime.forward_backward(handle, [pack([sequence, second])], None, forward_only=True).output("log_probs")[1]

    assert torch.equal(second_after(first), second_after(other))


def test_bfloat16_log_probs_are_near_those_of_float32(wider_model: Path, make_runtime: MakeRuntime) -> None:
    batch = pack(random_token_sequences(LENGTHS, vocab_size=8192))
    outputs = []
    for dtype in ("float32", "bfloat16"):
        runtime = make_runtime(wider_model, param_dtype=dtype)
        handle = runtime.build_model(forward_only=True)
        outputs.append(
            torch.cat(list(runtime.forward_backward(handle, [batch], None, forward_only=True).output("log_probs")))
        )
        runtime.close()
    exact, rounded = outputs
    assert (rounded - exact).abs().mean() < 0.02 * exact.abs().mean()
