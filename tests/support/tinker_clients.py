"""Clients of Tinker's SDK with fixed data, each with a rank, a rate and a loss of its own, alone or at one time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

KEY = "tml-local"
_LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
_OPTIONS = {"dro": {"beta": 0.05}, "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}}


@dataclass(frozen=True)
class Client:
    """What one client does: ``steps`` of a pass over ``rows`` rows of about ``length`` tokens and an optimizer step."""

    number: int
    rank: int
    length: int
    rows: int = 4
    steps: int = 3

    @property
    def loss(self) -> str:
        return _LOSSES[self.number % len(_LOSSES)]


@dataclass(frozen=True)
class Trained:
    """Of one client: log-probs of every row in every step, then after the last one; losses, gradient norms and seconds."""

    log_probs: Sequence[np.ndarray]
    losses: Sequence[float]
    grad_norms: Sequence[float]
    seconds: float

    def equals(self, other: Trained) -> bool:
        """Bit for bit."""
        arrays = zip(self.log_probs, other.log_probs, strict=True)
        same = all(np.array_equal(one.view(np.int32), two.view(np.int32)) for one, two in arrays)
        return same and (self.losses, self.grad_norms) == (other.losses, other.grad_norms)


_SERVICES: list[Any] = []


def service(url: str, key: str = KEY) -> Any:
    """A client of the SDK, until :func:`close_services`."""
    import tinker

    _SERVICES.append(tinker.ServiceClient(base_url=url, api_key=key))
    return _SERVICES[-1]


def close_services() -> None:
    """Ends the threads of all clients, which else send heartbeats to servers that are gone for the rest of the process."""
    while _SERVICES:
        _SERVICES.pop().holder.close()


def train(url: str, model: str, client: Client, vocabulary: int, ready: Callable[[], object] = lambda: None) -> Trained:
    """A new run of the client; ``ready`` is called between its creation, which no seconds count, and its first pass."""
    from tinker import types

    training = service(url).create_lora_training_client(base_model=model, rank=client.rank, seed=client.number).result()
    adam = types.AdamParams(learning_rate=1e-3 * (1 + client.number))
    log_probs: list[np.ndarray] = []
    losses, grad_norms = [], []
    ready()
    started = time.perf_counter()
    for step in range(client.steps):
        data = [_datum(client, vocabulary, step, row) for row in range(client.rows)]
        passed = training.forward_backward(data, client.loss, _OPTIONS.get(client.loss))
        stepped = training.optim_step(adam)
        found = passed.result()
        losses.append(found.metrics["loss:sum"])
        log_probs += [np.array(each["logprobs"].data, np.float32) for each in found.loss_fn_outputs]
        grad_norms.append(stepped.result().metrics["grad_norm"])
    seconds = time.perf_counter() - started
    last = training.forward([_datum(client, vocabulary, 0, row) for row in range(client.rows)], client.loss).result()
    log_probs += [np.array(each["logprobs"].data, np.float32) for each in last.loss_fn_outputs]
    return Trained(log_probs, losses, grad_norms, seconds)


def train_together(url: str, model: str, clients: Sequence[Client], vocabulary: int) -> list[Trained]:
    return at_one_time(clients, lambda client, ready: train(url, model, client, vocabulary, ready))


def at_one_time[T](clients: Sequence[Client], work: Callable[[Client, Callable[[], object]], T]) -> list[T]:
    """What each client does, in a thread of its own: they wait for each other where they call what they are given."""
    all_ready = threading.Barrier(len(clients), timeout=120)
    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(lambda client: work(client, all_ready.wait), clients))


@dataclass(frozen=True)
class Sampled:
    """Of one client: tokens and log-probs of every sample, in their order."""

    tokens: Sequence[Sequence[int]]
    log_probs: np.ndarray


def reinforce(
    url: str, model: str, client: Client, prompt: Sequence[int], ready: Callable[[], object] = lambda: None
) -> Sampled:
    """A new run of the client, each step of which trains on ``rows`` samples of the weights after the step before."""
    from tinker import types

    training = service(url).create_lora_training_client(base_model=model, rank=client.rank, seed=client.number).result()
    adam = types.AdamParams(learning_rate=1e-3 * (1 + client.number))
    skipped = [0.0] * (len(prompt) - 1)
    tokens: list[list[int]] = []
    log_probs: list[float] = []
    ready()
    for step in range(client.steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        asked = types.SamplingParams(max_tokens=client.length, seed=1000 * client.number + step)
        start = types.ModelInput.from_ints(list(prompt))
        found = sampler.sample(start, num_samples=client.rows, sampling_params=asked).result().sequences
        data = []
        for number, each in enumerate(found):
            tokens.append(list(each.tokens))
            log_probs += each.logprobs
            # Any reward serves that unequal samples tell apart.
            advantage = 1.0 if number % 2 else -0.5
            inputs = {
                "target_tokens": [*prompt[1:], *each.tokens],
                "logprobs": [*skipped, *each.logprobs],
                "advantages": [*skipped, *([advantage] * len(each.tokens))],
            }
            whole = types.ModelInput.from_ints([*prompt, *each.tokens[:-1]])
            data.append(types.Datum(model_input=whole, loss_fn_inputs=inputs))
        training.forward_backward(data, "importance_sampling")
        training.optim_step(adam).result()
    return Sampled(tokens, np.array(log_probs, np.float32))


def _datum(client: Client, vocabulary: int, step: int, row: int) -> Any:
    from tinker import types

    generator = random.Random(f"{client.number} {step} {row}")
    # Unequal lengths, and the same number of tokens for every client.
    length = client.length + (row % 2 * 2 - 1) * (client.length // 4)
    ids = [generator.randrange(vocabulary) for _ in range(length + 1)]
    columns: dict[str, list[float]] = {}
    if client.loss == "cross_entropy":
        columns["weights"] = [generator.choice((0.0, 0.5, 1.0)) for _ in range(length)]
    else:
        columns["logprobs"] = [-4.0 - generator.random() for _ in range(length)]
        columns["advantages"] = [generator.choice((-1.0, 0.0, 0.5)) for _ in range(length)]
    if client.loss == "gspo":
        columns["sequence_ratio_mask"] = [float(at > 2) for at in range(length)]
    inputs = types.ModelInput.from_ints(ids[:-1])
    return types.Datum(model_input=inputs, loss_fn_inputs={"target_tokens": ids[1:], **columns})
