"""Episodes: masks, prefixes, ends of turns, tools, failures, and what other libraries play."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "prompt-trained",
        "rl_backend.environment.training_segments:_Open.add_prompt",
        "self.sampled += [False] * len(token_ids)",
        "self.sampled += [bool(self.token_ids[: -len(token_ids)])] * len(token_ids)",
        ("test_a_prompt_that_continues_extends_the_segment",),
        "answers of tools would be imitated",
    ),
    Fault(
        "prefix-not-compared",
        "rl_backend.environment.training_segments:EpisodeRecord.add",
        "(each for each in reversed(self._segments) if prompt[: len(each.token_ids)] == each.token_ids),",
        "(each for each in reversed(self._segments) if len(prompt) > len(each.token_ids)),",
        ("test_any_other_prompt_begins_a_segment",),
        "a turn would be trained behind ids that it was not sampled after",
    ),
    Fault(
        "routes-of-the-last-pass",
        "rl_backend.environment.training_segments:_Open.add_routes",
        "known = sum(len(rows) for rows in self.routes)",
        "known, self.routes = 0, []",
        ("test_a_row_of_routes_is_that_of_the_pass_that_predicted_the_next_token",),
        "a replay would route tokens as newer weights did",
    ),
    Fault(
        "reward-before-the-turns-last-token",
        "rl_backend.environment.training_segments:EpisodeRecord.reward",
        "place.segment.rewards[place.end - 1] += float(value)",
        "place.segment.rewards[place.end - 2] += float(value)",
        ("test_rewards_lie_at_the_last_token_of_their_turn",),
        "PPO would not credit the end of a turn",
    ),
    Fault(
        "one-seed-for-all-turns",
        "rl_backend.environment.sampler:turn_seed",
        "if turn == 0:",
        "if turn >= 0:",
        ("test_seeds_of_turns_differ_and_the_first_is_the_episodes_own",),
        "turns after the same prompt would repeat",
    ),
    Fault(
        "context-off-by-one",
        "rl_backend.environment.sampler:RecordingSampler._room",
        "if room[least] < 1:",
        "if room[least] < 0:",
        ("test_the_context_is_checked_before_the_engine_is_asked",),
        "one full context would end the engine's whole batch",
    ),
    Fault(
        "sampled-end-given-twice",
        "rl_backend.environment.conversation:Conversation._behind",
        "return _Behind(token_ids[length:], text)",
        "return _Behind(token_ids, text)",
        ("test_the_end_of_a_turn_is_trained_if_it_was_sampled",),
        "the model would see two ends of every turn",
    ),
    Fault(
        "other-end-kept-always",
        "rl_backend.environment.conversation:Conversation._behind",
        'if self.format.other_end == "replace":',
        'if self.format.other_end == "never":',
        ("test_another_end_than_the_templates",),
        "the model would see ends that its template never writes",
    ),
    Fault(
        "tokens-encoded-again",
        "rl_backend.environment.conversation:Conversation.add_turn",
        """
        self._end, self._ends_as_text = token_ids[-1] if stopped else None, stopped and not special
        self.token_ids = [*self.token_ids, *token_ids]
        """,
        """
        self._end, self._ends_as_text = token_ids[-1] if stopped else None, stopped and not special
        renderer = self.format.renderer
        self.token_ids = [*self.token_ids, *renderer.encode(renderer.decode(token_ids))]
        """,
        ("test_ids_that_encoding_would_change_stay",),
        "the next turn would follow other ids than were sampled",
    ),
    Fault(
        "changed-history-not-noticed",
        "rl_backend.environment.rendering:_same",
        "return whole == renderer.text(prompt) + answer + rest and token_ids[-len(behind) :] == behind",
        "return token_ids[-len(behind) :] == behind",
        ("test_a_question_behind_an_answer_is_what_the_whole_conversation_has",),
        "nobody would be told that a template drops thinking",
    ),
    Fault(
        "failed-episode-keeps-its-reward",
        "rl_backend.environment.groups:_judged",
        "without_reward(episode)",
        "episode",
        ("test_what_comes_of_a_failed_episode",),
        "zero would not be zero",
    ),
    Fault(
        "small-group-kept",
        "rl_backend.environment.groups:_judged",
        "if len(left) < options.fewest:",
        "if len(left) < 1:",
        ("test_what_comes_of_a_failed_episode",),
        "a baseline would be made of one episode",
    ),
    Fault(
        "limit-of-an-episode-ignored",
        "rl_backend.environment.playing:play_episode",
        "done, _ = await asyncio.wait([playing], timeout=limits.episode_seconds)",
        "done, _ = await asyncio.wait([playing])",
        ("test_an_episode_that_hangs_ends_at_its_limit",),
        "one environment that hangs would stop the run",
    ),
    Fault(
        "blocked-loop-unseen",
        "rl_backend.environment.groups:play_groups",
        "with watched_loop(options.on_blocked):",
        "with nullcontext():",
        ("test_a_player_that_blocks_is_named",),
        "one blocking step would stop all episodes, and nothing would say so",
    ),
    Fault(
        "blocker-without-a-name",
        "rl_backend.environment.user_code:Caller.__call__",
        "result = await _ended(asyncio.create_task(_awaited(function(*arguments)), name=task_name(function)), seconds)",
        "result = await _ended(asyncio.create_task(_awaited(function(*arguments))), seconds)",
        ("test_an_asynchronous_step_that_blocks_is_named",),
        "of many environments nobody would know which one blocks",
    ),
    Fault(
        "metrics-lost-at-a-limit",
        "rl_backend.environment.stepping:SteppedPlayer._play",
        "return ended_by(end, episode.metrics)",
        "return ended_by(end)",
        ("test_metrics_outlast_a_limit",),
        "curves would be of the episodes that ended well alone",
    ),
    Fault(
        "metrics-of-the-cookbook-lost-at-a-limit",
        "adapters.cookbook:CookbookPlayer.__call__",
        "return ended_by(end, metrics)",
        "return ended_by(end)",
        ("test_an_episode_that_a_limit_ends_has_the_metrics_of_its_turns",),
        "curves would be of the episodes that ended well alone",
    ),
    Fault(
        "late-environment-left-open",
        "rl_backend.environment.user_code:_ThreadCall._run",
        """
        if not given_up:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._settle, result, raised)
        elif raised is None:
            self._late()
        """,
        """
        if not given_up:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._settle, result, raised)
        """,
        ("test_an_environment_that_is_made_too_late_is_closed",),
        "containers would be left behind, which nobody knows of",
    ),
    Fault(
        "cancelled-threads-not-counted",
        "rl_backend.environment.user_code:Caller._in_thread",
        """
        self._leave(call)
        raise
        """,
        """
        call.give_up()
        raise
        """,
        ("test_threads_that_are_left_behind_are_counted_whoever_gave_them_up",),
        "threads of steps that hang would add up without a bound",
    ),
    Fault(
        "threads-of-an-environment-waited-for",
        "rl_backend.environment.playing:run_episodes",
        "loop.set_default_executor(_DaemonThreads())",
        "pass",
        ("test_calls_that_hang_hold_up_no_others",),
        "one request that hangs would hold the whole batch",
    ),
    Fault(
        "close-left-out-after-a-cancellation",
        "rl_backend.environment.stepping:SteppedPlayer._close",
        "await asyncio.shield(closing)",
        "await closing",
        ("test_closing_outlasts_those_who_cancel_the_player_again",),
        "Ctrl-C would leave sandboxes behind",
    ),
    Fault(
        "step-without-limit",
        "rl_backend.environment.stepping:SteppedPlayer._steps",
        "step = await self._caller(environment.step, turn, seconds=seconds)",
        "step = await self._caller(environment.step, turn)",
        ("test_what_an_environment_does_wrong_ends_its_episode_and_closes_it",),
        "a step that hangs would hold its episode for ever",
    ),
    Fault(
        "calls-beyond-the-limit-run",
        "rl_backend.environment.tools:run_calls",
        "if most is not None and index >= most:",
        "if most is not None and index > most:",
        ("test_calls_beyond_the_limit_are_not_run_and_end_the_episode",),
        "a limit of calls would be one too high",
    ),
    Fault(
        "tools-in-the-runs-process",
        "rl_backend.environment.tools:ToolPool.__init__",
        'processes=where == "processes",',
        "processes=False,",
        ("test_every_attempt_is_answered",),
        "code that a model wrote could reach the run's memory",
    ),
    Fault(
        "endpoint-open-to-everyone",
        "adapters.verifiers.endpoint:TokenEndpoint._session",
        'found = self._sessions.get(request.headers.get(TOKEN_HEADER, ""))',
        "found = next(iter(self._sessions.values()), None)",
        ("test_nobody_without_the_token_of_an_episode_is_answered",),
        "any process of the machine could write into an episode",
    ),
    Fault(
        "masked-turns-of-cookbook-trained",
        "adapters.cookbook:CookbookPlayer._turns",
        "if step.metrics.get(MASKED):",
        "if step.metrics.get(MASKED, 0) > 1:",
        ("test_observations_that_continue_are_one_segment_and_masked_turns_are_not_trained",),
        "turns that the environment takes out would be trained",
    ),
    Fault(
        "every-environment-has-a-lock-of-its-own",
        "rl_backend.environment.reward_environment:answering",
        "return AnswerEnvironment(row, scorer, scoring, tokenizer, data or DataConfig(), tools)",
        "return AnswerEnvironment(row, scorer, threading.Lock(), tokenizer, data or DataConfig(), tools)",
        ("test_a_plain_function_is_called_by_one_episode_after_the_other_unless_it_has_workers",),
        "a reward function without locks would be called by several threads at once",
    ),
    Fault(
        "cancelled-while-closing-goes-on",
        "rl_backend.environment.stepping:SteppedPlayer._close",
        "raise cancelled",
        'return ""',
        ("test_an_episode_that_is_cancelled_while_it_closes_is_cancelled",),
        "a cancellation would be lost",
    ),
    Fault(
        "infinite-rewards-pass",
        "rl_backend.environment.playing:_played",
        "if not math.isfinite(result.reward):",
        "if math.isnan(result.reward):",
        ("test_a_player_that_returns_no_result_fails",),
        "an infinite reward would make its group's advantages NaN",
    ),
    Fault(
        "end-mark-of-llama-4-stays",
        "rl_backend.environment.tool_call_parsers:parse_pythonic",
        '("<|tool_call_end|>", "<|python_end|>")',
        '("<|tool_call_end|>",)',
        ("test_calls_are_read_or_said_to_be_broken",),
        "calls that Llama 4 writes would be unreadable",
    ),
    Fault(
        "sampled-tokens-limit-replaces-the-others",
        "rl_backend.environment.sampler:RecordingSampler._room",
        "tokens = min(tokens, left)",
        "tokens = left",
        ("test_a_turn_has_no_more_tokens_than_its_own_limit",),
        "more tokens would be asked for than the context holds",
    ),
    Fault(
        "exit-of-a-call-is-none",
        "rl_backend.environment.user_code:outcome",
        'return None, RuntimeError(f"it ended its thread by {type(error).__name__}: {error}")',
        "return None, None",
        ("test_errors_that_futures_and_tasks_take_for_something_else",),
        "a tool that ended its thread would seem to have returned nothing",
    ),
    Fault(
        "interrupted-episodes-have-ten-seconds",
        "rl_backend.environment.playing:run_episodes",
        "_end_tasks(loop, [task for task in main if not task.done()], None)",
        "_end_tasks(loop, [task for task in main if not task.done()], closing_seconds)",
        ("test_an_interruption_waits_until_episodes_have_closed",),
        "what an episode opened would be left behind after a Ctrl-C",
    ),
    Fault(
        "tool-calls-limited-turn-by-turn",
        "rl_backend.environment.stepping:SteppedPlayer._completed",
        "calls = await run_calls(parsed.attempts, episode.tools, self._caller, most=left, seconds=seconds)",
        "calls = await run_calls(parsed.attempts, episode.tools, self._caller, most=self._most_calls, seconds=seconds)",
        ("test_calls_beyond_the_limit_are_not_run_and_end_the_episode",),
        "an episode could call tools without end",
    ),
    Fault(
        "histories-that-were-left-are-forgotten",
        "rl_backend.environment.training_segments:EpisodeRecord.add",
        "found = next((each for each in reversed(self._segments) if prompt[: len(each.token_ids)] == each.token_ids), None)",
        "found = next((each for each in self._segments[-1:] if prompt[: len(each.token_ids)] == each.token_ids), None)",
        ("test_turns_of_two_conversations_extend_the_segment_of_their_own",),
        "tokens of a conversation would be trained in sequences of their own",
    ),
    Fault(
        "groups-of-the-fewest-are-dropped",
        "rl_backend.environment.groups:_judged",
        "len(left) < options.fewest",
        "len(left) <= options.fewest",
        ("test_what_comes_of_a_failed_episode",),
        "groups that are large enough would be lost",
    ),
    Fault(
        "tag-of-llama-3-stays",
        "rl_backend.environment.tool_call_parsers:parse_json",
        'spoken.strip().removeprefix("<|python_tag|>").strip()',
        "spoken.strip()",
        ("test_calls_are_read_or_said_to_be_broken",),
        "calls that Llama 3 writes behind its tag would be no calls",
    ),
    Fault(
        "scores-begin-one-after-the-other",
        "rl_backend.environment.reward_environment:AnswerEnvironment.step",
        """
        asked = self._scorer.begin([call])
        with self._scoring:
            (score,) = asked.result()
        """,
        """
        with self._scoring:
            (score,) = self._scorer.begin([call]).result()
        """,
        ("test_a_plain_function_is_called_by_one_episode_after_the_other_unless_it_has_workers",),
        "workers of a reward function would wait for each other",
    ),
]
