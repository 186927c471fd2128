"""Faults that readers of the second wave put in and no test noticed then."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "hub-revision-ignored",
        "rl_backend.data.hub:_downloaded",
        """
        snapshot_download(
            name.repository, revision=name.revision, allow_patterns=_OF_A_MODEL, ignore_patterns=_NOT_OF_A_MODEL
        )
        """,
        "snapshot_download(name.repository, allow_patterns=_OF_A_MODEL, ignore_patterns=_NOT_OF_A_MODEL)",
        ("test_a_model_is_downloaded_once_at_the_revision_that_is_named",),
        "another revision would be trained than the one that was named",
    ),
    Fault(
        "gate-keeps-handshake-timeout",
        "actors.cluster.tcp_proxy:_join",
        """
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        """,
        """
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        """,
        ("test_a_connection_may_be_silent_for_longer_than_a_handshake",),
        "ranks that wait for each other for long would lose their store",
    ),
    Fault(
        "check-takes-eval",
        "rl_backend.cli.check:add_arguments",
        '[name for name in EXAMPLES if name != "eval"]',
        "list(EXAMPLES)",
        ("test_an_evaluation_is_no_run_to_check",),
        "a check would go on with options that no run has",
    ),
    Fault(
        "episode-numbers-from-the-first",
        "rl_backend.algorithm.sequences:with_advantages",
        "int(each.sequence_fields[EPISODE])",
        "int(each.sequence_fields[EPISODE]) - int(sequences[0].sequence_fields[EPISODE])",
        ("test_an_episode_without_sequences_leaves_the_others_their_advantages",),
        "episodes would be trained with the advantages of others",
    ),
    Fault(
        "measured-pass-default-stages",
        "rl_backend.pipeline.measured:_read_pass",
        """
        make_schedule(
            facts["schedule"], len(spans), facts["micro_batches"], stages_per_rank=facts["stages"] // len(spans)
        )
        """,
        'make_schedule(facts["schedule"], len(spans), facts["micro_batches"])',
        ("test_a_pass_has_as_many_stages_on_a_rank_as_it_says",),
        "passes of other stages than the default would be left out of a comparison",
    ),
    Fault(
        "shifted-box-covers-dimension",
        "rl_backend.checkpoint.stored_metadata:covers_once",
        "offsets[dimension] != 0 or sizes[dimension] != size",
        "sizes[dimension] != size",
        ("test_equal_sums_of_sizes_do_not_make_a_cover",),
        "damaged metadata of a checkpoint would be taken",
    ),
    Fault(
        "rank-errors-not-in-log",
        "rl_backend.lab.parity.run:start_rank",
        "subprocess.STDOUT",
        "subprocess.DEVNULL",
        ("test_what_a_rank_says_as_it_fails_is_in_its_log",),
        "a comparison that failed would not say why",
    ),
    Fault(
        "sigterm-repeated-since-the-first",
        "actors.cluster.session:_terminate",
        "_received[-1]",
        "_received[0]",
        ("test_a_second_sigterm_much_later_is_raised_again",),
        "the second SIGTERM, sent to process and group, would end the clean-up of a run",
    ),
    Fault(
        "history-falls-back-on-no-changes",
        "rl_backend.environment.rendering:check_history",
        "behind_calls if behind_calls is not None else behind_text",
        "behind_calls or behind_text",
        ("test_only_turns_with_calls_count_where_a_template_writes_calls",),
        "a run would be refused for turns that its template never writes",
    ),
    Fault(
        "dotted-packages-without-version",
        "rl_backend.lab.parity.record:package_versions",
        '{name.replace("-", "_"), name.replace("-", ".")}',
        '{name.replace("-", "_")}',
        ("test_versions_are_of_packages_that_are_imported_under_either_name",),
        "a report would not say which Megatron was compared",
    ),
    Fault(
        "schedule-costs-per-one-stage",
        "rl_backend.cli.schedule:_simulated",
        "arguments.vpp or SCHEDULES[name].stages_per_rank or 2",
        "arguments.vpp or SCHEDULES[name].stages_per_rank or 1",
        ("test_costs_and_transfers_are_those_given",),
        "a schedule would be said to take twice as long",
    ),
]
