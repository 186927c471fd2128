"""Log files: lines, what is kept of them, and damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from actors.folder.resume import LogFile, require_unchanged
from rl_backend.checkpoint.manifest import FileFacts
from rl_backend.contracts import ConfigError


def facts_of(data: bytes) -> FileFacts:
    return FileFacts(num_bytes=len(data), xxh3=xxhash.xxh3_64(data).hexdigest())


def test_lines_are_appended_whole_and_counted(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    log.write({"step": 1, "text": "ü\n"}, {"step": 2})
    log.write()
    assert (tmp_path / "log").read_bytes() == '{"step": 1, "text": "ü\\n"}\n{"step": 2}\n'.encode()
    log.write({"step": 3, "odd": float("nan")})
    whole = (tmp_path / "log").read_bytes()
    assert whole.splitlines()[2] == b'{"step": 3, "odd": "NaN"}'
    assert log.sync() == facts_of(whole)
    log.close()


@pytest.mark.parametrize("size", [40, 5 << 20])
def test_what_is_kept_stays_and_what_follows_it_is_cut_off(tmp_path: Path, size: int) -> None:
    """Also of files that are read in several pieces."""
    path, kept = tmp_path / "log", b"x" * size + b"\n"
    path.write_bytes(kept + b'{"step": 9}\nhalf a li')
    log = LogFile(path, facts_of(kept))
    assert path.read_bytes() == kept and log.sync() == facts_of(kept)
    log.write({"step": 2})
    assert path.read_bytes() == kept + b'{"step": 2}\n' and log.sync() == facts_of(kept + b'{"step": 2}\n')
    log.close()
    LogFile(path, None).close()
    assert path.read_bytes() == b"", "nothing is kept of a run that begins anew"


def test_a_write_that_the_system_takes_in_parts_is_whole(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")

    class Slow:
        def __init__(self) -> None:
            self.found = b""

        def write(self, data: bytes) -> int:
            self.found += data[:3]
            return len(data[:3])

    log._file.close()
    log._file = slow = Slow()  # type: ignore[assignment]
    log.write({"step": 12})
    assert slow.found == b'{"step": 12}\n'


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (None, r"^resume='\S+log': cannot be read: .*No such file"),
        (b"abc", r"^resume='\S+log': has lost lines: it had 5 bytes at the checkpoint and has 3; repair it, or continue"),
        (
            b"abcdX and more",
            r"^resume='\S+log': is damaged: its first 5 bytes are not those that it had at the checkpoint; ",
        ),
        (b"", "it had 5 bytes at the checkpoint and has 0"),
        (b"abcd\n", None),
        (b"abcd\nmore", None),
    ],
)
def test_a_log_must_begin_with_what_it_had(tmp_path: Path, there: bytes | None, message: str | None) -> None:
    path = tmp_path / "log"
    if there is not None:
        path.write_bytes(there)
    if message is None:
        require_unchanged(path, facts_of(b"abcd\n"))
        return
    with pytest.raises(ConfigError, match=message):
        require_unchanged(path, facts_of(b"abcd\n"))
    with pytest.raises(ConfigError, match=message):
        LogFile(path, facts_of(b"abcd\n"))
    assert (path.read_bytes() if there is not None else None) == there, "a file that is refused is not cut"
