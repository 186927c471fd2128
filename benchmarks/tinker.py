"""The cookbook's recipes, unmodified, and clients of Tinker's SDK against ``rl-backend serve`` on a small Qwen3.

Each part is a section of ``results/tinker.json``, which keeps the sections of parts that this call does not run. Recipes and
data sets are found under their names in ``--folder``, where the data and the model, warmed up, are made once
(:mod:`benchmarks.tinker_task` says what they are). A recipe that was interrupted continues there, in the next call, from its
last checkpoint on the server; remove ``logs`` to begin again. The packages come with
``make libraries ARGS="cookbook recipes"``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.report import machine, read_result, update_result
from benchmarks.tinker_chaos import run_chaos, summary
from benchmarks.tinker_task import NAME, SHARES, WARM_START, sums, write_names
from tests.support.libraries import FOLDER, ROOT, cookbook, smollm2
from tests.support.serve_fuzzer import fuzz as send
from tests.support.serve_process import Served, serve_command, serving
from tests.support.serve_wire import Wire
from tests.support.tinker_clients import KEY, Client, Trained, close_services, service, train, train_together

_LEARNING_RATE, _RANK = 1e-3, 8
_OF_SMOLLM2 = "qwen3_instruct"
"""The renderer with the marks of SmolLM2's own chats."""
_SHUFFLED = """
import torch
from tinker_cookbook.rl import train
of_rewards = train.compute_advantages
train.compute_advantages = lambda groups: [each[torch.randperm(len(each))] for each in of_rewards(groups)]
"""
"""Before a recipe: each answer has the advantage of another one to the same question, so that rewards teach nothing."""
RECIPES: dict[str, Mapping[str, Any]] = {
    "math_rl": {
        "module": "math_rl.train",
        "options": {
            "env": "arithmetic",
            "group_size": 8,
            "groups_per_batch": 12,
            "max_tokens": 5,
            "loss_fn": "importance_sampling",
            "save_every": 5,
            "eval_every": 0,
            "behavior_if_log_dir_exists": "resume",
        },
    },
    "sl_loop": {"module": "sl_loop", "options": {"batch_size": 16, "max_length": 256, "save_every": 5}},
    "rl_loop": {
        "module": "rl_loop",
        "options": {"batch_size": 12, "group_size": 8, "max_tokens": 12, "loss_fn": "importance_sampling"},
    },
    "guess_number": {
        "module": "multiplayer_rl.guess_number.train",
        "options": {
            "renderer_name": "qwen3",
            "group_size": 4,
            "batch_size": 8,
            "max_tokens": 10,
            "eval_every": 0,
            "behavior_if_log_dir_exists": "resume",
        },
    },
}
"""Recipe -> module, and options away from its defaults. The rank, and a learning rate that is not here, are those of all.

``model`` makes the directory of another model than the folder's, which is served under its path.
"""
RECIPES["math_rl_shuffled"] = {**RECIPES["math_rl"], "prelude": _SHUFFLED}
RECIPES["math_rl_smollm2"] = {
    **RECIPES["math_rl"],
    # With the others' learning rate a pretrained model learns in 4 steps and has forgotten all after 8.
    "options": {
        **RECIPES["math_rl"]["options"],
        "renderer_name": _OF_SMOLLM2,
        "learning_rate": 2e-4,
    },
    "model": smollm2,
}
STEPS = {"math_rl": 30, "math_rl_shuffled": 30, "math_rl_smollm2": 12, "sl_loop": 12, "rl_loop": 25, "guess_number": 8}
IMITATED, _IMITATED_ROWS = 20, 8
"""Steps, and conversations in each, of the warm start of a model that the folder does not have."""
RANKS = (4, 8, 16, 24, 32, 40, 48, 64)
LENGTHS = (16, 64, 256)
FUZZED = 10_000
_REWARDS = ("env/all/reward/total", "reward/total")
_BUDGET = 2048
"""Tokens of a micro-batch, by which passes are filled."""


