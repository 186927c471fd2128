"""Runs and their resumption, parity and plans."""

from __future__ import annotations

from tests.mutations.fault import Fault

_START = "tests/unit/test_run_start.py"
_SAVER = "tests/unit/test_run_saver.py"
_PARITY = "tests/unit/test_parity_command.py"

FAULTS = [
    Fault(
        "logs-not-cut-back",
        "examples/common/run_folder.py",
        "    file.truncate(size)\n",
        "",
        (f"{_START}::test_a_run_that_was_killed_goes_on_after_its_newest_checkpoint_and_logs_every_step_once",),
        "steps would be in the metrics twice",
    ),
    Fault(
        "lost-lines-not-noticed",
        "examples/common/run_folder.py",
        "    if os.fstat(file.fileno()).st_size < size:\n",
        "    if False:\n",
        (f"{_START}::test_logs_that_have_lost_lines_are_refused",),
        "a resumed run would have a gap that nobody sees",
    ),
    Fault(
        "files-named-before-they-are-on-the-disk",
        "examples/common/run_folder.py",
        "        file.flush()\n        os.fsync(file.fileno())\n    new.replace(path)\n",
        "        file.flush()\n    new.replace(path)\n",
        (f"{_START}::test_files_that_a_resume_reads_are_on_the_disk_before_they_get_their_names",),
        "a power cut would leave an empty run.json",
    ),
    Fault(
        "a-run-that-has-finished-goes-on",
        "examples/common/run_start.py",
        'if _has_finished(config.run_dir) and _read(config.run_dir, "config.json").get("steps") == config.steps:',
        "if False:",
        (f"{_START}::test_a_run_that_has_finished_goes_on_only_with_more_steps",),
        "a finished run would be opened again for nothing",
    ),
    Fault(
        "earlier-checkpoints-in-their-own-folder",
        "examples/common/run_start.py",
        "    if newest is not None and newest > checkpoint.step:\n",
        "    if False:\n",
        (f"{_START}::test_an_earlier_checkpoint_goes_on_in_a_new_folder_and_leaves_the_later_ones_alone",),
        "later checkpoints would be mixed with those of another run",
    ),
    Fault(
        "options-not-compared",
        "examples/common/run_identity.py",
        "        if options.get(option) != here.get(option):\n",
        "        if False:\n",
        (f"{_START}::test_options_that_decide_what_is_learned_may_not_change",),
        "a run would go on as another",
    ),
    Fault(
        "contents-not-compared",
        "examples/common/run_identity.py",
        "        if contents.get(option) != found:\n",
        "        if False:\n",
        (f"{_START}::test_other_contents_of_the_files_of_a_run_are_refused",),
        "a run would go on with other data",
    ),
    Fault(
        "no-save-after-the-last-step",
        "examples/common/run_saver.py",
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
        "examples/common/run_saver.py",
        "return any(model.group.checkpoint_is_pending(model.handle) for model in self._models.values())",
        "return all(model.group.checkpoint_is_pending(model.handle) for model in self._models.values())",
        (f"{_SAVER}::test_a_save_in_the_background_is_committed_after_the_step_in_which_its_last_model_is_written",),
        "training would wait for the slowest model's save",
    ),
    Fault(
        "drawn-samples-not-kept",
        "examples/common/run_saver.py",
        "                save_drawn(position.drawn, self._store.draft(step))\n",
        "                save_drawn([], self._store.draft(step))\n",
        ("tests/unit/test_run_saver.py::test_samples_drawn_ahead_are_in_the_checkpoint_with_the_place_in_the_stream",),
        "a resumed run would draw other samples",
    ),
    Fault(
        "a-lock-that-two-runs-share",
        "examples/common/run_lock.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        (f"{_START}::test_one_run_at_a_time_writes_to_a_folder",),
        "two runs would write to one folder",
    ),
    Fault(
        "parity-takes-any-difference",
        "rl_backend/parity/differences.py",
        "        return self.amount > self.tolerance\n",
        "        return self.amount > 100 * self.tolerance\n",
        ("tests/unit/test_parity_faults.py::test_the_first_place_where_two_sides_part_is_named",),
        "the command would call different runtimes equal",
    ),
    Fault(
        "parity-compares-the-first-step-alone",
        "rl_backend/parity/compare.py",
        "    for step in steps[1:]:\n",
        "    for step in steps[:0]:\n",
        (
            "tests/unit/test_parity_faults.py::test_betas_show_in_a_later_step_because_adams_first_has_one_size_whatever_they_are",
        ),
        "a fault that shows later would not be found",
    ),
    Fault(
        "parity-weights-relative-to-themselves",
        "rl_backend/parity/compare.py",
        "return tensor_difference(name, change, theirs.double() - before.double(), tolerances.weights, scale)",
        "return tensor_difference(name, ours, theirs, tolerances.weights)",
        ("tests/unit/test_parity_faults.py::test_the_first_place_where_two_sides_part_is_named",),
        "a wrong update of large weights would not be seen",
    ),
    Fault(
        "parity-missing-tensors-are-equal",
        "rl_backend/parity/differences.py",
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
        ("tests/unit/test_balance.py::test_any_plan_covers_every_sequence_once_within_the_budget_and_leaves_none_empty",),
        "ranks would run out of memory",
    ),
    Fault(
        "micro-batches-not-a-multiple",
        "rl_backend/data/balance.py",
        "    for per_rank in range(fewest, most + 1, multiple_of):\n",
        "    for per_rank in range(fewest, most + 1):\n",
        ("tests/unit/test_balance.py::test_a_multiple_of_micro_batches_is_the_least_multiple_or_refused",),
        "interleaved schedules would refuse a planned batch",
    ),
]
