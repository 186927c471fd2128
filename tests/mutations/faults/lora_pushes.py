"""Pushes of LoRA tenants into engines: what is sent, checked, loaded and served."""

from __future__ import annotations

from tests.mutations.fault import Fault

_STAGED = "tests/unit/actors/sync/test_adapter_staging.py"
_PUSHED = "tests/e2e/test_adapter_sync.py"
_ENGINE = "tests/unit/actors/rollout/test_adapters.py"

FAULTS = [
    Fault(
        "pushed-factors-without-the-scale",
        "actors/sync/adapter_push.py",
        """handle.lora.scale if name.removesuffix(".weight").endswith("_B") else 1.0""",
        "1.0",
        (f"{_STAGED}::test_an_adapter_is_the_same_to_the_bit_through_memory_and_through_a_directory[float32]",),
        "engines would serve another adapter than is trained",
    ),
    Fault(
        "damaged-factors-accepted",
        "actors/wire/factors.py",
        "        return _digest(self.shapes, self._flat) == self.digest\n",
        "        return True\n",
        (f"{_STAGED}::test_damage_and_values_that_are_not_finite_are_found",),
        "a flipped bit on the way would be served",
    ),
    Fault(
        "canary-accepts-an-adapter-without-effect",
        "actors/sync/canary.py",
        "    gap, unapplied = _gap(adapted, tenant), _gap(adapted, base)\n",
        "    gap, unapplied = min(_gap(adapted, tenant), _gap(adapted, base)), _gap(adapted, base)\n",
        (f"{_STAGED}::test_a_canary_tells_what_is_wrong",),
        "an adapter that vLLM does not apply would be served",
    ),
    Fault(
        "loaded-adapters-never-give-way",
        "actors/rollout/adapters.py",
        "        while len(self._loaded) > self._config.max_adapters:\n",
        "        while len(self._loaded) > self._config.max_adapters + 1:\n",
        (f"{_ENGINE}::test_the_adapter_not_used_for_longest_gives_way_and_comes_back",),
        "vLLM would throw out an adapter that a request needs",
    ),
    Fault(
        "adapters-served-beside-merged-weights",
        "actors/rollout/adapter_group.py",
        "        self._merged = merged\n",
        """        self._merged = ""\n""",
        (f"{_ENGINE}::test_no_tenant_goes_back_to_an_older_version_and_none_is_served_beside_merged_weights",),
        "a tenant would be sampled with the adapter of another in its base",
    ),
    Fault(
        "versions-of-a-tenant-share-a-name",
        "actors/rollout/messages.py",
        """f"{self.tenant}@{self.version}#{self.number}\"""",
        "self.tenant",
        (f"{_PUSHED}::test_requests_made_before_pushes_finish_on_the_versions_before",),
        "the prefix cache would answer with keys and values of an older version",
    ),
    Fault(
        "versions-share-a-number",
        "actors/sync/adapter_push.py",
        "next(_numbers), staged.rank)",
        "1, staged.rank)",
        (f"{_PUSHED}::test_tenants_in_one_batch_are_the_trainers_after_every_push",),
        "engines would go on with the adapter that was loaded under the number",
    ),
    Fault(
        "pushes-to-the-first-engine-alone",
        "actors/sync/adapter_push.py",
        """engines.call("push_adapter", *pushed)""",
        "engines.gather({0: engines._living()[0].push_adapter.remote(*pushed)})",
        (f"{_PUSHED}::test_tenants_in_one_batch_are_the_trainers_after_every_push",),
        "requests would fail on every other engine",
    ),
    Fault(
        "kernels-of-experts-chosen-for-adapters",
        "actors/rollout/vllm/patches.py",
        "        moe_config.is_lora_enabled = False\n",
        "        pass\n",
        ("tests/e2e/test_vllm_patches.py::test_adapters_beside_experts",),
        "engines with adapters would end at the first request for a mixture of experts on a CPU",
    ),
    Fault(
        "refusals-of-engines-ignored",
        "actors/sync/adapter_push.py",
        """_raise_refusal(engines.call("push_adapter", *pushed))""",
        """engines.call("push_adapter", *pushed)""",
        (f"{_PUSHED}::test_what_an_engine_cannot_load_is_refused_and_the_version_before_serves_on",),
        "requests would go to engines without the version that they ask for",
    ),
    Fault(
        "lone-factors-accepted",
        "actors/rollout/vllm/adapters.py",
        """return f"{name} is missing\"""",
        "continue",
        (f"{_PUSHED}::test_factors_that_vllm_would_take_are_refused",),
        "a module would be served without its adapter",
    ),
    Fault(
        "slots-not-compared-with-what-was-sent",
        "actors/rollout/vllm/adapters.py",
        "                    return name\n",
        "                    continue\n",
        (f"{_PUSHED}::test_a_canary_finds_what_vllm_does_not_say",),
        "an adapter that vLLM loads in part would be served by engines that have had their canary",
    ),
    Fault(
        "adapters-not-loaded-again-after-a-push-of-the-base",
        "actors/rollout/adapters.py",
        "            self._during_update(self.load_adapter, adapter)\n",
        "            pass\n",
        (f"{_PUSHED}::test_pushes_of_weights_and_of_adapters_mix",),
        "a push of the base would be done before every tenant is served on it",
    ),
    Fault(
        "no-slot-stays-empty",
        "rl_backend/contracts/lora.py",
        """2 if device == "cpu" else 1""",
        "1",
        (f"{_PUSHED}::test_more_tenants_than_slots_are_all_served",),
        "requests without an adapter would be answered with that of another",
    ),
    Fault(
        "restarted-engines-without-tenants",
        "actors/rollout/group.py",
        "                self._bring_adapters(actors)\n",
        "",
        ("tests/e2e/test_adapter_failures.py::test_an_engine_that_is_killed_in_mid_push[keep_adapter]",),
        "a restarted engine would refuse every tenant",
    ),
]