def server_command(folder: Path, other: Path | None = None) -> list[str]:
    """Of a server on the model of the folder, or on another one, under its path."""
    named = ("--name", NAME, "--state", str(folder / "state")) if other is None else ("--state", str(folder / "state-other"))
    return serve_command(
        other or folder / NAME,
        *(*named, "--dtype", "float32", "--max-tokens", str(_BUDGET)),
        *("--max-model-len", "512", "--kv-cache-gib", "0.25", "--max-runs", "128"),
    )


def run_recipe(
    name: str, url: str, folder: Path, log: Path, steps: int, changed: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The metrics that a recipe writes, a mapping for each step. ``changed`` goes before the options of the table."""
    recipe = RECIPES[name]
    model = _other_model(name) if "model" in recipe else NAME
    options = {"model_name": model, "max_steps": steps, "log_path": log, "learning_rate": _LEARNING_RATE}
    options |= {} if name == "guess_number" else {"lora_rank": _RANK}
    environment = {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": KEY,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(str(FOLDER / each) for each in ("cookbook", "recipes")),
        "PYTHONWARNINGS": "ignore",
    }
    arguments = [f"{key}={value}" for key, value in {**options, **recipe["options"], **(changed or {})}.items()]
    module = f"tinker_cookbook.recipes.{recipe['module']}"
    command = [sys.executable, "-m", module, *arguments]
    if prelude := recipe.get("prelude"):
        runs = f"import runpy{prelude}runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        command = [sys.executable, "-c", runs, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _other_model(name: str) -> str:
    """The path of a recipe's own model, as its server calls it."""
    return str(RECIPES[name]["model"]().resolve())


def learned(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Reward, or loss, of the first and of the last steps, and what the recipe itself measures of log-probs.

    A run that was interrupted, and resumed from its checkpoint, has written steps again; the last line of each counts.
    """
    rows = list({row["step"]: row for row in rows if "step" in row}.values())
    key = next((each for each in ("train_mean_nll", *_REWARDS) if each in rows[0]), None)
    if key is None:
        raise SystemExit(f"{name}: none of {', '.join(_REWARDS)} is among {', '.join(rows[0])}")
    curve = [row[key] for row in rows if key in row]
    found: dict[str, Any] = {"steps": len(curve), "metric": key, "curve": [round(each, 4) for each in curve]}
    found |= {"first": curve[0], "last": statistics.mean(curve[-5:])}
    for version in ("v1", "v2"):
        values = [abs(row[of]) for row in rows if (of := f"optim/kl_sample_train_{version}") in row]
        if values:
            found[f"largest_kl_sample_train_{version}"] = max(values)
    return found


def recipe_part(name: str, runs: int, steps: int | None) -> Callable[[str, Path], dict[str, Any]]:
    def measure(url: str, folder: Path) -> dict[str, Any]:
        found, changed = [], {}
        if "model" in RECIPES[name]:
            warm_start = {"imitated_steps": IMITATED, "conversations_a_step": _IMITATED_ROWS}
            changed = {"load_checkpoint_path": imitation(url, _other_model(name), folder / "imitation.txt")}
        else:
            warm_start = json.loads((folder / "names.json").read_text("utf-8"))
        options = {"learning_rate": _LEARNING_RATE, **RECIPES[name]["options"]}
        # A recipe goes on from the log that it finds, which must not be one of other options.
        kind = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
        for run in range(runs):
            log = folder / "logs" / f"{name}-{kind}-{run}"
            rows = run_recipe(name, url, folder, log, steps or STEPS[name], changed)
            found.append(learned(name, rows))
            print(name, json.dumps(found[-1]), flush=True)
        return {"options": options, "warm_start": warm_start, "runs": found}

    return measure


def imitation(url: str, model: str, kept: Path) -> str:
    """A checkpoint of SmolLM2 that answers sums as the folder's model does, with its habit; ``kept`` has its address.

    Of its own accord SmolLM2 is right in less than 1 of 100 answers of 5 tokens, and rewards would have nothing to choose.
    """
    if kept.is_file():
        return kept.read_text("utf-8")
    from tinker import types
    from tinker_cookbook import renderers

    training = service(url).create_lora_training_client(base_model=model, rank=_RANK, seed=0).result()
    renderer, generator = renderers.get_renderer(_OF_SMOLLM2, training.get_tokenizer()), random.Random(0)
    for step in range(IMITATED):
        data = []
        for _ in range(_IMITATED_ROWS):
            said = renderer.build_supervised_example(sums(generator), renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES)
            ids, weights = said[0].to_ints(), said[1].tolist()
            inputs = {"target_tokens": ids[1:], "weights": weights[1:]}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
        passed = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=_LEARNING_RATE)).result()
        print("imitation: step", step, passed.result().metrics, flush=True)
    path = training.save_state("imitation").result().path
    kept.write_text(path, encoding="utf-8")
    return str(path)


def throughput(url: str, _: Path) -> dict[str, Any]:
    """Eight clients with ranks, rates and losses of their own, one by one and at one time, on rows of a length."""
    vocabulary = _vocabulary(url)
    found = {}
    for length in LENGTHS:
        clients = [Client(number, rank, length) for number, rank in enumerate(RANKS)]
        if length == LENGTHS[0]:
            train(url, NAME, clients[0], vocabulary)  # what is loaded and compiled once
        alone = [train(url, NAME, client, vocabulary) for client in clients]
        found[str(length)] = compared(alone, train_together(url, NAME, clients, vocabulary))
        print("rows of", length, json.dumps(found[str(length)]), flush=True)
    return {"ranks": RANKS, "rows": clients[0].rows, "steps": clients[0].steps, "by_length": found}


def compared(alone: Sequence[Trained], together: Sequence[Trained]) -> dict[str, Any]:
    one_by_one = sum(each.seconds for each in alone)
    side_by_side = max(each.seconds for each in together)
    return {
        "seconds_one_by_one": round(one_by_one, 3),
        "seconds_together": round(side_by_side, 3),
        "throughput_over_one_by_one": round(one_by_one / side_by_side, 2),
        "equal_bit_for_bit": sum(one.equals(two) for one, two in zip(alone, together, strict=True)),
        "clients": len(alone),
    }


def fairness(url: str, _: Path) -> dict[str, Any]:
    """How long one short row waits while a large client always has a request open, in passes of the token budget."""
    from tinker import types

    def datum(length: int) -> Any:
        ids = [(7 * at) % 100 for at in range(length)]
        inputs = {"target_tokens": ids, "weights": [1.0] * length}
        return types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)

    large, small = (service(url).create_lora_training_client(base_model=NAME, rank=8, seed=seed).result() for seed in (1, 2))
    budgets = 4
    many = [datum(256)] * (budgets * _BUDGET // 256)
    times = []
    for _attempt in range(3):
        started = time.perf_counter()
        large.forward_backward(many, "cross_entropy").result()
        times.append((time.perf_counter() - started) / budgets)
    waits, over = [], threading.Event()

    def load() -> None:
        while not over.is_set():
            large.forward_backward(many, "cross_entropy").result()

    thread = threading.Thread(target=load)
    thread.start()
    for _attempt in range(20):
        started = time.perf_counter()
        small.forward_backward([datum(16)], "cross_entropy").result()
        waits.append(time.perf_counter() - started)
    over.set()
    thread.join()
    one_pass, p95 = statistics.median(times), sorted(waits)[18]
    return {
        "seconds_of_one_budget": round(one_pass, 3),
        "p95_wait_seconds": round(p95, 3),
        "p95_wait_in_passes": round(p95 / one_pass, 2),
    }


def idle(_: str, __: Path) -> dict[str, Any]:
    """Per cent of a core that a server takes which nobody asks anything: its process, and all that it has started."""
    # Clients of other parts send heartbeats and telemetry for as long as they live.
    close_services()
    (server,) = psutil.Process().children()
    tree = [server, *server.children(recursive=True)]

    def used(processes: Sequence[psutil.Process]) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in processes)

    seconds, before = 20.0, (used([server]), used(tree))
    time.sleep(seconds)
    of_server, of_all = (100 * (used(each) - past) / seconds for each, past in zip(([server], tree), before, strict=True))
    return {"seconds": seconds, "per_cent_of_a_core": round(of_server, 2), "with_ray_and_engine": round(of_all, 2)}


def log_probs_smollm2(url: str, _: Path) -> dict[str, Any]:
    """How far float32 is from float64 on tokens that SmolLM2 samples: the engine, the trainer, and Transformers.

    ``mean_of_a_step`` is what the recipe's KL (v1) would be between two of them that do not err together: the deviation of
    the mean over the 12 prompts of a step.
    """
    from tinker import types
    from tinker_cookbook import renderers
    from transformers import AutoModelForCausalLM

    model, generator, prompts, answers = str(smollm2().resolve()), random.Random(1), 24, 8
    training = service(url).create_lora_training_client(base_model=model, rank=_RANK, seed=0).result()
    sampler = service(url).create_sampling_client(base_model=model).result()
    renderer = renderers.get_renderer(_OF_SMOLLM2, training.get_tokenizer())
    found: dict[str, list[Tensor]] = {name: [] for name in ("engine", "trainer", "transformers")}
    wide, narrow = (AutoModelForCausalLM.from_pretrained(model, dtype=dtype) for dtype in (torch.float64, torch.float32))
    for number in range(prompts):
        prompt = renderer.build_generation_prompt(sums(generator)[:3])
        params = types.SamplingParams(max_tokens=5, seed=number)
        sampled = sampler.sample(prompt, answers, params).result().sequences
        ids = [torch.tensor([*prompt.to_ints(), *each.tokens]) for each in sampled]
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(each[:-1].tolist()),
                loss_fn_inputs={"target_tokens": each[1:].tolist(), "weights": [1.0] * (len(each) - 1)},
            )
            for each in ids
        ]
        outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
        for own, sequence, output in zip(ids, sampled, outputs, strict=True):
            count = len(sequence.tokens)
            exact, plain = (_of_last(each, own, count) for each in (wide, narrow))
            theirs = torch.tensor(sequence.logprobs), output["logprobs"].to_torch()[-count:], plain
            for name, log_probs in zip(found, theirs, strict=True):
                found[name].append(log_probs.double() - exact)
    return {"tokens": sum(map(len, found["engine"])), **{name: _errors(each, answers) for name, each in found.items()}}


@torch.no_grad()
def _of_last(model: Any, ids: Tensor, count: int) -> Tensor:
    """Log-probs of the last tokens; normalised in float64, because torch's own sum over so many words errs."""
    logits: Tensor = model(ids[None]).logits[0, -count - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, ids[-count:, None]).squeeze(1)


def _errors(errors: Sequence[Tensor], answers: int) -> dict[str, float]:
    whole = torch.cat(list(errors))
    by_prompt = torch.stack([torch.cat(list(errors[at : at + answers])).mean() for at in range(0, len(errors), answers)])
    root = whole.square().mean().sqrt()
    return {"mean": float(whole.mean()), "root_mean_square": float(root), "mean_of_a_step": float(by_prompt.std() / 12**0.5)}


def _vocabulary(url: str) -> int:
    return len(service(url).create_sampling_client(base_model=NAME).result().get_tokenizer())


def fuzz(url: str, _: Path) -> dict[str, Any]:
    """Requests that are almost right, over JSON and protobuf; then a client trains as if there had been none."""
    wire = Wire(url)
    session, run = wire.run(NAME)
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = wire.post("create_sampling_session", **asked).json()["sampling_session_id"]
    vocabulary = _vocabulary(url)
    before = train(url, NAME, Client(0, RANKS[0], LENGTHS[0]), vocabulary)
    seen = send(url, session, run, FUZZED, seed=1, sampler=sampler)
    after = train(url, NAME, Client(0, RANKS[0], LENGTHS[0]), vocabulary)
    by_status = {str(status): count for status, count in sorted(seen.items())}
    return {"requests": FUZZED, "answers_by_status": by_status, "a_client_after_it_has_the_same_bits": before.equals(after)}


def chaos(served: Served, folder: Path, kills: int) -> dict[str, Any]:
    """Kills under load, on top of those of earlier calls in this folder."""
    kept = folder / "chaos.jsonl"
    run_chaos(served, kills, kept, lambda line: print(line, flush=True))
    return summary(kept)


PARTS: Mapping[str, Callable[[str, Path], dict[str, Any]]] = {
    "throughput": throughput,
    "fairness": fairness,
    "idle": idle,
    "fuzz": fuzz,
    "log_probs_smollm2": log_probs_smollm2,
}
OTHER_MODELS: Mapping[str, Callable[[], Path]] = {
    "log_probs_smollm2": smollm2,
    **{name: recipe["model"] for name, recipe in RECIPES.items() if "model" in recipe},
}
"""Part -> what makes the directory of its model, where that is not the folder's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*RECIPES, *PARTS, "chaos"], help="default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/tinker"), help="model and data, made once, and logs")
    parser.add_argument("--warm-start-steps", type=int, default=WARM_START, help=f"of the model (default {WARM_START})")
    parser.add_argument("--runs", type=int, default=1, help="of each recipe; adapters begin with another seed each")
    parser.add_argument("--steps", type=int, help=f"of each recipe (default {STEPS})")
    parser.add_argument("--kills", type=int, default=30, help="of chaos in this call; more calls add to them (default 30)")
    arguments = parser.parse_args()
    cookbook()
    folder = arguments.folder.resolve()
    if not (folder / "names.json").is_file():
        losses = write_names(folder, 0, arguments.warm_start_steps)
        kept = {"steps": len(losses), "loss": statistics.mean(losses[-20:]), "conversations": SHARES}
        (folder / "names.json").write_text(json.dumps(kept), encoding="utf-8")
    # Hugging Face's libraries and the SDK find the tokenizer by its name from here.
    os.environ["PYTHONPATH"] = str(ROOT)
    os.chdir(folder)
    parts = {name: recipe_part(name, arguments.runs, arguments.steps) for name in RECIPES} | dict(PARTS)
    chosen = arguments.parts or [*parts, "chaos"]
    signal.signal(signal.SIGTERM, _leave)
    for other in (None, smollm2):
        names = [name for name in chosen if name != "chaos" and OTHER_MODELS.get(name) is other]
        if names:
            with serving(server_command(folder, other() if other else None)) as served:
                for name in names:
                    record({name: {**parts[name](served.url, folder), "machine": machine()}})
    if "chaos" in chosen:
        with serving([*server_command(folder), "--restart", "--keep-results", "86400"]) as served:
            record({"chaos": {**chaos(served, folder, arguments.kills), "machine": machine()}})


def _leave(*_: object) -> None:
    """Ends server and recipe; threads of clients would wait for a server that is gone."""
    for child in psutil.Process().children():
        child.terminate()
    os._exit(143)


def record(found: Mapping[str, Any]) -> None:
    """Writes sections, and which have never been written."""
    missing = [name for name in (*RECIPES, *PARTS, "chaos") if name not in {**read_result("tinker"), **found}]
    data = "made here; No Robots and GSM8K in name and form alone"
    model = "the demo's Qwen3 with a head of its own; sections without a warm_start have the one that is named here"
    before = read_result("tinker").get("model", {})
    update_result("tinker", {**found, "model": {**before, "model": model}, "data": data, "not_run": missing})


if __name__ == "__main__":
    main()
