"""Rewards: weights of several functions, limits of time, what becomes of calls that fail, and their metrics."""

from __future__ import annotations

from tests.mutations.fault import Fault

_LIMIT = "test_a_call_that_takes_too_long_fails_and_the_others_go_on"

FAULTS = [
    Fault(
        "weights-of-rewards-ignored",
        "rl_backend.data.rewards.scorer:RewardScorer._combined",
        "value += reward.weight * result.score",
        "value += result.score",
        ("test_several_functions_are_weighted_and_each_is_measured",),
        "a penalty would be a reward",
    ),
    Fault(
        "rewards-averaged-over-functions",
        "rl_backend.data.rewards.scorer:RewardScorer._combined",
        "value, numbers,",
        "value / len(results), numbers,",
        ("test_several_functions_are_weighted_and_each_is_measured",),
        "a second function would halve the weight of the first",
    ),
    Fault(
        "limit-of-threads-ignored",
        "rl_backend.data.rewards.worker_pool:WorkerPool.call",
        "answer = await within_limit(asyncio.wrap_future(worker.call(index, arguments)), self._limit)",
        "answer = await within_limit(asyncio.wrap_future(worker.call(index, arguments)), None)",
        (f"{_LIMIT}[in a thread]",),
        "one call that hangs would stop the run",
    ),
    Fault(
        "limit-of-asynchronous-calls-ignored",
        "rl_backend.data.rewards.scorer:RewardScorer._call_async",
        "return await within_limit(asyncio.ensure_future(guarded()), self._limit)",
        "return await within_limit(asyncio.ensure_future(guarded()), None)",
        (f"{_LIMIT}[asynchronous]",),
        "one judge that does not answer would stop the run",
    ),
    Fault(
        "limit-counts-the-wait-for-a-worker",
        "rl_backend.data.rewards.scorer:RewardScorer._attempt",
        "opened.pool.call(self._pool_of[index], reward.keywords(calls))",
        "asyncio.wait_for(opened.pool.call(self._pool_of[index], reward.keywords(calls)), self._limit)",
        ("test_a_call_waits_for_its_turn_without_losing_time",),
        "the last responses of a batch would fail, however quick the function is",
    ),
    Fault(
        "equal-functions-sent-once-to-a-process",
        "rl_backend.data.rewards.worker_pool:_Process.__init__",
        "list(specs)",
        "list(dict.fromkeys(specs))",
        ("test_a_function_under_two_names_is_called_for_each",),
        "a function that has two names would take the place of another, whose calls would end the process",
    ),
    Fault(
        "cancelled-rewards-get-one-turn-to-end",
        "rl_backend.data.rewards.worker_pool:EventLoop.close.end",
        "asyncio.wait(tasks, timeout=_END_SECONDS)",
        "asyncio.sleep(0)",
        ("test_an_event_loop_runs_what_it_is_given_and_cancels_the_rest_when_it_ends",),
        "a judge that closes its session when it is cancelled would be cut off",
    ),
    Fault(
        "threads-left-behind-without-end",
        "rl_backend.data.rewards.worker_pool:WorkerPool._abandon",
        "if len(self._left_behind) > MOST_LEFT_BEHIND:",
        "if len(self._left_behind) > 1000 * MOST_LEFT_BEHIND:",
        ("test_calls_that_are_left_behind_without_end_are_an_error",),
        "a function that hangs would fill the memory with threads",
    ),
    Fault(
        "failures-never-stop-a-run",
        "rl_backend.data.rewards.scorer:RewardScorer._judged_one",
        'if isinstance(found, _Failure) and self.on_failure == "stop":',
        'if isinstance(found, _Failure) and self.on_failure == "never":',
        ("test_a_call_that_fails_stops_the_run_and_is_shown",),
        "a wrong function would train the policy on zeros",
    ),
    Fault(
        "zero-drops-the-group",
        "rl_backend.data.rewards.scorer:RewardScorer._combined",
        'return Score(value, numbers, info, failures, dropped=bool(failures) and self.on_failure == "drop")',
        "return Score(value, numbers, info, failures, dropped=bool(failures))",
        ("test_a_call_that_fails_counts_zero_or_drops[zero-plain]",),
        "on_reward_failure=zero would shrink the batch",
    ),
    Fault(
        "dropped-groups-are-trained-on",
        "actors.collect.prompts:PromptDraft.add",
        """
        self._dropped += 1
        continue
        """,
        "self._dropped += 1",
        ("test_a_group_whose_reward_failed_leaves_the_batch",),
        "a failed call would count as a reward of 0 in a group that is said to be dropped",
    ),
    Fault(
        "failures-of-dropped-groups-not-counted",
        "actors.collect.prompts:PromptDraft.add",
        "self._failures += [failure for score in group.scores for failure in score.failures]",
        "pass",
        ("test_a_group_whose_reward_failed_leaves_the_batch",),
        "a run whose reward function fails would report no failure",
    ),
    Fault(
        "numbers-averaged-over-responses-without-them",
        "rl_backend.data.rewards.function:reward_metrics",
        "return {name: statistics.fmean(each) for name, each in sorted(values.items())}",
        "return {name: sum(each) / len(scores) for name, each in sorted(values.items())}",
        ("test_what_a_function_returns_beside_its_score_is_kept",),
        "metrics that only some responses have would be too small",
    ),
    Fault(
        "concurrency-ignored",
        "rl_backend.data.rewards.scorer:RewardScorer.__init__",
        "self._concurrency = concurrency or _ASYNC_AT_ONCE",
        "self._concurrency = _ASYNC_AT_ONCE",
        ("test_asynchronous_functions_wait_together",),
        "a judge would get more requests at once than it takes",
    ),
    Fault(
        "what-a-function-caught-is-lost",
        "rl_backend.data.rewards.scorer:RewardScorer._call_here",
        "self._check()",
        "pass",
        ("test_what_a_function_caught_is_raised_after_it",),
        "a reward function that catches everything would survive SIGTERM",
    ),
    Fault(
        "prompt-given-in-processes-alone",
        "rl_backend.data.rewards.scorer:RewardScorer._call_here",
        "result = self.rewards[index].function(**self.rewards[index].keywords(calls))",
        "result = self.rewards[index].function(**calls[0].arguments)",
        ("test_a_function_that_asks_for_the_prompt_is_given_it",),
        "a judge would be refused its prompt, or fail, once --reward-workers is left out",
    ),
    Fault(
        "reward-functions-share-their-arguments",
        "rl_backend.data.rewards.function:LoadedReward.keywords",
        'return deepcopy(call.arguments | ({"prompt": call.prompt} if self.takes_prompt else {}))',
        'return call.arguments | ({"prompt": call.prompt} if self.takes_prompt else {})',
        ("test_a_function_that_changes_its_arguments_changes_its_own",),
        "a function that changes its ground truth would change it for the row's other samples",
    ),
    Fault(
        "no-judgement-counts-zero",
        "rl_backend.data.rewards.scorer:RewardScorer._judged",
        "None if each is None else self._judged_one(call, index, each)",
        "self._judged_one(call, index, 0.0 if each is None else each)",
        ("test_trls_functions_that_judge_some_responses_leave_the_others_alone",),
        "a function of TRL that leaves a response to others would pull down its mean, and hide that nobody judged it",
    ),
    Fault(
        "completions-are-always-texts",
        "rl_backend.data.rewards.function:LoadedReward._lists",
        'call.solution_str if isinstance(call.prompt, str) else [{"role": "assistant", "content": call.solution_str}]',
        "call.solution_str",
        ("test_a_function_of_trl_is_called_as_trl_calls_it",),
        "functions of TRL that read completion[0]['content'] would fail on chat data",
    ),
    Fault(
        "rewards-are-rounded-to-float32",
        "rl_backend.algorithm.advantages:finite_rewards",
        "torch.as_tensor(rewards, dtype=torch.float64)",
        "torch.as_tensor(rewards)",
        ("test_rewards_that_float32_cannot_tell_apart_have_their_advantages",),
        "large rewards that differ by little would have no advantage",
    ),
    Fault(
        "rewards-of-turns-are-rounded-to-float32",
        "rl_backend.algorithm.sequences:_token_fields",
        "torch.tensor([*rewards[1:], 0], dtype=torch.float64)",
        "torch.tensor([*rewards[1:], 0], dtype=torch.float32)",
        ("test_a_turns_reward_and_the_episodes_add_up_exactly",),
        "large rewards of turns that differ by little would have no advantage",
    ),
    Fault(
        "decoding-cleans-up",
        "rl_backend.data.chat_template:decode",
        "text: str = tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)",
        "text: str = tokenizer.decode(list(token_ids), skip_special_tokens=not special)",
        ("test_responses_are_judged_and_logged_as_they_were_sampled",),
        "reward functions would judge a text that was not sampled",
    ),
    Fault(
        "beat-limit-forgets-the-calls-own-time",
        "rl_backend.data.rewards.scorer:RewardScorer._require_beat",
        "self._limit + _SILENT_SECONDS",
        "_SILENT_SECONDS",
        ("test_an_asynchronous_function_may_block_its_loop_for_as_long_as_a_call_may_take",),
        "a call that blocks its event loop within its limit of time would end the run",
    ),
    Fault(
        "ended-process-goes-back-to-the-pool",
        "rl_backend.data.rewards.worker_pool:WorkerPool.call",
        """
        if worker.usable:
            self._idle.append(worker)
        else:
            self._abandon(worker)
        """,
        "self._idle.append(worker)",
        (
            "test_a_process_that_ends_leaves_neither_a_thread_nor_a_socket",
            "test_what_fails_in_a_process_is_said_and_another_one_takes_its_place",
        ),
        "calls after one that ended its process would fail too",
    ),
    Fault(
        "raised-error-has-no-cause",
        "rl_backend.data.rewards.scorer:_failure",
        'return _Failure(f"raised {what_it_raised(raised.error)}", raised.error)',
        'return _Failure(f"raised {what_it_raised(raised.error)}")',
        ("test_a_call_that_fails_stops_the_run_and_is_shown",),
        "nobody would see where in a reward function it failed",
    ),
    Fault(
        "calls-that-still-run-are-made-again",
        "rl_backend.data.rewards.scorer:RewardScorer._outcome",
        "if not isinstance(result, _Failure) or not result.again:",
        "if not isinstance(result, _Failure):",
        ("test_a_call_that_took_too_long_is_made_again_where_it_has_ended",),
        "every call that hangs would leave two threads behind, and 32 of them would end the run",
    ),
]
