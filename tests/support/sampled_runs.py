"""Runs that sample, without Ray: a trainer that is one number, and engines whose answers say which push they had."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors import Sample, SamplingConfig, Session
from actors.cluster.placement import ClusterShare
from actors.collect.held_out import HeldOutSet
from actors.collect.inputs import EpisodeInputs, Inputs
from actors.options.sampled_config import RLConfig, SampledConfig
from actors.rollout.messages import VersionSpan
from actors.sync.report import PushReport
from rl_backend.data.examples import PromptExample
from rl_backend.data.prompts import Prompt
from rl_backend.data.rewards import LoadedReward, RewardScorer
from tests.support.stopped_run import Weight
from tests.support.submitted import Submitted

HELD_OUT_SECONDS, PUSH_SECONDS = 700.0, 100.0
"""That the clock of a run goes on by at each call."""


class Words:
    """A tokenizer with a token for each id below 90."""

    chat_template = None
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(90)}

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, token_ids))


class Trainer(Weight):
    """Also with LoRA tenants."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.calls: list[tuple[str, Any]] = []

    def build_model(self, **options: Any) -> Any:
        self.calls.append(("build", options))
        return SimpleNamespace(name=options["name"])

    def create_lora_adapter(self, base: Any, lora: Any, optimizer: Any, **options: Any) -> Any:
        self.calls.append(("create", (base.name, lora, optimizer, options)))
        return SimpleNamespace(name=options["name"])

    def remove_lora_adapter(self, tenant: Any) -> None:
        self.calls.append(("remove", tenant.name))

    def save_checkpoint(self, handle: Any, path: Path, *, asynchronous: bool = False, hf: bool = False) -> None:
        self.calls.append(("save", (path.name, hf)))
        super().save_checkpoint(handle, path, asynchronous=asynchronous, hf=hf)

    def export_lora_adapter(self, handle: Any) -> dict[str, Any]:
        return {f"factor of {handle.name}": 1}

    def trace_actors(self) -> dict[str, Any]:
        return {}


class Engines:
    """Answer with the number of the push, the number of the response, and 89 for each prompt."""

    def __init__(self, config: SampledConfig) -> None:
        self.config = config.rollout_config(ClusterShare(1, 1, 0))
        self.version, self.forgotten, self.pushes = 0, 0, 0
        self.removed: list[str] = []
        self.asked: list[tuple[list[list[int]], SamplingConfig, Any, str | None]] = []
        self.syncs: list[tuple[str, dict[str, Any]]] = []
        self.seconds_ahead = 0.0
        self.unknown: set[int] = set()
        self.healing = SimpleNamespace(listeners=[])

    def monotonic(self) -> float:
        return time.monotonic() + self.seconds_ahead

    def submit(
        self, prompts: Sequence[list[int]], sampling: SamplingConfig, *, seeds: Any, adapter: str | None
    ) -> Submitted:
        self.asked.append(([*prompts], sampling, seeds, adapter))
        self.seconds_ahead += HELD_OUT_SECONDS if sampling.log_probs is False else 0.0
        last = 95 if self.pushes in self.unknown else 89
        samples = [
            Sample(
                index, number, prompt, [self.pushes, number, last], [-1.0] * 3, "stop", (VersionSpan(self.version, 3),), 0
            )
            for index, prompt in enumerate(prompts)
            for number in range(sampling.n)
        ]
        return Submitted(len(prompts), lambda: samples)

    def forget_weights(self) -> None:
        self.forgotten += 1

    def remove_adapter(self, name: str) -> None:
        self.removed.append(name)

    def trace_actors(self) -> dict[str, Any]:
        return {}


class Sync:
    """Stands for a weight sync; the first version is 10, and each push adds 10."""

    def __init__(self, group: Any, rollout: Engines, handle: Any, **options: Any) -> None:
        rollout.syncs.append((handle.name, options))
        self._rollout = rollout

    def push(self) -> PushReport:
        engines = self._rollout
        engines.version += 10
        engines.pushes += 1
        engines.seconds_ahead += PUSH_SECONDS
        return PushReport(engines.version, 0, {}, "gloo", (0,), ())

    def __enter__(self) -> Sync:
        return self

    def __exit__(self, *_: object) -> None:
        self._rollout.syncs.append(("closed", {}))


def score(solution_str: str, ground_truth: Any, **_: Any) -> dict[str, float]:
    """The number of the push, and a half of the response's."""
    push, number, _end = map(int, solution_str.split())
    if ground_truth == "fails" and number == 1:
        raise ValueError(f"no score of push {push}")
    return {"score": push + number / 2, "push": float(push)}


def prompts_of(first: int, number: int, truth: str = "1") -> list[Prompt]:
    return [Prompt(PromptExample(f"p{each}", truth, "made"), [each, each]) for each in range(first, first + number)]


def held_out_sets(*names: str, n: int = 1) -> list[HeldOutSet]:
    sampling = SamplingConfig(n=n, temperature=1.0 if n > 1 else 0.0, log_probs=False)
    return [HeldOutSet(name, prompts_of(50 + 10 * index, 3), sampling, (1,)) for index, name in enumerate(names)]


def inputs_of(config: RLConfig, held_out: Sequence[HeldOutSet] = (), truth: str = "1") -> Inputs:
    """Batches of prompts [1, 1], [2, 2] and so on."""
    size = config.prompts_per_step
    prompts = prompts_of(1, 4 * size, truth)
    batches = iter([prompts[start : start + size] for start in range(0, len(prompts), size)] * 3)
    scorer = RewardScorer([LoadedReward(score, "m:f")], on_failure=config.rewards.on_failure)
    return Inputs(Words(), scorer, prompts, held_out, batches, config.sampling, ("a note",))


def config_of(tmp_path: Path, kind: Any = RLConfig, **changes: Any) -> Any:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    rewards = {"reward": "m:f"} if kind is RLConfig else {"player": "json:dumps"}
    lengths = {"max_prompt_tokens": 8} if kind is RLConfig else {"max_episode_tokens": 48}
    files = {"model": f"{tmp_path}/model", "dataset": f"{tmp_path}/train.jsonl", "run_dir": f"{tmp_path}/run"}
    sizes = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 8, "dtype": "float32", **lengths}
    return kind(**{**files, "steps": 3, **sizes, **rewards, "metrics_to": None, "resume": "auto", **changes})


def without_ray(
    monkeypatch: pytest.MonkeyPatch, config: SampledConfig, inputs: Callable[[], Inputs | EpisodeInputs]
) -> tuple[Session, Engines, Trainer]:
    """A session of stand-ins, for runs that read ``inputs``."""
    engines, trainer = Engines(config), Trainer(config)
    monkeypatch.setattr("actors.run.run.check_start", lambda config, session_is_open: [])

    def load(config: SampledConfig, taken: int) -> Inputs | EpisodeInputs:
        made = inputs()
        return replace(made, batches=islice(made.batches, taken, None))

    monkeypatch.setattr("actors.run.rl_run.load_inputs", load)
    monkeypatch.setattr("actors.run.rl_run.load_episode_inputs", load)
    for room in ("parts", "session"):
        monkeypatch.setattr(f"actors.run.{room}.WeightSync", Sync)
    monkeypatch.setattr("actors.run.sampling.time", SimpleNamespace(monotonic=engines.monotonic))
    return Session([trainer], engines), engines, trainer  # type: ignore[list-item, arg-type]
