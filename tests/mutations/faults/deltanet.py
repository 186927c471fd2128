"""Gated DeltaNet and gated attention: the recurrence, the convolution, their layouts, Qwen3.5's configuration."""

from __future__ import annotations

from tests.mutations.fault import Fault

_RULE, _CONV = "rl_backend/primitive/gated_delta.py", "rl_backend/primitive/causal_conv.py"
_MIXER, _FAMILY = "rl_backend/model/mixers/deltanet.py", "rl_backend/model/qwen3_5.py"
_RULE_TESTS = "tests/unit/rl_backend/primitive/test_gated_delta.py"
_CONV_TESTS = "tests/unit/rl_backend/primitive/test_causal_conv.py"
_MODEL_TESTS = "tests/unit/rl_backend/model/test_qwen3_5.py"
_MIXER_TESTS = "tests/unit/rl_backend/model/test_deltanet.py"
_RANK_TESTS = "tests/distributed/test_recurrence.py"
_RECURRENCE = f"{_RULE_TESTS}::test_outputs_and_gradients_are_those_of_the_recurrence"
_PARITY = f"{_MODEL_TESTS}::test_log_probs_and_gradients_equal_transformers_packed_and_alone"
_LAYOUTS = f"{_RANK_TESTS}::test_ranks_give_the_outputs_and_gradients_of_one"

