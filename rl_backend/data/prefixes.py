"""Shared prefixes: which sequences begin with the same tokens, found from the tokens alone."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
import xxhash
from torch import Tensor

from rl_backend.contracts import PackedBatch
from rl_backend.contracts.replay import KEYS, ROUTES, ROUTES_MASK
from rl_backend.data.balance import ATTENTION_CROSSOVER_TOKENS, MicroBatchPlan, fewest_micro_batches
from rl_backend.primitive.prefix_tree import PrefixTree

SHORTEST_RUN = 32
"""Tokens. Eight sequences that share so many take 0.9 of the time, two 1.08; of 16 tokens none is faster, of 64 both are
(row ``shortest`` of ``benchmarks.shared_prefixes``).
"""


KEYS_OF_A_TOKEN = 8
"""Attention may keep the keys of whole paths: a micro-batch has at most so many for each token that it may have."""


def shared_prefixes(batch: PackedBatch, *, replays: bool, owners: Sequence[int] = ()) -> PrefixTree | None:
    """The tree of a micro-batch; None where no sequences begin with the same :data:`SHORTEST_RUN` tokens.

    Args:
        replays: routes are replayed, and tokens with other routes are other tokens.
        owners: of each sequence; those of another share nothing. Empty where all may.
    """
    tokens = compared_tokens(batch.input_ids, batch.token_fields, replays=replays).cpu()
    if owners:
        owner = torch.tensor(owners).repeat_interleave(batch.seq_lens)
        tokens = torch.cat((owner[:, None], tokens.view(len(owner), -1)), dim=1)
    tree = grow(tokens.split(batch.seq_lens.tolist()))
    return tree if tree.shares else None


def compared_tokens(input_ids: Tensor, token_fields: Mapping[str, Tensor], *, replays: bool) -> Tensor:
    """(T,) int64 or (T, C) uint8: what a model computes with at each token."""
    names = (ROUTES, ROUTES_MASK) if replays and ROUTES in token_fields else ()
    fields = [token_fields[name] for name in names if name in token_fields]
    if KEYS in token_fields:
        fields.append(_digests(token_fields[KEYS]).to(input_ids.device))
    if not fields:
        return input_ids
    rows = [field.reshape(len(input_ids), -1).contiguous() for field in (input_ids, *fields)]
    # Their bytes: a driver has those of a whole batch, and routes as int64 would be eight times as many.
    return torch.cat([field.view(torch.uint8) for field in rows], dim=1)


def _digests(keys: Tensor) -> Tensor:
    """(T, 16) uint8, xxh3-128 of each token's recorded keys, which are thousands in every layer."""
    rows = keys.cpu().reshape(len(keys), -1).contiguous().view(torch.uint8).numpy()
    return torch.frombuffer(bytearray(b"".join(map(xxhash.xxh3_128_digest, rows))), dtype=torch.uint8).view(-1, 16)


def grow(sequences: Sequence[Tensor]) -> PrefixTree:
    """The tree of sequences of (L,) or (L, C) integers on the CPU; shared runs have :data:`SHORTEST_RUN` rows or more."""
    lengths, parents, ends = list[int](), list[int](), [-1] * len(sequences)
    # Groups of sequences that are equal for a run from a place on; a stack, as deep as a tree may be.
    waiting = [(group, 0, -1) for group in reversed(_alike(sequences, range(len(sequences)), 0))]
    while waiting:
        group, start, parent = waiting.pop()
        length = _common(sequences, group, start)
        run, end = len(lengths), start + length
        lengths.append(length)
        parents.append(parent)
        for index in group:
            if len(sequences[index]) == end:
                ends[index] = run
        others = [index for index in group if len(sequences[index]) > end]
        waiting += [(each, end, run) for each in reversed(_alike(sequences, others, end))]
    return PrefixTree(tuple(lengths), tuple(parents), tuple(ends))


def _alike(sequences: Sequence[Tensor], members: Sequence[int], start: int) -> list[list[int]]:
    """``members`` whose next :data:`SHORTEST_RUN` rows are equal together, in the order of the first of each group."""
    groups: dict[bytes | int, list[int]] = {}
    for index in members:
        rows = sequences[index][start : start + SHORTEST_RUN]
        # One that ends before is like no other.
        key = rows.contiguous().numpy().tobytes() if len(rows) == SHORTEST_RUN else index
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _common(sequences: Sequence[Tensor], group: Sequence[int], start: int) -> int:
    """For how many rows from ``start`` on all of ``group`` are equal."""
    first = sequences[group[0]][start:]
    length = len(first)
    for index in group[1:]:
        rows = sequences[index][start : start + length]
        length = len(rows)
        differs = (first[:length] != rows).view(length, -1).any(1)
        # The first of the largest.
        length = int(differs.to(torch.uint8).argmax()) if bool(differs.any()) else length
    return length


