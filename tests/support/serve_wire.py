"""Requests to a server without the SDK."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import zstandard

from actors.serve.wire import Datum, PassRequest, write_request

IDS = np.array([5, 9, 3, 7, 21])


def datum() -> Datum:
    return Datum(IDS, {"target_tokens": np.roll(IDS, -1), "weights": np.ones(5, np.float32)})


class Wire:
    """A key's requests to the routes of Tinker's API."""

    def __init__(self, url: str, key: str = "tml-local") -> None:
        self._client = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=60)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self._client.post(f"/{route}", json=body)

    def get(self, route: str) -> httpx.Response:
        return self._client.get(f"/{route}")

    def request(self, method: str, route: str, **options: Any) -> httpx.Response:
        return self._client.request(method, f"/{route}", **options)

    def run(self, model: Path | str) -> tuple[str, str]:
        """A session and a run in it, which is there."""
        session = self.post("create_session").json()["session_id"]
        made = self.post(
            "create_model", session_id=session, model_seq_id=0, base_model=str(model), lora_config={"rank": 2, "seed": 1}
        ).json()
        assert "error" not in self.answer(made).json()
        return session, made["model_id"]

    def data(
        self, run: str, seq_id: int, *, rows: int = 1, data: Sequence[Datum] | None = None, zstd: bool = False
    ) -> httpx.Response:
        sent = [datum()] * rows if data is None else data
        body = write_request(PassRequest(run, seq_id, sent, "cross_entropy", {}, False))
        return self.raw(zstandard.compress(body) if zstd else body, zstd=zstd)

    def raw(self, body: bytes, *, zstd: bool = False) -> httpx.Response:
        return self._client.post("/forward_backward", content=body, headers={"Content-Encoding": "zstd"} if zstd else {})

    def answer(self, accepted: httpx.Response | dict[str, Any]) -> httpx.Response:
        found = accepted if isinstance(accepted, dict) else accepted.json()
        return self.post("retrieve_future", request_id=found["request_id"])

    def close(self) -> None:
        self._client.close()
