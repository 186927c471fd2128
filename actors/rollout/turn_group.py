"""Turns of episodes on a group of engines: each goes to one engine, while other calls sample on all."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

from actors.rollout.adapter_group import AdapterGroup
from actors.rollout.config import SamplingConfig
from actors.rollout.engine_turns import EngineTurns
from actors.rollout.engines import engine_name
from actors.rollout.messages import AdapterVersion, Request, TurnAnswer
from rl_backend.contracts import EngineDeadError, RLBackendError


class TurnGroup(AdapterGroup):
    """Turns of :class:`~actors.rollout.group.RolloutGroup`; :class:`~actors.rollout.tokens.RolloutTokens` asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self._turns: dict[int, EngineTurns] = {}
        self._turns_lock = threading.Lock()

    @property
    def serves_turns(self) -> bool:
        """Whether any turn has been asked for."""
        return bool(self._turns)

    @property
    def turns_in_flight(self) -> dict[int, int]:
        """Of every living engine, turns that are not answered."""
        turns = dict(self._turns)
        return {engine: turns[engine].in_flight if engine in turns else 0 for engine in self.engines}

    def ask(
        self,
        engine: int,
        request: Request,
        sampling: SamplingConfig,
        *,
        adapter: AdapterVersion | None = None,
        require_version: int | None = None,
    ) -> Future[TurnAnswer]:
        """Asks an engine for a turn; cancelling the future gives it up. One that comes during a push of weights begins
        after it, with the new ones.

        The future raises what :meth:`~actors.rollout.group.RolloutGroup.generate` raises; whatever is wrong with one turn
        is the affair of that turn alone.

        Args:
            request: of one response, with its seed.
        """
        return self._turns_of(engine).ask(request, sampling, adapter, require_version)

    def give_up_turns(self) -> None:
        """Ends every turn in flight: each is answered with ``finish="abort"`` and what it had sampled."""
        for turns in list(self._turns.values()):
            turns.give_up()

    def served_adapter(self, tenant: str | None) -> AdapterVersion | None:
        """The version of a tenant that turns sample with from now on; None for the weights alone.

        Raises:
            RolloutError: it has not been pushed, or the weights have an adapter merged into them.
        """
        chosen = self._chosen(tenant, 1)
        return None if chosen is None else chosen[0]

    def _turns_of(self, engine: int) -> EngineTurns:
        """Of the process that is engine ``engine`` now."""
        living = self._living()
        if engine not in living:
            raise EngineDeadError(
                f"{engine_name(engine)} is lost: {self.lost_engines.get(engine)}", engine=engine_name(engine)
            )
        actor = living[engine]
        with self._turns_lock:
            turns = self._turns.get(engine)
            if turns is None or turns.actor is not actor:
                lose = partial(self._note, engine, actor)
                turns = self._turns[engine] = EngineTurns(engine_name(engine), actor, self.config.sampling_timeout, lose)
            return turns

    def _end_turns(self, error: RLBackendError) -> None:
        for turns in list(self._turns.values()):
            turns.end(error)