def plan_shared(
    sequences: Sequence[Tensor], dp_size: int, max_tokens: int, *, multiple_of: int = 1
) -> MicroBatchPlan | None:
    """As :func:`~rl_backend.data.balance.plan_micro_batches`, where tokens that sequences of a micro-batch share count once.

    Sequences that share stay together, unless that is more than ``max_tokens``, or keys for :data:`KEYS_OF_A_TOKEN` times
    as many, leaves a rank without a micro-batch, or leaves ranks with so uneven work that to compute the shared tokens again
    costs less. Arguments are those of :func:`grow`. None where nothing is shared, or no such plan is found.
    """
    tree = grow(sequences)
    parts = _fitting_parts(sequences, tree, max_tokens) if tree.shares else []
    best: tuple[float, _MicroBatches] | None = None
    while parts:
        work = [part.work for part in parts]
        found = fewest_micro_batches([part.room for part in parts], work, dp_size, max_tokens, multiple_of)
        if found is not None:
            # Ranks wait for each other after every micro-batch.
            cost = sum(max(sum(work[part] for part in of_rank) for of_rank in column) for column in zip(*found, strict=True))
            if best is not None and cost >= best[0]:
                break
            best = cost, _members(found, parts)
        largest = max((part for part in parts if len(part.members) > 1), key=lambda part: part.work, default=None)
        if largest is None:
            break
        parts.remove(largest)
        parts += [_Part.of(sequences, half) for half in largest.halves]
    # What parts of one group share in a micro-batch is not counted above, and may end runs earlier than in each.
    rooms = [_room(grow([sequences[index] for index in each])) for rank in (best[1] if best else ()) for each in rank]
    return None if best is None or max(rooms) > max_tokens else MicroBatchPlan(best[1])


def _room(tree: PrefixTree) -> int:
    """What a micro-batch takes of its tokens: those that are computed, or as many as its keys are for."""
    return max(tree.num_rows, -(-sum(tree.key_lens) // KEYS_OF_A_TOKEN))


type _MicroBatches = tuple[tuple[tuple[int, ...], ...], ...]


class _Part(NamedTuple):
    """Sequences that stay together, the rows that are computed of them, and the work, as of a whole sequence elsewhere."""

    members: list[int]
    room: int
    work: float

    @classmethod
    def of(cls, sequences: Sequence[Tensor], members: list[int]) -> Self:
        tree = grow([sequences[index] for index in members])
        squares = sum(keys**2 - (keys - own) ** 2 for own, keys in zip(tree.lengths, tree.key_lens, strict=True))
        return cls(members, _room(tree), tree.num_rows + squares / ATTENTION_CROSSOVER_TOKENS)

    @property
    def halves(self) -> list[list[int]]:
        # Of equal size even where a branch is cut: ranks that wait cost more than one prompt twice.
        middle = len(self.members) // 2
        return [self.members[:middle], self.members[middle:]]


def _fitting_parts(sequences: Sequence[Tensor], tree: PrefixTree, max_tokens: int) -> list[_Part]:
    """Those that share anything, together as far as there is room; none where a sequence alone has no room."""
    groups: dict[int, list[int]] = {}
    for index, end in enumerate(tree.ends):
        groups.setdefault(tree.path(end)[0], []).append(index)
    # In the order of the tree: neighbours share most.
    waiting = [sorted(group, key=lambda index: (tree.ends[index], index)) for group in reversed(groups.values())]
    parts = list[_Part]()
    while waiting:
        part = _Part.of(sequences, waiting.pop())
        if part.room <= max_tokens:
            parts.append(part)
        elif len(part.members) > 1:
            waiting += reversed(_cut(tree, part.members))
        else:
            return []
    return parts


def _cut(tree: PrefixTree, members: list[int]) -> list[list[int]]:
    """Two parts of similar size, cut where neighbours share least."""
    # Where all sequences have a system prompt in common, groups stay whole.
    middle, margin = len(members) // 2, max(len(members) // 4, 1)
    places = range(margin, len(members) - margin + 1)
    place = min(places, key=lambda at: (_rows_in_common(tree, members[at - 1], members[at]), abs(at - middle)))
    return [members[:place], members[place:]]


def _rows_in_common(tree: PrefixTree, first: int, second: int) -> int:
    one, other = (set(tree.path(tree.ends[index])) for index in (first, second))
    return sum(tree.lengths[run] for run in one & other)


def _members(plan: _MicroBatches, parts: Sequence[_Part]) -> _MicroBatches:
    return tuple(
        tuple(tuple(sorted(index for part in of_parts for index in parts[part].members)) for of_parts in rank)
        for rank in plan
    )
