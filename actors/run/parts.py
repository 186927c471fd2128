"""Parts of a run: models, engines, the sync between policy and engines, and whose turn it is to have memory."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from actors.options.policy_options import tenant_config
from actors.options.sampled_config import RunConfig
from actors.rollout.group.group import RolloutGroup
from actors.run.session import Session
from actors.sync.push import WeightSync
from actors.sync.report import PushReport
from actors.sync.staged_transports import TransportName
from actors.train.context import HandleRef
from actors.train.group import TrainGroup
from actors.train.model import GroupModel, RouterReplayMode
from actors.watch.console import Phases
from rl_backend.contracts import Head, OptimizerConfig, RLBackendError
from rl_backend.data.hub import local_model
from rl_backend.options.option_set import filled


class Colocation:
    """Ranks and engines on the same GPUs: engines sleep while ranks train, whose models are in host memory while engines
    sample.

    Weights of engines are beside nothing but the weights that are pushed to them, and keys and values are beside nothing of
    the ranks. It begins with engines that are awake.

    Attributes:
        engines_turn: else it is the ranks'.
    """

    def __init__(self, rollout: RolloutGroup) -> None:
        self._rollout = rollout
        self._models: list[GroupModel] = []
        self.engines_turn = True

    def add(self, model: GroupModel) -> None:
        """Of a model that was built in the turn of the ranks."""
        self._models.append(model)

    def to_ranks(self) -> bool:
        """Whether the turn was the engines' until now. They forget their weights: the next push brings others."""
        if not self.engines_turn:
            return False
        self._rollout.sleep(level=2)
        for model in self._models:
            model.to("device")
        self.engines_turn = False
        return True

    def to_engines(self, policy: GroupModel, push: Callable[[], PushReport]) -> PushReport:
        """Gives engines the memory, and in between the weights of ``policy``.

        After a push that failed it is still the ranks' turn, and engines have no weights.
        """
        pushed = policy.base or policy.handle
        for model in self._models:
            model.to("cpu", model=(model.base or model.handle) != pushed)
        self._rollout.wake_up("weights")
        try:
            report = push()
        except RLBackendError:
            # What the loop does next, to save above all, needs all of them; ranks that are lost have none.
            with suppress(RLBackendError):
                for model in self._models:
                    model.to("device")
            raise
        for model in self._models:
            model.to("cpu")
        # Last, when nothing of the ranks is left: keys and values take all that is free.
        self._rollout.wake_up("kv_cache")
        self.engines_turn = True
        return report

    def describe(self) -> str:
        on_cpus = not any(info.device_ids for info in self._rollout.infos.values())
        kept = "; on CPUs sleeping engines free keys and values alone, and ranks nothing" if on_cpus else ""
        return f"ranks and engines have memory in turn{kept}"


@dataclass(frozen=True)
class ModelRecipe:
    """The arguments of ``Run.build_model``."""

    name: str
    group: int
    forward_only: bool
    head: Head
    hf_path: Path | str | None
    optimizer: OptimizerConfig | None
    router_replay: RouterReplayMode


