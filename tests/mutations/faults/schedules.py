"""Pipeline schedules: orders, validator, simulator, executor."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "one-forward-pass-too-few-ahead",
        "rl_backend.pipeline.orders:one_forward_one_backward",
        "ahead=pp_size - rank,",
        "ahead=max(pp_size - rank - 1, 1),",
        ("test_1f1b_and_its_interleaved_form_have_the_bubble_of_the_formula",),
        "1F1B would have a larger bubble than said",
    ),
    Fault(
        "interleaved-runs-further-ahead",
        "rl_backend.pipeline.orders:_ahead",
        "return 2 * (pp_size - rank - 1) + (stages_per_rank - 1) * pp_size + 1",
        "return 2 * (pp_size - rank - 1) + stages_per_rank * pp_size + 1",
        (
            "test_activations_are_held_from_forward_to_the_weights_gradient",
            "test_1f1b_and_its_interleaved_form_have_the_bubble_of_the_formula",
            "test_the_table_of_bubbles_is_what_the_schedules_have",
        ),
        "interleaved 1F1B would hold more activations than it must",
    ),
    Fault(
        "zb-h1-puts-nothing-off",
        "rl_backend.pipeline.orders:zb_h1",
        "put_off=rank,",
        "put_off=0,",
        ("test_zb_h1_and_zb_h2_have_the_bubbles_of_the_formulas",),
        "ZB-H1 would be 1F1B",
    ),
    Fault(
        "validator-allows-more-activations",
        "rl_backend.pipeline.schedule:_waiting_or_full",
        "if peak > bound:",
        "if peak > bound + 1:",
        (
            "test_an_error_names_the_schedule_the_rank_and_the_actions",
            "test_what_is_dropped_doubled_swapped_or_moved_is_refused_unless_it_still_runs",
        ),
        "a schedule could run out of the memory it promised",
    ),
    Fault(
        "validator-does-not-compare-pairs",
        "rl_backend.pipeline.schedule:_unpaired",
        "if send.other_end != receive:",
        "if False:",
        ("test_receives_in_another_order_than_the_sends_are_named_with_both_ends",),
        "a rank could compute with another micro-batch's activations",
    ),
    Fault(
        "validator-with-many-queues",
        "rl_backend.pipeline.schedule:_waiting_or_full",
        "in_order(event_graph(schedule.actions, schedule.placement, one_queue_per_rank=True), describe)",
        "in_order(event_graph(schedule.actions, schedule.placement, one_queue_per_rank=False), describe)",
        ("test_an_order_that_only_two_queues_could_carry_is_a_deadlock",),
        "a schedule that hangs on NCCL would pass",
    ),
    Fault(
        "validator-does-not-look-for-missing-actions",
        "rl_backend.pipeline.schedule:_incomplete",
        "expected - set(counts),",
        "set(),",
        (
            "test_what_is_dropped_doubled_swapped_or_moved_is_refused_unless_it_still_runs",
            "test_an_error_names_the_schedule_the_rank_and_the_actions",
        ),
        "a schedule could leave a micro-batch out",
    ),
    Fault(
        "weights-wait-for-nothing",
        "rl_backend.pipeline.schedule:inputs_of",
        "return [Action(Kind.BACKWARD_INPUT, stage, micro_batch)]",
        "return []",
        ("test_what_is_dropped_doubled_swapped_or_moved_is_refused_unless_it_still_runs",),
        "a gradient could be computed before its inputs exist",
    ),
    Fault(
        "simulated-transfers-take-no-time",
        "rl_backend.pipeline.simulate:_duration",
        "return costs.communication",
        "return 0.0",
        ("test_communication_takes_time_but_not_a_ranks",),
        "bubbles of slow networks would be too small",
    ),
    Fault(
        "bubble-of-the-busiest-rank",
        "rl_backend.pipeline.simulate:Timeline.bubble_makespan",
        "return max(0.0, 1.0 - sum(self.busy) / (self.makespan * len(self.spans)))",
        "return max(0.0, 1.0 - max(self.busy) / self.makespan)",
        (
            "test_1f1b_and_its_interleaved_form_have_the_bubble_of_the_formula",
            "test_stages_of_different_size_take_their_own_time",
        ),
        "uneven stages would seem to have no bubble",
    ),
    Fault(
        "full-backward-costs-as-much-as-a-half",
        "rl_backend.pipeline.simulate:Costs.of",
        "Kind.BACKWARD: (self.backward_input, self.backward_weight),",
        "Kind.BACKWARD: (self.backward_input,),",
        ("test_stages_of_different_size_take_their_own_time",),
        "1F1B would seem shorter than it is",
    ),
    Fault(
        "executor-keeps-no-count-of-activations",
        "rl_backend.pipeline.executor:PipelineExecutor._forward",
        "self.peak_activations = max(self.peak_activations, len(self._activations) + len(self._put_off))",
        "self.peak_activations = max(self.peak_activations, len(self._activations))",
        (
            "test_the_executor_holds_the_activations_that_the_schedule_promises[zb-h1]",
            "test_the_executor_holds_the_activations_that_the_schedule_promises[zb-h2]",
        ),
        "the promise of the schedule would not be checked where weights wait",
    ),
    Fault(
        "executor-sends-zeros-for-gradients",
        "rl_backend.pipeline.executor:PipelineExecutor._backward",
        "self._ready[Action(Kind.RECEIVE_GRADIENT, stage - 1, micro_batch)] = hidden.grad",
        "self._ready[Action(Kind.RECEIVE_GRADIENT, stage - 1, micro_batch)] = torch.zeros_like(hidden.grad)",
        ("test_native_pipelines.py::test_every_schedule_trains_as_one_rank[1f1b-2]",),
        "all stages but the last would not be trained",
    ),
    Fault(
        "middle-stages-not-favoured",
        "rl_backend.pipeline.schedule:split_layers",
        "favoured = [*range(1, num_stages - 1), 0, num_stages - 1][:more]",
        "favoured = [*range(num_stages)][:more]",
        ("test_layers_that_do_not_divide_go_to_stages_in_the_middle",),
        "the stage with the embeddings would get a further layer",
    ),
    Fault(
        "v-turns-at-the-wrong-rank",
        "rl_backend.pipeline.schedule:v_placement",
        "return (*range(pp_size), *reversed(range(pp_size)))",
        "return (*range(pp_size), *range(pp_size))",
        ("test_stages_are_where_the_placement_says",),
        "a V would be a loop",
    ),
]
