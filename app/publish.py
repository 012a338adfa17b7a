"""Push what was learned to the Hub, with words for what may go wrong there."""

from __future__ import annotations

from huggingface_hub import get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from osd_hf import ConfigError
from osd_hf_app.room import Room

__all__ = ["push"]


def push(room: Room, domain: str | None, repo_id: str, token: str | None) -> str:
    """
    Push the draft of a domain, or the base draft, as an ordinary model repo.

    Args:
        room (`Room`):
            Whose draft.
        domain (`str`, *optional*):
            `None` is the base draft, which has learned nothing.
        repo_id (`str`):
            As `user/name`.
        token (`str`, *optional*):
            With the right to write; the one that this machine is logged in with by default.

    Returns:
        `str`: where it is.

    Raises:
        ConfigError: no such draft, a bad name, no token, no network, or the Hub refused; says which.
    """
    repo_id, token = repo_id.strip(), (token or "").strip() or get_token()
    if domain is not None and domain not in room.assistant.drafts.domains:
        raise ConfigError(f"There is no draft of {domain!r} yet: nothing of that domain has been learned from.")
    if "/" not in repo_id:
        raise ConfigError(f"A repo is named as user/name, got {repo_id!r}.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"{repo_id!r} is no name of a repo: {error}") from error
    if not token:
        raise ConfigError("There is no token. Enter one with the right to write, or run `hf auth login` first.")
    try:
        commit = room.assistant.push_to_hub(repo_id, domain=domain, token=token)
    except OfflineModeIsEnabled as error:
        raise ConfigError("This app runs offline (HF_HUB_OFFLINE is set). Save to a folder instead.") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no")
        raise ConfigError(
            f"The Hub refused {repo_id!r} (status {status}): {first(error)}. Nothing is lost."
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # no network comes as any of these
        raise ConfigError(f"{repo_id!r} could not be pushed: {first(error)}. Nothing is lost; try again.") from error
    return str(getattr(commit, "repo_url", None) or f"https://huggingface.co/{repo_id}")


def first(error: BaseException) -> str:
    """What an error says, in one line."""
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)
