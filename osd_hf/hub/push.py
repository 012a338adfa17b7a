"""Save a draft as a model repo, push drafts and stores to the Hub, and export drafts for vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi, eval_result_entries_to_yaml, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.errors import HTTPError as NetworkError  # type: ignore[attr-defined]  # httpx's
from huggingface_hub.utils._validators import validate_repo_id
from transformers import PreTrainedModel

from osd_hf.errors import ConfigError, HubError, StateError, first_line
from osd_hf.hub.cards import EVALUATION, DraftFacts, Evaluation, draft_card, eval_results, store_card
from osd_hf.models import align_vocab, fixed_k, is_peft, load_model, merged, unwrap, vocab_size_of
from osd_hf.store.store import CorrectionStore
from osd_hf.target_version import record_target, recorded_target
from osd_hf.utils.report import make_folder

EVAL_RESULTS, FIGURES = ".eval_results", "osd_hf.yaml"  # a folder that the Hub reads, and our file in it
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
    prompts, and the model card.

    Args:
        directory (`str` or `Path`): The folder, created if necessary.
        draft (`PreTrainedModel` or `PeftModel`): Not changed. For a `PeftModel` only the adapter is saved.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer.
        num_assistant_tokens (`int`, *optional*): k; by default that of the evaluation, or that of the draft.
        repo_id (`str`, *optional*): The repo that the card's code loads; by default the folder.
        facts (`DraftFacts`, *optional*), evaluation (`Evaluation`, *optional*): Content of the card.

    Raises:
        ConfigError: the folder cannot be written.
    """
    is_adapter = is_peft(draft)
    folder = Path(directory)
    make_folder(folder)
    k = num_assistant_tokens or (evaluation.num_assistant_tokens if evaluation is not None else None)
    facts = facts or DraftFacts(is_adapter=is_adapter)
    facts = replace(facts, target_version=facts.target_version or recorded_target(draft))
    with fixed_k(draft, k), record_target(draft, facts.target_version):
        draft.save_pretrained(folder)
        if is_adapter:  # transformers also reads a generation config next to an adapter
            unwrap(draft).generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if evaluation is not None:
        evaluation.write(folder / EVALUATION)
        if entries := eval_results(repo_id or "", evaluation):
            (folder / EVAL_RESULTS).mkdir(exist_ok=True)
            text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
            (folder / EVAL_RESULTS / FIGURES).write_text(text, encoding="utf-8")
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
    convert it.

    Args:
        directory (`str` or `Path`): A new or empty folder.
        draft (`PreTrainedModel` or `PeftModel`), target (`PreTrainedModel`): Decoder-only models; not changed.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of both.
        num_assistant_tokens (`int`, *optional*, defaults to 5): k.
        target_name (`str`, *optional*): The target in the command; by default where it was loaded from.

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
    repo_type: str = "model",
    commit_message: str = "Upload a draft learned with osd_hf",
    kept: str | None = None,
) -> str:
    """
    Create a repo if necessary, and commit a folder to it. The local folder is not changed.

    Args:
        folder (`str` or `Path`): The folder, such as one written by [`save_draft`].
        repo_id (`str`), repo_type (`str`, *optional*, defaults to `"model"`): `user/name`, a model or a `"dataset"`.
        token (`str`, *optional*): A token with write access; by default the login of this machine.
        private (`bool`, *optional*):
            New repos are private and existing public repos are refused, unless this is `False`: a draft may have
            memorized answers. The visibility of an existing repo is never changed.
        commit_message (`str`, *optional*): First line of the commit.
        kept (`str`, *optional*): Sentence for errors about where the data still is; by default the local folder.

    Returns:
        `str`: address of the repo.

    Raises:
        ConfigError: invalid repo id, no token, offline, or a public repo without `private=False`.
        HubError: the Hub refused, or the connection failed.
    """
    with hub_errors(repo_id, kept or f"The local copy stays in {folder}."):
        api = HfApi(token=check_push(repo_id, token))
        url = api.create_repo(repo_id, private=private is not False, repo_type=repo_type, exist_ok=True)
        if private is not False:  # the Hub ignores `private` for an existing repo
            refuse_public(api, repo_id, repo_type=repo_type)
        api.upload_folder(
            repo_id=repo_id, folder_path=str(folder), repo_type=repo_type, commit_message=commit_message,
            # The Hub would show figures of earlier weights as those of the new ones.
            delete_patterns=f"{EVAL_RESULTS}/{FIGURES}" if repo_type == "model" else None,
        )  # fmt: skip
    return str(url)


def push_store(
    store: CorrectionStore,
    repo_id: str,
    *,
    license: str,
    target: str | None = None,
    token: str | None = None,
    private: bool | None = True,
) -> str:
    """Publish a store of corrections as a data set with a card, and return its address. **It contains the text of its
    requests.** Nothing else in this package publishes request text. `license` is a name on the Hub, and `target` the
    Hub id of the model that answered. The other arguments and errors are those of [`push_folder`]."""
    dataset = store.to_dataset()
    if not len(dataset):
        raise ConfigError("The store has no requests; there is nothing to publish.")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").mkdir()
        dataset.to_parquet(Path(folder) / "data" / "requests.parquet")
        domains = sorted({domain for domain in dataset["domain"] if domain is not None})
        card = store_card(repo_id, target=target, requests=len(dataset), domains=domains, license=license)
        card.save(Path(folder) / "README.md")
        return push_folder(
            folder, repo_id, token=token, private=private, repo_type="dataset",
            commit_message="Upload corrections captured with osd_hf", kept="The store stays as it is.",
        )  # fmt: skip


def check_push(repo_id: str, token: str | None = None, private: bool | None = False) -> str:
    """Return the token for a push. Raises ConfigError for an invalid repo id, without a token, and for a public model
    repo unless `private=False`. If the Hub cannot be reached, the push reports it."""
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
        with contextlib.suppress(HfHubHTTPError, NetworkError, OSError, RuntimeError):
            refuse_public(HfApi(token=token), repo_id)
    return token


def refuse_public(api: HfApi, repo_id: str, *, repo_type: str = "model") -> None:
    """Refuse a repo that is not known to be private; raises ConfigError, and the Hub's errors."""
    if api.repo_info(repo_id, repo_type=repo_type).private is not True:
        raise ConfigError(
            f"{repo_id!r} is open to everybody, and a draft may have memorized answers. Make it private or choose "
            "another name; to push there anyway, set `private=False` (--public)."
        )


@contextlib.contextmanager
def hub_errors(repo_id: str, kept: str) -> Iterator[None]:
    """Convert errors of the Hub inside the block to ConfigError or HubError with the sentence `kept`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error} {kept}") from error
    except OfflineModeIsEnabled as error:
        raise ConfigError(
            f"HF_HUB_OFFLINE is set: {repo_id!r} cannot be reached. Unset it, and try again. {kept}"
        ) from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        reasons = {
            401: "The Hub does not know this token. Log in again, or pass another one.",
            403: f"This token may not write to {repo_id!r}. Take one with the right to write there.",
            404: f"There is no place for {repo_id!r}: the user or organization is unknown, or hidden from this token.",
        }
        reason = reasons.get(status) or f"The Hub refused {repo_id!r} with status {status}: {first_line(error)}."
        raise HubError(f"{reason} {kept}") from error
    except (NetworkError, OSError, RuntimeError, ValueError) as error:
        raise HubError(
            f"{repo_id!r} could not be reached to the end: {first_line(error)}. Push again; finished files are not "
            f"sent again. {kept}"
        ) from error