FAULTS = [
    Fault(
        "decay-masked-after-its-exponential",
        _RULE,
        ".masked_fill(hidden, -torch.inf).exp()",
        ".exp().masked_fill(hidden, 0.0)",
        (_RECURRENCE,),
        "a strong decay would overflow above the diagonal, and gradients be NaN",
    ),
    Fault(
        "running-sum-in-float32",
        _RULE,
        "total = g.mT.double().masked_fill(hidden, 0.0).sum(-1)",
        "total = g.mT.masked_fill(hidden, 0.0).sum(-1)",
        (f"{_RULE_TESTS}::test_a_token_that_forgets_costs_no_accuracy_behind_it",),
        "tokens behind one that forgets would be read with a hundred times the rounding of float32",
    ),
    Fault(
        "state-without-decay-between-chunks",
        _RULE,
        "after = torch.baddbmm(state * kept, to_state.mT, news[-1])",
        "after = torch.baddbmm(state, to_state.mT, news[-1])",
        (_RECURRENCE,),
        "from the second chunk on states would never fade",
    ),
    Fault(
        "chunk-with-tokens-of-two-sequences",
        _RULE,
        "positions = torch.arange(len(sequences)) - (lengths.cumsum(0) - lengths)[sequences]",
        "positions = torch.arange(len(sequences))",
        (f"{_RULE_TESTS}::test_a_chunk_has_tokens_of_one_sequence",),
        "packed sequences would read each other's states",
    ),
    Fault(
        "key-heads-in-turn",
        _RULE,
        "v = self._chunked(value, self.heads).unflatten(1, (key_heads, -1))",
        "v = self._chunked(value, self.heads).unflatten(1, (-1, key_heads)).transpose(1, 2)",
        (_RECURRENCE,),
        "value heads would take other keys than the model was trained with",
    ),
    Fault(
        "transition-from-half-a-state",
        _RULE,
        "state = torch.cat((identity, nothing), dim=-1).expand(count, -1, -1)",
        "state = torch.cat((0.5 * identity, nothing), dim=-1).expand(count, -1, -1)",
        (f"{_RULE_TESTS}::test_a_sequence_that_is_cut_goes_on_from_the_state_before",),
        "with context parallelism states of earlier ranks would count half",
    ),
    Fault(
        "convolution-across-sequences",
        _CONV,
        "rows = _rows(tuple(seq_lens), width - 1, x.device)",
        "rows = _rows((sum(seq_lens),), width - 1, x.device)",
        (f"{_CONV_TESTS}::test_outputs_and_gradients_are_those_of_each_sequence_alone",),
        "the first tokens of a packed sequence would see the last of the one before",
    ),
    Fault(
        "convolution-turned-round",
        _CONV,
        "        convolved = wide[:outputs] * by_tap[0]\n",
        "        by_tap = by_tap.flip(0)\n        convolved = wide[:outputs] * by_tap[0]\n",
        (f"{_CONV_TESTS}::test_outputs_and_gradients_are_those_of_each_sequence_alone",),
        "taps would be applied in the wrong order",
    ),
    Fault(
        "queries-not-scaled",
        _MIXER,
        "query * spec.key_dim**-0.5",
        "query",
        (_PARITY,),
        "outputs of the recurrence would be too large",
    ),
    Fault(
        "gate-without-silu",
        _MIXER,
        "silu(_wide(gate))",
        "sigmoid(_wide(gate))",
        (_PARITY,),
        "another model would be trained",
    ),
    Fault(
        "gated-norm-from-one",
        _MIXER,
        "self.norm = RMSNorm(spec.value_dim, norm.eps)",
        "self.norm = RMSNorm(spec.value_dim, norm.eps, from_one=norm.from_one)",
        (_PARITY,),
        "the gated norm would be about twice as large as it is stored",
    ),
    Fault(
        "rounded-decay",
        "rl_backend/parallel/fsdp.py",
        "unrounded = [part for part in root.modules() if rounded and isinstance(part, KeptInFloat32)]",
        "unrounded: list[nn.Module] = []",
        (f"{_MODEL_TESTS}::test_decays_are_float32_in_a_bfloat16_model",),
        "A_log would be rounded to bfloat16",
    ),
    Fault(
        "rounded-decay-of-a-reference",
        "rl_backend/primitive/float32.py",
        "            part.to(torch.float32)\n",
        "            pass\n",
        (f"{_MODEL_TESTS}::test_decays_are_float32_in_a_bfloat16_model",),
        "a reference model would compute with another A_log than the policy",
    ),
    Fault(
        "gate-of-all-heads-together",
        "rl_backend/model/mixers/gqa.py",
        "query_and_gate = projected.unflatten(-1, (-1, 2, self.spec.head_dim))",
        "query_and_gate = projected.unflatten(-1, (2, -1, self.spec.head_dim)).transpose(1, 2)",
        (_PARITY,),
        "queries and gates would be mixed up between heads",
    ),
    Fault(
        "layers-in-the-wrong-order",
        _FAMILY,
        '"linear_attention" if (layer + 1) % interval else "full_attention"',
        '"linear_attention" if layer % interval else "full_attention"',
        (f"{_MODEL_TESTS}::test_what_a_directory_does_not_say_is_as_in_transformers",),
        "a directory without layer_types would be read as another model",
    ),
    Fault(
        "states-of-the-next-rank",
        "rl_backend/parallel/recurrence.py",
        "rank = min(step, 2 * self.size - 1 - step)",
        "rank = step % self.size",
        (_LAYOUTS,),
        "the second half of a sequence would begin with states in the wrong order",
    ),
    Fault(
        "history-turned-round",
        "rl_backend/parallel/recurrence.py",
        "for position in range(begin - width, begin):",
        "for position in reversed(range(begin - width, begin)):",
        (_LAYOUTS,),
        "the convolution would see the tokens before a chunk in the wrong order",
    ),
    Fault(
        "neighbouring-rows-as-heads",
        _MIXER,
        "mixed = mixed if self.fused is None else self.fused.of_my_heads(mixed)",
        "",
        (_LAYOUTS,),
        "with tensor parallelism queries would be taken for keys",
    ),
    Fault(
        "gated-norm-gradient-of-one-rank",
        _MIXER,
        "        tensor.replicate(self.norm)\n",
        "        tensor.replicate(self.norm, partial=False)\n",
        (_LAYOUTS,),
        "with tensor parallelism the gated norm would learn from the heads of one rank",
    ),
    Fault(
        "taps-of-neighbouring-channels",
        _MIXER,
        '{"weight": fused.rows_of_my_heads}',
        '{"weight": lambda taps: taps.tensor_split(groups.tp_group.size())[groups.tp_group.rank()]}',
        (_LAYOUTS,),
        "with tensor parallelism queries would be convolved with the taps of keys",
    ),
    Fault(
        "key-heads-not-divided",
        _MIXER,
        'require_divided("tp", parallel.tp, "linear_num_key_heads", self.num_key_heads)',
        'require_divided("tp", parallel.tp, "linear_num_value_heads", self.num_value_heads)',
        (f"{_MODEL_TESTS}::test_layouts_that_do_not_divide_are_refused_with_arithmetic",),
        "a rank would have values without the keys that write them",
    ),
    Fault(
        "no-history-has-no-shape",
        "rl_backend/parallel/recurrence.py",
        ".unflatten(0, (len(segments.query_lens), width))",
        ".unflatten(0, (-1, width))",
        (_LAYOUTS,),
        "with context parallelism a convolution over one token would fail",
    ),
    Fault(
        "short-keys-made-long",
        _RULE,
        "(wide.square().sum(-1, keepdim=True) + 1e-6)",
        "(wide.square().sum(-1, keepdim=True) + 1e-12)",
        (f"{_MIXER_TESTS}::test_outputs_and_gradients_are_those_of_the_formulas",),
        "keys near 0 would write as much as others",
    ),
]
