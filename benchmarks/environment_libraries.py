"""Unmodified environments of tinker-cookbook and verifiers, trained with GRPO for some steps after a supervised warm start.

    make libraries && python -m benchmarks.environment_libraries [cookbook] [verifiers]

A small model in one process: the native runtime trains, transformers samples with the weights that it exports. Writes
``results/environment_libraries.json``: the mean reward of an episode before and after, the same with rewards shuffled over
the step's episodes, and the largest gap between the log-probs that were sampled and the trainer's own.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from adapters.cookbook import CookbookPlayer
from adapters.verifiers import VerifiersPlayer, VerifiersSettings
from benchmarks.report import update_result
from benchmarks.sampled_by_transformers import TransformersSource
from rl_backend import NativeConfig, OptimizerConfig, Runtime, RuntimeConfig, TokenSequence, create_runtime
from rl_backend.algorithm import grpo_advantages, grpo_loss, sft_loss
from rl_backend.algorithm.episodes import EPISODE, episode_sequences
from rl_backend.data import pack_plan, plan_micro_batches, prepare_micro_batches, restore_order
from rl_backend.environment import Episode, GroupTask, Limits, Player, PlayOptions, play_groups
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.libraries import cookbook, verifiers
from tests.support.models import write_tiny_qwen3
from tests.support.openenv_game import served_game

TOKENIZER = chat_tokenizer(CHATML)
END = int(TOKENIZER.convert_tokens_to_ids("<|im_end|>"))
CONTEXT = 1024
MOST_TOKENS = 16_384
GROUP_SIZE, HELD_OUT = 8, 12
ROUNDS = 3
"""Of the warm start: in the first the model comes no further than the first turn."""


@dataclass(frozen=True)
class Library:
    """An environment to be trained on.

    Attributes:
        player: plays it.
        row: of a task's number.
        write: a turn of the warm start, as good or bad as its generator says.
        turns: of an episode, at most.
        warm_steps: of each round of the warm start.
        lr, groups, steps: of GRPO, with so many groups of ``GROUP_SIZE`` episodes a step.
    """

    player: Player
    row: Callable[[int], Mapping[str, Any]]
    write: Callable[[random.Random], str]
    turns: int
    warm_steps: int
    lr: float
    groups: int
    steps: int


@contextmanager
def guess_number() -> Iterator[Library]:
    """tinker-cookbook's: a number below 1024, with -1 for a turn that is no guess."""
    cookbook()
    from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import GuessNumberEnv
    from tinker_cookbook.renderers import get_renderer

    renderer = get_renderer("qwen3", TOKENIZER)
    player = CookbookPlayer(lambda row, seed: GuessNumberEnv(row["answer"], renderer), TOKENIZER)

    def write(generator: random.Random) -> str:
        return f"{'Guess' if generator.random() < 0.5 else 'I say'}: {generator.randrange(1024)}"

    yield Library(
        player, lambda number: {"answer": 37 * number % 1024}, write, turns=2, warm_steps=30, lr=2e-3, groups=6, steps=12
    )


@contextmanager
def openenv() -> Iterator[Library]:
    """verifiers' OpenEnv taskset with a number below 4 in three turns; an action that is no JSON ends the episode."""
    with tempfile.TemporaryDirectory() as folder, served_game() as url:
        TOKENIZER.save_pretrained(folder)
        settings = VerifiersSettings(
            python=str(verifiers()),
            environment={"taskset": {"id": "openenv", "base_url": url, "resets": [{"number": each} for each in range(4)]}},
            roles=("player",),
            tokenizer=folder,
            stop_token_ids=(END,),
        )

        def write(generator: random.Random) -> str:
            number = generator.randrange(4)
            return f'{{"guess": {number}}}' if generator.random() < 0.6 else f"it is {number}"

        with VerifiersPlayer(settings, context_tokens=CONTEXT) as player:
            yield Library(
                player, lambda number: {"task": number % 4}, write, turns=3, warm_steps=80, lr=2e-3, groups=4, steps=10
            )


class Trained:
    """A policy, and the source of tokens that samples from its weights."""

    def __init__(self, folder: Path, runtime: Runtime) -> None:
        self.runtime = runtime
        self.policy = runtime.build_model()
        self.source = TransformersSource(folder, context_tokens=CONTEXT)

    def push(self) -> None:
        self.source.load(dict(self.runtime.export_weights(self.policy)), version=self.policy.weight_version)

    def update(self, sequences: Sequence[TokenSequence], loss: Callable[..., Any]) -> None:
        (batches,) = prepare_micro_batches(sequences, 1, MOST_TOKENS)
        with self.runtime.train_mode(self.policy):
            self.runtime.zero_grad(self.policy)
            self.runtime.forward_backward(self.policy, batches, loss)
            self.runtime.optimizer_step(self.policy)
            self.runtime.lr_scheduler_step(self.policy)

    def log_probs(self, sequences: Sequence[TokenSequence]) -> list[torch.Tensor]:
        plan = plan_micro_batches([len(sequence) for sequence in sequences], 1, MOST_TOKENS)
        (batches,) = pack_plan(sequences, plan)
        with self.runtime.eval_mode(self.policy):
            result = self.runtime.forward_backward(self.policy, batches, None, forward_only=True)
        return restore_order(plan, [result.output("log_probs")])


