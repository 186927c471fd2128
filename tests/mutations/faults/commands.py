"""Commands: flags and files, exit statuses, the printed configuration, and checks of all that a command would run."""

from __future__ import annotations

from tests.mutations.fault import Fault

_LINE = "actors/run/command_line.py"
_FILE = "actors/run/config_file.py"
_OPTIONS = "tests/unit/actors/run/test_options.py"
_FILES = "tests/unit/actors/run/test_config_files.py"
_BAD_FILE = f"{_FILES}::test_a_wrong_file_is_one_sentence_with_file_and_line"
_PRINTED = f"{_FILES}::test_the_printed_configuration_is_read_as_the_same"
_FAILED = "tests/unit/actors/run/test_failed_start.py"
_CHECK = "tests/unit/rl_backend/cli/test_check_command.py"
_EVALUATION = "actors/run/evaluation.py"
_EVALUATED = "tests/unit/actors/run/test_held_out.py::test_an_evaluation_that_cannot_work_is_refused_before_anything_starts"
_STATUS = "tests/unit/actors/run/test_stop.py::test_the_exit_status_says_what_ended_a_run"

FAULTS = [
    Fault(
        "files-replace-flags",
        _LINE,
        "config = config_type(**merged(values, from_flags, sections))",
        "config = config_type(**merged(from_flags, values, sections))",
        (f"{_OPTIONS}::test_flags_replace_a_file_which_replaces_defaults",),
        "a flag beside --config would be accepted and ignored",
    ),
    Fault(
        "printing-a-configuration-starts-the-run",
        _LINE,
        """        print(as_yaml(config), end="")\n        raise SystemExit(0)\n""",
        """        print(as_yaml(config), end="")\n""",
        (_PRINTED,),
        "asking what a run would do would do it",
    ),
    Fault(
        "printed-configuration-without-defaults",
        _FILE,
        """    values = config.model_dump(mode="json")\n""",
        """    values = config.model_dump(mode="json", exclude_defaults=True)\n""",
        (_PRINTED,),
        "a printed run would change with the defaults of a later version",
    ),
    Fault(
        "values-of-a-flag-blamed-on-the-file",
        _LINE,
        "of_file = None if has(from_flags, place) else file.line_of(place, says)",
        "of_file = file.line_of(place, says)",
        (f"{_FILES}::test_a_value_of_a_flag_is_blamed_on_the_flag_even_where_a_file_has_one",),
        "a user would correct a right line of a file",
    ),
    Fault(
        "lines-of-a-file-counted-from-zero",
        _FILE,
        "key.start_mark.line + 1",
        "key.start_mark.line",
        (_BAD_FILE,),
        "a message would name the line above the wrong one",
    ),
    Fault(
        "the-last-of-two-lines-wins",
        _FILE,
        "        if name in found:\n",
        "        if not name:\n",
        (_BAD_FILE,),
        "an option that a file has twice would silently be one of them",
    ),
    Fault(
        "refusals-end-with-status-1",
        _LINE,
        "        _leave(2, lost=isinstance(error, ClusterLostError))\n",
        "        _leave(1, lost=isinstance(error, ClusterLostError))\n",
        (f"{_FAILED}::test_a_dead_engine_is_said_with_what_a_user_of_a_command_can_do",),
        "scripts could not tell a refusal from a crash",
    ),
    Fault(
        "a-finished-run-that-is-resumed-is-an-error",
        _LINE,
        "    except RunFinishedError as error:\n",
        "    except ZeroDivisionError as error:\n",
        (f"{_FAILED}::test_a_finished_run_that_is_resumed_is_a_success",),
        "a scheduler would start a finished run again and again",
    ),
    Fault(
        "sigterm-ends-like-ctrl-c",
        _LINE,
        "        _leave(EXIT_TERMINATED, lost=cluster_loss() is not None)\n",
        "        _leave(130, lost=cluster_loss() is not None)\n",
        (_STATUS,),
        "a scheduler could not tell that it has ended the run itself",
    ),
    Fault(
        "a-check-that-refuses-ends-with-status-0",
        "rl_backend/cli/check.py",
        "    return EXIT_REFUSED if refused else 0\n",
        "    return 0\n",
        (f"{_CHECK}::test_all_that_refuses_a_run_is_said_with_flags",),
        "a script would go on to start what cannot work",
    ),
    Fault(
        "only-the-first-user-is-checked",
        "rl_backend/cli/check.py",
        "    for name, each in config.runs().items():\n",
        "    for name, each in list(config.runs().items())[:1]:\n",
        (f"{_CHECK}::test_each_user_of_one_model_is_checked",),
        "the second user's mistake would be found when the first one trains",
    ),
    Fault(
        "unexpected-errors-without-a-traceback",
        "rl_backend/cli/main.py",
        "        if debug or not expected:\n",
        "        if debug:\n",
        ("tests/unit/rl_backend/cli/test_command.py::test_an_unexpected_error_keeps_its_traceback",),
        "a fault of ours would be one sentence that helps nobody",
    ),
    Fault(
        "examples-do-not-read-their-own-options",
        "rl_backend/cli/main.py",
        "    if argv and argv[0] in EXAMPLES:\n",
        "    if len(argv) == 1 and argv[0] in EXAMPLES:\n",
        ("tests/unit/rl_backend/cli/test_run_commands.py::test_its_errors_are_those_of_the_example",),
        "rl-backend grpo would know none of its options",
    ),
    Fault(
        "a-failed-start-leaves-no-word",
        "actors/run/run.py",
        "                start_fails.push(self.folder)\n",
        "                pass\n",
        (f"{_FAILED}::test_a_start_that_fails_leaves_a_report_and_not_an_obstacle",),
        "run.json would say that a run goes on which never began",
    ),
    Fault(
        "unknown-flag-named-after-those-that-are-missing",
        "rl_backend/cli/main.py",
        "            subparser.refuse_unknown(argv[argv.index(name) + 1 :])\n",
        "",
        ("tests/unit/rl_backend/cli/test_command.py::test_what_a_command_does_not_take_is_refused_in_a_sentence",),
        "--modle would be answered with: --model must be given",
    ),
    Fault(
        "evaluation-finds-out-last-that-it-cannot-write",
        _EVALUATION,
        "    require_writable(out, _OUT)\n",
        "",
        (_EVALUATED,),
        "an hour of answers would be lost",
    ),
    Fault(
        "evaluation-leaves-damaged-weights-to-vllm",
        _EVALUATION,
        '        require_readable_weights("EvalConfig.model", config.model)\n',
        "        pass\n",
        (_EVALUATED,),
        "half a download would be a traceback of vLLM, a minute later",
    ),
]
