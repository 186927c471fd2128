"""Rows of text files and tables, place by place, and names of data sets and models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.datasets import data_files, open_rows
from rl_backend.data.hub import HubName, hub_name, local_model, why_not
from rl_backend.data.rows import Row, Rows, TextRows


class Numbers(Rows):
    def __len__(self) -> int:
        return 5

    def read(self, index: int) -> Row:
        return {"n": index}


def test_rows_are_a_sequence_that_is_counted_from_one_in_messages() -> None:
    rows = Numbers("source", "name")
    assert [rows[0], rows[4], rows[-1], rows[-5]] == [{"n": n} for n in (0, 4, 4, 0)]
    assert rows[1:4:2] == [{"n": 1}, {"n": 3}] and rows[::-2] == [{"n": 4}, {"n": 2}, {"n": 0}] and rows[9:] == []
    for index in (5, -6):
        with pytest.raises(IndexError):
            rows[index]
    assert rows.where(0) == "source, row 1" and rows.padded_fields([]) == [] and rows.without_padding("a", None) is None
    assert (rows.source, rows.name, list(rows)[2]) == ("source", "name", {"n": 2})


def test_lines_of_several_files_have_their_own_places(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"a": "é"}\n  \n{"a": 2}')
    (tmp_path / "b.csv").write_text('x,y\n1,\n\n"2\n3",é\n')
    (tmp_path / "c.json").write_text(' [ {"c": "é"},\n{"c": []} ] ')
    (tmp_path / "d.json").write_text('{"d": 1}\n')
    rows = TextRows("all", "mine", [tmp_path / name for name in ("a.jsonl", "b.csv", "c.json", "d.json")])
    assert len(rows) == 7
    assert list(rows) == [
        {"a": "é"}, {"a": 2}, {"x": "1", "y": None}, {"x": "2\n3", "y": "é"}, {"c": "é"}, {"c": []}, {"d": 1},
    ]  # fmt: skip
    places = ["a.jsonl, line 2", "a.jsonl, line 4", "b.csv, line 2", "b.csv, line 4", "c.json, row 1", "c.json, row 2"]
    assert [rows.where(index) for index in range(7)] == [f"{tmp_path}/{each}" for each in (*places, "d.json, line 1")]
    assert (rows.source, rows.name, rows[-1]) == ("all", "mine", {"d": 1})
    assert rows.files == tuple(tmp_path / name for name in ("a.jsonl", "b.csv", "c.json", "d.json"))


def test_a_line_of_empty_cells_is_a_row_and_an_empty_line_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x,y\n,\n\n1,2\n"",\n\n')
    rows = TextRows("all", "mine", [tmp_path / "a.csv"])
    assert list(rows) == [{"x": None, "y": None}, {"x": "1", "y": "2"}, {"x": None, "y": None}]
    assert [rows.where(index)[-6:] for index in range(3)] == ["line 2", "line 4", "line 5"]


@pytest.mark.parametrize(
    ("name", "data", "index", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n[2]\n', 1, "a.jsonl, line 2: a list; expected one JSON object per line$"),
        ("a.jsonl", b'{"a": 1}\n"x"\n', 1, "a.jsonl, line 2: a str; expected one JSON object per line$"),
        ("a.json", b'{"a": 1}\n2\n', 1, "a.json, line 2: a int; expected one JSON object per line, or a list of objects$"),
        ("a.json", b"[{}, null]", 1, "a.json, row 2: a NoneType; expected a list of JSON objects$"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', 1, "a.jsonl, line 2: not JSON: .*; expected one JSON object per line$"),
        (
            "a.csv",
            b"x,y\n1,2\n1,2,3\n",
            1,
            "a.csv, line 3: not CSV: .*; expected a cell for each of the 2 columns x, y$",
        ),
    ],
)
def test_a_row_that_is_no_object_is_refused_when_it_is_read(
    tmp_path: Path, name: str, data: bytes, index: int, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    rows = open_rows(tmp_path / name)
    assert dict(rows[0]) in ({"a": 1}, {}, {"x": "1", "y": "2"})
    with pytest.raises(BatchError, match=message):
        rows[index]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.json", b"[{} {}]", "a.json: not JSON: Expecting ',' or ']' behind an object of the list: line 1 column 5"),
        ("a.json", b"[{}] x", "a.json: not JSON: Extra data behind the list: line 1 column 5"),
        ("a.json", b"[{}", "a.json: not JSON: Expecting ',' or ']'"),
        ("a.csv", b"a,b,a\n1,2,3\n", "a.csv: not CSV: the first line names a column twice: a, b, a; repair the file"),
        ("a.csv", b"a,\xff\n1,2\n", "a.csv: not CSV: "),
        ("a.jsonl", b"\n \n", "a.jsonl: no rows; give data with at least one"),
        ("a.csv", b"", "a.csv: no rows"),
        ("a.parquet", b"PAR0", "a.parquet: not a readable parquet file: "),
    ],
)
def test_a_damaged_file_is_refused_when_it_is_opened(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BatchError) as refused:
        open_rows(tmp_path / name)
    assert f"{tmp_path}/{message}" in str(refused.value)


def test_a_long_beginning_of_white_space_and_a_mark_change_no_place(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    for data, rows in (
        (mark + b"\r\n\t " + '[{"a": "éé"} , {"b": 1}]'.encode() + b"\r\n", [{"a": "éé"}, {"b": 1}]),
        (b"[]", None),
    ):
        (tmp_path / "a.json").write_bytes(data)
        if rows is None:
            with pytest.raises(BatchError, match="no rows"):
                open_rows(tmp_path / "a.json")
        else:
            assert list(open_rows(tmp_path / "a.json")) == rows


def test_a_file_of_another_kind_or_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(
        ConfigError, match=r"eval_dataset='.*a\.txt': is no \.jsonl, \.json, \.csv or \.parquet file; convert"
    ):
        open_rows(tmp_path / "a.txt", field="eval_dataset")
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert data_files(tmp_path / "a.jsonl") == [tmp_path / "a.jsonl"]

    def refuses(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuses)
    with pytest.raises(ConfigError, match=r"dataset='.*': cannot be read: Permission denied; give a file that this user"):
        open_rows(tmp_path / "a.jsonl")


@pytest.fixture
def tables(tmp_path: Path) -> Any:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")

    def opened(**columns: Any) -> Rows:
        parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
        return open_rows(tmp_path / "t.parquet")

    return SimpleNamespace(pyarrow=pyarrow, opened=opened)


def test_every_kind_of_list_map_struct_and_json_is_what_json_has(tables: Any) -> None:
    arrow = tables.pyarrow
    struct = arrow.struct([("x", arrow.int64()), ("y", arrow.string())])
    given = [[{"x": 1, "y": None}, None], None, []]
    lists = {
        "list": arrow.array(given, arrow.list_(struct)),
        "large": arrow.array(given, arrow.large_list(struct)),
        "fixed": arrow.array([[{"x": 1, "y": None}, None], None, [{"x": 2, "y": "b"}, None]], arrow.list_(struct, 2)),
        "map": arrow.array([[("k", {"x": 1, "y": None})], None, []], arrow.map_(arrow.string(), struct)),
        "json": arrow.array(['{"a": [null]}', None, "[]"], arrow.json_()),
        "plain": arrow.array(["[1]", None, ""]),
    }
    rows = tables.opened(**lists)
    assert len(rows) == 3 and rows.where(1).endswith("t.parquet, row 2") and rows.name == "t"
    assert rows[0] == {
        "list": given[0], "large": given[0], "fixed": given[0], "map": {"k": {"x": 1, "y": None}}, "json": {"a": [None]},
        "plain": "[1]",
    }  # fmt: skip
    assert set(rows[1].values()) == {None}
    assert rows[2] == {
        "list": [], "large": [], "fixed": [{"x": 2, "y": "b"}, None], "map": {}, "json": [], "plain": "",
    }  # fmt: skip
    for name in ("list", "large", "fixed"):
        assert rows.without_padding(name, rows[0][name]) == [{"x": 1}, None]
    assert rows.without_padding("map", rows[0]["map"]) == {"k": {"x": 1}}
    assert rows.without_padding("json", rows[0]["json"]) == {"a": [None]} and rows.without_padding("list", None) is None
    assert rows.without_padding("plain", "x") == "x"
    assert rows.without_padding("map.k", rows[0]["map"]["k"]) == {"x": 1}
    assert rows.without_padding("map.k.y", None) is None and rows.without_padding("json.a", [None]) == [None]
    assert rows.padded_fields([]) == ["list.y", "large.y", "fixed.y", "map.y"]
    assert rows.padded_fields(["list", "map"]) == ["large.y", "fixed.y"]
    assert rows.padded_fields(list(lists)) == []


def test_padding_is_found_in_any_row_and_at_any_depth(tables: Any) -> None:
    deep = [{"a": {"b": [{"c": 1, "d": 2}]}, "e": 1} for _ in range(2001)]
    deep[1000]["a"] = {"b": [{"c": 1, "d": None}]}
    deep[2000]["e"] = None
    rows = tables.opened(deep=deep, flat=[None] * 2001)
    assert rows.padded_fields([]) == ["deep.a.b.d", "deep.e"]
    assert rows.without_padding("deep.a", {"b": [{"c": None, "d": 2}]}) == {"b": [{"d": 2}]}
    assert rows.without_padding("deep.a.b", [{"c": 1, "d": None}]) == [{"c": 1}]
    whole = tables.opened(deep=[None, {"a": 1, "b": 2}])
    assert whole.padded_fields([]) == [], "a row without the struct pads none of its fields"
    dotted = tables.opened(**{"a.b": [{"c": None, "d": 1}], "a": [{"b": 3}]})
    assert dotted.without_padding("a.b", {"c": None, "d": 1}) == {"d": 1}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("org/name", HubName("org/name", None)),
        ("o.r-g/na.me@v1.0", HubName("o.r-g/na.me", "v1.0")),
        ("org/name@refs/pr/2", HubName("org/name", "refs/pr/2")),
        ("org/name@", None),
        (".org/name", None),
        ("org", None),
        ("org/a/b", None),
        ("org/name:main", None),
        ("org/x.safetensors", None),
        ("org/x.yaml", None),
    ],
)
def test_names_of_the_hub(text: str, found: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name(text) == found
    (tmp_path / "org").mkdir()
    assert hub_name("org/name") is None, "its parent is here"
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "m").mkdir()
    assert local_model("~/m") == str(tmp_path / "home" / "m") and local_model("home/m") == "home/m"


def test_why_something_of_the_hub_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")

    def made(kind: Any) -> BaseException:
        error: BaseException = kind.__new__(kind)
        return error

    def behind(error: BaseException) -> BaseException:
        outer, middle = ValueError("outer"), OSError("middle")
        outer.__cause__, middle.__context__ = middle, error
        return outer

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for kind, said in (
        (errors.GatedRepoError, "the Hub asks for an account that may read this model; accept its terms there"),
        (
            errors.RepositoryNotFoundError,
            "is neither a folder here nor a model on the Hub that you may read; check the name",
        ),
        (errors.RevisionNotFoundError, "the model has no such revision on the Hub; check what follows @"),
        (
            ConnectionError,
            "is not a folder here, and of the Hub nothing is in this machine's cache while it cannot be reached",
        ),
        (TimeoutError, "is not a folder here, and of the Hub nothing is in this machine's cache while it cannot be reached"),
        (errors.LocalEntryNotFoundError, "is not a folder here, and of the Hub nothing is in this machine's cache while it"),
    ):
        for error in (made(kind), behind(made(kind))):
            assert why_not(error, "model").startswith(said)
    assert why_not(ValueError(" odd\nmore"), "model") == "cannot be loaded: ValueError: odd"
    for value in ("1", "on", "Yes", "TRUE"):
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        assert "while HF_HUB_OFFLINE is set; give a path, or download the data set where" in why_not(
            ValueError(), "data set"
        )
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert why_not(ValueError("x"), "model") == "cannot be loaded: ValueError: x"
    loop = ValueError("loop")
    loop.__context__ = OSError("other")
    loop.__context__.__context__ = loop
    assert why_not(loop, "model") == "cannot be loaded: ValueError: loop"


def test_rows_written_by_json_are_read_one_by_one(tmp_path: Path) -> None:
    written = [{"n": n, "t": "é" * n} for n in range(50)]
    (tmp_path / "a.json").write_text(json.dumps(written, ensure_ascii=False, indent=2))
    rows = open_rows(tmp_path / "a.json")
    assert rows[49] == written[49] and rows[7] == written[7] and list(rows) == written
