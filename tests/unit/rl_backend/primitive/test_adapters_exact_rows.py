"""Whether rows of matrix products depend on others is tried by dtype, with every product that adapters take."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.primitive import adapters
from rl_backend.primitive.adapters import rows_are_exact

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    adapters._tried.cache_clear()
    yield
    adapters._tried.cache_clear()


@pytest.mark.parametrize("inexact", [torch.float32, torch.bfloat16])
def test_the_dtype_whose_rows_depend_on_others_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, inexact: torch.dtype
) -> None:
    plain = adapters.padded_product

    def by_rows(x: Tensor, matrix: Tensor) -> Tensor:
        return plain(x, matrix) + (len(x) if x.dtype == inexact else 0)

    monkeypatch.setattr(adapters, "padded_product", by_rows)
    for dtype in (torch.float32, torch.bfloat16):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert rows_are_exact(dtype, CPU) is (dtype != inexact)
        assert [f"rows of products of {dtype} matrices" in message for message in caplog.messages] == [True] * (
            dtype == inexact
        )


def test_stacks_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.bmm

    def by_stack(a: Tensor, b: Tensor) -> Tensor:
        return plain(a, b) + len(a)

    monkeypatch.setattr(torch, "bmm", by_stack)
    assert not rows_are_exact(torch.float32, CPU)


def test_a_process_tries_once_for_each_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, ...]] = []
    plain = adapters._is_exact

    def counted(*arguments: Any) -> bool:
        tried.append(arguments[0].shape)
        return plain(*arguments)

    monkeypatch.setattr(adapters, "_is_exact", counted)
    first = rows_are_exact(torch.float32, CPU)
    once = len(tried)
    assert rows_are_exact(torch.float32, CPU) is first and len(tried) == once > 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    rows_are_exact(torch.float32, CPU)
    assert len(tried) > once
