"""What a trainer announces against what it yields, and what is offered against what an engine loads."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import TensorInfo, WeightCheckError, WeightManifest
from rl_backend.weights.staging import ExpectedWeights, as_announced, check_manifest, find_mismatches


def info(name: str, shape: tuple[int, ...] = (2, 2), dtype: torch.dtype = torch.float32) -> TensorInfo:
    return TensorInfo.of(name, shape, dtype)


class Export:
    """A collective's generator, of which is known what has been taken and whether it was closed."""

    def __init__(self, *tensors: tuple[str, Tensor]) -> None:
        self.taken: list[str] = []
        self.closed = False
        self._tensors = tensors

    def weights(self) -> Generator[tuple[str, Tensor]]:
        try:
            for name, tensor in self._tensors:
                self.taken.append(name)
                yield name, tensor
        finally:
            self.closed = True


def test_each_tensor_comes_with_what_was_announced_one_at_a_time() -> None:
    tensors = ("a", torch.ones(2, 2)), ("b", torch.zeros(3).bfloat16())
    export, infos = Export(*tensors), [info("a"), info("b", (3,), torch.bfloat16)]
    announced = as_announced(infos, export.weights())
    first = next(announced)
    assert first[0] is infos[0] and first[1] is tensors[0][1] and export.taken == ["a"]
    assert [each.name for each, _ in announced] == ["b"] and export.closed
    assert list(as_announced(infos, list(tensors))) == list(zip(infos, (tensor for _, tensor in tensors), strict=True))
    assert list(as_announced([], [])) == []


@pytest.mark.parametrize(
    ("exported", "passed", "message"),
    [
        ([("a", torch.ones(2, 2))], 1, r"yielded no more tensors after 1 of 3, but announced \('b', "),
        ([], 0, r"yielded no more tensors after 0 of 3, but announced \('a', "),
        (
            [("a", torch.ones(2, 2)), ("c", torch.ones(4))],
            1,
            r"yielded \('c', \(4,\), 'float32'\) after 1 of 3, but announced \('b', .*; nothing of it was sent",
        ),
        (
            [("a", torch.ones(4))],
            0,
            r"yielded \('a', \(4,\), 'float32'\) after 0 of 3, but announced \('a', \(2, 2\), 'float32'\)",
        ),
        ([("a", torch.ones(2, 2).half())], 0, r"yielded \('a', \(2, 2\), 'float16'\)"),
        (
            [
                ("a", torch.ones(2, 2)),
                ("b", torch.ones(4)),
                ("c", torch.ones(4)),
                ("d", torch.ones(1)),
                ("e", torch.ones(1)),
            ],
            3,
            r"yielded \('d', \(1,\), 'float32'\) after 3 of 3, but announced no more",
        ),
    ],
)
def test_an_export_that_differs_is_closed_and_refused(exported: list[tuple[str, Tensor]], passed: int, message: str) -> None:
    export, came = Export(*exported), list[str]()
    infos = [info("a"), info("b", (4,)), info("c", (4,))]
    with pytest.raises(WeightCheckError, match=message):
        came.extend(each.name for each, _ in as_announced(infos, export.weights()))
    assert len(came) == passed and (export.closed or not exported)


def test_an_export_is_closed_with_who_reads_it() -> None:
    export = Export(("a", torch.ones(2, 2)), ("b", torch.ones(2, 2)))
    announced = as_announced([info("a"), info("b")], export.weights())
    next(announced)
    announced.close()
    assert export.closed and export.taken == ["a"]


REQUIRED = {name: info(name) for name in ("q", "k", "v", "gate", "up", "norm")}
EXPECTED = ExpectedWeights(
    REQUIRED, {"head": info("head", (3,), torch.bfloat16)}, (("q", "k", "v"), ("gate", "up")), frozenset({"norm", "head"})
)


def offered(without: str = "", **changes: TensorInfo) -> list[TensorInfo]:
    named = {**REQUIRED, **changes}
    return [tensor for name, tensor in named.items() if name not in without.split()]