class Parts:
    """What a run works with: session, training groups, models, engines, and the sync between policy and engines.

    Use as a context manager, which ends before the session does.

    Args:
        owner: begins the names of LoRA tenants, which runs on the session must not share.
        borrowed: the session goes on after the run, which removes its tenants and adapters.
    """

    def __init__(self, config: RunConfig, session: Session, phases: Phases, *, owner: str, borrowed: bool) -> None:
        self._config, self._session, self._phases = config, session, phases
        self._owner, self._borrowed = owner, borrowed
        self.groups = list(session.groups)
        self._tenants = ExitStack()
        self._connection = ExitStack()
        self._sync: WeightSync | None = None
        self._policy: GroupModel | None = None
        self._colocation = Colocation(self.rollout) if config.colocates else None
        self._recovered = self._recoveries()

    @property
    def rollout(self) -> RolloutGroup:
        assert self._session.rollout is not None  # Session.require, and open_session, have seen to it
        return self._session.rollout

    @property
    def serves_adapters(self) -> bool:
        """Whether engines get the policy as an adapter beside the frozen model."""
        return self._session.serves_adapters(self._config)

    @property
    def peak_memory(self) -> int:
        return max(group.peak_memory for group in self.groups)

    def take_recoveries(self) -> dict[str, float]:
        """Metrics of the recoveries and changes of layout of training groups since the last call; empty without any."""
        before, self._recovered = self._recovered, self._recoveries()
        new = {name: value - before[name] for name, value in self._recovered.items()}
        kinds = [kind for kind in ("recovery", "reshape") if new[f"{kind}/count"]]
        found = {name: value for name, value in new.items() if name.partition("/")[0] in kinds}
        return found | ({"reshape/ranks": sum(group.num_ranks for group in self.groups)} if "reshape" in kinds else {})

    def _recoveries(self) -> dict[str, float]:
        events = [event for group in self.groups for event in group.recoveries]
        reshapes = [event for group in self.groups for event in group.reshapes]
        return {
            "recovery/count": len(events),
            "recovery/steps_repeated": sum(event.steps for event in events),
            "recovery/operations_repeated": sum(event.operations for event in events),
            "recovery/seconds_lost": sum(event.seconds for event in events),
            "reshape/count": len(reshapes),
            "reshape/seconds": sum(event.seconds for event in reshapes),
        }

    def build(self, recipe: ModelRecipe) -> GroupModel:
        self.to_ranks()
        model = self._build(recipe)
        if self._colocation is not None:
            self._colocation.add(model)
        return model

    def _build(self, recipe: ModelRecipe) -> GroupModel:
        config, name = self._config, recipe.name
        group, path = self.groups[min(recipe.group, len(self.groups) - 1)], local_model(recipe.hf_path or config.model)
        optimizer = recipe.optimizer
        if not recipe.forward_only:
            optimizer = optimizer or config.train.backend_cfg.optimizer
        if not config.lora.rank:
            with self._phases.phase("model", f"loading {name}"):
                handle = group.build_model(
                    name=name, forward_only=recipe.forward_only, head=recipe.head, hf_path=path, optimizer=optimizer
                )
            return GroupModel(group, handle, recipe.router_replay)
        with self._phases.phase("model", f"loading the frozen model below {name}"):
            base = self._session.base(group, path)
        if recipe.forward_only:
            return GroupModel(group, base)
        lora, name = tenant_config(filled(config, "lora")), f"{self._owner}/{name}"
        tenant = group.create_lora_adapter(base, lora, optimizer, name=name, head=recipe.head)
        if self._borrowed:
            self._tenants.callback(_remove, group, tenant)
        return GroupModel(group, tenant, recipe.router_replay, base, path)

    def connect(self, policy: GroupModel, transport: TransportName) -> None:
        """Engines get the weights of this model from :meth:`push`: of a LoRA tenant the adapter, or all weights merged."""
        self._policy = policy
        self._connection.close()
        rollout, enter = self.rollout, self._connection.enter_context
        if policy.base is not None and self.serves_adapters:
            with self._phases.phase("push", "the frozen model's weights to the engines"):
                enter(self._session.serving(policy.group, policy.base, transport))
            if self._borrowed:
                self._connection.callback(self._withdraw, policy.handle.name)
            self._sync = enter(WeightSync(policy.group, rollout, policy.handle))
        else:
            merged = policy.base is not None
            self._sync = enter(WeightSync(policy.group, rollout, policy.handle, transport=transport, merged=merged))

    def push(self) -> PushReport:
        """Brings the policy's weights to the engines, and the memory too, where ranks and engines have it in turn."""
        assert self._sync is not None, "connect comes first"
        assert self._policy is not None, "connect comes first"
        if self._colocation is None:
            return self._sync.push()
        return self._colocation.to_engines(self._policy, self._sync.push)

    @property
    def colocation(self) -> str:
        """In words, how ranks and engines share memory; empty where each has its own."""
        return "" if self._colocation is None else self._colocation.describe()

    @property
    def ranks_are_away(self) -> bool:
        """Whether all models are in host memory, because it is the engines' turn."""
        return self._colocation is not None and self._colocation.engines_turn

    def require_engines(self) -> None:
        """Raises :class:`RLBackendError` where engines sleep."""
        if self._colocation is not None and not self._colocation.engines_turn:
            raise RLBackendError(
                "engines cannot sample now: with colocate they sleep from collect, save_model or build_model until the next "
                "push; call push before"
            )

    def to_ranks(self) -> bool:
        """Gives ranks the memory that engines had; whether there was anything to give."""
        return self._colocation is not None and self._colocation.to_ranks()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        # An engine lets go of an adapter before its tenant goes.
        try:
            self._connection.__exit__(*error)
        finally:
            self._tenants.__exit__(*error)

    def _withdraw(self, adapter: str) -> None:
        with suppress(RLBackendError):  # engines that are lost have no adapters any more, nor those that never got it
            self.rollout.remove_adapter(adapter)


def _remove(group: TrainGroup, tenant: HandleRef) -> None:
    with suppress(RLBackendError):  # a group that has ended has no tenants any more
        group.remove_lora_adapter(tenant)
