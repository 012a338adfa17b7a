"""Save a draft as a model repo, push it to the Hub, and export it for vLLM."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.errors import HTTPError as NetworkError  # type: ignore[attr-defined]  # httpx's
from huggingface_hub.utils._validators import validate_repo_id
from transformers import PreTrainedModel

from osd_hf.errors import ConfigError, HubError, StateError, first_line
from osd_hf.hub.cards import EVALUATION, DraftFacts, Evaluation, draft_card
from osd_hf.models import align_vocab, fixed_k, is_peft, load_model, merged, unwrap, vocab_size_of
from osd_hf.target_version import recorded_target, write_target
from osd_hf.utils.report import make_folder

HUB_ERRORS = (NetworkError, OSError, RuntimeError)
TOLERANCE, HALF_TOLERANCE = 1e-4, 5e-2  # of log-probs; half precision rounds differently


# --- folders --------------------------------------------------------------------------------------------------------


def save_draft(
    directory: str | os.PathLike[str],
    draft: Any,
    tokenizer: Any = None,
    *,
    num_assistant_tokens: int | None = None,
    repo_id: str | None = None,
    facts: DraftFacts | None = None,
    evaluation: Evaluation | None = None,
) -> None:
    """
    Save a draft as a model repo: weights, tokenizer, a generation config with a fixed k, the evaluation with its
    prompts, and the model card. Of a `PeftModel` only the adapter is saved. By default, k is that of the evaluation or
    of the draft, and the card's code loads the folder instead of a repo. Raises ConfigError if the folder cannot be
    written.
    """
    is_adapter = is_peft(draft)
    folder = Path(directory)
    make_folder(folder)
    k = num_assistant_tokens or (evaluation.num_assistant_tokens if evaluation is not None else None)
    facts = facts or DraftFacts(is_adapter=is_adapter)
    facts = replace(facts, target_version=facts.target_version or recorded_target(draft))
    with fixed_k(draft, k):
        draft.save_pretrained(folder)
        if is_adapter:  # transformers also reads a generation config next to an adapter
            unwrap(draft).generation_config.save_pretrained(folder)
    write_target(folder, facts.target_version)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if evaluation is not None:
        evaluation.write(folder / EVALUATION)
    draft_card(repo_id or str(directory), facts, evaluation).save(folder / "README.md")


def export_to_vllm(
    directory: str | os.PathLike[str],
    draft: Any,
    target: PreTrainedModel,
    tokenizer: Any,
    *,
    num_assistant_tokens: int = 5,
    target_name: str | None = None,
) -> list[str]:
    """
    Save a draft for vLLM's `draft_model` method, and return the command that serves the pair. The saved model has
    merged weights and the target's vocabulary size and tokenizer. SGLang takes the same folder, and llama.cpp can
    convert it. The command names the target as `target_name`, by default where it was loaded from.

    Raises:
        ConfigError: a folder that is not empty or cannot be written, k below 1, or an encoder-decoder.
        VocabularyMismatchError: the vocabularies differ in more than padding.
        StateError: the saved draft does not load, or computes other log-probs.
    """
    folder = Path(directory)
    if num_assistant_tokens < 1:
        raise ConfigError(f"`num_assistant_tokens` must be at least 1, got {num_assistant_tokens}.")
    if draft.config.is_encoder_decoder:
        raise ConfigError("vLLM drafts with decoder-only models, got an encoder-decoder. Serve it with transformers.")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty. Choose another folder.")
    draft = merged(draft)
    exported = align_vocab(draft, target, tokenizer)
    save_draft(folder, exported, tokenizer, num_assistant_tokens=num_assistant_tokens, repo_id=folder.name)
    check_written(folder, exported, draft)
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": num_assistant_tokens}
    name = target_name or target.config.name_or_path
    return ["vllm", "serve", name, "--speculative-config", json.dumps(config)]


@torch.inference_mode()
def check_written(folder: Path, exported: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Load a saved draft and compare its log-probs with the original; raises StateError if they differ."""
    again = load_model(str(folder), dtype="auto", device=str(exported.device))
    rows = min(vocab_size_of(exported), vocab_size_of(draft))
    size = min(32, int(getattr(exported.config.get_text_config(), "max_position_embeddings", 32)))
    ids = torch.randint(rows, (1, size), generator=torch.Generator().manual_seed(0)).to(exported.device)
    expected, found = (m.eval()(ids).logits.float()[..., :rows].log_softmax(-1) for m in (draft, again))
    error = float((expected - found).abs().max())
    tolerance = TOLERANCE if again.dtype == torch.float32 else HALF_TOLERANCE
    if not error <= tolerance:
        raise StateError(
            f"The draft in {folder} differs from the original by {error:.2g} in log-probabilities (at most "
            f"{tolerance:g} is expected). Do not serve it; export again, in float32."
        )


# --- the Hub --------------------------------------------------------------------------------------------------------


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    commit_message: str = "Upload a draft learned with osd_hf",
) -> str:
    """
    Commit a folder to a model repo, which is created if necessary, and return its address. By default the token is
    that of this machine's login. New repos are private and existing public repos are refused, unless `private` is
    `False`: a draft may have memorized answers. The visibility of an existing repo is never changed.

    Raises:
        ConfigError: invalid repo id, no token, or a public repo without `private=False`.
        HubError: the Hub refused, or the connection failed.
    """
    try:
        api = HfApi(token=check_push(repo_id, token))
        url = api.create_repo(repo_id, private=private is not False, exist_ok=True)
        if private is not False:  # the Hub ignores `private` for an existing repo
            refuse_public(api, repo_id)
        api.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message=commit_message)
    except ConfigError:
        raise
    except (*HUB_ERRORS, ValueError) as error:
        raise HubError(f"{repo_id!r} was not pushed: {first_line(error)}.") from error
    return str(url)


def check_push(repo_id: str, token: str | None = None, private: bool | None = False) -> str:
    """Return the token for a push. Raises ConfigError for an invalid repo id, without a token, and for a public repo
    unless `private=False`. If the Hub cannot be reached, the push reports it."""
    if "/" not in repo_id:
        raise ConfigError(f"A repo is named as user/name, got {repo_id!r}.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"{repo_id!r} is no name of a repo: {first_line(error)}.") from error
    token = token or get_token()
    if not token:
        raise ConfigError("There is no token to push with. Pass one, or run `hf auth login` first.")
    if private is not False:
        with contextlib.suppress(*HUB_ERRORS):
            refuse_public(HfApi(token=token), repo_id)
    return token


def refuse_public(api: HfApi, repo_id: str) -> None:
    """Refuse a repo that is not known to be private; raises ConfigError, and the Hub's errors."""
    if api.repo_info(repo_id).private is not True:
        raise ConfigError(
            f"{repo_id!r} is open to everybody, and a draft may have memorized answers. Make it private or choose "
            "another name; to push there anyway, set `private=False` (--public)."
        )
