"""Point-to-point transfers of ranks, recorded on gloo and replayed in the order in which NCCL would run them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class End(NamedTuple):
    """One end of a transfer."""

    sends: bool
    peer: int  # rank in the world
    numel: int


class Transfers(NamedTuple):
    """Those that are posted together; alone, or as a batch."""

    number: int
    group: str
    ends: tuple[End, ...]
    batched: bool


class Wait(NamedTuple):
    """What is launched later waits on the device for the transfers of this number."""

    number: int


class Synchronise(NamedTuple):
    """The host waits for the device."""


type Event = Transfers | Wait | Synchronise


@contextmanager
def recorded() -> Iterator[list[Event]]:
    """The transfers of this rank in the context, and what waits for them."""
    events: list[Event] = []
    originals = dist.isend, dist.irecv, dist.batch_isend_irecv, distributed_c10d._check_op, torch.cuda.synchronize
    isend, irecv, batch, _, _ = originals

    def post(group: Any, ends: Sequence[End], *, batched: bool) -> int:
        number = sum(isinstance(event, Transfers) for event in events)
        name = (group or dist.group.WORLD).group_name
        events.append(Transfers(number, name, tuple(ends), batched))
        return number

    def end(sends: bool, tensor: Any, group: Any, peer: int | None, group_peer: int | None) -> End:
        if peer is None:
            assert group_peer is not None, "one of the two names the peer"
            peer = dist.get_global_rank(group or dist.group.WORLD, group_peer)
        return End(sends, peer, tensor.numel())

    def send(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
        number = post(group, [end(True, tensor, group, dst, group_dst)], batched=False)
        return _Watched(isend(tensor, dst, group, tag, group_dst), number, events)

    def receive(tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
        number = post(group, [end(False, tensor, group, src, group_src)], batched=False)
        return _Watched(irecv(tensor, src, group, tag, group_src), number, events)

    def together(operations: Any) -> Any:
        ends = [end(each.op is send, each.tensor, each.group, each.peer, None) for each in operations]
        number = post(operations[0].group, ends, batched=True)
        for each in operations:
            each.op = isend if each.op is send else irecv
        return [_Watched(work, number, events) for work in batch(operations)]

    dist.isend, dist.irecv, dist.batch_isend_irecv = send, receive, together
    distributed_c10d._check_op = lambda _: None
    torch.cuda.synchronize = lambda *_: events.append(Synchronise())
    try:
        yield events
    finally:
        dist.isend, dist.irecv, dist.batch_isend_irecv, distributed_c10d._check_op, torch.cuda.synchronize = originals


class _Watched:
    def __init__(self, work: Any, number: int, events: list[Event]) -> None:
        self._work, self._number, self._events = work, number, events

    def wait(self, *args: Any) -> Any:
        self._events.append(Wait(self._number))
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def stuck(ranks: Sequence[Sequence[Event]], *, eager: bool) -> list[int]:
    """Ranks that never end; empty where all do.

    NCCL runs the operations of a communicator one after the other. Initialised ``eager`` a group has one communicator, else
    each pair of ranks has one for what is posted alone. An operation begins when it is the first of its communicator and
    what was waited for before it was launched has ended. One alone ends with its partner, a batch when all its partners have
    begun. Hosts run ahead until they synchronise.
    """
    state = [_Rank(rank, events, eager=eager) for rank, events in enumerate(ranks)]
    moved = True
    while moved:
        moved = False
        for each in state:
            moved |= each.run_host()
            for queue in each.queues.values():
                moved |= bool(queue) and each.end(queue, state)
    return [each.rank for each in state if each.events or any(each.queues.values())]


class _Rank:
    def __init__(self, rank: int, events: Sequence[Event], *, eager: bool) -> None:
        self.rank, self.eager = rank, eager
        self.events = deque(events)
        self.queues: dict[Any, deque[Transfers]] = defaultdict(deque)
        self.after: dict[int, frozenset[int]] = {}
        self.ended: set[int] = set()
        self._waited: set[int] = set()
        # Of each direction of a pair in a communicator: how many have been posted, and by number which of them is which.
        self._posted: dict[Any, int] = defaultdict(int)
        self.places: dict[int, list[tuple[Any, int]]] = {}

    def run_host(self) -> bool:
        before = len(self.events)
        while self.events:
            event = self.events[0]
            if isinstance(event, Synchronise) and self.after.keys() - self.ended:
                break
            self.events.popleft()
            if isinstance(event, Wait):
                self._waited.add(event.number)
            elif isinstance(event, Transfers):
                self._post(event)
        return len(self.events) < before

    def _post(self, transfers: Transfers) -> None:
        own = self.eager or transfers.batched
        pair = () if own else tuple(sorted((self.rank, transfers.ends[0].peer)))
        communicator = transfers.group, pair
        self.queues[communicator].append(transfers)
        self.after[transfers.number] = frozenset(self._waited)
        places = []
        for each in transfers.ends:
            way = (communicator, self.rank, each.peer) if each.sends else (communicator, each.peer, self.rank)
            places.append((way, self._posted[way, each.sends]))
            self._posted[way, each.sends] += 1
        self.places[transfers.number] = places

    def has_begun(self, place: tuple[Any, int], *, sends: bool) -> bool:
        for number, places in self.places.items():
            if number in self.ended and place in places:
                return True
        for queue in self.queues.values():
            if queue and self.after[queue[0].number] <= self.ended:
                first = queue[0]
                found = zip(self.places[first.number], first.ends, strict=True)
                if any(place == each and end.sends is sends for each, end in found):
                    return True
        return False

    def end(self, queue: deque[Transfers], ranks: Sequence[_Rank]) -> bool:
        first = queue[0]
        if not self.after[first.number] <= self.ended:
            return False
        ends = zip(self.places[first.number], first.ends, strict=True)
        if not all(ranks[end.peer].has_begun(place, sends=not end.sends) for place, end in ends):
            return False
        queue.popleft()
        self.ended.add(first.number)
        return True
