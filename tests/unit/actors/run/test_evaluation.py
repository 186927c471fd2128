"""An evaluation alone, and one episode alone, with engines that are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.cluster.placement import ClusterShare
from actors.collect import inputs as inputs_module
from actors.collect.inputs import EpisodeInputs
from actors.options.sampled_config import EpisodeConfig
from actors.run import evaluation as evaluation_module
from actors.run.evaluation import EvalConfig, evaluate, show_episode
from rl_backend.contracts import ConfigError
from rl_backend.data.examples import Examples
from rl_backend.data.rewards import LoadedReward, RewardScorer
from rl_backend.environment import Result, Sampler
from tests.support.sampled_runs import Engines, Words, prompts_of, score
from tests.support.token_sources import RandomSource

OPENED: list[Any] = []


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes in OPENED what is opened and closed."""
    OPENED.clear()

    @contextmanager
    def ray_session(ranks: int, engines: int = 0) -> Iterator[None]:
        OPENED.append(("ray", ranks, engines))
        yield
        OPENED.append("ray closed")

    class Rollout(Engines):
        def __init__(self, config: Any) -> None:
            OPENED.append(("engines", config))
            super().__init__(SimpleNamespace(rollout_config=lambda share: config))  # type: ignore[arg-type]
            self.pushes = 4

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            OPENED.append("engines closed")

    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr("actors.run.session.RolloutGroup", Rollout)
    for name, made in (
        ("ray_session", ray_session),
        ("share_cluster", lambda ranks, engines: ClusterShare(1, 3, 0) if not ranks else None),
        ("require_engines", lambda engines: OPENED.append(("require", engines))),
    ):
        monkeypatch.setattr(evaluation_module, name, made)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of reward functions; also how prompts were asked for."""
    found: list[Any] = []

    class Scorer(RewardScorer):
        def close(self) -> None:
            found.append("closed")
            super().close()

    class Read(Examples[Any]):
        def __init__(self, prompts: Any) -> None:
            self.prompts, self.note = prompts, "a note"

        def __len__(self) -> int:
            return len(self.prompts)

        def __getitem__(self, index: Any) -> Any:
            return self.prompts[index]

        def __iter__(self) -> Any:
            return iter(self.prompts)

    def load(path: str, *, held_out: bool, see: Any, **options: Any) -> Any:
        found.append((path, held_out, options["max_prompt_tokens"], options["require_answer"]))
        return Read(prompts_of(1 if path == "a.jsonl" else 61, 2))

    tokenizer: Any = Words()
    tokenizer.eos_token_id = 7
    for name, made in (
        ("local_model", lambda model, field: model),
        ("_check_model", lambda config: None),
        ("require_readable_weights", lambda option, model: OPENED.append((option, model))),
        ("load_tokenizer", lambda model: tokenizer),
        ("load_scorer", lambda config: Scorer([LoadedReward(score, "m:f")], on_failure="stop")),
    ):
        monkeypatch.setattr(evaluation_module, name, made)
    monkeypatch.setattr(inputs_module, "load_prompts", load)
    return found


def config_of(**changes: Any) -> EvalConfig:
    sets = {"a": "a.jsonl", "b": {"path": "b.jsonl", "n": 2, "pass_threshold": 4.25}}
    options: dict[str, Any] = {"model": "m", "reward": "r", "dtype": "float32", "eval_dataset": sets, "seed": 3}
    return EvalConfig(**{**options, "max_prompt_tokens": 9, **changes})


def test_sets_are_answered_by_engines_of_its_own_and_written(
    tmp_path: Path, closed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    config = config_of(out=str(out), engines=2)
    results = evaluate(config)
    assert list(results) == ["a", "b"] and [len(each.samples) for each in results.values()] == [2, 4]
    assert results["a"].reward == 4.0 and results["b"].metrics["eval/b/pass@1"] == 0.5
    assert closed == [("a.jsonl", True, 9, True), ("b.jsonl", True, 9, True), "closed"]
    assert OPENED[:3] == [("EvalConfig.model", "m"), ("require", config.rollout), ("ray", 0, 2)]
    (_, engines), *ends = OPENED[3:]
    assert ends == ["engines closed", "ray closed"]
    assert (engines.num_engines, engines.max_model_len, engines.dtype) == (2, 521, "float32")
    assert (engines.load_format, engines.require_push, engines.load_tokenizer) == ("auto", False, False)
    lines = [json.loads(line) for line in (out / "held_out.jsonl").read_text().splitlines()]
    assert [(line["set"], line["prompt"], line["response"]) for line in lines[1:4]] == [
        ("a", "2 2", "4 0 89"),
        ("b", "61 61", "4 0 89"),
        ("b", "61 61", "4 1 89"),
    ]
    facts = json.loads((out / "evaluation.json").read_text())
    assert facts["metrics"] == {**results["a"].metrics, **results["b"].metrics}
    assert EvalConfig(**facts["config"]) == config
    assert facts["notes"] == ["held-out set a: a note", "held-out set b: a note"]
    printed = capsys.readouterr().out
    for words in (*facts["notes"], "reading 2 held-out sets", "starting 2 vLLM engines", "answering 4 prompts"):
        assert words in printed
    with pytest.raises(ConfigError, match=r"^EvalConfig\.out='\S+': has evaluation\.json already; choose a new folder"):
        evaluate(config)
    (out / "evaluation.json").unlink()
    with pytest.raises(ConfigError, match=r"^EvalConfig\.out='\S+': has held_out\.jsonl already"):
        evaluate(config)


def test_open_engines_are_used_and_stay_open(tmp_path: Path, closed: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    engines: Any = Engines(SimpleNamespace(rollout_config=lambda share: None))  # type: ignore[arg-type]
    engines.unknown = {0}
    evaluate(config_of(temperature=0.5), engines)
    assert OPENED == [] and closed[-1] == "closed" and list(tmp_path.iterdir()) == []
    first, second = engines.asked
    assert (first[1].temperature, first[1].n, first[1].stop_token_ids) == (0.5, 1, (7,))
    assert second[1].n == 2 and len(second[2]) == 4
    assert "warning: held-out set b: 4 of the sampled tokens are ids that the tokenizer" in capsys.readouterr().out


def test_lengths_of_an_evaluation_just_fit_or_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 64}')
    (tmp_path / "tokenizer.json").write_text("{}")
    options = {"model": str(tmp_path), "reward": "r", "eval_dataset": "x", "dtype": "float32"}
    assert (EvalConfig(**options).longest_sequence, EvalConfig(**options, max_prompt_tokens=40).longest_sequence) == (64, 64)
    evaluation_module._check_model(EvalConfig(**options, max_prompt_tokens=40, max_response_tokens=24))
    with pytest.raises(
        ConfigError, match=r"^EvalConfig\.max_prompt_tokens=41: with max_response_tokens: \S+ has 64 positions"
    ):
        evaluation_module._check_model(EvalConfig(**options, max_prompt_tokens=41, max_response_tokens=24))
    with pytest.raises(ConfigError, match=r"engine_args\['return_sampling_mask'\]=True: an evaluation trains on no samples"):
        config_of(**{"rollout.engine_args": {"return_sampling_mask": True}, "top_k": 5, "temperature": 1.0})
    assert config_of(**{"rollout.max_model_len": 521}).rollout.max_model_len == 521
    with pytest.raises(ConfigError, match=r"^EvalConfig\.rollout\.max_model_len=520: must hold .*, 521; leave it out"):
        config_of(**{"rollout.max_model_len": 520})
    longer = config_of(eval_dataset={"a": {"path": "a", "max_new_tokens": 700}, "b": "b"})
    assert longer.longest_sequence == longer.rollout.max_model_len == 709
    with pytest.raises(ConfigError, match=r"^EvalConfig\.eval_dataset=None: there is nothing to answer; give a path"):
        config_of(eval_dataset="none")


async def player(row: Mapping[str, Any], sampler: Sampler) -> Result:
    await sampler.sample([row["task"]], max_tokens=9)
    sampler.reward(row["task"])
    return Result()


@pytest.mark.parametrize("is_open", [False, True])
def test_one_episode_of_a_row_is_shown(monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    rows = [{"task": 5}, {"task": 6}, {"task": 7}]
    inputs = EpisodeInputs(Words(), player, lambda episodes: [0.25] * len(episodes), rows, [], iter([]), (11,))
    sources: list[Any] = []

    def tokens(rollout: Any, sampling: Any) -> RandomSource:
        sources.append((rollout, sampling, RandomSource()))
        return sources[-1][2]  # type: ignore[no-any-return]

    monkeypatch.setattr(evaluation_module, "load_episode_inputs", lambda config, trains: inputs)
    monkeypatch.setattr(evaluation_module, "RolloutTokens", tokens)
    monkeypatch.setattr("actors.options.config.local_model", lambda model, field: f"/cache/{model}")
    options = {"model": "m", "dataset": "d", "player": "m:play", "run_dir": "x", "dtype": "float32", "engines": 3}
    config = EpisodeConfig(**options, max_response_tokens=4, temperature=0.5)
    engines: Any = object() if is_open else None
    shown = show_episode(config, 2, engines)
    assert shown.splitlines()[0].startswith("model, turn 1 (length, reward 7): ")
    assert len(shown.splitlines()[0].partition(": ")[2].split()) == 4
    assert shown.splitlines()[1] == "ended: done; reward 7.25 in 1 turns"
    ((rollout, sampling, source),) = sources
    assert (source.prompts, sampling.temperature, sampling.stop_token_ids) == ([[7]], 0.5, (11,))
    if is_open:
        assert rollout is engines and OPENED == []
    else:
        (_, required), session, (_, wanted), *ends = OPENED
        assert required.model_path == wanted.model_path == "/cache/m"
        assert session == ("ray", 0, 1) and ends == ["engines closed", "ray closed"]
        assert (wanted.num_engines, wanted.require_push, wanted.dtype) == (1, False, "float32")
    for row in (-1, 3):
        OPENED.clear()
        with pytest.raises(ConfigError, match=rf"^row={row}: d has 3 rows, counted from 0$"):
            show_episode(config, row, engines)
        assert OPENED == []
