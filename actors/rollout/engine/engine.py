"""The Ray actor of one vLLM engine: starts it, answers requests, sleeps, and hands pushes to its parts."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate

import ray
import torch

from actors.cluster import prometheus
from actors.cluster.processes import Process, start_time
from actors.rollout.config import RolloutConfig
from actors.rollout.engine.adapters import AdapterStore
from actors.rollout.engine.in_process import VllmInProcess
from actors.rollout.engine.step_loop import Completion, Stepper, Stretch
from actors.rollout.engine.weights import WeightReceiver
from actors.rollout.messages import EngineInfo, Request, Response, WakePart, mask_of, prompt_problem, routes_of
from actors.rollout.placement import NodePlace
from actors.wire.segment import drop_names, host_identity, remove_own, remove_stale_segments
from rl_backend.contracts import BatchError, ConfigError, RLBackendError, RolloutError, UnsupportedError
from rl_backend.trace.recorder import TraceBatch, recorder

# Turns come in, answers are waited for, and heartbeats answered, while a push is served.
CONCURRENCY_GROUPS = {"turns": 1, "answers": 1, "pulse": 1}
_MOST_ANSWERS = 256


class TurnQueue:
    def __init__(self, vllm: VllmInProcess) -> None:
        self._vllm = vllm
        self._answers: queue.SimpleQueue[tuple[int, Response | RLBackendError]] = queue.SimpleQueue()
        # The asking process's key -> the loop's, of turns that are not answered.
        self._keys: dict[int, int] = {}

    def start(self, turns: Sequence[tuple[int, Request]]) -> None:
        """Asks for turns, each with a key of the caller's. An error of one is its answer and affects no other."""
        pausable = self._vllm.config.turns_at_push == "pause"
        accepted = [
            # With an adapter never: the base changes under it.
            (turn, replace(request, pausable=pausable and request.waits and request.adapter is None))
            for turn, request in turns
            if request.waits or self._accepts(turn)
        ]
        submitted = self._vllm.loop.submit([request for _, request in accepted])
        for (turn, request), (key, result) in zip(accepted, submitted.items(), strict=True):
            self._keys[turn] = key
            result.add_done_callback(partial(self._answer, turn, request))

    def give_up(self, turns: Iterable[int]) -> None:
        """Ends turns: each is answered with what there is of it. Those that are answered already are passed over."""
        # Looked up once: the loop's thread takes a key out when its turn is answered.
        self._vllm.loop.give_up([found for turn in turns if (found := self._keys.get(turn)) is not None])

    def take(self, seconds: float) -> list[tuple[int, Response | RLBackendError]]:
        """Key and answer, or error, of turns that have ended; waits for the first. None within ``seconds``: empty."""
        answers = []
        try:
            answers.append(self._answers.get(timeout=seconds))
            while len(answers) < _MOST_ANSWERS:
                answers.append(self._answers.get_nowait())
        except queue.Empty:
            pass
        return answers

    def _accepts(self, turn: int) -> bool:
        try:
            self._vllm.serving.check("sample")
            self._vllm.serving.check_weights()
        except RLBackendError as error:
            self._answers.put((turn, error))
            return False
        return True

    def _answer(self, turn: int, request: Request, result: Future[Completion]) -> None:
        del self._keys[turn]
        answer: Response | RLBackendError
        try:
            answer = self._response(request, result.result())
        except RLBackendError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 vLLM raises errors of any type
            answer = RolloutError(f"{self._vllm.name} failed with {type(error).__name__}: {error}", engine=self._vllm.name)
        self._answers.put((turn, answer))

    def _response(self, request: Request, completion: Completion) -> Response:
        output, cached, spans = completion
        number, name, prompt = self._vllm.number, self._vllm.name, len(request.prompt_ids)
        if output is None:
            return Response([], [], "abort", engine=number)
        response = Response.of(output, name, spans=spans, cached_tokens=cached, engine=number)
        engine, tokens = str(number), len(response.token_ids)
        prometheus.count("rl_backend_rollout_responses_total", 1, engine=engine)
        prometheus.count("rl_backend_rollout_tokens_total", tokens, engine=engine)
        prometheus.count("rl_backend_turn_prompt_tokens_total", prompt, engine=engine)
        prometheus.count("rl_backend_turn_cached_tokens_total", cached, engine=engine)
        if self._vllm.config.return_routed_experts and tokens:
            response = replace(response, routes=routes_of(output, prompt + tokens, self._vllm.moe_layers, name))
        if self._vllm.config.returns_masks and tokens:
            response = replace(response, sampling_mask=mask_of(output, name))
        return response


