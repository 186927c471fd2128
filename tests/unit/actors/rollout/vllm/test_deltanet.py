"""Gated DeltaNet of an engine on a CPU against its definition, one token after the other in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.model_executor.layers.mamba import mamba_utils

from actors.rollout.vllm import deltanet

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH, SLOTS = 2, 4, 3, 5, 4, 7
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
CHANNELS = 2 * KEYS + VALUES


def make_layer(tp_size: int = 1) -> Any:
    """A layer with caches in which every slot has an old state."""
    torch.manual_seed(1)
    states = torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    return SimpleNamespace(
        conv1d=SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH)),
        kv_cache=(torch.randn(SLOTS, WIDTH - 1, CHANNELS), states),
        A_log=torch.randn(VALUE_HEADS),
        dt_bias=torch.randn(VALUE_HEADS),
        key_dim=KEYS * tp_size,
        value_dim=VALUES * tp_size,
        tp_size=tp_size,
        head_k_dim=KEY_DIM,
        head_v_dim=VALUE_DIM,
        prefix="layer",
    )


def metadata(lengths: list[int], slots: list[int], continued: list[bool] | None, decodes: int = 0) -> Any:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return SimpleNamespace(
        num_decodes=decodes,
        num_prefills=len(lengths) - decodes,
        # vLLM's are longer than what is used of them.
        non_spec_query_start_loc=torch.cat([starts, torch.tensor([999])]).int(),
        non_spec_state_indices_tensor=torch.tensor([*slots, 0]).int(),
        has_initial_state=None if continued is None else torch.tensor([*continued, True]),
    )


def defined(layer: Any, qkv: Tensor, b: Tensor, a: Tensor, slot: int, continued: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of one sequence, its last inputs and its state, as the definition says."""
    states = layer.kv_cache[1].view(SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    state = states[slot].double() * continued
    history = layer.kv_cache[0][slot].double() * continued
    inputs = torch.cat([history, qkv.double()])
    weight = layer.conv1d.weight[:, 0].double()
    outputs = []
    for token in range(len(qkv)):
        mixed = F.silu((inputs[token : token + WIDTH] * weight.T).sum(0))
        query, key = (mixed[place : place + KEYS].view(KEY_HEADS, KEY_DIM) for place in (0, KEYS))
        query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
        value = mixed[2 * KEYS :].view(VALUE_HEADS, VALUE_DIM)
        decay = torch.exp(-layer.A_log.double().exp() * F.softplus(a[token].double() + layer.dt_bias.double()))
        beta = b[token].double().sigmoid()
        heads = []
        for head in range(VALUE_HEADS):
            of_key = head // (VALUE_HEADS // KEY_HEADS)
            before = decay[head] * state[head]
            written = beta[head] * (value[head] - before.T @ key[of_key])
            state[head] = before + torch.outer(key[of_key], written)
            heads.append(state[head].T @ query[of_key] / KEY_DIM**0.5)
        outputs.append(torch.stack(heads))
    return torch.stack(outputs), inputs[-(WIDTH - 1) :], state


@pytest.mark.parametrize("dim_first", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("lengths", "continued", "decodes"),
    [
        ([1, 1, 1], None, 3),
        ([5, 17, 16], [False, True, False], 0),
        ([1, 130, 1, 3], [True, False, False, True], 1),
        ([64, 65], [True, True], 0),
        ([1, 0, 33], [True, True, False], 1),
    ],
)
def test_sequences_of_any_length_are_what_the_definition_says(
    monkeypatch: pytest.MonkeyPatch, dim_first: bool, tp_size: int, lengths: list[int], continued: Any, decodes: int
) -> None:
    layer, tokens = make_layer(tp_size), sum(lengths)
    qkv, b, a = torch.randn(tokens, CHANNELS), torch.randn(tokens, VALUE_HEADS), torch.randn(tokens, VALUE_HEADS)
    slots = [5, 2, 6, 1][: len(lengths)]
    expected, start = {}, 0
    for length, slot, goes_on in zip(lengths, slots, continued or [True] * len(lengths), strict=True):
        part = slice(start, start := start + length)
        if length:
            expected[slot] = part, *defined(layer, qkv[part], b[part], a[part], slot, goes_on)
    before = [each.clone() for each in layer.kv_cache]
    if dim_first:
        layer.kv_cache = (layer.kv_cache[0].transpose(1, 2).contiguous(), layer.kv_cache[1])
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: dim_first)
    out = torch.full((tokens, VALUE_HEADS, VALUE_DIM), 99.0)
    deltanet._compute(layer, metadata(lengths, slots, continued, decodes), qkv, b, a, out)
    inputs = layer.kv_cache[0].transpose(1, 2) if dim_first else layer.kv_cache[0]
    states = layer.kv_cache[1].view(SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    for slot, (part, outputs, last, state) in expected.items():
        torch.testing.assert_close(out[part].double(), outputs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(inputs[slot].double(), last, atol=0, rtol=0)
        torch.testing.assert_close(states[slot].double(), state, atol=1e-4, rtol=1e-4)
    others = [slot for slot in range(SLOTS) if slot not in expected]
    assert torch.equal(inputs[others], before[0][others]) and torch.equal(layer.kv_cache[1][others], before[1][others])


def test_a_weight_that_is_packed_for_vllms_kernel_is_read_as_it_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: False)
    results = []
    for packed in (False, True):
        layer = make_layer()
        if packed:
            layer.conv1d._cpu_unpacked_conv_weight, layer.conv1d.weight = layer.conv1d.weight, torch.zeros(3)
        qkv, b, a = (torch.linspace(-1, 1, 4 * size).view(4, size) for size in (CHANNELS, VALUE_HEADS, VALUE_HEADS))
        out = torch.empty(4, VALUE_HEADS, VALUE_DIM)
        deltanet._compute(layer, metadata([4], [3], [False]), qkv, b, a, out)
        results.append(out)
    assert torch.equal(*results)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own functions as stand-ins, with the changes in their places; all is as it was afterwards."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.v1.attention.backends import gdn_attn

    done: Any = []
    context = SimpleNamespace(no_compile_layers={"layer": make_layer()}, attn_metadata={"layer": "metadata"})
    monkeypatch.setattr(gdn_attention, "cpu_gdn_attention_core", lambda *args: done.append(("kernel", *args)))
    monkeypatch.setattr(_custom_ops, "causal_conv1d_weight_pack", lambda weight: done.append("pack") or weight + 1)
    monkeypatch.setattr(gdn_attn, "split_decodes_and_prefills", lambda *args, **options: (args, options))
    monkeypatch.setattr(deltanet, "get_forward_context", lambda: context)
    monkeypatch.setattr(deltanet, "_resolve_layer_name", lambda name: name)
    monkeypatch.setattr(deltanet, "_compute", lambda *args: done.append(("own", *args)))
    deltanet.serve_every_deltanet()
    return SimpleNamespace(
        done=done,
        context=context,
        layer=context.no_compile_layers["layer"],
        core=gdn_attention.cpu_gdn_attention_core,
        pack=_custom_ops.causal_conv1d_weight_pack,
        split=gdn_attn.split_decodes_and_prefills,
    )


@pytest.mark.parametrize(
    ("dtype", "key_dim", "value_dim", "kernel"),
    [
        (torch.bfloat16, 64, 64, True),
        (torch.bfloat16, 128, 128, True),
        (torch.bfloat16, 64, 128, False),
        (torch.bfloat16, 96, 96, False),
        (torch.float32, 64, 64, False),
        (torch.float16, 128, 128, False),
    ],
)
def test_vllms_kernel_computes_what_it_takes_and_this_operator_the_rest(
    served: Any, dtype: torch.dtype, key_dim: int, value_dim: int, kernel: bool
) -> None:
    served.layer.head_k_dim, served.layer.head_v_dim = key_dim, value_dim
    for rows in (1, 3):
        # Rows of a wider matrix.
        qkv = torch.ones(rows, 20, dtype=dtype)[:, :8]
        served.done.clear()
        served.core(qkv, "b", "a", "out", "layer")
        ((by, *given),) = served.done
        assert by == ("kernel" if kernel else "own")
        if kernel:
            assert given[1:] == ["b", "a", "out", "layer"] and torch.equal(given[0], qkv)
            assert given[0].stride(0) == (8 if rows == 1 else 20)
        else:
            assert given[0] is served.layer and given[1] == "metadata" and given[2] is qkv and given[3:] == ["b", "a", "out"]
    served.context.attn_metadata = None
    served.done.clear()
    served.core(torch.ones(2, 8, dtype=dtype), "b", "a", "out", "layer")
    assert not served.done, "vLLM measures its memory"


def test_weights_are_packed_for_the_kernels_dtype_alone(served: Any) -> None:
    for dtype in (torch.float32, torch.float16):
        weight = torch.zeros(2, dtype=dtype)
        assert served.pack(weight) is weight
    assert not served.done
    assert torch.equal(served.pack(torch.zeros(2, dtype=torch.bfloat16)), torch.ones(2, dtype=torch.bfloat16))


def test_decodes_are_those_that_have_a_state(served: Any) -> None:
    for prefilling, by_length in ((None, True), (torch.tensor([True]), False)):
        given = SimpleNamespace(is_prefilling=prefilling)
        args, options = served.split(given, 3, require_uniform=True)
        assert args == (given, 3) and options == {"require_uniform": True, "treat_short_extends_as_decodes": by_length}
        assert served.split(given)[0] == (given, 1)


def test_nothing_is_changed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import gdn_attn

    before = gdn_attn.split_decodes_and_prefills
    monkeypatch.setattr(deltanet, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    deltanet.serve_every_deltanet()
    assert gdn_attn.split_decodes_and_prefills is before
