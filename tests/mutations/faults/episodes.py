"""Training on episodes of many turns."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "episode-fields-not-shifted",
        "rl_backend.algorithm.sequences:_token_fields",
        "*values[1:],",
        "*values[:-1],",
        ("test_every_sampled_token_is_trained_once",),
        "each token would be trained at the position behind the one that predicts it",
    ),
    Fault(
        "branched-episode-counted-for-each-sequence",
        "rl_backend.algorithm.sequences:episode_sequences",
        "count / sum(counts),",
        "1.0,",
        ("test_a_branched_episode_is_not_counted_twice",),
        "an episode would weigh as much as it has branches",
    ),
    Fault(
        "batch-size-counts-sequences-of-episodes",
        "rl_backend.data.micro_batches:_share",
        "return 1 if share is None else share.item()",
        "return 1",
        ("test_a_branched_episode_is_not_counted_twice",),
        "sequence means would be divided by sequences in place of episodes",
    ),
    Fault(
        "gae-ends-at-a-branch",
        "rl_backend.algorithm.sequences:with_episode_gae",
        "lengths, gamma,",
        "packed.seq_lens, gamma,",
        ("test_gae_goes_on_over_turns_branches_and_cuts",),
        "rewards after a branch would not reach the turns before it",
    ),
    Fault(
        "cut-episodes-worth-nothing",
        "rl_backend.algorithm.critic:gae_advantages",
        "next_values[acting, [counts[row] - 1 for row in acting]] = final_values.to(next_values)[acting]",
        "pass",
        ("test_gae_goes_on_over_turns_branches_and_cuts",),
        "a limit of turns would look like a failure to the critic",
    ),
    Fault(
        "ended-episodes-bootstrapped",
        "rl_backend.algorithm.sequences:final_values",
        "values[index][-1] * sequences[index].sequence_fields[CUT].to(values[index])",
        "values[index][-1]",
        ("test_gae_goes_on_over_turns_branches_and_cuts",),
        "an episode that has ended would be worth what the critic expects behind its end",
    ),
    Fault(
        "groups-of-sequences-in-place-of-episodes",
        "rl_backend.algorithm.sequences:with_advantages",
        "[int(each.sequence_fields[EPISODE]) for each in sequences] if played else range(len(rewards))",
        "range(len(sequences))",
        ("test_advantages_compare_episodes",),
        "sequences would get the advantages of other episodes",
    ),
    Fault(
        "reward-of-a-left-out-turn-lost",
        "rl_backend.algorithm.sequences:_at_sampled_tokens",
        "if reward:",
        "if reward and segment.sampled[place]:",
        ("test_the_reward_of_a_turn_that_is_left_out_goes_to_the_turn_before",),
        "a penalty for a turn that could not be parsed would have no effect",
    ),
    Fault(
        "groups-of-episodes-mixed-up",
        "actors.collect.episodes:EpisodeDraft.finish",
        "groups=[number for number, group in enumerate(groups) for _ in group],",
        "groups=[number for group in groups for number, _ in enumerate(group)],",
        ("test_a_batch_has_groups_of_episodes_in_the_order_of_their_rows",),
        "episodes of different tasks would be compared with each other",
    ),
    Fault(
        "episodes-of-every-batch-alike",
        "actors.collect.episodes:group_tasks",
        "index, sample,",
        "index, 0,",
        ("test_a_batch_has_groups_of_episodes_in_the_order_of_their_rows",),
        "all episodes of a group would be the same",
    ),
    Fault(
        "environments-left-open",
        "actors.collect.episodes:EpisodeStream.__exit__",
        "loop.call_soon_threadsafe(task.cancel)",
        "pass",
        ("test_a_run_that_ends_closes_its_environments",),
        "a run that is interrupted would leave what environments have opened",
    ),
    Fault(
        "transcripts-mark-what-was-given",
        "actors.collect.transcripts:_pieces",
        "runs = groupby(zip(segment.token_ids, segment.sampled, strict=True), key=lambda pair: bool(pair[1]))",
        "runs = groupby(zip(segment.token_ids, segment.sampled, strict=True), key=lambda pair: not pair[1])",
        ("test_a_transcript_says_what_was_trained",),
        "the report would mark prompts as trained",
    ),
    Fault(
        "share-of-an-episode-by-all-tokens",
        "rl_backend.algorithm.sequences:episode_sequences",
        "torch.tensor(count / sum(counts), dtype=torch.float64)",
        """
        torch.tensor(
            len(segment.token_ids) / sum(len(each.token_ids) for each in segments), dtype=torch.float64
        )
        """,
        ("test_the_share_of_a_sequence_is_that_of_the_sampled_tokens_of_its_episode",),
        "turns behind a long prompt would weigh more than others of their episode",
    ),
    Fault(
        "transcripts-without-special-tokens",
        "actors.collect.transcripts:_turn",
        "decode(turn.token_ids, tokenizer)",
        "decode(turn.token_ids, tokenizer, special=False)",
        ("test_a_transcript_shows_special_tokens_wherever_they_were_sampled_or_given",),
        "a transcript would hide what ended a turn",
    ),
    Fault(
        "every-estimate-needs-the-order-of-time",
        "rl_backend.algorithm.sequences:episode_lengths",
        "if in_order and not bool(sequence.sequence_fields[IN_ORDER]):",
        "if not bool(sequence.sequence_fields[IN_ORDER]):",
        ("test_an_episode_that_came_back_to_an_earlier_history_is_refused_where_the_order_of_time_counts",),
        "one episode that comes back to a history would end runs of reinforce_plus_plus_baseline for nothing",
    ),
    Fault(
        "gae-without-the-order-of-time",
        "rl_backend.algorithm.sequences:episode_lengths",
        "if in_order and not bool(sequence.sequence_fields[IN_ORDER]):",
        "if False:",
        ("test_an_episode_that_came_back_to_an_earlier_history_is_refused_where_the_order_of_time_counts",),
        "values of later turns would be taken for those of earlier ones",
    ),
    Fault(
        "what-a-score-raises-ends-the-program",
        "rl_backend.environment.groups:_scores",
        "except Exception as error:",
        "except ZeroDivisionError as error:",
        ("test_a_score_is_of_those_that_did_not_fail_each_its_own",),
        "a mistake in a score would be a bare KeyError, which does not say whose it is",
    ),
]
