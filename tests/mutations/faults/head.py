"""A head in float32 over layers of another dtype; a head that is the embedding, adapted alone; the likeliest tokens."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "head-from-rounded-states",
        "rl_backend.model.decoder:Decoder.forward",
        "hidden = self.norm(hidden if self.layer_dtype is None else hidden.to(torch.float32))",
        "hidden = self.norm(hidden)",
        ("test_a_head_in_float32_rounds_nothing[untied]",),
        "the last norm would round what the head gets",
    ),
    Fault(
        "head-gathered-rounded",
        "rl_backend.parallel.fsdp:apply_fsdp",
        "as_they_are = [*unrounded, root] if kept_ends(root) else unrounded",
        "as_they_are = unrounded",
        ("test_a_head_in_float32_rounds_nothing[untied]",),
        "the head would compute with rounded weights",
    ),
    Fault(
        "head-of-a-reference-rounded",
        "rl_backend.primitive.float32:round_parameters",
        "end.to(torch.float32)",
        "end.to(dtype)",
        ("test_a_model_that_is_not_trained_has_the_same_head[untied]",),
        "a reference would give other log-probs than the policy with the same weights",
    ),
    Fault(
        "tied-head-of-all-words",
        "rl_backend.runtime.native.adapters:held_modules",
        "sizes, part = sizes[::-1], LinearPart(part.outputs, part.inputs)",
        "sizes, part = sizes[::-1], LinearPart((0, sizes[1]), (0, sizes[0]))",
        ("test_lora_tenants.py::test_tenants_train_in_every_layout_as_on_one_rank[native-tp2]",),
        "a tensor-parallel rank would add the products of other words to its own",
    ),
    Fault(
        "merged-weights-of-one-end",
        "rl_backend.runtime.tenants.handle:TenantHandle.weights",
        'if self.head == "log_probs" and ends and len(kept) == len(self.model.weights):',
        "if False:",
        ("test_an_adapter_of_one_end_of_tied_embeddings_is_exported_alone[qwen3-embedding alone]",),
        "a merged model would have the change at both ends, or at none, without a word",
    ),
    Fault(
        "likeliest-of-one-rank",
        "rl_backend.primitive.log_prob:_top_tokens",
        "normalizers = normalizers.logsumexp(1, keepdim=True)",
        "normalizers = normalizers[:, :1]",
        ("test_the_likeliest_tokens_are_those_of_a_full_softmax_whole_and_split",),
        "probabilities would be those among the first rank's words",
    ),
    Fault(
        "likeliest-numbered-by-tile",
        "rl_backend.primitive.log_prob:_top_of_chunk",
        "columns += tokens.start + words.start",
        "columns += tokens.start",
        ("test_the_likeliest_tokens_are_those_of_a_full_softmax_whole_and_split",),
        "tokens of a later tile would have the ids of the first",
    ),
    Fault(
        "sampled-token-cut",
        "rl_backend.primitive.log_prob:Cut.apply",
        "is_cut.scatter_(1, column, is_cut.gather(1, column) & ~inside)",
        "pass",
        ("test_log_probs_are_those_of_the_words_that_are_kept",),
        "a token that the trainer would not sample any more would have no probability",
    ),
    Fault(
        "top-p-of-all-words",
        "rl_backend.primitive.log_prob:cut_of",
        "log_total, _, _ = _finish_sums(sums(unlabelled._replace(cut=cut)), shard, False)",
        "log_total, _, _ = _finish_sums(sums(unlabelled), shard, False)",
        ("test_log_probs_are_those_of_the_words_that_are_kept",),
        "top_p would be a share of all words and not of the top_k that vLLM takes it of",
    ),
]
