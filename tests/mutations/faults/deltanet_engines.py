"""Gated DeltaNet in vLLM's engines."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "first-tokens-that-come-alone-are-decodes",
        "actors.rollout.vllm.deltanet:serve_every_deltanet.split_by_state",
        "by_length = metadata.is_prefilling is None",
        "by_length = True",
        ("test_vllm_starts_a_prompt_of_one_token_from_an_old_state_without_the_patch",),
        "a prompt of one token would go on from another sequence's state",
    ),
    Fault(
        "one-token-keeps-the-stride-of-its-row",
        "actors.rollout.vllm.deltanet:serve_every_deltanet.core",
        "rows = mixed_qkv.clone(memory_format=torch.contiguous_format) if len(mixed_qkv) == 1 else mixed_qkv",
        "rows = mixed_qkv.clone(memory_format=torch.contiguous_format) if len(mixed_qkv) < 1 else mixed_qkv",
        ("test_vllm_starts_a_prompt_of_one_token_from_an_old_state_without_the_patch",),
        "a prompt of one token, alone in a step, would end an engine in bfloat16",
    ),
    Fault(
        "slots-of-queries-alone",
        "rl_backend.lab.plan.native:engine_slot_bytes",
        "2 * weight.shape[1]",
        "0 * weight.shape[1]",
        ("test_vllm_deltanet.py::test_slots_of_engines_take_what_a_plan_says",),
        "a plan would leave out two of the three copies of A that an engine keeps of gated DeltaNet",
    ),
    Fault(
        "padding-decays-states",
        "actors.rollout.vllm.deltanet:_compute",
        "decay, beta = (x.masked_fill(~real[..., None], 0.0) for x in (decay, b[tokens].float().sigmoid()))",
        "decay, beta = (decay, b[tokens].float().sigmoid())",
        ("test_vllm_deltanet.py::test_log_probs_are_transformers_after_every_push",),
        "a prompt whose length is no multiple of 16 would leave the state of other tokens",
    ),
    Fault(
        "convolutions-see-padding",
        "actors.rollout.vllm.deltanet:_convolved",
        "last = rows.lengths[:, None] + torch.arange(history.shape[1])",
        "last = rows.real.shape[1] + torch.arange(history.shape[1]).expand(len(history), -1)",
        ("test_vllm_deltanet.py::test_log_probs_are_transformers_after_every_push",),
        "the first token of a response would be convolved with padding",
    ),
    Fault(
        "generators-go-on-in-the-middle-of-prompts",
        "actors.rollout.vllm.patches:turn_generators_back.sample_and_turn_back",
        "runner.input_batch.generators[index].set_state(state)",
        "pass",
        ("test_seeds_decide_alone_when_prompts_are_computed_in_pieces",),
        "a sample would depend on how much of its prompt was cached",
    ),
    Fault(
        "a-token-without-probability-drawn-at-the-border",
        "actors.rollout.vllm.patches:_tokens_at",
        "torch.searchsorted(ends, places[:, None], right=True)",
        "torch.searchsorted(ends, places[:, None])",
        ("test_tokens_are_drawn_as_often_as_they_are_likely_and_never_those_that_are_cut",),
        "a number at the start of the interval would give a word that the cut has removed",
    ),
    Fault(
        "numbers-drawn-from-the-first-requests-generator",
        "actors.rollout.vllm.patches:draw_one_number_for_a_token.draw",
        "generators.get(row)",
        "generators[0]",
        ("test_a_seeded_token_takes_one_number_and_not_one_for_every_word",),
        "a sample would depend on its neighbours in the batch",
    ),
    Fault(
        "seeds-beside-a-request-without-one-draw-otherwise",
        "actors.rollout.vllm.patches:draw_one_number_for_a_token.draw",
        "not generators",
        "len(generators) < len(logits)",
        ("test_a_seeded_token_takes_one_number_and_not_one_for_every_word",),
        "a greedy evaluation would change what is sampled beside it",
    ),
    Fault(
        "names-of-nested-models-not-told",
        "actors.rollout.vllm.adapters:AdapterSlots.learn_names",
        "mapper._map_name(module) if mapper else module",
        "module",
        ("test_adapters_of_every_kind_of_module",),
        "tenants of a released Qwen3.5 would be refused by every engine",
    ),
    Fault(
        "refusals-of-every-device",
        "actors.rollout.vllm.capabilities:check_served",
        "if concerned and device in refusal.devices and refusal.applies(fields, config):",
        "if concerned and refusal.applies(fields, config):",
        ("test_what_a_cpu_cannot_serve",),
        "engines on a GPU would be refused what only a CPU cannot serve",
    ),
    Fault(
        "log-probs-before-the-cut",
        "actors.rollout.vllm.patches:draw_one_number_for_a_token.draw",
        "log_probs = apply_top_k_top_p(logits, k, p).log_softmax(-1, dtype=torch.float32)",
        "log_probs = apply_top_k_top_p(logits.log_softmax(-1, dtype=torch.float32), k, p)",
        ("test_tokens_are_drawn_as_often_as_they_are_likely_and_never_those_that_are_cut",),
        "with a cut, log-probs of seeded samples would be those of another distribution than was sampled from",
    ),
]
