"""How drafts are found on the Hub: a collection of the drafts for a target, and a leaderboard of their figures."""

from __future__ import annotations

import io
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow
from huggingface_hub import CommitOperationAdd, DatasetCard, DatasetCardData, HfApi
from pyarrow import parquet

from osd_hf.hub.push import check_push, telling

__all__ = ["ROW", "collect_draft", "push_rows"]

MOST_TITLE, MOST_NOTE = 59, 500  # characters that the Hub takes

# A row of a leaderboard: one draft beside one target, on some prompts, on one machine.
_TEXTS = ("target", "target_revision", "target_version", "draft", "draft_revision", "draft_version", "prompts",
          "prompts_digest", "date", "device", "dtype", "osd_hf", "transformers", "torch")  # fmt: skip
_COUNTS = ("num_prompts", "max_new_tokens", "num_assistant_tokens", "best_num_assistant_tokens")
_FIGURES = ("alpha", "alpha_low", "alpha_high", "block_efficiency", "c", "c_with_verification", "expected_speedup",
            "expected_speedup_low", "expected_speedup_high")  # fmt: skip
ROW = pyarrow.schema(
    [(name, pyarrow.string()) for name in _TEXTS]
    + [(name, pyarrow.int64()) for name in _COUNTS]
    + [(name, pyarrow.float64()) for name in _FIGURES]
)

CARD = """
# {name}

Drafts (assistant models) for speculative decoding, beside the targets that they draft for. A row is one draft on some
prompts: `alpha`, the share of its examined tokens that the target accepted, at k = `num_assistant_tokens`; `c`, the
time of a forward of the draft over one of the target; and how many times as fast as the target alone answers are
expected by both, at the best k, each with its 95% interval. Costs are those of one `device`; acceptance compares
across devices, where `target_version`, `prompts_digest` and `max_new_tokens` are the same. A file is one comparison;
it was added by

```sh
osd-hf compare TARGET DRAFT [DRAFT ...] --prompts ID --leaderboard {repo}
```
"""


def push_rows(rows: Sequence[Mapping[str, Any]], repo_id: str, *, token: str | None = None) -> str:
    """
    Append rows to a leaderboard, a data set on the Hub, as a file of their own, so that many can write to it. It is
    made where it is missing, private; one that is there stays as open as it is: rows are figures and names alone.

    Args:
        rows (`Sequence[Mapping[str, Any]]`): What `DraftComparison.rows` returns, columns of `ROW`.
        repo_id (`str`), token (`str`, *optional*): As for [`~osd_hf.hub.push.push_folder`].

    Returns:
        `str`: address of the data set.

    Raises:
        ConfigError: no name of a repo, no token, offline.
        HubError: the Hub refused, or could not be reached to the end.
    """
    written = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows], schema=ROW), written)
    operations = [CommitOperationAdd(f"data/{uuid.uuid4().hex}.parquet", written.getvalue())]
    with telling(repo_id, "The comparison is not on the leaderboard."):
        api = HfApi(token=check_push(repo_id, token))
        url = api.create_repo(repo_id, private=True, repo_type="dataset", exist_ok=True)
        if not api.file_exists(repo_id, "README.md", repo_type="dataset"):
            name = repo_id.split("/")[-1]
            data = DatasetCardData(
                tags=["speculative-decoding", "draft-model", "leaderboard", "osd-hf"], pretty_name=name,
                configs=[{"config_name": "default", "data_files": "data/*.parquet"}],
            )  # fmt: skip
            card = DatasetCard(f"---\n{data.to_yaml()}\n---\n{CARD.format(name=name, repo=repo_id)}")
            operations.append(CommitOperationAdd("README.md", str(card).encode()))
        said = f"Add {len(rows)} draft{'s' * (len(rows) > 1)} for {rows[0]['target']}"
        api.create_commit(repo_id, operations, commit_message=said, repo_type="dataset")
    return str(url)


def collect_draft(
    repo_id: str, target: str, *, note: str | None = None, token: str | None = None, private: bool | None = None
) -> str:
    """
    Put a draft that was pushed into its owner's collection of drafts for its target, which is made where it is missing
    and holds the target as well: the Hub shows a collection that is open to everybody on the pages of what is in it.

    Args:
        repo_id (`str`), target (`str`): Ids of the draft and of the target on the Hub.
        note (`str`, *optional*): A line beside the draft, such as its acceptance; in place of an older one.
        token (`str`, *optional*), private (`bool`, *optional*):
            As for [`~osd_hf.hub.push.push_folder`]: a new collection is private unless this is `False`.

    Returns:
        `str`: address of the collection.

    Raises:
        ConfigError: no token, offline.
        HubError: the Hub refused, or could not be reached to the end.
    """
    with telling(repo_id, "The draft is pushed; its collection is not complete."):
        api = HfApi(token=check_push(repo_id, token))
        found = api.create_collection(
            f"Drafts for {target}"[:MOST_TITLE], namespace=repo_id.split("/")[0], exists_ok=True,
            description="Draft models for speculative decoding with this target.", private=private is not False,
        )  # fmt: skip
        api.add_collection_item(found.slug, target, "model", note="the target", exists_ok=True)
        said = None if note is None else note[:MOST_NOTE]
        found = api.add_collection_item(found.slug, repo_id, "model", note=said, exists_ok=True)
        item = next((item for item in found.items if item.item_id == repo_id), None)
        if item is not None and item.note != said:
            api.update_collection_item(found.slug, item.item_object_id, note=said)
    return found.url
