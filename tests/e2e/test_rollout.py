"""Sampling from a group of engines."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.rollout.config import SamplingConfig
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import sample_seeds
from actors.sync.push import WeightSync
from rl_backend.contracts import BatchError, ConfigError, UnsupportedError
from tests.e2e.conftest import MAX_NUM_SEQS
from tests.support.rollout import ReferenceTrainer

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9], [100, 90, 80, 70], list(range(3, 120))]
TOLERANCE = 1e-5


@pytest.fixture
def group(rollout_pair: RolloutGroup, rollout_trainer: ReferenceTrainer, rollout_sync: WeightSync) -> RolloutGroup:
    """The engines, serving the trainer's weights."""
    rollout_sync.push()
    return rollout_pair


def test_samples_come_in_the_callers_order_from_all_engines(group: RolloutGroup) -> None:
    samples = group.generate(PROMPTS, SamplingConfig(n=3, max_new_tokens=4))
    assert [(s.prompt_index, s.sample_index) for s in samples] == [(p, n) for p in range(len(PROMPTS)) for n in range(3)]
    assert all(sample.prompt_ids == PROMPTS[sample.prompt_index] for sample in samples)
    assert all(len(s.response_ids) == len(s.log_probs) == len(s.weight_versions) == 4 for s in samples)
    assert {sample.engine for sample in samples} == {0, 1}


@pytest.mark.shows("rollout: seeded samples do not depend on batching or engine")
def test_seeded_samples_depend_on_the_seed_and_not_on_batching_or_engine(group: RolloutGroup) -> None:
    sampling = SamplingConfig(n=2, max_new_tokens=6)
    seeds = sample_seeds(7, 3, len(PROMPTS), 2)
    together = [s.response_ids for s in group.generate(PROMPTS, sampling, seeds=seeds)]
    backwards = [seed for prompt in range(len(PROMPTS) - 1, -1, -1) for seed in seeds[2 * prompt : 2 * prompt + 2]]
    turned = group.generate(PROMPTS[::-1], sampling, seeds=backwards)
    assert [turned[2 * (len(PROMPTS) - 1 - p) + n].response_ids for p in range(len(PROMPTS)) for n in range(2)] == together
    alone = [
        group.generate([PROMPTS[p]], sampling, seeds=seeds[2 * p : 2 * p + 2])[n].response_ids
        for p in range(len(PROMPTS))
        for n in range(2)
    ]
    assert alone == together
    others = group.generate(PROMPTS, sampling, seeds=sample_seeds(7, 4, len(PROMPTS), 2))
    assert [s.response_ids for s in others] != together


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_log_probs_are_those_of_the_distribution_sampled_from(
    group: RolloutGroup, rollout_trainer: ReferenceTrainer, temperature: float
) -> None:
    samples = group.generate(PROMPTS, SamplingConfig(temperature=temperature, max_new_tokens=6))
    assert rollout_trainer.mean_gap(samples, temperature or 1.0) <= TOLERANCE


def test_log_probs_with_top_k_are_of_the_kept_tokens(group: RolloutGroup) -> None:
    one = group.generate(PROMPTS, SamplingConfig(top_k=1, max_new_tokens=3))
    assert all(abs(log_prob) < 1e-6 for sample in one for log_prob in sample.log_probs)


@pytest.mark.shows(
    "rollout: with top_p, top_k and min_p log-probs are those of the kept tokens, renormalised, to 1e-5 of transformers"
)
@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.8, "top_k": 9, "min_p": 0.05}])
def test_log_probs_of_kept_tokens_are_renormalised(
    group: RolloutGroup, rollout_trainer: ReferenceTrainer, cut: dict[str, Any]
) -> None:
    sampling = SamplingConfig(temperature=0.7, max_new_tokens=6, **cut)
    samples = group.generate(PROMPTS, sampling)
    assert rollout_trainer.mean_gap(samples, 0.7, kept=lambda probs: kept_tokens(probs, sampling)) <= TOLERANCE
    # Training compares with log-probs over all tokens: never larger than the engine's, so the gap shows what was cut.
    assert rollout_trainer.mean_gap(samples, 0.7) > 100 * TOLERANCE


def kept_tokens(probs: Tensor, sampling: SamplingConfig) -> Tensor:
    """(V,) bool, by the definitions of min_p, top_k and top_p in this order, each over what is left."""
    kept = probs >= sampling.min_p * probs.max()
    probs = probs * kept
    if sampling.top_k:
        kept &= probs >= probs.topk(sampling.top_k).values[-1]
        probs = probs * kept
    ordered, places = (probs / probs.sum()).sort(descending=True)
    before = ordered.cumsum(0) - ordered  # what the likelier tokens have together
    return kept & torch.zeros_like(kept).scatter(0, places, before < sampling.top_p)


def test_stop_strings_need_engines_with_a_tokenizer(group: RolloutGroup) -> None:
    with pytest.raises(ConfigError, match=r"stop_strings=.*have no tokenizer; set RolloutConfig\.load_tokenizer"):
        group.generate(PROMPTS, SamplingConfig(stop_strings=("a",)))


