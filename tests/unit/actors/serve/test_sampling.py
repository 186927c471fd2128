"""What a request for samples asks of engines, and which adapters they have meanwhile; engines are stand-ins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.rollout.config import SamplingConfig
from actors.rollout.messages import sample_seed
from actors.serve import sampling as module
from actors.serve.sampling import STREAMED_TOKENS, Draw, Sampling, _shown, end_tokens, prompt_of
from actors.serve.scores import EMPTY, Scores, Scoring, width_in
from actors.serve.wire import Cells
from rl_backend.contracts import BatchError, ConfigError, EngineDeadError, RolloutError, UnsupportedError
from rl_backend.environment.protocol import Generation

LONGEST, VOCABULARY = 20, 50


class Engines:
    """Keeps what it is asked for, in order."""

    def __init__(self) -> None:
        self.infos = {3: SimpleNamespace(max_model_len=LONGEST, vocab_size=VOCABULARY)}
        self.engines, self.lost_engines = [3], [0, 1]
        self.pushed: list[Path] = []
        self.removed: list[str] = []
        self.asked: list[tuple[list[int], str | None, int, int]] = []
        self.answer: Callable[[int], Generation] = lambda most: generation([7] * most, "length")
        self.error: Exception | None = None

    def remove_adapter(self, name: str) -> None:
        self.removed.append(name)
        if self.error is not None:
            raise self.error


def generation(tokens: Sequence[int], finish: Any) -> Generation:
    return Generation(tokens, [-1.0] * len(tokens), finish, [0] * len(tokens))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()

    class Tokens:
        def __init__(self, rollout: Any, config: SamplingConfig, *, adapter: str | None) -> None:
            assert rollout is made
            self.adapter = adapter

        async def generate(self, prompt: Any, *, seed: int, stop_token_ids: Any, max_tokens: int) -> Generation:
            made.asked.append((list(prompt), self.adapter, seed, max_tokens))
            return made.answer(max_tokens)

    monkeypatch.setattr(module, "RolloutTokens", Tokens)
    monkeypatch.setattr(module, "push_directory", lambda rollout, name, folder: made.pushed.append(folder))
    return made


def samplers(engines: Any, most_pushed: int = 2) -> Sampling:
    return Sampling(engines, [9, 4], most_pushed=most_pushed)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {"stop_token_ids": (9, 4)}),
        ({"stop": None, "temperature": None, "top_k": None}, {"stop_token_ids": (9, 4)}),
        ({"stop": []}, {}),
        ({"stop": "END"}, {"stop_strings": ("END",)}),
        ({"stop": 0}, {"stop_token_ids": (0,)}),
        ({"stop": ["a", 5, "b", 6]}, {"stop_strings": ("a", "b"), "stop_token_ids": (5, 6)}),
        ({"temperature": 0.5, "top_p": 0.75, "top_k": 3, "stop": []}, {"temperature": 0.5, "top_p": 0.75, "top_k": 3}),
        ({"top_k": -1, "stop": []}, {}),
        ({"top_k": 0, "stop": []}, {}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3, "stop": []}, {"temperature": 0.0}),
        ({"stop": ["x"] * 256}, {"stop_strings": ("x",) * 256}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_parameters_of_a_request_become_those_of_engines(params: Any, expected: Any, engines: Engines) -> None:
    draw = samplers(engines).read([1, 2], params, 1)
    assert draw.sampling == SamplingConfig(**expected) and draw.prompt == [1, 2]


def test_a_response_has_the_room_that_the_prompt_leaves_or_less(engines: Engines) -> None:
    serve = samplers(engines)
    for length, most, room in ((2, None, 18), (2, 5, 5), (2, 18, 18), (2, 19, 18), (19, None, 1), (19, 7, 1)):
        assert serve.read([1] * length, {"max_tokens": most}, 1).room == room
    for wrong, said in (([], "has 0 tokens"), ([1] * 20, "has 20 tokens"), ([1, 50], "from 1 to 50"), ([-1], "from -1 to")):
        with pytest.raises(BatchError, match=f"^the prompt has .*{said.removeprefix('has ')}"):
            serve.read(wrong, {}, 1)


@pytest.mark.parametrize("seed", [0, 3, -3])
def test_a_seed_gives_each_sample_its_own_and_the_same_again(seed: int, engines: Engines) -> None:
    serve = samplers(engines)
    drawn = [serve.read([1], {"seed": seed}, 3).seeds for _ in range(2)]
    assert drawn[0] == drawn[1] == [sample_seed(seed, 0, 0, index) for index in range(3)]
    free = [tuple(serve.read([1], {"seed": None}, 3).seeds) for _ in range(2)]
    assert len({*free[0], *free[1]}) == 6 and all(0 <= each < 1 << 63 for each in free[0])


def test_a_prompt_is_the_text_of_all_its_chunks() -> None:
    chunks = [{"type": "encoded_text", "tokens": [1, 2]}, {"tokens": []}, {"tokens": [3]}]
    assert prompt_of({"prompt": {"chunks": chunks}}) == [1, 2, 3]
    assert prompt_of({}) == prompt_of({"prompt": None}) == prompt_of({"prompt": {"chunks": None}}) == []
    with pytest.raises(UnsupportedError, match="a chunk of type 'image'"):
        prompt_of({"prompt": {"chunks": [chunks[0], {"type": "image", "tokens": [1]}]}})
    for wrong in ([True], [1.0], "ab", (1,)):
        with pytest.raises(BatchError, match="no whole number"):
            prompt_of({"prompt": {"chunks": [chunks[0], {"tokens": wrong}]}})
    with pytest.raises(BatchError, match="expected a list of objects"):
        prompt_of({"prompt": {"chunks": [[1]]}})


def scores(length: int, top: int) -> Scores:
    ids = np.arange(length * top).reshape(length, top)
    return Scores(np.arange(float(length)), ids, -ids.astype(np.float64), np.zeros((length - 1, 1)))


@pytest.mark.parametrize(
    ("asked", "shown"),
    [({}, 0), ({"prompt_logprobs_last_n": 1}, 3), ({"prompt_logprobs_last_n": 4}, 0), ({"prompt_logprobs_last_n": 99}, 0)],
)
def test_of_a_prompt_the_last_tokens_are_shown_that_were_asked_for(asked: Any, shown: int) -> None:
    given = scores(4, 2)
    log_probs, top, targets = _shown({"prompt_logprobs": True, **asked}, Scoring([1, 2, 3, 4], 2), given)
    assert log_probs is not None and top is not None and targets is None
    assert np.isnan(log_probs[:shown]).all() and log_probs[shown:].tolist() == [0.0, 1.0, 2.0, 3.0][shown:]
    assert top[0].tolist() == [[EMPTY[0]] * 2] * shown + given.top_ids.tolist()[shown:]
    assert top[1].tolist() == [[EMPTY[1]] * 2] * shown + given.top_log_probs.tolist()[shown:]
    assert given.log_probs.tolist() == [0.0, 1.0, 2.0, 3.0], "whoever else asked has the same"


def test_of_a_prompt_only_that_is_shown_which_was_asked_for() -> None:
    places = np.array([0]), np.array([0])
    wanted = Scoring([1, 2], 0, Cells(np.zeros((1, 1)), places))
    log_probs, top, targets = _shown({}, wanted, scores(2, 0))
    assert log_probs is None and top is None
    assert targets is not None and targets.present is places and targets.whole.shape == (1, 1)


def test_what_ends_a_text_is_what_the_folder_says(tmp_path: Path) -> None:
    def write(name: str, **values: Any) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps(values))

    for found, expected in ((None, []), (0, [0]), (5, [5]), ([5, 0], [5, 0])):
        write("config", model_type="qwen3", eos_token_id=found)
        assert end_tokens(tmp_path) == expected
    write("generation_config", eos_token_id=[3, 8])
    assert end_tokens(tmp_path) == [3, 8]


def test_a_stream_continues_its_own_text_until_an_end_or_its_room(engines: Engines) -> None:
    serve = samplers(engines)

    async def pieces(draw: Draw) -> list[Sequence[int]]:
        return [piece.token_ids async for piece in serve.stream(draw, None)]

    said = asyncio.run(pieces(serve.read([1, 2], {"seed": 4}, 1)))
    assert list(map(len, said)) == [8, 8, 2] and STREAMED_TOKENS == 8, "18 tokens fit"
    prompts, adapters, seeds, most = zip(*engines.asked, strict=True)
    assert prompts == ([1, 2], [1, 2] + [7] * 8, [1, 2] + [7] * 16) and most == (8, 8, 2)
    assert len({*seeds}) == 3 and {*adapters} == {None}
    assert asyncio.run(pieces(serve.read([1, 2], {"seed": 4}, 1))) == said and engines.asked[3:] == engines.asked[:3]
    engines.asked.clear()
    engines.answer = lambda most: generation([7] * 3, "stop")
    assert asyncio.run(pieces(serve.read([1, 2], {}, 1))) == [[7] * 3] and len(engines.asked) == 1
    # An engine may make less of a piece than it may.
    engines.answer = lambda most: generation([7] * min(5, most), "length")
    assert list(map(len, asyncio.run(pieces(serve.read([1] * 8, {}, 1))))) == [5, 5, 2]
    assert serve.open == 0 and serve.tokens == 36 + 3 + 12


def test_samples_are_counted_while_they_are_drawn_and_when_they_are_there(engines: Engines) -> None:
    serve, seen = samplers(engines), list[int]()

    def answer(most: int) -> Generation:
        seen.append(serve.open)
        if most == 3:
            raise RolloutError("lost")
        return generation([1] * most, "length")

    engines.answer = answer
    found = asyncio.run(serve.generate(serve.read([1], {"max_tokens": 2}, 3), None))
    assert len(found) == 3 and len({seed for *_, seed, _ in engines.asked}) == 3
    assert (serve.samples, serve.tokens, serve.open) == (3, 6, 0) and max(seen) >= 1
    with pytest.raises(RolloutError):
        asyncio.run(serve.generate(serve.read([1], {"max_tokens": 3}, 1), None))
    assert (serve.samples, serve.tokens, serve.open) == (3, 6, 0)
    assert dict(serve.engines) == {"alive": 1, "lost": 2} and (serve.longest, serve.vocab_size) == (LONGEST, VOCABULARY)


def test_the_adapter_that_was_used_longest_ago_gives_way_and_one_in_use_never(engines: Engines, tmp_path: Path) -> None:
    serve, folders = samplers(engines, most_pushed=2), [tmp_path / f"run{number}" / "adapter" for number in range(4)]

    async def use() -> None:
        names = [await serve.push(each) for each in folders[:2]]
        assert names[0].startswith("run0-") and await serve.push(folders[0]) == names[0]
        await serve.push(folders[2])  # the second, which was used before the first
        assert engines.removed == [names[1]] and serve.pushed == 2
        async with serve._adapter(folders[0]) as held, serve._adapter(folders[0]) as again:
            assert held == again == names[0]
            await serve.push(folders[3])
            await serve.push(folders[1])
            assert names[0] not in engines.removed and serve.pushed == 2
            async with serve._adapter(folders[1]):
                await serve.push(folders[2])
                assert serve.pushed == 3, "all the others are in use"
        assert not serve._in_use
        await serve.push(folders[3])
        assert names[0] in engines.removed and serve.pushed == 2
        await serve.forget(folders[3])
        await serve.forget(folders[3])
        assert serve.pushed == 1
        # The engines that had it are gone.
        engines.error = RolloutError("no engine")
        (left,) = serve._pushed
        await serve.forget(left)
        assert serve.pushed == 0
        assert await serve.push(folders[0]) != names[0]

    asyncio.run(use())
    assert engines.pushed.count(folders[0]) == 2


def test_an_adapter_is_free_again_where_its_samples_fail(engines: Engines, tmp_path: Path) -> None:
    def lost(most: int) -> Generation:
        raise EngineDeadError("lost")

    serve = samplers(engines)
    engines.answer = lost
    with pytest.raises(EngineDeadError):
        asyncio.run(serve.generate(serve.read([1], {}, 2), tmp_path / "run" / "adapter"))
    assert not serve._in_use and serve.pushed == 1
    assert {adapter for _, adapter, *_ in engines.asked} == set(serve._pushed.values())


def test_likeliest_tokens_are_of_the_whole_text_at_the_temperature_that_sampled_it(engines: Engines) -> None:
    serve, asked = samplers(engines), list[Scoring]()

    async def score(scoring: Scoring) -> Scores:
        asked.append(scoring)
        return scores(len(scoring.tokens), 3)

    found = [generation([7, 8], "stop"), generation([9], "length")]
    for temperature, expected in ((0.5, 0.5), (0, 1.0)):
        asked.clear()
        draw = serve.read([1, 2], {"temperature": temperature}, 2)
        assert len(asyncio.run(serve.scores_of(draw, found, 3, score))) == 2
        assert asked == [Scoring([1, 2, 7, 8], 3, None, expected), Scoring([1, 2, 9], 3, None, expected)]
    with pytest.raises(UnsupportedError, match="with top_p, top_k are not served"):
        asyncio.run(serve.scores_of(serve.read([1], {"top_p": 0.5, "top_k": 2}, 1), found, 3, score))


def test_nothing_is_computed_of_a_prompt_that_nobody_asks_for() -> None:
    dense = {"shape": [2, 1], "data": [0, 49]}
    assert Scoring.of({}, [1, 2, 3], VOCABULARY) is None
    assert Scoring.of({"prompt_logprobs": False, "topk_prompt_logprobs": 0}, [1, 2, 3], VOCABULARY) is None
    plain = Scoring.of({"prompt_logprobs": True}, [1, 2, 3], VOCABULARY)
    likely = Scoring.of({"topk_prompt_logprobs": 50}, [1, 2, 3], VOCABULARY)
    given = Scoring.of({"target_prompt_logprobs": dense}, [1, 2, 3], VOCABULARY)
    assert plain is not None and likely is not None and given is not None and given.targets is not None
    assert (plain.kind, likely.kind, given.kind) == ((0, 0, 1.0), (50, 0, 1.0), (0, 1, 1.0))
    assert plain.meta == {"top_log_probs": 0, "temperature": 1.0}
    assert "target_ids" not in plain.row.token_fields and plain.row.input_ids.tolist() == [1, 2, 3]
    assert given.row.token_fields["target_ids"].tolist() == [[2, 0], [3, 49], [-100, -100]]
    for data in ([0, 50], [0, -2], [-1, -1]):
        with pytest.raises(BatchError, match="target_prompt_logprobs: expected ids from 0 to 49, at least one"):
            Scoring.of({"target_prompt_logprobs": {**dense, "data": data}}, [1, 2, 3], VOCABULARY)
    for shape in ([2], [1, 2]):
        with pytest.raises(BatchError, match="target_prompt_logprobs has the shape"):
            Scoring.of({"target_prompt_logprobs": {"shape": shape, "data": [0, 1]}}, [1, 2, 3], VOCABULARY)


def test_a_width_is_bounded_by_the_vocabulary_and_by_what_all_places_take() -> None:
    asked: dict[str, Any] = {"k": 50}
    assert width_in(asked, "k", 10, 50) == 50 and width_in({}, "k", 10, 50) == width_in({"k": None}, "k", 10, 50) == 0
    assert width_in({"k": 4}, "k", 1 << 20, 50) == 4
    for given, length in ((51, 10), (5, 1 << 20), (-1, 10), (1.0, 10), ("1", 10)):
        with pytest.raises(BatchError, match=r"^k=.*: expected a number up to"):
            width_in({"k": given}, "k", length, 50)


def test_options_that_engines_refuse_are_refused_by_name(engines: Engines) -> None:
    for params, named in (({"top_p": 0}, "top_p"), ({"temperature": -1}, "temperature"), ({"stop": ""}, "stop_strings")):
        with pytest.raises(ConfigError, match=named):
            samplers(engines).read([1], params, 1)
