"""Every primitive on tensors of a GPU that is not there: shapes, dtypes and devices, forward and through what is saved.

Kernels are not run. What would read a number from the device raises here, so it also waits for it on a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rl_backend.primitive import causal_conv, gated_delta
from rl_backend.primitive.activation import squared_relu
from rl_backend.primitive.adapters import (
    AdapterRun,
    Factors,
    OwnHead,
    adapted_embedding,
    adapted_linear,
    adapters_at_work,
)
from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.backward import _linear, with_added_loss
from rl_backend.primitive.experts import ClampedExperts, SwiGLUExperts
from rl_backend.primitive.grouped_linear import grouped_linear
from rl_backend.primitive.log_prob import next_token_log_probs
from rl_backend.primitive.norm import LayerNorm, RMSNorm
from rl_backend.primitive.rope import Rotary, apply_rotary, rotary_cos_sin
from rl_backend.primitive.router import Router, RouterSettings
from rl_backend.primitive.sparse_attention import IndexTerms, indexer_loss, sparse_attention
from rl_backend.primitive.value_head import ValueHead, values_of_tenants

LENGTHS = (5, 17, 9, 70)
TOKENS = sum(LENGTHS)
BF16, F32 = torch.bfloat16, torch.float32


def made(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def module(make: Callable[[], torch.nn.Module], dtype: torch.dtype = BF16) -> torch.nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return make()
    finally:
        torch.set_default_dtype(before)


def segments() -> Segments:
    return Segments.of_sequences(made(len(LENGTHS) + 1, dtype=torch.int32), LENGTHS)


def attention(dtype: torch.dtype, window: int | None = None, value_dim: int = 64, *, sinks: bool = False) -> Tensor:
    qkv = made(TOKENS, 8, 64, dtype=dtype), made(TOKENS, 2, 64, dtype=dtype), made(TOKENS, 2, value_dim, dtype=dtype)
    return packed_attention(*qkv, segments(), window, made(8, dtype=F32) if sinks else None)


def factors(rank: int, inputs: int, outputs: int) -> Factors:
    a, b, grad_a, grad_b = (made(*shape, dtype=F32) for shape in ((rank, inputs), (outputs, rank)) * 2)
    return Factors(a, b, grad_a, grad_b, 2.0, 0.0, 3)


def runs(name: str, inputs: int, outputs: int) -> list[AdapterRun]:
    edges = (0, 5, 22, TOKENS)
    return [
        AdapterRun(start, stop, {name: factors(rank, inputs, outputs)}, draw=1)
        for start, stop, rank in zip(edges, edges[1:], (8, 8, 16), strict=False)
    ]


def beside_a_linear_layer() -> Tensor:
    with adapters_at_work(runs("q_proj", 64, 96)):
        return adapted_linear(made(TOKENS, 64), made(96, 64), None, {"q_proj": None})


def beside_embeddings() -> Tensor:
    with adapters_at_work(runs("embed", 128, 64)):
        return adapted_embedding(made(TOKENS, dtype=torch.int64), made(128, 64), "embed")


def log_probs(dtype: torch.dtype, **options: Any) -> list[Tensor]:
    labels = made(TOKENS, dtype=torch.int64)
    found = next_token_log_probs(made(TOKENS, 64, dtype=dtype), made(320, 64, dtype=dtype), labels, **options)
    return [found.log_probs, *(() if found.entropy is None else (found.entropy,))]


def experts(kind: type[SwiGLUExperts] | type[ClampedExperts]) -> Tensor:
    x = made(TOKENS, 64)
    routing = module(lambda: Router(64, RouterSettings(8, 2)), F32)(x)
    return module(lambda: kind(8, 64, 48))(x, routing)


def deltas() -> Tensor:
    query, key = (gated_delta.l2_normalised(made(TOKENS, 2, 32)) for _ in range(2))
    rest = made(TOKENS, 4, 16, dtype=F32), made(TOKENS, 4, dtype=F32), made(TOKENS, 4, dtype=F32)
    return gated_delta.gated_delta_rule(query, key, *rest, LENGTHS)


def learning_indexer() -> Tensor:
    terms = IndexTerms(made(TOKENS, 4, 32), made(TOKENS, 32), made(TOKENS, 4, dtype=F32))
    chosen = made(TOKENS, 8, dtype=torch.int64)
    return indexer_loss(terms, made(TOKENS, 8, 64), made(TOKENS, 8, 64), segments(), chosen, 0.125)


def tenants_of_a_critic() -> Tensor:
    head = OwnHead(*(made(*shape, dtype=F32) for shape in ((1, 64), (1,)) * 2))
    return values_of_tenants(made(TOKENS, 64), made(TOKENS, dtype=F32), [AdapterRun(3, 9, {}, head=head)])


def rotated() -> Tensor:
    return apply_rotary(made(TOKENS, 8, 64), *rotary_cos_sin(made(TOKENS, dtype=torch.int64), Rotary(64, 1e4), BF16))


PRIMITIVES: dict[str, Callable[[], Any]] = {
    "attention": lambda: attention(BF16),
    "attention with a window": lambda: attention(BF16, 16),
    "attention with narrow values": lambda: attention(BF16, value_dim=32),
    "attention in float32": lambda: attention(F32),
    "attention with sinks": lambda: attention(BF16, sinks=True),
    "attention with a window and sinks": lambda: attention(BF16, 16, sinks=True),
    "attention to chosen keys": lambda: sparse_attention(
        made(TOKENS, 8, 64), made(TOKENS, 1, 64), made(TOKENS, 1, 32), segments(), made(TOKENS, 8, dtype=torch.int64)
    ),
    "an indexer's loss": learning_indexer,
    "rms norm": lambda: module(lambda: RMSNorm(64, 1e-6), F32)(made(TOKENS, 64)),
    "rms norm from one": lambda: module(lambda: RMSNorm(64, 1e-6, from_one=True))(made(TOKENS, 64)),
    "layer norm": lambda: module(lambda: LayerNorm(64, 1e-6))(made(TOKENS, 64)),
    "rope": rotated,
    "squared relu": lambda: squared_relu(made(TOKENS, 64)),
    "a linear layer that waits": lambda: _linear(torch.nn.Linear(64, 96, device="cuda"), made(TOKENS, 64, dtype=F32)),
    "an added loss": lambda: with_added_loss(made(TOKENS, dtype=F32), made(dtype=F32)),
    "convolution": lambda: causal_conv.causal_conv(made(TOKENS, 64), made(64, 1, 4), LENGTHS),
    "delta rule": deltas,
    "grouped product": lambda: grouped_linear(made(TOKENS, 64), made(8, 96, 64), made(8, dtype=torch.int64)),
    "experts": lambda: experts(SwiGLUExperts),
    "clamped experts": lambda: experts(ClampedExperts),
    "log probs": lambda: log_probs(BF16, calculate_entropy=True),
    "log probs in float32": lambda: log_probs(F32, bias=made(320, dtype=F32), temperature=made(TOKENS, dtype=F32)),
    "values": lambda: module(lambda: ValueHead(64), F32)(made(TOKENS, 64)),
    "values of tenants": tenants_of_a_critic,
    "adapters beside a linear layer": beside_a_linear_layer,
    "adapters beside embeddings": beside_embeddings,
}


class _Saved(SimpleNamespace):
    """Stands for the context of a function, as autograd refuses to run on a device that is faked."""

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: Tensor) -> None: ...

    def set_materialize_grads(self, _: bool) -> None: ...


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function computes of lengths on the host, as if it had been moved."""

    def computed(*args: Any) -> Any:
        with unset_fake_temporarily():
            found = function.__wrapped__(*(torch.device("cpu") if isinstance(each, torch.device) else each for each in args))
        return tree_map_only(Tensor, lambda each: made(*each.shape, dtype=each.dtype), found)

    return computed


