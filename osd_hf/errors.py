"""Errors of this package, and functions that remove passwords, keys and tokens from texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class OSDError(Exception):
    """Base class of all errors of this package. Passwords and keys are removed from its text."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_credentials(arg) if isinstance(arg, str) else arg for arg in args))


class UnsupportedModelError(OSDError, ValueError):
    """A target or draft that does not support assisted generation, capture or learning."""


class UnsupportedGenerationError(OSDError, ValueError):
    """Arguments of `generate` with which the output would not be the target's, or nothing could be learned."""


class VocabularyMismatchError(OSDError, ValueError):
    """A target and a draft with different tokens."""


class ConfigError(OSDError, ValueError):
    """A setting outside its range, or settings that exclude each other."""


class DataError(OSDError, ValueError):
    """A data set or prompt file that is missing, empty, or lacks a column."""


class StoreError(OSDError, RuntimeError):
    """A store folder that cannot be read or written, or that this package did not make."""


class StateError(OSDError, RuntimeError):
    """A saved session that cannot be read, or that belongs to another draft."""


class LearnerError(OSDError, RuntimeError):
    """Learning failed, with the cause chained. Answers were delivered."""


class CaptureError(OSDError, RuntimeError):
    """A sink failed when it received a trace, with the cause chained. Answers were delivered."""


class HubError(OSDError, RuntimeError):
    """The Hub refused a push, or the connection failed. The local data is not changed."""


class ServerError(OSDError, RuntimeError):
    """A serving engine cannot be reached, or answers in an unexpected way. Collected data is kept."""


# --- secrets --------------------------------------------------------------------------------------------------------

# An address ends at the next space: passwords may contain quotes, commas and brackets.
_ADDRESS = re.compile(r"//(\S*)")
_WHOLE_ADDRESS = re.compile(r"//(.*)", re.DOTALL)
# Headers, settings by name, and keys with a known format.
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
    """Mask user, password, query and fragment of addresses in a text, and everything that looks like a key."""
    return _without_keys(_ADDRESS.sub(_masked, text))


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Mask the secrets in the arguments of a command: `--flag value`, `--flag=value`, and other words."""
    hidden: list[str] = []
    flag = ""  # the flag before its value
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
    """Mask tokens and keys in settings for a report."""
    return {name: _shown(value, name) if isinstance(value, str) else value for name, value in settings.items()}


def shown_address(text: str) -> str:
    """Mask the secrets in an address, with or without a scheme."""
    return _shown(text) if _SCHEME.match(text) else _shown(f"//{text}").removeprefix("//")


def _shown(value: str, name: str = "") -> str:
    if _SECRET_NAME.fullmatch(name):
        return "***"
    if _ADDRESS_NAME.fullmatch(name):
        return shown_address(value)
    return _without_keys(_WHOLE_ADDRESS.sub(_masked, value))  # a password may contain spaces


def _masked(match: re.Match[str]) -> str:
    # A password may contain any character, so everything up to the last `@` is masked.
    user, at, place = match[1].rpartition("@")
    if re.search(r"[?#]", user):  # a password with this character, or a query with an `@`
        return "//***"
    place = re.sub(r"(?s)([?#]).+", r"\1***", place)
    return f"//***@{place}" if at else f"//{place}"


def _without_keys(text: str) -> str:
    text = _HEADER.sub(r"\1***", text)
    text = _BEARER.sub(r"\1***", text)
    return _KEY.sub("***", _SETTING.sub(r"\1***", text))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without its full stop and without secrets."""
    lines = (line.strip() for line in without_credentials(str(error)).splitlines())
    return next((line.rstrip(".") for line in lines if line), type(error).__name__)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the most similar known name, or an empty text."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean `{found[0]}`?" if found else ""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the machine or a device ran out of memory."""
    phrases = ("out of memory", "not enough memory", "allocate memory", "memory allocation")
    is_by_text = isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in phrases)
    return isinstance(error, MemoryError) or is_by_text
