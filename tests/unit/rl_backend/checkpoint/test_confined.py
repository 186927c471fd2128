"""Names and links that stay in a folder, and those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_backend.checkpoint.confined import name_problem, require_inside, require_inside_model, require_names
from rl_backend.contracts import CheckpointError

EMPTY = "is no name of a file"


@pytest.mark.parametrize(
    ("name", "depth", "problem"),
    [
        ("a", 1, None),
        (".metadata", 1, None),
        ("a..b", 1, None),
        ("a/b", 2, None),
        ("a/b/c", 3, None),
        ("a/b", 1, "is no name of a file beside it"),
        ("a/b/c", 2, "has more than 2 levels"),
        ("a/b/c/d", 3, "has more than 3 levels"),
        ("", 1, EMPTY),
        (".", 2, EMPTY),
        ("a\0b", 1, EMPTY),
        ("a\\b", 2, EMPTY),
        ("/a", 1, "is an absolute name"),
        ("/../a", 3, "is an absolute name"),
        ("..", 1, "leads out of the folder"),
        ("a/../b", 3, "leads out of the folder"),
        ("a/..", 2, "leads out of the folder"),
        ("./a", 1, "must be written 'a'"),
        ("a/", 1, "must be written 'a'"),
        ("a//b", 2, "must be written 'a/b'"),
    ],
)
def test_a_name_is_of_a_file_inside_or_it_is_said_why_not(name: str, depth: int, problem: str | None) -> None:
    assert name_problem(name, depth) == problem


def test_the_first_name_with_a_problem_is_refused_and_what_has_no_names_is_not() -> None:
    require_names({"a": 1, "b": 2})
    require_names({"a/b": 1}, depth=2)
    nothing: tuple[object, ...] = ({}, None, ["../a"])
    for without in nothing:
        require_names(without)
    with pytest.raises(ValueError, match=r"^it names '\.\./b', which leads out of the folder; only files of the folder"):
        require_names({"a": 1, "../b": 2, "/c": 3})
    with pytest.raises(ValueError, match=r"'a/b', which is no name of a file beside it"):
        require_names({"a/b": 1})


def test_links_are_followed_inside_of_the_folder_alone(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "folder-beside"
    (folder / "below").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (folder / "file").write_text("mine")
    (folder / "below" / "link").symlink_to("../file")
    (folder / "out").symlink_to(outside / "secret")
    (folder / "gone").symlink_to("nowhere")
    (folder / "one").symlink_to("other")
    (folder / "other").symlink_to("one")
    (tmp_path / "alias").symlink_to(folder)
    for root in (folder, tmp_path / "alias"):
        for name in ("file", "below/link", "gone", "absent"):
            assert require_inside(root, name) == root / name
        problem = rf"{root} is refused: out is a link out of it, to {outside}/secret; put a copy of the file in its place if"
        with pytest.raises(CheckpointError, match=problem) as caught:
            require_inside(root, "out")
        assert caught.value.details == {"path": str(root), "name": "out", "is_damaged": False}
        with pytest.raises(CheckpointError, match=rf"{root} is refused: one cannot be followed to a file \(") as caught:
            require_inside(root, "one")
        assert caught.value.details == {"path": str(root), "name": "one", "is_damaged": False}


@pytest.mark.parametrize(
    ("parent", "blobs", "taken"),
    [("snapshots", True, True), ("snapshots", False, False), ("versions", True, False)],
)
def test_only_a_snapshot_beside_blobs_may_link_into_its_repository(
    tmp_path: Path, parent: str, blobs: bool, taken: bool
) -> None:
    repository = tmp_path / "models--a--b"
    snapshot = repository / parent / "0123"
    snapshot.mkdir(parents=True)
    if blobs:
        (repository / "blobs").mkdir()
    (repository / "refs").write_text("0123")
    (snapshot / "config.json").symlink_to("../../refs")
    (snapshot / "own").write_text("own")
    (snapshot / "stolen").symlink_to(tmp_path)
    assert require_inside_model(snapshot, "own").read_text() == "own"
    if taken:
        assert require_inside_model(snapshot, "config.json").read_text() == "0123"
    else:
        with pytest.raises(CheckpointError, match=r"config\.json is a link out of it"):
            require_inside_model(snapshot, "config.json")
    with pytest.raises(CheckpointError, match="stolen is a link out of it"):
        require_inside_model(snapshot, "stolen")
