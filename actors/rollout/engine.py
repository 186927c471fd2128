"""One vLLM engine, living in the process of a Ray actor.

The engine is a small state machine. ``generate`` is served only in state ``serving``; an update goes ``verify`` ->
``load`` -> ``resume``, and between the last two the engine is ``paused``. A failure after the first load leaves it
``dirty`` for good.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from actors.cluster import prometheus
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.cores import NodePlace, choose_cores
from actors.rollout.messages import EngineInfo, EngineState, Generated, Request, Response
from actors.rollout.observed import observed
from actors.rollout.routes import ExpertIds, pack_routes
from actors.rollout.vllm.expected import expected_weights
from actors.rollout.vllm.process import prepare_process, start_vllm
from actors.wire.gloo_group import Address, GlooGroup, receive_into
from actors.wire.segment import Segment, SharedSegment, host_identity, map_segment, remove_stale_segments
from rl_backend.contracts import (
    UNVERSIONED,
    ConfigError,
    EngineDeadError,
    EngineDirtyError,
    RLBackendError,
    RolloutError,
    TensorInfo,
    UnsupportedError,
    WeightCheckError,
    WeightManifest,
    WeightSyncError,
    WeightVersionError,
)
from rl_backend.trace import TraceBatch, recorder, span
from rl_backend.weights import check_manifest, check_staged, find_intact


class RolloutEngine:
    """vLLM in this process. Made by :class:`~actors.rollout.group.RolloutGroup` as a Ray actor.

    Args:
        config: of the group.
        engine: its number in the group.
        device: ``cpu`` or ``cuda``.
        require_push: refuse to sample until weights have been pushed.
    """

    def __init__(self, config: RolloutConfig, engine: int, device: str, require_push: bool) -> None:
        self._config = config
        self._engine = engine
        self._name = f"engine {engine}"
        self._device = device
        self._cores: tuple[int, ...] = ()
        self._require_push = require_push
        self._state: EngineState = "serving"
        self._version = UNVERSIONED
        self._own_segment: SharedSegment | None = None
        self._mapped: Segment | None = None
        self._buffer: Tensor | None = None
        self._staged_in_workers = False
        self._moe_layers: tuple[int, ...] = ()
        self._gloo: dict[str, GlooGroup] = {}
        self._verified: WeightManifest | None = None
        self._push = self._ended_push = ""
        self._intact: dict[str, TensorInfo] = {}
        self._failure = ""

    def node(self) -> str:
        """Id of the Ray node that this engine has landed on."""
        return str(ray.get_runtime_context().get_node_id())

    def start(self, place: NodePlace) -> EngineInfo:
        """Starts vLLM. Apart from the constructor, so that a caller sees the errors as they are.

        Args:
            place: among the group's engines on this node.
        """
        self._check_model_is_here()
        remove_stale_segments()
        if self._device == "cpu":
            self._cores = choose_cores(self._config, self._engine, place)
        prepare_process(self._device, self._cores, self._config.tensor_parallel)
        self._llm = start_vllm(self._config, self._device)
        self._expected = self._expected_weights()
        if self._config.return_routed_experts:
            self._moe_layers = tuple(self._vllm_call(self._llm.collective_rpc, "moe_layers")[0])
        return self.describe()

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

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, require_version: int | None) -> Generated:
        """Samples.

        Raises:
            EngineDirtyError: a weight update failed after its first load.
            RolloutError: an update is in progress, the engine sleeps, no weights have been pushed yet, or vLLM returned no
                routes where they are asked for.
            WeightVersionError: the weights are older than ``require_version``.
        """
        self._check_serving()
        if require_version is not None and self._version < require_version:
            raise WeightVersionError(
                f"{self._name} serves weights of version {self._version}, version {require_version} is required: push first",
                engine=self._name,
                version=self._version,
                required=require_version,
            )
        from vllm import SamplingParams, TokensPrompt

        params = [
            SamplingParams(
                n=request.n,
                seed=request.seed,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,
                logprobs=0 if sampling.log_probs else None,
                flat_logprobs=sampling.log_probs,
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests]
        with observed(self._engine, self._version, requests) as report:
            outputs = self._vllm_call(self._llm.generate, prompts, params, use_tqdm=False)
            responses = [[Response.of(completion) for completion in output.outputs] for output in outputs]
            routes = self._routes(requests, outputs)
            report(responses)
        return Generated(self._version, responses, routes)

    def make_segment(self, nbytes: int) -> Segment:
        """This engine's own staging segment of at least ``nbytes``, for transports that bring weights to its host."""
        if self._own_segment is None or self._own_segment.nbytes < nbytes:
            self._drop_own_segment()
            self._own_segment = SharedSegment(nbytes)
        return Segment(str(self._own_segment.path), self._own_segment.nbytes)

    def join_gloo(self, key: str, address: Address, rank: int) -> None:
        """Takes this engine's place in the gloo group of one weight sync's source rank."""
        if key in self._gloo:
            self._gloo.pop(key).close()
        self._gloo[key] = GlooGroup(address, rank)

    def receive(self, key: str, layout: WeightManifest) -> None:
        """Receives weights over gloo into this engine's own segment; nothing is verified or loaded yet."""
        self._verified = None
        if key not in self._gloo or self._own_segment is None:
            raise WeightSyncError(f"{self._name}: join_gloo() and make_segment() come before receive()", engine=self._name)
        try:
            receive_into(self._gloo[key], self._own_segment.buffer, layout.tensors)
        except RuntimeError as error:
            raise WeightSyncError(f"{self._name}: the gloo broadcast failed: {error}", engine=self._name) from error

    def leave_gloo(self, key: str) -> None:
        """Leaves one weight sync's gloo group; the last to leave frees the engine's own segment."""
        if key in self._gloo:
            self._gloo.pop(key).close()
        if not self._gloo:
            self._drop_own_segment()

    def take_trace(self, stop: bool = False) -> TraceBatch:
        """As :meth:`~rl_backend.trace.TraceRecorder.take_batch`."""
        return recorder.take_batch(stop=stop)

    def close(self) -> None:
        """Frees the engine's own segment; the process is about to be killed."""
        self._drop_own_segment()

    def forget_segment(self, path: str) -> None:
        """Drops the mapping of a segment that its owner is about to remove."""
        if self._mapped is not None and self._mapped.path == path:
            self._mapped = self._buffer = self._verified = None

    def verify_part(self, push: str, part: WeightManifest, segment: Segment) -> None:
        """Checks tensors that a push has staged, while its trainer stages those that come after them.

        What passes is noted for :meth:`verify`, which reads only the rest and says what is wrong with it.

        Args:
            push: the push's own key.
            part: the tensors, with offsets and digests.
        """
        if push == self._ended_push:
            return
        if push != self._push:
            self._push, self._intact = push, {}
        self._verified = None
        with suppress(RLBackendError), span("verify part", "weights", weight_version=part.version, nbytes=part.nbytes):
            self._check_updatable()
            # The trainer, which may be on the same cores, works at the same time.
            threads = max(len(self._cores) // 2, 1)
            self._intact |= find_intact(self._map(segment), part.tensors, threads=threads)

    def verify(self, manifest: WeightManifest, segment: Segment, push: str = "") -> float:
        """Proves that staged weights can be loaded, without loading them. Returns the seconds that it took.

        Args:
            manifest: of all tensors.
            segment: where they are.
            push: the key under which :meth:`verify_part` has checked some of them.

        Raises:
            WeightVersionError: the weights are older than those served.
            WeightCheckError: names, shapes, dtypes, digests or values are not right.
            WeightSyncError: the segment cannot be mapped here.
            EngineDirtyError: the engine cannot be updated any more.
        """
        started = time.perf_counter()
        intact = self._intact if push == self._push else {}
        self._verified, self._push, self._intact, self._ended_push = None, "", {}, push
        with span("verify", "weights", weight_version=manifest.version, nbytes=manifest.nbytes):
            self._check_manifest(manifest)
            threads = max(len(self._cores), 1)
            check_staged(self._map(segment), manifest, engine=self._name, threads=threads, intact=intact)
        self._verified = manifest
        return time.perf_counter() - started

    def load(self, version: int) -> float:
        """Loads the weights that :meth:`verify` accepted and stays paused until :meth:`resume`. Returns the seconds.

        Raises:
            WeightCheckError: nothing of that version has been verified; the engine serves on as before.
            EngineDirtyError: loading failed half way.
        """
        started = time.perf_counter()
        manifest, self._verified = self._verified, None
        if manifest is None or manifest.version != version:
            raise WeightCheckError(f"{self._name}: weights of version {version} were not verified", engine=self._name)
        self.begin_update()
        self.update({"manifest": manifest.model_dump_json()})
        self.finish_update(version)
        return time.perf_counter() - started

    def begin_update(self) -> None:
        """Stops serving, empties the prefix cache and starts vLLM's weight update. Streaming transports call it directly."""
        self._check_updatable()
        self._state = "paused"
        with span("begin update", "weights"):
            self._during_update(self._start_weight_update)

    def update(self, update_info: dict[str, Any]) -> None:
        """Hands one message to vLLM's ``update_weights``."""
        with span("update", "weights"):
            self._during_update(self._llm.update_weights, {"update_info": update_info})

    def finish_update(self, version: int) -> None:
        """Ends vLLM's weight update and records the version; serving starts again with :meth:`resume`."""
        with span("finish update", "weights", weight_version=version):
            self._during_update(self._llm.finish_weight_update, str(version))
        self._version = version
        prometheus.set_gauge("rl_backend_engine_weight_version", version, engine=str(self._engine))

    def abandon_update(self, reason: str) -> None:
        """Refuses requests from now on: an update that began will not be finished."""
        self._make_dirty(reason)

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Hands a message to vLLM's ``init_weight_transfer_engine``; its ``kind`` chooses the engine that receives."""
        self._verified, self._staged_in_workers = None, False
        self._vllm_call(self._llm.init_weight_transfer_engine, {"init_info": init_info})

    def check_manifest(self, manifest: WeightManifest) -> None:
        """Version, names, shapes and dtypes alone, for transports that do not stage."""
        self._check_manifest(manifest)

    def require_push(self) -> None:
        """Refuse to sample until weights have been pushed."""
        self._require_push = True

    def resume(self) -> None:
        """Serves again after an update; every engine has acknowledged by now."""
        if self._state == "paused":
            self._state = "serving"

    def sleep(self, level: int) -> None:
        """Frees the GPU's memory: level 1 keeps the weights in host memory, level 2 drops them."""
        self._check_sleep_mode()
        self._check_clean()
        self._vllm_call(self._llm.sleep, level=level)
        self._state = "asleep"
        if level == 2:
            self._version, self._require_push = UNVERSIONED, True

    def wake_up(self) -> None:
        """Takes the GPU's memory back. After level 2, weights must be pushed before the engine samples."""
        self._check_sleep_mode()
        self._vllm_call(self._llm.wake_up)
        self._state = "serving"

    def _routes(self, requests: Sequence[Request], outputs: Sequence[Any]) -> ExpertIds | None:
        if not self._config.return_routed_experts or not outputs:
            return None
        answered = [
            (completion, len(request.prompt_ids) + len(completion.token_ids))
            for request, output in zip(requests, outputs, strict=True)
            for completion in output.outputs
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

    def _expected_weights(self) -> Any:
        parameters, packed_modules = self._vllm_call(self._llm.collective_rpc, "describe_parameters")[0]
        return expected_weights(self._config.model_path, self._config.dtype, parameters, packed_modules)

    def _check_manifest(self, manifest: WeightManifest) -> None:
        self._check_updatable()
        if manifest.version < self._version:
            raise WeightVersionError(
                f"{self._name} serves weights of version {self._version} and refuses the older version {manifest.version}",
                engine=self._name,
                version=self._version,
                offered=manifest.version,
            )
        check_manifest(manifest, self._expected, engine=self._name)

    def _check_clean(self) -> None:
        if self._state == "dirty":
            raise EngineDirtyError(
                f"{self._name} is dirty: a weight update failed after it had begun ({self._failure}); restart it and push "
                "again",
                engine=self._name,
            )

    def _check_updatable(self) -> None:
        self._check_clean()
        if self._state == "asleep":
            raise RolloutError(f"{self._name} sleeps and cannot take weights: wake_up() first", engine=self._name)

    def _check_serving(self) -> None:
        self._check_clean()
        if self._state != "serving":
            why = {"paused": "a weight update is in progress", "asleep": "it sleeps; wake_up() first"}[self._state]
            raise RolloutError(f"{self._name} does not sample now: {why}", engine=self._name, state=self._state)
        if self._require_push and self._version == UNVERSIONED:
            raise RolloutError(
                f"{self._name} has no weights of the trainer yet (UNVERSIONED): push before sampling", engine=self._name
            )

    def _check_sleep_mode(self) -> None:
        if not self._config.sleep_mode or self._device == "cpu":
            raise UnsupportedError(
                f"{self._name} runs on {self._device} with sleep_mode={self._config.sleep_mode}: sleep() and wake_up() need "
                "RolloutConfig(device='cuda', sleep_mode=True)"
            )

    def _map(self, segment: Segment) -> Tensor:
        """The segment's bytes, mapped here and in the workers."""
        if self._buffer is None or self._mapped != segment:
            self._buffer = map_segment(segment.path, segment.nbytes)
            self._mapped = segment
            self._staged_in_workers = False
        if not self._staged_in_workers:
            self.init_transfer({"kind": "staged", "path": segment.path, "nbytes": segment.nbytes})
            self._staged_in_workers = True
        return self._buffer

    def _drop_own_segment(self) -> None:
        if self._own_segment is not None:
            self.forget_segment(str(self._own_segment.path))
            self._own_segment.close()
            self._own_segment = None

    def _start_weight_update(self) -> None:
        # Keys and values of the old weights would be reused for equal prefixes.
        if not self._llm.reset_prefix_cache():
            raise RolloutError(f"{self._name}: vLLM still has running requests, its prefix cache cannot be emptied")
        self._llm.start_weight_update()

    def _make_dirty(self, failure: str) -> None:
        """The first failure is kept: those after it follow from it."""
        if self._state != "dirty":
            self._state, self._failure = "dirty", failure

    def _during_update(self, call: Any, *args: Any) -> None:
        self._check_clean()
        try:
            self._vllm_call(call, *args)
        except BaseException as error:
            self._make_dirty(f"{type(error).__name__}: {error}")
            raise EngineDirtyError(
                f"{self._name}: a weight update failed after it had begun ({type(error).__name__}: {error}); the engine "
                "refuses requests until it is restarted",
                engine=self._name,
            ) from error

    def _vllm_call(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

        try:
            return call(*args, **kwargs)
        except VllmEngineDeadError as error:
            self._make_dirty(f"a vLLM process ended: {error}")
            raise EngineDeadError(f"{self._name}: a vLLM process ended ({error}); restart it", engine=self._name) from error


def _device_ids(device: str) -> tuple[str, ...]:
    if device == "cpu":
        return ()
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))
