"""The demo's task as verl reads it: parquet files, and a tokenizer with a chat template.

python -m examples.verl.task DIR
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from examples.demo.task import NUM_LAYERS, ModelName, character_tokenizer, write_task

# verl's rollouts look this token up in the tokenizer of a Qwen model.
END = "<|im_end|>"
# Messages follow each other as they are; what the assistant says ends in the end-of-text token.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
DATA_SOURCE = "addition"


def write_verl_task(folder: Path, seed: int = 0, model: ModelName = "qwen3", *, num_layers: int = NUM_LAYERS) -> None:
    """Writes ``model/`` and the parquet files ``demonstrations`` (SFT), ``train`` and ``held_out`` (RL)."""
    write_task(folder, seed, model, num_layers=num_layers)
    tokenizer = character_tokenizer(END)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    _write(folder / "demonstrations.parquet", _conversations(_rows(folder / "demonstrations.jsonl")))
    _write(folder / "validation.parquet", _conversations(_rows(folder / "validation.jsonl")))
    for name in ("train", "held_out"):
        _write(folder / f"{name}.parquet", _prompts(_rows(folder / f"{name}.jsonl"), name))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text().splitlines())


def _conversations(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }


def _prompts(rows: Iterable[dict[str, Any]], split: str) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(rows):
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"split": split, "index": index},
        }


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


if __name__ == "__main__":
    write_verl_task(Path(sys.argv[1]))
