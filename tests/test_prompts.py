"""Prompts from files: columns, templates, what is skipped, what is refused."""

from __future__ import annotations

import copy
import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from saved_pair import save_pair
from transformers import AutoTokenizer

from osd_hf.cli.main import main
from osd_hf.errors import ConfigError, DataError
from osd_hf.prompts import (
    Prompt,
    PromptSource,
    chat_message,
    encode_prompts,
    encode_turn,
    prompts_digest,
    read_prompts,
    render_chat,
)

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
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.csv"])
def test_a_column_of_a_file_is_read_in_order(tmp_path, name):
    location = write_rows(tmp_path / name, ROWS)
    prompts = list(read_prompts(PromptSource(location, column="question", domain_column="n")))
    assert prompts == [Prompt(0, "How many?", "1"), Prompt(1, "Which?", "2")]


def test_a_template_takes_several_columns_and_written_escapes(tmp_path):
    location = write_rows(tmp_path / "rows.jsonl", ROWS)
    source = PromptSource(location, template=r"db: {db}\n{question}", domain="sql")
    assert [p.text for p in read_prompts(source)] == ["db: a\nHow many?", "db: b\nWhich?"]
    assert {p.domain for p in read_prompts(source)} == {"sql"}


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


def test_files_that_cannot_be_used_are_refused(tmp_path):
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    (tmp_path / "rows.txt").write_text("How many?")
    (tmp_path / "empty.jsonl").touch()
    for location, reason in (
        (tmp_path / "nowhere.jsonl", "There is no file"),
        (tmp_path / "empty.jsonl", "has no rows"),
        (tmp_path / "rows.parquet", "has no rows"),
        (tmp_path / "rows.txt", "none of .json, .jsonl, .parquet, .csv"),
        ("nobody/nothing", "nobody/nothing cannot be read"),
    ):
        with pytest.raises(DataError, match=reason):
            read_prompts(PromptSource(str(location), column="a"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_an_unreadable_file_is_refused_in_one_line(tmp_path, name, capfd):
    (tmp_path / name).write_bytes(b"\x00no rows\xff")
    with pytest.raises(DataError, match="cannot be read: ") as caught:
        read_prompts(PromptSource(str(tmp_path / name), column="a"))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"column": "a", "template": "{a}"}, "got both"),
        ({"column": "a", "domain": "x", "domain_column": "y"}, "one of them"),
    ],
)
def test_a_source_says_once_where_things_are(settings, message):
    with pytest.raises(ConfigError, match=message):
        PromptSource("rows.jsonl", **settings)


@pytest.mark.parametrize("template", ["no column", "{}", "{a", "{0", '{"a": 1}'])
def test_a_template_without_columns_is_refused(tmp_path, template):
    location = write_rows(tmp_path / "rows.jsonl", [{"a": "x"}])
    with pytest.raises(ConfigError, match="prompt template"):
        read_prompts(PromptSource(location, template=template))


def test_a_turn_goes_through_the_chat_template(tokenizer, plain_tokenizer):
    assert tokenizer.decode(encode_turn(tokenizer, "Hi")) == "<s>[user]Hi[answer]"
    assert tokenizer.decode(encode_turn(tokenizer, "Hi", chat_template=False)) == "Hi"
    assert plain_tokenizer.decode(encode_turn(plain_tokenizer, "Hi")) == "Hi"


def test_a_digest_tells_streams_apart():
    base = [(Prompt(0, "a", "x"), [1, 2])]
    assert prompts_digest(base) == prompts_digest([(Prompt(0, "a", "x"), [1, 2])])
    assert prompts_digest(base) != prompts_digest([(Prompt(0, "a", "y"), [1, 2])])
    assert prompts_digest(base) != prompts_digest([(Prompt(0, "a", "x"), [1, 3])])


def texts(path, **source):
    return [prompt.text for prompt in read_prompts(PromptSource(str(path), **source))]


def problems(path, **source):
    return [prompt.problem for prompt in read_prompts(PromptSource(str(path), **source))]


def test_empty_and_long_prompts_are_skipped_and_listed_once(plain_tokenizer, caplog):
    stream = iter([Prompt(0, "ab"), Prompt(1, " "), Prompt(2, "abcdef"), Prompt(3, "cd"), Prompt(4, "ef")])
    encoded = encode_prompts(stream, plain_tokenizer, limit=2, max_prompt_tokens=4)
    assert [prompt.index for prompt, _ in encoded.prompts] == [0, 3]
    assert encoded.skipped == {"no text": [1], "more than the 4 tokens that there is room for": [2]}
    (message,) = caplog.messages
    assert message == "Skipped 2 of 4 prompts: row 1: no text; row 2: more than the 4 tokens that there is room for."


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_that_is_no_text_costs_no_other_row(tmp_path, name):
    rows = [{"a": "x"}, {"a": None}, {"b": 1}, *({"a": value} for value in (5, [], {"b": "c"}, "half \ud83d", "y"))]
    path = write_rows(tmp_path / name, rows)
    assert texts(path, column="a") == ["x", "", "", "", "", "", "", "y"]
    found = problems(path, column="a")
    no_text = "`a` must be a text of whole characters, or a list of parts of the type `text`"
    assert found == [None, "`a` is null", "`a` is null", no_text, "no text", no_text, no_text, None]


