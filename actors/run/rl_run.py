"""Runs that sample: engines answer prompts (:class:`RLRun`), or play episodes of many turns (:class:`EpisodeRun`)."""

from collections.abc import Mapping, Sequence
from functools import partial

from actors.collect.collector import CollectedBatch
from actors.collect.episodes import EpisodeBatch, EpisodeSource, turn_sampling
from actors.collect.inputs import load_episode_inputs, load_inputs
from actors.collect.prompts import PromptSource, TrainingBatch
from actors.options.sampled_config import EpisodeConfig, RLConfig, SampledConfig
from actors.rollout.group.group import RolloutGroup
from actors.rollout.tokens import RolloutTokens
from actors.run.run import Run
from actors.run.sampling import RunResult
from actors.sync.report import PushReport
from actors.train.model import GroupModel
from actors.watch.console import warn


class SampledRun[C: SampledConfig, B: CollectedBatch](Run[C]):
    """What both kinds of runs do between :meth:`begin` and the end."""

    def collect(self) -> B:
        """The batch of the step. With ``colocate`` engines sleep afterwards; the phase ``hand_over``."""
        self._parts.require_engines()
        batch: B = self._sampled.collect(self._step, self._clock)
        if self._parts.to_ranks():
            self.lap("hand_over")
        return batch

    def push(self) -> PushReport:
        """Brings the policy's weights to the engines; the phase ``sync`` of the step.

        With ``colocate`` ranks move to host memory, so a checkpoint that is due is saved before.
        """
        if self.config.colocates:
            self._parts.to_ranks()
            self._saver.save(self._step, self._clock)
        return self._sampled.push(self._step, self.lap)

    def finish(self) -> RunResult:
        """After the last step; also writes ``summary.json``."""
        return self._sampled.finish()


class RLRun(SampledRun[RLConfig, TrainingBatch]):
    """Engines answer batches of prompts, which are scored and trained on::

    with RLRun(config) as run:
        policy = run.build_model("policy")
        run.begin("Mine", {"policy": policy})
        for step in run.steps():
            batch = run.collect()
            ...  # updates of the policy
            run.lap("train")
            run.push()
            run.end_step(batch.metrics | update_metrics(updates))
        run.save_model(policy)
        result = run.finish()
    """

    def _load_data(self) -> None:
        with self.phase("data", f"reading {self.config.dataset}"):
            self.inputs = load_inputs(self.config, self.start.progress.taken)

    def begin(
        self,
        title: str,
        trained: Mapping[str, GroupModel],
        facts: Sequence[str] = (),
        *,
        batches_with_signal: int | None = None,
    ) -> None:
        """Restores a checkpoint, if any, pushes the weights of the first of ``trained`` and evaluates them.

        Args:
            batches_with_signal: dynamic sampling, see :class:`~actors.collect.prompts.PromptSource`.
        """
        config, inputs, start = self.config, self.inputs, self.start

        def open_source(rollout: RolloutGroup, adapter: str | None) -> PromptSource:
            position = start.progress.position
            return PromptSource(
                config, inputs, rollout, adapter=adapter, start=position, batches_with_signal=batches_with_signal
            )

        known = [f"{len(inputs.prompts)} prompts", *inputs.notes, *config.facts(), *facts]
        self._begin_sampling(title, trained, known, config, inputs, open_source)


class EpisodeRun(SampledRun[EpisodeConfig, EpisodeBatch]):
    """Engines play groups of episodes, which are trained on. The loop is that of :class:`RLRun`, with
    ``episode_sequences(batch.episodes, truncated=config.truncated)`` and ``episode_parts(sequences, batch.groups, ...)``.
    """

    def _load_data(self) -> None:
        with self.phase("data", f"reading {self.config.dataset}, and {self.config.task}"):
            self.inputs = load_episode_inputs(self.config, self.start.progress.taken)

    def begin(self, title: str, trained: Mapping[str, GroupModel], facts: Sequence[str] = ()) -> None:
        config, inputs, start = self.config, self.inputs, self.start

        def open_source(rollout: RolloutGroup, adapter: str | None) -> EpisodeSource:
            return EpisodeSource(
                config,
                inputs,
                lambda sampling: RolloutTokens(rollout, turn_sampling(sampling, inputs.ends), adapter=adapter),
                start=start.progress.position,
                on_warning=partial(warn, label=self.label),
            )

        known = [f"{len(inputs.rows)} rows", config.task, *inputs.notes, *config.facts(), *facts]
        self._begin_sampling(title, trained, known, config, inputs, open_source)
