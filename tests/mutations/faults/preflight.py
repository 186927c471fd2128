"""What refuses a run before anything starts: checks that never fire, stop early, or leave something behind."""

from __future__ import annotations

from tests.mutations.fault import Fault

_OPTIONS = "test_options_that_do_not_fit_model_data_or_machine"
_DIRECTORY = "test_a_model_directory_that_lacks_something[half of the weights]"
_CONFIG = "test_a_config_that_the_runtime_or_the_weights_do_not_fit"

FAULTS = [
    Fault(
        "lengths-not-among-the-checks",
        "actors.checks.preflight:",
        'Check("lengths", find_lengths), Check("devices", find_devices, of_machine=True),',
        'Check("devices", find_devices, of_machine=True),',
        (f"{_OPTIONS}[max_response_tokens-]",),
        "responses longer than the model has positions would be found out by an engine",
    ),
    Fault(
        "a-run-starts-without-its-checks",
        "actors.checks.preflight:check_start",
        "if not check.read_by_run and not (check.of_machine and session_is_open):",
        "if check.read_by_run and not (check.of_machine and session_is_open):",
        (_DIRECTORY,),
        "a run of the library would start Ray and ranks before half a weight file is noticed",
    ),
    Fault(
        "checks-end-at-the-first-refusal",
        "actors.checks.preflight:findings",
        "yield Finding(check.name, text, time.perf_counter() - started, refusal)",
        """
        yield Finding(check.name, text, time.perf_counter() - started, refusal)
        if refusal is not None:
            return
        """,
        ("test_every_check_is_made_even_after_one_that_refuses",),
        "a user would learn of one mistake at a time",
    ),
    Fault(
        "weights-are-not-read",
        "actors.checks.model:find_weights",
        "check_weights(runtime_of(config, model), model.head)",
        "pass",
        (_CONFIG,),
        "weights of another model would be noticed when ranks load them",
    ),
    Fault(
        "prompts-may-fill-all-positions-twice",
        "actors.checks.model:_require_positions",
        "if longest > positions:",
        "if longest > 2 * positions:",
        (f"{_OPTIONS}[max_prompt_tokens max_response_tokens-]",),
        "a prompt and its response would not fit together, which an engine says in its own words",
    ),
    Fault(
        "memory-of-engines-not-counted",
        "actors.checks.memory:_bytes",
        "return sum(groups) + config.num_engines * engine + weights",
        "return sum(groups)",
        (f"{_OPTIONS}[rollout.kv_cache_gib-]",),
        "the machine would run out of memory when the engines have started",
    ),
    Fault(
        "memory-never-refuses",
        "actors.checks.memory:find_memory",
        "if held > free:",
        "if held > free * 1e9:",
        (f"{_OPTIONS}[rollout.kv_cache_gib-]",),
        "a run that cannot fit would be killed by the kernel",
    ),
    Fault(
        "a-micro-batch-that-will-not-fit-is-let-pass",
        "actors.checks.memory:find_memory",
        "if most > free:",
        "if most > 2 * free:",
        ("test_what_will_not_fit_is_refused_with_what_fits_and_what_almost_does_not_is_a_warning",),
        "Ray would kill the run in its first step",
    ),
    Fault(
        "a-resumed-run-chooses-its-micro-batch-anew",
        "actors.checks.memory:choose_micro_batch",
        "if kept:",
        "if not kept and kept:",
        ("test_a_given_value_wins_then_the_one_that_a_run_began_with",),
        "sums would be rounded differently after a resume, where other memory is free",
    ),
    Fault(
        "heads-of-engines-not-divided",
        "actors.checks.machine:_check_engines",
        "if isinstance(heads, int) and heads % parts:",
        "if isinstance(heads, int) and parts % heads == 0:",
        (f"{_OPTIONS}[rollout.tensor_parallel-]",),
        "vLLM would refuse the division after Ray has started",
    ),
    Fault(
        "gpus-asked-of-a-machine-without",
        "actors.checks.machine:_check_engines",
        'if engines.device == "cuda" and not gpus:',
        'if engines.device == "cuda" and gpus:',
        (f"{_OPTIONS}[rollout.device-]",),
        "engines would wait for a GPU that nobody has",
    ),
    Fault(
        "a-named-cluster-is-taken-for-this-machine",
        "actors.checks.machine:is_on_cluster",
        'return "RAY_ADDRESS" in os.environ or ray.is_initialized()',
        "return ray.is_initialized()",
        ("test_a_cluster_is_left_to_decide_about_devices_and_memory",),
        "a laptop would refuse what its cluster has room for",
    ),
    Fault(
        "a-check-leaves-its-lock-file",
        "actors.checks.preflight:find_run_folder",
        "if folder.is_dir() and not has_lock:",
        "if folder.is_dir() and has_lock:",
        ("test_a_run_folder_in_use_or_of_another_run_is_refused_and_a_resumed_one_is_taken",),
        "asking whether a run can start would leave files where it starts",
    ),
    Fault(
        "too-few-prompts-for-a-batch",
        "actors.collect.inputs:_require_rows",
        "if number < config.prompts_per_step:",
        "if not number:",
        (f"{_OPTIONS}[prompts_per_step-]",),
        "the refusal would not say which option to lower",
    ),
    Fault(
        "check-does-not-read-examples",
        "actors.checks.preflight:find_data",
        "return config.read_data()",
        'return f"examples of {config.dataset}"',
        ("test_rows_that_the_run_could_not_read_refuse_it",),
        "check would pass a run whose data cannot be read",
    ),
    Fault(
        "ends-that-disagree-are-not-named",
        "actors.collect.stop_tokens:disagreement_of_ends",
        "if named and end not in named:",
        "if not named and end not in named:",
        ("test_ends_that_disagree_are_named",),
        "nobody would see that rows of text teach an end that the model's engines do not wait for",
    ),
    Fault(
        "columns-of-reward-functions-not-required",
        "rl_backend.data.examples:_Reader.__init__",
        "if name not in columns",
        "if name in ()",
        ("test_columns_that_a_function_takes_must_be_in_each_row",),
        "a run would end in its first step, when the function is called without its column",
    ),
]
