"""Every public method of the clients of Tinker's SDK, called once against a server, and its twin with ``_async`` once.

``python -m tests.support.sdk_walk URL MODEL`` in a process of its own, where some version of the SDK can be imported,
prints a JSON object: the version, what was called, and the public methods that were not.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

NOT_SERVED: Mapping[str, str] = {
    "copy_weights": "copies belong to projects, and this server has keys in their place",
    "assign_session_project": "there are no projects",
    "search_sessions": "marked experimental, and searches projects",
    "export_session_trace": "the operator has the server's own log and metrics",
    "whoami": "reads a token of the hosted service's sign-in; asks no server",
    "get_audit_log": "of an organisation's administrator",
    "get_billing_usage": "nothing is billed",
    "get_current_checkpoint_storage_usage": "nothing is billed; --disk-gib bounds what a key stores",
    "get_checkpoint_archive_url": "an archive that later versions of the SDK replace by external weights",
    "get_checkpoint_archive_url_from_tinker_path": "the same",
}
"""Method -> why it is not served."""
IDS = [5, 9, 3, 7, 21]


type Given = tuple[tuple[Any, ...], dict[str, Any]]


def given(*positional: Any, **named: Any) -> Given:
    return positional, named


class Walk:
    """The clients, and arguments for each of their methods."""

    def __init__(self, url: str, model: str) -> None:
        import tinker

        self.types, self.model = tinker.types, model
        self.service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        self.training = done(self.service.create_lora_training_client(base_model=model, rank=2, seed=1))
        self.sampler = done(self.service.create_sampling_client(base_model=model))
        self.rest = self.service.create_rest_client()
        self.run = done(self.training.get_info()).model_id
        self._numbers = itertools.count()
        self.state = self._save("save_state")
        self.holder = self.service.holder

    def calls(self) -> Mapping[Any, Mapping[str, Callable[[], Given]]]:
        """Client -> method -> arguments, made anew for each call."""
        types, data, none = self.types, [self._datum()], given
        prompt, few = types.ModelInput.from_ints(IDS), types.SamplingParams(max_tokens=2)
        adam = types.AdamParams(learning_rate=1e-3)
        lora, of_base = {"base_model": self.model, "rank": 2}, {"base_model": self.model}
        return {
            self.service: {
                "get_server_capabilities": none,
                "create_lora_training_client": lambda: given(**lora),
                "create_training_client_from_state": lambda: given(self.state),
                "create_training_client_from_state_with_optimizer": lambda: given(self.state),
                "create_sampling_client": lambda: given(**of_base),
                "create_custom_loss": lambda: given(_custom, {"logprobs": 1}),
                "create_rest_client": none,
                "get_console_url": none,
                "get_telemetry": none,
            },
            self.training: {
                "forward": lambda: given(data, "cross_entropy"),
                "forward_backward": lambda: given(data, "cross_entropy"),
                "forward_backward_custom": lambda: given(data, _of_all),
                "optim_step": lambda: self._after_a_pass(data, adam),
                "save_state": lambda: given(self._name()),
                "load_state": lambda: given(self.state),
                "load_state_with_optimizer": lambda: given(self.state),
                "save_weights_for_sampler": lambda: given(self._name()),
                "save_weights_external": lambda: given(self._name()),
                "save_weights_and_get_sampling_client": none,
                "save_weights_and_get_sampling_client_submit": none,
                "create_sampling_client": lambda: given(self._save("save_weights_for_sampler")),
                "get_info": none,
                "get_tokenizer": none,
                "get_console_url": none,
                "get_telemetry": none,
            },
            self.sampler: {
                "create": lambda: given(self.holder, **of_base),
                "sample": lambda: given(prompt, 1, few),
                "compute_logprobs": lambda: given(prompt),
                "get_tokenizer": none,
                "get_base_model": none,
                "get_sampler_handle": none,
                "from_sampler_handle": lambda: given(self.sampler.get_sampler_handle(), api_key="tml-local"),
                "on_queue_state_change": lambda: given(_active(), None),
                "get_telemetry": none,
            },
            self.rest: {
                "get_server_capabilities": none,
                "get_training_run": lambda: given(self.run),
                "get_training_run_by_tinker_path": lambda: given(self.state),
                "get_weights_info_by_tinker_path": lambda: given(self.state),
                "list_training_runs": none,
                "list_checkpoints": lambda: given(self.run),
                "list_user_checkpoints": none,
                "get_external_weights_urls": lambda: given(self._save("save_weights_external")),
                "delete_checkpoint": lambda: given(self.run, self._save("save_state").split("/", 3)[3]),
                "delete_checkpoint_from_tinker_path": lambda: given(self._save("save_state")),
                "publish_checkpoint_from_tinker_path": lambda: given(self.state),
                "unpublish_checkpoint_from_tinker_path": lambda: given(self.state),
                "set_checkpoint_ttl_from_tinker_path": lambda: given(self.state, 3600),
                "get_session": lambda: given(self.run.partition(":")[0]),
                "list_sessions": none,
                "get_sampler": lambda: given(self._sampler()),
                "get_telemetry": none,
            },
        }

    def _name(self) -> str:
        return f"walk{next(self._numbers)}"

    def _save(self, method: str) -> str:
        return str(done(getattr(self.training, method)(self._name())).path)

    def _sampler(self) -> str:
        return str(self.sampler._sampling_session_id)

    def _after_a_pass(self, data: Any, adam: Any) -> Given:
        done(self.training.forward_backward(data, "cross_entropy"))
        return given(adam)

    def _datum(self) -> Any:
        inputs = {"target_tokens": [*IDS[1:], 4], "weights": [1.0] * len(IDS)}
        return self.types.Datum(model_input=self.types.ModelInput.from_ints(IDS), loss_fn_inputs=inputs)


def _custom(logprobs: Any) -> Any:
    loss = -logprobs.sum()
    return loss, {"custom/loss:sum": loss}


def _of_all(data: Any, logprobs: Any) -> Any:
    loss = -sum(each.sum() for each in logprobs)
    return loss, {"loss": float(loss)}


def _active() -> Any:
    from tinker.lib.api_future_impl import QueueState

    return QueueState.ACTIVE


def done(value: Any) -> Any:
    """What comes of a call, a future or none."""
    return value.result() if hasattr(value, "result") else value


async def awaited(value: Any) -> Any:
    while inspect.isawaitable(value):
        value = await value
    return value


def public(client: Any) -> set[str]:
    members = inspect.getmembers(type(client), lambda member: inspect.isfunction(member))
    return {name for name, _ in members if not name.startswith("_")}


def walk(url: str, model: str) -> dict[str, Any]:
    clients = Walk(url, model)
    called, left = list[str](), set[str]()
    for client, methods in clients.calls().items():
        kind, there = type(client).__name__, public(client)
        for name in sorted(there - {"close"}):
            plain = name.removesuffix("_async")
            if plain not in methods:
                if plain not in NOT_SERVED:
                    left.add(f"{kind}.{name}")
                continue
            positional, named = methods[plain]()
            made = getattr(client, name)(*positional, **named)
            asyncio.run(awaited(made)) if name.endswith("_async") else done(made)
            called.append(f"{kind}.{name}")
    if "close" in public(clients.service):
        done(clients.service.close("success"))
        called.append("ServiceClient.close")
    return {"version": version("tinker"), "called": called, "left": sorted(left)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(json.dumps(walk(*sys.argv[1:])) + "\n")