def test_a_line_that_is_no_json_object_costs_no_other_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "x"}\n\n  \n[1]\n{"a": "\xff"}\n{"a": "y"}\n{"a": ' + b"9" * 5000 + b'}\n{"a": "cut')
    assert texts(path, column="a") == ["x", "", "", "y", "", ""]
    said = problems(path, column="a")
    assert said[1:3] == ["it is a value of type `list`, not a JSON object", "it is not UTF-8 text"]
    assert all(problem.startswith("it is not valid JSON: ") for problem in said[4:])


def test_content_of_several_parts_is_read_as_its_text(tmp_path):
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    rows = [{"m": [{"content": "a"}]}, {"m": [{"content": parts}]}, {"m": [{"content": [{"type": "image"}]}]}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert texts(path, template="{m[0][content]}") == ["a", "bc", ""]
    assert "a list of parts of the type `text`" in problems(path, template="{m[0][content]}")[2]
    path = write_rows(tmp_path / "parts.jsonl", [{"c": "a"}, {"c": parts}])
    assert texts(path, column="c") == ["a", "bc"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_row_that_does_not_fit_the_template_costs_no_other_row(tmp_path, name):
    rows = [{"m": [{"c": "x"}]}, {"m": []}, {"m": None}, {"m": [{"c": None}]}, {"m": [{"c": "y"}, {"c": "z"}]}]
    path = write_rows(tmp_path / name, rows)
    assert texts(path, template="{m[0][c]}") == ["x", "", "", "", "y"]
    assert "does not fit the template (IndexError" in problems(path, template="{m[0][c]}")[1]
    assert texts(path, template="{m[-1][c]}") == ["x", "", "", "", "z"]
    for template in ("{m[c]}", "{m[0][d]}", "{m.c}"):
        assert all(problems(path, template=template))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ('{"q": "{q}"}', '{"q": "why?"}'),
        ('Answer as {"a": [1, {}]}: {q}', 'Answer as {"a": [1, {}]}: why?'),
        ("{q:.3} } {q}", "{q:.3} } why?"),
        ("{a b} {c.d} {e[f]} {e.f}", "1 2 3 3"),
    ],
)
def test_braces_that_name_no_column_are_text(tmp_path, template, text):
    row = {"q": "why?", "a b": "1", "c.d": "2", "e": {"f": "3"}, "a": "unused"}
    assert texts(write_rows(tmp_path / "rows.jsonl", [row]), template=template) == [text]


def test_an_identifier_in_braces_that_is_no_column_is_refused(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"q": "why?"}])
    with pytest.raises(DataError, match="no column 'question'; its columns are q"):
        texts(path, template='{"q": "{question}"}')


def test_settings_reach_the_chat_template(tokenizer, plain_tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if think is defined %}{{ think }}{% endif %}"
    ids = encode_turn(tokenizer, "Hi", chat_template_kwargs={"think": "!"})
    assert tokenizer.decode(ids) == "Hi!"
    encoded = encode_prompts([Prompt(0, "Hi")], tokenizer, chat_template_kwargs={"think": "!"})
    assert encoded.prompts[0][1] == ids
    with pytest.raises(ConfigError, match="must not hold `tokenize`"):
        encode_turn(tokenizer, "Hi", chat_template_kwargs={"tokenize": True})
    for one, chat_template in ((plain_tokenizer, True), (tokenizer, False)):
        with pytest.raises(ConfigError, match="`chat_template_kwargs` are for a chat template"):
            encode_turn(one, "Hi", chat_template=chat_template, chat_template_kwargs={"think": "!"})


def test_what_a_chat_template_raises_is_the_reason_of_the_row(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'a' %}{{ raise_exception('no a') }}{% endif %}{{ messages[0]['content'] }}"
    )
    encoded = encode_prompts([Prompt(0, "a"), Prompt(1, "b")], tokenizer)
    assert [prompt.index for prompt, _ in encoded.prompts] == [1]
    assert "no a" in next(iter(encoded.skipped))
    tokenizer.chat_template = "{{ messages[0].content.nothing.more }}"
    with pytest.raises(DataError, match="the chat template cannot take it .UndefinedError"):
        render_chat(tokenizer, [{"role": "user", "content": "a"}], None)


