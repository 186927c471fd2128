"""What is downloaded of a name on the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import huggingface_hub
import pytest

from rl_backend.contracts import ConfigError
from rl_backend.data import hub
from rl_backend.data.hub import local_model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Repository and options of every download."""
    found: list[tuple[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        found.append((repository, options))
        if repository == "nobody/nothing":
            raise OSError("no such repository")
        return f"/downloaded/{repository}/{options.get('revision')}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub._downloaded.cache_clear()
    yield found
    hub._downloaded.cache_clear()


def test_a_model_is_downloaded_once_at_the_revision_that_is_named(asked: list[tuple[str, Any]]) -> None:
    assert local_model("Qwen/Qwen3-0.6B@v1.2/x") == "/downloaded/Qwen/Qwen3-0.6B/v1.2/x"
    assert local_model("Qwen/Qwen3-0.6B") == "/downloaded/Qwen/Qwen3-0.6B/None"
    assert local_model("Qwen/Qwen3-0.6B@v1.2/x") == "/downloaded/Qwen/Qwen3-0.6B/v1.2/x"
    assert [(repository, options["revision"]) for repository, options in asked] == [
        ("Qwen/Qwen3-0.6B", "v1.2/x"),
        ("Qwen/Qwen3-0.6B", None),
    ]
    # Weights in safetensors alone, and nothing of subfolders.
    assert "*.safetensors" in asked[0][1]["allow_patterns"] and "*.bin" not in asked[0][1]["allow_patterns"]
    assert "*/*" in asked[0][1]["ignore_patterns"]


def test_a_model_that_cannot_be_downloaded_is_named_with_its_revision(asked: list[tuple[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"^reference='nobody/nothing@main': "):
        local_model("nobody/nothing@main", field="reference")