def test_temperature_zero_takes_the_likeliest_token(group: RolloutGroup) -> None:
    greedy = SamplingConfig(temperature=0, max_new_tokens=5)
    first, second = group.generate(PROMPTS, greedy), group.generate(PROMPTS, greedy)
    assert [s.response_ids for s in first] == [s.response_ids for s in second]
    assert all(log_prob > -math.log(128) for sample in first for log_prob in sample.log_probs)


def test_a_stop_token_ends_a_response_and_belongs_to_it(group: RolloutGroup) -> None:
    (whole,) = group.generate([PROMPTS[0]], SamplingConfig(temperature=0, max_new_tokens=8))
    assert whole.finish_reason == "length"
    stop = whole.response_ids[3]
    (stopped,) = group.generate([PROMPTS[0]], SamplingConfig(temperature=0, max_new_tokens=8, stop_token_ids=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.response_ids == whole.response_ids[: whole.response_ids.index(stop) + 1]


def test_without_log_probs_none_are_returned(group: RolloutGroup) -> None:
    (sample,) = group.generate([PROMPTS[0]], SamplingConfig(max_new_tokens=2, log_probs=False))
    assert sample.log_probs == []
    assert len(sample.response_ids) == 2


def test_seeded_prompts_that_do_not_fit_into_one_step_together_are_served(group: RolloutGroup) -> None:
    prompts = [[3 + (i + shift) % 120 for i in range(300)] for shift in range(6)]
    samples = group.generate(prompts, SamplingConfig(max_new_tokens=3), seeds=list(range(6)))
    assert all(len(sample.response_ids) == 3 for sample in samples)


def test_submitted_samples_keep_the_weights_of_when_they_were_asked_for(
    group: RolloutGroup, rollout_trainer: ReferenceTrainer, rollout_sync: WeightSync
) -> None:
    before = rollout_trainer.source.version
    pending = group.submit(PROMPTS * 4, SamplingConfig(max_new_tokens=100))
    assert not pending.done()
    rollout_trainer.advance()
    rollout_sync.push()
    assert {version for sample in pending.result() for version in sample.weight_versions} == {before}
    assert pending.done()
    after = group.generate(PROMPTS, SamplingConfig(max_new_tokens=4))
    assert {version for sample in after for version in sample.weight_versions} == {before + 1}


def test_a_result_that_takes_too_long_raises_and_can_be_waited_for_again(group: RolloutGroup) -> None:
    pending = group.submit(PROMPTS * 4, SamplingConfig(max_new_tokens=100))
    with pytest.raises(TimeoutError):
        pending.result(timeout=0.01)
    assert len(pending.result()) == len(PROMPTS) * 4


@pytest.mark.parametrize(
    ("prompts", "seeds", "message"),
    [
        ([[5], []], None, "prompt 1 has 0 tokens"),
        ([list(range(3, 120)) * 4], None, "prompt 0 has 468 tokens; expected 1 to 383"),
        ([[5, 128]], None, "expected 0 to 127"),
        ([[-1]], None, "expected 0 to 127"),
        ([[5], [6]], [1, 2, 3], "3 seeds for 2 prompts with n=1; expected 2"),
    ],
)
def test_bad_requests_are_refused_before_they_reach_an_engine(
    group: RolloutGroup, prompts: list[list[int]], seeds: list[int] | None, message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        group.generate(prompts, SamplingConfig(max_new_tokens=2), seeds=seeds)
    assert group.generate([[5, 6]], SamplingConfig(max_new_tokens=2))


def test_sleeping_is_refused_without_its_mode(group: RolloutGroup) -> None:
    for call in (group.sleep, group.wake_up):
        with pytest.raises(UnsupportedError, match="engine 0 was started with sleep_mode=False"):
            call()
    assert group.generate([[5, 6]], SamplingConfig(max_new_tokens=2))


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """The process runs a fifth of the time."""
    ended = threading.Event()

    def hold_back() -> None:
        while not ended.wait(0.05):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=hold_back)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.shows("rollout: prompts go to engines as they become free: a slow one gets fewer, with the same samples")
def test_a_slow_engine_gets_fewer_prompts_and_samples_are_those_of_one_engine(
    group: RolloutGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, prompts = SamplingConfig(n=2, max_new_tokens=40), PROMPTS * 4
    seeds = sample_seeds(7, 3, len(prompts), 2)
    assert {info.room for info in group.infos.values()} == {MAX_NUM_SEQS}
    # As if engines took four at a time.
    for engine, info in group.infos.items():
        monkeypatch.setitem(group.engine_set._infos, engine, replace(info, room=4))
    # One after the other all go to the first, which is free.
    alone = [
        sample
        for place, prompt in enumerate(prompts)
        for sample in group.generate([prompt], sampling, seeds=seeds[2 * place : 2 * place + 2])
    ]
    assert {sample.engine for sample in alone} == {0}
    with slowed(group.infos[1].pid):
        samples = group.generate(prompts, sampling, seeds=seeds)
    assert [sample.response_ids for sample in samples] == [sample.response_ids for sample in alone]
    for sample, same in zip(samples, alone, strict=True):
        assert sample.log_probs == pytest.approx(same.log_probs, abs=TOLERANCE)
    engines = [sample.engine for sample in samples]
    assert 0 < engines.count(1) <= engines.count(0) / 2
