"""Prompts from files: columns, templates, what is skipped, what is refused."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from saved_pair import save_pair
from transformers import AutoTokenizer

from osd_hf.errors import ConfigError, DataError
from osd_hf.prompts import Prompt, PromptSource, encode_prompts, encode_turn, fingerprint, read_prompts

ROWS = [{"db": "a", "question": "How many?", "n": 1}, {"db": "b", "question": "Which?", "n": 2}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_pair(tmp_path_factory.mktemp("pair")) / "target")


@pytest.fixture(scope="module")
def plain_tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_pair(tmp_path_factory.mktemp("pair"), chat_template=False) / "target")


def write_rows(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_a_column_of_a_file_is_read_in_order(tmp_path, name):
    location = write_rows(tmp_path / name, ROWS)
    prompts = list(read_prompts(PromptSource(location, column="question", domain_column="n")))
    assert prompts == [Prompt(0, "How many?", "1"), Prompt(1, "Which?", "2")]


def test_a_template_takes_several_columns_and_written_escapes(tmp_path):
    location = write_rows(tmp_path / "rows.jsonl", ROWS)
    source = PromptSource(location, template=r"db: {db}\n{question:.3}", domain="sql")
    assert [p.text for p in read_prompts(source)] == ["db: a\nHow", "db: b\nWhi"]
    assert {p.domain for p in read_prompts(source)} == {"sql"}


def test_a_changed_file_is_read_anew(tmp_path):
    path = tmp_path / "rows.jsonl"
    for rows in (ROWS, ROWS[::-1]):
        source = PromptSource(write_rows(path, rows), column="question")
        assert [p.text for p in read_prompts(source)] == [row["question"] for row in rows]


def test_rows_without_text_are_empty_prompts(tmp_path):
    rows = [{"a": None, "b": "x"}, {"a": "  ", "b": None}, {"a": "", "b": "y"}]
    location = write_rows(tmp_path / "rows.jsonl", rows)
    assert [p.text.strip() for p in read_prompts(PromptSource(location, column="a"))] == ["", "", ""]
    assert [p.text for p in read_prompts(PromptSource(location, template="{a}{b}"))] == ["", "", "y"]


def test_a_missing_column_names_those_found(tmp_path):
    location = write_rows(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(DataError, match="no column 'prompt'; its columns are db, question, n"):
        read_prompts(PromptSource(location, column="prompt"))
    with pytest.raises(DataError, match="no column 'text', 'label'"):
        read_prompts(PromptSource(location, template="{text} {db}", domain_column="label"))


def test_a_column_that_is_no_text_is_refused(tmp_path):
    prompts = read_prompts(PromptSource(write_rows(tmp_path / "rows.jsonl", ROWS), column="n"))
    with pytest.raises(DataError, match="column 'n' holds a int, not text"):
        next(prompts)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="There is no file"):
        read_prompts(PromptSource(str(tmp_path / "rows.jsonl"), column="a"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_an_empty_file_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="is empty"):
        read_prompts(PromptSource(str(tmp_path / name), column="a"))


def test_a_file_without_rows_is_refused(tmp_path):
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="has no rows"):
        read_prompts(PromptSource(str(tmp_path / "rows.parquet"), column="a"))
    with pytest.raises(DataError):
        read_prompts(PromptSource(write_rows(tmp_path / "rows.json", []), column="a"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_an_unreadable_file_is_refused_in_one_line(tmp_path, name, capfd):
    (tmp_path / name).write_bytes(b"\x00no rows\xff")
    with pytest.raises(DataError, match="cannot be read: ") as caught:
        read_prompts(PromptSource(str(tmp_path / name), column="a"))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "rows.txt").write_text("How many?")
    with pytest.raises(DataError, match="none of .json, .jsonl, .parquet"):
        read_prompts(PromptSource(str(tmp_path / "rows.txt"), column="a"))


def test_a_data_set_out_of_reach_is_refused():
    with pytest.raises(DataError, match="nobody/nothing cannot be read"):
        read_prompts(PromptSource("nobody/nothing", column="a"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "got neither"),
        ({"column": "a", "template": "{a}"}, "got both"),
        ({"column": "a", "domain": "x", "domain_column": "y"}, "one of them"),
    ],
)
def test_a_source_says_once_where_things_are(settings, message):
    with pytest.raises(ConfigError, match=message):
        PromptSource("rows.jsonl", **settings)


@pytest.mark.parametrize("template", ["no column", "{}", "{a", "{0"])
def test_a_template_without_columns_is_refused(tmp_path, template):
    location = write_rows(tmp_path / "rows.jsonl", [{"a": "x"}])
    with pytest.raises(ConfigError, match="prompt template"):
        read_prompts(PromptSource(location, template=template))


def test_a_template_that_does_not_fit_names_the_row(tmp_path):
    location = write_rows(tmp_path / "rows.jsonl", [{"a": "x"}])
    with pytest.raises(DataError, match="Row 0"):
        list(read_prompts(PromptSource(location, template="{a:d}")))


def test_a_turn_goes_through_the_chat_template(tokenizer, plain_tokenizer):
    assert tokenizer.decode(encode_turn(tokenizer, "Hi")) == "<s>[user]Hi[answer]"
    assert tokenizer.decode(encode_turn(tokenizer, "Hi", chat_template=False)) == "Hi"
    assert plain_tokenizer.decode(encode_turn(plain_tokenizer, "Hi")) == "Hi"


def test_empty_and_long_prompts_are_skipped_and_counted(plain_tokenizer):
    stream = iter([Prompt(0, "ab"), Prompt(1, " "), Prompt(2, "abcdef"), Prompt(3, "cd"), Prompt(4, "ef")])
    encoded = encode_prompts(stream, plain_tokenizer, limit=2, max_prompt_tokens=4)
    assert [prompt.index for prompt, _ in encoded.prompts] == [0, 3]
    assert (encoded.skipped_empty, encoded.skipped_long) == (1, 1)


def test_nothing_to_serve_is_refused(plain_tokenizer):
    with pytest.raises(DataError, match="1 prompts without text, 1 longer than 2 tokens"):
        encode_prompts([Prompt(0, ""), Prompt(1, "long")], plain_tokenizer, max_prompt_tokens=2)


def test_a_fingerprint_tells_streams_apart():
    base = [(Prompt(0, "a", "x"), [1, 2])]
    assert fingerprint(base) == fingerprint([(Prompt(0, "a", "x"), [1, 2])])
    assert fingerprint(base) != fingerprint([(Prompt(0, "a", "y"), [1, 2])])
    assert fingerprint(base) != fingerprint([(Prompt(0, "a", "x"), [1, 3])])
