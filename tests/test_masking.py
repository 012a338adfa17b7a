"""What is shown, logged, raised or written: never a password, a key or a token."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osd_hf.cli.main import main
from osd_hf.errors import ConfigError, OSDError, first_line, shown_settings, without_credentials, without_secrets
from osd_hf.hub import DraftFacts, draft_card
from osd_hf.utils.report import provenance

MARK = "QZX"  # stands in every part of a secret, so that no part of one can be overlooked
ODD = st.text(alphabet="@:/%?#&=;,'\"\\[]{}+~!$*0aü", max_size=3)
SECRETS = st.lists(ODD, max_size=4).map(lambda parts: MARK + "".join(part + MARK for part in parts))
SCHEMES = st.sampled_from(["http://", "https://", "HTTP://", "git+https://", "socks5://", "//"])
HOSTS = st.sampled_from(["localhost:8000", "host.example", "[::1]:80", "müller.example"])


@st.composite
def addresses(draw: st.DrawFn) -> str:
    """With a user, perhaps a password, secrets in the query and in the fragment: one of them at least."""
    kinds = draw(st.sets(st.sampled_from(["user", "query", "fragment"]), min_size=1))
    user = draw(SECRETS) + draw(st.sampled_from(["", ":"])) + draw(SECRETS) + "@" if "user" in kinds else ""
    name = draw(st.sampled_from(["api_key=", "token=", "sig=", "X-Amz-Signature=", "a=b&code=", ""]))
    query = "?" + name + draw(SECRETS) if "query" in kinds else ""
    fragment = "#access_token=" + draw(SECRETS) if "fragment" in kinds else ""
    return draw(SCHEMES) + user + draw(HOSTS) + draw(st.sampled_from(["", "/", "/v1/models"])) + query + fragment


@given(addresses(), st.sampled_from(["{} ", "{}, it said", "got {}", "'{}'", "a={};b", "{}\n{}", "({})."]))
def test_no_part_of_a_secret_of_an_address_is_left(address: str, around: str) -> None:
    text = around.replace("{}", address)
    masked = without_credentials(text)
    assert MARK not in masked
    assert without_credentials(masked) == masked
    assert MARK not in str(OSDError(text))
    assert MARK not in first_line(ValueError(text))


@given(addresses(), st.sampled_from(["{}", "--url={}", "--prompts {}", "--url {}", "--note=see {}"]))
def test_no_part_of_a_secret_is_left_in_a_command(address: str, argument: str) -> None:
    spaced = address.replace("0", " ")  # which a password may hold as well
    shown = without_secrets([part.replace("{}", spaced) for part in argument.split(" ", 1)])
    assert MARK not in " ".join(shown)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://host:8000/v1", "http://host:8000/v1"),
        ("see http://host/a, and http://b/c.", "see http://host/a, and http://b/c."),
        ("http://me:p@ss@host:8000/v1 is away", "http://***@host:8000/v1 is away"),
        ("http://me:p/ss@host/v1", "http://***@host/v1"),
        ("http://host/v1?api_key=x&a=b", "http://host/v1?***"),
        ("http://host/v1?a#x", "http://host/v1?***"),
        ("http://host/v1#x", "http://host/v1#***"),
        ("http://me:p?x@host/", "http://***"),  # nobody can tell a password from a query here
        ("http://host?mail=me@x.org", "http://***"),
        ("a mail to me@x.org, 3 // 2", "a mail to me@x.org, 3 // 2"),
        ("Authorization: Bearer abcdefghijkl was refused", "Authorization: *** was refused"),
        ("{'authorization': 'Basic bWU6cHc='}", "{'authorization': '***'}"),
        ("Bearer abc.def-ghi~jkl", "Bearer ***"),
        ("the key sk-proj-abcdefghijklmnop1234 is wrong", "the key *** is wrong"),
        ("hf_" + "aB3" * 11 + " may not write", "*** may not write"),
        ("osd_hf_quickstart_folder_with_a_long_name", "osd_hf_quickstart_folder_with_a_long_name"),
        ("task-abcdefghijklmnopqrstuvwxyz", "task-abcdefghijklmnopqrstuvwxyz"),
        ("api_key='abc', k=5", "api_key=***, k=5"),
        ("{'api_key': 'my key', 'k': 5}", "{'api_key': ***, 'k': 5}"),
        ('{"password": "a\\" b"}', '{"password": ***'),
        ("password: abc is wrong", "password: *** is wrong"),
        ("x-api-key: abc", "x-api-key: ***"),
        ("Authorization: Token abc was refused", "Authorization: *** was refused"),
        ("{'Authorization': 'ApiKey abc', 'k': 5}", "{'Authorization': '***', 'k': 5}"),
        ("max_new_tokens=96 and num_assistant_tokens=5", "max_new_tokens=96 and num_assistant_tokens=5"),
    ],
)  # fmt: skip
def test_what_is_masked_and_what_is_not(text: str, masked: str) -> None:
    assert without_credentials(text) == masked


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "me:QZX@host:8000"],
        ["--url=me:QZX@host:8000"],
        ["--url", "host:8000?key=QZX"],
        ["--url=host:8000#QZX"],
        ["--url", "me:p?QZX@host"],
        ["--url", "host?key=QZX&next=http://other"],
        ["--base_url=me:my QZX@host"],
        ["--hub-token", "QZX"],
        ["--hub_token=QZX"],
        ["--password", "QZX"],
        ["--client-secret=QZX"],
        ["api_key=QZX"],
        ["--note", "hf_QZX0123456789abcdefghij"],
    ],
)
def test_secrets_under_other_names_are_not_written_down(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["osd-hf", *arguments])
    assert MARK not in str(provenance(note="http://me:QZX@host", several=["http://host?QZX"], by={"n": "//QZX@h"}))


def test_an_option_that_only_sounds_like_a_secret_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["osd-hf", "--max-new-tokens", "96", "--api-key-file", "key", "--k=5"])
    assert provenance()["command"] == "osd-hf --max-new-tokens 96 --api-key-file key --k=5"


def test_what_a_command_fails_of_shows_no_secret(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def failing(_: argparse.Namespace) -> int:
        raise OSError("http://me:QZX@host:8000/v1?token=QZX is away")

    monkeypatch.setattr("osd_hf.cli.app.app_command", failing)
    assert main(["app"]) == 1
    said = capsys.readouterr().err
    assert "http://***" in said
    assert MARK not in said


def test_an_error_keeps_what_is_no_text(caplog: pytest.LogCaptureFixture) -> None:
    error = ConfigError("http://me:QZX@host", 5)
    assert error.args == ("http://***@host", 5)
    try:
        raise error
    except OSDError:
        logging.getLogger("osd_hf.test").exception("Failed.")
    assert "http://***@host" in caplog.text
    assert "QZX" not in str(caplog.records[0].exc_info)


def test_a_command_reports_to_nobody_how_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the environment says so."""
    constants = huggingface_hub.constants
    monkeypatch.setattr("osd_hf.cli.app.app_command", lambda _: 0)
    for name in ("HF_HUB_DISABLE_TELEMETRY", "GRADIO_ANALYTICS_ENABLED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    assert main(["app"]) == 0
    assert constants.HF_HUB_DISABLE_TELEMETRY
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    assert main(["app"]) == 0
    assert not constants.HF_HUB_DISABLE_TELEMETRY
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "True"


def test_settings_are_shown_without_tokens() -> None:
    assert MARK not in str(shown_settings({"url": "http://me:my QZX@host", "server_url": "host?key=QZX"}))
    settings = {"hub_token": "QZX", "hub_token_id": None, "prompts": "https://me:QZX@host/x?QZX", "max_new_tokens": 5}
    assert shown_settings(settings) == {
        "hub_token": "***", "hub_token_id": None, "prompts": "https://***@host/x?***", "max_new_tokens": 5,
    }  # fmt: skip


def test_a_card_shows_no_secret_of_its_facts() -> None:
    facts = DraftFacts(
        training={"Collected from": "https://me:QZX@host/v1"}, command="python x.py --url //me:QZX@host"
    )
    assert MARK not in draft_card("me/draft", facts).text
