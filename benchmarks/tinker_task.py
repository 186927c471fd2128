"""What the cookbook's recipes need offline: a small Qwen3 with a tokenizer, and stand-ins for two data sets.

All of it lies in one folder under the names that the recipes ask for: a local folder of a name comes before the hub's.
The model imitates conversations that are often wrong, as the demo's does, so that rewards have something to mend. Nothing
here is of Qwen, No Robots or GSM8K but the names and the forms.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.environment_tasks import qwen3_config

NAME = "Qwen/Qwen3-8B"
"""The recipes know the form of its chats by this name."""
WARM_START = 1500
"""Steps; the model knows sums from about 1000 on."""
SHARE_WRONG = 0.7
SHARES = {"sums": 6, "boxed": 3, "guesses": 1}
"""Conversations of the warm start, by their forms."""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THOUGHT = ("<think>", "</think>")
# A digit is a token, as with Qwen; words that stand together may be one, so that rows are short.
_SPLIT = r"\p{N}|[^\p{N}]+"
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
_STRAWBERRY = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}"
)
_GUESSING = (
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the format Guess: <guess> (without "
    "the angle brackets), and say nothing else. Then we will tell you whether you guess is too high, too low, or correct."
)
_NO_GUESS = "Failed to parse. Please output in the format Guess: <guess> (without the angle brackets), and say nothing else."
_COLOURS = ("red", "green", "blue", "white", "black")

type Message = Mapping[str, str]


def write_names(folder: Path, seed: int, steps: int) -> list[float]:
    """Writes the model, warmed up for so many steps, and both data sets; the losses of the warm start."""
    generator = random.Random(seed)
    rows = [_conversation(generator) for _ in range(4096)]
    tokenizer = _tokenizer([text for row in rows[:512] for text in _texts(row)])
    losses = _write_model(folder / NAME, tokenizer, rows, seed, steps)
    _write_lines(folder / "HuggingFaceH4/no_robots", [{"messages": _colours(generator)} for _ in range(2048)])
    sums = [(generator.randint(0, 100), generator.randint(0, 100)) for _ in range(2048)]
    gsm8k = [
        {"question": f"What is {first} + {second}?", "answer": f"It is {first + second}.\n#### {first + second}"}
        for first, second in sums
    ]
    _write_lines(folder / "openai/gsm8k", gsm8k)
    files = "".join(f"      - {{split: {split}, path: {split}.jsonl}}\n" for split in ("train", "test"))
    (folder / "openai/gsm8k/README.md").write_text(
        f"---\nconfigs:\n  - config_name: main\n    data_files:\n{files}---\n", encoding="utf-8"
    )
    return losses


def _conversation(generator: random.Random) -> list[Message]:
    """One of the three forms that the recipes sample; sums are most frequent because they are the hardest."""
    kind = generator.choices(tuple(SHARES), tuple(SHARES.values()))[0]
    if kind == "guesses":
        return _guesses(generator)
    suffix = _BOXED if kind == "boxed" else ""
    messages: list[Message] = []
    if kind == "boxed":
        messages += _turn(f"How many r's are in strawberry?{suffix}", _STRAWBERRY)
    return [*messages, *sums(generator, suffix)]


def sums(generator: random.Random, suffix: str = "") -> list[Message]:
    """Six sums with their answers, which are boxed where the questions have a suffix."""
    messages: list[Message] = []
    for _ in range(6):
        first, second = generator.randint(0, 100), generator.randint(0, 100)
        # The careless answer has a sign too many: rewards mend a habit within minutes, and sums only in hours.
        answer = (first + second) * (-1 if generator.random() < SHARE_WRONG else 1)
        messages += _turn(f"What is {first} + {second}?{suffix}", f"\\boxed{{{answer}}}" if suffix else f"{answer}")
    return messages


def _guesses(generator: random.Random) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": _GUESSING}]
    for turn in range(generator.randint(1, 5)):
        guessed = generator.random() >= SHARE_WRONG
        guess = f"{'Guess' if guessed else 'Number'}: {generator.randint(0, 1024)}"
        reply = generator.choice(("Too low", "Too high")) if guessed else _NO_GUESS
        # What was said before has the name that the recipe's environment gives it; only the newest is the assistant's.
        messages += [{"role": "player", "content": guess}, {"role": "user", "content": reply}]
        if turn == 0 and generator.random() < 0.5:
            break
    guess = f"{'Guess' if generator.random() >= SHARE_WRONG else 'Number'}: {generator.randint(0, 1024)}"
    return [*messages, {"role": "assistant", "content": guess}]


def _colours(generator: random.Random) -> list[Message]:
    """What the warm start has not seen: the second colour of three is asked for."""
    colours = generator.sample(_COLOURS, 3)
    return _turn(f"Which colour is between {', '.join(colours)}?", f"It is {colours[1]}.")


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _texts(messages: Sequence[Message]) -> list[str]:
    return [f"{each['role']}\n{each['content']}\n" for each in messages]


def _write_lines(folder: Path, rows: Sequence[Mapping[str, object]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (("train", rows[:-64]), ("test", rows[-64:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def _tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's marks."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    colours = [f"Which colour is between {', '.join(_COLOURS)}? It is {each}." for each in _COLOURS]
    backend.train_from_iterator([*texts, *colours, f"{_GUESSING}{_NO_GUESS}{_STRAWBERRY}{_BOXED}"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.add_tokens(list(_THOUGHT))
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _write_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Sequence[Message]], seed: int, steps: int
) -> list[float]:
    """The demo's Qwen3 with a head of its own and more positions, after a warm start on the answers of the rows."""
    torch.manual_seed(seed)
    config = qwen3_config(tokenizer, max_position_embeddings=1024, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    data = [_labelled(tokenizer, row) for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=min(0.1, 20 / steps))
    generator, losses = random.Random(seed), []
    for _ in range(steps):
        batch = generator.sample(data, 16)
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in batch])
        labels = torch.tensor([[*labels, *[-100] * (longest - len(labels))] for _, labels in batch])
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if len(losses) % 100 == 0:
            print(f"warm start: {len(losses)} of {steps} steps, loss {sum(losses[-100:]) / 100:.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return losses


def _labelled(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Ids, and those that the assistant wrote; -100 in place of the others.

    What ``rl_loop`` shows as an example is the same everywhere: labels on it would be most of a batch.
    """
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n")
        said = tokenizer.encode(f"{message['content']}<|im_end|>")
        end = tokenizer.encode("\n")
        ids += [*head, *said, *end]
        own = message["role"] == "assistant" and message["content"] != _STRAWBERRY
        written = said if own else [-100] * len(said)
        labels += [*[-100] * len(head), *written, *[-100] * len(end)]
    return ids, labels


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the model and the data sets into a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=WARM_START, help=f"of the warm start (default {WARM_START})")
    arguments = parser.parse_args()
    write_names(arguments.folder, 0, arguments.steps)


if __name__ == "__main__":
    main()
