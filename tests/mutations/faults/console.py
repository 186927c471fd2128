"""What a run prints, the phases of its start, and its end between two steps."""

from __future__ import annotations

from tests.mutations.fault import Fault

_CONSOLE = "actors/run/console.py"
_STOP = "actors/run/stop.py"
_PRINTED = "tests/unit/actors/run/test_console.py"
_STOPPED = "tests/unit/actors/run/test_stop.py"

FAULTS = [
    Fault(
        "torch-imported-before-the-first-line",
        _CONSOLE,
        "from tqdm import tqdm\n",
        "import torch  # noqa: F401\nfrom tqdm import tqdm\n",
        (f"{_PRINTED}::test_the_first_line_comes_before_imports_that_take_seconds[sft]",),
        "a command would be silent for seconds",
    ),
    Fault(
        "modules-announce-themselves-when-imported",
        _CONSOLE,
        """    if module == "__main__":\n""",
        "    if module:\n",
        (f"{_PRINTED}::test_a_module_that_another_imports_announces_nothing",),
        "a loop of one's own that imports an example would print its first line",
    ),
    Fault(
        "every-run-begins-with-the-command",
        _CONSOLE,
        "    return _command_began.pop() if take else _command_began[0]\n",
        "    return _command_began[0]\n",
        (f"{_PRINTED}::test_the_start_of_a_command_belongs_to_its_first_run",),
        "the second run of a process would count the seconds of the first",
    ),
    Fault(
        "time-left-counts-the-first-step",
        _CONSOLE,
        "            self._durations.clear()  # a first step is longer than others\n",
        "            pass\n",
        (f"{_PRINTED}::test_a_steps_line_has_elapsed_time_and_time_left",),
        "a run would say for its first steps that it takes hours more than it does",
    ),
    Fault(
        "skipped-updates-are-not-said",
        _CONSOLE,
        "        if skipped:\n",
        "        if skipped and evaluated:\n",
        (f"{_PRINTED}::test_a_steps_line_has_elapsed_time_and_time_left",),
        "a step that changed nothing would look like any other",
    ),
    Fault(
        "skipped-updates-of-quick-steps-are-not-printed",
        _CONSOLE,
        "_LINE_SECONDS and not skipped and not evaluated:\n",
        "_LINE_SECONDS and not evaluated:\n",
        (f"{_PRINTED}::test_of_quick_steps_a_line_is_printed_each_second",),
        "skipped updates would be in no line",
    ),
    Fault(
        "lines-as-long-as-their-metrics",
        _CONSOLE,
        "            if len(line) + len(part) + 2 > _columns():\n                break\n",
        "",
        (f"{_PRINTED}::test_a_line_without_room_for_every_metric_leaves_out_the_last",),
        "every step would take two lines of a terminal",
    ),
    Fault(
        "a-phase-that-failed-ends-like-others",
        _CONSOLE,
        """            how = "failed after "\n""",
        """            how = ""\n""",
        (f"{_PRINTED}::test_without_a_terminal_a_phase_is_a_line_and_a_long_one_says_so_while_it_lasts",),
        "a start would not say which of its phases failed",
    ),
    Fault(
        "a-second-signal-at-once-is-another-one",
        _STOP,
        "            elif lost or time.monotonic() - self._asked > _SAME_SECONDS[number]:\n",
        "            else:\n",
        (f"{_STOPPED}::test_a_signal_that_a_program_around_the_run_passes_on_as_well_is_one[15]",),
        "one Ctrl-C in a shell, which several processes pass on, would lose the step",
    ),
    Fault(
        "signals-stay-with-a-run-that-has-ended",
        _STOP,
        "            for number, handler in before.items():\n                signal.signal(number, handler)\n",
        "            pass\n",
        (f"{_STOPPED}::test_a_run_that_is_stopped_continues_as_if_it_had_not_been",),
        "Ctrl-C would do nothing after a run",
    ),
    Fault(
        "errors-that-a-signal-makes-are-failures",
        _STOP,
        "            if self.reason is None:\n                raise\n",
        "            raise\n",
        (f"{_STOPPED}::test_a_step_that_fails_after_the_signal_is_an_interrupted_one",),
        "a run that a scheduler ended would be counted as failed",
    ),
    Fault(
        "a-run-asked-in-its-last-step-does-not-finish",
        "actors/run/run.py",
        "            if self._stop.reason and step < self.config.steps:\n",
        "            if self._stop.reason:\n",
        (f"{_STOPPED}::test_a_run_in_its_last_step_finishes",),
        "a run whose steps are all taken would have no model and no summary",
    ),
    Fault(
        "loops-ignore-who-asks-to-stop",
        "actors/run/run.py",
        "        self._stop = stop or StopRequest()\n",
        "        self._stop = StopRequest()\n",
        (f"{_STOPPED}::test_runs_of_several_threads_end_by_one_request",),
        "users of one base could not be stopped together",
    ),
]
