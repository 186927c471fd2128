"""Sparse attention: what an indexer chooses, attention to it, and the indexer's loss."""

from __future__ import annotations

from tests.mutations.fault import Fault

_FORMULAS = ("test_packed_sequences_equal_the_formulas_one_by_one",)
_ITSELF = ("test_the_module_equals_the_formulas_and_lets_nothing_flow_back",)


FAULTS = [
    Fault(
        "ties-go-to-the-last-keys",
        "rl_backend.primitive.sparse_attention:highest",
        "return above | (at_edge & (at_edge.cumsum(-1) <= room))",
        "return above | (at_edge & (at_edge.flip(-1).cumsum(-1).flip(-1) <= room))",
        ("test_ties_are_broken_by_the_lowest_number_whatever_comes_later",),
        "a token that is appended would change what earlier ones attend to",
    ),
    Fault(
        "later-keys-are-scored",
        "rl_backend.primitive.sparse_attention:choose_keys",
        "index_scores(terms.of(block)).masked_fill(~block.visible, -torch.inf),",
        "index_scores(terms.of(block)),",
        _FORMULAS,
        "the future would take places among the chosen keys",
    ),
    Fault(
        "scores-without-relu",
        "rl_backend.primitive.sparse_attention:index_scores",
        'products = torch.einsum("nhd,md->nhm", terms.query.to(dtype), terms.key.to(dtype)).relu()',
        'products = torch.einsum("nhd,md->nhm", terms.query.to(dtype), terms.key.to(dtype))',
        _FORMULAS,
        "heads that oppose a key would cancel those that ask for it",
    ),
    Fault(
        "target-is-not-a-distribution",
        "rl_backend.primitive.sparse_attention:_IndexerLoss.forward",
        "target /= target.sum(-1, keepdim=True)",
        "pass",
        _FORMULAS,
        "the loss would grow with the number of heads",
    ),
    Fault(
        "loss-over-all-keys-in-both-stages",
        "rl_backend.primitive.sparse_attention:_IndexerLoss.forward",
        "mask = block.visible if chosen is None else _visible_and_chosen(block, chosen)",
        "mask = block.visible",
        _FORMULAS,
        "the sparse stage would teach the indexer about keys that nothing attends to",
    ),
    Fault(
        "dense-by-the-longest-of-a-micro-batch",
        "rl_backend.primitive.sparse_attention:sparse_attention",
        "covered = [keys <= chosen.shape[1] for keys in segments.key_lens]",
        "covered = [max(segments.key_lens) <= chosen.shape[1]]",
        ("test_a_tenant_has_the_same_bits_alone_and_beside_longer_sequences",),
        "the bits of a tenant would depend on who is packed beside it",
    ),
    Fault(
        "indexer-teaches-the-model",
        "rl_backend.model.mixers.mla:Indexer.forward",
        "x, latent = x.detach(), latent.detach()",
        "pass",
        _ITSELF,
        "the loss of the indexer would move the model, which learns from its own loss alone",
    ),
    Fault(
        "neighbours-rotated-as-halves",
        "rl_backend.model.mixers.mla:Indexer._rotate",
        "if self.spec.interleaved:",
        "if False:",
        _ITSELF,
        "GLM-5 would choose other keys than it was trained to",
    ),
    Fault(
        "halves-and-neighbours-exchanged",
        "rl_backend.model.families.deepseek:deepseek_v32",
        "default_interleaved=False,",
        "default_interleaved=True,",
        ("test_log_probs_and_gradients_equal_the_reference[deepseek_v32]",),
        "DeepSeek-V3.2 would choose other keys than it was trained to",
    ),
    Fault(
        "layers-that-follow-choose-nothing",
        "rl_backend.model.mixers.mla:SparseLatentAttention.forward",
        'dense = keys.training == "warm_up" or covered',
        "dense = keys.indexer is None or covered",
        ("test_log_probs_and_gradients_equal_the_reference[glm_moe_dsa]",),
        "layers that share indices would attend to everything",
    ),
    Fault(
        "warm-up-trains-the-model",
        "rl_backend.model.families.deepseek:configured",
        'trained_part=INDEXER if chosen.indexer == "warm_up" else None,',
        "trained_part=None,",
        ("test_indexers_learn_beside_the_model_and_alone",),
        "a model would be trained on dense attention, which it is about to lose",
    ),
    Fault(
        "stage-begins-with-a-layer-that-follows",
        "rl_backend.model.decoder_spec:DecoderSpec.require_stage",
        "if layers and self.layers[layers.start].mixer.follows:",
        "if False:",
        ("test_sparse_families.py::test_what_cannot_be_is_refused_by_name",),
        "the first pass of a long run would end in an assertion",
    ),
    Fault(
        "recorded-keys-of-the-first-layer",
        "rl_backend.model.decoder:Decoder.forward",
        "inputs.keys[:, layer.key_place]",
        "inputs.keys[:, 0]",
        ("test_recorded_keys_are_attended_to",),
        "every layer would attend to the keys that the first one has chosen",
    ),
    Fault(
        "recorded-keys-where-there-are-none",
        "rl_backend.model.mixers.mla:SparseLatentAttention.forward",
        "chosen = torch.where(recorded.amax(-1, keepdim=True) < 0, chosen, recorded.to(chosen.dtype))",
        "chosen = recorded.to(chosen.dtype)",
        ("test_tokens_without_recorded_keys_choose_for_themselves",),
        "the last sampled token would attend to nothing",
    ),
    Fault(
        "recorded-keys-of-the-future",
        "rl_backend.contracts.replay:_require_seen",
        '"a place behind its own": ordered[..., -1] > places,',
        '"a place behind its own": ordered[..., -1] > places + 1,',
        ("test_keys_that_are_not_ones_of_the_model_are_refused",),
        "indices that are off by one would be trained with",
    ),
    Fault(
        "last-chosen-key-is-lost",
        "rl_backend.primitive.sparse_attention:_numbers",
        "torch.where(taken, taken.cumsum(-1) - 1, top_k)",
        "torch.where(taken, taken.cumsum(-1), top_k)",
        ("test_ties_are_broken_by_the_lowest_number_whatever_comes_later",),
        "a query would not attend to the newest of its keys",
    ),
    Fault(
        "warm-up-beside-a-detached-mtp-layer",
        "rl_backend.model.families.deepseek:_require_indexers_alone",
        'options.mtp != "keep"',
        'options.mtp == "joint"',
        ("test_sparse_families.py::test_what_cannot_be_is_refused_by_name",),
        "a layer for multi-token prediction would be asked for and not trained",
    ),
]
