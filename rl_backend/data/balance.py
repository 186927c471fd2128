"""Balance: sequences spread over data-parallel ranks and micro-batches of similar work."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from rl_backend.contracts import BatchError

ATTENTION_CROSSOVER_TOKENS = 6 * 4096
"""Sequence length at which attention scores cost as much as all matrix products: 6 x hidden size of a dense decoder."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """Where each of the caller's sequences goes.

    Attributes:
        micro_batches: [data-parallel rank][micro-batch] -> indices into the caller's list, ascending, of several tenants one
            tenant's after the other's. Every rank has the same number of micro-batches, none is empty, every index appears
            once.
        fillers: where the sequences do not suffice for that, copies of some join them, which no loss reads. Their indices
            follow the caller's; each entry is the caller's sequence of which one is a copy.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    fillers: tuple[int, ...] = ()

    @property
    def dp_size(self) -> int:
        return len(self.micro_batches)

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches[0])

    @property
    def num_sequences(self) -> int:
        return sum(len(micro_batch) for rank in self.micro_batches for micro_batch in rank) - len(self.fillers)

    def with_fillers[T](self, values: Sequence[T]) -> list[T]:
        return [*values, *(values[index] for index in self.fillers)]

    def rank_indices(self, dp_rank: int) -> tuple[int, ...]:
        return tuple(index for micro_batch in self.micro_batches[dp_rank] for index in micro_batch)


def plan_micro_batches(
    seq_lens: Sequence[int], dp_size: int, max_tokens: int, *, multiple_of: int = 1, fill: bool = False
) -> MicroBatchPlan:
    """Spreads sequences over ranks and micro-batches, with as few micro-batches as the greedy packings find.

    A sequence of L tokens counts as work ``L + L**2 / ATTENTION_CROSSOVER_TOKENS``. Longest first, each goes to the
    micro-batch with the least work that has room (longest-processing-time rule, Graham 1969); when that does not fit,
    to the fullest that has room (best fit decreasing). The result depends on the arguments alone.

    Args:
        max_tokens: of one micro-batch.
        multiple_of: the number of micro-batches of a rank is a multiple of this.
        fill: copies of the shortest sequences, of each as many, join sequences that are fewer than ranks, or whose number
            cannot give every rank the same number of micro-batches within the budget. Without, both are refused.

    Raises:
        BatchError: no sequence, one longer than ``max_tokens``, or without ``fill`` a number of sequences as above.
    """
    _check(seq_lens, dp_size, max_tokens, multiple_of, fewest=1 if fill else dp_size * multiple_of)
    found = fewest_micro_batches(seq_lens, _work(seq_lens), dp_size, max_tokens, multiple_of)
    if found is not None:
        return MicroBatchPlan(found)
    if fill:
        # One micro-batch for each sequence always has room.
        shortest_first = sorted(range(len(seq_lens)), key=lambda index: (seq_lens[index], index))
        fillers = tuple(islice(cycle(shortest_first), -len(seq_lens) % (dp_size * multiple_of)))
        lengths = [*seq_lens, *(seq_lens[index] for index in fillers)]
        found = fewest_micro_batches(lengths, _work(lengths), dp_size, max_tokens, multiple_of)
        assert found is not None
        return MicroBatchPlan(found, fillers)
    most = len(seq_lens) // (dp_size * multiple_of) * multiple_of
    multiple = f" in multiples of {multiple_of}" if multiple_of > 1 else ""
    raise BatchError(
        f"{len(seq_lens)} sequences of {sum(seq_lens)} tokens do not fit into {most} micro-batches of at most {max_tokens} "
        f"tokens on each of {dp_size} data-parallel ranks, the most{multiple} that leaves none empty; make the number of "
        "sequences a multiple of the data-parallel size or raise max_tokens_per_micro_batch",
        num_sequences=len(seq_lens),
        dp_size=dp_size,
        max_tokens=max_tokens,
    )


def _work(seq_lens: Sequence[int]) -> list[float]:
    return [length + length * length / ATTENTION_CROSSOVER_TOKENS for length in seq_lens]


