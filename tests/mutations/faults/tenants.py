"""LoRA tenants one by one: scale of factors, dropout of their own, moments, schedules, versions and checkpoints."""

from __future__ import annotations

from tests.mutations.fault import Fault

_DROPPED = "test_dropout_is_drawn_anew_for_each_tenant_module_and_draw_and_keeps_the_mean"
_DRAWS = "test_training_alone_draws_dropout_anew_in_each_pass"
_LAYOUTS = "test_lora_tenants.py::test_tenants_train_in_every_layout_as_on_one_rank"
_BITS = "test_lora_tenants.py::test_a_tenant_is_the_same_to_the_last_bit_alone_and_beside_others"
_EVENTS = "test_nothing_that_another_tenant_does_changes_a_bit"
_SAVED = "test_a_tenant_alone_is_saved_and_goes_on_in_any_layout_and_runtime[native-2-parallel1-native]"
_OTHER_BASE = "test_a_tenant_is_refused_on_another_base_and_with_other_ranks"
_JOURNAL = "test_tenants_of_a_lost_group_are_made_again_on_the_new_base"
_EXPORTED = "test_peft_loads_what_a_tenant_exports"

FAULTS = [
    Fault(
        "alpha-not-divided-by-the-rank",
        "rl_backend.contracts.lora:LoRAConfig.scale",
        "return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)",
        "return self.alpha",
        (_EXPORTED,),
        "an adapter would change the model 16 times as much as peft's of the same configuration",
    ),
    Fault(
        "rank-stabilised-scale-ignored",
        "rl_backend.contracts.lora:LoRAConfig.scale",
        "return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)",
        "return self.alpha / self.rank",
        (_EXPORTED,),
        "use_rslora would be written for peft and not trained with",
    ),
    Fault(
        "imported-factors-keep-their-own-scale",
        "rl_backend.checkpoint.peft_files:fitted_to",
        "scale = adapter.scales[module] / config.scale",
        "scale = 1.0",
        ("test_ranks_and_scales_of_single_modules_are_read",),
        "an adapter of another alpha would have another effect here than with peft",
    ),
    Fault(
        "ranks-that-an-import-lacks-are-zeros",
        "rl_backend.checkpoint.peft_files:_with_ranks_of",
        "return torch.cat((factor, whole.narrow(dim, factor.shape[dim], whole.shape[dim] - factor.shape[dim])), dim)",
        "return torch.cat((factor, whole.narrow(dim, factor.shape[dim], whole.shape[dim] - factor.shape[dim]) * 0), dim)",
        ("test_ranks_and_scales_of_single_modules_are_read",),
        "a tenant of a higher rank than the adapter that it begins with would only ever use the lower one",
    ),
    Fault(
        "all-tenants-start-from-one-draw",
        "rl_backend.lora.rows:initial_factor",
        "generator = torch.Generator().manual_seed(_seed(config.seed, module.name))",
        "generator = torch.Generator().manual_seed(_seed(0, module.name))",
        ("test_first_factors_are_pefts_and_differ_by_seed_and_module",),
        "the seed of a tenant would be accepted and ignored",
    ),
    Fault(
        "first-factors-in-the-size-of-the-outputs",
        "rl_backend.lora.rows:initial_factor",
        "bound = 1.0 / math.sqrt(module.in_features)",
        "bound = 1.0 / math.sqrt(module.out_features)",
        ("test_first_factors_are_pefts_and_differ_by_seed_and_module",),
        "tenants would start otherwise than peft's adapters",
    ),
    Fault(
        "dropout-of-all-tenants-alike",
        "rl_backend.lora.rows:TenantRows._bind",
        "self.config.seed,",
        "0,",
        (_DROPPED,),
        "tenants of other seeds would drop the same inputs",
    ),
    Fault(
        "every-draw-drops-the-same",
        "rl_backend.primitive.adapters:dropped",
        "generator = torch.Generator(x.device).manual_seed((factors.seed * 1_000_003 + draw) % 2**63)",
        "generator = torch.Generator(x.device).manual_seed((factors.seed * 1_000_003) % 2**63)",
        (_DROPPED,),
        "some inputs of a module would never be trained",
    ),
    Fault(
        "what-dropout-keeps-is-not-scaled-up",
        "rl_backend.primitive.adapters:dropped",
        "return x * kept / (1.0 - factors.dropout)",
        "return x * kept",
        (_DROPPED,),
        "an adapter would be weaker in training than where it is served",
    ),
    Fault(
        "dropout-in-passes-without-gradients",
        "rl_backend.runtime.tenants.passes:PassTenants.begin",
        "drawing = [each for each in trained if each.lora.dropout and each.rows.training]",
        "drawing = [each for each in self.present(data) if each.lora.dropout and each.rows.training]",
        (_DRAWS,),
        "old log-probs would be those of another model than engines serve",
    ),
    Fault(
        "dropout-outside-of-training",
        "rl_backend.runtime.tenants.passes:PassTenants.begin",
        "drawing = [each for each in trained if each.lora.dropout and each.rows.training]",
        "drawing = [each for each in trained if each.lora.dropout]",
        (_DRAWS,),
        "eval_mode would be accepted and ignored",
    ),
    Fault(
        "micro-batches-share-a-draw",
        "rl_backend.runtime.tenants.passes:PassTenants.begin",
        "runs[key] += 1",
        "runs[key] += not index",
        ("test_dropout_is_drawn_once_for_each_run_of_a_tenant_that_has_it_and_trains",),
        "what is dropped would depend on how a batch is cut",
    ),
    Fault(
        "draws-counted-by-the-runs-of-a-rank",
        "rl_backend.runtime.tenants.passes:PassTenants.begin",
        "handle.rows.num_draws += 1",
        "handle.rows.num_draws += runs[handle.lora_id]",
        ("test_a_resumed_tenant_drops_what_it_would_have_dropped_on_ranks_with_uneven_runs",),
        "a checkpoint has the count of rank 0 alone: the other ranks would drop other inputs after it",
    ),
    Fault(
        "runs-of-a-micro-batch-share-a-draw",
        "rl_backend.runtime.tenants.passes:PassTenants.runs",
        "self._draws.get((index, place))",
        "self._draws.get((index, 0))",
        ("test_sequences_with_another_tenants_between_them_drop_inputs_of_their_own",),
        "sequences of a tenant that are not neighbours would all drop the same inputs",
    ),
    Fault(
        "data-parallel-ranks-drop-the-same-inputs",
        "rl_backend.runtime.tenants.passes:PassTenants.begin",
        "(passes[key] * _MOST_RUNS + runs[key]) * ranks.size() + ranks.rank()",
        "passes[key] * _MOST_RUNS + runs[key]",
        ("test_ranks_with_other_tokens_drop_other_inputs_and_those_of_a_replica_the_same",),
        "dropout would be less random the more ranks there are",
    ),
    Fault(
        "gradients-of-a-step-kept-for-the-next",
        "rl_backend.runtime.tenants.handle:TenantOptimizer.drop_gradients",
        "self._rows.gradients.zero_()",
        "pass",
        ("test_lora_peft.py::test_tenants_in_one_batch_train_as_peft_does_one_by_one[qwen3]",),
        "every step would go on with the gradients of all before it",
    ),
    Fault(
        "gradients-added-up-again-by-a-step",
        "rl_backend.runtime.tenants.handle:TenantOptimizer.reduce",
        """
        if self._reduced:
            return
        """,
        "pass",
        (f"{_LAYOUTS}[native-tp2]",),
        "an export of gradients before a step would change the step",
    ),
    Fault(
        "norm-counts-copies-of-a-factor",
        "rl_backend.runtime.adaptable:RowGroups.counts",
        "return data.rank() == 0 and (not summed or tensor is None or tensor.rank() == 0)",
        "return data.rank() == 0",
        (f"{_LAYOUTS}[native-tp2]",),
        "gradients would be clipped by a norm that grows with the number of tensor-parallel ranks",
    ),
    Fault(
        "denominators-of-all-tenants-together",
        "rl_backend.runtime.tenants.passes:sequences_of",
        'meta = {**batch.meta, **batch.meta.get("tenants", {}).get(key, {})}',
        'meta = {**batch.meta.get("tenants", {}).get(key, {}), **batch.meta}',
        (f"{_BITS}[native-one rank]",),
        "a tenant's loss would be divided by the tokens of all",
    ),
    Fault(
        "outputs-of-other-tenants-among-ones-own",
        "rl_backend.runtime.tenants.passes:results_of_tenants",
        "[value for value, each in zip(values, ids, strict=True) if each == key]",
        "[value for value, each in zip(values, ids, strict=True) if each >= 0]",
        ("test_each_sequence_has_the_output_of_its_own_head[one rank]",),
        "a user would get the log-probs of another user's sequences",
    ),
    Fault(
        "a-group-joins-the-outputs-of-all-tenants",
        "actors.train.passes:_tenant_result",
        "each == lora_id",
        "each >= 0",
        (_JOURNAL,),
        "a user would get the log-probs of another user's sequences from a training group",
    ),
    Fault(
        "optimizers-of-tenants-not-sent",
        "actors.train.group:TrainGroup.submit",
        "chosen = {name: value for name, value in given.items() if value is not signature.parameters[name].default}",
        "chosen = {name: value for name, value in given.items() if name != 'optimizer'}",
        (_JOURNAL,),
        "all tenants of a group would train with one learning rate",
    ),
    Fault(
        "bridge-ranks-take-the-first-part",
        "rl_backend.runtime.bridge.model.adapters:_part",
        "return group.rank() * mine, (group.rank() + 1) * mine",
        "return 0, mine",
        (f"{_LAYOUTS}[bridge-tp2]",),
        "adapters of the second half of a layer would be those of the first",
    ),
    Fault(
        "version-of-a-tenant-advances-without-a-step",
        "rl_backend.runtime.tenants.tenants:Tenants.step",
        "tenant.weight_version += result.ok",
        "tenant.weight_version += 1",
        (f"{_EVENTS}[a loss of NaN-native-1-parallel0]",),
        "engines would be pushed weights as new that are not",
    ),
    Fault(
        "factors-that-are-not-finite-imported",
        "rl_backend.runtime.tenants.state:problem_of_import",
        "if not bool(torch.isfinite(tensor).all()):",
        "if bool(torch.isnan(tensor).all()):",
        (f"{_EVENTS}[refused input-native-1-parallel0]",),
        "an import would end in a tenant that can only be thrown away",
    ),
    Fault(
        "second-moments-loaded-from-the-first",
        "rl_backend.runtime.tenants.state:_pieces",
        "rows.exp_avg_sq,",
        "rows.exp_avg,",
        (_SAVED,),
        "a resumed tenant would take steps of another size",
    ),
    Fault(
        "schedule-of-a-tenant-begins-anew-after-a-load",
        "rl_backend.runtime.tenants.state:load_tenant_state",
        "handle.trainer.schedule.num_steps = manifest.schedule_steps if optimizer else 0",
        "pass",
        (_SAVED,),
        "a resumed tenant would warm up again",
    ),
    Fault(
        "reset-keeps-the-step-count",
        "rl_backend.runtime.tenants.handle:TenantOptimizer.reset",
        "for each in (self._rows.exp_avg, self._rows.exp_avg_sq, self._rows.num_steps):",
        "for each in (self._rows.exp_avg, self._rows.exp_avg_sq):",
        ("test_a_reset_optimizer_takes_its_next_step_as_the_first_of_torchs_adamw",),
        "the first step after a reset would be far too small",
    ),
    Fault(
        "adapters-of-another-base-loaded",
        "rl_backend.runtime.tenants.state:load_tenant_state.check",
        "if facts.base != base:",
        "if not facts.base:",
        (_OTHER_BASE,),
        "a tenant would go on beside weights that it was not trained on",
    ),
    Fault(
        "configurations-of-a-saved-tenant-not-compared",
        "rl_backend.runtime.tenants.state:load_tenant_state.check",
        "if name not in free and saved[name] != value:",
        "if name not in saved:",
        (_OTHER_BASE,),
        "a tenant with another alpha would go on from factors of the one before",
    ),
    Fault(
        "new-tenant-seems-to-have-gradients",
        "rl_backend.runtime.tenants.handle:TenantOptimizer.__init__",
        "self.has_gradients = False",
        "self.has_gradients = True",
        ("test_a_tenant_steps_only_with_gradients_that_it_has_been_given",),
        "a new tenant would step with zeros: decay and a version for nothing",
    ),
    Fault(
        "only-the-first-target-is-looked-for",
        "rl_backend.lora.modules:select_modules",
        "for target in config.targets:",
        "for target in config.targets[:1]:",
        ("test_a_target_that_no_module_has_is_refused_wherever_it_stands",),
        "a misspelt second target would be ignored",
    ),
    Fault(
        "latent-attention-scaled-by-value-dim",
        "rl_backend.runtime.bridge.model.adapters:_attend",
        "query.shape[-1] ** 0.5",
        "value.shape[-1] ** 0.5",
        ("test_attention_beside_adapters_has_the_models_own_scale_and_values_of_any_width",),
        "scores of tenants on DeepSeek would be too small",
    ),
    Fault(
        "etp-gradients-over-ep-ranks",
        "rl_backend.runtime.native.adapters:adaptable_modules",
        "etp = groups.ep_mesh.get_group(1) if groups.parallel.etp > 1 else None",
        "etp = groups.ep_mesh.get_group(0) if groups.parallel.etp > 1 else None",
        ("test_gradients_of_experts_are_added_up_over_the_ranks_that_share_an_expert",),
        "gradients would be added up over ranks with other experts",
    ),
    Fault(
        "experts-gradients-over-dense-groups",
        "rl_backend.runtime.tenants.handle:TenantOptimizer.reduce",
        "tensor, data = self.groups.summing(of_experts=section.of_experts)",
        "tensor, data = self.groups.summing(of_experts=False)",
        ("test_gradients_are_added_up_over_the_ranks_that_have_parts_of_them_and_once",),
        "gradients of one rank's experts would be added to those of another's",
    ),
    Fault(
        "shared-out-tokens-have-the-first-ranks-adapters",
        "rl_backend.runtime.native.adapters:_forward",
        "runs_at_work() if share is None else runs_of_share(runs_at_work(), x.shape[0], *share)",
        "runs_at_work()",
        ("test_a_rank_that_has_a_share_of_the_tokens_adapts_each_with_its_own_tenants_factors",),
        "the second rank's tokens would have another tenant's factors",
    ),
    Fault(
        "expert-rows-go-back-in-the-wrong-order",
        "rl_backend.runtime.bridge.model.adapters:_forward",
        "output.index_select(0, order.argsort())",
        "output.index_select(0, order)",
        ("test_rows_of_experts_come_back_as_they_were_sent",),
        "tokens would have what experts made of other tokens",
    ),
    Fault(
        "interrupted-tenant-keeps-its-gradients",
        "rl_backend.runtime.tenants.tenants:Tenants.run_passes",
        "except BaseException:",
        "except Exception:",
        ("test_tenants_of_an_interrupted_pass_do_not_step_and_those_beside_it_do[alone]",),
        "after an interrupt a tenant would step with half of its gradients",
    ),
    Fault(
        "interrupted-tenants-keep-their-gradients",
        "rl_backend.runtime.tenants.tenants:Tenants.run_mixed",
        "except BaseException:",
        "except Exception:",
        ("test_tenants_of_an_interrupted_pass_do_not_step_and_those_beside_it_do[beside another]",),
        "after an interrupt tenants would step with half of their gradients",
    ),
    Fault(
        "base-of-the-first-group-for-all",
        "actors.run.session:Session.base",
        """
        if (group, path) not in shared.bases:
            shared.bases[group, path] = group.build_model(
                name=f"base of {Path(path).name}", trainable=False, hf_path=path
            )
        return shared.bases[group, path]
        """,
        """
        group = self.groups[0]
        if (group, path) not in shared.bases:
            shared.bases[group, path] = group.build_model(
                name=f"base of {Path(path).name}", trainable=False, hf_path=path
            )
        return shared.bases[group, path]
        """,
        ("test_each_group_has_a_base_of_its_own_for_each_directory",),
        "a run on the second group would get a model of the first, which its group refuses",
    ),
    Fault(
        "dora-starts-with-norms-of-columns",
        "rl_backend.runtime.tenants.tenants:_initial_magnitudes",
        "torch.linalg.vector_norm(tensor, dim=1)",
        "torch.linalg.vector_norm(tensor, dim=0)",
        ("test_an_untrained_adapter_with_magnitudes_leaves_the_model_as_it_is",),
        "a new tenant with DoRA would change the model before its first step",
    ),
    Fault(
        "adapters-beside-linear-layers-only",
        "rl_backend.runtime.native.adapters:attach_adapters",
        'if kind != "head":',
        "if isinstance(layer, nn.Linear):",
        ("test_losses_and_gradients_are_pefts_with_the_same_inputs_dropped[embedding and head]",),
        "an adapter of the embedding would have no part in passes and learn nothing",
    ),
]
