"""Turns of episodes: the step loop of an engine, and the choice of the engine."""

from __future__ import annotations

from tests.mutations.fault import Fault

_LOOP = "tests/unit/actors/rollout/test_step_loop.py"
_TOKENS = "tests/unit/actors/rollout/test_tokens.py"
_ADAPTERS = "tests/unit/actors/rollout/test_adapters.py"

FAULTS = [
    Fault(
        "requests-begin-during-a-hold",
        "actors/rollout/step_loop.py",
        "        if self._hold is not None:\n            return\n        adapters_wait",
        "        adapters_wait",
        (f"{_LOOP}::test_a_hold_lets_requests_end_and_begins_no_other",),
        "vLLM would step in the middle of a weight update, which ends it",
    ),
    Fault(
        "keys-and-values-survive-a-pause",
        "actors/rollout/step_loop.py",
        "                self._stepper.forget()\n",
        "                pass\n",
        (f"{_LOOP}::test_a_hold_pauses_requests_between_two_tokens_and_each_token_has_its_version",),
        "a turn would go on with keys and values of the weights before",
    ),
    Fault(
        "paused-turns-keep-their-version",
        "actors/rollout/step_loop.py",
        "        for entry in self._running.values():\n            entry.version = self._host.version_for(entry.job)\n",
        "",
        (f"{_LOOP}::test_a_hold_pauses_requests_between_two_tokens_and_each_token_has_its_version",),
        "tokens of new weights would count as those of old ones, and corrections for staleness would be wrong",
    ),
    Fault(
        "tokens-before-a-pause-have-the-version-after",
        "actors/rollout/step_loop.py",
        "        for entry in running:\n            entry.note(self._stepper.sampled(entry.key))\n",
        "",
        (f"{_LOOP}::test_a_hold_pauses_requests_between_two_tokens_and_each_token_has_its_version",),
        "stale tokens would be trained on as fresh ones",
    ),
    Fault(
        "turns-that-must-not-pause-do",
        "actors/rollout/step_loop.py",
        "or not all(entry.job.pausable for entry in running):",
        "or not any(entry.job.pausable for entry in running):",
        (f"{_LOOP}::test_a_hold_pauses_requests_between_two_tokens_and_each_token_has_its_version",),
        "the base would change under a turn with an adapter, without a trace in its versions",
    ),
    Fault(
        "nothing-begins-when-all-end-in-one-step",
        "actors/rollout/step_loop.py",
        "                self._step()\n                self._begin()\n",
        "                self._step()\n",
        (f"{_LOOP}::test_no_more_run_than_there_is_room_for",),
        "an engine would sleep while turns wait",
    ),
    Fault(
        "what-was-given-up-is-never-answered",
        "actors/rollout/step_loop.py",
        "            self._end(entry, self._stepper.give_up(entry.key) if running else None)\n",
        "            if running:\n                self._end(entry, self._stepper.give_up(entry.key))\n",
        (f"{_LOOP}::test_requests_are_given_up_with_what_they_have",),
        "an episode would wait for ever",
    ),
    Fault(
        "a-dirty-engine-keeps-later-turns",
        "actors/rollout/step_loop.py",
        "            if self._closed_by is not None:\n",
        "            if False:\n",
        (f"{_LOOP}::test_what_is_closed_answers_everything_with_the_error_until_it_is_released",),
        "turns asked of a dirty engine would wait for ever",
    ),
    Fault(
        "a-running-turn-loses-its-adapter",
        "actors/rollout/adapters.py",
        "next(number for number in self._loaded if number not in in_use)",
        "next(number for number in self._loaded)",
        (f"{_ADAPTERS}::test_requests_wait_for_a_slot_that_no_running_one_needs",),
        "vLLM would sample on with another adapter, or none",
    ),
    Fault(
        "an-adapter-is-dropped-under-its-turns",
        "actors/rollout/adapters.py",
        "        if adapter in self._loop.adapters(running=False):\n",
        "        if False:\n",
        (f"{_ADAPTERS}::test_an_adapter_is_dropped_when_the_last_request_that_samples_with_it_has_left",),
        "a push of a tenant would end the turns of the version before",
    ),
    Fault(
        "turns-of-an-episode-wander",
        "actors/rollout/tokens.py",
        "        if engine is not None:\n            return engine\n",
        "",
        (f"{_TOKENS}::test_later_turns_go_to_the_engine_of_the_turns_before_and_first_ones_to_the_least_busy",),
        "no prefix would come from the cache",
    ),
    Fault(
        "a-lost-engine-is-asked-again",
        "actors/rollout/tokens.py",
        " if engine not in lost}",
        "}",
        (f"{_TOKENS}::test_a_turn_whose_engine_is_lost_is_asked_again_of_another",),
        "every turn of a dying engine would end its episode",
    ),
]
