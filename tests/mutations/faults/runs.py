"""Runs and their resumption, parity and plans."""

from __future__ import annotations

from tests.mutations.fault import Fault

_REFUSED = "test_grpo_options_that_cannot_work_are_refused"

FAULTS = [
    Fault(
        "workers-at-rays-own-priority",
        "actors.cluster.session:init_local_ray",
        'os.environ.setdefault(ray_constants.RAY_WORKER_NICENESS, "0")',
        "pass",
        ("test_ray_of_one_machine_is_started_with_its_own_switch",),
        "a run would get what other programs of the machine leave",
    ),
    Fault(
        "slower-dtype-recommended",
        "actors.checks.machine:faster_dtype",
        'return [f"--dtype bfloat16 multiplies {speedup:.1f}x as fast here"] if speedup > _CLEARLY else []',
        'return [f"--dtype bfloat16 multiplies {speedup:.1f}x as fast here"]',
        ("test_a_processor_that_multiplies_bfloat16_faster_is_told_of_where_the_dtype_is_left_open",),
        "users of processors without the instruction would train slower",
    ),
    Fault(
        "folder-locked-after-ray-has-started",
        "actors.run.run:Run.__enter__",
        "lock = stack.enter_context(RunLock(config.run_dir))",
        """
        stack.enter_context(open_session(config, self._phases))
        lock = stack.enter_context(RunLock(config.run_dir))
        """,
        ("test_the_folder_is_tried_and_locked_before_anything_is_started",),
        "a folder in use would be noticed when ranks and engines are up",
    ),
    Fault(
        "logs-not-cut-back",
        "actors.folder.resume:LogFile.__init__",
        "self._file.truncate(self._size)",
        "pass",
        ("test_a_run_that_was_killed_goes_on_after_its_newest_checkpoint_and_logs_every_step_once",),
        "steps would be in the metrics twice",
    ),
    Fault(
        "changed-lines-not-noticed",
        "actors.folder.resume:require_unchanged",
        "if found == facts:",
        "if True:",
        ("test_logs_that_are_damaged_or_shorter_are_refused",),
        "a resumed run would have steps that nobody has taken",
    ),
    Fault(
        "files-named-before-they-are-on-the-disk",
        "rl_backend.checkpoint.durable_commit:write_synced",
        "os.fsync(stream.fileno())",
        "pass",
        ("test_files_that_a_resume_reads_are_on_the_disk_before_they_get_their_names",),
        "a power cut would leave an empty run.json",
    ),
    Fault(
        "a-run-that-has-finished-goes-on",
        "actors.folder.resume:find_start",
        "finished == config.steps == checkpoint.step",
        "False",
        ("test_a_run_that_has_finished_goes_on_only_with_more_steps",),
        "a finished run would be opened again for nothing",
    ),
    Fault(
        "a-finished-run-without-its-last-checkpoint-does-not-go-on",
        "actors.folder.resume:find_start",
        "finished == config.steps == checkpoint.step",
        "finished == config.steps",
        ("test_a_finished_run_whose_later_checkpoints_were_removed_goes_on_from_the_newest_that_is_left",),
        "nothing would be left to do, and the last weights are gone",
    ),
    Fault(
        "earlier-checkpoints-in-their-own-folder",
        "actors.folder.resume:find_start",
        "if newest is not None and newest > checkpoint.step:",
        "if False:",
        ("test_an_earlier_checkpoint_goes_on_in_a_new_folder_and_leaves_the_later_ones_alone",),
        "later checkpoints would be mixed with those of another run",
    ),
    Fault(
        "options-not-compared",
        "actors.folder.identity:require_same_run",
        "options.get(option) != here.get(option)",
        "False",
        ("test_options_that_decide_what_is_learned_may_not_change",),
        "a run would go on as another",
    ),
    Fault(
        "contents-not-compared",
        "actors.folder.identity:require_same_run",
        "if saved.contents.get(option) != found:",
        "if False:",
        ("test_other_contents_of_the_files_of_a_run_are_refused",),
        "a run would go on with other data",
    ),
    Fault(
        "no-checkpoint-of-a-run-that-is-stopped",
        "actors.run.saver:RunSaver.end",
        "if self._saved != step:",
        "if self._saved is None:",
        ("test_a_run_that_is_stopped_continues_as_if_it_had_not_been",),
        "the step that a run finishes after SIGTERM would be lost",
    ),
    Fault(
        "no-save-after-the-last-step",
        "actors.run.saver:RunSaver._is_due",
        "return wanted or step % every == 0 or step == self._config.steps",
        "return wanted or step % every == 0",
        (
            "test_saves_that_training_waits_for_are_committed_in_their_step_and_errors_are_raised",
            "test_a_save_in_the_background_is_committed_after_the_step_in_which_its_last_model_is_written",
        ),
        "the last steps of a run would be lost",
    ),
    Fault(
        "a-commit-waits-for-the-slowest-save",
        "actors.run.saver:RunSaver._is_being_written",
        "return any(model.group.checkpoint_is_pending(model.handle) for model in self._models.values())",
        "return all(model.group.checkpoint_is_pending(model.handle) for model in self._models.values())",
        ("test_a_save_in_the_background_is_committed_after_the_step_in_which_its_last_model_is_written",),
        "training would wait for the slowest model's save",
    ),
    Fault(
        "drawn-samples-not-kept",
        "actors.folder.checkpoints:Progress.saved",
        "save_drawn(position.drawn, draft)",
        "save_drawn([], draft)",
        ("test_samples_drawn_ahead_are_in_the_checkpoint_with_the_place_in_the_stream",),
        "a resumed run would draw other samples",
    ),
    Fault(
        "a-lock-that-two-runs-share",
        "actors.folder.lock:_lock",
        "return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "return fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        ("test_one_run_at_a_time_writes_to_a_folder",),
        "two runs would write to one folder",
    ),
    Fault(
        "parity-takes-any-difference",
        "rl_backend.lab.parity.compare:Difference.over",
        "return self.amount > self.tolerance",
        "return self.amount > 100 * self.tolerance",
        ("test_the_first_place_where_two_sides_part_is_named",),
        "the command would call different runtimes equal",
    ),
    Fault(
        "parity-compares-the-first-step-alone",
        "rl_backend.lab.parity.compare:_first_divergence",
        "for step in steps[1:]:",
        "for step in steps[:0]:",
        ("test_betas_show_in_a_later_step_because_adams_first_has_one_size_whatever_they_are",),
        "a fault that shows later would not be found",
    ),
    Fault(
        "parity-allows-any-multiple-of-the-floor",
        "rl_backend.lab.parity.compare:_steps",
        "loss_tolerance = max(loss_tolerance, FLOORS * loss_floor)",
        "loss_tolerance = max(loss_tolerance, 10 * FLOORS * loss_floor)",
        ("test_what_the_reference_differs_from_itself_is_allowed_threefold_from_then_on",),
        "a fault would pass for rounding",
    ),
    Fault(
        "parity-shows-steps-alone-but-does-not-judge-them",
        "rl_backend.lab.parity.compare:_first_divergence",
        "((step.alone or (), True), (running, False))",
        "((running, False),)",
        ("test_a_step_that_starts_from_the_same_weights_is_judged_alone",),
        "a wrong step would hide in what rounding has become",
    ),
    Fault(
        "parity-again-in-the-same-order",
        "rl_backend.lab.parity.config:plan_batch",
        "if otherwise:",
        "if not bins:",
        ("test_another_order_has_the_same_sequences_in_other_micro_batches",),
        "the floor would be 0, and a correct model be called a divergence",
    ),
    Fault(
        "parity-weights-relative-to-themselves",
        "rl_backend.lab.parity.compare:_weight",
        "return tensor_difference(name, change, theirs.double() - before.double(), tolerances.weights, scale)",
        "return tensor_difference(name, ours, theirs, tolerances.weights)",
        ("test_the_first_place_where_two_sides_part_is_named",),
        "a wrong update of large weights would not be seen",
    ),
    Fault(
        "parity-missing-tensors-are-equal",
        "rl_backend.lab.parity.compare:tensor_difference",
        "return Difference(name, math.inf, tolerance, math.inf, missing_from=missing_from)",
        "return Difference(name, 0.0, tolerance, 0.0, missing_from=missing_from)",
        ("test_zero_gradients_other_shapes_infinities_and_absent_names_are_divergences",),
        "a layer that one side lacks would pass",
    ),
    Fault(
        "micro-batches-over-their-budget",
        "rl_backend.data.balance:_least_work",
        "while least and room[least[0][1]] < seq_lens[index]:",
        "while least and room[least[0][1]] < 0:",
        ("test_any_plan_covers_every_sequence_once_within_the_budget_and_leaves_none_empty",),
        "ranks would run out of memory",
    ),
    Fault(
        "micro-batches-not-a-multiple",
        "rl_backend.data.balance:fewest_micro_batches",
        "for per_rank in range(fewest, most + 1, multiple_of):",
        "for per_rank in range(fewest, most + 1):",
        ("test_a_multiple_of_micro_batches_is_the_least_multiple_or_refused",),
        "interleaved schedules would refuse a planned batch",
    ),
    Fault(
        "no-room-for-the-last-state",
        "actors.folder.state:RunState._take_room",
        "file.write(bytes(size + _SPARE_BYTES))",
        "pass",
        ("test_a_disk_that_fills_up_ends_the_run_with_a_name_and_a_last_state[samples]",),
        "a run that a full disk ended would say that it runs",
    ),
    Fault(
        "full-disk-is-a-raw-error",
        "actors.folder.lock:written_to",
        "raise RunFolderError(cannot_write(run_dir, error), path=str(run_dir), errno=error.errno) from error",
        "raise",
        ("test_a_disk_that_fills_up_ends_the_run_with_a_name_and_a_last_state[samples]",),
        "a run would end with a traceback in place of what to do",
    ),
    Fault(
        "full-disk-hides-the-first-error",
        "actors.folder.folder:RunFolder.__exit__",
        """
        try:
            end()
        except OSError as problem:
            refused[str(problem)] = problem
        """,
        """
        try:
            end()
        except ZeroDivisionError as problem:
            refused[str(problem)] = problem
        """,
        ("test_a_full_disk_does_not_hide_the_error_that_ends_a_run",),
        "the reason of a run's end would be lost",
    ),
    Fault(
        "reward-module-ends-the-run",
        "rl_backend.data.rewards.function:load_callable",
        "except (Exception, SystemExit) as error:",
        "except Exception as error:",
        ("test_a_module_or_file_that_cannot_be_imported_is_refused",),
        "a run would end with status 0 and no word",
    ),
    Fault(
        "checkpoint-options-without-checkpoints",
        "actors.options.config:",
        "lambda config: config.save_every,",
        "lambda config: True,",
        (_REFUSED,),
        "who keeps five checkpoints and saves none would find none",
    ),
    Fault(
        "importance-cap-without-weights",
        "actors.options.sampled_config:",
        "lambda config: config.importance_options(),",
        "lambda config: True,",
        (_REFUSED,),
        "a cap would be accepted and nothing weighed",
    ),
    Fault(
        "finished-users-start-a-session",
        "examples.tenants:train",
        "if not users:",
        "if False:",
        ("test_users_who_have_finished_start_nothing",),
        "Ray, ranks and engines would start for nobody",
    ),
    Fault(
        "ray-in-the-process-group-of-the-run",
        "actors.cluster.session:own_process_groups",
        "services.ConsolePopen = partial(popen, process_group=0)",
        "services.ConsolePopen = partial(popen)",
        ("test_processes_of_ray_are_in_the_drivers_group_or_their_own",),
        "SIGTERM from a scheduler would end Ray in the step that the run still finishes",
    ),
    Fault(
        "reward-processes-in-the-process-group-of-the-run",
        "rl_backend.child_process:start_script",
        "stdin=subprocess.DEVNULL, env=environment, process_group=0,",
        "stdin=subprocess.DEVNULL, env=environment,",
        ("test_processes_call_functions_in_their_main_thread",),
        "the last step of a run that is asked to end would have no rewards",
    ),
    Fault(
        "auto-dtype-is-not-compared",
        "actors.folder.identity:require_same_dtype",
        "if saved != dtype:",
        'if config.dtype != "auto" and saved != dtype:',
        ("test_a_dtype_that_the_cluster_decides_must_be_the_one_that_was_saved",),
        "a run could go on in another dtype",
    ),
    Fault(
        "run-that-ends-early-does-not-wait",
        "actors.run.saver:RunSaver.end",
        """
        self.finish()
        committed = self._store.latest()
        """,
        "committed = self._store.latest()",
        ("test_a_run_that_ends_early_has_a_checkpoint_of_its_last_step_when_that_is_written",),
        "the checkpoint before would be named as the run's last",
    ),
]
