"""Runs a schedule with tokens in place of tensors: what the validator proves, done."""

from __future__ import annotations

from collections import Counter, deque

from rl_backend.pipeline import COMPUTATIONS, SENDS, Action, Kind, Schedule

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def action(name: str) -> Action:
    """The action of a stage and a micro-batch below 10, from what it is called in print."""
    return Action(Kind(name[1:-1]), int(name[0]), int(name[-1]))


def actions(names: str) -> tuple[Action, ...]:
    return tuple(map(action, names.split()))


class NotRunnableError(Exception):
    """The schedule came to a halt, lost data or did not do its work."""


def run_with_tokens(schedule: Schedule) -> None:
    """Runs every rank's list, with one queue of sends and receives on each rank.

    Only the heads of queues meet, and they know no names: a receive takes whatever the other rank sends to this one. Raises
    :class:`NotRunnableError` unless every stage does every micro-batch once, with the right data.
    """
    ranks = [_Rank(rank, schedule) for rank in range(schedule.pp_size)]
    while True:
        moved = [rank.step() for rank in ranks]
        carried = [_carry(source, target) for source in ranks for target in ranks]
        if not any(moved) and not any(carried):
            break
    for rank in ranks:
        if rank.left or rank.queue:
            raise NotRunnableError(f"rank {rank.rank} came to a halt")
        if max(rank.held_at_most) > schedule.activation_bound[rank.rank]:
            raise NotRunnableError(f"rank {rank.rank} holds too much")
    done = Counter(action for rank in ranks for action in rank.done)
    expected = 0 if schedule.forward_only else 1
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            times = {kind: done.pop(Action(kind, stage, micro_batch), 0) for kind in COMPUTATIONS}
            gradients = [times[Kind.BACKWARD] + times[kind] for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
            if (times[Kind.FORWARD], *gradients) != (1, expected, expected):
                raise NotRunnableError(f"stage {stage} did micro-batch {micro_batch} {times} times")
    if done:
        raise NotRunnableError(f"{done} was done too")


class _Rank:
    def __init__(self, rank: int, schedule: Schedule) -> None:
        self.rank = rank
        self.left = deque(schedule.actions[rank])
        self.done: list[Action] = []
        self.held_at_most = [0]
        # Action, other rank, and the token of a send.
        self.queue: deque[tuple[Action, int, object]] = deque()
        self._schedule = schedule
        self._tokens: dict[tuple[str, int, int], object] = {}
        self._held = 0

    def step(self) -> bool:
        """Posts and computes as far as it can, and says whether it could do anything."""
        before = len(self.left)
        while self.left and (self.left[0].kind not in COMPUTATIONS or self._has_inputs(self.left[0])):
            action = self.left.popleft()
            if action.kind in COMPUTATIONS:
                self._compute(action)
            else:
                self._post(action)
        return len(self.left) < before

    def receive(self, action: Action, token: object) -> None:
        name = "activation" if action.kind is Kind.RECEIVE_ACTIVATION else "gradient"
        self._tokens[name, action.stage, action.micro_batch] = token

    def _post(self, action: Action) -> None:
        token: object = None
        if action.kind in SENDS:
            token = ("F" if action.kind is Kind.SEND_ACTIVATION else "B", action.stage, action.micro_batch)
            if token not in self._tokens:
                raise NotRunnableError(f"{action} has nothing to send")
        self.queue.append((action, self._schedule.placement[action.other_end.stage], token))

    def _needs(self, action: Action) -> dict[tuple[str, int, int], object]:
        """Where a computation finds its inputs, and what should be there."""
        _, stage, micro_batch = action
        placement = self._schedule.placement
        if action.kind is Kind.FORWARD:
            sources = [("activation", stage - 1, "F")] if stage else []
        elif action.kind is Kind.BACKWARD_WEIGHT:
            return {("B", stage, micro_batch): ("B", stage, micro_batch)}
        else:
            sources = [("gradient", stage + 1, "B")] if stage + 1 < len(placement) else []
        needed: dict[tuple[str, int, int], object] = {}
        for name, source, result in sources:
            own = placement[source] == self.rank
            place = (result, source, micro_batch) if own else (name, stage, micro_batch)
            needed[place] = (result, source, micro_batch)
        if action.kind is not Kind.FORWARD:
            needed["F", stage, micro_batch] = ("F", stage, micro_batch)
        return needed

    def _has_inputs(self, action: Action) -> bool:
        return all(place in self._tokens for place in self._needs(action))

    def _compute(self, action: Action) -> None:
        for place, token in self._needs(action).items():
            if self._tokens[place] != token:
                raise NotRunnableError(f"{action} got {self._tokens[place]} in place of {token}")
        self.done.append(action)
        if action.kind is not Kind.BACKWARD_WEIGHT:
            result = "F" if action.kind is Kind.FORWARD else "B"
            token = (result, action.stage, action.micro_batch)
            self._tokens[token] = token
        self._held += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
        self.held_at_most.append(self._held if not self._schedule.forward_only else 0)


def _carry(source: _Rank, target: _Rank) -> bool:
    """Moves a token if one rank's next transfer is a send to the other, whose next one is a receive from it."""
    if not (source.queue and target.queue):
        return False
    (send, to, token), (receive, origin, _) = source.queue[0], target.queue[0]
    if send.kind not in SENDS or receive.kind in SENDS or (to, origin) != (target.rank, source.rank):
        return False
    source.queue.popleft()
    target.queue.popleft()
    target.receive(receive, token)
    return True