@pytest.mark.parametrize(
    ("tensors", "kept", "expected"),
    [
        (offered(), (), []),
        (offered(head=EXPECTED.optional["head"]), (), []),
        (offered("norm"), (), ["missing: norm"]),
        (offered("norm"), ("norm",), []),
        # All of a group may be missing: then each is.
        (offered("gate up"), (), ["missing: gate, up"]),
        (offered("gate up"), ("gate", "up"), []),
        (offered("q up"), (), ["half of a fused group: k, v came without q", "half of a fused group: gate came without up"]),
        (offered("q norm"), (), ["half of a fused group: k, v came without q", "missing: norm"]),
        # What is kept in an engine cannot be fused with what comes.
        (offered("q"), ("q",), ["half of a fused group: k, v came without q"]),
        (offered(x=info("x"), y=info("y")), (), ["unknown to the engine: x, y"]),
        (offered(norm=info("norm", (4,))), (), ["wrong shape: norm is (4,), the engine has (2, 2)"]),
        (offered(head=info("head", (2,), torch.bfloat16)), (), ["wrong shape: head is (2,), the engine has (3,)"]),
        (
            offered(norm=info("norm", dtype=torch.float16), q=info("q", dtype=torch.float16)),
            (),
            ["wrong dtype: q is float16, the engine takes float32, norm is float16, the engine takes float32"],
        ),
        # An engine keeps these in float32 whatever its dtype.
        (offered(head=info("head", (3,))), (), []),
        (offered(head=info("head", (3,), torch.float16)), (), ["wrong dtype: head is float16, the engine takes bfloat16"]),
    ],
)
def test_every_kind_of_mismatch_is_told_and_nothing_else(
    tensors: list[TensorInfo], kept: tuple[str, ...], expected: list[str]
) -> None:
    assert find_mismatches(tensors, EXPECTED, kept) == expected


def test_float32_is_no_excuse_for_other_names() -> None:
    engine = ExpectedWeights(
        {"a": info("a", dtype=torch.bfloat16), "b": info("b", dtype=torch.bfloat16)}, in_float32=frozenset("b")
    )
    found = find_mismatches([info("a"), info("b")], engine)
    assert found == ["wrong dtype: a is float32, the engine takes bfloat16"]


def test_long_lists_are_cut() -> None:
    groups = tuple((f"q{place}", f"k{place}") for place in range(10))
    names = {name: info(name) for group in groups for name in group}
    found = find_mismatches([info(first) for first, _ in groups], ExpectedWeights(names, fused_groups=groups))
    assert len(found) == 8 and found[7] == "half of a fused group: q7 came without k7"
    (missing,) = find_mismatches([], ExpectedWeights({name: info(name) for name, _ in groups}))
    assert missing.startswith("missing: q0, ") and "q7" in missing and "q8" not in missing


def test_a_manifest_that_fits_passes_and_one_that_keeps_weights_needs_not_offer_them() -> None:
    check_manifest(WeightManifest(version=1, tensors=tuple(offered())), EXPECTED, engine="engine 0")
    manifest = WeightManifest(version=7, tensors=tuple(offered("norm")))
    with pytest.raises(
        WeightCheckError, match="engine 3 refuses weights of version 7, nothing was loaded: missing: norm"
    ) as e:
        check_manifest(manifest, EXPECTED, engine="engine 3")
    assert e.value.details == {"engine": "engine 3", "version": 7, "problems": ["missing: norm"]}
    check_manifest(manifest.replace(kept=("norm",)), EXPECTED, engine="engine 3")


def test_an_export_that_is_not_taken_to_its_end_is_closed() -> None:
    export, infos = Export(("a", torch.ones(2, 2)), ("b", torch.ones(2, 2))), [info("a"), info("b")]
    weights = export.weights()
    announced = as_announced(infos, weights)
    next(announced)
    assert not export.closed
    announced.close()
    assert export.closed and export.taken == ["a"] and list(weights) == []
