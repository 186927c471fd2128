"""LoRA tenants one by one: scale of factors, dropout of their own, moments, schedules, versions and checkpoints."""

from __future__ import annotations

from tests.mutations.fault import Fault

_ROWS = "tests/unit/rl_backend/lora/test_rows.py"
_DROPPED = f"{_ROWS}::test_dropout_is_drawn_anew_for_each_tenant_module_and_draw_and_keeps_the_mean"
_DRAWS = "tests/unit/rl_backend/runtime/test_tenants.py::test_training_alone_draws_dropout_once_for_each_micro_batch"
_LAYOUTS = "tests/distributed/test_lora_tenants.py::test_tenants_train_in_every_layout_as_on_one_rank"
_BITS = "tests/distributed/test_lora_tenants.py::test_a_tenant_is_the_same_to_the_last_bit_alone_and_beside_others"
_ISOLATED = "tests/distributed/test_lora_isolation.py"
_EVENTS = f"{_ISOLATED}::test_nothing_that_another_tenant_does_changes_a_bit"
_SAVED = f"{_ISOLATED}::test_a_tenant_alone_is_saved_and_goes_on_in_any_layout_and_runtime[native-2-parallel1-native]"
_OTHER_BASE = f"{_ISOLATED}::test_a_tenant_is_refused_on_another_base_and_with_other_ranks"
_JOURNAL = "tests/unit/actors/train/test_journal.py::test_tenants_of_a_lost_group_are_made_again_on_the_new_base"
_PEFT = "tests/unit/rl_backend/runtime/test_lora_peft.py"
_EXPORTED = f"{_PEFT}::test_peft_loads_what_a_tenant_exports"

