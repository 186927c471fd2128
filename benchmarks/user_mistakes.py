"""Mistakes that people make in their first hour: a folder with models and data that have them, and the commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from examples.demo.task import write_task

RUN = {
    "--model": "model",
    "--dataset": "train.jsonl",
    "--reward": "reward.py:compute_score",
    "--run-dir": "runs/mine",
    "--max-prompt-tokens": "8",
    "--max-response-tokens": "8",
}
"""Options of a run that works."""

_SCORED = "--eval-dataset train.jsonl --reward reward.py:compute_score"
_RL = ("examples.grpo", "examples.ppo", "examples.tenants")


class Mistake(NamedTuple):
    """Attributes:
    about: what is wrong; F1 to F20 are the findings of the first trial.
    program: module that is run.
    options: in place of those of :data:`RUN`; an empty text is a flag without a value, None leaves one out.
    """

    about: str
    program: str
    options: dict[str, str | None]

    def arguments(self) -> list[str]:
        """What follows ``python``."""
        of_run = RUN if self.program in _RL else {name: RUN[name] for name in ("--model", "--dataset", "--run-dir")}
        given = {**(of_run if self.program.startswith("examples.") else {}), **self.options}
        words = [word for name, value in given.items() if value is not None for word in (*name.split(), value) if word]
        return ["-m", self.program, *words]


def grpo(about: str, **options: str | None) -> Mistake:
    """Of a run of GRPO; ``tp`` is ``--tp``, and ``rollout__device`` is ``--rollout.device``."""
    flags = {f"--{name.replace('__', '.') if '__' in name else name.replace('_', '-')}": options[name] for name in options}
    return Mistake(about, "examples.grpo", flags)


def command(about: str, words: str) -> Mistake:
    """Of ``rl-backend``."""
    return Mistake(about, "rl_backend.cli", {words: ""})


MISTAKES = (
    grpo("F1 lengths above the model's positions", max_prompt_tokens="512", max_response_tokens="24"),
    grpo("F1 a response above the model's positions", max_response_tokens="100"),
    grpo("F1 engines longer than the model", rollout__max_model_len="4096"),
    grpo("F1 a folder without weights", model="no_weights"),
    grpo("F3 a run folder that cannot be made", run_dir="train.jsonl/run"),
    grpo("F6 messages and a tokenizer without chat template", dataset="chat.jsonl"),
    command("F7 export to a folder in one that is missing", "export --checkpoint runs/none --out models/mine"),
    command("F7 export of a run folder", "export --checkpoint runs/used --out exported"),
    grpo("F11 a model that is not there", model="models/llama"),
    grpo("F12 an activation that the family does not have", model="other_activation"),
    grpo("F13 a plugin that is not there", plugins="my_family"),
    grpo("F13 a plugin with an error", plugins="broken_plugin"),
    grpo("F14 a prompt that is too long", max_prompt_tokens="3"),
    grpo("F14 a row without an answer", dataset="no_answer.jsonl"),
    command("F16 a schedule from a run without a trace", "schedule --from-trace runs/used"),
    command("F16 the JSON of a comparison in a folder that is not there", "parity --model model --json none/out.json"),
    grpo("F16 a damaged YAML file", config="damaged.yaml"),
    grpo("F19 heads that tp does not divide", tp="3", ranks="3"),
    grpo("F19 cp in the bridge runtime", cp="2", ranks="2", backend="bridge"),
    grpo("F19 a model type without a family", model="other_type"),
    grpo("a model type that Megatron-Bridge does not have", model="neox_type", backend="bridge"),
    grpo("heads that tp does not divide, bridge", tp="3", ranks="3", backend="bridge"),
    grpo("more stages than layers", pp="4", ranks="4"),
    grpo("layers that pp does not divide, bridge", pp="2", ranks="2", backend="bridge"),
    grpo("ep for a dense model", ep="2", ranks="2"),
    grpo("ranks that the layout does not divide", tp="2", ranks="3"),
    grpo("heads that the engines' tensor parallelism does not divide", rollout__tensor_parallel="3"),
    grpo("weights of another size than config.json says", model="other_weights"),
    grpo("half a download", model="half_weights"),
    grpo("no tokenizer", model="no_tokenizer"),
    grpo("a tokenizer without an end of text", model="no_eos"),
    grpo("a folder without config.json", model="runs"),
    grpo("a damaged config.json", model="damaged_config"),
    grpo("a dataset that is not there", dataset="training.jsonl"),
    grpo("a dataset in another format", dataset="train.csv"),
    grpo("a dataset that is not JSON", dataset="not_json.jsonl"),
    grpo("a batch larger than the data", prompts_per_step="100000"),
    grpo("updates that do not divide the prompts", updates_per_step="5"),
    grpo("more ranks than responses", ranks="300"),
    grpo("a run folder with another run", run_dir="runs/used"),
    grpo("a reward file that is not there", reward="rewards.py:compute_score"),
    grpo("a reward function that is not there", reward="reward.py:score"),
    grpo("a reward function with other arguments", reward="reward.py:of_text"),
    grpo("a reward file with an error", reward="broken_plugin.py:compute_score"),
    grpo("more memory than there is", rollout__kv_cache_gib="100000"),
    grpo("training on a GPU that is not there", train__backend_cfg__device="cuda"),
    grpo("sampling on a GPU that is not there", rollout__device="cuda"),
    grpo("weights over NCCL without GPUs", transport="nccl"),
    grpo("more cores than there are", rollout__cores_per_engine="5000"),
    grpo("LoRA of a module that is not there", lora__rank="8", lora__targets="query"),
    grpo("router replay of a dense model", router_replay="R2"),
    grpo("a flag that is not there", learning_rate="1e-5"),
    grpo("a value that is no number", lr="fast"),
    grpo("no reward", reward=None),
    grpo("no steps", steps="0"),
    grpo("a learning rate below 0", lr="-1e-4"),
    grpo("responses without tokens", max_response_tokens="0"),
    grpo("tensor parallelism without ranks", tp="2"),
    grpo("a column that is not there", prompt_column="question"),
    grpo("model and data in each other's place", model="train.jsonl", dataset="model"),
    grpo("an empty dataset", dataset="empty.jsonl"),
    grpo("a dataset with a broken line", dataset="broken_line.jsonl"),
    grpo("a YAML file with tabs", config="tabs.yaml"),
    grpo("an option that is not there, in a file", config="near.yaml"),
    grpo("the folder of a run in place of its checkpoint", resume="runs/used"),
    command("a command that is not there", "grop --model model"),
    grpo("a metrics writer that is not there", metrics_to="my_writer:Writer"),
    grpo("an argument that vLLM does not have", rollout__engine_args='{"unheard_of": 1}'),
    Mistake("a batch larger than the data, SFT", "examples.sft", {"--batch-size": "100000"}),
    Mistake("an answer longer than the model", "examples.sft", {"--dataset": "long_answer.jsonl"}),
    Mistake("a critic that is not there", "examples.ppo", {"--critic-model": "critic"}),
    Mistake("a user's mistake", "examples.tenants", {"--users": '{"ann": {}, "bob": {"dataset": "bob.jsonl"}}'}),
    command("a plan of a layout that does not divide", "plan --model model --ranks 3 --tp 3"),
    command("a report of a folder that is no run", "report runs"),
    command("a flag of a plan that is not there", "plan --modle model --ranks 1"),
    command("an evaluation without a reward", "eval --model model --eval-dataset train.jsonl"),
    command("an evaluation that cannot be written", f"eval --model model {_SCORED} --out train.jsonl/out"),
    command("an evaluation of half a download", f"eval --model half_weights {_SCORED}"),
    command("an evaluation on a GPU that is not there", f"eval --model model {_SCORED} --rollout.device cuda"),
)

_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

def of_text(text):
    return 1.0
"""


