"""Multi-token prediction: what is predicted from what, what moves, and what is saved."""

from __future__ import annotations

from tests.mutations.fault import Fault

_PLAIN = ("test_gradients_equal_those_of_a_plain_version",)

FAULTS = [
    Fault(
        "second-labels-cross-a-boundary",
        "rl_backend.model.input:second_labels",
        "return following.masked_fill(next_ids == IGNORE_LABEL, IGNORE_LABEL)",
        "return following",
        _PLAIN,
        "the last token of a sequence would predict one of the next sequence",
    ),
    Fault(
        "state-before-embedding",
        "rl_backend.model.decoder:MultiTokenPrediction.forward",
        "both = torch.cat((self.embedding_norm(embedding), self.hidden_norm(hidden)), dim=-1)",
        "both = torch.cat((self.hidden_norm(hidden), self.embedding_norm(embedding)), dim=-1)",
        _PLAIN,
        "the order of the paper is not that of released weights",
    ),
    Fault(
        "detached-head-is-moved",
        "rl_backend.model.decoder:Decoder._mtp_loss",
        "hidden, embedding, weight = hidden.detach(), embedding.detach(), weight.detach()",
        "hidden, embedding, weight = hidden.detach(), embedding.detach(), weight",
        ("test_detached_it_leaves_the_models_gradients_as_they_are_without_it",),
        "RL would pull the head towards what a draft wants",
    ),
    Fault(
        "draft-loss-at-the-samples-temperature",
        "rl_backend.model.decoder:Decoder._mtp_loss",
        "temperature=1.0 / self.spec.logit_scale,",
        "temperature=inputs.temperature / self.spec.logit_scale * 0.7,",
        _PLAIN,
        "the layer would be trained for another temperature",
    ),
    Fault(
        "mean-over-all-tokens",
        "rl_backend.runtime.native.forward_backward:lay_out",
        "sum(max(length - 2, 0) for length in seq_lens)",
        "sum(seq_lens)",
        _PLAIN,
        "the weight of the loss would depend on how long sequences are",
    ),
    Fault(
        "copies-read-again",
        "rl_backend.checkpoint.hf_weights:_read_tensors",
        "return stored_tensors(name.name if isinstance(name, CopiedWeight) else name)",
        "return stored_tensors(name)",
        ("test_a_directory_with_other_copies_is_read_as_its_originals",),
        "stale copies would take the place of trained embeddings",
    ),
    Fault(
        "copy-left-behind",
        "rl_backend.pipeline.executor:add_gradients_of_copies",
        "parameters[copy].grad = torch.zeros_like(parameters[copy])",
        "continue",
        ("test_detached_its_copy_of_the_embeddings_follows_them[untied-1f1b]",),
        "the last stage would draft from embeddings of the first step",
    ),
    Fault(
        "second-copy-of-the-embeddings-alone",
        "rl_backend.model.decoder:",
        '"mtp_embed_tokens.weight": "embed_tokens.weight",',
        '"mtp_embed_tokens.weight": "lm_head.weight",',
        ("test_a_pipeline_trains_as_one_rank[untied-1f1b]",),
        "the last stage would draft from the rows of the head",
    ),
]
