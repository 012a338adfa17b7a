"""Nothing is pushed where everybody reads it, unless that is asked for, and never the token that pushes."""

from __future__ import annotations

import contextlib
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.errors import HTTPError as NetworkError  # type: ignore[attr-defined]  # httpx's

from osd_hf.errors import ConfigError

__all__ = ["TokenStaysHere", "check_visibility", "refuse_public"]


def refuse_public(api: HfApi, repo_id: str, *, repo_type: str = "model", kept: str = "") -> None:
    """Raises ConfigError for a repo that is not known to be private, and what the Hub raises where it cannot be
    asked."""
    if api.repo_info(repo_id, repo_type=repo_type).private is not True:
        text = (
            f"{repo_id!r} is open to everybody, and a draft may have learned answers by heart. Make it private or "
            f"take another name; to push there all the same, say so: `private=False` (--public). {kept}"
        )
        raise ConfigError(text.strip())


def check_visibility(repo_id: str, token: str | None, private: bool | None) -> None:
    """Raises ConfigError for a model repo that is there and open to everybody, unless `private=False`. One that is not
    there, and a Hub that cannot be asked, are left to the push."""
    if private is False:
        return
    with contextlib.suppress(HfHubHTTPError, NetworkError, OSError, RuntimeError):
        refuse_public(HfApi(token=token), repo_id)


class TokenStaysHere:
    """Mixed in front of training arguments, which trainers write beside the weights and push with them."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hub_token": None}
