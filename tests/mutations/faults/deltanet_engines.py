"""Gated DeltaNet in vLLM's engines."""

from __future__ import annotations

from tests.mutations.fault import Fault

_ENGINES = "tests/e2e/test_vllm_deltanet.py"
_TYPES = "tests/unit/actors/rollout/test_capabilities.py"

FAULTS = [
    Fault(
        "first-tokens-that-come-alone-are-decodes",
        "actors/rollout/vllm/deltanet.py",
        "by_length = metadata.is_prefilling is None",
        "by_length = True",
        (f"{_ENGINES}::test_vllm_starts_a_prompt_of_one_token_from_an_old_state_without_the_patch",),
        "a prompt of one token would go on from another sequence's state",
    ),
    Fault(
        "one-token-keeps-the-stride-of-its-row",
        "actors/rollout/vllm/deltanet.py",
        "if len(mixed_qkv) == 1 else mixed_qkv",
        "if len(mixed_qkv) < 1 else mixed_qkv",
        (f"{_ENGINES}::test_vllm_starts_a_prompt_of_one_token_from_an_old_state_without_the_patch",),
        "a prompt of one token, alone in a step, would end an engine in bfloat16",
    ),
    Fault(
        "slots-of-queries-alone",
        "rl_backend/lab/plan/native.py",
        "sum(2 * weight.shape[1]",
        "sum(0 * weight.shape[1]",
        (f"{_ENGINES}::test_slots_of_engines_take_what_a_plan_says",),
        "a plan would leave out two of the three copies of A that an engine keeps of gated DeltaNet",
    ),
    Fault(
        "padding-decays-states",
        "actors/rollout/vllm/deltanet.py",
        "(x.masked_fill(~real[..., None], 0.0) for x in (decay, b[tokens].float().sigmoid()))",
        "(decay, b[tokens].float().sigmoid())",
        (f"{_ENGINES}::test_log_probs_are_transformers_after_every_push",),
        "a prompt whose length is no multiple of 16 would leave the state of other tokens",
    ),
    Fault(
        "convolutions-see-padding",
        "actors/rollout/vllm/deltanet.py",
        "last = rows.lengths[:, None] + torch.arange(history.shape[1])",
        "last = rows.real.shape[1] + torch.arange(history.shape[1]).expand(len(history), -1)",
        (f"{_ENGINES}::test_log_probs_are_transformers_after_every_push",),
        "the first token of a response would be convolved with padding",
    ),
    Fault(
        "generators-go-on-in-the-middle-of-prompts",
        "actors/rollout/vllm/patches.py",
        "            runner.input_batch.generators[index].set_state(state)\n",
        "            pass\n",
        (f"{_ENGINES}::test_seeds_decide_alone_when_prompts_are_computed_in_pieces",),
        "a sample would depend on how much of its prompt was cached",
    ),
    Fault(
        "names-of-nested-models-not-told",
        "actors/rollout/vllm/adapters.py",
        "mapper._map_name(module) if mapper else module: module for",
        "module: module for",
        (f"{_ENGINES}::test_adapters_of_every_kind_of_module",),
        "tenants of a released Qwen3.5 would be refused by every engine",
    ),
    Fault(
        "refusals-of-every-device",
        "actors/rollout/vllm/capabilities.py",
        "if concerned and refusal.device == device and",
        "if concerned and",
        (f"{_TYPES}::test_what_a_cpu_cannot_serve",),
        "engines on a GPU would be refused what only a CPU cannot serve",
    ),
]
