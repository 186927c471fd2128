"""Orders of computations, by algorithm.

- 1F1B, and interleaved 1F1B with several stages per rank, with full backward passes (arXiv 2104.04473, section 2.2).
- ZB-H1 and ZB-H2, the handcrafted zero-bubble schedules (arXiv 2401.10241, sections 2.1 and 2.2). In both, all ranks hold
  equally many activations: the later the rank, the fewer wait for the backward pass for the inputs, and the more for that
  for the weights.
- DualPipeV: DualPipe (arXiv 2412.19437, section 3.2.1) folded into a V, as DeepSeek's repository DualPipe describes it. Its
  steady state pairs the forward pass of one stage of a rank with the backward pass of the other, so that communication
  inside the one (of experts, say) can be hidden behind the other. A schedule has the two one after the other.
- ZBV: zero bubble with 1F1B's activations, two stages per rank in a V (arXiv 2401.10241, section 6; arXiv 2405.15362).
  Forward, backward for inputs and backward for weights of both stages alternate in the steady state. As in section 3.1 of
  the former, several heuristics are tried for the given costs and the best result is taken.
- Greedy orders, which always run what can start first.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from rl_backend.pipeline.schedule import Action, Kind, inputs_of, v_placement
from rl_backend.pipeline.simulate import Costs

# Start, priority, stages after it, and the action: the least of them runs first.
type _Candidate = tuple[float, int, int, Action]


def greedy_order(
    placement: Sequence[int],
    num_micro_batches: int,
    costs: Costs,
    bound: Sequence[int],
    begun: Sequence[Sequence[Action]],
    priority: Sequence[Kind],
) -> list[list[Action]]:
    """The computations of each rank: all forward passes, and with split backward passes if ``priority`` has their kinds.

    Simulates the ranks with ``costs``: at every step, the rank whose next computation can start first runs it.

    Args:
        placement: rank of each stage.
        bound: for each rank the most activations that it may hold.
        begun: for each rank how its order begins, whatever could start earlier; it must be possible to continue it.
        priority: of the kinds among what a rank can start at the same time; of one kind, later stages come first.
    """
    ranks, stages = range(len(bound)), range(len(placement))
    orders: list[list[Action]] = [[] for _ in ranks]
    beginnings = [deque(own) for own in begun]
    stages_of = [[stage for stage in stages if placement[stage] == rank] for rank in ranks]
    clock, held = [0.0 for _ in ranks], [0 for _ in ranks]
    done: Counter[tuple[Kind, int]] = Counter()
    ends: dict[Action, float] = {}
    # Backward passes are split in every greedy order: gradients come from those for the inputs.
    gradients = {Action(Kind.BACKWARD_INPUT, stage, index) for stage in stages for index in range(num_micro_batches)}

    def open_to(rank: int) -> Iterator[Action]:
        """The next micro-batch of each stage for each kind, without forward passes beyond the bound."""
        if beginnings[rank]:
            yield beginnings[rank][0]
            return
        for stage in stages_of[rank]:
            # Without one activation left for its last stage, a rank would fill up with micro-batches that cannot leave it.
            room = bound[rank] - held[rank] - (stage != stages_of[rank][-1])
            for kind in priority:
                index = done[kind, stage]
                if index < num_micro_batches and (kind is not Kind.FORWARD or room > 0):
                    yield Action(kind, stage, index)

    def candidate(rank: int, action: Action) -> _Candidate | None:
        start = clock[rank]
        for needed in inputs_of(action, gradients):
            if needed not in ends:
                return None
            start = max(start, ends[needed] + (costs.communication if placement[needed.stage] != rank else 0.0))
        return start, priority.index(action.kind), len(placement) - action.stage, action

    def best(rank: int) -> _Candidate | None:
        """What the rank starts next, if it can start anything."""
        return min(filter(None, (candidate(rank, action) for action in open_to(rank))), default=None)

    # Kept per rank: asking every rank anew at each step would make the search quadratic in their number.
    next_of = [best(rank) for rank in ranks]
    for _ in range(len(priority) * len(placement) * num_micro_batches):
        start, rank, action = min((one[0], rank, one[-1]) for rank, one in enumerate(next_of) if one is not None)
        if beginnings[rank]:
            beginnings[rank].popleft()
        orders[rank].append(action)
        ends[action] = clock[rank] = start + costs.of(action)
        done[action.kind, action.stage] += 1
        held[rank] += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD_WEIGHT)
        # What ran can only have opened the way for its own stage and those beside it.
        for changed in {placement[stage] for stage in stages[max(0, action.stage - 1) : action.stage + 2]}:
            next_of[changed] = best(changed)
    return orders


FORWARD, BACKWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def one_forward_one_backward(pp_size: int, num_micro_batches: int) -> list[list[Action]]:
    """Rank r runs ``pp_size - r`` forward passes ahead, then one backward pass for each forward pass."""
    return [
        _alternate(
            [Action(FORWARD, rank, micro_batch) for micro_batch in range(num_micro_batches)],
            [Action(BACKWARD, rank, micro_batch) for micro_batch in range(num_micro_batches)],
            ahead=pp_size - rank,
        )
        for rank in range(pp_size)
    ]


def interleaved(pp_size: int, num_micro_batches: int, stages_per_rank: int) -> list[list[Action]]:
    """Groups of ``pp_size`` micro-batches go through each of a rank's stages in turn, rank r having ``r + i * pp_size``."""
    group = pp_size * stages_per_rank
    steps = range(num_micro_batches * stages_per_rank)
    forward = [(step % group // pp_size, step // group * pp_size + step % pp_size) for step in steps]
    return [
        _alternate(
            [Action(FORWARD, rank + chunk * pp_size, micro_batch) for chunk, micro_batch in forward],
            [Action(BACKWARD, rank + (stages_per_rank - 1 - chunk) * pp_size, step) for chunk, step in forward],
            ahead=_ahead(pp_size, stages_per_rank, rank),
        )
        for rank in range(pp_size)
    ]


def bound_of_interleaved(pp_size: int, num_micro_batches: int, stages_per_rank: int) -> list[int]:
    most = num_micro_batches * stages_per_rank
    return [min(most, _ahead(pp_size, stages_per_rank, rank)) for rank in range(pp_size)]


def _ahead(pp_size: int, stages_per_rank: int, rank: int) -> int:
    return 2 * (pp_size - rank - 1) + (stages_per_rank - 1) * pp_size + 1


def _alternate(forward: Sequence[Action], backward: Sequence[Action], ahead: int) -> list[Action]:
    order = list(forward[:ahead])
    for step, action in enumerate(backward):
        order += [action, *forward[ahead + step : ahead + step + 1]]
    return order


def zb_h1(pp_size: int, num_micro_batches: int) -> list[list[Action]]:
    """1F1B with the backward pass for the weights put off by r micro-batches on rank r.

    For p ranks, W at most F and B, and ``m >= p`` each rank idles for ``(p - 1) * (F + B - W)`` (table 2).
    """
    return [_order(rank, num_micro_batches, ahead=pp_size - rank, put_off=rank) for rank in range(pp_size)]


def zb_h2(pp_size: int, num_micro_batches: int) -> list[list[Action]]:
    """As many forward passes ahead as fit in until the first gradient is back.

    For ``m >= 2p - 1`` a rank idles for ``max(0, (p - 1) * (F + B - 2W))`` between its first start and last end (table 2).
    """
    return [_order(rank, num_micro_batches, ahead=2 * (pp_size - rank) - 1, put_off=2 * rank) for rank in range(pp_size)]


def _order(stage: int, num_micro_batches: int, *, ahead: int, put_off: int) -> list[Action]:
    order = [Action(FORWARD, stage, micro_batch) for micro_batch in range(min(ahead, num_micro_batches))]
    for micro_batch in range(num_micro_batches):
        order.append(Action(INPUT, stage, micro_batch))
        if micro_batch >= put_off:
            order.append(Action(WEIGHT, stage, micro_batch - put_off))
        if micro_batch + ahead < num_micro_batches:
            order.append(Action(FORWARD, stage, micro_batch + ahead))
    first_left = max(0, num_micro_batches - put_off)
    return order + [Action(WEIGHT, stage, left) for left in range(first_left, num_micro_batches)]


class _VRank:
    """A rank's order of stages in a V as it grows; steps of micro-batches that do not exist are left out."""

    def __init__(self, rank: int, pp_size: int, num_micro_batches: int, order: Sequence[Action] = ()) -> None:
        self.order: list[Action] = []
        self._stages = (rank, 2 * pp_size - 1 - rank)
        self._num_micro_batches = num_micro_batches
        self._done: Counter[tuple[Kind, int]] = Counter()
        for action in order:
            self.add(self._stages.index(action.stage), action.kind)

    def add(self, chunk: int, *kinds: Kind) -> None:
        """The next micro-batch of a rank's first (0) or last (1) stage."""
        stage = self._stages[chunk]
        for kind in kinds:
            if self.left(kind, chunk):
                self.order.append(Action(kind, stage, self._done[_counted(kind), stage]))
                self._done[_counted(kind), stage] += 1

    def left(self, kind: Kind, chunk: int) -> int:
        return self._num_micro_batches - self._done[_counted(kind), self._stages[chunk]]

    def weights(self) -> None:
        """The oldest one that was put off, of either stage."""
        put_off = [action for action in self.order if action.kind is INPUT]
        done = sum(action.kind is WEIGHT for action in self.order)
        self.order.append(put_off[done]._replace(kind=WEIGHT))


def _counted(kind: Kind) -> Kind:
    """A full backward pass takes the turn of one for the inputs."""
    return INPUT if kind is BACKWARD else kind


def dualpipev(pp_size: int, num_micro_batches: int) -> list[list[Action]]:
    """The eight phases of each rank; needs ``num_micro_batches >= 2 * pp_size``."""
    return [_rank_order(pp_size, num_micro_batches, rank) for rank in range(pp_size)]


def _rank_order(pp_size: int, num_micro_batches: int, rank: int) -> list[Action]:
    after = pp_size - rank - 1
    steps = _VRank(rank, pp_size, num_micro_batches)
    for _ in range(2 * after):
        steps.add(0, FORWARD)
    for _ in range(rank + 1):
        steps.add(0, FORWARD)
        steps.add(1, FORWARD)
    for _ in range(after):
        steps.add(1, INPUT)
        steps.weights()
        steps.add(1, FORWARD)
    for _ in range(num_micro_batches - 2 * pp_size + rank + 1):
        steps.add(0, FORWARD)
        steps.add(1, BACKWARD, FORWARD)
        steps.add(0, BACKWARD)
    for _ in range(after):
        steps.add(1, BACKWARD, FORWARD)
        steps.add(0, BACKWARD)
    # From the middle on, the backward passes for the weights wait for the gaps of the phase after it.
    for step in range(2 * (rank + 1)):
        steps.add((step + 1) % 2, INPUT if step > rank else BACKWARD)
    for _ in range(after):
        steps.weights()
        steps.add(0, INPUT)
    for _ in range(rank + 1):
        steps.weights()
    return steps.order


def orders_for_zbv(pp_size: int, num_micro_batches: int, costs: Costs) -> Iterator[list[list[Action]]]:
    """Orders to choose from: a fixed one, the same with a greedy end, and two that are all greedy."""
    # The fixed one has no bubble inside any rank when all costs are equal and there are at least 2 * pp_size - 1
    # micro-batches; with fewer, or with other costs, another is often shorter.
    begun = [_until_last_forward(pp_size, num_micro_batches, rank) for rank in range(pp_size)]
    yield [_finished(_VRank(rank, pp_size, num_micro_batches, own)) for rank, own in enumerate(begun)]
    placement = v_placement(pp_size)
    bound = bound_of_zbv(pp_size, num_micro_batches)
    nothing: list[list[Action]] = [[] for _ in range(pp_size)]
    yield greedy_order(placement, num_micro_batches, costs, bound, begun, (FORWARD, INPUT, WEIGHT))
    yield greedy_order(placement, num_micro_batches, costs, bound, nothing, (FORWARD, INPUT, WEIGHT))
    yield greedy_order(placement, num_micro_batches, costs, bound, nothing, (INPUT, FORWARD, WEIGHT))


def bound_of_zbv(pp_size: int, num_micro_batches: int) -> list[int]:
    # As much as 1F1B's p of stages twice as large.
    return [2 * min(pp_size, num_micro_batches)] * pp_size


def _until_last_forward(pp_size: int, num_micro_batches: int, rank: int) -> list[Action]:
    """Warm-up within the bound, then the steady state: one of each kind of each stage in turn."""
    steps = _VRank(rank, pp_size, num_micro_batches)
    for _ in range(2 * (pp_size - rank) - 1):
        steps.add(0, FORWARD)
    for _ in range(rank):
        steps.add(1, FORWARD)
        steps.add(0, FORWARD)
    for _ in range(pp_size - rank):
        steps.add(1, FORWARD, INPUT, WEIGHT)
    while steps.left(FORWARD, 0) or steps.left(FORWARD, 1):
        steps.add(0, FORWARD, INPUT, WEIGHT)
        steps.add(1, FORWARD, INPUT, WEIGHT)
    return steps.order


def _finished(steps: _VRank) -> list[Action]:
    """What is left: inputs of both stages in turn, then of the first, with the weights of it in the gaps."""
    while steps.left(INPUT, 1):
        steps.add(0, INPUT)
        steps.add(1, INPUT)
    while steps.left(INPUT, 0):
        steps.add(0, INPUT, WEIGHT)
    for chunk in (1, 0):
        while steps.left(WEIGHT, chunk):
            steps.add(chunk, WEIGHT)
    return steps.order