def play(library: Library, source: TransformersSource, tasks: Sequence[GroupTask]) -> list[list[Episode]]:
    """Episodes by group; one that fails has a reward of 0."""
    limits = Limits(turns=library.turns, turn_tokens=16, episode_seconds=600, concurrent=24)
    options = PlayOptions(limits=limits, on_failure="zero")
    return [list(group.episodes) for group in asyncio.run(play_groups(library.player, tasks, source, options))]


def tasks_of(library: Library, step: int, groups: int) -> list[GroupTask]:
    numbers = range(step * groups, (step + 1) * groups)
    return [GroupTask(library.row(each), each, [1000 * each + sample for sample in range(GROUP_SIZE)]) for each in numbers]


def warm_start(library: Library, model: Path, out: Path) -> None:
    """Writes a model that imitates turns of all kinds, behind the prompts of each turn that the environment gives."""
    generator = random.Random(0)
    with trained(model, OptimizerConfig(lr=2e-3, clip_grad=1.0)) as policy:
        for round_ in range(ROUNDS):
            policy.push()
            prompts = [
                prompt
                for group in play(library, policy.source, tasks_of(library, round_, 2))
                for episode in group
                for prompt in prompts_of(episode)
            ]
            for _ in range(library.warm_steps):
                turns = [[*TOKENIZER.encode(library.write(generator), add_special_tokens=False), END] for _ in range(16)]
                sequences = [TokenSequence.from_prompt_and_response(generator.choice(prompts), turn) for turn in turns]
                policy.update(sequences, sft_loss)
        policy.runtime.save_checkpoint(policy.policy, out, hf=True)


def prompts_of(episode: Episode) -> Iterator[Sequence[int]]:
    """What each of its turns was sampled behind."""
    for segment in episode.segments:
        before = [False, *segment.sampled]
        for place, (earlier, sampled) in enumerate(zip(before, segment.sampled, strict=False)):
            if sampled and not earlier:
                yield segment.token_ids[:place]


def train(library: Library, policy: Trained, *, shuffled: bool) -> float:
    """Some steps of GRPO; returns the largest gap of log-probs."""
    gap = 0.0
    for step in range(1, library.steps + 1):
        policy.push()
        episodes = [
            each for group in play(library, policy.source, tasks_of(library, step, library.groups)) for each in group
        ]
        rewards = [episode.reward for episode in episodes]
        if shuffled:
            random.Random(step).shuffle(rewards)
        advantages = grpo_advantages(torch.tensor(rewards), group_size=GROUP_SIZE)
        if not (sequences := episode_sequences(episodes)):
            raise RuntimeError(f"step {step}: no episode has a turn; the first ended with: {episodes[0].error}")
        old = policy.log_probs(sequences)
        for sequence, log_probs in zip(sequences, old, strict=True):
            differ = (log_probs - sequence.token_fields["rollout_log_probs"]).abs() * sequence.token_fields["loss_mask"]
            gap = max(gap, float(differ.max()))
        policy.update(
            [
                sequence.with_fields(
                    {"old_log_probs": log_probs},
                    {"advantages": advantages[int(sequence.sequence_fields[EPISODE])]},
                )
                for sequence, log_probs in zip(sequences, old, strict=True)
            ],
            grpo_loss,
        )
        print(f"step {step}: reward {fmean(rewards):.3f}", flush=True)
    return gap


def held_out(library: Library, policy: Trained) -> float:
    """The mean reward on tasks of no step."""
    policy.push()
    return fmean(each.reward for group in play(library, policy.source, tasks_of(library, 1000, HELD_OUT)) for each in group)


@contextmanager
def trained(model: Path, optimizer: OptimizerConfig) -> Iterator[Trained]:
    config = RuntimeConfig(
        hf_path=str(model), max_tokens_per_micro_batch=MOST_TOKENS, backend_cfg=NativeConfig(optimizer=optimizer)
    )
    with closing(create_runtime(config)) as runtime:
        yield Trained(model, runtime)


def measure(name: str, library: Library) -> Iterator[dict[str, float]]:
    """What is known after GRPO, and then after GRPO on shuffled rewards, both from the same warm start."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_qwen3(Path(folder) / "model", vocab_size=len(TOKENIZER), max_position_embeddings=CONTEXT)
        warm_start(library, model, warm := Path(folder) / "warm")
        found: dict[str, float] = {}
        for shuffled in (False, True):
            label = f"{name}{', rewards shuffled' if shuffled else ''}"
            with trained(warm, OptimizerConfig(lr=library.lr, clip_grad=1.0)) as policy:
                before = held_out(library, policy)
                print(f"{label}: {before:.3f} before", flush=True)
                gap = train(library, policy, shuffled=shuffled)
                after = held_out(library, policy)
            print(f"{label}: {after:.3f} after; gap {gap:.1e}", flush=True)
            if shuffled:
                found |= {"after_shuffled_rewards": after}
            else:
                found |= {"before": before, "after": after, "max_log_prob_gap": gap}
            yield found


LIBRARIES = {"cookbook_guess_number": guess_number, "verifiers_openenv": openenv}


def main(arguments: Sequence[str]) -> None:
    for name, opened in LIBRARIES.items():
        if arguments and not any(name.startswith(each) for each in arguments):
            continue
        with opened() as library:
            for found in measure(name, library):
                update_result("environment_libraries", {name: found})


if __name__ == "__main__":
    main(sys.argv[1:])
