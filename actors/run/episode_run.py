"""A run whose samples are episodes of many turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from actors.rollout.config import SamplingConfig
from actors.rollout.tokens import RolloutTokens
from actors.run.console import warn
from actors.run.episode_collect import EpisodeBatch, EpisodeCollector
from actors.run.episode_inputs import EpisodeInputs, load_episode_inputs
from actors.run.episode_stream import EpisodeStream
from actors.run.held_out import HeldOutResult
from actors.run.held_out_episodes import play_held_out
from actors.run.sampled_config import EpisodeConfig
from actors.run.sampled_run import SampledRun
from actors.run.saver import stream_position
from actors.run.transcripts import describe_episodes
from rl_backend.contracts import ConfigError
from rl_backend.environment import Limits
from rl_backend.environment.groups import PlayOptions
from rl_backend.lab.text import count
from rl_backend.options.option_set import filled


class EpisodeRun(SampledRun[EpisodeConfig, EpisodeInputs, EpisodeBatch]):
    """A run that plays groups of episodes, and trains on them::

        with EpisodeRun(config) as run:
            policy = run.build_model("policy")
            run.begin("Mine", {"policy": policy})
            for step in run.steps():
                batch = run.collect()
                sequences = episode_sequences(batch.episodes, truncated=config.truncated)
                ...  # updates of the policy, of episode_parts(sequences, batch.groups, ...)
                run.lap("train")
                run.push()
                run.end_step(batch.metrics | update_metrics(updates))
            run.save_model(policy)
            result = run.finish()

    Args:
        config, session, on_step, label, stop: see :class:`~actors.run.run.Run`.

    Attributes:
        inputs: tokenizer, player and rows.
    """

    @property
    def _sources(self) -> str:
        return f"{self.config.dataset}, and {self.config.task}"

    def _load_inputs(self) -> EpisodeInputs:
        return load_episode_inputs(self.config)

    @property
    def _data_facts(self) -> Sequence[str]:
        return [f"{len(self.inputs.rows)} rows", self.config.task, *self.inputs.notes]

    def _failed(self, number: int) -> str:
        return count(number, "episode")

    def _open_stream(self, batches_with_signal: int | None) -> None:
        if batches_with_signal is not None:
            problem = "episodes are not sampled anew for groups of equal rewards; leave it out"
            raise ConfigError.of("batches_with_signal", batches_with_signal, problem)
        config = self.config
        self._stream = stream = self._stack.enter_context(
            EpisodeStream(
                self.inputs.player,
                self._source(config.sampling),
                self._play_options(filled(config, "limits")),
                self.inputs.batches,
                n=config.sampling.n,
                seed=config.seed,
                ahead=config.batches_ahead,
                during_episodes=config.push_during_episodes,
                start=stream_position(self.start),
            )
        )
        warned = partial(warn, label=self.label)
        self._collector = EpisodeCollector(config, stream, earlier=self.start.state("collector"), on_skipped=warned)

    def _source(self, sampling: SamplingConfig) -> RolloutTokens:
        return RolloutTokens(self._rollout, turn_sampling(sampling, self.inputs.ends), adapter=self._adapter)

    def _answer_held_out(self) -> list[HeldOutResult]:
        limits = filled(self.config, "limits")
        return [
            play_held_out(
                held_out,
                self.inputs.player,
                self._source(held_out.sampling),
                self._play_options(limits.replace(turn_tokens=held_out.sampling.max_new_tokens)),
                seed=self.config.seed,
                index=index,
            )
            for index, held_out in enumerate(self.inputs.held_out)
        ]

    def _play_options(self, limits: Limits) -> PlayOptions:
        config, warned = self.config, partial(warn, label=self.label)
        return PlayOptions(limits, config.on_episode_failure, config.least_episodes, self.inputs.score, warned)

    def _sampled_ids(self) -> Iterable[Sequence[int]]:
        return (turn.token_ids for episode in self._batch.episodes for turn in episode.turns)

    def _log_samples(self, step: int) -> None:
        batch, most, tokenizer = self._batch, self.config.samples_logged, self.inputs.tokenizer
        lines = describe_episodes(batch.episodes[:most], tokenizer)
        left = max(most - len(lines), 0)
        self.folder.log_samples(step, [*lines, *describe_episodes(batch.dropped[:left], tokenizer, dropped=True)])


def turn_sampling(sampling: SamplingConfig, ends: Sequence[int]) -> SamplingConfig:
    """How turns are sampled; lengths come with each turn, and further stop tokens.

    Args:
        ends: tokens that end any turn, see :class:`~actors.run.episode_inputs.EpisodeInputs`.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "stop_strings")
    given = {name: getattr(sampling, name) for name in names if sampling.is_set(name)}
    return SamplingConfig(**given, stop_token_ids=tuple(dict.fromkeys([*sampling.stop_token_ids, *ends])))
