"""vLLM in an engine's process: its start, its thread, what its errors do to the engine, and whether it may sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from actors.cluster.processes import Process
from actors.rollout.config import RolloutConfig
from actors.rollout.engine.step_loop import Host, StepLoop, Stepper
from actors.rollout.messages import STOPPED_LOOKS, AdapterVersion, EngineState, WakePart
from actors.rollout.placement import NodePlace, choose_cores
from actors.rollout.vllm.expected import expected_weights
from actors.rollout.vllm.process import prepare_process, start_vllm
from rl_backend.contracts import UNVERSIONED, EngineDeadError, EngineDirtyError, RolloutError, WeightVersionError
from rl_backend.weights.staging import ExpectedWeights


class Workers:
    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._processes: Sequence[Process] = ()
        self._stopped_looks = 0
        self._failure: EngineDeadError | None = None

    def watch(self, processes: Sequence[Process]) -> None:
        self._processes = processes

    def check(self) -> None:
        """To be called at every heartbeat; raises :class:`EngineDeadError` for the engine once a worker is lost."""
        if self._failure is not None:
            raise self._failure
        ended = [process.pid for process in self._processes if process.has_ended]
        stopped = [process.pid for process in self._processes if process.is_stopped]
        self._stopped_looks = self._stopped_looks + 1 if stopped else 0
        if not ended and self._stopped_looks < STOPPED_LOOKS:
            return
        # The others wait for it in their collectives, and a stopped one would continue one day.
        for process in self._processes:
            process.kill()
        how, pid = ("ended", ended[0]) if ended else ("is stopped", stopped[0])
        self._failure = EngineDeadError(
            f"{self._engine} is dead: its worker process {pid} {how}; restart it", engine=self._engine, hung=not ended
        )
        raise self._failure


type Action = Literal["sample", "take weights", "continue an update", "sleep", "wake up"]

_FROM: dict[Action, tuple[EngineState, ...]] = {
    "sample": ("serving",),
    # An engine whose update another driver left open is asked for one more, which vLLM refuses.
    "take weights": ("serving", "paused"),
    "continue an update": ("paused",),
    "sleep": ("serving", "asleep"),
    "wake up": ("serving", "asleep"),
}
_WHY_NOT: dict[EngineState, str] = {
    "serving": "no weight update has begun",
    "paused": "a weight update is in progress",
    "asleep": "it is asleep; call wake_up() first",
}


class ServingState:
    """Whether an engine may sample or be updated, and the version of the weights that it serves.

    It samples only while it is ``serving``. An update goes :meth:`pause` -> :meth:`finish` -> :meth:`resume`, between
    which it is ``paused``. One that is ``asleep`` takes updates when its weights are awake, and sleeps on afterwards. A
    failure after :meth:`pause` leaves it ``dirty`` for good. Turns wait where calls are refused, except those of a dirty
    engine.
    """

    def __init__(self, name: str, *, require_push: bool = False) -> None:
        self._name = name
        self.state: EngineState = "serving"
        self.version = UNVERSIONED
        self._require_push = require_push
        self._update_is_open = False
        self._weights_are_awake = False
        self._before_update: EngineState = "serving"
        self._failure = ""

    @property
    def lacks_weights(self) -> bool:
        return self._require_push and self.version == UNVERSIONED

    def pause(self) -> None:
        self.check("take weights")
        if self.state != "paused":
            self._before_update = self.state
        self.state, self._update_is_open = "paused", True

    def finish(self, version: int) -> None:
        self.check("continue an update")
        self.version, self._update_is_open = version, False

    def resume(self) -> None:
        if self.state != "paused":
            return
        if self._update_is_open:
            self.check("sample")
        self.state = self._before_update

    def sleep(self) -> None:
        self.check("sleep")
        self.state, self._weights_are_awake = "asleep", False

    def wake(self, part: WakePart) -> None:
        """After the weights alone it is still asleep; after all, or the rest, it serves."""
        self.check("wake up")
        if self.state == "asleep" and part == "weights":
            self._weights_are_awake = True
        else:
            self.state, self._weights_are_awake = "serving", False

    def tags_to_wake(self, part: WakePart) -> list[str] | None:
        """What vLLM is asked for; None for all. Raises :class:`RolloutError` where that cannot be woken now."""
        self.check("wake up")
        if self.state == "asleep" and part == "kv_cache" and not self._weights_are_awake:
            problem = "wake its weights before its keys and values, which would otherwise be beside what trains"
            raise RolloutError(f"{self._name} is asleep: {problem}", engine=self._name, part=part)
        # vLLM maps memory a second time that is asked for twice.
        return ["kv_cache"] if self._weights_are_awake and part == "all" else None if part == "all" else [part]

    def fail(self, failure: str) -> bool:
        # The first failure is kept: later ones are its consequences.
        if self.state == "dirty":
            return False
        self.state, self._failure = "dirty", failure
        return True

    def require_push(self) -> None:
        self._require_push = True

    def forget_version(self) -> None:
        """Refuses to sample until the next push, whose version may be any."""
        self.check_clean()
        self.version, self._require_push = UNVERSIONED, True

    def check(self, action: Action) -> None:
        self.check_clean()
        if self.state == "asleep" and self._weights_are_awake:
            if action == "take weights":
                return
            if action == "sleep":
                problem = "its weights are awake, and vLLM does not put them back to sleep; wake_up() all of it before"
                raise RolloutError(f"{self._name} cannot sleep now: {problem}", engine=self._name, state=self.state)
        if self.state not in _FROM[action]:
            raise RolloutError(
                f"{self._name} cannot {action} now: {_WHY_NOT[self.state]}", engine=self._name, state=self.state
            )

    def check_clean(self) -> None:
        if self.state == "dirty":
            raise self.dirty_error()

    def check_weights(self) -> None:
        if self.lacks_weights:
            raise RolloutError(
                f"{self._name} has no weights of the trainer yet (UNVERSIONED): push before sampling", engine=self._name
            )

    def check_version(self, adapter: AdapterVersion | None, required: int | None) -> None:
        version = self.version if adapter is None else adapter.version
        if required is not None and version < required:
            what = "weights of" if adapter is None else f"{adapter.tenant!r} at"
            raise WeightVersionError(
                f"{self._name} serves {what} version {version}, version {required} is required: push first",
                engine=self._name,
                version=version,
                required=required,
            )

    def dirty_error(self) -> EngineDirtyError:
        return EngineDirtyError(
            f"{self._name} is dirty: a weight update failed after it had begun ({self._failure}); restart it and push again",
            engine=self._name,
        )


class VllmInProcess:
    """vLLM in this process, and the state that it is in."""

    llm: Any

    def __init__(self, config: RolloutConfig, number: int, device: str, *, require_push: bool = False) -> None:
        self.config = config
        self.number = number
        self.name = f"engine {number}"
        self.device = device
        self.loop = StepLoop(self.name)
        self.workers = Workers(self.name)
        self.serving = ServingState(self.name, require_push=require_push)
        self.cores: tuple[int, ...] = ()
        self.expected = ExpectedWeights({})
        self.moe_layers: tuple[int, ...] = ()

    def start(self, place: NodePlace, host: Host, make_stepper: Callable[[Any], Stepper]) -> None:
        config = self.config

        def start() -> Stepper:
            self.llm = start_vllm(config, self.device)
            return make_stepper(self.llm)

        def describe(checkpoint: Sequence[str]) -> Any:
            return self.ask_workers("describe_parameters", checkpoint)[0]

        if self.device == "cpu":
            self.cores = choose_cores(config, self.number, place)
        prepare_process(self.device, self.cores, config.tensor_parallel)
        self.loop.start(host, start)
        self.expected = expected_weights(config.model_path, config.dtype, describe)
        if config.return_routed_experts:
            self.moe_layers = tuple(self.ask_workers("moe_layers")[0])

    def make_dirty(self, failure: str, error: Exception | None = None) -> None:
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
        # Here: vLLM must not be imported before its environment is set.
        from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

        try:
            # Of a worker that ended vLLM raises errors of any type.
            self.workers.check()
        except EngineDeadError as lost:
            self.make_dirty(str(lost), lost)
            return lost
        if not isinstance(error, VllmEngineDeadError):
            return error
        dead = EngineDeadError(f"{self.name}: a vLLM process ended ({error}); restart it", engine=self.name)
        self.make_dirty(f"a vLLM process ended: {error}", dead)
        return dead


def lora_request(adapter: AdapterVersion | None) -> Any:
    # Here: vLLM must not be imported before its environment is set.
    from vllm.lora.request import LoRARequest

    return None if adapter is None else LoRARequest(adapter.name, adapter.number, adapter.path)
