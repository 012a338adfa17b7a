"""Publishing: a draft as the folder of its repo or for a serving engine, and a draft or a store on the Hub."""

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

from osd_hf.errors import ConfigError, HubError, StateError, first_line
from osd_hf.hub.cards import EVALUATION, DraftFacts, Evaluation, draft_card, eval_results, store_card
from osd_hf.models import align_vocab, fixed_k, is_peft, load_model, merged, unwrap, vocab_size_of
from osd_hf.store.store import CorrectionStore
from osd_hf.target_version import TAUGHT_FOR, taught_for
from osd_hf.utils.report import make_folder

__all__ = [
    "check_push", "check_visibility", "check_written", "export_to_vllm", "push_folder", "push_store",
    "refuse_public", "save_draft", "telling",
]  # fmt: skip

EVAL_RESULTS, FIGURES = ".eval_results", "osd_hf.yaml"  # folder of a repo that the Hub reads, and our file in it
TOLERANCE, HALF_TOLERANCE = 1e-4, 5e-2  # of log-probs; half precisions round in other places


def refuse_public(api: HfApi, repo_id: str, *, repo_type: str = "model") -> None:
    """Raises ConfigError for a repo that is not known to be private, and what the Hub raises where it cannot be
    asked."""
    if api.repo_info(repo_id, repo_type=repo_type).private is not True:
        raise ConfigError(
            f"{repo_id!r} is open to everybody, and a draft may have learned answers by heart. Make it private or "
            "take another name; to push there all the same, say so: `private=False` (--public)."
        )


def check_visibility(repo_id: str, token: str | None, private: bool | None) -> None:
    """Raises ConfigError for a model repo that is there and open to everybody, unless `private=False`. One that is not
    there, and a Hub that cannot be asked, are left to the push."""
    if private is False:
        return
    with contextlib.suppress(HfHubHTTPError, NetworkError, OSError, RuntimeError):
        refuse_public(HfApi(token=token), repo_id)


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
    Write a draft as the repo that it is to be: weights, tokenizer, a generation config for fixed drafting, the
    evaluation with its prompts (where they are of a data set of the Hub, in `.eval_results` too), and the model card.

    Args:
        directory (`str` or `Path`): The folder, made where it is missing.
        draft (`PreTrainedModel` or `PeftModel`):
            An ordinary model is written with its weights, a `PeftModel` as its adapter alone. Left as it is.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's.
        num_assistant_tokens (`int`, *optional*):
            k of the generation config; that of the evaluation by default, otherwise what the draft has.
        repo_id (`str`, *optional*): What the snippets of the card load; the folder by default.
        facts (`DraftFacts`, *optional*), evaluation (`Evaluation`, *optional*):
            What the card says of the draft, and what was measured.

    Raises:
        ConfigError: the folder cannot be written.
    """
    is_adapter = is_peft(draft)
    folder = Path(directory)
    make_folder(folder)
    k = num_assistant_tokens or (evaluation.num_assistant_tokens if evaluation is not None else None)
    facts = facts or DraftFacts(is_adapter=is_adapter)
    facts = replace(facts, target_version=facts.target_version or getattr(unwrap(draft).config, TAUGHT_FOR, None))
    with fixed_k(draft, k), taught_for(draft, facts.target_version):
        draft.save_pretrained(folder)
        if is_adapter:  # which transformers reads beside an adapter, too
            unwrap(draft).generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if evaluation is not None:
        evaluation.write(folder / EVALUATION)
        if entries := eval_results(repo_id or "", evaluation):
            (folder / EVAL_RESULTS).mkdir(exist_ok=True)
            text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
            (folder / EVAL_RESULTS / FIGURES).write_text(text, encoding="utf-8")
    card = draft_card(repo_id or str(directory), facts, evaluation)
    card.save(folder / "README.md")


def export_to_vllm(
    directory: str | os.PathLike[str],
    draft: Any,
    target: Any,
    tokenizer: Any,
    *,
    num_assistant_tokens: int = 5,
    target_name: str | None = None,
) -> list[str]:
    """
    Write a draft as vLLM's `draft_model` method takes it: merged weights, the target's vocabulary size and tokenizer.
    SGLang takes the same folder; llama.cpp converts it.

    Args:
        directory (`str` or `Path`): A new or empty folder.
        draft (`PreTrainedModel` or `PeftModel`), target (`PreTrainedModel`): Decoder-only models; left as they are.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of both.
        num_assistant_tokens (`int`, *optional*, defaults to 5): k.
        target_name (`str`, *optional*): How the command names the target; where it came from by default.

    Returns:
        `list[str]`: the command that serves the pair.

    Raises:
        ConfigError: a folder that is not empty or cannot be written, a k below 1, an encoder-decoder.
        VocabularyMismatchError: the vocabularies differ in more than padding.
        StateError: what was written does not load, or has other logits than the draft.
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
def check_written(folder: Path, exported: Any, draft: Any) -> None:
    """Raises StateError where the model in a folder does not have the log-probs of the draft that it was made of."""
    again = load_model(str(folder), dtype="auto", device=str(exported.device))
    rows = min(vocab_size_of(exported), vocab_size_of(draft))
    size = min(32, int(getattr(exported.config.get_text_config(), "max_position_embeddings", 32)))
    ids = torch.randint(rows, (1, size), generator=torch.Generator().manual_seed(0)).to(exported.device)
    wanted, found = (m.eval()(ids).logits.float()[..., :rows].log_softmax(-1) for m in (draft, again))
    error = float((wanted - found).abs().max())
    tolerance = TOLERANCE if again.dtype == torch.float32 else HALF_TOLERANCE
    if not error <= tolerance:
        raise StateError(
            f"What was written to {folder} differs from the draft by {error:.2g} in log-probabilities (at most "
            f"{tolerance:g} is expected). Do not serve it; export again, in float32."
        )


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    repo_type: str = "model",
    exist_ok: bool = True,
    commit_message: str = "Upload a draft learned with osd_hf",
    kept: str | None = None,
) -> str:
    """
    Make a repo, where there is none, and commit a folder to it. The folder stays as it is, whatever happens.

    Args:
        folder (`str` or `Path`): What is pushed, such as a folder that [`save_draft`] has written.
        repo_id (`str`), repo_type (`str`, *optional*, defaults to `"model"`):
            The repo as `user/name`, of a model or a `"dataset"`.
        token (`str`, *optional*): A token with the right to write; the login of this machine by default.
        private (`bool`, *optional*):
            A new repo is private, and one that is there and open to everybody is refused, unless this is `False`: a
            draft may have learned answers by heart. The visibility of a repo that is there is never changed.
        exist_ok (`bool`, *optional*, defaults to `True`): Whether the repo may exist already.
        commit_message (`str`, *optional*), kept (`str`, *optional*):
            First line of the commit, and a sentence for errors about what is still there: by default that the local
            copy is.

    Returns:
        `str`: address of the repo.

    Raises:
        ConfigError: no name of a repo, no token, offline, a public repo that was not asked for.
        HubError: the Hub refused, or could not be reached to the end.
    """
    with telling(repo_id, kept or f"The local copy stays in {folder}."):
        api = HfApi(token=check_push(repo_id, token))
        url = api.create_repo(repo_id, private=private is not False, repo_type=repo_type, exist_ok=exist_ok)
        if private is not False:  # which the Hub does not look at where there is one already
            refuse_public(api, repo_id, repo_type=repo_type)
        api.upload_folder(
            repo_id=repo_id, folder_path=str(folder), repo_type=repo_type, commit_message=commit_message,
            # Figures of what was there before, which the Hub would show as those of what is there now.
            delete_patterns=f"{EVAL_RESULTS}/{FIGURES}" if repo_type == "model" else None,
        )  # fmt: skip
    return str(url)


