"""The adapter for verl."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "verl-token-count-of-one-rank",
        "adapters.verl.batches:_agreed_num_tokens",
        "dist.all_reduce(facts, group=place.data_parallel_group)",
        "pass",
        ("test_sft_steps_in_every_layout_are_those_of_one_rank[native dp]",),
        "the loss would be divided by one rank's tokens",
    ),
    Fault(
        "verl-refusals-of-other-ranks-not-heard",
        "adapters.verl.batches:_agreed_num_tokens",
        "if refusing:",
        "if False:",
        ("test_a_batch_that_one_rank_refuses_is_refused_on_all_and_the_next_one_runs",),
        "ranks with right data would wait for one that refused its own",
    ),
    Fault(
        "verl-temperature-ignored",
        "adapters.verl.batches:_pack",
        'sequence_fields["temperature"] = temperature.reshape(len(data))',
        'sequence_fields["temperature"] = torch.ones(len(data))',
        ("test_an_engine_gives_transformers_log_probs_and_values_and_exports_its_weights[native]",),
        "log-probs would not be those that were sampled from",
    ),
    Fault(
        "verl-outputs-in-the-order-of-micro-batches",
        "adapters.verl.batches:as_verl_output",
        "rows[row] = sequence",
        "rows[batch.order.index(row)] = sequence",
        (
            "test_gradients_of_verls_losses_do_not_depend_on_how_a_batch_is_cut[native]",
            "test_an_engine_gives_transformers_log_probs_and_values_and_exports_its_weights[native]",
        ),
        "log-probs would belong to other rows of verl's batch",
    ),
    Fault(
        "verl-dp-size-is-1",
        "adapters.verl.batches:cut_batch",
        "dp_size=place.data_parallel_size,",
        "dp_size=1,",
        ("test_sft_steps_in_every_layout_are_those_of_one_rank[native dp]",),
        "gradients would be averaged over ranks twice",
    ),
    Fault(
        "verl-multiple-ignored",
        "adapters.verl.batches:cut_batch",
        "num_batches_divided_by=multiple if multiple > 1 else None,",
        "num_batches_divided_by=None,",
        ("test_a_schedule_that_takes_groups_of_micro_batches_gets_whole_groups",),
        "interleaved schedules would refuse verl's batches",
    ),
    Fault(
        "verl-positions-not-checked",
        "adapters.verl.batches:_problem",
        """
        _require_positions(data)
        _require_cuttable(data, cp_size)
        """,
        "_require_cuttable(data, cp_size)",
        ("test_batches_that_an_engine_cannot_honour_are_refused",),
        "position_ids would be accepted and ignored",
    ),
    Fault(
        "verl-warm-up-ratio-of-the-training",
        "adapters.verl.options.settings:optimizer_settings",
        "warmup_steps = int(config.lr_warmup_steps_ratio * max(decay_steps, 0))",
        "warmup_steps = int(config.lr_warmup_steps_ratio * max(config.total_training_steps, 0))",
        ("test_the_schedule_is_the_one_that_verl_makes_of_the_same_fields",),
        "the warm-up would be another than verl's",
    ),
    Fault(
        "verl-weight-decay-ignored",
        "adapters.verl.options.settings:optimizer_settings",
        "weight_decay=config.weight_decay, weight_decay_incr_style=config.weight_decay_incr_style,",
        "weight_decay_incr_style=config.weight_decay_incr_style,",
        ("test_the_schedule_is_the_one_that_verl_makes_of_the_same_fields",),
        "weight decay would be ours, not verl's",
    ),
    Fault(
        "verl-seed-ignored",
        "adapters.verl.options.settings:engine_settings",
        "seed=engine_config.seed, max_tokens_per_micro_batch=_NO_LIMIT,",
        "max_tokens_per_micro_batch=_NO_LIMIT,",
        ("test_sizes_dtype_and_seed_reach_the_runtime",),
        "runs with other seeds would be the same",
    ),
    Fault(
        "verl-replay-for-the-reference-too",
        "adapters.verl.batches:router_replay",
        'if mode == "disabled" or not tu.get(data, "enable_routing_replay", False):',
        'if mode == "disabled":',
        ("test_routes_of_the_policy_and_of_a_rollout_are_replayed[qwen3_moe-native]",),
        "a reference would be refused or take the policy's routes",
    ),
    Fault(
        "verl-r2-replays-where-it-records",
        "adapters.verl.batches:router_replay",
        'return "record"',
        'return "off"',
        ("test_routes_of_the_policy_and_of_a_rollout_are_replayed[qwen3_moe-native]",),
        "R2 would record nothing",
    ),
    Fault(
        "verl-mode-keeps-gradients",
        "adapters.verl.engine:EngineMode.__exit__",
        "self.engine.optimizer_zero_grad()",
        "pass",
        ("test_gradients_of_verls_losses_do_not_depend_on_how_a_batch_is_cut[native]",),
        "gradients of one batch would be added to the next",
    ),
    Fault(
        "verl-old-checkpoints-kept",
        "adapters.verl.checkpoints:EngineCheckpoints.save",
        "self._kept.ensure_checkpoint_capacity(None if background else max_ckpt_to_keep)",
        "pass",
        ("test_weights_alone_are_kept_as_many_times_as_asked_and_loaded",),
        "max_ckpt_to_keep would be ignored",
    ),
    Fault(
        "verl-tokenizer-not-saved",
        "adapters.verl.checkpoints:EngineCheckpoints.save",
        "self._tokenizer.save_pretrained(new)",
        "pass",
        ("test_a_saved_model_has_the_chat_template_that_verl_used",),
        "a saved model would answer with another chat template",
    ),
    Fault(
        "verl-infinite-scores-accepted",
        "rl_backend.data.rewards.function:_finite_number",
        "return number if math.isfinite(number) else None",
        "return None if math.isnan(number) else number",
        ("test_a_result_without_a_finite_score_is_refused",),
        "one reward would end a batch's advantages",
    ),
    Fault(
        "verl-reference-is-the-adapter",
        "adapters.verl.engine_model:EngineModel.without_adapter",
        "before, self.at_work = self.at_work, self.base",
        "before, self.at_work = self.at_work, self.trained",
        ("test_an_engine_trains_the_tenant_that_the_runtime_would[one rank]",),
        "the KL reference would be the policy itself",
    ),
    Fault(
        "verl-adapter-scaled-twice-when-apart",
        "adapters.verl.engine_model:EngineModel.for_rollout",
        "return ((name, tensor.to(dtype)) for name, tensor in factors), peft_config",
        "return ((name, tensor.to(dtype) * 2) for name, tensor in factors), peft_config",
        ("test_a_rollout_is_given_the_base_once_and_the_adapter_or_merged_weights",),
        "vLLM would serve another adapter than the trainer's",
    ),
    Fault(
        "verl-up-projection-by-the-name-of-gate",
        "adapters.verl.options.lora:",
        '**dict.fromkeys(("up_proj", "w3"), ("linear_fc1", "linear_fc1_up")),',
        '**dict.fromkeys(("up_proj", "w3"), ("linear_fc1", "linear_fc1_gate")),',
        ("test_megatrons_names_and_wildcards_become_hugging_face_names",),
        "canonical LoRA would adapt the wrong half of a fused layer",
    ),
    Fault(
        "verl-one-draw-for-all-factors",
        "adapters.verl.engine_model:_initial",
        'digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()',
        'digest = hashlib.blake2b(f"{seed}".encode(), digest_size=7).digest()',
        ("test_first_factors_are_drawn_as_asked_and_the_same_in_every_layout",),
        "keys and values would start from the same factors",
    ),
    Fault(
        "verl-adapters-not-loaded-by-new-vllm",
        "adapters.verl.cpu_platform:name_mapper_of_adapters",
        'if not hasattr(WeightsMapper, "get_unstacked_mapper"):',
        "if False:",
        ("test_log_probs_with_verls_adapter_are_the_trainers",),
        "verl could not bring an adapter into vLLM",
    ),
    Fault(
        "failed-save-leaves-the-runtime-open",
        "adapters.verl.engine:RuntimeEngine.close",
        """
        try:
            if self._model is not None:
                self._checkpoints.finish(self._runtime, self.handle)
        finally:
            self._runtime.close()
        """,
        """
        if self._model is not None:
            self._checkpoints.finish(self._runtime, self.handle)
        self._runtime.close()
        """,
        ("test_an_engine_that_is_closed_frees_its_runtime_whatever_becomes_of_its_last_save",),
        "after a disk that was full, model and process groups would stay",
    ),
    Fault(
        "plain-expressions-are-names",
        "adapters.verl.options.lora:_expression",
        'return "expression", (re.compile(value).pattern,)',
        'return ("expression" if set(value) & set("*+?[(|") else "peft"), (value,)',
        ("test_a_text_is_an_expression_of_whole_names_however_plain_and_a_list_has_names",),
        "other layers would be adapted than by peft",
    ),
    Fault(
        "one-name-is-taken-letter-by-letter",
        "adapters.verl.options.lora:_names_of",
        """
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
            raise ConfigError.of(field, value, "expected a list of names")
        """,
        """
        if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
            raise ConfigError.of(field, value, "expected a list of names")
        """,
        ("test_lora.py::test_what_cannot_be_honoured_is_refused_by_name",),
        "a name would be taken for names of one letter each",
    ),
    Fault(
        "warm-up-ratio-of-all-training",
        "adapters.verl.options.settings:optimizer_settings",
        "max(decay_steps, 0)",
        "max(config.total_training_steps, 0)",
        ("test_the_schedule_is_the_one_that_verl_makes_of_the_same_fields",),
        "the learning rate would not be that of verl",
    ),
    Fault(
        "failed-save-leaves-parts-on-the-device",
        "adapters.verl.engine:RuntimeEngine.save_checkpoint",
        """
        try:
            self._checkpoints.save(self._runtime, self.handle, local_path, hdfs_path, max_ckpt_to_keep, step=global_step)
        finally:
            self._rest()
        """,
        """
        self._checkpoints.save(self._runtime, self.handle, local_path, hdfs_path, max_ckpt_to_keep, step=global_step)
        self._rest()
        """,
        ("test_an_engine_rests_after_a_save_that_failed",),
        "after a save that failed, the rollout would lack the memory of the model",
    ),
    Fault(
        "verl-groups-counted-whole",
        "adapters.verl.batches:_fewest",
        "plan = plan_shared(sequences, 1, max_tokens, multiple_of=multiple)",
        "plan = None",
        ("test_groups_stay_together_and_what_they_share_counts_once",),
        "groups would be spread over micro-batches, and computed again in each",
    ),
    Fault(
        "verl-groups-cut-by-each-rank-alone",
        "adapters.verl.batches:_cut_by_computed",
        "if fewest in (0, most):",
        "if True:",
        ("test_every_rank_cuts_as_many_micro_batches_of_groups_and_as_verl_where_one_cannot",),
        "ranks would wait for micro-batches that others do not have",
    ),
    Fault(
        "verl-other-routes-shared",
        "adapters.verl.batches:_cut_by_computed",
        "tokens = compared_tokens(input_ids.values().to(torch.int64), fields, replays=routes is not None)",
        "tokens = compared_tokens(input_ids.values().to(torch.int64), fields, replays=False)",
        ("test_tokens_with_other_routes_count_as_others",),
        "micro-batches with routes would have more tokens than the budget",
    ),
    Fault(
        "verl-trainer-spreads-groups",
        "adapters.verl.trainers:_balance_groups",
        "batch.reorder([row for rows in ranks for row in rows])",
        "pass",
        ("test_verls_trainer_keeps_groups_of_our_actor_on_a_rank",),
        "groups would be spread over ranks, which then share nothing",
    ),
    Fault(
        "late-import-skips-only-the-first-finder",
        "adapters.verl.late_imports:_Late.find_spec",
        "sys.meta_path[sys.meta_path.index(self) + 1 :]",
        "sys.meta_path[1:]",
        (
            "test_each_of_two_modules_gets_its_own_action_once_after_it_has_run",
            "test_finders_before_it_and_specs_without_a_loader_are_not_asked_twice",
        ),
        "verl's modules could not be imported where two of them are waited for",
    ),
    Fault(
        "rest-needs-param-offload",
        "adapters.verl.engine:RuntimeEngine._build",
        "        self._rest()",
        "        if settings.param_offload:\n            self._rest()",
        ("test_a_new_model_rests_where_it_is_told_to",),
        "an optimizer would stay on the device although verl wants it on the host",
    ),
    Fault(
        "split-group-loads-each-rank-whole",
        "adapters.verl.trainers:rows_of_ranks",
        "sum(work[row] for row in taken)",
        "sum(work[row] for row in rows)",
        ("test_a_rank_has_the_work_of_the_rows_that_it_took_of_a_group",),
        "ranks would get unequal work",
    ),
]
