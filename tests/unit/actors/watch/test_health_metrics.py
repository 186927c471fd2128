"""Vital signs of a run, and what it says in words when it learns nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from actors import Run, Session
from actors.cluster.session import RunStopped
from actors.collect.episodes import EpisodeSource
from actors.collect.held_out import HeldOutEpisodes, HeldOutResult, HeldOutSet, warn_of_unknown
from actors.collect.prompts import PromptSource
from actors.collect.sample_metrics import sample_metrics, unknown_tokens
from actors.folder.checkpoints import Progress
from actors.options.config import HealthLimits
from actors.rollout.messages import Sample, VersionSpan
from actors.run.run import StopRequest
from actors.run.sampling import Sampling
from actors.train.model import GroupModel
from actors.train.outcome import peak_memory
from actors.watch.health_metrics import CAUSES, STEPS, HealthWarnings
from examples.sft import SFTConfig
from rl_backend.contracts import RLBackendError
from rl_backend.environment import Turn
from tests.support import memory
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.episodes import episode
from tests.support.page import read_page
from tests.support.stopped_run import config_of, train

HEALTHY = {
    "reward": 0.4,
    "reward_std": 0.5,
    "equal_groups": 0.5,
    "zero_advantages": 0.5,
    "step_ok": 1.0,
    "grad_norm": 0.3,
    "entropy": 1.2,
    "responses_cut_off": 0.1,
}


def told(steps: Iterable[Mapping[str, float]], signs: HealthWarnings | None = None, first: int = 1) -> list[tuple[int, str]]:
    """(step, warning) of a run."""
    signs = signs or HealthWarnings()
    return [(step, warning) for step, metrics in enumerate(steps, first) for warning in signs.warnings(step, metrics)]


@pytest.mark.shows("reading a run: a run that learns nothing says so in one sentence, with its cause and what to try")
@pytest.mark.parametrize(
    ("cause", "nothing_learned", "near_it", "words"),
    [
        ("skipped_updates", {"step_ok": 0.0, "grad_norm": math.nan}, {"step_ok": 0.25, "grad_norm": math.nan}, "lower lr"),
        (
            "one_reward",
            {"reward_std": 0.0, "equal_groups": 1.0, "zero_advantages": 1.0, "grad_norm": 0.0},
            {"reward_std": 0.0, "equal_groups": 1.0, "zero_advantages": 0.99},
            "all responses had the same reward (0.4 in this one)",
        ),
        (
            "equal_groups",
            {"equal_groups": 1.0, "zero_advantages": 1.0, "grad_norm": 0.0},
            {"equal_groups": 0.99, "zero_advantages": 0.99},
            "all responses to each prompt had equal rewards (mean 0.4 in this one)",
        ),
        ("zero_gradient", {"grad_norm": 0.0}, {"grad_norm": 1e-6}, "loss_mask"),
        ("collapsed_entropy", {"entropy": 0.0099}, {"entropy": 0.0101}, "below 0.01 nats per token (0.0099 in this one)"),
        ("all_cut_off", {"responses_cut_off": 0.95}, {"responses_cut_off": 0.94}, "max_response_tokens (95% in this one)"),
    ],
)
def test_a_cause_is_told_once_when_it_has_lasted_and_numbers_near_it_are_not(
    cause: str, nothing_learned: dict[str, float], near_it: dict[str, float], words: str
) -> None:
    bad, good = HEALTHY | nothing_learned, HEALTHY | near_it
    ((step, warning),) = told([HEALTHY] * 10 + [bad] * 50)
    assert step == 10 + STEPS
    assert warning.startswith(f"step {step}: ") and f"last {STEPS} steps" in warning and words in warning
    assert warning.count(". ") == 0 and "; " in warning, "one sentence: what was seen; what to try"
    assert told([good] * 50) == []
    assert told(([bad] * (STEPS - 1) + [HEALTHY]) * 5) == [], f"fewer than {STEPS} steps in a row"
    signs = HealthWarnings()
    assert told([bad] * STEPS, signs) and signs.state["told"] == [cause]


def test_a_healthy_run_and_a_loop_that_logs_none_of_these_metrics_are_not_warned() -> None:
    assert told([HEALTHY] * 50) == told([{"mine": 1.0}] * 50) == []
    assert {name for name, cause in CAUSES.items() if cause.shows({}) is not None} == set()


def test_equal_rewards_of_groups_are_no_cause_where_advantages_compare_more_than_a_group() -> None:
    assert told([HEALTHY | {"equal_groups": 1.0, "zero_advantages": 0.0}] * 50) == []


def test_a_metric_that_a_sentence_names_may_be_missing() -> None:
    assert "(nan in this one)" in told([{"reward_std": 0.0}] * STEPS)[0][1]


def test_several_causes_are_several_sentences_and_a_consequence_is_none() -> None:
    steps = [HEALTHY | {"equal_groups": 1.0, "zero_advantages": 1.0, "grad_norm": 0.0, "entropy": 0.0}] * 20
    steps += [HEALTHY | {"grad_norm": 0.0}] * 20
    warnings = told(steps)
    assert [step for step, _ in warnings] == [STEPS, STEPS, 21]
    assert ["equal rewards" in text for _, text in warnings] == [True, False, False]
    assert "the gradient of the last 21 steps was 0" in warnings[2][1]


@pytest.mark.parametrize(
    ("limits", "beyond", "within", "words"),
    [
        (
            {"log_prob_gap": 0.2},
            {"log_prob_gap": 0.21},
            {"log_prob_gap": 0.2},
            "0.21 nats per token (health.log_prob_gap=0.2)",
        ),
        ({"kl": 3.0}, {"kl": math.nan}, {"kl": 3.0}, "(health.kl=3)"),
        ({"kl": 3.0}, {"kl": 3.5}, {"kl": -1.0}, "the policy is 3.5 nats per token away"),
        ({}, {"rewards_failed": 0.6}, {"rewards_failed": 0.5}, "60% of the step's rewards failed"),
        ({}, {"episodes_failed": 0.6}, {"episodes_failed": 0.5}, "60% of the step's episodes failed"),
        ({"free_disk_gib": 2.0}, {"free_disk_gib": 1.5}, {"free_disk_gib": 2.0}, "1.50 GiB are free"),
        ({"skipped_updates": 1}, {"step_ok": 0.0}, {"step_ok": 0.5}, "every update of the last 1 steps was skipped"),
    ],
)
@pytest.mark.shows("reading a run: limits of log-prob gap, KL, skipped updates, failed rewards and free disk warn, or stop")
def test_a_step_beyond_a_limit_is_told_once_or_stops_the_run(
    limits: dict[str, float], beyond: dict[str, float], within: dict[str, float], words: str
) -> None:
    steps = [HEALTHY | within, HEALTHY | within, HEALTHY | beyond, HEALTHY | beyond]
    warns = HealthWarnings(None, HealthLimits(**limits))  # type: ignore[arg-type]
    ((step, warning),) = told(steps, warns)
    assert step == 3 and words in warning and not warns.stop
    # Also a run that was warned, and goes on with the option.
    stops = HealthWarnings(warns.state, HealthLimits(on_limit="stop", **limits))  # type: ignore[arg-type]
    assert told(steps[:2], stops) == [] and not stops.stop
    assert told(steps[2:3], stops, 3) == [(3, warning)] and stops.stop == warning
    nothing = HealthLimits(log_prob_gap=None, skipped_updates=None, failed_rewards=None, free_disk_gib=None)
    assert told([HEALTHY | beyond] * 20, HealthWarnings(None, nothing)) == []


def test_a_limit_that_is_set_and_watches_nothing_is_told_once() -> None:
    signs = HealthWarnings(None, HealthLimits(kl=3.0, failed_rewards=0.4, skipped_updates=2, log_prob_gap=None))
    (first, kl), (second, failed) = told([HEALTHY] * 3, signs)
    assert first == second == 1 and "health.kl is set, and this step has no metric kl; kl_coef above 0 makes one" in kl
    assert "no metric rewards_failed or episodes_failed; " in failed
    assert told([HEALTHY], HealthWarnings(signs.state, HealthLimits(kl=3.0))) == []
    assert told([HEALTHY | {"kl": 1.0}], HealthWarnings(None, HealthLimits(kl=3.0))) == []


def test_a_run_ends_after_the_step_that_is_beyond_a_limit(tmp_path: Path, tied_model: Path) -> None:
    health = {"health.free_disk_gib": 1e9, "health.on_limit": "stop"}
    with pytest.raises(RLBackendError, match=r"^step 1: .* GiB are free .* The run stops here: health.on_limit=stop"):
        train(config_of(tmp_path, tied_model, save_every=1, **health))
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["state"] == "failed" and "health.on_limit=stop" in facts["error"]
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()
    with pytest.raises(RLBackendError, match=r"^step 2: "):
        train(config_of(tmp_path, tied_model, save_every=1, **health))
    assert train(config_of(tmp_path, tied_model, save_every=1)) > 0


def test_what_lasts_and_what_was_told_survive_a_resume() -> None:
    bad = HEALTHY | {"entropy": 0.0}
    signs = HealthWarnings()
    assert told([bad] * (STEPS - 1), signs) == []
    resumed = HealthWarnings(json.loads(json.dumps(signs.state)))
    assert [step for step, _ in told([bad] * 3, resumed, first=STEPS)] == [STEPS]
    assert told([bad] * 20, HealthWarnings(json.loads(json.dumps(resumed.state)))) == []


def test_a_resumed_run_goes_on_counting_what_lasts(tmp_path: Path, tied_model: Path) -> None:
    config, stop = config_of(tmp_path, tied_model, save_every=1), StopRequest()

    def asks(step: int) -> None:
        if step == STEPS - 2:
            stop.ask("Ctrl-C")

    with pytest.raises(RunStopped):
        train(config, asks, stop, grad_norm=0.0)
    train(config, grad_norm=0.0)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "warnings" in line] == [STEPS]


def sample(length: int, finish_reason: Any) -> Sample:
    return Sample(0, 0, [7] * 3, [1] * length, [0.0] * length, finish_reason, (VersionSpan(0, length),), 0)


def test_metrics_of_samples_count_lengths_ends_and_groups_of_equal_rewards() -> None:
    groups = [
        SimpleNamespace(rewards=[1.0, 0.0], samples=[sample(2, "stop"), sample(8, "length")]),
        SimpleNamespace(rewards=[1.0, 1.0], samples=[sample(3, "stop"), sample(3, "stop")]),
    ]
    assert sample_metrics(groups) == {
        "reward": 0.75,
        "reward_std": pytest.approx(math.sqrt(3) / 4),
        "prompt_tokens": 3.0,
        "response_tokens": 4.0,
        "response_tokens_max": 8,
        "responses_cut_off": 0.25,
        "equal_groups": 0.5,
    }
    alone = [SimpleNamespace(rewards=[0.5], samples=[sample(2, "stop")])] * 2
    assert "equal_groups" not in sample_metrics(alone), "a response alone has nobody to be compared with"


def test_the_peak_memory_of_a_rank_is_the_kernel_s() -> None:
    assert peak_memory() == pytest.approx(memory.peak_memory(), rel=0.02)


def test_a_run_prints_and_logs_warnings_and_measures_speed_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr("actors.run.run.check_start", lambda config, session_is_open: [])  # there is no model to check
    config = SFTConfig(
        model=str(tmp_path), dataset="d", dtype="float32", run_dir=str(tmp_path / "run"), steps=8, metrics_to=None
    )
    group: Any = SimpleNamespace(
        config=config.runtime_config(),
        num_ranks=1,
        wanted_ranks=1,
        ranks=(),
        peak_memory=3 * 2**29,
        run_on_ranks=lambda *_: [],
        say_recoveries=lambda say: None,
        recoveries=[],
        reshapes=[],
        has_room=False,
    )
    model = GroupModel(group, None)  # type: ignore[arg-type]
    with Run(config, Session([group]), label="mine ") as run:
        run.begin("Mine", {"mine": model})
        for _ in run.steps():
            model.tokens.add([[0] * 30, [0] * 20])  # type: ignore[list-item]
            run.lap("train")
            run.lap("evaluate")
            run.end_step({"grad_norm": 0.0})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "warnings" in line] == [STEPS]
    (warning,) = lines[STEPS - 1]["warnings"]
    assert "the gradient of the last 5 steps was 0" in warning
    assert capsys.readouterr().out.count(f"mine warning: {warning}\n") == 1
    for line in lines:
        assert line["tokens_per_second/train"] == pytest.approx(50 / line["seconds/train"])
        assert line["peak_memory_gib"] == 1.5 and "tokens_per_second/evaluate" not in line
    page = read_page(tmp_path / "run" / "report.html")
    assert [line.text for line in page.one("section", id="warnings").all("li")] == [warning]


TOKENIZER = chat_tokenizer(CHATML)
PADDED = len(TOKENIZER), len(TOKENIZER) + 5


def test_ids_that_the_tokenizer_has_no_token_for_are_counted() -> None:
    known = sorted(TOKENIZER.get_vocab().values())
    assert unknown_tokens([known, known[::-1]], TOKENIZER) == unknown_tokens([], TOKENIZER) == 0
    assert unknown_tokens([[known[0], PADDED[0]], [PADDED[1], PADDED[1], known[-1]]], TOKENIZER) == 3
    assert all(TOKENIZER.decode([token]) == "" for token in PADDED)


def test_unknown_tokens_are_told_of_at_once_and_once() -> None:
    ((step, warning),) = told([HEALTHY, HEALTHY | {"unknown_tokens": 3.0}, HEALTHY | {"unknown_tokens": 2.0}])
    assert step == 2 and "step 2: 3 of the sampled tokens are ids that the tokenizer has no token for" in warning


def batch_of(kind: str, token_ids: tuple[int, ...]) -> Any:
    turns = [Turn(None, ids, [0.0] * len(ids), "stop") for ids in ((4, 5), token_ids)]
    samples = [Sample(0, index, [1], list(ids), [], "stop", (), 0) for index, ids in enumerate(((4, 5), token_ids))]
    if kind == "episodes":
        return SimpleNamespace(episodes=[replace(episode(), turns=turns)], metrics={"reward": 1.0}, failures=[])
    return SimpleNamespace(samples=samples, metrics={"reward": 1.0}, failures=[])


@pytest.mark.shows(
    "reading a run: sampled ids that the tokenizer has no token for are counted and warned of, with any samples"
)
@pytest.mark.parametrize(("source", "kind"), [(PromptSource, "samples"), (EpisodeSource, "episodes")])
def test_a_steps_unknown_tokens_are_a_metric(source: Any, kind: str) -> None:
    for token_ids, metrics in (((6, *PADDED), {"reward": 1.0, "unknown_tokens": 2}), ((6,), {"reward": 1.0})):
        inputs, config, none = (
            SimpleNamespace(tokenizer=TOKENIZER, held_out=[]),
            SimpleNamespace(batches_ahead=0),
            cast(Any, None),
        )
        samples: Any = SimpleNamespace(sampled_ids=partial(source.sampled_ids, None))
        sampling: Any = Sampling(cast(Any, config), inputs, samples, none, none, Progress(), began=0.0)
        sampling.collector = SimpleNamespace(collect=lambda *_, ids=token_ids: batch_of(kind, ids))
        assert sampling.collect(1, none).metrics == metrics


@pytest.mark.parametrize("kind", ["samples", "episodes"])
def test_unknown_tokens_of_a_held_out_set_are_warned_of(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = HeldOutSet("hard", [], None, (1,))  # type: ignore[arg-type]

    def warned(*token_ids: int) -> str:
        batch = batch_of(kind, token_ids)
        results = {
            "samples": lambda: HeldOutResult(held_out, batch.samples, []),
            "episodes": lambda: HeldOutEpisodes(held_out, (), [], batch.episodes),
        }
        warn_of_unknown(results[kind](), TOKENIZER)
        return capsys.readouterr().out

    assert warned(6) == ""
    assert "warning: held-out set hard: 1 of the sampled tokens are ids that the tokenizer has no token for" in warned(
        PADDED[0]
    )


def test_a_limit_watches_whichever_of_its_metrics_a_step_has() -> None:
    for metric in ("rewards_failed", "episodes_failed"):
        assert told([HEALTHY | {metric: 0.1}], HealthWarnings(None, HealthLimits(failed_rewards=0.4))) == []
    signs = HealthWarnings(None, HealthLimits(failed_rewards=0.1))
    warnings = told([HEALTHY | {"rewards_failed": 0.2, "episodes_failed": 0.3}], signs)
    assert ["20% of the step's rewards" in text for _, text in warnings] == [True, False] and len(warnings) == 2
    assert "30% of the step's episodes" in warnings[1][1]


def test_a_cause_that_ends_for_a_step_begins_again_and_metrics_that_are_missing_for_a_step_end_nothing() -> None:
    bad, silent = HEALTHY | {"entropy": 0.0}, {name: value for name, value in HEALTHY.items() if name != "entropy"}
    ((step, _),) = told([bad] * 2 + [silent] * 3 + [bad] * 3)
    assert step == 2 + 3 + (STEPS - 2)


def test_rewards_that_differ_are_no_cause_where_a_loop_logs_nothing_of_advantages() -> None:
    loop = {name: value for name, value in HEALTHY.items() if name != "zero_advantages"}
    assert told([loop] * 50) == told([loop | {"equal_groups": 0.9, "zero_advantages": 1.0}] * 50) == []
    ((_, warning),) = told([loop | {"equal_groups": 1.0}] * 50)
    assert "all responses to each prompt had equal rewards" in warning
