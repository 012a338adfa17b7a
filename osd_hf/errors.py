"""What osd_hf raises, and what errors, logs and reports may show: no passwords, no keys, no tokens."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class OSDError(Exception):
    """Root of every error raised by this package. Its text shows no password and no key of an address: it goes into
    logs, reports and pages."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_credentials(arg) if isinstance(arg, str) else arg for arg in args))


class UnsupportedModelError(OSDError, ValueError):
    """A target or draft that assisted generation, capture or learning cannot work with."""


class UnsupportedGenerationError(OSDError, ValueError):
    """Arguments of `generate` under which assisted output would not be the target's, or nothing could be learned."""


class VocabularyMismatchError(OSDError, ValueError):
    """Target and draft do not share one token space."""


class ConfigError(OSDError, ValueError):
    """A setting outside its range, or two settings that exclude each other."""


class DataError(OSDError, ValueError):
    """A data set or a prompt file that is missing, empty, or lacks the column asked for."""


class StoreError(OSDError, RuntimeError):
    """A store folder that cannot be read or written, or was not made by this package."""


class StateError(OSDError, RuntimeError):
    """A saved session that cannot be read, or belongs to another draft."""


class LearnerError(OSDError, RuntimeError):
    """Learning, or keeping what it needs, failed; the answers were delivered, the cause is chained."""


class CaptureError(OSDError, RuntimeError):
    """A sink failed while it was handed a trace; the answers were delivered, the cause is chained."""


class HubError(OSDError, RuntimeError):
    """The Hub refused a push, or could not be reached to the end; what was to be pushed is still there."""


class ServerError(OSDError, RuntimeError):
    """A serving engine that cannot be reached, or does not answer as needed; what was collected stays."""


# --- secrets -------------------------------------------------------------------------------------------------------

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


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line without its full stop, and without passwords and keys."""
    lines = (line.strip() for line in without_credentials(str(error)).splitlines())
    return next((line.rstrip(".") for line in lines if line), type(error).__name__)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was meant, in words that end a message; nothing where none is like it."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean `{found[0]}`?" if found else ""


OF_MEMORY = ("out of memory", "not enough memory", "allocate memory", "memory allocation")


def is_out_of_memory(error: Exception) -> bool:
    """Whether it is about memory that was too little, of the machine or of a device."""
    is_one = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's
    return is_one or (isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OF_MEMORY))
