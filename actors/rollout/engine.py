"""One vLLM engine, living in the process of a Ray actor: starting, sampling, sleeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import ray
import torch

from actors.cluster import prometheus
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.jobs import Finished, Job, Stepper
from actors.rollout.messages import AdapterVersion, EngineInfo, Generated, Request, Response
from actors.rollout.placement import NodePlace, choose_cores
from actors.rollout.sample import ExpertIds, pack_routes
from actors.rollout.turn_server import TurnServer
from actors.rollout.vllm.expected import EngineParameters, expected_weights
from actors.rollout.vllm.process import prepare_process, start_vllm
from actors.wire.segment import host_identity, remove_stale_segments
from rl_backend.contracts import (
    UNVERSIONED,
    ConfigError,
    RolloutError,
    UnsupportedError,
)
from rl_backend.trace.recorder import TraceBatch, recorder, span
from rl_backend.weights.compare import ExpectedWeights


class RolloutEngine(TurnServer):
    """vLLM in this process. Made by :class:`~actors.rollout.group.RolloutGroup` as a Ray actor.

    Args:
        config: of the group.
        engine: its number in the group.
        device: ``cpu`` or ``cuda``.
        require_push: refuse to sample until weights have been pushed.
    """

    def __init__(self, config: RolloutConfig, engine: int, device: str, require_push: bool) -> None:
        super().__init__(config, engine, device)
        self._require_push = require_push

    def node(self) -> str:
        """Id of the Ray node that this engine has landed on."""
        return str(ray.get_runtime_context().get_node_id())

    def start(self, place: NodePlace) -> EngineInfo:
        """Starts vLLM. Not in the constructor, where Ray would wrap its errors.

        Args:
            place: among the group's engines on this node.
        """
        self._check_model_is_here()
        remove_stale_segments()
        if self._device == "cpu":
            self._cores = choose_cores(self._config, self._engine, place)
        prepare_process(self._device, self._cores, self._config.tensor_parallel)
        self._loop.start(self, self._start_vllm)
        self._expected = self._expected_weights()
        if self._config.return_routed_experts:
            self._moe_layers = tuple(self._vllm_call(self._llm.collective_rpc, "moe_layers")[0])
        return self.describe()

    def _start_vllm(self) -> Stepper:
        self._llm = start_vllm(self._config, self._device)
        from actors.rollout.vllm.stepper import VllmStepper

        return VllmStepper(self._llm)

    def describe(self) -> EngineInfo:
        """Facts about the engine."""
        model = self._llm.model_config
        return EngineInfo(
            name=self._name,
            pid=os.getpid(),
            node_id=self.node(),
            node_ip=ray.util.get_node_ip_address(),
            host=host_identity(),
            cores=self._cores,
            device=self._device,
            dtype=self._config.dtype,
            workers=self._config.tensor_parallel,
            device_ids=_device_ids(self._device),
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            version=self._version,
            state=self._state,
            moe_layers=self._moe_layers,
        )

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        require_version: int | None,
        adapters: Sequence[AdapterVersion | None] | None = None,
    ) -> Generated:
        """Samples.

        Args:
            adapters: for each request what works beside the weights; ``require_version`` is then of its version.

        Raises:
            EngineDirtyError: a weight update failed after its first load.
            RolloutError: an update is in progress, the engine sleeps, no weights have been pushed yet, vLLM returned no
                routes where they are asked for, or a log-prob is not a number.
            WeightVersionError: the weights are older than ``require_version``.
        """
        self._check_serving()
        chosen = adapters or [None] * len(requests)
        for adapter in dict.fromkeys(chosen):
            self._require_version(adapter, require_version)
        versions = [self._version if adapter is None else adapter.version for adapter in chosen]
        with _observed(self._engine, max(versions, default=self._version), requests) as report:
            answers = self._sample(requests, sampling, chosen)
            responses = [[Response.of(each.completion.output, self._name) for each in answer] for answer in answers]
            routes = self._routes(requests, answers)
            report(responses)
        return Generated(versions, responses, routes)

    def probe_adapter(self, adapter: AdapterVersion, request: Request, sampling: SamplingConfig) -> Generated | None:
        """Samples without and with an adapter; None while the engine has no weights to sample with."""
        if self._state != "serving" or self._lacks_weights:
            return None
        return self.generate([request, request], sampling, None, [None, adapter])

    def take_trace(self, stop: bool = False) -> TraceBatch:
        """As :meth:`~rl_backend.trace.recorder.TraceRecorder.take_batch`."""
        return recorder.take_batch(stop=stop)

    def close(self) -> None:
        """Frees the engine's own segment; the process is about to be killed."""
        self._drop_own_segment()

    def require_push(self) -> None:
        """Refuse to sample until weights have been pushed."""
        self._require_push = True

    def forget_weights(self) -> None:
        """Prepares for another model: its push may have any version; the engine refuses to sample until then."""
        self._check_clean()
        self._version, self._require_push = UNVERSIONED, True

    def sleep(self, level: int) -> None:
        """Frees the GPU's memory: level 1 keeps the weights in host memory, level 2 drops them, and turns that pause."""
        self._check_sleep_mode()
        self._check_clean()
        self._loop.hold()
        if level == 2:
            problem = "sleeps at level 2, which drops the weights of turns that pause; ask again after the next push"
            self._loop.drop(RolloutError(f"{self._name} {problem}", engine=self._name))
        self._loop.call(self._unload_all)
        # Turns that pause stay vLLM's requests. Their keys and values have been dropped.
        self._vllm_call(self._llm.sleep, level=level, mode="keep")
        self._state = "asleep"
        if level == 2:
            self._version, self._require_push = UNVERSIONED, True

    def wake_up(self) -> None:
        """Takes the GPU's memory back. After level 2, weights must be pushed before the engine samples."""
        self._check_sleep_mode()
        self._vllm_call(self._llm.wake_up)
        self._state = "serving"
        if not self._lacks_weights:  # else turns that have not begun go on waiting, for the push
            self._loop.release()

    def _sample(
        self, requests: Sequence[Request], sampling: SamplingConfig, adapters: Sequence[AdapterVersion | None]
    ) -> list[list[Finished]]:
        """All responses of each request. Requests of one adapter begin together: there may be more adapters than slots."""
        places = {adapter: place for place, adapter in enumerate(dict.fromkeys(adapters))}
        order = sorted(range(len(requests)), key=lambda index: places[adapters[index]] if adapters[index] else -1)
        jobs = [[Job(replace(requests[index], n=1), sampling, adapters[index])] * requests[index].n for index in order]
        finished = iter(self._loop.run([job for of_request in jobs for job in of_request]))
        found = {index: [next(finished) for _ in range(requests[index].n)] for index in order}
        return [found[index] for index in range(len(requests))]

    def _routes(self, requests: Sequence[Request], answers: Sequence[Sequence[Finished]]) -> ExpertIds | None:
        if not self._config.return_routed_experts or not answers:
            return None
        answered = [
            (each.completion.output, len(request.prompt_ids) + len(each.completion.output.token_ids))
            for request, answer in zip(requests, answers, strict=True)
            for each in answer
        ]
        completions, lengths = zip(*answered, strict=True)
        return pack_routes(completions, lengths, self._moe_layers, self._name)

    def _check_model_is_here(self) -> None:
        if not (Path(self._config.model_path) / "config.json").is_file():
            raise ConfigError.of(
                "RolloutConfig.model_path",
                self._config.model_path,
                f"is not a Hugging Face directory on node {ray.util.get_node_ip_address()} (Ray node {self.node()}), where "
                f"{self._name} runs; a model has the same path on every node",
            )

    def _expected_weights(self) -> ExpectedWeights:
        def describe(checkpoint: Sequence[str]) -> EngineParameters:
            described: EngineParameters
            described, *_ = self._vllm_call(self._llm.collective_rpc, "describe_parameters", args=(checkpoint,))
            return described

        return expected_weights(self._config.model_path, self._config.dtype, describe)

    def _check_serving(self) -> None:
        self._check_clean()
        if self._state != "serving":
            why = {"paused": "a weight update is in progress", "asleep": "it sleeps; wake_up() first"}[self._state]
            raise RolloutError(f"{self._name} does not sample now: {why}", engine=self._name, state=self._state)
        self._check_weights()

    def _check_sleep_mode(self) -> None:
        if not self._config.sleep_mode or self._device == "cpu":
            raise UnsupportedError(
                f"{self._name} runs on {self._device} with sleep_mode={self._config.sleep_mode}: sleep() and wake_up() need "
                "RolloutConfig(device='cuda', sleep_mode=True)"
            )


@contextmanager
def _observed(
    engine: int, version: int, requests: Sequence[Request]
) -> Iterator[Callable[[Sequence[Sequence[Response]]], None]]:
    """Reports the sampling that its body does; hand the responses to what it yields."""
    started = time.perf_counter()
    with span("generate", "rollout", weight_version=version, requests=len(requests)) as event:

        def report(responses: Sequence[Sequence[Response]]) -> None:
            count = sum(map(len, responses))
            tokens = sum(len(response.token_ids) for request in responses for response in request)
            prompt_tokens = sum(len(request.prompt_ids) for request in requests)
            event.update(responses=count, prompt_tokens=prompt_tokens, response_tokens=tokens)
            prometheus.count("rl_backend_rollout_responses_total", count, engine=str(engine))
            prometheus.count("rl_backend_rollout_tokens_total", tokens, engine=str(engine))
            prometheus.count("rl_backend_rollout_seconds_total", time.perf_counter() - started, engine=str(engine))

        yield report


def _device_ids(device: str) -> tuple[str, ...]:
    if device == "cpu":
        return ()
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))
