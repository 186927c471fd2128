"""What a run prints, the phases of its start, and its end between two steps."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "torch-imported-before-the-first-line",
        "actors.watch.console:",
        "from tqdm import tqdm",
        """
        import torch
        from tqdm import tqdm
        """,
        ("test_the_first_line_comes_before_imports_that_take_seconds[sft]",),
        "a command would be silent for seconds",
    ),
    Fault(
        "modules-announce-themselves-when-imported",
        "actors.watch.console:announce",
        'if module == "__main__":',
        "if module:",
        ("test_a_module_that_another_imports_announces_nothing",),
        "a loop of one's own that imports an example would print its first line",
    ),
    Fault(
        "every-run-begins-with-the-command",
        "actors.watch.console:command_began",
        "return _command_began.pop() if take else _command_began[0]",
        "return _command_began[0]",
        ("test_the_start_of_a_command_belongs_to_its_first_run",),
        "the second run of a process would count the seconds of the first",
    ),
    Fault(
        "time-left-counts-the-first-step",
        "actors.watch.console:StepLines.end",
        """
        if self._count == 2:
            self._durations.clear()
        self._durations.append(took)
        """,
        """
        if self._count == 2:
            pass
        self._durations.append(took)
        """,
        ("test_a_steps_line_has_elapsed_time_and_time_left",),
        "a run would say for its first steps that it takes hours more than it does",
    ),
    Fault(
        "skipped-updates-are-not-said",
        "actors.watch.console:StepLines.end",
        "if skipped:",
        "if skipped and evaluated:",
        ("test_a_steps_line_has_elapsed_time_and_time_left",),
        "a step that changed nothing would look like any other",
    ),
    Fault(
        "skipped-updates-of-quick-steps-are-not-printed",
        "actors.watch.console:StepLines.end",
        ("self._count > 1 and step < self._steps and now - self._printed < _LINE_SECONDS and not skipped and not evaluated"),
        "self._count > 1 and step < self._steps and now - self._printed < _LINE_SECONDS and not evaluated",
        ("test_of_quick_steps_a_line_is_printed_each_second",),
        "skipped updates would be in no line",
    ),
    Fault(
        "lines-as-long-as-their-metrics",
        "actors.watch.console:StepLines.end",
        """
        if len(line) + len(part) + 2 > _columns():
            break
        """,
        "pass",
        ("test_a_line_without_room_for_every_metric_leaves_out_the_last",),
        "every step would take two lines of a terminal",
    ),
    Fault(
        "a-phase-that-failed-ends-like-others",
        "actors.watch.console:_Phase.shown",
        'how = "failed after "',
        'how = ""',
        ("test_without_a_terminal_a_phase_is_a_line_and_a_long_one_says_so_while_it_lasts",),
        "a start would not say which of its phases failed",
    ),
    Fault(
        "a-second-signal-at-once-is-another-one",
        "actors.run.run:StopRequest.on_signals.received",
        """
        if self.reason is None and (not lost):
            self.ask(_REASONS[number])
            again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
            with suppress(OSError):
                os.write(2, f"\\n{self.reason}: {answer}{again}\\n".encode())
        elif lost or time.monotonic() - self._asked > _SAME_SECONDS[number]:
            self.insisted = not lost
            before[number](number, frame)
        """,
        """
        if self.reason is None and (not lost):
            self.ask(_REASONS[number])
            again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
            with suppress(OSError):
                os.write(2, f"\\n{self.reason}: {answer}{again}\\n".encode())
        else:
            self.insisted = not lost
            before[number](number, frame)
        """,
        ("test_a_signal_that_a_program_around_the_run_passes_on_as_well_is_one[15]",),
        "one Ctrl-C in a shell, which several processes pass on, would lose the step",
    ),
    Fault(
        "signals-stay-with-a-run-that-has-ended",
        "actors.run.run:StopRequest.on_signals",
        """
        for number, handler in before.items():
            signal.signal(number, handler)
        """,
        "pass",
        ("test_a_run_that_is_stopped_continues_as_if_it_had_not_been",),
        "Ctrl-C would do nothing after a run",
    ),
    Fault(
        "errors-that-a-signal-makes-are-failures",
        "actors.run.run:StopRequest.on_signals",
        """
        if self.reason is None:
            raise
        """,
        "raise",
        ("test_a_step_that_fails_after_the_signal_is_an_interrupted_one",),
        "a run that a scheduler ended would be counted as failed",
    ),
    Fault(
        "a-run-asked-in-its-last-step-does-not-finish",
        "actors.run.run:Run.steps",
        "if self._stop.reason and step < self.config.steps:",
        "if self._stop.reason:",
        ("test_a_run_in_its_last_step_finishes",),
        "a run whose steps are all taken would have no model and no summary",
    ),
    Fault(
        "loops-ignore-who-asks-to-stop",
        "actors.run.run:Run.__init__",
        "self._stop = stop or StopRequest()",
        "self._stop = StopRequest()",
        ("test_runs_of_several_threads_end_by_one_request",),
        "users of one base could not be stopped together",
    ),
    Fault(
        "trace-is-not-flushed",
        "actors.watch.trace:TraceCollector.collect",
        """
        self._draw_arrows()
        self._writer.flush()
        """,
        "self._draw_arrows()",
        ("test_what_was_collected_is_in_the_file_of_a_run_that_is_killed_then",),
        "the trace of a run that was killed would lack its last events",
    ),
    Fault(
        "facts-of-full-lines-are-lost",
        "actors.watch.console:say_facts",
        """
        lines.append(line)
        line = "   "
        """,
        'line = "   "',
        ("test_facts_are_never_divided",),
        "of what a run prints first only the last line would be seen",
    ),
    Fault(
        "one-batch-ahead-is-not-said",
        "actors.options.sampled_config:SampledOptions.sampling_facts",
        "if self.batches_ahead:",
        "if self.batches_ahead > 1:",
        ("test_the_first_line_says_what_is_asked_for",),
        "the first line would hide that samples are a step old",
    ),
]
