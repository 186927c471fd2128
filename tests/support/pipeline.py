"""Runs a schedule with tokens in place of tensors: what the validator proves, done."""

from __future__ import annotations

from collections import Counter, deque

from rl_backend.parallel.pipeline import COMPUTATIONS, SENDS, Action, Kind, Schedule

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


class NotRunnableError(Exception):
    """The schedule came to a halt, lost data or did not do its work."""


def run_with_tokens(schedule: Schedule) -> None:
    """Runs every rank's list over wires of one queue per pair of ranks.

    A wire knows no names: what is sent first is received first. A batch occupies its rank's end of the wire until all of it
    is done. Raises :class:`NotRunnableError` unless every stage does every micro-batch once, with the right data.
    """
    ranks = [_Rank(rank, schedule) for rank in range(schedule.pp_size)]
    while True:
        moved = [rank.step() for rank in ranks]
        carried = [_carry(ranks[low], ranks[high]) for low in range(len(ranks)) for high in range(low + 1, len(ranks))]
        if not any(moved) and not any(carried):
            break
    for rank in ranks:
        if rank.left or any(rank.wires.values()):
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
        # For each other rank, batches of [action, token]: a send's token, or None until a receive has it.
        self.wires: dict[int, deque[list[list[object]]]] = {}
        self._schedule = schedule
        self._tokens: dict[tuple[str, int, int], object] = {}
        self._held = 0

    def step(self) -> bool:
        """Posts and computes as far as it can, and says whether it could do anything."""
        before = len(self.left)
        while self.left and (self.left[0].kind not in COMPUTATIONS or self._has_inputs(self.left[0])):
            if self.left[0].kind in COMPUTATIONS:
                self._compute(self.left.popleft())
            else:
                self._post()
        return len(self.left) < before

    def receive(self, action: Action, token: object) -> None:
        name = "activation" if action.kind is Kind.RECEIVE_ACTIVATION else "gradient"
        self._tokens[name, action.stage, action.micro_batch] = token

    def _post(self) -> None:
        """All communication up to the next computation, a batch for each other rank."""
        batches: dict[int, list[list[object]]] = {}
        while self.left and self.left[0].kind not in COMPUTATIONS:
            action = self.left.popleft()
            other = self._schedule.placement[action.other_end.stage]
            token: object = None
            if action.kind in SENDS:
                token = ("F" if action.kind is Kind.SEND_ACTIVATION else "B", action.stage, action.micro_batch)
                if token not in self._tokens:
                    raise NotRunnableError(f"{action} has nothing to send")
            batches.setdefault(other, []).append([action, token])
        for other, batch in batches.items():
            self.wires.setdefault(other, deque()).append(batch)

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


def _carry(low: _Rank, high: _Rank) -> bool:
    """Moves tokens between the batches at the head of both ends of a wire."""
    ends = low.wires.get(high.rank), high.wires.get(low.rank)
    if not (ends[0] and ends[1]):
        return False
    moved = False
    for source, target, receiver in ((ends[0], ends[1], high), (ends[1], ends[0], low)):
        sends = [one for one in source[0] if one[0].kind in SENDS]  # type: ignore[attr-defined]
        receives = [one for one in target[0] if one[0].kind not in SENDS]  # type: ignore[attr-defined]
        for send, receive in zip(sends, receives, strict=False):
            receiver.receive(receive[0], send[1])  # type: ignore[arg-type]
            source[0].remove(send)
            target[0].remove(receive)
            moved = True
    for end in ends:
        if not end[0]:
            end.popleft()
    return moved
