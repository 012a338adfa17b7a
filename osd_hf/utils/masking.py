"""Masks passwords, keys and tokens in texts that others may read: errors, logs, reports, cards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["shown_address", "shown_settings", "without_credentials", "without_secrets"]

# An address ends at the next space: passwords hold quotes, commas and brackets.
_ADDRESS = re.compile(r"//(\S*)")
_WHOLE_ADDRESS = re.compile(r"//(.*)", re.DOTALL)
# Headers, settings by name, and keys that are known by their looks.
_HEADER = re.compile(r"(?i)(\b(?:proxy-)?authorization\b['\"]?\s*[:=]\s*['\"]?)(?:[a-z][\w-]*\s+)?[^\s'\",]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s'\",]{8,}")
_SETTING = re.compile(
    r"(?i)((?<![a-z])(?:(?:api|access|auth|hub|secret|client)[_-]?(?:key|token|secret)|password|passwd|secret)"
    r"['\"]?\s*[:=]\s*)(?:'(?:\\.|[^'\\])+'|\"(?:\\.|[^\"\\])+\"|[^\s,;&)])[^\s,;&)]*"
)
_KEY = re.compile(
    r"(?<![A-Za-z0-9_])(?:(?:hf|api_org|gh[opsur]|github_pat|glpat)[_-]\w{16,}|sk-[\w-]{16,}|AKIA[A-Z0-9]{16})"
)
_SECRET_NAME = re.compile(r"(?i)-{0,2}(?:[\w.-]*[_.-])?(?:token|key|apikey|secret|password|passwd)")
_ADDRESS_NAME = re.compile(r"(?i)-{0,2}(?:[\w-]*[_-])?url")
_SCHEME = re.compile(r"(?i)(?:[a-z][a-z0-9+.-]*:)?//")


def without_credentials(text: str) -> str:
    """
    A text (a message, a line of a log, an entry of a report) without user and password, query and fragment of its
    addresses, and without what looks like a key. Masks too much rather than too little: a password may hold any
    character, so everything up to the last `@` of an address goes.
    """
    return _without_keys(_ADDRESS.sub(_masked, text))


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command as others may read them: flags, their values, both with `=` between them, words."""
    hidden: list[str] = []
    flag = ""  # that waits for its value
    for argument in arguments:
        name, equals, value = argument.partition("=")
        is_flag = name.startswith("-")
        if equals and not _SECRET_NAME.fullmatch(flag) and (is_flag or _SECRET_NAME.fullmatch(name)):
            hidden.append(f"{name}={_shown(value, name)}")
        else:
            hidden.append(_shown(argument, flag))
        flag = argument if is_flag and not equals else ""
    return hidden


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a report shows them: `***` for tokens and keys."""
    return {name: _shown(value, name) if isinstance(value, str) else value for name, value in settings.items()}


def shown_address(text: str) -> str:
    """A text that is one address and nothing else, as others may read it; its scheme may have been forgotten."""
    return _shown(text) if _SCHEME.match(text) else _shown(f"//{text}").removeprefix("//")


def _shown(value: str, name: str = "") -> str:
    """The value of a flag or a setting."""
    if _SECRET_NAME.fullmatch(name):
        return "***"
    if _ADDRESS_NAME.fullmatch(name):
        return shown_address(value)
    return _without_keys(_WHOLE_ADDRESS.sub(_masked, value))  # spaces included, as a password may hold one


def _masked(match: re.Match[str]) -> str:
    address = match[1]
    if mark := re.search(r"[?#]", address):
        before, after = address[: mark.start()], address[mark.end() :]
        if "@" in after:  # is it a password with such a character, or a query with an `@`?
            return "//***"
        tail = f"{mark[0]}***" if after.strip("*") else address[mark.start() :]
    else:
        before, tail = address, ""
    user, at, rest = before.rpartition("@")
    return f"//***@{rest}{tail}" if at else f"//{before}{tail}"


def _without_keys(text: str) -> str:
    text = _HEADER.sub(r"\1***", text)
    text = _BEARER.sub(r"\1***", text)
    return _KEY.sub("***", _SETTING.sub(r"\1***", text))
