"""Every flag of every command: its one name, old names, files of settings, hints, and that it changes something."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import yaml
from saved_pair import save_pair
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import LONG

from osd_hf import CorrectionStore, OnlineAssistant, OnlineConfig
from osd_hf.cli import arguments as read
from osd_hf.cli import flags
from osd_hf.cli.arguments import GONE, RENAMED, add_flags, read_arguments
from osd_hf.cli.distill import read_settings
from osd_hf.cli.main import COMMANDS, MODULES, _asked, main
from osd_hf.decoding.hook import record_traces
from osd_hf.errors import ConfigError
from osd_hf.prompts import PromptSource, encode_turn, read_prompts
from osd_hf.server.listener import Listener

ROOT = Path(__file__).parents[1]
NEEDED = {  # by commands that name something in any case
    "collect": ["--store", "s"],
    "compare": ["t", "d"],
    "doctor": ["--url", "http://localhost:8000", "--target", "t", "--draft", "d"],
    "draft": ["t", "new"],
    "export": ["new", "--draft", "d"],
    "learn": ["--store", "s", "--output-dir", "o"],
    "plan": ["--target", "t", "--draft", "d"],
    "proxy": ["--url", "u", "--store", "s"],
    "push": ["me/draft", "--draft", "d"],
    "replay": ["--store", "s", "--draft", "d"],
    "serve": ["--num-assistant-tokens", "5"],  # with which all others go together
}
VALUES = {  # where a number plus one or a word will not do
    "divergence": "reverse_kl", "json": "-", "learner_device": "cpu", "api_key": "k",
    "num_assistant_tokens": 3, "num_layers": 2, "max_steps": 2,
    "chat_template_kwargs": '{"enable_thinking": false}',
}  # fmt: skip
# What one command makes of the settings of a whole class: all flags but those of trl, whose parser is `distill`'s.
KINDS = {
    name: getattr(importlib.import_module(f"osd_hf.cli.{MODULES.get(name, name)}"), f"{name.capitalize()}Settings")
    for name in COMMANDS
}


def actions_of(command: str) -> dict[str, argparse.Action]:
    return add_flags(argparse.ArgumentParser(), KINDS[command])


def settings_of(command: str, *given: str) -> Any:
    if command == "distill":  # whose parser is that of trl
        parser = argparse.ArgumentParser()
        add_flags(parser, KINDS[command])
        return read.settings_from(KINDS[command], vars(parser.parse_args(given)))
    return read_arguments(KINDS[command], given, prog=f"osd-hf {command}")


def another(command: str, name: str, action: argparse.Action, base: Any) -> Any:
    """A value that the flag has not by default."""
    outer, _, inner = action.dest.rpartition(".")
    before = getattr(getattr(base, outer) if outer else base, inner)
    if isinstance(action, argparse.BooleanOptionalAction):
        return before is not True
    if action.choices is not None:
        return next(value for value in reversed(list(action.choices)) if value != before)
    if name in VALUES:
        return VALUES[name]
    if action.type is int or isinstance(before, int):
        return (before or 1) + 1
    return 0.5 if action.type is float or action.metavar == "X" else "named"


def as_given(action: argparse.Action, value: Any) -> list[str]:
    name = action.option_strings[0]
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    return [f"{name}={value}"]


def with_underscores(argument: str) -> str:
    name, equals, value = argument.removeprefix("--").partition("=")
    return "--" + name.replace("-", "_") + equals + value


@pytest.mark.parametrize("command", sorted(KINDS))
def test_every_flag_changes_the_settings_by_both_spellings_and_by_a_file(command: str, tmp_path: Path) -> None:
    base, needed = settings_of(command, *NEEDED.get(command, ())), NEEDED.get(command, [])
    of_positional = [f.name for f, _ in read._fields(KINDS[command]) if f.metadata["positional"]]
    for name, action in actions_of(command).items():
        value = another(command, name, action, base)
        given = as_given(action, value)
        rest = list(needed)
        if name in of_positional:
            del rest[of_positional.index(name)]
        elif action.option_strings[0] in rest:
            place = rest.index(action.option_strings[0])
            del rest[place : place + 2]
        settings = settings_of(command, *rest, *given)
        assert settings != base, given
        underscored = [with_underscores(argument) for argument in given]
        assert read.spelled(command, underscored) == given
        if command != "distill":  # which reads its file by itself
            file = tmp_path / f"{name}.yaml"
            file.write_text(yaml.safe_dump({name: value}))
            assert settings_of(command, *rest, "--config", str(file)) == settings, name


def test_settings_of_the_chat_template_are_a_json_object_or_a_mapping_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, known = tmp_path / "settings.yaml", {"enable_thinking": False, "depth": [1]}
    file.write_text(yaml.safe_dump({"chat_template_kwargs": known}))
    for given in (["--chat-template-kwargs", json.dumps(known)], ["--config", str(file)]):
        assert settings_of("run", *given).chat_template_kwargs == known
        assert read_settings(given).chat_template_kwargs == known
    for wrong in ("enable_thinking", "[1]"):
        with pytest.raises(SystemExit):
            settings_of("run", "--chat-template-kwargs", wrong)
        assert "--chat-template-kwargs: it must be a JSON object, got" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="it must be a JSON object, got"):
            read_settings(["--chat-template-kwargs", wrong])


@pytest.mark.parametrize("command", ["collect", "doctor", "draft", "run"])
def test_settings_of_the_chat_template_change_the_prompts(command: str, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "rows.jsonl", models.tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{{ mark }}"
    path.write_text('{"question": "abc"}\n')
    given = ["--prompts", str(path), "--column", "question", "--chat-template-kwargs", '{"mark": "M"}']
    encoded = settings_of(command, *NEEDED.get(command, ()), *given).encode_prompts(tokenizer, None, limit=None)
    assert [tokenizer.decode(ids) for _, ids in encoded.prompts] == ["abcM"]


def test_a_shell_completes_every_command_and_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    script = capsys.readouterr().out
    assert ended.value.code == 0
    offered = dict(re.findall(r"^_shtab_osd_hf_(\w+)_option_strings=\((.*)\)$", script, re.MULTILINE))
    assert offered.keys() == COMMANDS.keys()
    for command, options in offered.items():
        flags = {option for action in actions_of(command).values() for option in action.option_strings}
        assert flags <= {option.strip("'") for option in options.split()}
    assert "_shtab_osd_hf_compare___output_dir_COMPGEN=_shtab_compgen_dirs" in script
    assert main(["--print-completion", "cmd"]) == 2
    assert "--print-completion takes bash, " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert "pip install 'osd-hf[completion]'" in capsys.readouterr().err


def names_read(node: ast.AST) -> set[str]:
    """Names that are read as attributes, or stand as texts to be read by, but not to be declared or checked."""
    called = getattr(getattr(node, "func", None), "attr", "")
    if isinstance(node, ast.AnnAssign) or called.startswith("check_") or called == "changed":
        return set()
    found = set[str]().union(*map(names_read, ast.iter_child_nodes(node)))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        found.add(node.attr)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.add(node.value)
    return found


@pytest.mark.parametrize("command", sorted(KINDS))
def test_every_setting_of_a_command_is_read(command: str) -> None:
    module = sys.modules[KINDS[command].__module__]
    sources = [Path(str(module.__file__)), Path(str(flags.__file__))]
    sources += [ROOT / "app" / "launch.py"] if command == "app" else []
    own = {f.name for f, _ in read._fields(KINDS[command])} - {"paper"}  # which says what the configuration begins as
    found = set[str]().union(*(names_read(ast.parse(source.read_text())) for source in sources))
    assert own - found == set()


# --- settings of the assistant --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def store(pair: Path, tmp_path_factory: Any) -> Path:
    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    path = tmp_path_factory.mktemp("store") / "store"
    with CorrectionStore(path) as written:
        prompts = [encode_turn(tokenizer, f"{i}") for i in range(8)]
        for trace in record_traces(target, prompts, max_new_tokens=6, domain="numbers"):
            written.append(trace)
    return path


def asked_a_few_times(running: Listener, app: Any, *, on_start: Any, on_stop: Any, shutdown_seconds: float) -> None:
    """What a server does between its start and its end, without one."""
    running._socket.close()
    on_start()
    on_start.__self__.join()  # the thread that loads
    with TestClient(app, base_url="http://localhost") as client:
        for i in range(8):
            client.post("/v1/completions", json={"prompt": f"{i}", "max_tokens": 6}).raise_for_status()
        assert 'osd_hf_requests_total{domain="(none)"}' in client.get("/metrics").text


LEARNING = ["--update-interval", "3", "--steps-per-update", "1", "--batch-size", "2"]


@pytest.mark.parametrize("command", ["run", "serve", "plan", "replay", "learn"])
def test_a_command_reads_each_setting_that_it_offers(
    command: str, pair: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    known, found = {f.name for f in fields(OnlineConfig)}, set[str]()

    def noted(self: OnlineConfig, name: str) -> Any:
        if name in known:
            code = sys._getframe(1).f_code
            is_own = code.co_filename.endswith("config.py") and code.co_name not in ("reads_text", "compared_k")
            # Copies, checks and reports of all fields are no use of one.
            if not is_own and not code.co_filename.endswith(("dataclasses.py", "cli/flags.py")):
                found.add(name)
        return object.__getattribute__(self, name)

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(6)))
    models = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]
    given = {
        "run": [*models, "--prompts", str(prompts), "--column", "prompt", "--max-new-tokens", "6", *LEARNING],
        "serve": [
            *models,
            "--port",
            "0",
            "--state-dir",
            str(tmp_path / "session"),
            *LEARNING,
            "--update-strategy",
            "idle",
        ],
        "plan": models,
        "replay": ["--store", str(store), *models[2:], "--learn", *LEARNING],
        "learn": ["--store", str(store), *models, "--once", "--by-domain", *LEARNING],
    }[command]
    given += [] if command in ("plan", "serve") else ["--output-dir", str(tmp_path / "out")]
    if command == "serve":
        close = OnlineAssistant.close
        monkeypatch.setattr(OnlineAssistant, "close", lambda self: self.wait_until_idle(LONG) and close(self))
        monkeypatch.setattr(Listener, "run", asked_a_few_times)
    monkeypatch.setattr("osd_hf.evaluation.display.plot_alpha", lambda *args, **kwargs: None)
    monkeypatch.setattr("osd_hf.cli.learn.plot_alpha", lambda *args, **kwargs: None)
    monkeypatch.setattr(OnlineConfig, "__getattribute__", noted, raising=False)
    assert main([command, *given]) == 0
    offered = {action.dest.removeprefix("config.") for action in actions_of(command).values() if "." in action.dest}
    assert offered - found == set()


@pytest.mark.parametrize("command", ["run", "serve", "plan", "replay", "learn"])
def test_a_setting_without_a_meaning_is_refused_with_the_reason(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    without = next(f.metadata["without"] for f, _ in read._fields(KINDS[command]) if "without" in f.metadata)
    assert without
    for name, reason in without.items():
        assert name in {f.name for f in fields(OnlineConfig)}
        with pytest.raises(SystemExit) as ended:
            settings_of(command, *NEEDED.get(command, ()), read.option(name), "x")
        assert ended.value.code == 2
        assert f"{read.option(name)}: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["replay", "--store", "s", "--draft", "d", "--batch-size", "3"], "--batch-size would change nothing"),
        (["replay", "--store", "s", "--draft", "d", "--paper"], "--paper would change nothing without --learn"),
        (["replay", "--store", "s", "--draft", "d", "--num-assistant-tokens", "auto"], "must not be auto"),
        (["replay", "--store", "s", "--draft", "d", "--device", "cpu", "--device-map", "auto"], "give one of them"),
        (["plan", *NEEDED["plan"], "--num-assistant-tokens", "5", "--candidates", "text"], "tokens auto"),
        (["run", "--bundled", "--output-dir", "o", "--dtype", "bfloat16"], "`dtype` needs a target and a draft"),
        (["run", "--bundled", "--output-dir", "o", "--column", "c"], "--column would change nothing without"),
        (["bench", "--output-dir", "o", "--subset", "c"], "--subset would change nothing without --prompts"),
        (["bench", "--output-dir", "o", "--revision", "v"], "`revision` needs a target and a draft by name"),
        (["bench", "--output-dir", "o", "--controlled", "1", "--split", "s"], "--split cannot be given with"),
        (["quickstart", "--output-dir", "o", "--trust-remote-code"], "`trust_remote_code` needs a target and a draft"),
        (["learn", *NEEDED["learn"], "--device-map", "auto"], "--device-map is of the target's weights"),
        (["learn", *NEEDED["learn"], "--public"], "--public is for --repo-id"),
        (["collect", "--store", "s", "--url", "http://x", "--poll-seconds", "1"], "--poll-seconds is for --follow"),
        (["collect", "--store", "s", "--url", "http://x", "--revision", "v"], "--revision is for --target"),
        (["app", "--pair", "smollm2", "--dtype", "float16"], "Leave out --dtype"),
        (["serve", "--bundled", "--target", "t", "--draft", "d"], "or --bundled, which brings both"),
        (["serve"], "or --bundled, which brings both"),
        (["serve", "--bundled", "--update-strategy", "manual"], "would never learn here"),
        (["serve", "--bundled", "--num-assistant-tokens", "5", "--candidates", "text"], "tokens auto"),
        (["serve", "--bundled", "--api-key-file", "none"], "The key cannot be read from none"),
        (["serve", "--bundled", "--host", "256.0.0.1"], "cannot be listened at"),
        (["serve", "--bundled", "--port", "0", "--dtype", "bfloat16"], "`dtype` needs a target and a draft"),
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused(
    given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(given) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "read_first"),
    [
        (["run", "--target", "t", "--draft", "d", "--prompts", "ROWS", "--column", "prompt"], ("t", "v1")),
        (["bench", "--target", "t", "--draft", "d", "--prompts", "ROWS"], ("t", "v1")),
        (["quickstart", "--target", "t", "--draft", "d"], ("t", "v1")),
        (["plan", "--target", "t", "--draft", "d"], ("t", "v1")),
        (["draft", "t", "new"], ("t", "v1")),
        (["export", "new", "--draft", "d", "--target", "t"], ("t", "v1")),
        (["push", "me/draft", "--draft", "d", "--target", "t", "--before", "b"], ("t", "v1")),
        (["collect", "--store", "s", "--log", "l", "--target", "t"], ("t", "v1")),
        (["learn", "--store", "s", "--output-dir", "o", "--target", "t", "--draft", "d"], ("t", "v1")),
        (["replay", "--store", "STORE", "--draft", "d"], ("d", "v2")),
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
    given = [{"ROWS": "rows.jsonl", "STORE": str(store)}.get(word, word) for word in given]
    known = [action.option_strings[0] for action in actions_of(given[0]).values()]
    versions = [
        word for name, v in (("--revision", "v1"), ("--draft-revision", "v2")) if name in known for word in (name, v)
    ]
    assert main([*given, *versions, "--trust-remote-code"]) == 2
    assert asked[0] == (*read_first, True)


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "old", "new"), [(command, *names) for command, table in RENAMED.items() for names in table.items()]
)
def test_an_old_name_is_the_new_one_with_one_notice(command: str, old: str, new: str, capsys: Any) -> None:
    known = {text: action for action in actions_of(command).values() for text in action.option_strings}
    assert old not in known
    value = [] if known[new].nargs == 0 else ["3"]
    needed = NEEDED.get(command, [])
    asked = [_asked([command, *needed, name, *value])[1] for name in (new, with_underscores(old))]
    assert asked[0] == asked[1] != settings_of(command, *needed)
    said = capsys.readouterr().err
    assert said == f"osd-hf: notice: {old} is now {new}; the next release knows the new name alone\n"


@pytest.mark.parametrize(("command", "old"), [(command, name) for command, names in GONE.items() for name in names])
def test_a_flag_that_is_gone_is_passed_over_with_a_notice(command: str, old: str, capsys: Any) -> None:
    needed = NEEDED[command]
    assert old not in {text for action in actions_of(command).values() for text in action.option_strings}
    for given in ([old, "vllm", *needed], [*needed, f"{old}=vllm"]):
        assert _asked([command, *given])[1] == settings_of(command, *needed)
        assert re.fullmatch(rf"osd-hf: notice: {old} is gone: .*refuses it\n", capsys.readouterr().err)


def test_the_documentation_has_a_table_of_old_names() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `(--\S+)` \| (.*) \|$", (ROOT / "docs/reference/cli.md").read_text(), re.MULTILINE
    )
    told = [(command, old, f"`{new}`") for command, names in RENAMED.items() for old, new in names.items()]
    told += [(command, old, f"none: {why}") for command, names in GONE.items() for old, why in names.items()]
    assert sorted(rows) == sorted(told)


def test_one_thing_has_one_name() -> None:
    given = {name: set(actions_of(name)) for name in KINDS}
    others = {"k", "requests", "limit", "compile", "state", "local_dir", "directory", "out", "new_tokens",
              "no_chat_template", "no_learn", "session"}  # fmt: skip
    assert not any(names & others for names in given.values())
    saved = set(KINDS) - {"collect", "distill", "doctor", "env", "plan", "serve"}
    assert all("output_dir" in given[name] for name in saved)
    assert {name for name in KINDS if "resume" in given[name]} == {"collect", "distill", "run"}
    assert {name for name in KINDS if "state_dir" in given[name]} == {"app", "learn", "serve"}


@pytest.mark.parametrize("command", sorted(KINDS))
def test_helps_are_sentences_of_their_own(command: str) -> None:
    for name, action in actions_of(command).items():
        help = str(action.help)
        assert re.match(r"[A-Z]", help) and help.endswith("."), (name, help)
        assert help.split()[0] not in {"As", "Instead", "Instead:", "Likewise,", "Of", "Such", "That", "Those"}, name


def test_a_positional_may_have_its_name_and_stand_anywhere() -> None:
    plain = settings_of("draft", "t", "new", "--num-layers", "2")
    assert settings_of("draft", "t", "--num-layers", "2", "new") == plain
    assert settings_of("draft", "--num-layers", "2", "--output-dir", "new", "t") == plain
    assert settings_of("draft", "--target", "t", "--num-layers=2", "--output-dir", "new") == plain


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rnu"], "there is no command 'rnu'. Did you mean `run`?"),
        (["xyzzy"], "there is no command 'xyzzy'.\n"),
        ([], "name a command"),
        (["--json", "-"], "unrecognized arguments: --json"),
        (["run", "--num-request", "3"], "unrecognized arguments: --num-request. Did you mean `--num-requests`?"),
        (["run", "--no_lern"], "unrecognized arguments: --no-lern. Did you mean `--no-learn`?"),
        (["run", "stray"], "unrecognized arguments: stray"),
        (["learn", *NEEDED["learn"], "--tokn=hf_secret"], "unrecognized arguments: --tokn. Did you mean `--token`?"),
        (["draft", "t", "new", "more"], "unrecognized arguments: more"),
        (["draft", "t"], "the following arguments are required: DIR"),
        (["replay", "--draft", "d"], "the following arguments are required: --store"),
        (["export", "new", "--output-dir", "new", "--draft", "d"], "unrecognized arguments: new"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(given: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        _asked(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# --- files of settings ----------------------------------------------------------------------------------------------


def test_flags_go_before_a_file_and_lists_are_not_joined(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({
        "num-requests": 7, "domain": ["sql", "math"], "learning_rate": "1e-3", "num_logprobs": None, "gate": False,
        "bundled": True, "device": None,
    }))  # fmt: skip
    settings = settings_of("run", "--domain", "finance", "--config", str(file), "--no-bundled")
    assert (settings.num_requests, settings.domain, settings.bundled) == (7, ["finance"], False)
    config = settings.config
    assert (config.learning_rate, config.num_logprobs, config.gate) == (1e-3, None, False)
    assert settings_of("run", "--config", str(file)).domain == ["sql", "math"]


def test_a_file_is_in_utf_8_wherever_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read_text = tmp_path / "run.yaml", Path.read_text
    file.write_text("domain: größe\n", encoding="utf-8")
    monkeypatch.setattr(Path, "read_text", lambda path, encoding="ascii": read_text(path, encoding))
    assert settings_of("run", "--bundled", "--config", str(file)).domain == ["größe"]


def test_a_file_sets_positionals_too(tmp_path: Path) -> None:
    file = tmp_path / "draft.yaml"
    file.write_text("target: t\nnum_layers: 2\n")
    plain = settings_of("draft", "t", "new", "--num-layers", "2")
    assert settings_of("draft", "new", "--config", str(file)) == plain
    assert settings_of("draft", "--config", str(file), "u", "new").target == "u"


def test_a_flag_beats_its_rival_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "push.yaml"
    file.write_text("repo_id: me/draft\ndraft: d\nprivate: true\n")
    assert settings_of("push", "--config", str(file)).private
    public = settings_of("push", "--config", str(file), "--public")
    assert (public.private, public.public, public.repo_id) == (False, True, "me/draft")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_request: 3", "sets `num_request`, which is no flag of osd-hf run. Did you mean `num_requests`?"),
        ("num_requests: many", "argument --num-requests: invalid int value: 'many'"),
        ("num_requests: true", "invalid int value: 'yes'"),
        ("dtype: int8", "argument --dtype: invalid choice"),
        ("prompts: {a: b}", "sets `prompts` to a mapping"),
        ("[1]", "must hold names with values"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(text: str, said: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert main(["run", "--config", str(file)]) == 2
    assert said in capsys.readouterr().err
    assert main(["run", "--config", str(tmp_path / "missing.yaml")]) == 2


# --- the rest -------------------------------------------------------------------------------------------------------


def test_the_list_of_commands_is_grouped(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    places = [shown.index(f"\n{title}:") for title in ("try", "measure", "learn", "make", "ship")]
    assert places == sorted(places)
    assert places[1] < shown.index("\n  bench ") < places[2]
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
    assert "float32" in facts["dtypes on cpu"]
    assert f"- platform: {facts['platform']}\n" in err


@pytest.mark.parametrize(("kind", "module", "said"), [
    ("mps", SimpleNamespace(), "mps:0"),
    ("xpu", SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(name="Max", total_memory=48 << 30)),
     "Max (48 GiB)"),
])  # fmt: skip
def test_accelerators_of_all_kinds_are_told(
    kind: str, module: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: kind)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    monkeypatch.setattr("torch.get_device_module", lambda device: module)
    monkeypatch.setattr("osd_hf.cli.env.DTYPES", ())  # nothing is computed there
    assert main(["env", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["accelerators"] == said
    assert facts[f"dtypes on {kind}:0"] == ""  # there is none here


def test_a_configuration_of_a_local_data_set_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("main", "socratic"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": f"of {name}"}) + "\n")
    configs = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in ("main", "socratic")]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    settings = settings_of("bench", "--prompts", str(folder), "--subset", "socratic")
    source: PromptSource = settings.source(settings.prompts[0], default_column="prompt")
    assert [prompt.text for prompt in read_prompts(source)] == ["of socratic"]
