"""Sparse attention: what an indexer chooses, attention to it, and the indexer's loss."""

from __future__ import annotations

from tests.mutations.fault import Fault

_INDEXER = "rl_backend/primitive/indexer.py"
_ATTENTION = "rl_backend/primitive/sparse_attention.py"
_MODULE = "rl_backend/model/mixers/indexer.py"
_TESTS = "tests/unit/rl_backend/primitive/test_sparse_attention.py"
_FORMULAS = (f"{_TESTS}::test_packed_sequences_equal_the_formulas_one_by_one",)
_ITSELF = (f"{_TESTS}::test_the_module_equals_the_formulas_and_lets_nothing_flow_back",)

_MIXER = "rl_backend/model/mixers/sparse_mla.py"
_FAMILIES = "rl_backend/model/sparse_families.py"
_RECORDED = "tests/unit/rl_backend/model/test_indexed_keys.py"
_EQUAL = "tests/unit/rl_backend/model/test_sparse_families.py"

FAULTS = [
    Fault(
        "ties-go-to-the-last-keys",
        _INDEXER,
        "(at_edge & (at_edge.cumsum(-1) <= room))",
        "(at_edge & (at_edge.flip(-1).cumsum(-1).flip(-1) <= room))",
        (f"{_TESTS}::test_ties_are_broken_by_the_lowest_number_whatever_comes_later",),
        "a token that is appended would change what earlier ones attend to",
    ),
    Fault(
        "later-keys-are-scored",
        _INDEXER,
        ".masked_fill(~block.visible, -torch.inf), top_k)",
        ", top_k)",
        _FORMULAS,
        "the future would take places among the chosen keys",
    ),
    Fault(
        "scores-without-relu",
        _INDEXER,
        "terms.key.to(dtype)).relu()",
        "terms.key.to(dtype))",
        _FORMULAS,
        "heads that oppose a key would cancel those that ask for it",
    ),
    Fault(
        "target-is-not-a-distribution",
        _ATTENTION,
        "            target /= target.sum(-1, keepdim=True)\n",
        "",
        _FORMULAS,
        "the loss would grow with the number of heads",
    ),
    Fault(
        "loss-over-all-keys-in-both-stages",
        _ATTENTION,
        "block.visible if chosen is None else _visible_and_chosen(block, chosen)",
        "block.visible",
        _FORMULAS,
        "the sparse stage would teach the indexer about keys that nothing attends to",
    ),
    Fault(
        "dense-by-the-longest-of-a-micro-batch",
        _ATTENTION,
        "[keys <= chosen.shape[1] for keys in segments.key_lens]",
        "[max(segments.key_lens) <= chosen.shape[1]]",
        (f"{_EQUAL}::test_a_tenant_has_the_same_bits_alone_and_beside_longer_sequences",),
        "the bits of a tenant would depend on who is packed beside it",
    ),
    Fault(
        "indexer-teaches-the-model",
        _MODULE,
        "        x, latent = x.detach(), latent.detach()\n",
        "",
        _ITSELF,
        "the loss of the indexer would move the model, which learns from its own loss alone",
    ),
    Fault(
        "neighbours-rotated-as-halves",
        _MODULE,
        "        if self.spec.interleaved:\n",
        "        if False:\n",
        _ITSELF,
        "GLM-5 would choose other keys than it was trained to",
    ),
    Fault(
        "halves-and-neighbours-exchanged",
        _FAMILIES,
        "default_heads=64, default_interleaved=False)",
        "default_heads=64, default_interleaved=True)",
        (f"{_EQUAL}::test_log_probs_and_gradients_equal_the_reference[deepseek_v32]",),
        "DeepSeek-V3.2 would choose other keys than it was trained to",
    ),
    Fault(
        "layers-that-follow-choose-nothing",
        _MIXER,
        '        dense = spec.training == "warm_up" or covered\n',
        "        dense = spec.indexer is None or covered\n",
        (f"{_EQUAL}::test_log_probs_and_gradients_equal_the_reference[glm_moe_dsa]",),
        "layers that share indices would attend to everything",
    ),
    Fault(
        "warm-up-trains-the-model",
        _FAMILIES,
        'trained_part=INDEXER if options.indexer == "warm_up" else None',
        "trained_part=None",
        (f"{_EQUAL}::test_indexers_learn_beside_the_model_and_alone",),
        "a model would be trained on dense attention, which it is about to lose",
    ),
    Fault(
        "stage-begins-with-a-layer-that-follows",
        "rl_backend/model/decoder_spec.py",
        "        if layers and self.layers[layers.start].mixer.follows:\n",
        "        if False:\n",
        (f"{_EQUAL}::test_what_cannot_be_is_refused_by_name",),
        "the first pass of a long run would end in an assertion",
    ),
    Fault(
        "recorded-keys-of-the-first-layer",
        "rl_backend/model/decoder.py",
        "inputs.keys[:, layer.key_place]",
        "inputs.keys[:, 0]",
        (f"{_RECORDED}::test_recorded_keys_are_attended_to",),
        "every layer would attend to the keys that the first one has chosen",
    ),
    Fault(
        "recorded-keys-where-there-are-none",
        "rl_backend/model/mixers/sparse_mla.py",
        "torch.where(recorded.amax(-1, keepdim=True) < 0, chosen, recorded.to(chosen.dtype))",
        "recorded.to(chosen.dtype)",
        (f"{_RECORDED}::test_tokens_without_recorded_keys_choose_for_themselves",),
        "the last sampled token would attend to nothing",
    ),
    Fault(
        "recorded-keys-of-the-future",
        "rl_backend/contracts/indexed_keys.py",
        "ordered[..., -1] > places,",
        "ordered[..., -1] > places + 1,",
        (f"{_RECORDED}::test_keys_that_are_not_ones_of_the_model_are_refused",),
        "indices that are off by one would be trained with",
    ),
]