@contextlib.contextmanager
def telling(repo_id: str, kept: str, *, again: str = "Push again, it goes on where it can.") -> Iterator[None]:
    """What fails inside the block, at the Hub, is raised as a ConfigError or HubError that says why, what is still
    there, and what comes next."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error} {kept}") from error
    except OfflineModeIsEnabled as error:
        raise ConfigError(
            f"HF_HUB_OFFLINE is set: {repo_id!r} cannot be reached. Unset it, and try again. {kept}"
        ) from error
    except HfHubHTTPError as error:
        raise HubError(f"{_refusal(error, repo_id)} {kept}") from error
    except (NetworkError, OSError, RuntimeError, ValueError) as error:  # no network, and one that drops
        raise HubError(f"{repo_id!r} could not be reached to the end: {first_line(error)}. {again} {kept}") from error


def check_push(repo_id: str, token: str | None = None) -> str:
    """The token to push to a repo with; raises ConfigError for a name that is none, or where there is no token."""
    if "/" not in repo_id:
        raise ConfigError(f"A repo is named as user/name, got {repo_id!r}.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"{repo_id!r} is no name of a repo: {first_line(error)}.") from error
    token = token or get_token()
    if not token:
        raise ConfigError("There is no token to push with. Pass one, or run `hf auth login` first.")
    return token


def _refusal(error: HfHubHTTPError, repo_id: str) -> str:
    status = getattr(error.response, "status_code", 0)
    known = {
        401: "The Hub does not know this token. Log in again, or pass another one.",
        403: f"This token may not write to {repo_id!r}. Take one with the right to write there.",
        404: f"There is no place for {repo_id!r}: the user or organization is unknown, or hidden from this token.",
        409: f"There is a repo {repo_id!r} already. Choose another name, or allow an existing one.",
    }
    return known.get(status) or f"The Hub refused {repo_id!r} with status {status}: {first_line(error)}."


def push_store(
    store: CorrectionStore,
    repo_id: str,
    *,
    license: str,
    target: str | None = None,
    token: str | None = None,
    private: bool | None = True,
) -> str:
    """
    Publish a store of corrections as a data set with a card of its own, and return its address. **It holds the text of
    its requests**; nothing else of this package publishes any.

    Args:
        store (`CorrectionStore`): A store with at least one request.
        license (`str`): License of the data, as the Hub names it.
        target (`str`, *optional*): Hub id of the model whose answers these are.
        repo_id (`str`), token (`str`, *optional*), private (`bool`, *optional*, defaults to `True`):
            The same as for [`push_folder`].

    Raises:
        ConfigError: the store has no requests, or a reason of [`push_folder`].
        HubError: the Hub refused, or could not be reached to the end.
    """
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