def write_world(folder: Path) -> None:
    """Models, data and code that :data:`MISTAKES` name."""
    write_task(folder, seed=0)
    for name, change in _MODELS.items():
        shutil.copytree(folder / "model", folder / name)
        change(folder / name)
    texts = {
        "reward.py": _REWARD,
        "broken_plugin.py": "register_model(1)\n",
        "damaged.yaml": "steps: [1\n",
        "train.csv": "prompt,answer\n1+1=,2\n",
        "not_json.jsonl": "prompt: 1+1=\n",
        "empty.jsonl": "",
        "broken_line.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1=", "ans\n',
        "tabs.yaml": "sampling:\n\ttemperature: 1\n",
        "near.yaml": "steps: 10\nlearning_rate: 1.0e-5\n",
        "no_answer.jsonl": json.dumps({"prompt": "1+1="}) + "\n",
        "chat.jsonl": json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}) + "\n",
        "long_answer.jsonl": json.dumps({"prompt": "1+1=", "answer": "2" * 99}) + "\n",
        "runs/used/metrics.jsonl": '{"step": 1, "reward": 0.5}\n',
        "runs/used/run.json": '{"state": "finished"}\n',
        "runs/used/config.json": '{"steps": 1}\n',
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _config(**fields: Any) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **fields}))

    return change


def _without(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).unlink()


def _halve(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def _without_eos(model: Path) -> None:
    for file in model.glob("*tokenizer*_config.json"):
        values = json.loads(file.read_text())
        file.write_text(json.dumps({name: value for name, value in values.items() if name != "eos_token"}))


_MODELS: dict[str, Callable[[Path], object]] = {
    "no_weights": _without("model.safetensors"),
    "half_weights": _halve,
    "other_weights": _config(intermediate_size=256),
    "other_activation": _config(hidden_act="gelu"),
    "other_type": _config(model_type="mamba"),
    "neox_type": _config(model_type="gpt_neox"),
    "no_tokenizer": _without("tokenizer.json"),
    "no_eos": _without_eos,
    "damaged_config": lambda model: (model / "config.json").write_text("{"),
}
