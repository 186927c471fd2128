"""The native runtime: passes, steps, schedules of the rate, checkpoints and exports."""

from __future__ import annotations

from tests.mutations.fault import Fault

_NATIVE = "rl_backend/runtime/native"
_OPTIMIZER = "tests/unit/test_optimizer.py"
_RUNTIME = "tests/unit/test_native_runtime.py"
_CHECKPOINTS = "tests/distributed/test_checkpoints.py"
_SHARES = (
    "tests/distributed/test_verl_engine_training.py"
    "::test_what_changed_in_every_ranks_shares_makes_the_new_weights_of_the_old"
)
_PIPELINES = "tests/distributed/test_native_pipelines.py"

FAULTS = [
    Fault(
        "no-clipping",
        f"{_NATIVE}/optimizer.py",
        "            torch._foreach_mul_(list(gradients.values()), self._clip_coefficient(result))\n",
        "            pass\n",
        (f"{_OPTIMIZER}::test_steps_equal_torch_adamw_with_clipping",),
        "clip_grad would be reported and not applied",
    ),
    Fault(
        "steps-with-a-bad-gradient",
        f"{_NATIVE}/optimizer.py",
        'else "none",\n            )\n            return\n',
        'else "none",\n            )\n',
        (f"{_OPTIMIZER}::test_a_non_finite_gradient_changes_nothing_and_says_which",),
        "one NaN would end the model",
    ),
    Fault(
        "norm-of-one-rank",
        f"{_NATIVE}/optimizer.py",
        "            all_gather_into(rows, mine, group=self._groups.world_group)\n",
        "            rows.copy_(mine.expand_as(rows))\n",
        ("tests/distributed/test_native_state.py::test_norm_and_zeros_are_one_ranks_and_one_bad_gradient_stops_all[dense]",),
        "ranks would clip by different norms, and a bad one would step alone",
    ),
    Fault(
        "norm-is-squared",
        f"{_NATIVE}/optimizer.py",
        "norm = math.sqrt(squares)",
        "norm = squares",
        (f"{_OPTIMIZER}::test_steps_equal_torch_adamw_with_clipping",),
        "clipping would be far too strong",
    ),
    Fault(
        "biases-decayed",
        f"{_NATIVE}/optimizer.py",
        "return parameter.dim() - packed != 1 and not any(",
        "return not any(",
        (f"{_OPTIMIZER}::test_biases_and_vectors_are_not_decayed",),
        "norms would be pulled to zero",
    ),
    Fault(
        "copies-of-a-stage-counted-twice",
        f"{_NATIVE}/optimizer.py",
        "if owns(parameter)}.difference(copies)",
        "if owns(parameter)}",
        (f"{_PIPELINES}::test_every_schedule_trains_as_one_rank[1f1b-2]",),
        "tied embeddings would count twice in the norm of a pipeline",
    ),
    Fault(
        "betas-ignored",
        f"{_NATIVE}/optimizer.py",
        "lr=config.lr, betas=config.betas, eps=config.eps, fused=True",
        "lr=config.lr, eps=config.eps, fused=True",
        (f"{_OPTIMIZER}::test_steps_equal_torch_adamw_with_clipping",),
        "betas would be accepted and ignored",
    ),
    Fault(
        "rate-of-the-step-before",
        f"{_NATIVE}/optimizer.py",
        "        learning_rate = self.schedule.step()\n        self._apply_schedule()\n",
        "        self._apply_schedule()\n        learning_rate = self.schedule.step()\n",
        (f"{_OPTIMIZER}::test_schedules_reach_both_parameter_groups",),
        "every step would have the rate of the one before",
    ),
    Fault(
        "warm-up-begins-at-zero",
        f"{_NATIVE}/lr_schedule.py",
        "config.lr_warmup_init + (config.lr - config.lr_warmup_init) * float(steps) / float(warmup)",
        "config.lr * float(steps) / float(warmup)",
        ("tests/unit/test_lr_schedule.py::test_every_style_equals_megatrons_at_every_step",),
        "lr_warmup_init would be ignored",
    ),
    Fault(
        "decay-from-the-first-step",
        f"{_NATIVE}/lr_schedule.py",
        "ratio = float(steps - config.warmup_steps) / float(decay_steps - config.warmup_steps)",
        "ratio = float(steps) / float(decay_steps)",
        ("tests/unit/test_lr_schedule.py::test_every_style_equals_megatrons_at_every_step",),
        "the rate would fall at once after the warm-up",
    ),
    Fault(
        "version-advances-without-a-step",
        f"{_NATIVE}/runtime.py",
        "        result = optimizer.step(handle.name)\n        if result.ok:\n",
        "        result = optimizer.step(handle.name)\n        if True:\n",
        (
            "tests/distributed/test_failures.py::test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all[1-float32-nan]",
            f"{_OPTIMIZER}::test_a_non_finite_gradient_changes_nothing_and_says_which",
        ),
        "samples would carry the version of weights that do not exist",
    ),
    Fault(
        "a-failed-pass-is-not-remembered",
        f"{_NATIVE}/forward_backward.py",
        'handle.broken = "forward_backward raised an error in the middle, so its gradients are incomplete"',
        "pass",
        (
            "tests/distributed/test_failures.py::test_a_pass_that_fails_in_the_middle_leaves_nothing_behind_after_zero_grad[1-{}-loss]",
        ),
        "a step could be made with half a gradient",
    ),
    Fault(
        "zero-grad-keeps-unreduced-gradients",
        f"{_NATIVE}/runtime.py",
        "            parameter.grad = None\n        fsdp_state.drop_unreduced_gradients(handle.model)\n",
        "            parameter.grad = None\n",
        (
            "tests/distributed/test_failures.py::test_a_pass_that_fails_in_the_middle_leaves_nothing_behind_after_zero_grad[2-{}-backward]",
            f"{_RUNTIME}::test_gradients_add_up_over_calls_until_zero_grad",
        ),
        "gradients of an abandoned pass would reach the next step",
        "abandon_step, which every failed pass goes through, drops them already; zero_grad does it again to be sure",
    ),
    Fault(
        "outputs-of-the-last-sequence-first",
        f"{_NATIVE}/forward_backward.py",
        "outputs[name].extend(part.clone() for part in batch.split(value))",
        "outputs[name].extend(part.clone() for part in reversed(batch.split(value)))",
        (f"{_RUNTIME}::test_outputs_come_per_sequence_in_the_order_given",),
        "log-probs would belong to other sequences of their micro-batch",
    ),
    Fault(
        "pipeline-outputs-in-reverse",
        f"{_NATIVE}/pipeline.py",
        "for index in sorted(self._outputs):",
        "for index in reversed(sorted(self._outputs)):",
        (f"{_PIPELINES}::test_every_schedule_trains_as_one_rank[1f1b-2]",),
        "a pipeline would give its micro-batches in the wrong order",
    ),
    Fault(
        "seeds-equal-on-all-ranks",
        f"{_NATIVE}/runtime.py",
        "torch.manual_seed(config.seed + self.groups.dp_rank)",
        "torch.manual_seed(config.seed)",
        ("tests/distributed/test_seeds.py::test_seeds_differ_by_data_parallel_rank_alone[native]",),
        "data-parallel ranks would draw the same numbers",
    ),
    Fault(
        "tied-embeddings-not-summed",
        f"{_NATIVE}/pipeline.py",
        "            here[0].add_(_of_other_end(here[0], handle.groups.pp_group))\n",
        "            _of_other_end(here[0], handle.groups.pp_group)\n",
        (f"{_PIPELINES}::test_every_schedule_trains_as_one_rank[1f1b-2]",),
        "the two ends of a pipeline would part",
    ),
    Fault(
        "gradients-of-copies-added-again",
        f"{_NATIVE}/pipeline.py",
        "            handle.parameters[copy].grad = None\n\n\ndef _add",
        "            pass\n\n\ndef _add",
        (f"{_PIPELINES}::test_gradients_of_several_calls_add_up_also_where_embeddings_are_tied[ends on two ranks]",),
        "a second call would add the first one's gradients again",
    ),
    Fault(
        "put-off-gradients-in-the-parameters-dtype",
        f"{_NATIVE}/pipeline.py",
        "        fsdp_state.accumulate_gradients(self._handle.stages[stage])\n",
        "        pass\n",
        (f"{_PIPELINES}::test_weight_gradients_that_are_put_off_are_accumulated_in_the_reduction_dtype",),
        "gradients of many micro-batches would add up in bfloat16",
    ),
    Fault(
        "moments-not-loaded",
        f"{_NATIVE}/checkpoints.py",
        '_STEP, _MOMENTS = "step", ("exp_avg", "exp_avg_sq")',
        '_STEP, _MOMENTS = "step", ("exp_avg",)',
        (f"{_CHECKPOINTS}::test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks[2-2-False]",),
        "a resumed run would begin its second moments anew",
    ),
    Fault(
        "step-counts-not-loaded",
        f"{_NATIVE}/checkpoints.py",
        "        tensor.fill_(manifest.fewer_steps.get(name, manifest.optimizer_steps))\n",
        "        pass\n",
        (f"{_CHECKPOINTS}::test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks[2-2-False]",),
        "Adam's bias correction would begin anew",
    ),
    Fault(
        "schedule-not-loaded",
        f"{_NATIVE}/checkpoints.py",
        "        handle.optimizer.restore_schedule(manifest.schedule_steps)\n",
        "",
        (f"{_CHECKPOINTS}::test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks[2-2-False]",),
        "a resumed run would warm up again",
    ),
    Fault(
        "old-gradients-after-a-load",
        f"{_NATIVE}/checkpoints.py",
        "        _drop_gradients(handle)\n",
        "",
        (f"{_CHECKPOINTS}::test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks[2-2-False]",),
        "gradients of before would be added to the first of the resumed run",
    ),
    Fault(
        "gathered-weights-survive-a-load",
        f"{_NATIVE}/checkpoints.py",
        "        fsdp_state.reshard(handle.model)\n        return all_tensors(handle)",
        "        return all_tensors(handle)",
        (
            f"{_CHECKPOINTS}::test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks[2-2-False]",
            f"{_CHECKPOINTS}::test_a_forward_only_handle_takes_the_weights_in_its_own_dtype",
        ),
        "the first pass after a load would use old weights",
        "abandoned_on_error reshards at the end of every pass, so that nothing is gathered when a load begins",
    ),
    Fault(
        "export-keeps-the-parameters-dtype",
        f"{_NATIVE}/export.py",
        "yield WeightShard(weight.name, weight.shape, offset, weight.held().to(weight.dtype))",
        "yield WeightShard(weight.name, weight.shape, offset, weight.held())",
        (f"{_SHARES}[native pp]",),
        "engines would get float32 where bfloat16 was asked for",
    ),
    Fault(
        "gradients-exported-in-bfloat16",
        f"{_NATIVE}/export.py",
        "sharded_weights(gradients, reached, handle.layouts, dtype=torch.float32, only=only)",
        "sharded_weights(gradients, reached, handle.layouts, dtype=torch.bfloat16, only=only)",
        (
            "tests/distributed/test_parity_atoms.py::test_every_rank_exports_the_whole_averaged_gradient_that_the_optimizer_takes_the_norm_of[float32]",
        ),
        "parity would compare rounded gradients",
    ),
    Fault(
        "plain-step-though-it-clips",
        f"{_NATIVE}/pending_step.py",
        "return result.ok and not self._optimizer.clips(result)",
        "return result.ok",
        ("tests/distributed/test_post_validation.py::test_steps_that_are_validated_later_are_those_that_wait[1f1b]",),
        "a step that must be clipped would stay unclipped on ranks that went ahead",
    ),
    Fault(
        "step-taken-back-without-its-moments",
        f"{_NATIVE}/pending_step.py",
        'for key in ("exp_avg", "exp_avg_sq", "step")))',
        'for key in ("exp_avg", "exp_avg_sq")))',
        ("tests/distributed/test_post_validation.py::test_steps_that_are_validated_later_are_those_that_wait[1f1b]",),
        "a step that was taken back would still count",
    ),
    Fault(
        "parameters-freed-between-micro-batches",
        f"{_NATIVE}/runtime.py",
        "keep_gathered=not self.native.reshard_after_forward,",
        "keep_gathered=False,",
        (
            "tests/distributed/test_gathered_parameters.py"
            "::test_parameters_that_stay_are_gathered_once_whatever_the_number_of_micro_batches",
        ),
        "reshard_after_forward=False would save no transfer between micro-batches",
    ),
]
