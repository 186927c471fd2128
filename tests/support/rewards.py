"""Reward functions for tests, and responses for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rl_backend.data.rewards import LoadedReward, RewardCall, RewardScorer

FILE = """
import asyncio, os, signal, sys, threading, time

class Mine:
    def __float__(self):
        return 0.5

def exact(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}

def length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str)

def mine(data_source, solution_str, ground_truth, extra_info=None):
    return Mine()

async def judged(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return len(solution_str)

def picky(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str)

def alarmed(data_source, solution_str, ground_truth, extra_info=None):
    signal.signal(signal.SIGALRM, lambda *_: None)
    return float(threading.current_thread() is threading.main_thread())

def process(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1, "pid": os.getpid()}

def shown(data_source, solution_str, ground_truth, extra_info=None, *, prompt):
    return {"score": 1, "prompt": prompt}

def sleeps(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0 if solution_str == "quick" else 600)
    return 1.0

def dies(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def leaves(data_source, solution_str, ground_truth, extra_info=None):
    sys.exit(3)

def unsendable(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "why": lambda: None}
"""


def calls(*responses: str) -> list[RewardCall]:
    return [RewardCall("sums", response, "4", {"level": 1}, "2+2=") for response in responses]


def of(*functions: Callable[..., Any], **options: Any) -> RewardScorer:
    names = [function.__name__ if len(functions) > 1 else "" for function in functions]
    return RewardScorer(
        [LoadedReward(each, f"m:{each.__name__}", name) for each, name in zip(functions, names, strict=True)], **options
    )


def values(scores: Any) -> list[float]:
    return [score.value for score in scores]


def later(*, seconds: Mapping[str, float], running: list[int] | None = None) -> Callable[..., float]:
    """A plain function that takes its time, and notes how many of its calls go on."""
    going: list[str] = []

    def slow(solution_str: str, **_: Any) -> float:
        going.append(solution_str)
        if running is not None:
            running.append(len(going))
        time.sleep(seconds.get(solution_str, 0.0))
        going.remove(solution_str)
        return len(solution_str)

    return slow
