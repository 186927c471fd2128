"""Commands: flags and files, exit statuses, the printed configuration, and checks of all that a command would run."""

from __future__ import annotations

from tests.mutations.fault import Fault

_BAD_FILE = "test_a_wrong_file_is_one_sentence_with_file_and_line"
_PRINTED = "test_the_printed_configuration_is_read_as_the_same"
_EVALUATED = "test_an_evaluation_that_cannot_work_is_refused_before_anything_starts"
_STATUS = "test_the_exit_status_says_what_ended_a_run"

FAULTS = [
    Fault(
        "files-replace-flags",
        "rl_backend.options.command_line:parse_config",
        "config = config_type(**merged(options.nest(file.values), given, sections))",
        "config = config_type(**merged(given, options.nest(file.values), sections))",
        ("test_flags_replace_a_file_which_replaces_defaults",),
        "a flag beside --config would be accepted and ignored",
    ),
    Fault(
        "printing-a-configuration-starts-the-run",
        "rl_backend.options.command_line:parse_config",
        "raise SystemExit(0)",
        "pass",
        (_PRINTED,),
        "asking what a run would do would do it",
    ),
    Fault(
        "printed-configuration-without-defaults",
        "rl_backend.options.config_file:as_yaml",
        'values = config.model_dump(mode="json")',
        'values = config.model_dump(mode="json", exclude_defaults=True)',
        (_PRINTED,),
        "a printed run would change with the defaults of a later version",
    ),
    Fault(
        "values-of-a-flag-blamed-on-the-file",
        "rl_backend.options.command_line:parse_config.name",
        "of_file = None if has(given, place) else file.line_of(place, options)",
        "of_file = file.line_of(place, options)",
        ("test_a_value_of_a_flag_is_blamed_on_the_flag_even_where_a_file_has_one",),
        "a user would correct a right line of a file",
    ),
    Fault(
        "lines-of-a-file-counted-from-zero",
        "rl_backend.options.config_file:_keys",
        'yield f"{prefix}{key.value}", key.start_mark.line + 1',
        'yield f"{prefix}{key.value}", key.start_mark.line',
        (_BAD_FILE,),
        "a message would name the line above the wrong one",
    ),
    Fault(
        "the-last-of-two-lines-wins",
        "rl_backend.options.config_file:_lines",
        "if name in found:",
        "if not name:",
        (_BAD_FILE,),
        "an option that a file has twice would silently be one of them",
    ),
    Fault(
        "refusals-end-with-status-1",
        "actors.run.command_line:run_command",
        "_leave(2, lost=isinstance(error, ClusterLostError))",
        "_leave(1, lost=isinstance(error, ClusterLostError))",
        ("test_a_dead_engine_is_said_with_what_a_user_of_a_command_can_do",),
        "scripts could not tell a refusal from a crash",
    ),
    Fault(
        "a-finished-run-that-is-resumed-is-an-error",
        "actors.run.command_line:run_command",
        "except RunFinishedError as error:",
        "except ZeroDivisionError as error:",
        ("test_a_finished_run_that_is_resumed_is_a_success",),
        "a scheduler would start a finished run again and again",
    ),
    Fault(
        "sigterm-ends-like-ctrl-c",
        "actors.run.command_line:run_command",
        "_leave(EXIT_TERMINATED, lost=cluster_loss() is not None)",
        "_leave(130, lost=cluster_loss() is not None)",
        (_STATUS,),
        "a scheduler could not tell that it has ended the run itself",
    ),
    Fault(
        "a-check-that-refuses-ends-with-status-0",
        "rl_backend.cli.check:run",
        "return EXIT_REFUSED if refused else 0",
        "return 0",
        ("test_all_that_refuses_a_run_is_said_with_flags",),
        "a script would go on to start what cannot work",
    ),
    Fault(
        "only-the-first-user-is-checked",
        "rl_backend.cli.check:run",
        "for name, each in config.runs().items():",
        "for name, each in list(config.runs().items())[:1]:",
        ("test_each_user_of_one_model_is_checked",),
        "the second user's mistake would be found when the first one trains",
    ),
    Fault(
        "plan-of-one-rank-by-default",
        "rl_backend.cli.plan:add_arguments",
        "type=int, required=True,",
        "type=int, default=1,",
        ("test_what_a_command_does_not_take_is_refused_in_a_sentence",),
        "a plan without --ranks would be for one rank, and nobody would be told",
    ),
    Fault(
        "unexpected-errors-without-a-traceback",
        "rl_backend.cli.main:_reported",
        "if debug or not (expected or missing_package(error)):",
        "if debug:",
        ("test_an_unexpected_error_keeps_its_traceback",),
        "a fault of ours would be one sentence that helps nobody",
    ),
    Fault(
        "examples-do-not-read-their-own-options",
        "rl_backend.cli.main:_run",
        "if argv and argv[0] in EXAMPLES:",
        "if len(argv) == 1 and argv[0] in EXAMPLES:",
        ("test_its_errors_are_those_of_the_example",),
        "rl-backend grpo would know none of its options",
    ),
    Fault(
        "a-failed-start-leaves-no-word",
        "actors.run.run:Run.__enter__",
        "start_fails.push(self.folder)",
        "pass",
        ("test_a_start_that_fails_leaves_a_report_and_not_an_obstacle",),
        "run.json would say that a run goes on which never began",
    ),
    Fault(
        "unknown-flag-named-after-those-that-are-missing",
        "rl_backend.cli.main:_parser",
        "subparser.refuse_unknown(argv[argv.index(name) + 1 :])",
        "pass",
        ("test_what_a_command_does_not_take_is_refused_in_a_sentence",),
        "--modle would be answered with: --model must be given",
    ),
    Fault(
        "evaluation-finds-out-last-that-it-cannot-write",
        "actors.run.evaluation:evaluate",
        "require_writable(config.out, _OUT)",
        "pass",
        (_EVALUATED,),
        "an hour of answers would be lost",
    ),
    Fault(
        "evaluation-leaves-damaged-weights-to-vllm",
        "actors.run.evaluation:evaluate",
        'require_readable_weights("EvalConfig.model", config.model)',
        "pass",
        (_EVALUATED,),
        "half a download would be a traceback of vLLM, a minute later",
    ),
]
