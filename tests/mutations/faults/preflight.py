"""What refuses a run before anything starts: checks that never fire, stop early, or leave something behind."""

from __future__ import annotations

from tests.mutations.fault import Fault

_PREFLIGHT = "actors/run/preflight"
_TESTS = "tests/unit/actors/run/test_preflight.py"
_OPTIONS = f"{_TESTS}::test_options_that_do_not_fit_model_data_or_machine"
_DIRECTORY = f"{_TESTS}::test_a_model_directory_that_lacks_something[half of the weights]"
_CONFIG = f"{_TESTS}::test_a_config_that_the_runtime_or_the_weights_do_not_fit"

FAULTS = [
    Fault(
        "lengths-not-among-the-checks",
        f"{_PREFLIGHT}/checks.py",
        """    Check("lengths", find_lengths),\n""",
        "",
        (f"{_OPTIONS}[max_response_tokens-]",),
        "responses longer than the model has positions would be found out by an engine",
    ),
    Fault(
        "a-run-starts-without-its-checks",
        f"{_PREFLIGHT}/checks.py",
        "        if not check.read_by_run and not",
        "        if check.read_by_run and not",
        (_DIRECTORY,),
        "a run of the library would start Ray and ranks before half a weight file is noticed",
    ),
    Fault(
        "checks-end-at-the-first-refusal",
        f"{_PREFLIGHT}/checks.py",
        "        yield _made(check, config)\n",
        "        made = _made(check, config)\n        yield made\n        if made.error is not None:\n            return\n",
        (f"{_TESTS}::test_every_check_is_made_even_after_one_that_refuses",),
        "a user would learn of one mistake at a time",
    ),
    Fault(
        "weights-are-not-read",
        f"{_PREFLIGHT}/model.py",
        "            check_weights(runtime_of(config, model), model.head)\n",
        "",
        (_CONFIG,),
        "weights of another model would be noticed when ranks load them",
    ),
    Fault(
        "prompts-may-fill-all-positions-twice",
        f"{_PREFLIGHT}/model.py",
        "\n    if longest > positions:\n",
        "\n    if longest > 2 * positions:\n",
        (f"{_OPTIONS}[max_prompt_tokens max_response_tokens-]",),
        "a prompt and its response would not fit together, which an engine says in its own words",
    ),
    Fault(
        "memory-of-engines-not-counted",
        f"{_PREFLIGHT}/memory.py",
        "    return sum(groups) + config.num_engines * engine\n",
        "    return sum(groups)\n",
        (f"{_OPTIONS}[rollout.kv_cache_gib-]",),
        "the machine would run out of memory when the engines have started",
    ),
    Fault(
        "memory-never-refuses",
        f"{_PREFLIGHT}/memory.py",
        "    if held > device:\n",
        "    if held > device * 1e9:\n",
        (f"{_OPTIONS}[rollout.kv_cache_gib-]",),
        "a run that cannot fit would be killed by the kernel",
    ),
    Fault(
        "heads-of-engines-not-divided",
        f"{_PREFLIGHT}/machine.py",
        "    if isinstance(heads, int) and heads % parts:\n",
        "    if isinstance(heads, int) and parts % heads == 0:\n",
        (f"{_OPTIONS}[rollout.tensor_parallel-]",),
        "vLLM would refuse the division after Ray has started",
    ),
    Fault(
        "gpus-asked-of-a-machine-without",
        f"{_PREFLIGHT}/machine.py",
        """    if engines.device == "cuda" and not gpus:\n""",
        """    if engines.device == "cuda" and gpus:\n""",
        (f"{_OPTIONS}[rollout.device-]",),
        "engines would wait for a GPU that nobody has",
    ),
    Fault(
        "a-named-cluster-is-taken-for-this-machine",
        f"{_PREFLIGHT}/machine.py",
        """    return "RAY_ADDRESS" in os.environ or ray.is_initialized()\n""",
        "    return ray.is_initialized()\n",
        (f"{_TESTS}::test_a_cluster_is_left_to_decide_about_devices_and_memory",),
        "a laptop would refuse what its cluster has room for",
    ),
    Fault(
        "a-check-leaves-its-lock-file",
        f"{_PREFLIGHT}/folder.py",
        "        if folder.is_dir() and not has_lock:\n",
        "        if folder.is_dir() and has_lock:\n",
        (f"{_TESTS}::test_a_run_folder_in_use_or_of_another_run_is_refused_and_a_resumed_one_is_taken",),
        "asking whether a run can start would leave files where it starts",
    ),
    Fault(
        "too-few-prompts-for-a-batch",
        "actors/run/collect.py",
        "    if len(prompts) < config.prompts_per_step:\n",
        "    if not prompts:\n",
        (f"{_OPTIONS}[prompts_per_step-]",),
        "the refusal would not say which option to lower",
    ),
]
