"""Two hundred episodes whose environments take 0 to 2 seconds a step: turns as they come, against waves of generate calls.

In a wave all episodes that go on sample one turn in one call, and then wait for the slowest of their environments. What both
sample is compared before the time is taken, with environments that answer at once.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actors import RolloutConfig, RolloutGroup, RolloutTokens, SamplingConfig
from actors.cluster.session import ray_session
from benchmarks.random_models import RandomModel, write_model
from benchmarks.report import interleave, machine, medians
from rl_backend.environment import GroupTask, Result, Sampler, play_groups
from rl_backend.environment.sampler import turn_seed

EPISODES, MOST_TURNS, TURN_TOKENS, STEP_SECONDS = 200, 6, 32, 2.0
PROMPT_TOKENS, ANSWER_TOKENS, VOCABULARY = 48, 8, 512
MODEL = RandomModel(
    "qwen3",
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    },
)
RUNS = 3


def shape_of(seed: int, vocabulary: int = VOCABULARY) -> tuple[list[int], list[tuple[float, list[int]]]]:
    """The prompt of an episode, and of each turn how long its environment takes and what it answers."""
    draw = random.Random(seed)
    turns = draw.randint(1, MOST_TURNS)
    steps = [(draw.uniform(0, STEP_SECONDS), draw.choices(range(vocabulary), k=ANSWER_TOKENS)) for _ in range(turns)]
    return draw.choices(range(vocabulary), k=PROMPT_TOKENS), steps


async def player(row: Mapping[str, Any], sampler: Sampler) -> Result:
    """Plays an episode of :func:`shape_of`."""
    prompt, steps = shape_of(sampler.seed)
    for seconds, answer in steps:
        turn = await sampler.sample(prompt, max_tokens=TURN_TOKENS)
        await asyncio.sleep(seconds * row["wait"])
        prompt = [*prompt, *turn.token_ids, *answer]
    return Result()


def play_continuously(tokens: RolloutTokens, seeds: Sequence[int], wait: float) -> list[list[list[int]]]:
    """The turns of each episode."""
    tasks = [GroupTask({"wait": wait}, seed, [seed]) for seed in seeds]
    groups = asyncio.run(play_groups(player, tasks, tokens))
    return [[list(turn.token_ids) for turn in group.episodes[0].turns] for group in groups]


def play_in_waves(rollout: RolloutGroup, seeds: Sequence[int], wait: float) -> list[list[list[int]]]:
    """As :func:`play_continuously`."""
    shapes = [shape_of(seed) for seed in seeds]
    prompts = [prompt for prompt, _ in shapes]
    turns: list[list[list[int]]] = [[] for _ in seeds]
    for number in range(MOST_TURNS):
        going_on = [index for index, (_, steps) in enumerate(shapes) if len(steps) > number]
        if not going_on:
            break
        samples = rollout.generate(
            [prompts[index] for index in going_on],
            SamplingConfig(max_new_tokens=TURN_TOKENS),
            seeds=[turn_seed(seeds[index], number) for index in going_on],
        )
        time.sleep(max(shapes[index][1][number][0] for index in going_on) * wait)
        for index, sample in zip(going_on, samples, strict=True):
            turns[index].append(sample.response_ids)
            prompts[index] = [*prompts[index], *sample.response_ids, *shapes[index][1][number][1]]
    return turns


def measure() -> dict[str, Any]:
    """``continuous_over_waves``, and what it is made of under ``waves``."""
    with tempfile.TemporaryDirectory() as folder, ray_session(1, 1), RolloutGroup(engine_config(Path(folder))) as rollout:
        return measure_over(rollout)


def engine_config(folder: Path) -> RolloutConfig:
    """Of an engine with a random model, which is written into ``folder``."""
    return RolloutConfig(
        model_path=str(write_model(MODEL, 0, folder / "model")),
        device="cpu",
        dtype="float32",
        max_model_len=384,
        kv_cache_gib=1.0,
        engine_args={"block_size": 32},
    )


def measure_over(rollout: RolloutGroup) -> dict[str, Any]:
    """:func:`measure` with engines that run."""
    tokens = RolloutTokens(rollout)
    equal = play_continuously(tokens, range(EPISODES), 0.0) == play_in_waves(rollout, range(EPISODES), 0.0)
    next_seed = EPISODES
    generated: dict[str, int] = {}

    def seconds(name: str) -> float:
        """Of a run with prompts that the cache has not seen."""
        nonlocal next_seed
        seeds, next_seed = range(next_seed, next_seed + EPISODES), next_seed + EPISODES
        started = time.perf_counter()
        turns = play_continuously(tokens, seeds, 1.0) if name == "continuous" else play_in_waves(rollout, seeds, 1.0)
        elapsed = time.perf_counter() - started
        generated[name] = sum(len(turn) for episode in turns for turn in episode)
        return elapsed

    runs = interleave(RUNS, {"continuous": lambda: seconds("continuous"), "waves": lambda: seconds("waves")})
    median = medians(runs)
    return {
        "continuous_over_waves": median["waves"] / median["continuous"],
        "waves": {
            "episodes": EPISODES,
            "turns_most": MOST_TURNS,
            "step_seconds_most": STEP_SECONDS,
            "sampled_tokens_of_last_run": generated,
            "seconds": runs,
            "median_seconds": median,
            "tokens_equal": equal,
            "cached_share": tokens.cached_share,
            "machine": machine(),
        },
    }
