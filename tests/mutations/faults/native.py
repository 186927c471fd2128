"""The native runtime: passes, steps, schedules of the rate, checkpoints and exports."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "no-clipping",
        "rl_backend.runtime.native.optimizer:NativeOptimizer._apply",
        "torch._foreach_mul_(list(gradients.values()), factor)",
        "pass",
        ("test_steps_equal_torch_adamw_with_clipping",),
        "clip_grad would be reported and not applied",
    ),
    Fault(
        "steps-with-a-bad-gradient",
        "rl_backend.runtime.native.optimizer:NativeOptimizer._apply",
        "return",
        "pass",
        ("test_a_non_finite_gradient_changes_nothing_and_says_which",),
        "one NaN would end the model",
    ),
    Fault(
        "norm-of-one-rank",
        "rl_backend.runtime.native.optimizer:NativeOptimizer.step",
        "rows = all_gather(self._statistics(), self._groups.world_group, sum_gradients=False)",
        "rows = self._statistics()",
        ("test_norm_and_zeros_are_one_ranks_and_one_bad_gradient_stops_all[dense-2-ranks-tp2]",),
        "ranks would clip by different norms, and a bad one would step alone",
    ),
    Fault(
        "norm-is-squared",
        "rl_backend.runtime.optimizer:step_result",
        "norm = math.sqrt(squares)",
        "norm = squares",
        ("test_steps_equal_torch_adamw_with_clipping",),
        "clipping would be far too strong",
    ),
    Fault(
        "biases-decayed",
        "rl_backend.runtime.native.optimizer:is_decayed",
        """
        parameter.dim() - packed != 1 and not any(
            stored.endswith((".bias", "_bias")) for _, stored in stored_tensors(name)
        )
        """,
        'not any(stored.endswith((".bias", "_bias")) for _, stored in stored_tensors(name))',
        ("test_biases_and_vectors_are_not_decayed",),
        "norms would be pulled to zero",
    ),
    Fault(
        "copies-of-a-stage-counted-twice",
        "rl_backend.runtime.native.optimizer:NativeOptimizer.__init__",
        "{name for name, parameter in self.parameters.items() if owns(parameter)}.difference(copies)",
        "{name for name, parameter in self.parameters.items() if owns(parameter)}",
        ("test_native_pipelines.py::test_every_schedule_trains_as_one_rank[1f1b-2]",),
        "tied embeddings would count twice in the norm of a pipeline",
    ),
    Fault(
        "betas-ignored",
        "rl_backend.runtime.native.optimizer:NativeOptimizer.__init__",
        "betas=config.betas,",
        "",
        ("test_steps_equal_torch_adamw_with_clipping",),
        "betas would be accepted and ignored",
    ),
    Fault(
        "rate-of-the-step-before",
        "rl_backend.runtime.native.optimizer:NativeOptimizer.schedule_step",
        """
        learning_rate = self.schedule.step()
        self._apply_schedule()
        """,
        """
        self._apply_schedule()
        learning_rate = self.schedule.step()
        """,
        ("test_schedules_reach_both_parameter_groups",),
        "every step would have the rate of the one before",
    ),
    Fault(
        "warm-up-begins-at-zero",
        "rl_backend.runtime.optimizer:ParameterSchedule.learning_rate",
        "return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * float(steps) / float(warmup)",
        "return config.lr * float(steps) / float(warmup)",
        ("test_every_style_equals_megatrons_at_every_step",),
        "lr_warmup_init would be ignored",
    ),
    Fault(
        "decay-from-the-first-step",
        "rl_backend.runtime.optimizer:ParameterSchedule._coefficient",
        "ratio = float(steps - config.warmup_steps) / float(decay_steps - config.warmup_steps)",
        "ratio = float(steps) / float(decay_steps)",
        ("test_every_style_equals_megatrons_at_every_step",),
        "the rate would fall at once after the warm-up",
    ),
    Fault(
        "version-advances-without-a-step",
        "rl_backend.runtime.guarded:GuardedRuntime.optimizer_step",
        "handle.weight_version += result.ok",
        "handle.weight_version += 1",
        (
            "test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all[1-float32-nan]",
            "test_a_non_finite_gradient_changes_nothing_and_says_which",
        ),
        "samples would carry the version of weights that do not exist",
    ),
    Fault(
        "a-failed-pass-is-not-remembered",
        "rl_backend.runtime.native.forward_backward:abandoned_on_error",
        "handle.mark_incomplete()",
        "pass",
        ("test_a_pass_that_fails_in_the_middle_leaves_nothing_behind_after_zero_grad[1-{}-loss]",),
        "a step could be made with half a gradient",
    ),
    Fault(
        "zero-grad-keeps-unreduced-gradients",
        "rl_backend.runtime.native.handle:NativeHandle.drop_gradients",
        "fsdp.drop_unreduced_gradients(self.model)",
        "pass",
        (
            "test_a_pass_that_fails_in_the_middle_leaves_nothing_behind_after_zero_grad[2-{}-backward]",
            "test_gradients_add_up_over_calls_until_zero_grad",
        ),
        "gradients of an abandoned pass would reach the next step",
        "abandon_step, which every failed pass goes through, drops them already; zero_grad does it again to be sure",
    ),
    Fault(
        "a-loss-is-given-a-view",
        "rl_backend.model.decoder:Decoder.forward",
        "return found._replace(log_probs=found.log_probs.clone()).as_output(values)",
        "return found.as_output(values)",
        ("test_a_loss_may_change_the_outputs_that_it_is_given",),
        "a loss that masks log-probs in place would fail on data-parallel ranks, whose weights are not gathered again",
    ),
    Fault(
        "outputs-in-the-memory-that-a-loss-is-given",
        "rl_backend.runtime.passes:PassResults.add",
        "self._outputs[index] = {name: [part.clone() for part in batch.split(value)] for name, value in given.items()}",
        "self._outputs[index] = {name: list(batch.split(value)) for name, value in given.items()}",
        ("test_a_loss_may_change_the_outputs_that_it_is_given",),
        "outputs would be what a loss has made of them",
    ),
    Fault(
        "outputs-of-the-last-sequence-first",
        "rl_backend.runtime.passes:PassResults.result",
        "outputs.setdefault(name, []).extend(parts)",
        "outputs.setdefault(name, []).extend(reversed(parts))",
        ("test_outputs_come_per_sequence_in_the_order_given",),
        "log-probs would belong to other sequences of their micro-batch",
    ),
    Fault(
        "pipeline-outputs-in-reverse",
        "rl_backend.runtime.passes:PassResults.result",
        "for index in sorted(self._outputs):",
        "for index in reversed(sorted(self._outputs)):",
        ("test_answers_are_in_the_order_of_the_request_whatever_was_computed_first",),
        "a pipeline would give its micro-batches in the wrong order",
    ),
    Fault(
        "seeds-equal-on-all-ranks",
        "rl_backend.runtime.native.engine:NativeEngine.__init__",
        "torch.manual_seed(config.seed + self.groups.dp_rank)",
        "torch.manual_seed(config.seed)",
        ("test_seeds_differ_by_data_parallel_rank_alone[native]",),
        "data-parallel ranks would draw the same numbers",
    ),
    Fault(
        "tied-embeddings-not-summed",
        "rl_backend.pipeline.executor:add_gradients_of_copies",
        "here[0].add_(_of_other_end(here[0], group))",
        "_of_other_end(here[0], group)",
        ("test_native_pipelines.py::test_every_schedule_trains_as_one_rank[1f1b-2]",),
        "the two ends of a pipeline would part",
    ),
    Fault(
        "gradients-of-copies-added-again",
        "rl_backend.pipeline.executor:drop_gradients_of_copies",
        "parameters[copy].grad = None",
        "pass",
        ("test_gradients_of_several_calls_add_up_also_where_embeddings_are_tied[ends on two ranks]",),
        "a second call would add the first one's gradients again",
    ),
    Fault(
        "put-off-gradients-in-the-parameters-dtype",
        "rl_backend.runtime.native.forward_backward:_Stages.after_weights",
        "fsdp.accumulate_gradients(self._handle.stages[stage])",
        "pass",
        ("test_weight_gradients_that_are_put_off_are_accumulated_in_the_reduction_dtype",),
        "gradients of many micro-batches would add up in bfloat16",
    ),
    Fault(
        "moments-not-loaded",
        "rl_backend.checkpoint.training_state:",
        'MOMENTS = {kind: f"optimizer.{kind}." for kind in ("exp_avg", "exp_avg_sq")}',
        'MOMENTS = {kind: f"optimizer.{kind}." for kind in ("exp_avg",)}',
        ("test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks[2-2-False]",),
        "a resumed run would begin its second moments anew",
    ),
    Fault(
        "step-counts-not-loaded",
        "rl_backend.runtime.native.engine:load_training_checkpoint",
        "steps.fill_(manifest.fewer_steps.get(name, manifest.optimizer_steps))",
        "pass",
        ("test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks[2-2-False]",),
        "Adam's bias correction would begin anew",
    ),
    Fault(
        "schedule-not-loaded",
        "rl_backend.runtime.native.engine:load_training_checkpoint",
        "handle.optimizer.restore_schedule(manifest.schedule_steps)",
        "pass",
        ("test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks[2-2-False]",),
        "a resumed run would warm up again",
    ),
    Fault(
        "old-gradients-after-a-load",
        "rl_backend.runtime.guarded:GuardedRuntime.load_checkpoint",
        "handle.drop_gradients()",
        "pass",
        ("test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks[2-2-False]",),
        "gradients of before would be added to the first of the resumed run",
    ),
    Fault(
        "gathered-weights-survive-a-load",
        "rl_backend.runtime.native.engine:load_training_checkpoint",
        "fsdp.reshard(handle.model)",
        "pass",
        (
            "test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks[2-2-False]",
            "test_a_forward_only_handle_takes_the_weights_in_its_own_dtype",
        ),
        "the first pass after a load would use old weights",
        "abandoned_on_error reshards at the end of every pass, so that nothing is gathered when a load begins",
    ),
    Fault(
        "export-keeps-the-parameters-dtype",
        "rl_backend.runtime.native.export:export_shards",
        "yield WeightShard(weight.name, weight.shape, mine.start, weight.held().to(weight.dtype))",
        "yield WeightShard(weight.name, weight.shape, mine.start, weight.held())",
        ("test_shares_are_the_weights_in_the_dtype_asked_for",),
        "engines would get float32 where bfloat16 was asked for",
    ),
    Fault(
        "gradients-exported-in-bfloat16",
        "rl_backend.runtime.native.export:export_gradients",
        "dtype=torch.float32,",
        "dtype=torch.bfloat16,",
        ("test_every_rank_exports_the_whole_averaged_gradient_that_the_optimizer_takes_the_norm_of[float32]",),
        "parity would compare rounded gradients",
    ),
    Fault(
        "parameters-freed-between-micro-batches",
        "rl_backend.runtime.native.forward_backward:run_micro_batches",
        "reshard=last or handle.options.reshard_after_forward,",
        "reshard=True,",
        ("test_parameters_that_stay_are_gathered_once_whatever_the_number_of_micro_batches",),
        "reshard_after_forward=False would save no transfer between micro-batches",
    ),
    Fault(
        "interrupted-pass-leaves-usable-gradients",
        "rl_backend.runtime.native.forward_backward:abandoned_on_error",
        "except BaseException:",
        "except Exception:",
        ("test_gradients_of_a_pass_that_ended_in_its_middle_are_not_stepped_with",),
        "after an interrupt a step would take half of the gradients",
    ),
    Fault(
        "freed-pipeline-keeps-its-stages",
        "rl_backend.runtime.native.handle:NativeHandle.release",
        """
        self.model = nn.Module()
        self.stages = {}
        """,
        "self.model = nn.Module()",
        ("test_a_closed_runtime_keeps_no_tensor_for_those_who_still_have_its_handles",),
        "stages of a closed runtime would stay in memory with its handle",
    ),
    Fault(
        "some-parts-may-be-away",
        "rl_backend.runtime.handle:Offload.require",
        "if away:",
        "if away and len(away) == len(parts):",
        ("test_an_atom_that_needs_a_part_says_that_it_is_away_and_how_to_get_it_back",),
        "an atom that needs two parts would begin with one of them in host memory",
    ),
    Fault(
        "inverse-square-root-below-its-minimum",
        "rl_backend.runtime.optimizer:ParameterSchedule.learning_rate",
        "max(config.min_lr, config.lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(steps, 1)))",
        "config.lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(steps, 1))",
        ("test_without_known_length_the_rate_can_be_constant_or_fall_with_the_root",),
        "the rate would fall below min_lr",
    ),
    Fault(
        "stage-recorded-as-a-module",
        "rl_backend.runtime.recording:record_outputs",
        """
        if not name:
            continue
        """,
        "pass",
        ("test_a_stage_gives_outputs_of_the_modules_of_the_whole_model_alone",),
        "a stage of several layers would be a module that no whole model has",
    ),
]
