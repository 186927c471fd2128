"""The layouts and features of test cases, and a choice of cases that covers every pair of them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from itertools import combinations

type Fact = tuple[str, str]
"""An axis and a value on it: ("tp", "2"), ("schedule", "zbv"), ("feature", "checkpoint")."""

_SIZE = re.compile(r"(?<![a-z_])(tp|pp|vpp|cp|ep|etp|dp)['\"]?[:=,]? ?(\d)")
_WORLD = re.compile(r"(?:world(?:_size)?|loaded_by|saved_by)['\"]?[:=] ?(\d)|(\d)-ranks")
_WORDS: Mapping[str, Mapping[str, str]] = {
    "backend": {"bridge": r"bridge|megatron", "native": r"native"},
    "schedule": {
        "interleaved-1f1b": r"interleaved-1f1b",
        "1f1b": r"(?<!interleaved-)1f1b",
        "zb-h1": r"zb-h1",
        "zb-h2": r"zb-h2",
        "zbv": r"zbv",
        "dualpipev": r"dualpipev",
    },
    "family": {"mixture": r"moe|mixture|mixtral|experts?\b", "dense": r"dense|qwen2|qwen3\b(?!_moe)|llama|mistral"},
    "dtype": {"bfloat16": r"bfloat16|bf16"},
    "recomputation": {"full": r"recomput|checkpointing'?: ?'full"},
    "feature": {
        "router replay": r"replay|\bR[23]\b|routes",
        "critic": r"critic|'?values'?\b(?= |'|\]|$)|ppo",
        "checkpoint": r"checkpoint(?!ing)|resume",
        "asynchronous save": r"asynchronous['\"]?[:=] ?True|async_save",
        "export": r"export",
        "plan": r"test_plan",
        "parity": r"parity",
        "verl": r"verl",
    },
}


def facts(test: str, values: Iterable[object] = ()) -> frozenset[Fact]:
    """What the name of a test (file, function, case) and the values of its parameters say. A size of 1 says nothing."""
    text = re.sub(r"0x[0-9a-f]+", "", " ".join([test, *map(repr, values)]))
    found = {(axis, size) for axis, size in _SIZE.findall(text) if size != "1"}
    found |= {("ranks", one or other) for one, other in _WORLD.findall(text)}
    for axis, words in _WORDS.items():
        found |= {(axis, value) for value, pattern in words.items() if re.search(pattern, text)}
    return frozenset(found)


def pairs(values: Iterable[Hashable]) -> set[frozenset[Hashable]]:
    return {frozenset(pair) for pair in combinations(values, 2)}


def covering(cases: Mapping[str, Iterable[Hashable]], cost: Mapping[str, float] | None = None) -> set[str]:
    """Cases such that what any case covers, one of these does. Greedy: most that is new for its cost, then the first.

    Args:
        cases: case -> what it covers, as :func:`pairs` of its values.
        cost: of running a case; 1 where it is not given.
    """
    cost = cost or {}
    left = {case: set(covered) for case, covered in cases.items()}
    missing: set[Hashable] = set().union(*left.values())
    chosen: set[str] = set()
    while missing:
        best = max(left, key=lambda case: len(left[case]) / cost.get(case, 1.0))
        chosen.add(best)
        new = left.pop(best)
        missing -= new
        for covered in left.values():
            covered -= new
    return chosen
