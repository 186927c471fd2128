"""What an episode run reads, and how the turns of its players end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from actors.collect.episodes import EpisodeSource, turn_sampling
from actors.collect.held_out import HeldOutSet
from actors.collect.inputs import EpisodeInputs, load_episode_inputs, load_episode_player
from actors.options.sampled_config import EpisodeConfig
from actors.rollout.config import SamplingConfig
from actors.rollout.tokens import RolloutTokens
from rl_backend.contracts import BatchError, ConfigError
from rl_backend.environment import Generation, Limits
from rl_backend.environment.stepping import StepOptions, SteppedPlayer
from tests.support.chat_templates import CHATML, THINKING, chat_tokenizer
from tests.support.models import write_tiny
from tests.support.token_sources import RandomSource
from tests.unit.actors.rollout.test_tokens import Engines, ask

PLAYER = "async def play(row, sampler): ...\n"


@pytest.mark.shows(
    "episodes: a player's turn ends where the model's does, without the player's saying so, in held-out sets too"
)
@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (CHATML.replace("<|im_end|>", "<|im_start|>"), "<|im_start|>"), (None, "")]
)
def test_turns_of_players_end(tmp_path: Path, template: str | None, end: str) -> None:
    tokenizer = chat_tokenizer(template)
    model = write_tiny("qwen3", tmp_path / "model", vocab_size=512, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(model)
    (tmp_path / "rows.jsonl").write_text('{"task": 1}\n')
    (tmp_path / "mine.py").write_text(PLAYER)
    held_out = {"hard": {"path": f"{tmp_path}/rows.jsonl", "stop_token_ids": [41]}}
    options: dict[str, Any] = {"prompts_per_step": 1, "sampling": {"stop_token_ids": [42]}, "eval_dataset": held_out}
    config = EpisodeConfig(
        model=str(model), dataset=f"{tmp_path}/rows.jsonl", player=f"{tmp_path}/mine.py:play", run_dir="runs/x", **options
    )
    inputs = load_episode_inputs(config)
    assert tokenizer.decode(inputs.ends) == f"</s>{end}"
    assert turn_sampling(config.sampling, inputs.ends).stop_token_ids == (42, *inputs.ends)
    (hard,) = inputs.held_out
    engines: Any = Engines()
    ask(RolloutTokens(engines, turn_sampling(hard.sampling, inputs.ends)))
    assert engines.asked[0].sampling.stop_token_ids == (9, 41, *inputs.ends), "the turn's, the set's and the model's"
    larger = config.replace(prompts_per_step=2)
    with pytest.raises(ConfigError, match=r"prompts_per_step=2: .* has 1 rows; use at most that"):
        load_episode_inputs(larger)
    assert list(load_episode_inputs(larger, trains=False).rows) == [{"task": 1}], "one episode is shown, and nothing trained"


ENVIRONMENT = """class Asks:
    tools = ()
    def __init__(self, row, seed): ...
    def start(self): return [{"role": "user", "content": "?"}]
    def step(self, turn): ...