def _answered_by[Part, **P, R](
    part: str, method: Callable[Concatenate[Part, P], R]
) -> Callable[Concatenate[RolloutEngine, P], R]:
    """A method of the engine that one of its parts answers: Ray calls methods of the actor alone."""

    @wraps(method)
    def call(engine: RolloutEngine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(engine, part), *args, **kwargs)

    return call


class RolloutEngine:
    """vLLM in this process, as engine number ``engine`` of a group, which makes it as a Ray actor."""

    def __init__(self, config: RolloutConfig, engine: int, device: str, require_push: bool) -> None:
        self._vllm = VllmInProcess(config, engine, device, require_push=require_push)
        self._adapters = AdapterStore(self._vllm)
        self._weights = WeightReceiver(self._vllm, self._adapters.load_again)
        self._turns = TurnQueue(self._vllm)

    weight_reads = _answered_by("_weights", WeightReceiver.weight_reads)
    make_segment = _answered_by("_weights", WeightReceiver.make_segment)
    forget_segment = _answered_by("_weights", WeightReceiver.forget_segment)
    join_gloo = _answered_by("_weights", WeightReceiver.join_gloo)
    held_push = _answered_by("_weights", WeightReceiver.held_push)
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

    def locate(self) -> tuple[str, Process]:
        """This node's id, and the process."""
        return self.node(), Process.of(os.getpid())

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def start(self, place: NodePlace) -> EngineInfo:
        """Starts vLLM, at its place among the group's engines on this node."""
        # Not in the constructor, where Ray would wrap its errors.
        self._check_model_is_here()
        remove_stale_segments()
        self._vllm.start(place, self, _make_stepper)
        processes = self._vllm.ask_workers("process")
        self._vllm.workers.watch([process for process in processes if process.pid != os.getpid()])
        # All of them have it by now.
        drop_names([os.getpid(), *(process.pid for process in processes)])
        return self.describe()

    def describe(self) -> EngineInfo:
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
            started=start_time(os.getpid()),
            room=self._vllm.loop.room,
        )

    def probe_adapter(self, request: Request) -> list[Response] | None:
        """What the weights alone answer, and what they answer with the adapter; None where the engine does not serve."""
        if self._vllm.serving.state != "serving" or self._vllm.serving.lacks_weights:
            return None
        answers = self._vllm.loop.submit([replace(request, adapter=None), request]).values()
        completions = [answer.result() for answer in answers]
        return [Response.of(each.output, self._vllm.name, spans=each.spans) for each in completions]

    def seconds_without_progress(self) -> float:
        """How long it has served and ended no request; 0 while it sleeps, or waits for the end of a push."""
        return self._vllm.loop.seconds_without_progress

    def pulse(self) -> RLBackendError | None:
        """Answers a heartbeat, with the error of an engine that is dirty, or has lost a worker or its step loop."""
        # Not raised: Ray prints errors that nobody reads, as of an engine that was replaced meanwhile.
        try:
            self._vllm.workers.check()
            self._vllm.loop.check()
            self._vllm.serving.check_clean()
        except RLBackendError as error:
            return error
        return None

    def take_trace(self, stop: bool = False) -> TraceBatch:
        return recorder.take_batch(stop=stop)

    def close(self) -> None:
        """Frees the engine's own segment and files; the process is about to be killed."""
        self._weights.close()
        remove_own()

    def require_push(self) -> None:
        self._vllm.serving.require_push()

    def forget_weights(self) -> None:
        """Prepares for another model: refuses to sample until the next push, whose version may be any."""
        self._vllm.serving.forget_version()

    def sleep(self, level: int) -> None:
        """Frees memory: level 1 keeps the weights in host memory, level 2 drops them, and turns that pause.

        On a CPU, where vLLM frees nothing, keys and values are freed; of the weights the memory stays.
        """
        self._check_sleep_mode()
        self._vllm.serving.check("sleep")
        self._vllm.loop.hold()
        if level == 2:
            problem = "sleeps at level 2, which drops the weights of turns that pause; ask again after the next push"
            self._vllm.loop.drop(RolloutError(f"{self._vllm.name} {problem}", engine=self._vllm.name))
        self._vllm.loop.call(self._adapters.unload_all)
        # Turns that pause stay vLLM's requests. Their keys and values have been dropped.
        self._vllm.call(self._vllm.llm.sleep, level=level, mode="keep")
        if self._vllm.device == "cpu":
            self._vllm.ask_workers("free_cache")
        self._vllm.serving.sleep()
        if level == 2:
            self._vllm.serving.forget_version()

    def wake_up(self, part: WakePart = "all") -> None:
        """Takes the memory back. After level 2, weights must be pushed before the engine samples."""
        self._check_sleep_mode()
        serving = self._vllm.serving
        tags = serving.tags_to_wake(part)
        if self._vllm.device == "cpu" and part != "weights":
            self._vllm.ask_workers("take_cache")
        self._vllm.call(self._vllm.llm.wake_up, **({} if tags is None else {"tags": tags}))
        serving.wake(part)
        # Without weights turns that have not begun go on waiting, for the push.
        if serving.state == "serving" and not serving.lacks_weights:
            self._vllm.loop.release()

    # The next five are the Host of the step loop.

    def admit(self, request: Request) -> bool:
        self._vllm.serving.check_clean()
        self._vllm.serving.check_weights()
        model = self._vllm.llm.model_config
        if problem := prompt_problem(request.prompt_ids, model.max_model_len, model.get_vocab_size()):
            raise BatchError(f"the prompt {problem}", engine=self._vllm.name)
        self._vllm.serving.check_version(request.adapter, request.require_version)
        return request.adapter is None or self._adapters.take_slot(request.adapter)

    def version_for(self, request: Request) -> int:
        return self._vllm.serving.version if request.adapter is None else request.adapter.version

    def ended(self, request: Request) -> None:
        if request.adapter is not None:
            self._adapters.leave_slot(request.adapter)

    def sampled(self, stretch: Stretch) -> None:
        facts: dict[str, Any] = {
            "weight_version": stretch.version,
            "responses": stretch.responses,
            "prompt_tokens": stretch.prompt_tokens,
            "response_tokens": stretch.response_tokens,
        }
        recorder.add("generate", "rollout", stretch.start, stretch.end, facts)
        seconds = (stretch.end - stretch.start) / 1e9
        prometheus.count("rl_backend_rollout_seconds_total", seconds, engine=str(self._vllm.number))

    def failed(self, error: Exception) -> Exception:
        return self._vllm.translated(error)

    def _check_model_is_here(self) -> None:
        if not (Path(self._vllm.config.model_path) / "config.json").is_file():
            raise ConfigError.of(
                "RolloutConfig.model_path",
                self._vllm.config.model_path,
                f"is not a Hugging Face directory on node {ray.util.get_node_ip_address()} (Ray node {self.node()}), where "
                f"{self._vllm.name} runs; a model has the same path on every node",
            )

    def _check_sleep_mode(self) -> None:
        if not self._vllm.config.sleep_mode:
            raise UnsupportedError(
                f"{self._vllm.name} was started with sleep_mode=False: sleep() and wake_up() need "
                "RolloutConfig(sleep_mode=True)"
            )


def _make_stepper(llm: Any) -> Stepper:
    # It imports vLLM, whose environment is set by now.
    from actors.rollout.engine.stepper import VllmStepper

    return VllmStepper(llm)


def _device_ids(device: str) -> tuple[str, ...]:
    if device == "cpu":
        return ()
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))
