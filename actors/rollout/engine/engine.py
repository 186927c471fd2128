"""The Ray actor of one vLLM engine: starts it, samples, sleeps, and hands pushes and turns to its parts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate

import ray
import torch

from actors.cluster import prometheus
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.engine.adapters import AdapterStore
from actors.rollout.engine.in_process import VllmInProcess
from actors.rollout.engine.step_loop import Finished, Job, Stepper
from actors.rollout.engine.turns import TurnQueue
from actors.rollout.engine.weights import WeightReceiver
from actors.rollout.messages import AdapterVersion, EngineInfo, Generated, Request, Response, prompt_problem
from actors.rollout.placement import NodePlace
from actors.rollout.sample import ExpertIds, pack_routes
from actors.wire.segment import host_identity, remove_stale_segments
from rl_backend.contracts import BatchError, ConfigError, RolloutError, UnsupportedError
from rl_backend.trace.recorder import TraceBatch, recorder, span


def _answered_by[Part, **P, R](
    part: str, method: Callable[Concatenate[Part, P], R]
) -> Callable[Concatenate[RolloutEngine, P], R]:
    """A method of the engine that one of its parts answers: Ray calls methods of the actor alone."""

    @wraps(method)
    def call(engine: RolloutEngine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(engine, part), *args, **kwargs)

    return call


class RolloutEngine:
    """vLLM in this process. Made by :class:`~actors.rollout.group.group.RolloutGroup` as a Ray actor.

    Args:
        config: of the group.
        engine: its number in the group.
        device: ``cpu`` or ``cuda``.
        require_push: refuse to sample until weights have been pushed.
    """

    def __init__(self, config: RolloutConfig, engine: int, device: str, require_push: bool) -> None:
        self._vllm = VllmInProcess(config, engine, device, require_push=require_push)
        self._adapters = AdapterStore(self._vllm)
        self._weights = WeightReceiver(self._vllm, self._adapters.load_again)
        self._turns = TurnQueue(self._vllm)

    make_segment = _answered_by("_weights", WeightReceiver.make_segment)
    forget_segment = _answered_by("_weights", WeightReceiver.forget_segment)
    join_gloo = _answered_by("_weights", WeightReceiver.join_gloo)
    receive = _answered_by("_weights", WeightReceiver.receive)
    leave_gloo = _answered_by("_weights", WeightReceiver.leave_gloo)
    init_transfer = _answered_by("_weights", WeightReceiver.init_transfer)
    check_manifest = _answered_by("_weights", WeightReceiver.check_manifest)
    verify_part = _answered_by("_weights", WeightReceiver.verify_part)
    verify = _answered_by("_weights", WeightReceiver.verify)
    load = _answered_by("_weights", WeightReceiver.load)
    pause_turns = _answered_by("_weights", WeightReceiver.pause_turns)
    begin_update = _answered_by("_weights", WeightReceiver.begin_update)
    update = _answered_by("_weights", WeightReceiver.update)
    finish_update = _answered_by("_weights", WeightReceiver.finish_update)
    abandon_update = _answered_by("_weights", WeightReceiver.abandon_update)
    resume = _answered_by("_weights", WeightReceiver.resume)
    resume_turns = _answered_by("_weights", WeightReceiver.resume_turns)
    push_adapter = _answered_by("_adapters", AdapterStore.push)
    drop_adapter = _answered_by("_adapters", AdapterStore.drop)
    start_turns = _answered_by("_turns", TurnQueue.start)
    give_up_turns = _answered_by("_turns", TurnQueue.give_up)
    take_turns = _answered_by("_turns", TurnQueue.take)

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
        self._vllm.start(place, self, _make_stepper)
        return self.describe()

    def describe(self) -> EngineInfo:
        """Facts about the engine."""
        model = self._vllm.llm.model_config
        return EngineInfo(
            name=self._vllm.name,
            pid=os.getpid(),
            node_id=self.node(),
            node_ip=ray.util.get_node_ip_address(),
            host=host_identity(),
            cores=self._vllm.cores,
            device=self._vllm.device,
            dtype=self._vllm.config.dtype,
            workers=self._vllm.config.tensor_parallel,
            device_ids=_device_ids(self._vllm.device),
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            version=self._vllm.serving.version,
            state=self._vllm.serving.state,
            moe_layers=self._vllm.moe_layers,
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
            adapters: of each request, None for the weights alone; ``require_version`` is then about the adapter.

        Raises:
            EngineDirtyError: a weight update failed after its first load.
            RolloutError: an update is in progress, the engine sleeps, no weights have been pushed yet, vLLM returned no
                routes where they are asked for, or a log-prob is not a number.
            WeightVersionError: the weights are older than ``require_version``.
        """
        self._vllm.serving.check("sample")
        self._vllm.serving.check_weights()
        chosen = adapters or [None] * len(requests)
        for adapter in dict.fromkeys(chosen):
            self._vllm.serving.check_version(adapter, require_version)
        versions = [self._vllm.serving.version if adapter is None else adapter.version for adapter in chosen]
        with _observed(self._vllm.number, max(versions, default=self._vllm.serving.version), requests) as report:
            answers = self._sample(requests, sampling, chosen)
            responses = [[Response.of(each.completion.output, self._vllm.name) for each in answer] for answer in answers]
            routes = self._routes(requests, answers)
            report(responses)
        return Generated(versions, responses, routes)

    def probe_adapter(self, adapter: AdapterVersion, request: Request, sampling: SamplingConfig) -> Generated | None:
        """Samples without and with an adapter; None while the engine has no weights to sample with."""
        if self._vllm.serving.state != "serving" or self._vllm.serving.lacks_weights:
            return None
        return self.generate([request, request], sampling, None, [None, adapter])

    def seconds_without_progress(self) -> float:
        """How long it has served and ended no request; 0 while it sleeps, or waits for the end of a push."""
        return self._vllm.loop.seconds_without_progress

    def take_trace(self, stop: bool = False) -> TraceBatch:
        """As :meth:`~rl_backend.trace.recorder.TraceRecorder.take_batch`."""
        return recorder.take_batch(stop=stop)

    def close(self) -> None:
        """Frees the engine's own segment; the process is about to be killed."""
        self._weights.close()

    def require_push(self) -> None:
        """Refuse to sample until weights have been pushed."""
        self._vllm.serving.require_push()

    def forget_weights(self) -> None:
        """Prepares for another model: its push may have any version; the engine refuses to sample until then."""
        self._vllm.serving.forget_version()

    def sleep(self, level: int) -> None:
        """Frees the GPU's memory: level 1 keeps the weights in host memory, level 2 drops them, and turns that pause."""
        self._check_sleep_mode()
        self._vllm.serving.check("sleep")
        self._vllm.loop.hold()
        if level == 2:
            problem = "sleeps at level 2, which drops the weights of turns that pause; ask again after the next push"
            self._vllm.loop.drop(RolloutError(f"{self._vllm.name} {problem}", engine=self._vllm.name))
        self._vllm.loop.call(self._adapters.unload_all)
        # Turns that pause stay vLLM's requests. Their keys and values have been dropped.
        self._vllm.call(self._vllm.llm.sleep, level=level, mode="keep")
        self._vllm.serving.sleep()
        if level == 2:
            self._vllm.serving.forget_version()

    def wake_up(self) -> None:
        """Takes the GPU's memory back. After level 2, weights must be pushed before the engine samples."""
        self._check_sleep_mode()
        self._vllm.serving.check("wake up")
        self._vllm.call(self._vllm.llm.wake_up)
        self._vllm.serving.wake()
        if not self._vllm.serving.lacks_weights:  # else turns that have not begun go on waiting, for the push
            self._vllm.loop.release()

    def admit(self, job: Job) -> bool:
        """As :class:`~actors.rollout.engine.step_loop.Host`.

        Raises:
            BatchError: an empty or too long prompt, or an unknown token id.
            EngineDirtyError: a weight update failed after its first load.
            RolloutError: no weights have been pushed yet, or the adapter is not here.
            WeightVersionError: the weights are older than the job requires.
        """
        self._vllm.serving.check_clean()
        self._vllm.serving.check_weights()
        model = self._vllm.llm.model_config
        if problem := prompt_problem(job.request.prompt_ids, model.max_model_len, model.get_vocab_size()):
            raise BatchError(f"the prompt {problem}", engine=self._vllm.name)
        self._vllm.serving.check_version(job.adapter, job.require_version)
        return job.adapter is None or self._adapters.take_slot(job.adapter)

    def version_for(self, job: Job) -> int:
        """As :class:`~actors.rollout.engine.step_loop.Host`."""
        return self._vllm.serving.version if job.adapter is None else job.adapter.version

    def ended(self, job: Job) -> None:
        """As :class:`~actors.rollout.engine.step_loop.Host`."""
        if job.adapter is not None:
            self._adapters.leave_slot(job.adapter)

    def failed(self, error: Exception) -> Exception:
        """As :class:`~actors.rollout.engine.step_loop.Host`."""
        return self._vllm.translated(error)

    def _sample(
        self, requests: Sequence[Request], sampling: SamplingConfig, adapters: Sequence[AdapterVersion | None]
    ) -> list[list[Finished]]:
        """All responses of each request. Requests of one adapter begin together: there may be more adapters than slots."""
        places = {adapter: place for place, adapter in enumerate(dict.fromkeys(adapters))}
        order = sorted(range(len(requests)), key=lambda index: places[adapters[index]] if adapters[index] else -1)
        jobs = [[Job(replace(requests[index], n=1), sampling, adapters[index])] * requests[index].n for index in order]
        finished = iter(self._vllm.loop.run([job for of_request in jobs for job in of_request]))
        found = {index: [next(finished) for _ in range(requests[index].n)] for index in order}
        return [found[index] for index in range(len(requests))]

    def _routes(self, requests: Sequence[Request], answers: Sequence[Sequence[Finished]]) -> ExpertIds | None:
        if not self._vllm.config.return_routed_experts or not answers:
            return None
        answered = [
            (each.completion.output, len(request.prompt_ids) + len(each.completion.output.token_ids))
            for request, answer in zip(requests, answers, strict=True)
            for each in answer
        ]
        completions, lengths = zip(*answered, strict=True)
        return pack_routes(completions, lengths, self._vllm.moe_layers, self._vllm.name)

    def _check_model_is_here(self) -> None:
        if not (Path(self._vllm.config.model_path) / "config.json").is_file():
            raise ConfigError.of(
                "RolloutConfig.model_path",
                self._vllm.config.model_path,
                f"is not a Hugging Face directory on node {ray.util.get_node_ip_address()} (Ray node {self.node()}), where "
                f"{self._vllm.name} runs; a model has the same path on every node",
            )

    def _check_sleep_mode(self) -> None:
        if not self._vllm.config.sleep_mode or self._vllm.device == "cpu":
            raise UnsupportedError(
                f"{self._vllm.name} runs on {self._vllm.device} with sleep_mode={self._vllm.config.sleep_mode}: sleep() and "
                "wake_up() need RolloutConfig(device='cuda', sleep_mode=True)"
            )


def _make_stepper(llm: Any) -> Stepper:
    # It imports vLLM, whose environment is set by now.
    from actors.rollout.engine.stepper import VllmStepper

    return VllmStepper(llm)


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
