"""Faults that readers of the second and third wave put in and no test noticed then."""

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
        "rl_backend.parallel.shards:covers_once",
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
        "rl_backend.lab.parity.compare:package_versions",
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
    Fault(
        "silent-address-raises",
        "actors.cluster.session:_answers",
        "OSError",
        "ConnectionError",
        ("test_a_ray_is_of_this_machine_alone_where_its_port_does_not_answer_at_the_address_in_the_network",),
        "a network that drops packets would make it impossible to join a Ray of this machine",
    ),
    Fault(
        "packed-experts-said-to-be-bfloat16",
        "rl_backend.checkpoint.hf_reader:HFReader._unpack_experts",
        "StoredTensor(part.shape, stored.dtype)",
        "StoredTensor(part.shape, torch.bfloat16)",
        ("test_packed_experts_are_read_one_by_one",),
        "a model of integers would pass the check of its weights",
    ),
    Fault(
        "first-temperatures-for-every-adapter",
        "rl_backend.primitive.log_prob:next_token_log_probs",
        "temperature[rows] if isinstance(temperature, Tensor) else temperature",
        "temperature",
        ("test_rows_of_adapters_do_not_depend_on_each_other",),
        "log-probs of an adapter's tokens would be divided by the temperatures of another's",
    ),
    Fault(
        "template-end-zero-dropped",
        "actors.collect.inputs:load_episode_inputs",
        "() if of_answers is None else (of_answers,)",
        "(of_answers,) if of_answers else ()",
        ("test_turns_of_players_end",),
        "turns would not end at a special token of id 0",
    ),
    Fault(
        "windows-default-first-layer",
        "rl_backend.model.families.reading:windows_by_layer_type",
        'config.get("max_window_layers", 28)',
        'config.get("max_window_layers", layers)',
        ("test_windows_of_qwen_are_switched_on_and_begin_at_a_layer",),
        "layers behind the 28th would see all tokens",
    ),
    Fault(
        "read-object-permission-errors-only",
        "rl_backend.lab.report.run_data:_read_object",
        "(OSError, ValueError, RecursionError)",
        "(PermissionError, ValueError, RecursionError)",
        ("test_a_file_that_cannot_be_read_is_a_problem_and_the_rest_is_shown",),
        "a file that cannot be read would leave a run without a report",
    ),
    Fault(
        "mtp-last-norm-default-eps",
        "rl_backend.model.decoder:MultiTokenPrediction.__init__",
        "self.norm = norm.build(hidden_size)",
        "self.norm = NormSpec(1e-6).build(hidden_size)",
        ("test_all_three_norms_are_those_of_the_model",),
        "the draft's last norm would have another form or epsilon than the model's",
    ),
    Fault(
        "expert-draws-of-this-rank",
        "rl_backend.parallel.expert:AllToAllDispatcher.__call__",
        "facts[:, counts.shape[1] :].tolist()",
        "sent_facts[:, counts.shape[1] :].tolist()",
        ("test_rows_of_an_adapter_keep_the_draw_of_the_rank_that_sent_them",),
        "inputs of an adapter would be dropped by another rank's draw",
    ),
    Fault(
        "csv-drops-rows-of-empty-cells",
        "rl_backend.data.rows:_csv.places",
        "if cells:",
        "if any(cells):",
        ("test_a_line_of_empty_cells_is_a_row_and_an_empty_line_is_not",),
        "rows behind one of empty cells would be counted one less",
    ),
    Fault(
        "stage-row-names-first-over",
        "rl_backend.lab.parity.run:_stage_row",
        "largest.name",
        "(stage.first_over or largest).name",
        ("test_a_stage_names_what_is_farthest_over_its_tolerance_beside_that_difference",),
        "a table would give one tensor's difference the name of another",
    ),
    Fault(
        "episode-imports-from-here-too-late",
        "rl_backend.cli.episode:run",
        """
        import_from_here()
        config = parse_config(config_type("episodes"), "An episode played before training.", arguments.options)
        """,
        """
        config = parse_config(config_type("episodes"), "An episode played before training.", arguments.options)
        import_from_here()
        """,
        ("test_an_episode_is_played_with_modules_of_the_working_directory",),
        "a plug-in of the working directory would be found by the run and not by this command",
    ),
    Fault(
        "mapped-segment-of-another-user-raises",
        "actors.sync.adapter_push:_mapped",
        "(WeightSyncError, OSError, RuntimeError)",
        "(WeightSyncError, OSError)",
        ("test_a_segment_that_this_rank_may_not_open_is_no_error_of_one_rank",),
        "one rank's error would leave the others waiting",
    ),
    Fault(
        "rank-interface-of-node-address",
        "actors.train.worker:TrainWorker.start",
        "use_interface(rendezvous.host)",
        "use_interface(node_address())",
        ("test_a_rank_computes_with_its_cores_and_knows_its_place",),
        "ranks of one machine would talk through its network card",
    ),
    Fault(
        "bridge-gathers-first-chunk-again",
        "rl_backend.runtime.bridge.engine.handle:BridgeHandle.step",
        "gather_again(self.chunks)",
        "gather_again(self.chunks[:1])",
        ("test_a_step_waits_before_it_writes_and_gathers_only_what_was_written",),
        "the second stage of a rank would go on with weights of before the step",
    ),
    Fault(
        "activations-stage-without-chunk",
        "rl_backend.runtime.bridge.engine.forward_backward:record_activations",
        "stage = chunk * groups.parallel.pp + pp_group.rank()",
        "stage = pp_group.rank()",
        ("test_outputs_of_all_stages_of_a_rank_are_recorded",),
        "a comparison would miss the layers of a rank's first stage",
    ),
]
