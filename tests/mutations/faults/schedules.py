"""Pipeline schedules: orders, validator, simulator, executor."""

from __future__ import annotations

from tests.mutations.fault import Fault

_PIPELINE = "rl_backend/pipeline"
_SCHEDULE = "tests/unit/rl_backend/pipeline/test_schedule.py"
_VALIDATION = "tests/unit/rl_backend/pipeline/test_schedule_validation.py"

FAULTS = [
    Fault(
        "one-forward-pass-too-few-ahead",
        f"{_PIPELINE}/orders.py",
        "            ahead=pp_size - rank,\n",
        "            ahead=max(pp_size - rank - 1, 1),\n",
        (f"{_SCHEDULE}::test_1f1b_and_its_interleaved_form_have_the_bubble_of_the_formula",),
        "1F1B would have a larger bubble than said",
    ),
    Fault(
        "interleaved-runs-further-ahead",
        f"{_PIPELINE}/orders.py",
        "return 2 * (pp_size - rank - 1) + (stages_per_rank - 1) * pp_size + 1",
        "return 2 * (pp_size - rank - 1) + stages_per_rank * pp_size + 1",
        (
            f"{_SCHEDULE}::test_activations_are_held_from_forward_to_the_weights_gradient",
            f"{_SCHEDULE}::test_1f1b_and_its_interleaved_form_have_the_bubble_of_the_formula",
            "tests/unit/rl_backend/pipeline/test_schedule_page.py::test_the_table_of_bubbles_is_what_the_schedules_have",
        ),
        "interleaved 1F1B would hold more activations than it must",
    ),
    Fault(
        "zb-h1-puts-nothing-off",
        f"{_PIPELINE}/orders.py",
        "ahead=pp_size - rank, put_off=rank)",
        "ahead=pp_size - rank, put_off=0)",
        (f"{_SCHEDULE}::test_zb_h1_and_zb_h2_have_the_bubbles_of_the_formulas",),
        "ZB-H1 would be 1F1B",
    ),
    Fault(
        "validator-allows-more-activations",
        f"{_PIPELINE}/validate.py",
        "        if peak > bound:\n",
        "        if peak > bound + 1:\n",
        (
            f"{_VALIDATION}::test_an_error_names_the_schedule_the_rank_and_the_actions",
            f"{_VALIDATION}::test_what_is_dropped_doubled_swapped_or_moved_is_refused_unless_it_still_runs",
        ),
        "a schedule could run out of the memory it promised",
    ),
    Fault(
        "validator-does-not-compare-pairs",
        f"{_PIPELINE}/validate.py",
        "                if send.other_end != receive:\n",
        "                if False:\n",
        (f"{_VALIDATION}::test_receives_in_another_order_than_the_sends_are_named_with_both_ends",),
        "a rank could compute with another micro-batch's activations",
    ),
    Fault(
        "validator-with-many-queues",
        f"{_PIPELINE}/validate.py",
        "one_queue_per_rank=True)",
        "one_queue_per_rank=False)",
        (f"{_VALIDATION}::test_an_order_that_only_two_queues_could_carry_is_a_deadlock",),
        "a schedule that hangs on NCCL would pass",
    ),
    Fault(
        "validator-does-not-look-for-missing-actions",
        f"{_PIPELINE}/validate.py",
        '(("missing", expected - set(counts)), ("not needed"',
        '(("missing", set()), ("not needed"',
        (
            f"{_VALIDATION}::test_what_is_dropped_doubled_swapped_or_moved_is_refused_unless_it_still_runs",
            f"{_VALIDATION}::test_an_error_names_the_schedule_the_rank_and_the_actions",
        ),
        "a schedule could leave a micro-batch out",
    ),
    Fault(
        "weights-wait-for-nothing",
        f"{_PIPELINE}/dependencies.py",
        "        return [Action(Kind.BACKWARD_INPUT, stage, micro_batch)]\n",
        "        return []\n",
        (f"{_VALIDATION}::test_what_is_dropped_doubled_swapped_or_moved_is_refused_unless_it_still_runs",),
        "a gradient could be computed before its inputs exist",
    ),
    Fault(
        "simulated-transfers-take-no-time",
        f"{_PIPELINE}/simulate.py",
        "        return costs.communication\n",
        "        return 0.0\n",
        (f"{_SCHEDULE}::test_communication_takes_time_but_not_a_ranks",),
        "bubbles of slow networks would be too small",
    ),
    Fault(
        "bubble-of-the-busiest-rank",
        f"{_PIPELINE}/simulate.py",
        "1.0 - sum(self.busy) / (self.makespan * len(self.spans))",
        "1.0 - max(self.busy) / self.makespan",
        (
            f"{_SCHEDULE}::test_1f1b_and_its_interleaved_form_have_the_bubble_of_the_formula",
            f"{_SCHEDULE}::test_stages_of_different_size_take_their_own_time",
        ),
        "uneven stages would seem to have no bubble",
    ),
    Fault(
        "full-backward-costs-as-much-as-a-half",
        f"{_PIPELINE}/simulate.py",
        "return _of_stage(self.backward_input, action.stage) + _of_stage(self.backward_weight, action.stage)",
        "return _of_stage(self.backward_input, action.stage)",
        (f"{_SCHEDULE}::test_stages_of_different_size_take_their_own_time",),
        "1F1B would seem shorter than it is",
    ),
    Fault(
        "executor-keeps-no-count-of-activations",
        f"{_PIPELINE}/executor.py",
        "self.peak_activations = max(self.peak_activations, len(self._activations) + len(self._put_off))",
        "self.peak_activations = max(self.peak_activations, len(self._activations))",
        (
            "tests/distributed/test_native_pipelines.py::test_the_executor_holds_the_activations_that_the_schedule_promises[zb-h1]",
            "tests/distributed/test_native_pipelines.py::test_the_executor_holds_the_activations_that_the_schedule_promises[zb-h2]",
        ),
        "the promise of the schedule would not be checked where weights wait",
    ),
    Fault(
        "executor-sends-zeros-for-gradients",
        f"{_PIPELINE}/executor.py",
        "stage - 1, micro_batch)] = hidden.grad\n",
        "stage - 1, micro_batch)] = torch.zeros_like(hidden.grad)\n",
        ("tests/distributed/test_native_pipelines.py::test_every_schedule_trains_as_one_rank[1f1b-2]",),
        "all stages but the last would not be trained",
    ),
    Fault(
        "abandoned-pass-leaves-transfers-open",
        f"{_PIPELINE}/executor.py",
        "        for action in plan_warm_up(self._schedule).left_over[self._rank]:\n",
        "        for action in ():\n",
        (
            "tests/unit/rl_backend/pipeline/test_warm_up.py::test_an_abandoned_pass_leaves_no_transfer_open_and_nobody_waiting",
            "tests/distributed/test_post_validation.py::test_data_that_one_rank_refuses_is_refused_on_all_and_changes_nothing",
        ),
        "the pass after a refusal would receive what was meant for the one before",
    ),
    Fault(
        "middle-stages-not-favoured",
        f"{_PIPELINE}/schedule.py",
        "favoured = [*range(1, num_stages - 1), 0, num_stages - 1][:more]",
        "favoured = [*range(num_stages)][:more]",
        ("tests/unit/rl_backend/pipeline/test_stage_layers.py::test_layers_that_do_not_divide_go_to_stages_in_the_middle",),
        "the stage with the embeddings would get a further layer",
    ),
    Fault(
        "v-turns-at-the-wrong-rank",
        f"{_PIPELINE}/schedule.py",
        "return (*range(pp_size), *reversed(range(pp_size)))",
        "return (*range(pp_size), *range(pp_size))",
        (f"{_SCHEDULE}::test_stages_are_where_the_placement_says",),
        "a V would be a loop",
    ),
]
