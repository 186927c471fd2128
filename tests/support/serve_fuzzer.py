"""Requests to a server that are almost right: bodies of every route with fields and bytes changed at random."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import httpx
import zstandard

from actors.serve.wire import Datum, PassRequest, write_request

_JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 2**31, 2**63, 2**80, 0.5, 1e308, "", "x", "tinker://a/b/c", "../../etc", "\x00", "é" * 300),
    *([], [1], [[]], {}, {"type": "adamw"}, {"rank": -1}, {"rank": "x"}, {"chunks": 3}, {"chunks": [{"tokens": ["a"]}]}),
)
_TREES = ('{"a":' * 5000, "[" * 100_000, "", "null", "3", '{"a": NaN}', '{"seq_id": 1e999}', '"', "\xff\xfe")


def fuzz(
    url: str, session: str, run: str, count: int, seed: int, key: str = "tml-local", sampler: str = "s"
) -> Counter[int]:
    """Sends so many requests, and counts the answers by status.

    Args:
        session, run, sampler: known to the server, so that requests come as far as they can.
    """
    generator = random.Random(seed)
    bodies = _bodies(session, run, sampler)
    seen: Counter[int] = Counter()
    with httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60) as client:
        for _ in range(count):
            route = generator.choice([*bodies, "forward_backward", "forward_backward", "lists"])
            if route == "forward_backward":
                sent = _data(generator, run)
                headers = {"Content-Encoding": "zstd"} if generator.random() < 0.3 else {}
                if headers and generator.random() < 0.7:
                    sent = zstandard.compress(sent)
                answer = client.post("/api/v1/forward_backward", content=sent, headers=headers)
            elif route == "lists":
                answer = client.request(*_listed(generator, run))
            else:
                answer = client.post(f"/api/v1/{route}", content=_text(generator, bodies[route]))
            seen[answer.status_code] += 1
    return seen


def _bodies(session: str, run: str, sampler: str) -> dict[str, dict[str, Any]]:
    of_run = {"model_id": run, "seq_id": 1}
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}
    few = {"max_tokens": 2}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    return {
        "create_session": {"tags": [], "sdk_version": "0.38.0"},
        "session_heartbeat": {"session_id": session},
        "create_model": {"session_id": session, "model_seq_id": 90, "base_model": "m", "lora_config": {"rank": 2}},
        "get_info": {"model_id": run},
        "optim_step": {**of_run, "adam_params": adam},
        "save_weights": {**of_run, "path": "a"},
        "save_weights_for_sampler": {**of_run, "path": "a"},
        "save_weights_external": {**of_run, "path": "a", "age_encryption_recipients": ["age1x"]},
        "load_weights": {**of_run, "path": f"tinker://{run}/weights/a", "optimizer": True},
        "weights_info": {"tinker_path": f"tinker://{run}/weights/a"},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 1, "model_path": "tinker://a/b/c"},
        "asample": {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "num_samples": 2, "sampling_params": few},
        "retrieve_future": {"request_id": "x", "allow_metadata_only": True},
        "retrieve_futures": {"target": {"sampling_session_id": "s", "cloned_sampler_id": 1}, "prev_cursor": 0, "timeout": 0},
        "cancel_future": {"request_id": "x"},
        "join_sampling_session": {"sampling_session_id": sampler},
        "telemetry": {"events": []},
    }


def _text(generator: random.Random, body: dict[str, Any]) -> bytes:
    if generator.random() < 0.1:
        return generator.choice(_TREES).encode("latin-1")
    changed = dict(body)
    # Numbers far ahead, so that nothing that is sent here is what the run waits for.
    if "seq_id" in changed:
        changed["seq_id"] = generator.randrange(10**6, 10**9)
    for _ in range(generator.randint(1, 2)):
        name = generator.choice([*changed, "unheard_of"])
        if generator.random() < 0.3:
            changed.pop(name, None)
        else:
            changed[name] = generator.choice(_JUNK)
    text = json.dumps(changed).encode()
    return _flipped(generator, text) if generator.random() < 0.2 else text


def _data(generator: random.Random, run: str) -> bytes:
    import numpy as np

    ids = np.arange(1, 5)
    inputs = {"target_tokens": ids, "weights": np.ones(4, np.float32)}
    seq_id = generator.randrange(10**6, 10**9)
    body = write_request(PassRequest(run, seq_id, [Datum(ids, inputs)] * 2, "cross_entropy", {"beta": 1.0}, False))
    return _flipped(generator, body)


def _flipped(generator: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(generator.randint(1, 6)):
        at = generator.randrange(len(changed) + 1)
        what = generator.random()
        if what < 0.5 and at < len(changed):
            changed[at] = generator.randrange(256)
        elif what < 0.8:
            changed[at:at] = generator.randbytes(generator.randint(1, 9))
        else:
            del changed[at : at + generator.randint(1, 30)]
    return bytes(changed)


def _listed(generator: random.Random, run: str) -> tuple[str, str]:
    name = generator.choice((run, "x", "%00", "..%2f..", "a" * 5000, "%ff"))
    kind = generator.choice(("weights", "sampler_weights", "x"))
    method, path = generator.choice(
        (
            ("GET", f"training_runs?limit={generator.choice((1, -1, 10**30, 'x'))}&offset={generator.choice((0, 10**12))}"),
            ("GET", f"training_runs/{name}"),
            ("GET", f"training_runs/{name}/checkpoints"),
            ("DELETE", f"training_runs/{name}/checkpoints/{kind}/{name}"),
            ("PUT", f"training_runs/{name}/checkpoints/{kind}/{name}/ttl"),
            ("GET", f"sessions/{name}"),
            ("GET", f"samplers/{name}"),
            ("POST", f"sessions/{name}/finish"),
        )
    )
    return method, f"/api/v1/{path}"
