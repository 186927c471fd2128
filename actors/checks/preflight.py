"""The checks of a run that come before Ray, each with what it found and how long it took."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from actors.checks.machine import find_devices, find_packages
from actors.checks.memory import WARNING, choose_micro_batch, find_memory
from actors.checks.model import find_layout, find_lengths, find_model, find_tokenizer, find_weights
from actors.collect.held_out import HeldOutSet
from actors.collect.inputs import load_episode_inputs, load_inputs
from actors.folder.lock import RunLock, without_new_folders
from actors.folder.resume import RunStart, find_start
from actors.options.config import with_local_model
from actors.options.sampled_config import EpisodeConfig, RLConfig, RunConfig
from rl_backend.contracts import RLBackendError


def find_data(config: RunConfig) -> str:
    """Reads data and reward functions, as the run does."""
    if isinstance(config, EpisodeConfig):
        episodes = load_episode_inputs(config)
        return f"{len(episodes.rows)} rows{_held_out(episodes.held_out)}, {config.task}"
    if not isinstance(config, RLConfig):
        return config.read_data()
    inputs = load_inputs(config)
    return f"{len(inputs.prompts)} prompts{_held_out(inputs.held_out)}, reward {config.reward}"


def _held_out(sets: Sequence[HeldOutSet]) -> str:
    return "".join(f", {len(each.prompts)} held out in {each.name}" for each in sets)


def find_run_folder(config: RunConfig) -> str:
    """Makes the folder and takes its lock, and leaves nothing behind."""
    start = find_start(config.with_known_steps() if config.resume else config)
    folder = Path(config.run_dir)
    has_lock = (folder / ".lock").exists()
    with without_new_folders(folder):
        try:
            with RunLock(folder):
                free = shutil.disk_usage(folder).free
        finally:
            # A folder that was there is left as it was.
            if folder.is_dir() and not has_lock:
                (folder / ".lock").unlink(missing_ok=True)
    what = ", ".join(start.describe()) or "is free"
    return f"{folder} {what}, {free / 2**30:.1f} GiB of disk left"


class Check(NamedTuple):
    """Attributes:
    name: of what is checked.
    find: says in words what there is; raises what refuses the run.
    of_machine: decided by the machines of a session that is open already.
    read_by_run: the run does the same before it opens Ray.
    """

    name: str
    find: Callable[[RunConfig], str]
    of_machine: bool = False
    read_by_run: bool = False


# A check comes after those that say what is wrong with the files and sizes that it reads.
CHECKS = (
    Check("packages", find_packages),
    Check("run folder", find_run_folder, read_by_run=True),
    Check("model", find_model),
    Check("layout", find_layout),
    Check("weights", find_weights),
    Check("lengths", find_lengths),
    Check("devices", find_devices, of_machine=True),
    Check("memory", find_memory, of_machine=True),
    Check("tokenizer", find_tokenizer, read_by_run=True),
    Check("data", find_data, read_by_run=True),
)


@dataclass(frozen=True)
class Finding:
    """What one check found, how long it took, and the error that refuses the run, if one does."""

    name: str
    text: str
    seconds: float
    error: RLBackendError | None = None


def findings(config: RunConfig) -> Iterator[Finding]:
    """Makes every check, even after one that refuses the run."""
    # Without a model there is nothing else to say.
    try:
        config = with_local_model(config)
    except RLBackendError as error:
        yield Finding("model", str(error), 0.0, error)
        return
    chosen = choose_micro_batch(config, {}).config
    if chosen is not config and config.resume:
        # What cannot be continued is refused below.
        with suppress(RLBackendError):
            chosen = choose_micro_batch(config, kept_choice(find_start(config))).config
    config = chosen
    for check in CHECKS:
        started = time.perf_counter()
        try:
            text, refusal = check.find(config), None
        except RLBackendError as raised:
            text, refusal = str(raised), raised
        yield Finding(check.name, text, time.perf_counter() - started, refusal)


def preflight(config: RunConfig) -> list[Finding]:
    """Checks all that can be known of a run before Ray, ranks or engines are started, see :data:`CHECKS`.

    Where ``RAY_ADDRESS`` names a cluster, devices and memory are left to it.

    Raises:
        ConfigError, UnsupportedError, CheckpointError, BatchError: the first that refuses the run, in one sentence that
            names the option.
    """
    found = []
    for finding in findings(config):
        if finding.error is not None:
            raise finding.error
        found.append(finding)
    return found


def check_start(config: RunConfig, *, session_is_open: bool) -> list[str]:
    """The part of :func:`preflight` that a run does not do anyway before it starts; raises the same, returns warnings."""
    warnings = []
    for check in CHECKS:
        if not check.read_by_run and not (check.of_machine and session_is_open):
            text = check.find(config)
            if text.startswith(WARNING):
                warnings.append(text.removeprefix(WARNING))
    return warnings


CHOSEN = "chosen"
"""Of a checkpoint's state: options that its run had chosen, see :func:`~actors.checks.memory.chosen_options`."""


def kept_choice(start: RunStart) -> Mapping[str, Any]:
    found = start.progress.state.get(CHOSEN)
    return found if isinstance(found, Mapping) else {}
