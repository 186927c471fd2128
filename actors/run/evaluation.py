"""Engines without training: an evaluation of held-out sets, and one episode shown."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_serializer, model_validator

from actors.checks.machine import require_engines
from actors.checks.model import require_readable_weights, require_whole_model
from actors.cluster.placement import share_cluster
from actors.cluster.session import ray_session
from actors.collect.episodes import group_tasks, turn_sampling
from actors.collect.held_out import HeldOutResult, answer, load_held_out, warn_of_unknown
from actors.collect.inputs import load_episode_inputs, load_scorer, loaders
from actors.collect.transcripts import transcript
from actors.folder.lock import require_writable, usable_run_dir
from actors.options.config import ChosenDtype, resolve_dtype, with_local_model
from actors.options.eval_sets import EvalDatasets, EvalSet, sets_by_name
from actors.options.sampled_config import REWARDS, EpisodeConfig, fitted_lengths
from actors.rollout.config import MASKS, RolloutConfig, SamplingConfig, more_than, positions_of
from actors.rollout.group.group import RolloutGroup
from actors.rollout.placement import with_share
from actors.rollout.tokens import RolloutTokens
from actors.run.session import ray_is, start_engines
from actors.watch.console import Phases, say, warn
from rl_backend.checkpoint.durable_commit import replace_text
from rl_backend.contracts import BaseConfig, ConfigError
from rl_backend.data.examples import DataConfig
from rl_backend.data.hub import local_model
from rl_backend.data.prompts import load_tokenizer
from rl_backend.data.rewards import RewardConfig
from rl_backend.environment.groups import PlayOptions, play_groups
from rl_backend.environment.playing import run_episodes
from rl_backend.lab.text import count, json_text
from rl_backend.options.option_set import Follows, OptionSet, filled, gives, read_options, write_options

ANSWERS, RESULTS = "held_out.jsonl", "evaluation.json"
_OUT = "EvalConfig.out"


class EvalConfig(BaseConfig):
    """An evaluation alone: engines answer held-out sets with the weights of a Hugging Face directory."""

    option_set: ClassVar[OptionSet] = REWARDS | OptionSet(
        short={
            "model": "rollout.model_path",
            "engines": "rollout.num_engines",
            "seed": "rollout.seed",
            "samples_per_prompt": "sampling.n",
            "max_response_tokens": "sampling.max_new_tokens",
            **{name: f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "stop_strings")},
            **{name: f"data.{name}" for name in DataConfig.model_fields},
        },
        preset={"sampling.max_new_tokens": 512},
        follows={
            "rollout.dtype": Follows(lambda config: resolve_dtype(config.dtype)),
            "rollout.max_model_len": Follows(lambda config: config.longest_sequence, until=2),
            "rollout.load_format": Follows(lambda config: "auto", "an evaluation pushes no weights; leave it out"),
            "rollout.require_push": Follows(lambda config: False, "an evaluation pushes no weights; leave it out"),
            "rollout.load_tokenizer": Follows(
                lambda config: any(each.stop_strings for each in config.eval_sampling.values()),
                "follows from stop_strings; leave it out",
            ),
            "sampling.temperature": Follows(lambda config: 0.0 if config.sampling.n == 1 else 1.0, until=1.0),
            "sampling.log_probs": Follows(lambda config: False, "nobody asks for them; leave it out"),
        },
        fitted=lambda kind, given: fitted_lengths(kind, given, "rollout.model_path"),
        repeated=("sampling.stop_strings", "eval_dataset"),
    )
    _read = model_validator(mode="wrap")(read_options)
    _write = model_serializer(mode="wrap")(write_options)

    rollout: RolloutConfig = Field(description="vLLM's engines")
    sampling: SamplingConfig = Field(default=SamplingConfig(), description="how prompts are answered")
    eval_dataset: EvalDatasets = Field(
        description="rows to answer: a path, given once for each set, or a mapping {NAME: {path: ..., n: 8}} of sets with "
        "options of their own"
    )
    rewards: RewardConfig = Field(description="reward functions, see docs/rewards.md")
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="numbers of responses k for which pass@k is estimated; none: 1 and samples_per_prompt"
    )
    pass_threshold: float = Field(default=1.0, description="a response passes whose reward is at least this")
    data: DataConfig = Field(default=DataConfig(), description="how rows are read, see docs/data.md")
    max_prompt_tokens: int = Field(default=512, ge=1, description="longest prompt")
    dtype: ChosenDtype = Field(default="auto", description="of weights and activations; auto: bfloat16 with GPUs")
    out: str | None = Field(default=None, description=f"new folder for {RESULTS} and {ANSWERS}; none: nothing is written")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.eval_dataset is None:
            raise ConfigError.of("EvalConfig.eval_dataset", None, "there is nothing to answer; give a path")
        if gives(self, "rollout.max_model_len") and self.longest_sequence > self.rollout.max_model_len:
            raise ConfigError.of(
                "EvalConfig.rollout.max_model_len",
                self.rollout.max_model_len,
                f"must hold max_prompt_tokens and the longest response, {self.longest_sequence}; leave it out",
            )
        if self.rollout.returns_masks:
            raise ConfigError.of(
                f"EvalConfig.rollout.engine_args[{MASKS!r}]",
                self.rollout.engine_args[MASKS],
                "an evaluation trains on no samples, so nobody reads masks; leave it out",
            )
        return self

    @property
    def model(self) -> str:
        return self.rollout.model_path

    @property
    def eval_sets(self) -> dict[str, EvalSet]:
        """By name, with ``pass_at`` and ``pass_threshold`` of the evaluation where a set has none."""
        return {
            name: each.replace(
                n=each.n or self.sampling.n,
                pass_at=(self.pass_at or None) if each.pass_at is None else each.pass_at,
                pass_threshold=self.pass_threshold if each.pass_threshold is None else each.pass_threshold,
            )
            for name, each in sets_by_name(self.eval_dataset).items()
        }

    @property
    def eval_sampling(self) -> dict[str, SamplingConfig]:
        one, given = self.sampling, gives(self, "sampling.temperature")
        several = one if one.temperature or given else one.replace(temperature=1.0)
        sets = self.eval_sets.items()
        # One response of a set that has a temperature is cut as the evaluation says.
        return {
            name: each.sampling(several if each.n != 1 else one, greedy=not (given or each.temperature))
            for name, each in sets
        }

    @property
    def longest_sequence(self) -> int:
        # Asked for before it is checked that there is a set.
        return self.max_prompt_tokens + max((each.max_new_tokens for each in self.eval_sampling.values()), default=1)


def evaluate(config: EvalConfig, rollout: RolloutGroup | None = None) -> dict[str, HeldOutResult]:
    """Answers and scores held-out sets with the weights of a model directory, on open engines or those that ``config``
    wants.

    Returns:
        Results by the names of the sets; with ``config.out`` they are also in ``evaluation.json`` there, and every answer in
        ``held_out.jsonl``.

    Raises:
        ConfigError, CheckpointError, BatchError, UnsupportedError: a file, folder or machine that is missing something or
            cannot be used, before anything is started.
    """
    if config.out is not None:
        with usable_run_dir(config.out, _OUT):
            # The answers of a run have the same name.
            if found := [name for name in (RESULTS, ANSWERS) if (Path(config.out) / name).exists()]:
                raise ConfigError.of(_OUT, config.out, f"has {found[0]} already; choose a new folder")
        require_writable(config.out, _OUT)
    model = local_model(config.model, field="EvalConfig.model")
    config = config.replace(rollout=config.rollout.replace(model_path=model)) if model != config.model else config
    _check_model(config)
    if rollout is None:
        require_readable_weights("EvalConfig.model", config.model)
        require_engines(config.rollout)
    tokenizer, reward = load_tokenizer(config.model), load_scorer(config.rewards)
    load, new_ends = loaders(config.model, tokenizer, reward, config.data, config.max_prompt_tokens)
    phases, engines = Phases(), config.rollout.num_engines
    with phases.phase("data", f"reading {count(len(config.eval_sets), 'held-out set')}"):
        sets = load_held_out(config.eval_sets, config.eval_sampling, load, new_ends)
    for note in filter(None, (each.note for each in sets)):
        say(note)
    with ExitStack() as stack:
        stack.callback(reward.close)
        if rollout is None:
            with phases.phase("ray", ray_is()):
                stack.enter_context(ray_session(0, engines))
            wanted = with_share(filled(config, "rollout"), share_cluster(0, engines))
            rollout = stack.enter_context(start_engines(wanted, phases, config.out))
        with phases.phase("held-out", f"answering {count(sum(len(each.prompts) for each in sets), 'prompt')}"):
            results = answer(rollout, sets, tokenizer, reward, seed=config.rollout.seed)
    for result in results:
        warn_of_unknown(result, tokenizer)
    if config.out is not None:
        _write(Path(config.out), config, results, tokenizer)
    return {result.held_out.name: result for result in results}


def _check_model(config: EvalConfig) -> None:
    model = config.model
    require_whole_model("EvalConfig.model", model)
    positions = positions_of(model)
    if positions is not None and config.longest_sequence > positions:
        raise ConfigError.of(
            "EvalConfig.max_prompt_tokens",
            config.max_prompt_tokens,
            f"with max_response_tokens: {more_than(model, positions)}",
        )


def _write(folder: Path, config: EvalConfig, results: Sequence[HeldOutResult], tokenizer: Any) -> None:
    with usable_run_dir(folder, _OUT):
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json_text(line, ensure_ascii=False) for result in results for line in result.lines(tokenizer)]
        replace_text(folder / ANSWERS, "".join(f"{line}\n" for line in lines))
        metrics = {name: value for result in results for name, value in result.metrics.items()}
        notes = [note for result in results if (note := result.held_out.note)]
        facts = {"config": config.model_dump(mode="json"), "metrics": metrics, "notes": notes}
        replace_text(folder / RESULTS, json_text(facts, indent=2) + "\n")


def show_episode(config: EpisodeConfig, row: int = 0, rollout: RolloutGroup | None = None) -> str:
    """Plays the environment of a row of the data set, counted from 0, and describes the episode for people.

    Raises:
        ConfigError, BatchError, UnsupportedError: as a run with these options, before anything is started.
        EpisodeFailedError: the score of the episode failed.
    """
    config = with_local_model(config)
    phases = Phases()
    with phases.phase("data", f"reading {config.dataset}, and {config.task}"):
        inputs = load_episode_inputs(config, trains=False)
    if not 0 <= row < len(inputs.rows):
        raise ConfigError.of("row", row, f"{config.dataset} has {len(inputs.rows)} rows, counted from 0")
    with ExitStack() as stack:
        if rollout is None:
            require_engines(config.rollout)
            with phases.phase("ray", ray_is()):
                stack.enter_context(ray_session(0, 1))
            wanted = filled(config, "rollout").replace(num_engines=1, require_push=False)
            rollout = stack.enter_context(start_engines(with_share(wanted, share_cluster(0, 1)), phases, None))
        source = RolloutTokens(rollout, turn_sampling(config.sampling, inputs.ends))
        tasks = group_tasks([inputs.rows[row]], 0, 1, config.seed)
        options = PlayOptions(filled(config, "limits"), "zero", score=inputs.score, on_blocked=warn)
        with phases.phase("episode", f"row {row} of {config.dataset}"):
            (group,) = run_episodes(play_groups(inputs.player, tasks, source, options))
    return transcript(group.episodes[0], inputs.tokenizer)
