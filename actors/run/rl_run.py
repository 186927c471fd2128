"""A run whose engines answer prompts, and whose reward functions score the answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actors.rollout.stream import SampleStream
from actors.run.collect import BatchCollector, Inputs, TrainingBatch, load_inputs
from actors.run.held_out import HeldOutResult, answer
from actors.run.reward_scores import describe
from actors.run.sampled_config import RLConfig
from actors.run.sampled_run import SampledRun
from actors.run.saver import stream_position
from rl_backend.lab.text import count


class RLRun(SampledRun[RLConfig, Inputs, TrainingBatch]):
    """A run that samples: batches of prompts are answered by engines, scored, and trained on::

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

    Attributes:
        inputs: tokenizer, reward functions and prompts.
    """

    @property
    def _sources(self) -> str:
        return self.config.dataset

    def _load_inputs(self) -> Inputs:
        return load_inputs(self.config)

    @property
    def _data_facts(self) -> Sequence[str]:
        return [f"{len(self.inputs.prompts)} prompts", *self.inputs.notes]

    def _failed(self, number: int) -> str:
        return f"{count(number, 'call')} of reward functions"

    def _open_stream(self, batches_with_signal: int | None) -> None:
        config, inputs, start = self.config, self.inputs, self.start
        self._stack.callback(inputs.reward.close)
        collector: BatchCollector
        stream = self._stack.enter_context(
            SampleStream(
                self._rollout,
                inputs.batches,
                inputs.sampling,
                seed=config.seed,
                ahead=config.batches_ahead,
                adapter=self._adapter,
                start=stream_position(start),
                on_sampled=lambda batch: collector.sampled(batch),
            )
        )
        earlier = start.state("collector")
        collector = BatchCollector(config, stream, inputs, batches_with_signal=batches_with_signal, earlier=earlier)
        self._stream, self._collector = stream, collector

    def _answer_held_out(self) -> list[HeldOutResult]:
        inputs, config = self.inputs, self.config
        return answer(
            self._rollout, inputs.held_out, inputs.tokenizer, inputs.reward, seed=config.seed, adapter=self._adapter
        )

    def _sampled_ids(self) -> Iterable[Sequence[int]]:
        return (sample.response_ids for sample in self._batch.samples)

    def _log_samples(self, step: int) -> None:
        batch, logged = self._batch, slice(self.config.samples_logged)
        lines = describe(batch.samples[logged], batch.prompts[logged], batch.scores[logged], self.inputs.tokenizer)
        self.folder.log_samples(step, lines)