def test_a_message_is_given_to_the_template_without_nulls_and_with_parsed_arguments():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning_content": "r"}
    parsed = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
    assert chat_message(message) == {
        "role": "assistant", "content": "", "tool_calls": [parsed], "reasoning_content": "r"
    }  # fmt: skip
    plain = {"role": "assistant", "content": "a"}
    assert chat_message({**plain, "tool_calls": []}) == plain
    odd = {**call, "function": {"name": "f", "arguments": "x: 1"}}
    assert chat_message({"role": "assistant", "tool_calls": [odd]})["tool_calls"] == [odd]
    with pytest.raises(DataError, match="must be a text"):
        chat_message({"role": "user", "content": None})


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
LABELED = {"id": 7, "answer": "no"}
FORMATS = {  # file -> a row, and its prompt in the chat template
    "trl_chat.jsonl": ({"prompt": [USER], "completion": [ANSWER]}, "[user]Hi[answer]"),
    "trl_text.parquet": ({"prompt": "Hi", "completion": "Yes"}, "[user]Hi[answer]"),
    "trl_preference.json": ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, "[user]Hi[answer]"),
    "messages.parquet": ({"messages": [USER, ANSWER, USER, ANSWER]}, "[user]Hi[assistant]Yes[user]Hi[answer]"),
    "messages_and_prompt.jsonl": ({**LABELED, "prompt": "x", "messages": [USER, ANSWER]}, "[user]Hi[answer]"),
    "share_gpt.json": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}, "[user]Hi[answer]"
    ),
    "prompt.csv": ({**LABELED, "prompt": "Hi"}, "[user]Hi[answer]"),
    "question.jsonl": ({**LABELED, "question": "Hi"}, "[user]Hi[answer]"),
    "alpaca.json": ({"instruction": "Hi", "input": "you", "output": "Yes", "text": "all"}, "[user]Hi\n\nyou[answer]"),
    "dolly.parquet": ({"instruction": "Hi", "context": "", "response": "Yes"}, "[user]Hi[answer]"),
    "text.csv": ({**LABELED, "text": "Hi"}, "[user]Hi[answer]"),
    "single.parquet": ({"anything": "Hi"}, "[user]Hi[answer]"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_common_format_is_read_without_naming_columns(tmp_path, name, tokenizer):
    row, shown = FORMATS[name]
    prompts = encode_prompts(read_prompts(PromptSource(write_rows(tmp_path / name, [row, row]))), tokenizer)
    assert [tokenizer.decode(ids) for _, ids in prompts.prompts] == [f"<s>{shown}"] * 2


def test_chats_are_served_without_naming_columns(tmp_path, pair, monkeypatch):
    monkeypatch.setattr("osd_hf.evaluation.display.plot_learning", lambda *args, **kwargs: None)
    location, folder = write_rows(tmp_path / "chats.jsonl", [FORMATS["messages.parquet"][0]] * 2), tmp_path / "run"
    given = ["run", "--target", str(pair / "target"), "--draft", str(pair / "draft"), "--output-dir", str(folder)]
    assert main([*given, "--prompts", location, "--keep-text", "--no-learn", "--max-new-tokens", "2"]) == 0
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [prompt.text for prompt in read_prompts(PromptSource(location))]


def test_data_that_may_be_read_in_two_ways_names_the_columns(tmp_path):
    for row in ({"prompt": "a", "question": "b"}, {"title": "a", "body": "b"}):
        location = write_rows(tmp_path / "rows.jsonl", [row])
        with pytest.raises(DataError, match=f"its columns are {', '.join(row)}. Name one by `column`"):
            read_prompts(PromptSource(location))


def test_chats_with_tools_of_a_row_and_unusable_chats(tmp_path, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ tools[0].name }}{{ mark }}{{ messages[-1].content }}"
    empty = {"messages": [{"role": "user", "content": " "}], "tools": None, "chat_template_kwargs": None}
    wrong = {**empty, "messages": [{"role": "user", "content": 5}]}
    row = {"messages": [USER, ANSWER], "tools": [{"name": "T"}], "chat_template_kwargs": {"mark": "M"}}
    found = list(read_prompts(PromptSource(write_rows(tmp_path / "rows.jsonl", [row, empty, wrong]))))
    assert tokenizer.decode(encode_turn(tokenizer, found[0], chat_template_kwargs={"mark": "other"})) == "TMHi"
    assert [prompt.problem for prompt in found][:2] == [None, "no text"]
    assert "`content` must be a text" in str(found[2].problem)
