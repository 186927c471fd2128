"""A group of vLLM engines that sample as one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from actors.rollout.calls import PendingSamples
from actors.rollout.config import SamplingConfig
from actors.rollout.engine_lifecycle import StartedEngines
from actors.rollout.engines import FixedEngines, raise_first
from actors.rollout.messages import EngineInfo
from actors.rollout.requests import check_prompts, requests_of, shares_of
from actors.rollout.sample import Sample


class RolloutGroup(StartedEngines):
    """Starts ``config.num_engines`` engines, each a Ray actor, and samples over all of them.

    An engine that dies raises :class:`~rl_backend.contracts.EngineDeadError` once, in the call that it was serving, and one
    whose weight update fails raises :class:`~rl_backend.contracts.EngineDirtyError`, in the push; later calls go to the
    engines that are left, until :meth:`restart`. When none is left, every call raises.

    Args:
        config: the engines.
        scheduling: for each engine a Ray scheduling strategy, for example a bundle of a placement group that it shares with
            training; None reserves GPUs and ``config.cores_per_engine`` for them where Ray has them free.

    Raises:
        ConfigError: a configuration that cannot work here, or a model that is not on an engine's node.
        UnsupportedError: the cluster does not have the GPUs or CPUs.
        RolloutError: an engine that did not start.
    """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        seeds: Sequence[int] | None = None,
        require_version: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        timeout: float | None = None,
    ) -> list[Sample]:
        """Samples ``sampling.n`` responses of each prompt; prompt by prompt, in the caller's order.

        Args:
            prompts: token ids; each prompt is shorter than the engines' ``max_model_len``.
            seeds: one for each sample, in the order of the result (see :func:`~actors.rollout.sample.sample_seeds`). With
                seeds a sample depends neither on the number of engines nor on batching.
            require_version: refuse weights that are older; with an adapter, versions of it that are older.
            adapter: name of a LoRA tenant, whose last pushed version works beside the weights; or one for each prompt, None
                for the weights alone. They are sampled in one batch, which ``max_adapters`` tenants have room in.
            timeout: seconds to wait.

        Raises:
            BatchError: an empty or too long prompt, an unknown token id, a wrong number of seeds.
            ConfigError: stop strings, and engines without a tokenizer.
            EngineDeadError: an engine died while it served this call, or none is left.
            EngineDirtyError: an engine whose last weight update failed.
            RolloutError: a tenant that has not been pushed, or weights with an adapter merged into them.
            WeightVersionError: an engine's weights are older than ``require_version``.
        """
        pending = self.submit(prompts, sampling, seeds=seeds, require_version=require_version, adapter=adapter)
        return pending.result(timeout)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        seeds: Sequence[int] | None = None,
        require_version: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> PendingSamples:
        """:meth:`generate` without waiting. A later push waits for it, so it samples with the present weights."""
        check_prompts(prompts, sampling, seeds, self.config, next(iter(self._infos.values())))
        with self._lock:
            actors = self._living()
            chosen = self._chosen(adapter, len(prompts))
            note = partial(self._note_call, actors)
            pending = PendingSamples(prompts, sampling.n, note, self._sampling)
            for (engine, actor), share in zip(actors.items(), shares_of(len(prompts), len(actors)), strict=True):
                if share:
                    parts = [requests_of(prompt, prompts, sampling.n, seeds) for prompt in share]
                    requests = [request for part in parts for request in part]
                    adapters = chosen and [chosen[prompt] for prompt, part in zip(share, parts, strict=True) for _ in part]
                    reference = actor.generate.remote(requests, sampling, require_version, adapters)
                    pending.add(reference, engine, share)
                    self._sampling.add(engine, reference)
        return pending

    def fixed(self) -> FixedEngines:
        """The present engines, for work that must go to the same processes from beginning to end."""
        members, lost = self._members(), self.lost_engines
        locks = {"lock": self._lock, "changing": self._changing}
        return FixedEngines(self.config, members, lost, **locks, sampling=self._sampling, lose=self._lose)

    def attach_weight_sync(self) -> None:
        """From now on engines, even those restarted later, refuse to sample until weights have been pushed."""
        self._require_push = True
        raise_first(self.call("require_push"))

    def forget_weights(self) -> None:
        """For another model: engines refuse to sample until the next push, whose version may be any.

        Raises:
            EngineDeadError, EngineDirtyError: of an engine that cannot.
        """
        self._require_push = True
        raise_first(self.call("forget_weights"))

    def sleep(self, level: int = 1) -> None:
        """Frees the engines' GPU memory for training: level 1 keeps the weights in host memory, 2 drops them.

        At level 2 turns that pause (``turns_at_push="pause"``) raise a ``RolloutError``; at level 1 they go on afterwards.

        Raises:
            UnsupportedError: on a CPU, or without ``sleep_mode``.
        """
        # Engines wait for turns in flight, which may take as long as a request.
        raise_first(self.call("sleep", level, timeout=self.config.sampling_timeout))

    def wake_up(self) -> None:
        """Takes the GPU memory back."""
        raise_first(self.call("wake_up"))

    def describe(self) -> dict[int, EngineInfo]:
        """Fresh facts about every living engine."""
        outcomes = self.call("describe")
        raise_first(outcomes)
        return outcomes

    def _note_call(self, actors: dict[int, Any], engine: int, outcome: Any) -> None:
        self._note(engine, actors[engine], outcome)
