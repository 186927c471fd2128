"""The code and the algorithms on docs/algorithms.md work as they stand there."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rl_backend.algorithm
from rl_backend.contracts import TokenSequence
from tests.support.rl_batches import batch_meta, pack, random_sequences

PAGE = (Path(__file__).parents[4] / "docs" / "algorithms.md").read_text()
CALLS = sorted(set(re.findall(r"`((?:grpo|gspo|cispo)_loss\([^`]*\))`", PAGE)))


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    defined: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, defined)
    return defined


def test_the_loss_of_ones_own_works(names: dict[str, Any]) -> None:
    sequences = random_sequences(20)
    output, batch = pack(sequences, batch_meta(sequences))
    loss, metrics = names["reinforce_loss"](output, batch)
    loss.backward()
    mask = batch.token_field("loss_mask")
    expected = -batch.token_field("advantages") * mask / batch.meta["batch_num_tokens"]
    torch.testing.assert_close(output.log_probs.grad, expected)
    assert metrics["reinforce"][1] == mask.sum()


def test_the_fields_of_ppo_train_actor_and_critic(names: dict[str, Any]) -> None:
    given = random_sequences(21)
    fields = ("values", "old_log_probs", "ref_log_probs")
    values, old, ref = ([sequence.token_fields[name] for sequence in given] for name in fields)
    bare = [TokenSequence(s.input_ids, {"loss_mask": s.token_fields["loss_mask"]}) for s in given]
    sequences = names["with_ppo_fields"](bare, [1.0, 0.0, 0.5, 1.0, 0.0, 1.0], values, old, ref)
    outputs = [
        sequence.with_fields({name: before.token_fields[name] for name in ("log_probs", "entropy", "values")})
        for sequence, before in zip(sequences, given, strict=True)
    ]
    output, batch = pack(outputs, batch_meta(sequences))
    for loss_fn, leaf in (
        (rl_backend.algorithm.grpo_loss, output.log_probs),
        (rl_backend.algorithm.value_loss, output.values),
    ):
        loss, _ = loss_fn(output, batch)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert gradient.isfinite().all() and gradient.any()


@pytest.mark.parametrize("call", CALLS)
def test_the_options_that_make_an_algorithm_are_accepted(call: str) -> None:
    name, options = re.fullmatch(r"(\w+)\((.*)\)", call).groups()
    keywords = eval(f"dict({options})", {"max_response_tokens": 12})
    sequences = random_sequences(22)
    loss, _ = functools.partial(getattr(rl_backend.algorithm, name), **keywords)(*pack(sequences, batch_meta(sequences)))
    assert loss.isfinite()


def test_every_advantage_and_loss_is_on_the_page_and_what_the_first_table_names_exists() -> None:
    offered = {name for name, value in vars(rl_backend.algorithm).items() if not isinstance(value, ModuleType)}
    assert [name for name in offered if name.endswith(("_advantages", "_loss")) and f"`{name}" not in PAGE] == []
    recipes = PAGE[PAGE.index("| PPO |") : PAGE.index("Losses are bound")]
    assert set(re.findall(r"`(\w+)", recipes)) <= offered