"""


class Stops(RandomSource):
    """Keeps the stop tokens of each turn."""

    async def generate(self, token_ids: Sequence[int], *, stop_token_ids: Sequence[int], **options: Any) -> Generation:
        self.stops = set(stop_token_ids)
        return await super().generate(token_ids, stop_token_ids=stop_token_ids, **options)


def test_the_stop_tokens_of_a_held_out_set_replace_those_of_training(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    config = EpisodeConfig(
        model="m", dataset="d", environment=f"{tmp_path}/mine.py:Asks", run_dir="x", sampling={"stop_token_ids": [42]}
    )
    tokenizer = chat_tokenizer(CHATML)
    player, _ = load_episode_player(config, tokenizer, {}, (43,))
    sets = [
        HeldOutSet(name, [{}], SamplingConfig(stop_token_ids=stops, max_new_tokens=3), (1,))
        for name, stops in (("own", (41,)), ("none", ()), ("same", (42,)))
    ]
    sources: list[Stops] = []

    def engines(sampling: SamplingConfig) -> Stops:
        sources.append(Stops(context_tokens=512, vocab_size=512))
        return sources[-1]

    EpisodeSource(config, EpisodeInputs(tokenizer, player, None, [{}], sets, iter([]), (43,)), engines).answer_held_out()
    assert [source.stops & {41, 42, 43} for source in sources[1:]] == [{41, 43}, {43}, {42, 43}]


def test_options_of_a_run_reach_the_player_of_its_environment(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    config = EpisodeConfig(
        model="m",
        dataset="d",
        environment=f"{tmp_path}/mine.py:Asks",
        run_dir="runs/x",
        history="branch",
        other_end="keep",
        tool_format="pythonic",
        on_cut="end",
        max_turns=3,
        max_response_tokens=9,
        sampling={"stop_token_ids": [42]},
        limits={"step_seconds": 2.5, "tool_calls": 4},
    )
    player, notes = load_episode_player(config, chat_tokenizer(CHATML), {}, (7,))
    assert isinstance(player, SteppedPlayer) and notes == ()
    limits = Limits(turns=3, turn_tokens=9, step_seconds=2.5, tool_calls=4, episode_tokens=4096)
    assert player.options == StepOptions(
        history="branch", other_end="keep", stop_token_ids=(42, 7), tool_format="pythonic", on_cut="end", limits=limits
    )


ENDS_BY_NAME = CHATML.replace("<|im_end|>", "{% if brief is defined %}<|im_start|>{% else %}<|im_end|>{% endif %}")


def test_variables_of_the_chat_template_reach_the_player_and_what_ends_its_turns(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(ENDS_BY_NAME)
    model = write_tiny("qwen3", tmp_path / "model", vocab_size=512, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(model)
    (tmp_path / "rows.jsonl").write_text('{"task": 1}\n')
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    options: dict[str, Any] = {"prompts_per_step": 1, "environment": f"{tmp_path}/mine.py:Asks", "run_dir": "runs/x"}
    for variables, end in (({}, "<|im_end|>"), ({"brief": 1}, "<|im_start|>")):
        config = EpisodeConfig(
            model=str(model), dataset=f"{tmp_path}/rows.jsonl", **options, data={"chat_template_kwargs": variables}
        )
        inputs = load_episode_inputs(config)
        assert isinstance(inputs.player, SteppedPlayer)
        assert dict(inputs.player.options.chat_template_kwargs) == variables
        assert tokenizer.decode(inputs.ends) == f"</s>{end}"


def test_what_an_episode_run_reads_follows_from_its_options(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(None)
    model = write_tiny("qwen3", tmp_path / "model", vocab_size=512, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(model)
    for name, tasks in (("rows", range(7)), ("hard", range(20, 22))):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"task": {task}}}\n' for task in tasks))
    (tmp_path / "mine.py").write_text(f"{PLAYER}def best(episodes): return [0.5 for _ in episodes]\n")

    def inputs(taken: int = 0, trains: bool = True, **options: Any) -> EpisodeInputs:
        given: dict[str, Any] = {"prompts_per_step": 3, "player": f"{tmp_path}/mine.py:play", "run_dir": "runs/x", **options}
        config = EpisodeConfig(model=str(model), dataset=f"{tmp_path}/rows.jsonl", **given)
        return load_episode_inputs(config, taken, trains=trains)

    def batches(found: EpisodeInputs, number: int = 3) -> list[list[int]]:
        return [[row["task"] for row in rows] for rows in islice(found.batches, number)]

    whole = batches(inputs(), 6)
    assert [len(each) for each in whole] == [3] * 6 and batches(inputs(3)) == whole[3:]
    assert batches(inputs(seed=1)) != whole[:3] and [len(each) for each in batches(inputs(trains=False))] == [1] * 3
    sets = {"hard": {"path": f"{tmp_path}/hard.jsonl", "n": 4, "pass_at": [2], "pass_threshold": 0.25}}
    found = inputs(eval_dataset=sets, score=f"{tmp_path}/mine.py:best")
    (hard,) = found.held_out
    assert (hard.name, [row["task"] for row in hard.prompts]) == ("hard", [20, 21])
    assert (hard.sampling.n, hard.pass_at, hard.pass_threshold) == (4, (2,), 0.25)
    assert found.score is not None and found.score([1, 2]) == [0.5, 0.5]  # type: ignore[list-item]
    assert (inputs().score, inputs().held_out, inputs().notes, list(inputs().ends)) == (
        None,
        [],
        (),
        [tokenizer.eos_token_id],
    )


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (
            "ValueError('no board')",
            ConfigError,
            r"^environment='\S+:Asks': cannot be made of the first row of d: .*board",
        ),
        ("BatchError('row 7 is damaged')", BatchError, r"^row 7 is damaged$"),
    ],
)
def test_an_environment_that_cannot_be_made_of_the_first_row_is_refused(
    tmp_path: Path, raised: str, kind: type[Exception], message: str
) -> None:
    made = ENVIRONMENT.replace("(self, row, seed): ...", f"(self, row, seed): raise {raised}")
    (tmp_path / "mine.py").write_text(f"from rl_backend.contracts import BatchError\n{made}")
    config = EpisodeConfig(model="m", dataset="d", environment=f"{tmp_path}/mine.py:Asks", run_dir="x")
    with pytest.raises(kind, match=message):
        load_episode_player(config, chat_tokenizer(CHATML), {}, ())


def test_what_a_chat_template_changes_in_the_history_is_noted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    options: dict[str, Any] = {"environment": f"{tmp_path}/mine.py:Asks", "run_dir": "runs/x", "history": "branch"}
    config = EpisodeConfig(model="m", dataset="d", **options)
    _, (note,) = load_episode_player(config, chat_tokenizer(THINKING), {}, ())
    assert note.startswith("history branch: the chat template changes ")
