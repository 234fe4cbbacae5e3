"""The csv source: as another reader gives it, and what it refuses."""

import csv
import gzip
import io

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError


def source(path, **more):
    return registry.build("source", {"name": "csv", "path": str(path), **more})


def docs(path, **more):
    return list(source(path, **more).documents("train", 0.0))


def write(path, data):
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_rows_ids_and_meta(tmp_path):
    path = write(
        tmp_path / "t.csv",
        '\ufeffid,text,url\n1,"a, ""quoted""\nsecond line",u1\n\n2,b,u2\n3, \n'.replace("3, \n", "3, ,\n"),
    )
    found = docs(path, meta_keys=["url"])
    assert [(d.text, d.id, d.meta) for d in found] == [
        ('a, "quoted"\nsecond line', "t.csv:2", {"url": "u1"}),
        ("b", "t.csv:5", {"url": "u2"}),
    ]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.text('a,"\n;é'))),
    st.sampled_from(",;\t|"),
)
def test_equals_pyarrow(tmp_path_factory, rows, delimiter):
    pa_csv = pytest.importorskip("pyarrow.csv")
    rows = [(a.replace("\r", ""), b) for a, b in rows]
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([("text", "other"), *rows])
    path = write(tmp_path_factory.mktemp("csv") / "t.csv", text.getvalue())
    wanted = []
    if rows:
        table = pa_csv.read_csv(
            path,
            parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(column_types={"text": "string"}, strings_can_be_null=False),
        )
        wanted = [t for t in table.column("text").to_pylist() if t and not t.isspace()]
    if not wanted:
        with pytest.raises(DataError, match="holds no text"):
            docs(path, delimiter=delimiter)
    else:
        assert [d.text for d in docs(path, delimiter=delimiter)] == wanted


def test_packed_and_tabs_and_long_fields(tmp_path):
    long = "x" * (1 << 18)  # Python's own limit for a field is half of this
    path = tmp_path / "t.tsv.gz"
    path.write_bytes(gzip.compress(f"text\tn\n{long}\t1\n".encode()))
    assert [d.text for d in docs(path)] == [long]


BAD = {
    "too few fields": (b"text,n\na\nb,2\n", "t.csv:2: 1 fields, and the header has 2"),
    "too many fields": (b"text,n\na,b,1\nb,2\n", "t.csv:2: 3 fields"),
    "text behind a quote": (b'text,n\n"a"b,1\nb,2\n', "t.csv:2: malformed CSV"),
    "not UTF-8": (b"text,n\ncaf\xe9,1\nb,2\n", "t.csv:2: not UTF-8 text: byte 0xe9"),
    "NUL": (b"text,n\na\0b,1\nb,2\n", "t.csv:2: holds a NUL byte"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_stop_or_are_counted(tmp_path, case):
    data, says = BAD[case]
    path = write(tmp_path / "t.csv", data)
    with pytest.raises(DataError) as error:
        docs(path)
    assert says in str(error.value) and ("skip_bad_rows" in str(error.value) or "iconv" in str(error.value))
    lenient = source(path, skip_bad_rows=True, max_bad_rows=0.5)
    assert [(d.text, d.id) for d in lenient.documents("train", 0.0)] == [("b", "t.csv:3")]
    assert lenient.bad_rows == 1 and says in lenient.bad_samples[0]
    with pytest.raises(DataError, match="1 of 2 rows cannot be used"):
        docs(path, skip_bad_rows=True, max_bad_rows=0.4)


def test_an_open_quote_does_not_swallow_the_rest_in_silence(tmp_path):
    path = write(tmp_path / "t.csv", 'text,n\na,1\n"b,2\nc,3\n')
    with pytest.raises(DataError, match=r"t\.csv:3: malformed CSV: unexpected end of data"):
        docs(path)


@pytest.mark.parametrize(
    ("data", "more", "says"),
    [
        (b"body,n\na,1\n", {}, "no field 'text'; available fields: body, n"),
        (b"text;n\na;1\n", {}, "or set delimiter: ';'"),
        (b"text,text\na,b\n", {}, "two columns have the name 'text'"),
        ("text,n\na,1\n".encode("utf-16"), {}, "looks like UTF-16"),
        (b"PAR1\x15\x04\x15\x80", {}, "{name: parquet}"),
        (b'"text\n', {}, "malformed CSV"),
        (b"", {}, "holds no text"),
    ],
)
def test_a_header_that_cannot_be_used(tmp_path, data, more, says):
    path = write(tmp_path / "t.csv", data)
    for lenient in (False, True):
        with pytest.raises(DataError) as error:
            docs(path, skip_bad_rows=lenient, **more)
        assert says in str(error.value)


def test_delimiter_is_one_character(tmp_path):
    with pytest.raises(ConfigError, match="delimiter"):
        source(tmp_path, delimiter="ab")


# -- files given to a source that does not read them -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file", "reader"),
    [
        ("text", "t.csv", "csv"), ("text", "t.tsv.gz", "csv"), ("text", "t.jsonl", "jsonl"),
        ("text", "t.parquet", "parquet"),
        ("jsonl", "t.parquet", "parquet"), ("jsonl", "t.csv", "csv"), ("parquet", "t.jsonl", "jsonl"),
        ("csv", "t.jsonl", "jsonl"), ("chat", "t.csv", "csv"), ("panda_llm", "t.csv", "csv"),
    ],
)  # fmt: skip
def test_the_source_that_reads_it_is_named(tmp_path, name, file, reader):
    write(tmp_path / file, b"text\na\n")
    for path in (tmp_path / file, tmp_path / "t.*"):
        with pytest.raises(DataError, match=f"which the source {name} does not read.*name: {reader},"):
            registry.build("source", {"name": name, "path": str(path)}).on_disk()


def test_a_glob_over_many_kinds_takes_them_as_text(tmp_path):
    write(tmp_path / "a.py", "code\n")
    write(tmp_path / "b.csv", "x,y\n")
    found = registry.build("source", {"name": "text", "path": str(tmp_path / "*")})
    assert [d.text for d in found.documents("train", 0.0)] == ["code\n", "x,y\n"]


def test_parquet_under_another_name(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": ["a"] * 50}), tmp_path / "rows.data")
    for name in ("text", "jsonl"):
        with pytest.raises(DataError, match=r"rows\.data.*a parquet file; read it by the source {name: parquet}"):
            list(registry.build("source", {"name": name, "path": str(tmp_path / "rows.data")}).documents("train", 0.0))


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ('{"messages": [{"role": "user", "content": "hi"}]}', "messages"),
        ('{"conversations": []}', "sharegpt"),
        ('{"instruction": "a", "output": "b"}', "alpaca"),
        ('{"prompt": "a", "completion": "b"}', "prompt_completion"),
    ],
)
def test_rows_of_chats_name_the_source_for_them(tmp_path, row, kind):
    path = write(tmp_path / "c.jsonl", row + "\n")
    with pytest.raises(DataError, match=f"these look like {kind} rows: read them by {{name: chat.*objective: sft"):
        list(registry.build("source", {"name": "jsonl", "path": str(path)}).documents("train", 0.0))


def test_text_key_of_a_list_of_messages(tmp_path):
    path = write(tmp_path / "c.jsonl", '{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(DataError, match="is a list, not a string; these look like messages rows"):
        list(
            registry.build("source", {"name": "jsonl", "path": str(path), "text_key": "messages"}).documents("train", 0)
        )
