"""Every public method of two versions of Tinker's SDK, against the real routes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.libraries import ROOT, sdk_path
from tests.support.models import write_tiny_qwen3
from tests.support.sdk_walk import NOT_SERVED
from tests.support.served import served


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server whose model has a tokenizer, which the SDK loads."""
    folder = write_tiny_qwen3(tmp_path_factory.mktemp("talking") / "model", tie_word_embeddings=False, vocab_size=512)
    chat_tokenizer(CHATML).save_pretrained(folder)
    with served(folder, tmp_path_factory.mktemp("state")) as found:
        found.model = folder
        yield found


@pytest.mark.shows("server: every public method of the SDK 0.38, and of 0.30, is answered, or listed with a reason")
@pytest.mark.parametrize("older", [False, pytest.param(True, marks=pytest.mark.long)], ids=["0.38", "0.30"])
def test_every_public_method_of_the_sdk_is_answered_or_listed_with_a_reason(older: bool, talking: SimpleNamespace) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), sdk_path(older))),
        "TINKER_API_KEY": "tml-local",
        "TINKER_BASE_URL": talking.url,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "tests.support.sdk_walk", talking.url, str(talking.model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == ("0.30.0" if older else "0.38.0")
    assert found["left"] == [], "neither called nor listed"
    assert len(found["called"]) > 60
    methods = {each.partition(".")[2].removesuffix("_async") for each in found["called"]}
    assert not methods & NOT_SERVED.keys()
