"""Everything that osd_hf raises: one root, and leaves that are also the built-in kind a caller would expect."""

from __future__ import annotations

from osd_hf.utils.masking import without_credentials


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
    """Learning failed earlier, after the answer had been delivered; the cause is chained."""


class CaptureError(OSDError, RuntimeError):
    """A sink failed while it was handed a trace; the answers were delivered, the cause is chained."""


class HubError(OSDError, RuntimeError):
    """The Hub refused a push, or could not be reached to the end; what was to be pushed is still there."""


class ServerError(OSDError, RuntimeError):
    """A serving engine that cannot be reached, or does not answer as needed; what was collected stays."""