def gradients_of_inputs(_: Any, inputs: Sequence[Tensor], *__: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(each) for each in inputs)


@contextmanager
def functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, _Saved, tuple[Any, ...], Any]]]:
    """The autograd functions that ran in the context, with what they saved, took and gave."""
    ran = []

    def apply(function: Any, *inputs: Any) -> Any:
        needs = tuple(isinstance(each, Tensor) and each.is_floating_point() for each in inputs)
        context = _Saved(needs_input_grad=needs)
        with torch.no_grad():
            output = function.forward(context, *inputs)
        ran.append((function, context, inputs, output))
        return output

    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd.Function, "apply", classmethod(apply))
        # All tokens have labels.
        patched.setattr(Tensor, "nonzero", lambda x: torch.arange(x.shape[0], device=x.device)[:, None])
        patched.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patched.setattr(torch.autograd, "grad", gradients_of_inputs)
        for place, name in ((causal_conv, "_rows"), (gated_delta, "chunks_of")):
            patched.setattr(place, name, on_host(getattr(place, name)))
        yield ran


@pytest.mark.shows("primitives: all run on a faked GPU, forward and backward through what they saved, and none waits for it")
@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_primitive_runs_on_a_faked_gpu_forward_and_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), functions(monkeypatch) as ran:
        found = PRIMITIVES[name]()
        for output in found if isinstance(found, list) else [found]:
            assert output.device.type == "cuda" and output.is_floating_point()
        for function, context, inputs, output in ran:
            outputs = output if isinstance(output, tuple) else (output,)
            gradients = function.backward(context, *(torch.empty_like(each) for each in outputs))
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            assert len(gradients) == len(inputs)
            for gradient, given, needed in zip(gradients, inputs, context.needs_input_grad, strict=True):
                assert gradient is None or (needed and (gradient.shape, gradient.device) == (given.shape, given.device))


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.results.append((str(func), result))
        return result


def test_products_of_the_head_are_added_up_in_place_whatever_the_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's float32 product of a tile of the weight would be written, read and added, at 4 bytes an element."""
    with FakeTensorMode(allow_non_fake_inputs=True), functions(monkeypatch) as ran:
        log_probs(BF16, chunk_tokens=TOKENS // 4)
        ((function, context, _, output),) = ran
        with _Operations() as operations:
            function.backward(context, torch.empty_like(output[0]), None)
    of_weight = [name for name, result in operations.results if isinstance(result, Tensor) and result.shape == (320, 64)]
    # Of five chunks: 101 tokens in pieces of 25.
    assert of_weight.count("aten.addmm.dtype_out") == 5
    assert not {"aten.mm.dtype", "aten.add_.Tensor", "aten.add.Tensor"} & set(of_weight)


def test_what_reads_a_number_from_the_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode(), functions(monkeypatch), pytest.raises(DataDependentOutputException):
        # Not aligned as the kernel wants them, so that the counts are read.
        grouped_linear(made(TOKENS, 63), made(8, 95, 63), made(8, dtype=torch.int64))
