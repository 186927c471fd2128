"""Engines that are lost in a run: found, ended, replaced, and what they had been asked."""

from __future__ import annotations

from tests.mutations.fault import Fault

_HEARTBEATS = "actors.rollout.group.heartbeats:Heartbeats"
_PUSH = "actors.sync.push:WeightSync"

FAULTS = [
    Fault(
        "stopped-engines-count-as-busy",
        f"{_HEARTBEATS}._be_late",
        "beat.stopped >= STOPPED_LOOKS",
        "False",
        ("test_a_stopped_process_is_dead_within_seconds_and_ended",),
        "a run would stand still for a minute, or an hour, with an engine that is stopped",
    ),
    Fault(
        "an-engine-that-was-stopped-for-moments-is-ended",
        f"{_HEARTBEATS}._be_late",
        "beat.stopped = beat.stopped + 1 if self._is_stopped(info, beat) else 0",
        "beat.stopped += self._is_stopped(info, beat)",
        ("test_a_busy_process_has_the_whole_time_and_one_that_was_stopped_for_a_moment_too",),
        "a debugger that looks at an engine three times would end it",
    ),
    Fault(
        "beat-of-the-process-before",
        f"{_HEARTBEATS}.beat",
        "beat is not None and beat.actor is actor",
        "beat is not None",
        ("test_what_became_of_the_process_before_is_not_noted_of_the_engine_in_its_place[died]",),
        "an engine that has just been replaced would be killed for the end of the one before",
    ),
    Fault(
        "a-replaced-engine-wakes-up",
        f"{_HEARTBEATS}._be_late",
        "process.kill()",
        "pass",
        ("test_a_stopped_process_is_dead_within_seconds_and_ended",),
        "a stopped engine that was replaced would keep its memory and cores, and continue with SIGCONT",
    ),
    Fault(
        "another-process-of-the-same-number-is-ended",
        "actors.cluster.processes:Process.kill",
        "not self.has_ended",
        "True",
        ("test_another_process_of_the_same_number_is_left_alone",),
        "a process that has nothing to do with the run would be killed",
    ),
    Fault(
        "the-other-workers-wait-for-a-lost-one",
        "actors.rollout.engine.in_process:Workers.check",
        "process.kill()",
        "pass",
        ("test_an_engine_with_a_lost_worker_says_so_and_ends_the_others",),
        "workers of a dead engine would keep their memory",
    ),
    Fault(
        "what-vllm-says-of-a-lost-worker-is-told",
        "actors.rollout.engine.in_process:VllmInProcess.translated",
        "self.workers.check()",
        "pass",
        ("test_any_error_of_vllm_is_the_death_of_the_engine_where_a_worker_has_ended",),
        "a run would end with a worker of an engine that could be replaced",
    ),
    Fault(
        "a-lost-engine-ends-the-call",
        "actors.rollout.group.turns:GroupTurns._answered",
        "if lost and (turn.request.waits or self._engines.heals):",
        "if False:",
        ("test_what_a_lost_engine_was_asked_is_asked_of_others_where_engines_are_replaced",),
        "a run would end with every engine that is lost",
    ),
    Fault(
        "engines-are-started-again-without-end",
        "actors.rollout.group.healing:Healing._heal",
        "len(restarts) >= self._limit",
        "False",
        ("test_an_engine_that_fails_to_start_is_tried_later_and_later_up_to_the_limit",),
        "a run that cannot go on would start engines for ever",
    ),
    Fault(
        "a-new-engine-gets-other-weights-than-the-rest-serve",
        f"{_PUSH}.give",
        "plan.version != self._served or transport.problem(plan, engines)",
        "transport.problem(plan, engines)",
        ("test_an_engine_that_joins_gets_what_is_staged_or_what_the_trainer_still_has",),
        "a batch would be of two policies",
    ),
    Fault(
        "an-engine-without-weights-serves",
        "actors.rollout.group.group:RolloutGroup._join",
        "not have_weights",
        "False",
        ("test_an_engine_that_joins_and_finds_no_weights_serves_after_the_next_push",),
        "calls would be refused, or answered with the weights that the run began with",
    ),
    Fault(
        "a-push-ends-with-the-first-engine-that-is-lost",
        f"{_PUSH}.push",
        "not engines.heals",
        "True",
        ("test_a_push_that_loses_an_engine_that_is_replaced_goes_on",),
        "a run would end with an engine that dies while weights are pushed",
    ),
    Fault(
        "steppers-are-made-on-the-callers-thread",
        "actors.rollout.engine.step_loop:StepLoop.start",
        "self._stepper = self.call(make)",
        "self._stepper = make()",
        ("test_the_stepper_is_made_on_the_thread_that_steps",),
        "vLLM would bind other threads to the cores than those that step",
    ),
]
