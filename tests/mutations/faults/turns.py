"""Turns of episodes: the step loop of an engine, and the choice of the engine."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "requests-begin-during-a-hold",
        "actors.rollout.engine.step_loop:StepLoop._begin",
        """
        if self._hold is not None:
            return
        """,
        "pass",
        ("test_a_hold_lets_requests_end_and_begins_no_other",),
        "vLLM would step in the middle of a weight update, which ends it",
    ),
    Fault(
        "keys-and-values-survive-a-pause",
        "actors.rollout.engine.step_loop:StepLoop._settle_hold",
        "self._stepper.forget()",
        "pass",
        ("test_a_hold_pauses_requests_between_two_tokens_and_each_token_has_its_version",),
        "a turn would go on with keys and values of the weights before",
    ),
    Fault(
        "paused-turns-keep-their-version",
        "actors.rollout.engine.step_loop:StepLoop._release",
        """
        for entry in self._running.values():
            entry.version = self._host.version_for(entry.request)
        """,
        "pass",
        ("test_a_hold_pauses_requests_between_two_tokens_and_each_token_has_its_version",),
        "tokens of new weights would count as those of old ones, and corrections for staleness would be wrong",
    ),
    Fault(
        "tokens-before-a-pause-have-the-version-after",
        "actors.rollout.engine.step_loop:StepLoop._settle_hold",
        """
        for entry in running:
            entry.note(self._stepper.sampled(entry.key))
        """,
        "pass",
        ("test_a_hold_pauses_requests_between_two_tokens_and_each_token_has_its_version",),
        "stale tokens would be trained on as fresh ones",
    ),
    Fault(
        "turns-that-must-not-pause-do",
        "actors.rollout.engine.step_loop:StepLoop._settle_hold",
        "if self._hold is None or self._hold.done() or not all(entry.request.pausable for entry in running):",
        "if self._hold is None or self._hold.done() or not any(entry.request.pausable for entry in running):",
        ("test_a_hold_pauses_requests_between_two_tokens_and_each_token_has_its_version",),
        "the base would change under a turn with an adapter, without a trace in its versions",
    ),
    Fault(
        "a-step-loop-that-has-ended-answers-heartbeats",
        "actors.rollout.engine.engine:RolloutEngine.pulse",
        "self._vllm.loop.check()",
        "pass",
        ("test_an_error_of_the_step_loop_itself_is_the_death_of_the_engine",),
        "an engine that can answer nothing would be replaced after sampling_timeout, an hour",
    ),
    Fault(
        "nothing-begins-when-all-end-in-one-step",
        "actors.rollout.engine.step_loop:StepLoop._work",
        """
        self._step()
        self._begin()
        """,
        "self._step()",
        ("test_no_more_run_than_there_is_room_for",),
        "an engine would sleep while turns wait",
    ),
    Fault(
        "what-was-given-up-is-never-answered",
        "actors.rollout.engine.step_loop:StepLoop._give_up",
        "self._end(entry, self._stepper.give_up(entry.key) if running else None)",
        """
        if running:
            self._end(entry, self._stepper.give_up(entry.key))
        """,
        ("test_requests_are_given_up_with_what_they_have",),
        "an episode would wait for ever",
    ),
    Fault(
        "a-dirty-engine-keeps-later-turns",
        "actors.rollout.engine.step_loop:StepLoop._queue",
        "if self._closed_by is not None:",
        "if False:",
        ("test_what_is_closed_answers_everything_with_the_error_until_it_is_released",),
        "turns asked of a dirty engine would wait for ever",
    ),
    Fault(
        "a-running-turn-loses-its-adapter",
        "actors.rollout.engine.adapters:AdapterStore._load",
        "self._unload(next(number for number in self._loaded if number not in in_use))",
        "self._unload(next(number for number in self._loaded))",
        ("test_requests_wait_for_a_slot_that_no_running_one_needs",),
        "vLLM would sample on with another adapter, or none",
    ),
    Fault(
        "an-adapter-is-dropped-under-its-turns",
        "actors.rollout.engine.adapters:AdapterStore._drop",
        "if adapter in self._vllm.loop.adapters(running=False):",
        "if False:",
        ("test_an_adapter_is_dropped_when_the_last_request_that_samples_with_it_has_left",),
        "a push of a tenant would end the turns of the version before",
    ),
    Fault(
        "turns-of-an-episode-wander",
        "actors.rollout.group.turns:GroupTurns._home",
        "return self._router.find(request.prompt_ids, self._engines.engines) if request.waits else None",
        "return None",
        ("test_a_turn_goes_to_the_engine_of_the_turns_before_whatever_it_has_to_do",),
        "no prefix would come from the cache",
    ),
    Fault(
        "a-lost-engine-is-asked-again",
        "actors.rollout.group.turns:GroupTurns._answered",
        "if lost and (turn.request.waits or self._engines.heals):",
        "if lost and self._engines.heals:",
        ("test_without_replacement_a_call_has_the_error_of_its_engine_and_a_turn_another_engine",),
        "every turn of a dying engine would end its episode",
    ),
    Fault(
        "failed-forget-is-not-told",
        "actors.rollout.engine.step_loop:StepLoop._settle_hold",
        "self._fail(self._host.failed(error))",
        "self._host.failed(error)",
        ("test_a_pause_that_fails_fails_what_would_have_paused_and_holds_all_the_same",),
        "turns that were to pause would wait for ever",
    ),
    Fault(
        "waiting-requests-after-the-last-step",
        "actors.rollout.engine.step_loop:StepLoop._work",
        """
        if self._may_step:
            self._step()
            self._begin()
        """,
        """
        if self._may_step:
            self._step()
        """,
        ("test_no_more_run_than_there_is_room_for",),
        "requests would wait until somebody asks for something else",
    ),
]
