"""Every flag of every command: its name, files of settings, hints, and that each setting is read."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from osd_hf.cli import learn, settings
from osd_hf.cli.main import COMMANDS, main, parse
from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.prompts import PromptSource, read_prompts

ROOT = Path(__file__).parents[1]
NEEDED = {  # arguments without which a command cannot start
    "distill": ["--draft", "d"],
    "draft": ["t", "new"],
    "learn": ["--store", "s", "--output-dir", "o"],
    "proxy": ["--url", "http://x", "--store", "s"],
    "push": ["me/draft", "--draft", "d"],
    "serve": ["--num-assistant-tokens", "5"],  # which other flags need
}
VALUES = {  # values for flags that take neither any number nor any word
    "divergence": "reverse_kl", "json": "-", "learner_device": "cpu", "num_assistant_tokens": 3, "num_layers": 2,
    "max_steps": 2, "chat_template_kwargs": '{"enable_thinking": false}', "compile_draft": True,
    "compile_target": False, "gpu": "h100",
}  # fmt: skip
OWN = sorted(COMMANDS.keys() - {"distill"})  # whose flags are all our own


def parser_of(command: str, given: Sequence[str] = ()) -> Any:
    return importlib.import_module(f"osd_hf.cli.{command}").make_parser(given, prog=f"osd-hf {command}")


def flags_of(command: str) -> dict[str, argparse.Action]:
    """The flags of a command by the names of their settings."""
    actions = reversed(parser_of(command)._actions)
    return {
        action.dest: action for action in actions if action.option_strings and action.dest not in ("help", "config")
    }


def settings_of(command: str, *given: str) -> tuple[Any, ...]:
    """The settings without the check that they go together."""
    parser = parser_of(command, given)
    found: tuple[Any, ...] = parser.make_settings(parser.read(given))
    return found


def another_value(name: str, action: argparse.Action) -> Any:
    """A value that differs from the default."""
    if name in VALUES:
        return VALUES[name]
    if isinstance(action.default, bool):
        return not action.default
    if action.choices is not None:
        return next(value for value in reversed(list(action.choices)) if value != action.default)
    if action.type is int or isinstance(action.default, int):
        return (action.default or 1) + 1
    return 0.5 if action.type is float or isinstance(action.default, float) else "named"


@pytest.mark.parametrize("command", OWN)
def test_every_flag_changes_the_settings_by_both_spellings_and_by_a_file(command: str, tmp_path: Path) -> None:
    needed = NEEDED.get(command, [])
    base = settings_of(command, *needed)
    for name, action in flags_of(command).items():
        value, rest, flag = another_value(name, action), list(needed), settings.option(name)
        if flag in rest:
            del rest[rest.index(flag) : rest.index(flag) + 2]
        changed = settings_of(command, *rest, f"{flag}={value}")
        assert changed != base, flag
        assert settings_of(command, *rest, f"--{name}={value}") == changed
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({name: value}))
        assert settings_of(command, *rest, "--config", str(file)) == changed, name


def test_arguments_of_the_chat_template_are_a_json_object_or_a_mapping_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, known = tmp_path / "settings.yaml", {"enable_thinking": False, "depth": [1]}
    file.write_text(yaml.safe_dump({"chat_template_kwargs": known}))
    for given in (["--chat-template-kwargs", json.dumps(known)], ["--config", str(file)]):
        for command in ("run", "distill"):
            assert settings_of(command, *NEEDED.get(command, ()), *given)[0].template_kwargs == known
    for wrong in ("enable_thinking", "[1]"):
        assert main(["serve", "--pair", "bundled", "--chat-template-kwargs", wrong]) == 2
        assert "--chat-template-kwargs must be a JSON object, got" in capsys.readouterr().err


def names_read(node: ast.AST) -> set[str]:
    """Names that are read as attributes, or stand as texts, except in declarations and checks."""
    called = getattr(getattr(node, "func", None), "attr", "")
    declared = getattr(getattr(getattr(node, "value", None), "func", None), "id", "") == "flag"
    if declared or called.startswith("check_"):
        return set()
    found = set[str]().union(*map(names_read, ast.iter_child_nodes(node)))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        found.add(node.attr)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.add(node.value)
    return found


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_setting_of_a_command_is_read(command: str) -> None:
    module = importlib.import_module(f"osd_hf.cli.{command}")
    sources = [Path(str(one.__file__)) for one in (module, settings, learn)]
    sources += [ROOT / "app" / "launch.py"] if command == "app" else []
    known = {f.name for kind in parser_of(command).dataclass_types for f in fields(kind)
             if issubclass(kind, settings.Settings)} - {"paper"}  # fmt: skip
    found = set[str]().union(*(names_read(ast.parse(source.read_text())) for source in sources))
    assert known - found == set()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["env", "t", "d", "--num-assistant-tokens", "5", "--rows", "0"], "--rows must be at least 1"),
        (["env", "t"], "Name two models"),
        (["run", "--pair=bundled", "--dtype", "bfloat16"], "--pair and --dtype exclude each other"),
        (["quickstart", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["quickstart", "--later-requests", "3", "--timed-requests", "4"], "at most --later-requests, got 4 of 3"),
        (["quickstart", "--output-dir", f"{__file__}/out"], "The output folder"),
        (["bench", "--num-requests", "0"], "--num-requests must be at least 1, got 0"),
        (["bench", "--num-assistant-tokens", "0"], "--num-assistant-tokens must be at least 1, got 0"),
        (["bench", "--subset", "c"], "--subset would change nothing without --prompts"),
        (["bench", "--store", "s"], "--store would change nothing without --compare"),
        (["bench", "--draft", "d"], "name both, or neither"),
        (["learn", "--store", "s", "--output-dir", "o", "--once", "--poll-seconds", "3"], "would change nothing with"),
        (["bench", "--target", "t", "--compare", "d", "--domain-column", "c"], "nothing without --prompts"),
        (["bench", "--compare", "d", "--store", "s", "--max-new-tokens", "9"], "--store and --max-new-tokens exclude"),
        (["bench", "--compare", "d", "--target", "t", "--threads", "2"], "--compare and --threads exclude each other"),
        (["push", "--draft", "d", "--export", "e", "--public"], "--export and --public exclude each other"),
        (["push", "me/draft", "--draft", "d", "--export", "e"], "--export and REPO exclude each other"),
        (["learn", "--store", "s", "--url", "u", "--collect-only", "--once"], "--collect-only and --once exclude"),
        (["learn", "--store", "s", "--url", "u", "--collect-only", "--batch-size", "8"], "and --batch-size exclude"),
        (["learn", *NEEDED["learn"], "--flush-every", "8"], "--flush-every would change nothing without --url"),
        (["env", "--batch-size", "8"], "name them"),
        (["env", "t", "d", "--pair", "bundled"], "--pair and MODEL exclude each other"),
        (["env", "--pair", "bundled", "--candidates", "text", "--num-assistant-tokens", "5"], "--candidates would"),
        (["run", "--pair=bundled", "--no-learn", "--store", "s"], "--store would change nothing without --learn"),
        (["push", "me/d", "--draft", "d", "--dry-run", "--output-dir", "o", "--public"], "--dry-run and --public"),
        (["push", "me/d", "--draft", ".", "--draft-revision", "v"], "--draft-revision is for a model on the Hub"),
        (["draft", "d"], "Name a TARGET and the DIR of the draft, or --pair"),
        (["draft", "t", "--seed", "1", "d", "--pair", "bundled"], "--pair and TARGET exclude each other"),
        (["run", "--pair=bundled", "--domain", "poetry"], "--domain must be one of sql, math, python"),
        (["learn", "--store", "s"], "--output-dir must name the folder"),
        (["proxy", *NEEDED["proxy"], "--draft", "d"], "--draft would change nothing without --learn"),
        (["push", "--draft", "d"], "Name the repository of the draft"),
        (["app", "--pair", "smollm2", "--dtype", "float16"], "--pair and --dtype exclude each other"),
        (["serve", "--pair", "bundled", "--target", "t", "--draft", "d"], "--pair and --target exclude each other"),
        (["serve", "--pair", "bundled", "--update-strategy", "manual"], "would never learn here"),
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused(
    given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(given) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("given", "read_first"),
    [
        (["run", "--target", "t", "--draft", "d", "--prompts", "ROWS", "--column", "prompt"], ("t", "v1")),
        (["bench", "--target", "t", "--draft", "d", "--prompts", "ROWS"], ("t", "v1")),
        (["bench", "--store", "STORE", "--compare", "d"], ("d", "v2")),
        (["draft", "t", "new"], ("t", "v1")),
        (["push", "--export", "new", "--draft", "d", "--target", "t"], ("t", "v1")),
        (["push", "me/draft", "--draft", "d", "--target", "t", "--before", "b"], ("t", "v1")),
        (
            ["learn", "--store", "s", "--url", "http://x", "--target", "t", "--prompts", "ROWS", "--collect-only"],
            ("t", "v1"),
        ),
        (["learn", "--store", "s", "--output-dir", "o", "--target", "t", "--draft", "d"], ("t", "v1")),
        (["serve", "--target", "t", "--draft", "d", "--port", "0"], ("t", "v1")),
    ],
)
def test_a_version_on_the_hub_and_its_code_reach_what_loads(
    given: list[str], read_first: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def from_pretrained(source: str, *, revision: str, trust_remote_code: bool, **more: Any) -> None:
        asked.append((source, revision, trust_remote_code))
        raise OSError("nothing is there")

    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "one"}\n')
    monkeypatch.setattr("osd_hf.models.AutoConfig.from_pretrained", from_pretrained)
    unused = {"STORE": "--revision", "--collect-only": "--draft-revision"}
    flags = {settings.option(name) for name in flags_of(given[0])} - {unused.get(word, "") for word in given}
    given = [{"ROWS": "rows.jsonl", "STORE": str(store)}.get(word, word) for word in given]
    known = {"--revision": "v1", "--draft-revision": "v2"}
    versions = [word for flag, version in known.items() if flag in flags for word in (flag, version)]
    assert main([*given, *versions, "--trust-remote-code"]) == 2
    assert asked[0] == (*read_first, True)


@pytest.mark.parametrize("command", OWN)
def test_help_texts_are_one_line_each(command: str) -> None:
    for name, action in flags_of(command).items():
        assert 0 < len(str(action.help)) <= 120, name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rnu"], "there is no command 'rnu'. Did you mean `run`?"),
        ([], "name a command"),
        (["--json", "-"], "unrecognized arguments: --json"),
        (["run", "--num-request", "3"], "unrecognized arguments: --num-request. Did you mean `--num-requests`?"),
        (["run", "--update-strategy", "idle"], "unrecognized arguments: --update-strategy"),
        (["learn", *NEEDED["learn"], "--tokn=hf_secret"], "unrecognized arguments: --tokn. Did you mean `--token`?"),
        (["draft"], "the following arguments are required: DIR"),
        (["run", "--update-interval", "soon"], "argument --update_interval/--update-interval: invalid int value"),
    ],
)
def test_a_typing_error_is_answered_with_what_was_meant(given: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_flags_go_before_a_file_and_lists_are_not_joined(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({
        "num-requests": 7, "domain": ["sql", "math"], "learning_rate": "1e-3", "num_logprobs": None, "gate": False,
        "pair": "bundled", "device": None,
    }))  # fmt: skip
    found, config = settings_of("run", "--domain", "finance", "--config", str(file), "--pair", "smollm2")
    assert (found.num_requests, found.domain, found.pair) == (7, ["finance"], "smollm2")
    assert (config.learning_rate, config.num_logprobs, config.gate) == (1e-3, None, False)
    assert settings_of("run", "--config", str(file))[0].domain == ["sql", "math"]
    assert settings_of("run", "--domain", "a", "--domain", "b", "c")[0].domain == ["a", "b", "c"]
    file.write_text('{"paper": true}')
    assert settings_of("serve", "--config", str(file))[1] == OnlineConfig.paper()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_request: 3", "sets `num_request`, which is no flag. Did you mean `num_requests`?"),
        ("num_requests: many", "argument --num_requests/--num-requests: invalid int value: 'many'"),
        ("dtype: int8", "argument --dtype: invalid choice"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(text: str, said: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    try:
        code: Any = main(["run", "--config", str(file)])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert said in capsys.readouterr().err
    assert main(["run", "--config", str(tmp_path / "missing.yaml")]) == 2


def test_the_version_is_shown(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "osd-hf 0.1.0\n"


def test_a_report_of_a_bug_has_its_facts(capsys: Any) -> None:
    assert main(["env", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert {f"{name} version" for name in ("osd_hf", "torch", "transformers", "peft", "trl", "accelerate")} <= set(
        facts
    )
    assert f"- platform: {facts['platform']}\n" in err


def test_a_configuration_of_a_local_data_set_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("main", "socratic"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": f"of {name}"}) + "\n")
    configs = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in ("main", "socratic")]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    (found,) = settings_of("bench", "--prompts", str(folder), "--subset", "socratic")
    source: PromptSource = found.source(found.prompts[0])
    assert [prompt.text for prompt in read_prompts(source)] == ["of socratic"]


@pytest.mark.parametrize("command", ["run", "serve", "quickstart", "bench", "learn", "env", "draft", "distill"])
def test_a_pair_is_loaded_by_its_name(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("osd_hf_app")
    monkeypatch.setattr("osd_hf_app.pair.smollm2_pair", lambda device: (device, "draft", "tokenizer"))
    found = settings_of(command, *NEEDED.get(command, []), "--pair", "smollm2")[0].load_pair()
    assert found == ("cpu", "draft", "tokenizer")


def test_a_configuration_is_saved_and_loaded_as_others_are(tmp_path: Path) -> None:
    config = OnlineConfig.paper(seed=3)
    config.save_pretrained(tmp_path / "new")
    assert OnlineConfig.from_pretrained(tmp_path / "new") == config
    assert OnlineConfig.from_pretrained(str(tmp_path / "new"), seed=4) == OnlineConfig.paper(seed=4)
    (tmp_path / "new" / "online_config.json").write_text('{"seeds": 3}')
    for name in ("new", "other"):
        with pytest.raises(ConfigError, match="No online_config.json can be read from"):
            OnlineConfig.from_pretrained(tmp_path / name)
