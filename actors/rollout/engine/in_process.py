"""vLLM in an engine's process: its start, its thread, and what its errors do to the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from actors.rollout.config import RolloutConfig
from actors.rollout.engine.serving_state import ServingState
from actors.rollout.engine.step_loop import Host, StepLoop, Stepper
from actors.rollout.messages import AdapterVersion
from actors.rollout.placement import NodePlace, choose_cores
from actors.rollout.vllm.expected import EngineParameters, expected_weights
from actors.rollout.vllm.process import prepare_process, start_vllm
from rl_backend.contracts import EngineDeadError, EngineDirtyError
from rl_backend.weights.staging import ExpectedWeights


class VllmInProcess:
    """vLLM in this process, and the state that it is in.

    Args:
        config: of the group.
        number: of the engine in the group.
        device: ``cpu`` or ``cuda``.
        require_push: refuse to sample until weights have been pushed.

    Attributes:
        name: of the engine, for messages.
        loop: vLLM is called on its thread alone.
        serving: whether it may sample or be updated, and the version of its weights.
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
        self.loop = StepLoop(self.name)
        self.serving = ServingState(self.name, require_push=require_push)
        self.cores: tuple[int, ...] = ()
        self.expected = ExpectedWeights({})
        self.moe_layers: tuple[int, ...] = ()

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

    def make_dirty(self, failure: str, error: Exception | None = None) -> None:
        """Keeps the first failure; later ones are consequences. Requests get ``error``, or that the engine is dirty."""
        if self.serving.fail(failure):
            self.loop.close(error or self.serving.dirty_error())

    def during_update(self, call: Callable[..., Any], *args: Any) -> None:
        """As :meth:`call`; an error leaves the engine dirty."""
        self.serving.check_clean()
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


def lora_request(adapter: AdapterVersion | None) -> Any:
    """An adapter as vLLM takes it with a prompt. vLLM must not be imported before its environment is set."""
    from vllm.lora.request import LoRARequest

    return None if adapter is None else LoRARequest(adapter.name, adapter.number, adapter.path)