def fewest_micro_batches(
    seq_lens: Sequence[int], work: Sequence[float], dp_size: int, max_tokens: int, multiple_of: int
) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
    """The micro-batches of :class:`MicroBatchPlan`; None where there is no room, or one would be empty."""
    # Longest first, and by place among equals, so that every rank makes the same plan.
    order = sorted(range(len(seq_lens)), key=lambda index: (-seq_lens[index], index))
    fewest = -(-sum(seq_lens) // (max_tokens * dp_size * multiple_of)) * multiple_of
    most = len(seq_lens) // (dp_size * multiple_of) * multiple_of
    for per_rank in range(fewest, most + 1, multiple_of):
        bins = per_rank * dp_size
        # Even work first: best fit finds room where that has none, in less even micro-batches.
        filled = _least_work(order, seq_lens, work, bins, max_tokens) or _best_fit(order, seq_lens, bins, max_tokens)
        if filled is not None:
            return _spread(filled, work, dp_size)
    return None


def plan_tenants(
    seq_lens: Sequence[int],
    tenants: Sequence[int],
    dp_size: int,
    max_tokens: int,
    *,
    multiple_of: int = 1,
    fill: bool = False,
) -> MicroBatchPlan:
    """As :func:`plan_micro_batches` for sequences of several LoRA tenants, which share micro-batches.

    Each tenant's sequences are planned by themselves, and what that makes of them stays together and in its order: neither
    what is in a tenant's part of a micro-batch nor the order of its sums depends on who is beside it.
    Errors are those of :func:`plan_micro_batches`, of any tenant alone, by its number.
    """
    _check(seq_lens, dp_size, max_tokens, multiple_of, fewest=1)
    fillers: list[int] = []
    # A column is what one micro-batch of every rank has of one tenant.
    filled: list[list[tuple[int, tuple[tuple[int, ...], ...]]]] = []
    room: list[int] = []
    for tenant in dict.fromkeys(tenants):
        # Alone, so that its plan is the one that it has without the others.
        own = [index for index, each in enumerate(tenants) if each == tenant]
        try:
            lengths = [seq_lens[index] for index in own]
            plan = plan_micro_batches(lengths, dp_size, max_tokens, multiple_of=multiple_of, fill=fill)
        except BatchError as error:
            raise BatchError(f"LoRA tenant {tenant}: {error.message}", **error.details, tenant=tenant) from error
        first_filler = len(seq_lens) + len(fillers)
        fillers += [own[place] for place in plan.fillers]
        own += range(first_filler, len(seq_lens) + len(fillers))
        lengths = plan.with_fillers(lengths)
        first = 0
        for column in zip(*plan.micro_batches, strict=True):
            indices = tuple(tuple(own[place] for place in places) for places in column)
            size = max(sum(lengths[place] for place in of_rank) for of_rank in column)
            place = next((place for place in range(first, len(filled)) if room[place] >= size), len(filled))
            if place == len(filled):
                filled.append([])
                room.append(max_tokens)
            filled[place].append((tenant, indices))
            room[place] -= size
            # Behind the last, so that a tenant's micro-batches keep their order.
            first = place + 1
    while len(filled) % multiple_of:
        # Right behind where it was, a column stays between the others of its tenant.
        source = next(place for place in reversed(range(len(filled))) if len(filled[place]) > 1)
        filled.insert(source + 1, [filled[source].pop()])
    return MicroBatchPlan(
        tuple(
            tuple(tuple(index for _, indices in columns for index in indices[rank]) for columns in filled)
            for rank in range(dp_size)
        ),
        tuple(fillers),
    )


def _check(seq_lens: Sequence[int], dp_size: int, max_tokens: int, multiple_of: int, *, fewest: int) -> None:
    for index, length in enumerate(seq_lens):
        if length > max_tokens:
            raise BatchError(
                f"sequence {index} has {length} tokens, more than the budget of {max_tokens} for one micro-batch; raise "
                "max_tokens_per_micro_batch or shorten it",
                index=index,
                length=length,
                max_tokens=max_tokens,
            )
    if len(seq_lens) < fewest:
        needs = "one" if multiple_of == 1 else f"{multiple_of}, one for each of {multiple_of} micro-batches"
        raise BatchError(
            f"{len(seq_lens)} sequences for {dp_size} data-parallel ranks; each rank needs at least {needs}",
            num_sequences=len(seq_lens),
            dp_size=dp_size,
            multiple_of=multiple_of,
        )


def _least_work(
    order: Sequence[int], seq_lens: Sequence[int], work: Sequence[float], bins: int, max_tokens: int
) -> list[list[int]] | None:
    filled: list[list[int]] = [[] for _ in range(bins)]
    room = [max_tokens] * bins
    least = [(0.0, bin_) for bin_ in range(bins)]
    for index in order:
        too_full = []
        while least and room[least[0][1]] < seq_lens[index]:
            too_full.append(heapq.heappop(least))
        if not least:
            return None
        load, bin_ = least[0]
        filled[bin_].append(index)
        room[bin_] -= seq_lens[index]
        heapq.heapreplace(least, (load + work[index], bin_))
        # A bin without room for this sequence may have room for a later, shorter one.
        for entry in too_full:
            heapq.heappush(least, entry)
    return filled


def _best_fit(order: Sequence[int], seq_lens: Sequence[int], bins: int, max_tokens: int) -> list[list[int]] | None:
    filled: list[list[int]] = [[] for _ in range(bins)]
    room = [max_tokens] * bins
    for index in order:
        fitting = [bin_ for bin_ in range(bins) if room[bin_] >= seq_lens[index]]
        if not fitting:
            return None
        bin_ = min(fitting, key=lambda candidate: (room[candidate], candidate))
        filled[bin_].append(index)
        room[bin_] -= seq_lens[index]
    # No micro-batch may be empty: an empty bin takes the shortest sequence of a bin that has several.
    spare = [members for members in filled if len(members) > 1]
    for members in filled:
        if not members:
            while len(spare[-1]) == 1:
                spare.pop()
            members.append(spare[-1].pop())
    return filled


def _spread(filled: Sequence[Sequence[int]], work: Sequence[float], dp_size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    def load(members: Sequence[int]) -> float:
        return sum(work[index] for index in members)

    # Neighbours in order of work run at the same time.
    by_work = sorted((tuple(sorted(members)) for members in filled), key=lambda members: (-load(members), members))
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp_size)]
    totals = [0.0] * dp_size
    for start in range(0, len(by_work), dp_size):
        # The largest of each round goes to the rank with the least work so far, which evens out the totals.
        least_first = sorted(range(dp_size), key=lambda rank: (totals[rank], rank))
        for rank, members in zip(least_first, by_work[start : start + dp_size], strict=True):
            ranks[rank].append(members)
            totals[rank] += load(members)
    return tuple(tuple(rank) for rank in ranks)
