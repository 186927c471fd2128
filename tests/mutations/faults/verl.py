"""The adapter for verl."""

from __future__ import annotations

from tests.mutations.fault import Fault

_ENGINE = "tests/distributed/test_verl_engine.py"
_TRAINING = "tests/distributed/test_verl_engine_training.py"
_SETTINGS = "tests/unit/adapters/verl/test_settings.py"

FAULTS = [
    Fault(
        "verl-token-count-of-one-rank",
        "adapters/verl/micro_batches.py",
        "        dist.all_reduce(facts, group=place.data_parallel_group)\n",
        "        pass\n",
        (f"{_TRAINING}::test_sft_steps_in_every_layout_are_those_of_one_rank[native dp]",),
        "the loss would be divided by one rank's tokens",
    ),
    Fault(
        "verl-refusals-of-other-ranks-not-heard",
        "adapters/verl/micro_batches.py",
        "    if refusing:\n",
        "    if False:\n",
        (f"{_ENGINE}::test_a_batch_that_one_rank_refuses_is_refused_on_all_and_the_next_one_runs",),
        "ranks with right data would wait for one that refused its own",
    ),
    Fault(
        "verl-temperature-ignored",
        "adapters/verl/micro_batches.py",
        'sequence_fields["temperature"] = temperature.reshape(len(data))',
        'sequence_fields["temperature"] = torch.ones(len(data))',
        (f"{_ENGINE}::test_an_engine_gives_transformers_log_probs_and_values_and_exports_its_weights[native]",),
        "log-probs would not be those that were sampled from",
    ),
    Fault(
        "verl-outputs-in-the-order-of-micro-batches",
        "adapters/verl/outputs.py",
        "            rows[row] = sequence\n",
        "            rows[batch.order.index(row)] = sequence\n",
        (
            f"{_ENGINE}::test_gradients_of_verls_losses_do_not_depend_on_how_a_batch_is_cut[native]",
            f"{_ENGINE}::test_an_engine_gives_transformers_log_probs_and_values_and_exports_its_weights[native]",
        ),
        "log-probs would belong to other rows of verl's batch",
    ),
    Fault(
        "verl-dp-size-is-1",
        "adapters/verl/micro_batches.py",
        "sp_size=cp_size, dp_size=place.data_parallel_size, batch_num_tokens=num_tokens",
        "sp_size=cp_size, dp_size=1, batch_num_tokens=num_tokens",
        (f"{_TRAINING}::test_sft_steps_in_every_layout_are_those_of_one_rank[native dp]",),
        "gradients would be averaged over ranks twice",
    ),
    Fault(
        "verl-multiple-ignored",
        "adapters/verl/micro_batches.py",
        "num_batches_divided_by=multiple if multiple > 1 else None",
        "num_batches_divided_by=None",
        (
            "tests/unit/adapters/verl/test_micro_batches.py::test_a_schedule_that_takes_groups_of_micro_batches_gets_whole_groups",
        ),
        "interleaved schedules would refuse verl's batches",
    ),
    Fault(
        "verl-positions-not-checked",
        "adapters/verl/micro_batches.py",
        "        _require_positions(data)\n",
        "",
        ("tests/unit/adapters/verl/test_engine_refusals.py::test_batches_that_an_engine_cannot_honour_are_refused",),
        "position_ids would be accepted and ignored",
    ),
    Fault(
        "verl-warm-up-ratio-of-the-training",
        "adapters/verl/settings.py",
        "int(config.lr_warmup_steps_ratio * max(decay_steps, 0))",
        "int(config.lr_warmup_steps_ratio * max(config.total_training_steps, 0))",
        (f"{_SETTINGS}::test_the_schedule_is_the_one_that_verl_makes_of_the_same_fields",),
        "the warm-up would be another than verl's",
    ),
    Fault(
        "verl-weight-decay-ignored",
        "adapters/verl/settings.py",
        "        weight_decay=config.weight_decay,\n",
        "",
        (f"{_SETTINGS}::test_the_schedule_is_the_one_that_verl_makes_of_the_same_fields",),
        "weight decay would be ours, not verl's",
    ),
    Fault(
        "verl-seed-ignored",
        "adapters/verl/settings.py",
        "            seed=engine_config.seed,\n",
        "",
        (f"{_SETTINGS}::test_sizes_dtype_and_seed_reach_the_runtime",),
        "runs with other seeds would be the same",
    ),
    Fault(
        "verl-replay-for-the-reference-too",
        "adapters/verl/routes.py",
        'if mode == "disabled" or not tu.get(data, "enable_routing_replay", False):',
        'if mode == "disabled":',
        (
            "tests/distributed/test_verl_engine_replay.py::test_routes_of_the_policy_and_of_a_rollout_are_replayed[qwen3_moe-native]",
        ),
        "a reference would be refused or take the policy's routes",
    ),
    Fault(
        "verl-r2-replays-where-it-records",
        "adapters/verl/routes.py",
        'if mode == "R2" and forward_only and data.get(ROUTES, None) is None:\n        return "record"\n',
        'if mode == "R2" and forward_only and data.get(ROUTES, None) is None:\n        return "off"\n',
        (
            "tests/distributed/test_verl_engine_replay.py::test_routes_of_the_policy_and_of_a_rollout_are_replayed[qwen3_moe-native]",
        ),
        "R2 would record nothing",
    ),
    Fault(
        "verl-mode-keeps-gradients",
        "adapters/verl/engine_mode.py",
        "            self.engine.optimizer_zero_grad()\n",
        "            pass\n",
        (
            "tests/distributed/test_verl_engine.py::test_gradients_of_verls_losses_do_not_depend_on_how_a_batch_is_cut[native]",
        ),
        "gradients of one batch would be added to the next",
    ),
    Fault(
        "verl-old-checkpoints-kept",
        "adapters/verl/checkpoints.py",
        "            self._kept.ensure_checkpoint_capacity(None if background else max_ckpt_to_keep)\n",
        "",
        (f"{_TRAINING}::test_weights_alone_are_kept_as_many_times_as_asked_and_loaded",),
        "max_ckpt_to_keep would be ignored",
    ),
    Fault(
        "verl-tokenizer-not-saved",
        "adapters/verl/checkpoints.py",
        "                            self._tokenizer.save_pretrained(new)\n",
        "                            pass\n",
        ("tests/unit/adapters/verl/test_saved_tokenizer.py::test_a_saved_model_has_the_chat_template_that_verl_used",),
        "a saved model would answer with another chat template",
    ),
    Fault(
        "verl-infinite-scores-accepted",
        "rl_backend/data/rewards/result.py",
        "    if not math.isfinite(number):\n",
        "    if math.isnan(number):\n",
        ("tests/unit/rl_backend/data/test_data_files.py::test_a_result_without_a_finite_score_is_refused",),
        "one reward would end a batch's advantages",
    ),
    Fault(
        "verl-reference-is-the-adapter",
        "adapters/verl/engine_model.py",
        "before, self.at_work = self.at_work, self.base",
        "before, self.at_work = self.at_work, self.trained",
        ("tests/distributed/test_verl_lora.py::test_an_engine_trains_the_tenant_that_the_runtime_would[one rank]",),
        "the KL reference would be the policy itself",
    ),
    Fault(
        "verl-adapter-scaled-twice-when-apart",
        "adapters/verl/engine_model.py",
        "return ((name, tensor.to(dtype)) for name, tensor in factors), peft_config",
        "return ((name, tensor.to(dtype) * 2) for name, tensor in factors), peft_config",
        ("tests/distributed/test_verl_lora.py::test_a_rollout_is_given_the_base_once_and_the_adapter_or_merged_weights",),
        "vLLM would serve another adapter than the trainer's",
    ),
    Fault(
        "verl-up-projection-by-the-name-of-gate",
        "adapters/verl/lora_modules.py",
        '"up_proj": ("linear_fc1", "linear_fc1_up"),',
        '"up_proj": ("linear_fc1", "linear_fc1_gate"),',
        ("tests/unit/adapters/verl/test_lora_modules.py::test_megatrons_names_and_wildcards_become_hugging_face_names",),
        "canonical LoRA would adapt the wrong half of a fused layer",
    ),
    Fault(
        "verl-one-draw-for-all-factors",
        "adapters/verl/engine_model.py",
        'digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()',
        'digest = hashlib.blake2b(f"{seed}".encode(), digest_size=7).digest()',
        ("tests/distributed/test_verl_lora.py::test_first_factors_are_drawn_as_asked_and_the_same_in_every_layout",),
        "keys and values would start from the same factors",
    ),
    Fault(
        "verl-adapters-not-loaded-by-new-vllm",
        "adapters/verl/cpu_platform.py",
        '    if not hasattr(WeightsMapper, "get_unstacked_mapper"):\n',
        "    if False:\n",
        ("tests/e2e/test_verl_rollout_sync.py::test_log_probs_with_verls_adapter_are_the_trainers",),
        "verl could not bring an adapter into vLLM",
    ),
]
