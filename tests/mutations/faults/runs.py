"""Runs and their resumption, parity and plans."""

from __future__ import annotations

from tests.mutations.fault import Fault

_START = "tests/unit/actors/run/test_start.py"
_SAVER = "tests/unit/actors/run/test_saver.py"
_DISK = "tests/unit/actors/run/test_disk.py"
_REFUSED = "tests/unit/examples/test_examples.py::test_grpo_options_that_cannot_work_are_refused"
_PARITY = "tests/unit/rl_backend/cli/test_parity_command.py"

FAULTS = [
    Fault(
        "folder-locked-after-ray-has-started",
        "actors/run/run.py",
        "            lock = stack.enter_context(RunLock(config.run_dir))\n",
        "            stack.enter_context(open_session(config, self._phases))\n"
        "            lock = stack.enter_context(RunLock(config.run_dir))\n",
        (f"{_DISK}::test_the_folder_is_tried_and_locked_before_anything_is_started",),
        "a folder in use would be noticed when ranks and engines are up",
    ),
    Fault(
        "logs-not-cut-back",
        "actors/run/log_file.py",
        "        self._file.truncate(self._size)\n",
        "",
        (f"{_START}::test_a_run_that_was_killed_goes_on_after_its_newest_checkpoint_and_logs_every_step_once",),
        "steps would be in the metrics twice",
    ),
    Fault(
        "changed-lines-not-noticed",
        "actors/run/log_file.py",
        "    elif found != facts:\n",
        "    elif False:\n",
        (f"{_START}::test_logs_that_are_damaged_or_shorter_are_refused",),
        "a resumed run would have steps that nobody has taken",
    ),
    Fault(
        "files-named-before-they-are-on-the-disk",
        "rl_backend/checkpoint/durable.py",
        "        stream.flush()\n        os.fsync(stream.fileno())\n",
        "        stream.flush()\n",
        (f"{_START}::test_files_that_a_resume_reads_are_on_the_disk_before_they_get_their_names",),
        "a power cut would leave an empty run.json",
    ),
    Fault(
        "a-run-that-has-finished-goes-on",
        "actors/run/start.py",
        'if _has_finished(config.run_dir) and read_file_of_run(config.run_dir, "config.json").get("steps") == config.steps:',
        "if False:",
        (f"{_START}::test_a_run_that_has_finished_goes_on_only_with_more_steps",),
        "a finished run would be opened again for nothing",
    ),
    Fault(
        "earlier-checkpoints-in-their-own-folder",
        "actors/run/start.py",
        "    if newest is not None and newest > checkpoint.step:\n",
        "    if False:\n",
        (f"{_START}::test_an_earlier_checkpoint_goes_on_in_a_new_folder_and_leaves_the_later_ones_alone",),
        "later checkpoints would be mixed with those of another run",
    ),
    Fault(
        "options-not-compared",
        "actors/run/resume.py",
        "        if options.get(option) != here.get(option):\n",
        "        if False:\n",
        (f"{_START}::test_options_that_decide_what_is_learned_may_not_change",),
        "a run would go on as another",
    ),
    Fault(
        "contents-not-compared",
        "actors/run/resume.py",
        "        if contents.get(option) != found:\n",
        "        if False:\n",
        (f"{_START}::test_other_contents_of_the_files_of_a_run_are_refused",),
        "a run would go on with other data",
    ),
    Fault(
        "no-checkpoint-of-a-run-that-is-stopped",
        "actors/run/saver.py",
        "        if self._saved != step:\n",
        "        if self._saved is None:\n",
        ("tests/unit/actors/run/test_stop.py::test_a_run_that_is_stopped_continues_as_if_it_had_not_been",),
        "the step that a run finishes after SIGTERM would be lost",
    ),
    Fault(
        "no-save-after-the-last-step",
        "actors/run/saver.py",
        "return bool(every) and (step % every == 0 or step == self._config.steps)",
        "return bool(every) and step % every == 0",
        (
            f"{_SAVER}::test_saves_that_training_waits_for_are_committed_in_their_step_and_errors_are_raised",
            f"{_SAVER}::test_a_save_in_the_background_is_committed_after_the_step_in_which_its_last_model_is_written",
        ),
        "the last steps of a run would be lost",
    ),
    Fault(
        "a-commit-waits-for-the-slowest-save",
        "actors/run/saver.py",
        "return any(model.group.checkpoint_is_pending(model.handle) for model in self._models.values())",
        "return all(model.group.checkpoint_is_pending(model.handle) for model in self._models.values())",
        (f"{_SAVER}::test_a_save_in_the_background_is_committed_after_the_step_in_which_its_last_model_is_written",),
        "training would wait for the slowest model's save",
    ),
    Fault(
        "drawn-samples-not-kept",
        "actors/run/saver.py",
        "                save_drawn(position.drawn, self._store.draft(step))\n",
        "                save_drawn([], self._store.draft(step))\n",
        (
            "tests/unit/actors/run/test_saver.py::test_samples_drawn_ahead_are_in_the_checkpoint_with_the_place_in_the_stream",
        ),
        "a resumed run would draw other samples",
    ),
    Fault(
        "a-lock-that-two-runs-share",
        "actors/run/lock.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        (f"{_START}::test_one_run_at_a_time_writes_to_a_folder",),
        "two runs would write to one folder",
    ),
    Fault(
        "parity-takes-any-difference",
        "rl_backend/lab/parity/differences.py",
        "        return self.amount > self.tolerance\n",
        "        return self.amount > 100 * self.tolerance\n",
        ("tests/unit/rl_backend/lab/test_parity_faults.py::test_the_first_place_where_two_sides_part_is_named",),
        "the command would call different runtimes equal",
    ),
    Fault(
        "parity-compares-the-first-step-alone",
        "rl_backend/lab/parity/compare.py",
        "    for step in steps[1:]:\n",
        "    for step in steps[:0]:\n",
        (
            "tests/unit/rl_backend/lab/test_parity_faults.py::test_betas_show_in_a_later_step_because_adams_first_has_one_size_whatever_they_are",
        ),
        "a fault that shows later would not be found",
    ),
    Fault(
        "parity-weights-relative-to-themselves",
        "rl_backend/lab/parity/compare.py",
        "return tensor_difference(name, change, theirs.double() - before.double(), tolerances.weights, scale)",
        "return tensor_difference(name, ours, theirs, tolerances.weights)",
        ("tests/unit/rl_backend/lab/test_parity_faults.py::test_the_first_place_where_two_sides_part_is_named",),
        "a wrong update of large weights would not be seen",
    ),
    Fault(
        "parity-missing-tensors-are-equal",
        "rl_backend/lab/parity/differences.py",
        "        return Difference(name, math.inf, tolerance, math.inf, missing_from=missing_from)\n",
        "        return Difference(name, 0.0, tolerance, 0.0, missing_from=missing_from)\n",
        (f"{_PARITY}::test_zero_gradients_other_shapes_infinities_and_absent_names_are_divergences",),
        "a layer that one side lacks would pass",
    ),
    Fault(
        "micro-batches-over-their-budget",
        "rl_backend/data/balance.py",
        "        while least and room[least[0][1]] < seq_lens[index]:\n",
        "        while least and room[least[0][1]] < 0:\n",
        (
            "tests/unit/rl_backend/data/test_balance.py::test_any_plan_covers_every_sequence_once_within_the_budget_and_leaves_none_empty",
        ),
        "ranks would run out of memory",
    ),
    Fault(
        "micro-batches-not-a-multiple",
        "rl_backend/data/balance.py",
        "    for per_rank in range(fewest, most + 1, multiple_of):\n",
        "    for per_rank in range(fewest, most + 1):\n",
        ("tests/unit/rl_backend/data/test_balance.py::test_a_multiple_of_micro_batches_is_the_least_multiple_or_refused",),
        "interleaved schedules would refuse a planned batch",
    ),
    Fault(
        "no-room-for-the-last-state",
        "actors/run/state.py",
        "            file.write(bytes(size + _SPARE_BYTES))\n",
        "            pass\n",
        (f"{_DISK}::test_a_disk_that_fills_up_ends_the_run_with_a_name_and_a_last_state[samples]",),
        "a run that a full disk ended would say that it runs",
    ),
    Fault(
        "full-disk-is-a-raw-error",
        "actors/run/lock.py",
        "        raise RunFolderError(cannot_write(run_dir, error), path=str(run_dir), errno=error.errno) from error\n",
        "        raise\n",
        (f"{_DISK}::test_a_disk_that_fills_up_ends_the_run_with_a_name_and_a_last_state[samples]",),
        "a run would end with a traceback in place of what to do",
    ),
    Fault(
        "full-disk-hides-the-first-error",
        "actors/run/folder.py",
        "            except OSError as problem:\n                refused[str(problem)] = problem\n",
        "            except ZeroDivisionError as problem:\n                refused[str(problem)] = problem\n",
        (f"{_DISK}::test_a_full_disk_does_not_hide_the_error_that_ends_a_run",),
        "the reason of a run's end would be lost",
    ),
    Fault(
        "reward-module-ends-the-run",
        "rl_backend/data/rewards/loading.py",
        "    except (Exception, SystemExit) as error:\n        problem ",
        "    except Exception as error:\n        problem ",
        ("tests/unit/rl_backend/data/test_data_files.py::test_a_module_or_file_that_cannot_be_imported_is_refused",),
        "a run would end with status 0 and no word",
    ),
    Fault(
        "checkpoint-options-without-checkpoints",
        "actors/run/config.py",
        "_SAVES = HasEffect(lambda config: config.save_every,",
        "_SAVES = HasEffect(lambda config: True,",
        (_REFUSED,),
        "who keeps five checkpoints and saves none would find none",
    ),
    Fault(
        "importance-cap-without-weights",
        "actors/run/rl_config.py",
        "    lambda config: config.importance_options(),\n",
        "    lambda config: True,\n",
        (_REFUSED,),
        "a cap would be accepted and nothing weighed",
    ),
]