FAULTS = [
    Fault(
        "alpha-not-divided-by-the-rank",
        "rl_backend/contracts/lora.py",
        "return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)",
        "return self.alpha",
        (_EXPORTED,),
        "an adapter would change the model 16 times as much as peft's of the same configuration",
    ),
    Fault(
        "rank-stabilised-scale-ignored",
        "rl_backend/contracts/lora.py",
        "return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)",
        "return self.alpha / self.rank",
        (_EXPORTED,),
        "use_rslora would be written for peft and not trained with",
    ),
    Fault(
        "imported-factors-keep-their-own-scale",
        "rl_backend/checkpoint/peft_files.py",
        "        scale = adapter.scales[module] / config.scale\n",
        "        scale = 1.0\n",
        (f"{_PEFT}::test_ranks_and_scales_of_single_modules_are_read",),
        "an adapter of another alpha would have another effect here than with peft",
    ),
    Fault(
        "all-tenants-start-from-one-draw",
        "rl_backend/lora/rows.py",
        "manual_seed(_seed(config.seed, module.name))",
        "manual_seed(_seed(0, module.name))",
        (f"{_ROWS}::test_first_factors_are_pefts_and_differ_by_seed_and_module",),
        "the seed of a tenant would be accepted and ignored",
    ),
    Fault(
        "first-factors-in-the-size-of-the-outputs",
        "rl_backend/lora/rows.py",
        "    bound = 1.0 / math.sqrt(module.in_features)\n",
        "    bound = 1.0 / math.sqrt(module.out_features)\n",
        (f"{_ROWS}::test_first_factors_are_pefts_and_differ_by_seed_and_module",),
        "tenants would start otherwise than peft's adapters",
    ),
    Fault(
        "dropout-of-all-tenants-alike",
        "rl_backend/lora/rows.py",
        "seed=_seed(self.config.seed, f",
        "seed=_seed(0, f",
        (_DROPPED,),
        "tenants of other seeds would drop the same inputs",
    ),
    Fault(
        "every-draw-drops-the-same",
        "rl_backend/primitive/adapter_runs.py",
        "(factors.seed * 1_000_003 + draw) % 2**63",
        "(factors.seed * 1_000_003) % 2**63",
        (_DROPPED,),
        "some inputs of a module would never be trained",
    ),
    Fault(
        "what-dropout-keeps-is-not-scaled-up",
        "rl_backend/primitive/adapter_runs.py",
        "    return x * kept / (1.0 - factors.dropout)\n",
        "    return x * kept\n",
        (_DROPPED,),
        "an adapter would be weaker in training than where it is served",
    ),
    Fault(
        "dropout-in-passes-without-gradients",
        "rl_backend/runtime/tenant_pass.py",
        "        for index, batch in enumerate(data if self.trains else ()):\n",
        "        for index, batch in enumerate(data):\n",
        (_DRAWS,),
        "old log-probs would be those of another model than engines serve",
    ),
    Fault(
        "dropout-outside-of-training",
        "rl_backend/runtime/tenant_pass.py",
        "tenant.lora.dropout and tenant.rows.training:",
        "tenant.lora.dropout:",
        (_DRAWS,),
        "eval_mode would be accepted and ignored",
    ),
    Fault(
        "micro-batches-share-a-draw",
        "rl_backend/runtime/tenant_pass.py",
        "                    tenant.rows.num_draws += 1\n",
        "                    tenant.rows.num_draws += not index\n",
        (_DRAWS,),
        "what is dropped would depend on how a batch is cut",
    ),
    Fault(
        "data-parallel-ranks-drop-the-same-inputs",
        "rl_backend/runtime/tenant_pass.py",
        "tenant.rows.num_draws * ranks.size() + ranks.rank()",
        "tenant.rows.num_draws",
        (
            "tests/distributed/test_lora_dropout.py::test_ranks_with_other_tokens_drop_other_inputs_and_those_of_a_replica_the_same",
        ),
        "dropout would be less random the more ranks there are",
    ),
    Fault(
        "gradients-of-a-step-kept-for-the-next",
        "rl_backend/runtime/tenant_optimizer.py",
        "        self._rows.gradients.zero_()\n",
        "        pass\n",
        (f"{_PEFT}::test_tenants_in_one_batch_train_as_peft_does_one_by_one[qwen3]",),
        "every step would go on with the gradients of all before it",
    ),
    Fault(
        "gradients-added-up-again-by-a-step",
        "rl_backend/runtime/tenant_optimizer.py",
        "        if self._reduced:\n            return\n",
        "",
        (f"{_LAYOUTS}[native-tp2]",),
        "an export of gradients before a step would change the step",
    ),
    Fault(
        "norm-counts-copies-of-a-factor",
        "rl_backend/runtime/adaptable.py",
        "return data.rank() == 0 and (not summed or tensor is None or tensor.rank() == 0)",
        "return data.rank() == 0",
        (f"{_LAYOUTS}[native-tp2]",),
        "gradients would be clipped by a norm that grows with the number of tensor-parallel ranks",
    ),
    Fault(
        "denominators-of-all-tenants-together",
        "rl_backend/runtime/tenant_pass.py",
        """    meta = {**batch.meta, **batch.meta.get("tenants", {}).get(key, {})}\n""",
        """    meta = {**batch.meta.get("tenants", {}).get(key, {}), **batch.meta}\n""",
        (f"{_BITS}[native-one rank]",),
        "a tenant's loss would be divided by the tokens of all",
    ),
    Fault(
        "outputs-of-other-tenants-among-ones-own",
        "rl_backend/runtime/tenant_pass.py",
        "for value, each in zip(values, ids, strict=True) if each == key]",
        "for value, each in zip(values, ids, strict=True) if each >= 0]",
        ("tests/distributed/test_lora_critics.py::test_each_sequence_has_the_output_of_its_own_head[one rank]",),
        "a user would get the log-probs of another user's sequences",
    ),
    Fault(
        "a-group-joins-the-outputs-of-all-tenants",
        "actors/train/dispatch.py",
        "for value, each in zip(outputs[name], tenants, strict=True) if each == lora_id]",
        "for value, each in zip(outputs[name], tenants, strict=True) if each >= 0]",
        (_JOURNAL,),
        "a user would get the log-probs of another user's sequences from a training group",
    ),
    Fault(
        "optimizers-of-tenants-not-sent",
        "actors/train/tenants.py",
        "lora=lora, optimizer=optimizer, name=name",
        "lora=lora, optimizer=None, name=name",
        (_JOURNAL,),
        "all tenants of a group would train with one learning rate",
    ),
    Fault(
        "bridge-ranks-take-the-first-part",
        "rl_backend/runtime/bridge/adapters.py",
        "    return group.rank() * mine, (group.rank() + 1) * mine\n",
        "    return 0, mine\n",
        (f"{_LAYOUTS}[bridge-tp2]",),
        "adapters of the second half of a layer would be those of the first",
    ),
    Fault(
        "version-of-a-tenant-advances-without-a-step",
        "rl_backend/runtime/tenants.py",
        "            tenant.weight_version += result.ok\n",
        "            tenant.weight_version += 1\n",
        (f"{_EVENTS}[a loss of NaN-native-1-parallel0]",),
        "engines would be pushed weights as new that are not",
    ),
    Fault(
        "factors-that-are-not-finite-imported",
        "rl_backend/runtime/tenant_state.py",
        "        if not bool(torch.isfinite(tensor).all()):\n",
        "        if bool(torch.isnan(tensor).all()):\n",
        (f"{_EVENTS}[refused input-native-1-parallel0]",),
        "an import would end in a tenant that can only be thrown away",
    ),
    Fault(
        "second-moments-loaded-from-the-first",
        "rl_backend/runtime/tenant_state.py",
        """("optimizer.exp_avg_sq", rows.exp_avg_sq)""",
        """("optimizer.exp_avg_sq", rows.exp_avg)""",
        (_SAVED,),
        "a resumed tenant would take steps of another size",
    ),
    Fault(
        "schedule-of-a-tenant-begins-anew-after-a-load",
        "rl_backend/runtime/tenant_state.py",
        """    handle.trainer("load_checkpoint").schedule.num_steps = manifest.schedule_steps\n""",
        "",
        (_SAVED,),
        "a resumed tenant would warm up again",
    ),
    Fault(
        "adapters-of-another-base-loaded",
        "rl_backend/runtime/tenant_state.py",
        "        if facts.base != base:\n",
        "        if not facts.base:\n",
        (_OTHER_BASE,),
        "a tenant would go on beside weights that it was not trained on",
    ),
    Fault(
        "configurations-of-a-saved-tenant-not-compared",
        "rl_backend/runtime/tenant_state.py",
        "            if facts.config.get(name) != value:\n",
        "            if name not in facts.config:\n",
        (_OTHER_BASE,),
        "a tenant with another alpha would go on from factors of the one before",
    ),
]
