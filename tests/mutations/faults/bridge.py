"""The bridge runtime on Megatron."""

from __future__ import annotations

from tests.mutations.fault import Fault

_BRIDGE = "rl_backend/runtime/bridge"
_GRADIENTS = "tests/distributed/test_bridge_gradients.py"
_LAYOUTS = "tests/distributed/test_bridge_layouts.py"
_OPTIMIZER = "tests/distributed/test_bridge_optimizer.py"
_CHECKPOINTS = "tests/distributed/test_bridge_checkpoints.py"
_REPLAY = "tests/distributed/test_router_replay.py"
_EXPORT = "tests/distributed/test_bridge_export.py"

FAULTS = [
    Fault(
        "bridge-loss-divided-by-micro-batches",
        f"{_BRIDGE}/forward_backward.py",
        "return loss * num_micro_batches, {}",
        "return loss * 1, {}",
        (f"{_GRADIENTS}::test_exported_gradients_are_the_native_ones_before_clipping[1-{{}}]",),
        "gradients would shrink with the number of micro-batches",
    ),
    Fault(
        "bridge-earlier-gradients-dropped",
        f"{_BRIDGE}/forward_backward.py",
        "        part.add_(earlier)\n",
        "        pass\n",
        (f"{_GRADIENTS}::test_gradients_of_several_passes_add_up[1-{{}}-{{}}]",),
        "only the last of several passes would count",
    ),
    Fault(
        "bridge-earlier-gradients-reduced-again",
        f"{_BRIDGE}/forward_backward.py",
        "    for chunk in chunks:\n        chunk.zero_grad_buffer()\n    yield\n",
        "    yield\n",
        (f"{_GRADIENTS}::test_gradients_of_several_passes_add_up[2-{{}}-{{}}]",),
        "gradients of earlier passes would count twice",
    ),
    Fault(
        "bridge-norm-of-one-rank",
        f"{_BRIDGE}/optimizer.py",
        "judge(all_gather(mine, self._groups.world_group, sum_gradients=False)",
        "judge(mine",
        ("tests/distributed/test_bridge_norms.py::test_the_norm_and_zeros_are_those_of_the_gradients",),
        "ranks would clip by different norms, and one could step while another does not",
    ),
    Fault(
        "bridge-counts-zeros-of-padding",
        f"{_BRIDGE}/optimizer.py",
        "mine[0, 1] -= self._padding",
        "mine[0, 1] -= 0",
        ("tests/distributed/test_bridge_norms.py::test_the_norm_and_zeros_are_those_of_the_gradients",),
        "rows that pad a vocabulary would count as zeros of the gradient",
    ),
    Fault(
        "bridge-does-not-clip",
        f"{_BRIDGE}/optimizer.py",
        "        if self._config.clip_grad > 0:\n",
        "        if self._config.clip_grad < 0:\n",
        (
            f"{_OPTIMIZER}::test_clipping_can_be_switched_off",
            f"{_LAYOUTS}::test_a_dense_model_trains_the_same_in_every_layout[2-ranks-dp]",
        ),
        "clip_grad would be ignored",
    ),
    Fault(
        "bridge-epsilon-ignored",
        f"{_BRIDGE}/optimizer.py",
        '        "adam_eps": config.eps,\n',
        "",
        ("tests/distributed/test_bridge_optimizer.py::test_betas_epsilon_decay_and_warm_up_reach_megatrons_adam",),
        "eps would be accepted and ignored",
    ),
    Fault(
        "bridge-warm-up-ignored",
        f"{_BRIDGE}/optimizer.py",
        "        lr_warmup_steps=config.warmup_steps,\n",
        "        lr_warmup_steps=0,\n",
        (f"{_OPTIMIZER}::test_betas_epsilon_decay_and_warm_up_reach_megatrons_adam",),
        "the first steps would have the full rate",
    ),
    Fault(
        "bridge-schedule-not-loaded",
        f"{_BRIDGE}/optimizer.py",
        "        self.scheduler.step(increment=num_steps)\n",
        "        self.scheduler.step(increment=0)\n",
        (f"{_CHECKPOINTS}::test_a_schedule_goes_on_where_it_was",),
        "a resumed run would warm up again",
    ),
    Fault(
        "bridge-steps-not-loaded",
        f"{_BRIDGE}/optimizer.py",
        "step.fill_(steps) if",
        "step if",
        (f"{_CHECKPOINTS}::test_a_run_resumes_bit_for_bit[2-{{}}-{{}}-True]",),
        "Adam's bias correction would begin anew",
    ),
    Fault(
        "bridge-vocabulary-with-its-padding",
        f"{_BRIDGE}/batch.py",
        "weight if rows == weight.shape[0] else weight[:rows],",
        "weight,",
        ("tests/distributed/test_bridge_vocabulary.py::test_padding_of_a_vocabulary_has_no_probability",),
        "padding would take a part of every probability",
    ),
    Fault(
        "bridge-hidden-gradient-of-one-rank",
        f"{_BRIDGE}/batch.py",
        "sum_gradients=not every_rank_the_same",
        "sum_gradients=every_rank_the_same",
        (f"{_LAYOUTS}::test_a_dense_model_trains_the_same_in_every_layout[2-ranks-tp2]",),
        "hidden states would be trained by one rank's words",
    ),
    Fault(
        "bridge-padding-not-marked",
        f"{_BRIDGE}/batch.py",
        "        is_padding[row, column] = False\n",
        "        is_padding[:] = False\n",
        ("tests/unit/rl_backend/runtime/test_bridge_families.py::test_padding_counts_in_no_router_loss",),
        "padding would pull on the router",
    ),
    Fault(
        "bridge-rows-in-the-wrong-order",
        f"{_BRIDGE}/batch.py",
        "return LaidOut(batch, inputs, (rows, columns), column * rows + row)",
        "return LaidOut(batch, inputs, (rows, columns), row * columns + column)",
        (f"{_GRADIENTS}::test_exported_gradients_are_the_native_ones_before_clipping[1-{{}}]",),
        "log-probs would belong to other tokens",
    ),
    Fault(
        "bridge-without-sequence-parallel-shapes",
        f"{_BRIDGE}/forward_backward.py",
        "multiple = groups.parallel.tp if provider.sequence_parallel else 1",
        "multiple = 1",
        (f"{_LAYOUTS}::test_a_dense_model_trains_the_same_in_every_layout[2-ranks-tp2]",),
        "lengths that tp does not divide would fail or shift",
    ),
    Fault(
        "bridge-exports-the-padding-of-a-vocabulary",
        f"{_BRIDGE}/conversion.py",
        "        return tensor[: shape[0]]\n",
        "        return tensor[-shape[0] :]\n",
        (f"{_EXPORT}::test_a_tied_lm_head_and_padding_of_the_vocabulary_are_not_exported[{{'tp': 2}}]",),
        "engines would get the padding of a vocabulary for its first words",
    ),
    Fault(
        "bridge-replay-of-the-last-micro-batch",
        f"{_BRIDGE}/routes.py",
        "        output.register_hook(lambda _: self._bind(chunk, routes))\n",
        "",
        (
            f"{_REPLAY}::test_every_layout_replays_what_one_rank_recorded[bridge vpp2, recomputed]",
            f"{_REPLAY}::test_layers_without_experts_shift_no_routes[bridge pp2, recomputed]",
        ),
        "layers that are computed again would take another micro-batch's routes",
    ),
    Fault(
        "bridge-weights-of-the-routers-own-choice",
        f"{_BRIDGE}/routes.py",
        "            values = scores.gather(1, experts)\n",
        "",
        (f"{_REPLAY}::test_every_layout_replays_what_one_rank_recorded[bridge dp2]",),
        "replayed experts would be weighted as others",
    ),
    Fault(
        "bridge-first-layers-routes-for-all-chunks",
        f"{_BRIDGE}/routes.py",
        "first = sum(map(len, self._routers.chunks[:chunk]))",
        "first = 0",
        (f"{_REPLAY}::test_every_layout_replays_what_one_rank_recorded[bridge vpp2, recomputed]",),
        "a second chunk would take the routes of the first",
    ),
    Fault(
        "bridge-seed-equal-on-all-ranks",
        f"{_BRIDGE}/runtime.py",
        "torch.manual_seed(config.seed + self.groups.dp_rank)",
        "torch.manual_seed(config.seed)",
        ("tests/distributed/test_seeds.py::test_seeds_differ_by_data_parallel_rank_alone[bridge]",),
        "data-parallel ranks would draw the same numbers",
    ),
    Fault(
        "bridge-balances-with-the-type-none",
        "rl_backend/runtime/bridge_config.py",
        "        if weight and not adds_loss:\n",
        "        if False:\n",
        (
            "tests/unit/rl_backend/runtime/test_bridge_config.py::test_an_option_that_cannot_hold_is_refused_when_the_configuration_is_built",
        ),
        "a coefficient would be accepted and balance nothing",
    ),
    Fault(
        "bridge-decays-norms-that-are-not-there",
        f"{_BRIDGE}/provider.py",
        "    if value and not provider.qk_layernorm:\n",
        "    if False:\n",
        ("tests/unit/rl_backend/runtime/test_bridge_config.py::test_decay_of_norms_that_a_model_does_not_have_is_refused",),
        "apply_wd_to_qk_layernorm would be accepted and ignored",
    ),
]
