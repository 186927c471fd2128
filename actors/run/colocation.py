"""Ranks and engines on the same GPUs: whose turn it is to have memory there."""

from collections.abc import Callable
from contextlib import suppress

from actors.rollout.group.group import RolloutGroup
from actors.sync.report import PushReport
from actors.train.model import GroupModel
from rl_backend.contracts import RLBackendError


class Colocation:
    """Engines sleep while ranks train, and the ranks' models are in host memory while engines sample.

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
