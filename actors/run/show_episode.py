"""One episode, played by the model as it is, before a run is started: what it is given, writes and is rewarded with."""

from __future__ import annotations

from contextlib import ExitStack

from actors.checks.machine import require_engines
from actors.cluster.placement import share_cluster
from actors.cluster.session import ray_session
from actors.collect.episode_stream import group_tasks
from actors.collect.episodes import turn_sampling
from actors.collect.inputs import load_episode_inputs
from actors.collect.transcripts import transcript
from actors.options.config import with_local_model
from actors.options.sampled_config import EpisodeConfig
from actors.rollout.group.group import RolloutGroup
from actors.rollout.placement import with_share
from actors.rollout.tokens import RolloutTokens
from actors.run.session import ray_is
from actors.watch.console import Phases, warn
from rl_backend.contracts import ConfigError
from rl_backend.environment.groups import PlayOptions, play_groups
from rl_backend.environment.playing import run_episodes
from rl_backend.options.option_set import filled


def show_episode(config: EpisodeConfig, row: int = 0, rollout: RolloutGroup | None = None) -> str:
    """Plays the environment of a row of the data set, and describes the episode for people.

    Args:
        row: number of the row, from 0.
        rollout: open engines, with the weights that they have; None starts one.

    Raises:
        ConfigError, BatchError, UnsupportedError: as a run with these options, before anything is started.
        EpisodeFailedError: the score of the episode failed.
    """
    config = with_local_model(config)
    phases = Phases()
    with phases.phase("data", f"reading {config.dataset}, and {config.task}"):
        inputs = load_episode_inputs(config)
    if not 0 <= row < len(inputs.rows):
        raise ConfigError.of("row", row, f"{config.dataset} has {len(inputs.rows)} rows, counted from 0")
    with ExitStack() as stack:
        if rollout is None:
            require_engines(config.rollout)
            with phases.phase("ray", ray_is()):
                stack.enter_context(ray_session(0, 1))
            wanted = filled(config, "rollout").replace(num_engines=1, require_push=False)
            with phases.phase("engines", "starting a vLLM engine, which loads the model"):
                rollout = stack.enter_context(RolloutGroup(with_share(wanted, share_cluster(0, 1))))
        source = RolloutTokens(rollout, turn_sampling(config.sampling, inputs.ends))
        tasks = group_tasks([inputs.rows[row]], 0, 1, config.seed)
        options = PlayOptions(filled(config, "limits"), "zero", score=inputs.score, on_blocked=warn)
        with phases.phase("episode", f"row {row} of {config.dataset}"):
            (group,) = run_episodes(play_groups(inputs.player, tasks, source, options))
    return transcript(group.episodes[0], inputs.tokenizer)
