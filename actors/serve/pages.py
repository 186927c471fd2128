"""What whoever runs the server looks at: a page in the browser, and Prometheus' metrics. Neither needs a key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, PlainTextResponse

from actors.serve.server import ServedModel, Server, shown_time
from actors.serve.store import CHECKPOINTS, RUNS

_OF_SERVER: Mapping[str, tuple[str, str, Callable[[Server], float]]] = {
    "uptime_seconds": ("gauge", "seconds since the start", lambda server: time.time() - server.started),
    "checkpoints": ("gauge", "named checkpoints", lambda server: len(server.store.rows(CHECKPOINTS))),
    "failed_requests_total": ("counter", "requests that failed through their futures", lambda server: server.futures.errors),
}
"""Name of a metric -> kind, help and value."""
_OF_MODEL: Mapping[str, tuple[str, str, Callable[[ServedModel], float]]] = {
    "training_up": ("gauge", "whether training works", lambda model: not model.training.failed),
    "engines": ("gauge", "engines that are alive", lambda model: model.sampling.engines["alive"]),
    "runs": ("gauge", "live runs", lambda model: len(model.training.waiting)),
    "waiting_requests": ("gauge", "training requests that wait", lambda model: sum(model.training.waiting.values())),
    "passes_total": ("counter", "passes over the model", lambda model: model.training.passes),
    "trained_tokens_total": ("counter", "tokens in passes", lambda model: model.training.tokens),
    "steps_total": ("counter", "optimizer steps", lambda model: model.training.steps),
    "open_samples": ("gauge", "responses being sampled", lambda model: model.sampling.open),
    "samples_total": ("counter", "responses sampled", lambda model: model.sampling.samples),
    "sampled_tokens_total": ("counter", "tokens sampled", lambda model: model.sampling.tokens),
    "pushed_adapters": ("gauge", "adapters in the engines", lambda model: model.sampling.pushed),
}
_STYLE = """
:root{color-scheme:light dark;--line:#8885;--quiet:light-dark(#666,#aaa)}
body{font:15px/1.4 system-ui,sans-serif;margin:2em auto;padding:0 1.5em;max-width:64em}
h1{font-size:1.5em;margin:0}h2{font-size:1.1em;margin:1.6em 0 .3em}p{margin:.4em 0}
.quiet{color:var(--quiet)}.lost{color:light-dark(#b00,#f77);font-weight:bold}
div{overflow-x:auto}table{border-collapse:collapse}
td,th{padding:.25em 1.5em .25em 0;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td{font-variant-numeric:tabular-nums}th{font-weight:600;vertical-align:bottom}
.models th{white-space:normal;overflow-wrap:anywhere;min-width:6em;max-width:18em}
.models td:first-child{color:var(--quiet);white-space:normal;min-width:8em}
td:first-child,th:first-child,.runs :is(td,th):nth-child(2){text-align:left}
.runs td:nth-child(-n+2){white-space:normal;overflow-wrap:anywhere;min-width:9em}
"""


def add_pages(app: FastAPI, server: Server) -> None:
    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        lines: list[str] = []
        for name, (kind, help, value) in _OF_SERVER.items():
            lines += _metric(name, kind, help, {"": value(server)})
        for name, (kind, help, of) in _OF_MODEL.items():
            lines += _metric(name, kind, help, {_label(each): of(model) for each, model in server.models.items()})
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    @app.get("/")
    def status() -> HTMLResponse:
        lost = f"<p class=lost>{escape(server.failed)}</p>" if server.failed else ""
        facts = (
            f"up for {shown_seconds(time.time() - server.started)}, since {shown_time(server.started)}",
            f"failed requests: {server.futures.errors:,}",
            f"named checkpoints: {len(server.store.rows(CHECKPOINTS)):,}",
        )
        page = [
            "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5>",
            "<meta name=viewport content='width=device-width'><title>rl-backend serve</title>",
            f"<style>{_STYLE}</style><h1>rl-backend serve</h1>{lost}",
            f"<p class=quiet>{' · '.join(facts)}</p>",
            "<h2>Models</h2>",
            _table("models", ("", *server.models), _of_models(server)),
            "<h2>Runs</h2>",
            _runs(server),
        ]
        return HTMLResponse("".join(page))


def _of_models(server: Server) -> list[tuple[str, ...]]:
    models = list(server.models.values())
    speeds = [server.speeds(model) for model in models]

    def row(what: str, of: Callable[[ServedModel], str]) -> tuple[str, ...]:
        return what, *(of(model) for model in models)

    def counts(what: str, metric: str) -> tuple[str, ...]:
        return row(what, lambda model: f"{_OF_MODEL[metric][2](model):,.0f}")

    return [
        row("training", lambda model: "ended" if model.training.failed else "works"),
        counts("runs", "runs"),
        counts("training requests waiting", "waiting_requests"),
        ("trained tokens a second, last minute", *(f"{found['trained']:,.1f}" for found in speeds)),
        counts("trained tokens", "trained_tokens_total"),
        counts("passes", "passes_total"),
        counts("optimizer steps", "steps_total"),
        row("engines", lambda model: _engines(model.sampling.engines)),
        counts("responses being sampled", "open_samples"),
        ("sampled tokens a second, last minute", *(f"{found['sampled']:,.1f}" for found in speeds)),
        counts("sampled tokens", "sampled_tokens_total"),
        counts("responses", "samples_total"),
        counts("adapters in the engines", "pushed_adapters"),
    ]


def _engines(found: Mapping[str, int]) -> str:
    return f"{found['alive']}" + (f", {found['lost']} lost" if found["lost"] else "")


def _runs(server: Server) -> str:
    # Whoever sees the page need not have a key, and a key sees its own runs alone.
    if server.store.has_keys:
        return "<p class=quiet>Not listed: this server has keys, and a key sees its own runs alone.</p>"
    rows = []
    for name, model in server.models.items():
        for run, waiting in model.training.waiting.items():
            found = server.store.get(RUNS, id=run) or {"lora": {}}
            rows.append((run, name, found["lora"].get("rank", "-"), model.training.steps_of(run), waiting))
    if not rows:
        return "<p class=quiet>None is live. Clients create one with create_lora_training_client.</p>"
    return _table("runs", ("run", "model", "rank", "steps", "requests waiting"), rows)


def shown_seconds(seconds: float) -> str:
    """``2 d 3 h``, ``3 h 10 min``, ``10 min 5 s`` or ``5 s``."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    parts = [(int(seconds) // size % most, unit) for (unit, size), most in zip(units, (10**9, 24, 60, 60), strict=True)]
    first = next((at for at, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def _metric(name: str, kind: str, help: str, values: Mapping[str, float]) -> list[str]:
    """Lines of Prometheus' text format; values by their labels."""
    full = f"rl_backend_serve_{name}"
    found = [f"{full}{label} {value:.15g}" for label, value in values.items()]
    return [f"# HELP {full} {help}", f"# TYPE {full} {kind}", *found]


def _label(model: str) -> str:
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{model="{escaped}"}}'


def _table(kind: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [f"<tr>{''.join(f'<th>{escape(each)}' for each in head)}"]
    lines += [f"<tr>{''.join(f'<td>{escape(str(each))}' for each in row)}" for row in rows]
    return f"<div><table class={kind}>{''.join(lines)}</table></div>"
