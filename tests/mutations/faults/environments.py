"""Episodes: masks, prefixes, ends of turns, tools, failures, and what other libraries play."""

from __future__ import annotations

from tests.mutations.fault import Fault

_ENVIRONMENT = "rl_backend/environment"
_TESTS = "tests/unit/rl_backend/environment"
_RECORD = f"{_TESTS}/test_record.py"
_SAMPLER = f"{_TESTS}/test_sampler.py"
_CONVERSATION = f"{_TESTS}/test_conversation.py"
_PLAYING = f"{_TESTS}/test_playing.py"
_STEPPING = f"{_TESTS}/test_stepping.py"
_CALLING = f"{_TESTS}/test_calling.py"
_TOOLS = f"{_TESTS}/test_tools.py"
_WATCHDOG = f"{_TESTS}/test_watchdog.py"

FAULTS = [
    Fault(
        "prompt-trained",
        f"{_ENVIRONMENT}/record.py",
        "        self.sampled += [False] * len(token_ids)\n",
        "        self.sampled += [bool(self.token_ids[: -len(token_ids)])] * len(token_ids)\n",
        (f"{_RECORD}::test_a_prompt_that_continues_extends_the_segment",),
        "answers of tools would be imitated",
    ),
    Fault(
        "prefix-not-compared",
        f"{_ENVIRONMENT}/record.py",
        "if prompt[: len(each.token_ids)] == each.token_ids)",
        "if len(prompt) > len(each.token_ids))",
        (f"{_RECORD}::test_any_other_prompt_begins_a_segment",),
        "a turn would be trained behind ids that it was not sampled after",
    ),
    Fault(
        "routes-of-the-last-pass",
        f"{_ENVIRONMENT}/record.py",
        "        known = sum(len(rows) for rows in self.routes)\n",
        "        known, self.routes = 0, []\n",
        (f"{_RECORD}::test_a_row_of_routes_is_that_of_the_pass_that_predicted_the_next_token",),
        "a replay would route tokens as newer weights did",
    ),
    Fault(
        "reward-before-the-turns-last-token",
        f"{_ENVIRONMENT}/record.py",
        "rewards[place.end - 1] +=",
        "rewards[place.end - 2] +=",
        (f"{_RECORD}::test_rewards_lie_at_the_last_token_of_their_turn",),
        "PPO would not credit the end of a turn",
    ),
    Fault(
        "one-seed-for-all-turns",
        f"{_ENVIRONMENT}/sampler.py",
        "    if turn == 0:\n",
        "    if turn >= 0:\n",
        (f"{_SAMPLER}::test_seeds_of_turns_differ_and_the_first_is_the_episodes_own",),
        "turns after the same prompt would repeat",
    ),
    Fault(
        "context-off-by-one",
        f"{_ENVIRONMENT}/sampler.py",
        "        if room[least] < 1:\n",
        "        if room[least] < 0:\n",
        (f"{_SAMPLER}::test_the_context_is_checked_before_the_engine_is_asked",),
        "one full context would end the engine's whole batch",
    ),
    Fault(
        "sampled-end-given-twice",
        f"{_ENVIRONMENT}/conversation.py",
        "            return _Behind(token_ids[length:], text)\n",
        "            return _Behind(token_ids, text)\n",
        (f"{_CONVERSATION}::test_the_end_of_a_turn_is_trained_if_it_was_sampled",),
        "the model would see two ends of every turn",
    ),
    Fault(
        "other-end-kept-always",
        f"{_ENVIRONMENT}/conversation.py",
        '        if self.format.other_end == "replace":\n',
        '        if self.format.other_end == "never":\n',
        (f"{_CONVERSATION}::test_another_end_than_the_templates",),
        "the model would see ends that its template never writes",
    ),
    Fault(
        "tokens-encoded-again",
        f"{_ENVIRONMENT}/conversation.py",
        "        self.token_ids = [*self.token_ids, *token_ids]\n",
        "        renderer = self.format.renderer\n"
        "        self.token_ids = [*self.token_ids, *renderer.encode(renderer.decode(token_ids))]\n",
        (f"{_CONVERSATION}::test_ids_that_encoding_would_change_stay",),
        "the next turn would follow other ids than were sampled",
    ),
    Fault(
        "changed-history-not-noticed",
        f"{_ENVIRONMENT}/history.py",
        "    return whole == renderer.text(prompt) + answer + rest and",
        "    return",
        (f"{_TESTS}/test_templates.py::test_a_question_behind_an_answer_is_what_the_whole_conversation_has",),
        "nobody would be told that a template drops thinking",
    ),
    Fault(
        "failed-episode-keeps-its-reward",
        f"{_ENVIRONMENT}/groups.py",
        "else without_reward(episode)",
        "else episode",
        (f"{_PLAYING}::test_what_comes_of_a_failed_episode",),
        "zero would not be zero",
    ),
    Fault(
        "small-group-kept",
        f"{_ENVIRONMENT}/groups.py",
        "    if len(left) < options.fewest:\n",
        "    if len(left) < 1:\n",
        (f"{_PLAYING}::test_what_comes_of_a_failed_episode",),
        "a baseline would be made of one episode",
    ),
    Fault(
        "limit-of-an-episode-ignored",
        f"{_ENVIRONMENT}/playing.py",
        "asyncio.wait([playing], timeout=limits.episode_seconds)",
        "asyncio.wait([playing])",
        (f"{_PLAYING}::test_an_episode_that_hangs_ends_at_its_limit",),
        "one environment that hangs would stop the run",
    ),
    Fault(
        "blocked-loop-unseen",
        f"{_ENVIRONMENT}/groups.py",
        "    with watched_loop(options.on_blocked):\n",
        "    with nullcontext():\n",
        (f"{_WATCHDOG}::test_a_player_that_blocks_is_named",),
        "one blocking step would stop all episodes, and nothing would say so",
    ),
    Fault(
        "blocker-without-a-name",
        f"{_ENVIRONMENT}/calling.py",
        "asyncio.create_task(function(*arguments), name=task_name(function))",
        "asyncio.create_task(function(*arguments))",
        (f"{_WATCHDOG}::test_an_asynchronous_step_that_blocks_is_named",),
        "of many environments nobody would know which one blocks",
    ),
    Fault(
        "metrics-lost-at-a-limit",
        f"{_ENVIRONMENT}/stepping.py",
        "            return ended_by(end, episode.metrics)\n",
        "            return ended_by(end)\n",
        (f"{_STEPPING}::test_metrics_outlast_a_limit",),
        "curves would be of the episodes that ended well alone",
    ),
    Fault(
        "metrics-of-the-cookbook-lost-at-a-limit",
        "adapters/cookbook/player.py",
        "            return ended_by(end, metrics)\n",
        "            return ended_by(end)\n",
        (
            "tests/unit/adapters/cookbook/test_cookbook_player.py::test_an_episode_that_a_limit_ends_has_the_metrics_of_its_turns",
        ),
        "curves would be of the episodes that ended well alone",
    ),
    Fault(
        "late-environment-left-open",
        f"{_ENVIRONMENT}/calling.py",
        "        elif raised is None:\n            self._late()\n",
        "",
        (f"{_CALLING}::test_an_environment_that_is_made_too_late_is_closed",),
        "containers would be left behind, which nobody knows of",
    ),
    Fault(
        "cancelled-threads-not-counted",
        f"{_ENVIRONMENT}/calling.py",
        "        except asyncio.CancelledError:\n            self._leave(call)\n",
        "        except asyncio.CancelledError:\n            call.give_up()\n",
        (f"{_CALLING}::test_threads_that_are_left_behind_are_counted_whoever_gave_them_up",),
        "threads of steps that hang would add up without a bound",
    ),
    Fault(
        "threads-of-an-environment-waited-for",
        f"{_ENVIRONMENT}/running.py",
        "    loop.set_default_executor(_DaemonThreads())\n",
        "",
        (f"{_TESTS}/test_running.py::test_calls_that_hang_hold_up_no_others",),
        "one request that hangs would hold the whole batch",
    ),
    Fault(
        "close-left-out-after-a-cancellation",
        f"{_ENVIRONMENT}/stepping.py",
        "                await asyncio.shield(closing)\n",
        "                await closing\n",
        (f"{_STEPPING}::test_closing_outlasts_those_who_cancel_the_player_again",),
        "Ctrl-C would leave sandboxes behind",
    ),
    Fault(
        "step-without-limit",
        f"{_ENVIRONMENT}/stepping.py",
        "            step = await self._caller(environment.step, turn, seconds=seconds)\n",
        "            step = await self._caller(environment.step, turn)\n",
        (f"{_STEPPING}::test_what_an_environment_does_wrong_ends_its_episode_and_closes_it",),
        "a step that hangs would hold its episode for ever",
    ),
    Fault(
        "calls-beyond-the-limit-run",
        f"{_ENVIRONMENT}/tool_calls.py",
        "        if most is not None and index >= most:\n",
        "        if most is not None and index > most:\n",
        (f"{_STEPPING}::test_calls_beyond_the_limit_are_not_run_and_end_the_episode",),
        "a limit of calls would be one too high",
    ),
    Fault(
        "tools-in-the-runs-process",
        f"{_ENVIRONMENT}/tools.py",
        'processes=where == "processes"',
        "processes=False",
        (f"{_TOOLS}::test_every_attempt_is_answered",),
        "code that a model wrote could reach the run's memory",
    ),
    Fault(
        "endpoint-open-to-everyone",
        "adapters/verifiers/endpoint.py",
        '        found = self._sessions.get(request.headers.get(TOKEN_HEADER, ""))\n',
        "        found = next(iter(self._sessions.values()), None)\n",
        ("tests/unit/adapters/verifiers/test_endpoint.py::test_nobody_without_the_token_of_an_episode_is_answered",),
        "any process of the machine could write into an episode",
    ),
    Fault(
        "masked-turns-of-cookbook-trained",
        "adapters/cookbook/player.py",
        "            if step.metrics.get(MASKED):\n",
        "            if step.metrics.get(MASKED, 0) > 1:\n",
        (
            "tests/unit/adapters/cookbook/test_cookbook_player.py"
            "::test_observations_that_continue_are_one_segment_and_masked_turns_are_not_trained",
        ),
        "turns that the environment takes out would be trained",
    ),
]
