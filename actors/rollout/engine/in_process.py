"""vLLM in an engine's process: its start, its thread, and whether it may sample or be updated.

The engine is a small state machine. ``generate`` is served only in state ``serving``; an update goes ``verify`` ->
``load`` -> ``resume``, and between the last two the engine is ``paused``. A failure after the first load leaves it
``dirty`` for good. Turns of episodes wait where ``generate`` is refused, but for a dirty engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from actors.rollout.config import RolloutConfig
from actors.rollout.engine.step_loop import Host, StepLoop, Stepper
from actors.rollout.messages import AdapterVersion, EngineState
from actors.rollout.placement import NodePlace, choose_cores
from actors.rollout.vllm.expected import EngineParameters, expected_weights
from actors.rollout.vllm.process import prepare_process, start_vllm
from rl_backend.contracts import (
    UNVERSIONED,
    EngineDeadError,
    EngineDirtyError,
    RolloutError,
    WeightVersionError,
)
from rl_backend.weights.compare import ExpectedWeights


class VllmInProcess:
    """vLLM in this process, its state, and the version of the weights that it serves.

    Args:
        config: of the group.
        number: of the engine in the group.
        device: ``cpu`` or ``cuda``.
        require_push: refuse to sample until weights have been pushed.

    Attributes:
        name: of the engine, for messages.
        loop: vLLM is called on its thread alone.
        state: changed by updates and sleep.
        version: of the weights served.
        cores: numbers of those that it runs on; empty on CUDA.
        llm: the ``vllm.LLM``, once it is started.
        expected: weights that a push must hold, once it is started.
        moe_layers: with ``RolloutConfig.return_routed_experts``, the numbers of the layers that have experts.
    """

    llm: Any

    def __init__(self, config: RolloutConfig, number: int, device: str, *, require_push: bool = False) -> None:
        self.config = config
        self.number = number
        self.name = f"engine {number}"
        self.device = device
        self.require_push = require_push
        self.loop = StepLoop(self.name)
        self.state: EngineState = "serving"
        self.version = UNVERSIONED
        self.cores: tuple[int, ...] = ()
        self.expected = ExpectedWeights({})
        self.moe_layers: tuple[int, ...] = ()
        self._failure = ""

    def start(self, place: NodePlace, host: Host, make_stepper: Callable[[Any], Stepper]) -> None:
        """Starts vLLM.

        Args:
            place: among the group's engines on this node.
            host: decides which requests may begin.
            make_stepper: makes what steps the ``vllm.LLM``, on the loop's thread.
        """
        config = self.config

        def start() -> Stepper:
            self.llm = start_vllm(config, self.device)
            return make_stepper(self.llm)

        def describe(checkpoint: Sequence[str]) -> EngineParameters:
            described: EngineParameters
            described, *_ = self.ask_workers("describe_parameters", checkpoint)
            return described

        if self.device == "cpu":
            self.cores = choose_cores(config, self.number, place)
        prepare_process(self.device, self.cores, config.tensor_parallel)
        self.loop.start(host, start)
        self.expected = expected_weights(config.model_path, config.dtype, describe)
        if config.return_routed_experts:
            self.moe_layers = tuple(self.ask_workers("moe_layers")[0])

    @property
    def lacks_weights(self) -> bool:
        """Whether weights must be pushed before it samples."""
        return self.require_push and self.version == UNVERSIONED

    def check_clean(self) -> None:
        """Raises :class:`~rl_backend.contracts.EngineDirtyError` after an update that failed once it had begun."""
        if self.state == "dirty":
            raise self._dirty_error()

    def check_updatable(self) -> None:
        """Raises where it cannot take weights."""
        self.check_clean()
        if self.state == "asleep":
            raise RolloutError(f"{self.name} is asleep and cannot take weights; call wake_up() first", engine=self.name)

    def check_weights(self) -> None:
        """Raises :class:`~rl_backend.contracts.RolloutError` where it lacks weights."""
        if self.lacks_weights:
            raise RolloutError(
                f"{self.name} has no weights of the trainer yet (UNVERSIONED): push before sampling", engine=self.name
            )

    def check_serving(self) -> None:
        """Raises where it does not sample now."""
        self.check_clean()
        if self.state != "serving":
            why = {"paused": "a weight update is in progress", "asleep": "it is asleep; call wake_up() first"}[self.state]
            raise RolloutError(f"{self.name} does not sample now: {why}", engine=self.name, state=self.state)
        self.check_weights()

    def check_version(self, adapter: AdapterVersion | None, required: int | None) -> None:
        """Raises :class:`~rl_backend.contracts.WeightVersionError` where the adapter, or without one the weights, are older
        than ``required``.
        """
        version = self.version if adapter is None else adapter.version
        if required is not None and version < required:
            what = "weights of" if adapter is None else f"{adapter.tenant!r} at"
            raise WeightVersionError(
                f"{self.name} serves {what} version {version}, version {required} is required: push first",
                engine=self.name,
                version=version,
                required=required,
            )

    def make_dirty(self, failure: str, error: Exception | None = None) -> None:
        """Keeps the first failure; later ones are consequences. Requests get ``error``, or that the engine is dirty."""
        if self.state != "dirty":
            self.state, self._failure = "dirty", failure
            self.loop.close(error or self._dirty_error())

    def forget_version(self) -> None:
        """It refuses to sample until the next push, whose version may be any."""
        self.version, self.require_push = UNVERSIONED, True

    def during_update(self, call: Callable[..., Any], *args: Any) -> None:
        """As :meth:`call`; an error leaves the engine dirty."""
        self.check_clean()
        try:
            self.call(call, *args)
        except BaseException as error:
            self.make_dirty(f"{type(error).__name__}: {error}")
            raise EngineDirtyError(
                f"{self.name}: a weight update failed after it had begun ({type(error).__name__}: {error}); the engine "
                "refuses requests until it is restarted",
                engine=self.name,
            ) from error

    def ask_workers(self, method: str, *args: Any) -> Any:
        """The answer of every worker to a method of :class:`~actors.rollout.vllm.worker.WorkerExtension`."""
        return self.call(self.llm.collective_rpc, method, args=args)

    def call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls something of vLLM on its own thread, between two steps."""
        try:
            return self.loop.call(call, *args, **kwargs)
        except Exception as error:
            found = self.translated(error)
            if found is error:
                raise
            raise found from error

    def translated(self, error: Exception) -> Exception:
        """What to tell a caller of an error that vLLM has raised: itself, unless one of its processes has ended."""
        from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

        if not isinstance(error, VllmEngineDeadError):
            return error
        dead = EngineDeadError(f"{self.name}: a vLLM process ended ({error}); restart it", engine=self.name)
        self.make_dirty(f"a vLLM process ended: {error}", dead)
        return dead

    def _dirty_error(self) -> EngineDirtyError:
        return EngineDirtyError(
            f"{self.name} is dirty: a weight update failed after it had begun ({self._failure}); restart it and push again",
            engine=self.name,
        )


def lora_request(adapter: AdapterVersion | None) -> Any:
    """An adapter as vLLM takes it with a prompt. vLLM must not be imported before its environment is set."""
    from vllm.lora.request import LoRARequest

    return None if adapter is None else LoRARequest(adapter.name, adapter.number, adapter.path)
