"""Faults that an audit put in and no test noticed then: each must be killed."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "gradients-reduced-in-every-micro-batch",
        "rl_backend.runtime.native.forward_backward:run_micro_batches",
        'reduce=last or handle.options.reduce_gradients == "per_micro_batch",',
        "reduce=True,",
        ("test_gradients_are_reduced_once_whatever_the_number_of_micro_batches",),
        "every micro-batch would pay for a reduction over all ranks",
    ),
    Fault(
        "reduce-dtype-ignored",
        "rl_backend.parallel.fsdp:apply_fsdp",
        "reduce_dtype=reduce_dtype,",
        "reduce_dtype=torch.float32,",
        ("test_gradients_are_reduced_in_the_dtype_asked_for",),
        "reduce_dtype would be accepted and ignored",
    ),
    Fault(
        "reshard-after-forward-ignored",
        "rl_backend.parallel.fsdp:apply_fsdp",
        "reshard_after_forward=config.reshard_after_forward,",
        "reshard_after_forward=True,",
        ("test_parameters_that_stay_after_the_forward_pass_are_not_gathered_again",),
        "the option would be accepted and save no transfer",
    ),
    Fault(
        "entropy-gradient-dropped-under-tp",
        "rl_backend.primitive.log_prob:_NextTokenLogProbs.backward",
        "None if grad_entropy is None else grad_entropy[positions][:, None],",
        "None if grad_entropy is None or ctx.shard is not None else grad_entropy[positions][:, None],",
        ("test_the_gradient_of_the_entropy_is_one_ranks_under_tensor_parallelism",),
        "an entropy bonus would do nothing with tp",
    ),
    Fault(
        "parity-without-the-common-factor",
        "rl_backend.lab.parity.compare:activation_difference",
        "return shared if shared.excess > whole.excess else whole",
        "return whole",
        ("test_a_factor_that_all_elements_share_is_found_where_the_norm_says_nothing",),
        "a slightly other eps of a norm would pass",
    ),
    Fault(
        "grpo-without-its-kl",
        "examples.grpo:GRPOConfig.loss_function",
        'options = {"kl_coef": self.kl_coef - self.kl_in_reward, "entropy_coef": self.entropy_coef}',
        'options = {"kl_coef": 0.0, "entropy_coef": self.entropy_coef}',
        ("test_a_kl_in_the_loss_pulls_the_policy_to_its_reference",),
        "kl_coef would build a reference and train without it",
    ),
    Fault(
        "asynchronous-save-of-live-tensors",
        "rl_backend.runtime.checkpoints:CheckpointWriter.save_training_state",
        "tensors = self._buffers.setdefault(handle, HostBuffers(handle.groups.device)).copy(tensors)",
        "pass",
        ("test_a_save_in_the_background_has_the_state_of_its_call_however_late_it_is_written",),
        "a checkpoint would hold weights of two steps",
    ),
    Fault(
        "model-data-not-flushed",
        "rl_backend.checkpoint.training_state:DigestingWriter.__init__",
        "super().__init__(path, per_thread_copy_ahead=0)",
        "super().__init__(path, per_thread_copy_ahead=0, sync_files=False)",
        ("test_every_file_is_flushed_before_the_checkpoint_gets_its_name",),
        "a power cut would leave a committed checkpoint without its weights",
    ),
    Fault(
        "verl-offload-never-leaves-the-device",
        "adapters.verl.engine:EngineMode._context_switch",
        '"cpu" if self._leaving else "device",',
        '"device",',
        ("test_parts_are_on_the_device_only_in_the_modes_that_use_them",),
        "param_offload would save no memory beside a rollout",
    ),
    Fault(
        "router-losses-of-a-pipeline-not-averaged",
        "rl_backend.runtime.native.forward_backward:_rank_batch",
        """
        return lay_out(
            batch, handle.groups, len(request.data), replayed, runs, request.heads, handle.trains_second, tree, predicts
        )
        """,
        "return lay_out(batch, handle.groups, 1, replayed, runs, request.heads, handle.trains_second, tree, predicts)",
        ("test_router_losses_of_the_options_are_averaged_over_micro_batches",),
        "the losses would grow with the number of micro-batches",
    ),
    Fault(
        "verl-r3-one-row-too-far",
        "adapters.verl.batches:BatchRoutes.of",
        "fields[ROUTES_MASK][length - 1 if response else 0 :] = False",
        "fields[ROUTES_MASK][length if response else 0 :] = False",
        ("test_the_last_token_of_a_rollout_and_sequences_without_response_are_not_replayed",),
        "the last token would be replayed with what is no route of it",
    ),
    Fault(
        "simulated-transfers-overtake-each-other",
        "rl_backend.pipeline.schedule:event_graph",
        "for queue in queues.values():",
        "for queue in ():",
        ("test_a_transfer_waits_for_the_one_before_it_in_its_direction",),
        "bubbles of slow networks would be too small",
    ),
    Fault(
        "tied-copies-not-filled-by-a-load",
        "rl_backend.runtime.native.engine:_fill_copies",
        "local.copy_(held[kind, original])",
        "pass",
        ("test_a_tied_head_in_a_stage_of_its_own_is_loaded_with_its_embeddings",),
        "the head of a V would keep its weights of before the load",
    ),
    Fault(
        "verl-full-determinism-not-called",
        "adapters.verl.engine:RuntimeEngine.__init__",
        "enable_full_determinism(self.settings.runtime.seed)",
        "pass",
        ("test_full_determinism_reaches_torch",),
        "full_determinism would be accepted and ignored",
    ),
]
