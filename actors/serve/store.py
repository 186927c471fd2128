"""What the server must not forget: sessions, runs, requests with their results, checkpoints, samplers, keys.

SQLite through SQLAlchemy, in the state folder; another process that opens the folder later finds all that was committed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
import time
import uuid
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sql
from sqlalchemy import Boolean, Column, Float, Integer, LargeBinary, MetaData, String, Table, UniqueConstraint

from rl_backend.contracts import ConfigError, RLBackendError

logger = logging.getLogger(__name__)

JSON, PROTOBUF = "application/json", "application/x-protobuf"
CLIENT_NUMBERS = 10**9
"""Of one client of a sampler: its numbers begin at a multiple of this."""
_TABLES = MetaData()
SESSIONS = Table(
    "sessions",
    _TABLES,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("seen", Float, nullable=False),
    Column("ended", Boolean, nullable=False),
    Column("asked", sql.JSON, nullable=False),
)
RUNS = Table(
    "runs",
    _TABLES,
    Column("id", String, primary_key=True),
    Column("session", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("base_model", String, nullable=False),
    # What the client asked for: rank, seed, train_attn, train_mlp, train_unembed.
    Column("lora", sql.JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("last_request", Float, nullable=False),
    # Why it takes no requests any more; empty while it does.
    Column("over", String, nullable=False),
    # Whether it could not be created: lists leave it out, and its requests are told why.
    Column("failed", Boolean),
    Column("user_metadata", sql.JSON),
)
REQUESTS = Table(
    "requests",
    _TABLES,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    # A run or a sampler; a creation has seq_id 0 of the run that it makes.
    Column("scope", String, nullable=False),
    Column("seq_id", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("finished", Float),
    Column("media", String),
    Column("body", LargeBinary),
    # In which place among those of its scope it was answered, from 1.
    Column("place", Integer),
    UniqueConstraint("scope", "seq_id"),
    sql.Index("answered", "scope", "place"),
)
CHECKPOINTS = Table(
    "checkpoints",
    _TABLES,
    Column("run", String, primary_key=True),
    # "weights" or "sampler_weights": recipes save both under one name.
    Column("kind", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("folder", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", sql.JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("bytes", Integer, nullable=False),
    Column("user_metadata", sql.JSON),
    # When it is deleted; None where it stays.
    Column("expires", Float),
    # Whether other keys may read it.
    Column("public", Boolean),
)
SAMPLERS = Table(
    "samplers",
    _TABLES,
    Column("id", String, primary_key=True),
    Column("session", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("path", String),
    # Of the adapter in peft's format; None for the base alone.
    Column("folder", String),
    Column("lora", sql.JSON),
    # Of a snapshot, which no checkpoint has.
    Column("bytes", Integer),
    # Clients that have joined the one that made it.
    Column("joined", Integer),
)
KEYS = Table(
    "keys",
    _TABLES,
    Column("digest", String, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("created", Float, nullable=False),
)


class Result(NamedTuple):
    """An answer of a queued request as it is sent; an error is one too, as JSON."""

    media: str
    body: bytes

    @classmethod
    def of(cls, value: Mapping[str, Any] | bytes) -> Result:
        return cls(PROTOBUF, value) if isinstance(value, bytes) else cls(JSON, json.dumps(value).encode())

    @classmethod
    def failed(cls, text: str, category: str = "user") -> Result:
        return cls.of({"error": text, "category": category})

    @classmethod
    def of_error(cls, error: Exception) -> Result:
        """What a client is told of a request that has failed: its own mistake in words, anything else by its kind too."""
        if isinstance(error, RLBackendError):
            return cls.failed(str(error))
        logger.error("a request failed", exc_info=error)
        return cls.failed(f"{type(error).__name__}: {error}", "server")

    @property
    def is_error(self) -> bool:
        return self.media == JSON and self.body.startswith(b'{"error"')


class Store:
    """The database of a state folder. Every method is one transaction and may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._engine = sql.create_engine(f"sqlite:///{folder / 'serve.sqlite'}", connect_args={"timeout": 30})
        sql.event.listen(self._engine, "connect", _set_up)
        _TABLES.create_all(self._engine)
        with self._engine.begin() as connection:
            # Columns that a server before did not have.
            for table in _TABLES.sorted_tables:
                known = {column["name"] for column in sql.inspect(connection).get_columns(table.name)}
                for column in table.columns:
                    if column.name not in known:
                        connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {column.name} {column.type}")
                for index in table.indexes:
                    index.create(connection, checkfirst=True)
        # Now, so that it is known where the last key goes before a request comes.
        self._had_keys = bool(self.rows(KEYS))

    def close(self) -> None:
        self._engine.dispose()

    def add(self, table: Table, **values: Any) -> bool:
        """Adds a row; False where one of its key is there, which stays as it is."""
        with self._engine.begin() as connection:
            return bool(connection.execute(sql.insert(table).prefix_with("OR IGNORE"), values).rowcount)

    def put(self, table: Table, **values: Any) -> None:
        """Adds a row, or replaces the one of its key."""
        with self._engine.begin() as connection:
            connection.execute(sql.insert(table).prefix_with("OR REPLACE").values(**values))

    def get(self, table: Table, **key: Any) -> dict[str, Any] | None:
        found = self.rows(table, **key)
        return found[0] if found else None

    def rows(self, table: Table, **where: Any) -> list[dict[str, Any]]:
        """In the order of adding."""
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(_select(table, *where), where).mappings()]

    def change(self, table: Table, values: Mapping[str, Any], **where: Any) -> None:
        with self._engine.begin() as connection:
            connection.execute(sql.update(table).filter_by(**where).values(**values))

    def delete(self, table: Table, **where: Any) -> None:
        with self._engine.begin() as connection:
            connection.execute(sql.delete(table).filter_by(**where))

    # Requests.

    def accept(self, scope: str, seq_id: int, owner: str) -> tuple[str, bool]:
        """The id of a request of a run or sampler, and whether it is new: one that is sent again is the one before."""
        request_id, now = uuid.uuid4().hex, time.time()
        row = {"id": request_id, "owner": owner, "scope": scope, "seq_id": seq_id, "created": now}
        with self._engine.begin() as connection:
            if connection.execute(sql.insert(REQUESTS).prefix_with("OR IGNORE"), row).rowcount:
                connection.execute(sql.update(RUNS).where(RUNS.c.id == scope).values(last_request=now))
                return request_id, True
        known = self.get(REQUESTS, scope=scope, seq_id=seq_id)
        assert known is not None, "nothing else refuses the row"
        return known["id"], False

    def finish(self, answers: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
        """Keeps answers by the ids of their requests, the first one of each for good; returns those requests that have their
        answer by this: scope, seq_id, owner, created.
        """
        columns, found = (REQUESTS.c.scope, REQUESTS.c.seq_id, REQUESTS.c.owner, REQUESTS.c.created), {}
        with self._engine.begin() as connection:
            for request_id, result in answers.items():
                values = {"finished": time.time(), "media": result.media, "body": result.body, "place": _next_place()}
                asked = sql.update(REQUESTS).where(REQUESTS.c.id == request_id, REQUESTS.c.finished.is_(None))
                for row in connection.execute(asked.values(values).returning(*columns)).mappings():
                    found[request_id] = dict(row)
        return found

    def completed(self, scope: str, client: int, after: int) -> list[dict[str, Any]]:
        """Answers of a scope whose place is beyond ``after``, of one client by its numbers: id, place, media and size."""
        first = client * CLIENT_NUMBERS
        columns = REQUESTS.c
        asked = sql.select(columns.id, columns.place, columns.media, sql.func.length(columns.body).label("size"))
        asked = asked.where(columns.scope == scope, columns.place > after, columns.seq_id >= first)
        asked = asked.where(columns.seq_id < first + CLIENT_NUMBERS).order_by(columns.place)
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(asked).mappings()]

    def count_client(self, sampler: str) -> int:
        """One client more; how many have joined."""
        joined = sql.func.coalesce(SAMPLERS.c.joined, 0) + 1
        asked = sql.update(SAMPLERS).where(SAMPLERS.c.id == sampler).values(joined=joined).returning(SAMPLERS.c.joined)
        with self._engine.begin() as connection:
            return int(connection.execute(asked).scalar_one())

    def forget(self, before: float) -> None:
        """Requests that were answered before that time, and of sessions that were last seen before it and have ended their
        samplers, and themselves where they have no runs.
        """
        columns = SESSIONS.c
        ended = sql.select(columns.id).where(columns.ended, columns.seen < before)
        idle = ended.where(columns.id.not_in(sql.select(RUNS.c.session)))
        with self._engine.begin() as connection:
            connection.execute(sql.delete(REQUESTS).where(REQUESTS.c.finished < before))
            connection.execute(sql.delete(SAMPLERS).where(SAMPLERS.c.session.in_(ended)))
            connection.execute(sql.delete(SESSIONS).where(columns.id.in_(idle)))

    def begin(self) -> None:
        """For a server that starts: what the one before had in its memory is lost, and says so. Folders without a row go."""
        restarted = "the server was restarted"
        lost = Result.failed(f"{restarted} before this request was answered; what it did is lost", "server")
        with self._engine.begin() as connection:
            open_requests = sql.update(REQUESTS).where(REQUESTS.c.finished.is_(None))
            values = {"finished": time.time(), "media": lost.media, "body": lost.body, "place": _next_place()}
            connection.execute(open_requests.values(values))
            over = f"{restarted}, and the run's weights since its last save are gone: create a run from a checkpoint of it"
            connection.execute(sql.update(RUNS).where(RUNS.c.over == "").values(over=over))
        shutil.rmtree(self.folder / "boundaries", ignore_errors=True)
        known = {Path(row["folder"] or "").name for table in (CHECKPOINTS, SAMPLERS) for row in self.rows(table)}
        for folder in (*self.folder.glob("checkpoints/*"), *self.folder.glob("snapshots/*")):
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)

    # Keys.

    def make_key(self, name: str) -> str:
        """A new key, which is not kept: only its digest is.

        Raises:
            ConfigError: a name that has a key already.
        """
        key = f"tml-{secrets.token_urlsafe(32)}"
        if not self.add(KEYS, digest=_digest(key), name=name, created=time.time()):
            raise ConfigError.of("new_key", name, "has a key already; choose another name, or --remove-key it first")
        return key

    def remove_key(self, name: str) -> None:
        """Raises :class:`ConfigError` for a name without key."""
        if self.get(KEYS, name=name) is None:
            raise ConfigError.of("remove_key", name, "has no key")
        self.delete(KEYS, name=name)

    @property
    def has_keys(self) -> bool:
        """Whether there are keys, or were: where the last one is removed, a server that runs is not open to all."""
        self._had_keys = self._had_keys or bool(self.rows(KEYS))
        return self._had_keys

    def owner_of(self, key: str) -> str | None:
        """The name that a key was made for; None for an unknown one."""
        found = self.get(KEYS, digest=_digest(key))
        return None if found is None else found["name"]


@lru_cache
def _select(table: Table, *names: str) -> sql.Select[Any]:
    """Rows in the order of adding, by parameters of these names. Made once: that takes longer than to run it."""
    where = (table.c[name].is_not_distinct_from(sql.bindparam(name)) for name in names)
    return sql.select(table).where(*where).order_by(sql.literal_column("rowid"))


def _next_place() -> Any:
    """Beyond those that are there, and by the clock beyond those that are deleted: a client counts from the last it saw."""
    others, now = REQUESTS.alias(), time.time_ns() // 1000
    highest = sql.select(sql.func.max(sql.func.coalesce(sql.func.max(others.c.place), 0) + 1, now))
    return highest.where(others.c.scope == REQUESTS.c.scope).correlate(REQUESTS).scalar_subquery()


def _digest(key: str) -> str:
    # Keys have 256 random bits, so a fast digest is enough.
    return hashlib.sha256(key.encode()).hexdigest()


def _set_up(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    # A commit survives the end of the process; only a power cut may take the last ones.
    connection.execute("PRAGMA synchronous=NORMAL")
