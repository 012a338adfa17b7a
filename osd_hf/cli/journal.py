"""Serves a stream of prompts and keeps a journal and the session, so that a killed run goes on where it stopped."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from osd_hf.assistant import OnlineAssistant
from osd_hf.capture.hook import capture_traces
from osd_hf.errors import ConfigError, LearnerError, StateError
from osd_hf.learning.session import check_pointer, has_session
from osd_hf.metrics import AcceptanceStats, alpha_gain_interval
from osd_hf.pair import first_line
from osd_hf.prompts import EncodedPrompts
from osd_hf.replay import replay
from osd_hf.trace import Trace
from osd_hf.utils.disk import open_privately, sync_folder, wait_for_lock, write_whole
from osd_hf.utils.report import json_text, make_folder

__all__ = ["Served", "check_folder", "open_folder", "report_on", "serve"]

logger = logging.getLogger(__name__)

SETTINGS = "settings.json"
JOURNAL = "journal.jsonl"
STATE = "state"
LOCK = ".run.lock"
UNFINISHED = re.compile(r"\.(settings|journal)-[0-9a-f]{8}\.tmp")  # of a run that was killed while it began
SAVE_SECONDS = 60.0
_COUNTS = ("drafted", "examined", "accepted", "emitted", "target_forwards", "accepted_length_histogram")


@dataclass(frozen=True)
class Served:
    """
    One request of a run; a line of the journal.

    Args:
        index (`int`):
            Row of the prompt in its source.
        domain (`str`, *optional*):
            Label.
        learned (`AcceptanceStats`):
            What happened.
        frozen (`AcceptanceStats`):
            What the draft of the beginning would have scored on this request, by replay.
        seconds (`float`):
            Wall time of the answer.
        draft_version (`int`):
            Version of the draft that served it.
        update (`Mapping[str, Any]`, *optional*):
            Report of the update that followed it, if one did.
        text (`tuple[str, str]`, *optional*):
            Prompt and answer, where the user wants them kept.
    """

    index: int
    domain: str | None
    learned: AcceptanceStats
    frozen: AcceptanceStats
    seconds: float
    draft_version: int
    update: Mapping[str, Any] | None = None
    text: tuple[str, str] | None = None

    def to_line(self) -> str:
        line = asdict(replace(self, learned=AcceptanceStats(), frozen=AcceptanceStats()))
        line |= {name: _counts(stats) for name, stats in (("learned", self.learned), ("frozen", self.frozen))}
        text = line.pop("text")
        return json_text(line if text is None else {**line, "prompt": text[0], "answer": text[1]})

    @classmethod
    def from_line(cls, line: str) -> Served:
        data = json.loads(line)
        text = (data.pop("prompt"), data.pop("answer")) if "prompt" in data else None
        learned, frozen = (AcceptanceStats.from_counts(**data.pop(name)) for name in ("learned", "frozen"))
        return cls(**data, learned=learned, frozen=frozen, text=text)


def check_folder(folder: Path, settings: Mapping[str, Any] | None = None, *, resume: bool) -> None:
    """
    Refuse a folder that a run must not write to; nothing is changed.

    Args:
        folder (`Path`):
            Of the run.
        settings (`Mapping[str, Any]`, *optional*):
            What makes the run what it is; compared with those of the run that stands there.
        resume (`bool`):
            Whether a run that stands there is to go on. Where none stands, it is to begin.

    Raises:
        ConfigError: there is something in the folder already, or it is no folder that can be read.
        StateError: the run there has other settings, or is none.
    """
    try:
        if not folder.exists() or all(UNFINISHED.fullmatch(entry.name) for entry in folder.iterdir()):
            return
    except (OSError, ValueError) as error:
        raise ConfigError(f"The output folder {folder} cannot be used: {error}.") from error
    if not resume:
        raise ConfigError(
            f"{folder} is not empty. Choose another output folder, or go on with the run in it: --resume."
        )
    try:
        earlier = json.loads((folder / SETTINGS).read_text())
    except (OSError, ValueError) as error:
        raise StateError(f"There is no run in {folder} to go on with: {SETTINGS} is missing or broken.") from error
    if settings is None:
        return
    current = json.loads(json.dumps(settings))
    differing = [name for name in {**earlier, **current} if earlier.get(name) != current.get(name)]
    if differing:
        shown = "; ".join(f"{name} was {earlier.get(name)!r}, is {current.get(name)!r}" for name in differing)
        raise StateError(f"The run in {folder} has other settings: {shown}. Resume with the same, or start anew.")


def open_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make the folder of a run and note its settings there; raises ConfigError where it cannot be written."""
    make_folder(folder)
    try:
        write_whole(folder / SETTINGS, (json.dumps(settings, indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"The output folder {folder} cannot be written: {error}.") from error


def serve(
    assistant: OnlineAssistant,
    frozen: Any,
    prompts: EncodedPrompts,
    folder: Path,
    *,
    generate_kwargs: Mapping[str, Any],
    learn: bool = True,
    save_every: int | None = None,
    keep_text: bool = False,
    clock: Callable[[], float] = time.monotonic,
    on_request: Callable[[Served], object] = lambda served: None,
) -> list[Served]:
    """
    Serve the prompts that a run in this folder has not served yet.

    The saved session is the truth: journal lines beyond it are dropped and their requests served again, from the same
    draft and, if sampled, from the same seed. So a run that was killed ends as one that was not; only the store of the
    assistant, flushed with each save, may hold twice what was served twice. Without learning nothing is saved, as
    the journal says it all.

    Args:
        assistant (`OnlineAssistant`):
            New, with a fixed k and the strategy `"manual"`: updates are called for here, after every
            `update_interval` requests, so that the session is saved between two requests.
        frozen (`PreTrainedModel`):
            The draft as it was before learning.
        prompts (`EncodedPrompts`):
            In order of arrival.
        folder (`Path`):
            Gets `journal.jsonl` and `state/`.
        generate_kwargs (`Mapping[str, Any]`):
            Of every request.
        learn (`bool`, *optional*, defaults to `True`):
            With `False` nothing is kept or learned from.
        save_every (`int`, *optional*):
            The session is saved with every so many updates, and at the end; by default after the first request that
            ends a minute or more after the last save, as a session holds three copies of the draft and every trace.
        keep_text (`bool`, *optional*, defaults to `False`):
            Whether prompts and answers stand in the journal.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`):
            Seconds, for the saves.
        on_request (`Callable[[Served], object]`, *optional*):
            Called after each request, those of an earlier run of this folder included.

    Returns:
        `list[Served]`: one per prompt.

    Raises:
        ConfigError: another process serves into the folder.
        StateError: the journal or the session cannot be read.
        LearnerError: learning failed; the session saved last stands.
    """
    with _alone(folder):
        state, journal = folder / STATE, folder / JOURNAL
        served = _resumed(assistant, state, journal) if learn else _from_journal(journal)
        for request in served:
            on_request(request)
        config = assistant.config
        interval, k = config.update_interval, config.num_assistant_tokens
        assert isinstance(k, int)
        # Replay of a greedy answer needs no more than its tokens.
        width = config.num_logprobs if generate_kwargs.get("do_sample") else 1
        traces: list[Trace] = []
        saved_at = clock()
        with (
            open(journal, "a", opener=open_privately) as file,
            capture_traces(assistant.target, traces.append, num_logprobs=width),
        ):
            for position in range(len(served), len(prompts.prompts)):
                prompt, ids = prompts.prompts[position]
                version = assistant.version
                input_ids = torch.tensor([ids], device=assistant.target.device)
                torch.manual_seed(config.seed * 1_000_003 + position)
                started = time.perf_counter()
                output = assistant.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    domain=prompt.domain,
                    learn=learn,
                    **generate_kwargs,
                )
                answer = output[0].tolist()  # waits for the device
                seconds = time.perf_counter() - started
                trace = traces.pop()
                text = None
                if keep_text:
                    start = 0 if assistant.target.config.is_encoder_decoder else len(ids)
                    text = (prompt.text, assistant.tokenizer.decode(answer[start:], skip_special_tokens=True))
                updates, since_update = divmod(position + 1, interval)
                due = learn and since_update == 0
                request = Served(
                    index=prompt.index,
                    domain=prompt.domain,
                    learned=AcceptanceStats.from_trace(trace),
                    frozen=replay(frozen, [trace], k),
                    seconds=seconds,
                    draft_version=version,
                    update=_updated(assistant, position + 1) if due else None,
                    text=text,
                )
                served.append(request)
                file.write(request.to_line() + "\n")
                file.flush()
                by_count = save_every is not None and due and updates % save_every == 0
                by_time = save_every is None and clock() - saved_at >= SAVE_SECONDS
                if learn and (by_count or by_time or position + 1 == len(prompts.prompts)):
                    # Neither the journal nor the store is ever behind the session.
                    os.fsync(file.fileno())
                    sync_folder(folder)
                    if assistant.store is not None:
                        assistant.store.flush()
                    assistant.save_state(state)
                    saved_at = clock()
                on_request(request)
        return served


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process serves into the folder inside; raises ConfigError where one does."""
    try:
        lock = wait_for_lock(folder / LOCK, 0.0)
    except TimeoutError as error:
        raise ConfigError(
            f"Another process serves into {folder}. Stop it, or choose another output folder."
        ) from error
    except OSError as error:
        raise ConfigError(f"The output folder {folder} cannot be written: {error}.") from error
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _updated(assistant: OnlineAssistant, requests: int) -> dict[str, Any]:
    try:
        return assistant.update().to_dict()
    except LearnerError:
        raise
    except Exception as error:
        raise LearnerError(
            f"Learning failed after request {requests}: {first_line(error)}. The session saved last stands; mend the "
            "cause, then go on with --resume."
        ) from error


def _from_journal(journal: Path) -> list[Served]:
    """The requests of a run that does not learn; a last line that was cut off by a kill goes."""
    try:
        text = journal.read_text() if journal.exists() else ""
        lines = text.splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        served = [Served.from_line(line) for line in whole]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"The journal {journal} cannot be read: {first_line(error)}. Start anew.") from error
    if len(whole) < len(lines):
        write_whole(journal, "".join(whole).encode())
    return served


def _resumed(assistant: OnlineAssistant, state: Path, journal: Path) -> list[Served]:
    """Bring the assistant to the saved session, cut the journal down to it, and return the requests up to there."""
    check_pointer(state)
    if not has_session(state):
        if journal.exists():
            logger.warning("Nothing was saved in %s before that run ended; it begins anew.", state)
        journal.unlink(missing_ok=True)
        return []
    assistant.load_state(state)
    count = assistant.stats.num_requests
    try:
        lines = journal.read_text().splitlines()[:count]
        served = [Served.from_line(line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"The journal {journal} cannot be read: {first_line(error)}. Start anew.") from error
    if len(served) < count:
        raise StateError(
            f"The journal {journal} has {len(served)} of the {count} requests of its session. Start anew."
        )
    write_whole(journal, "".join(f"{line}\n" for line in lines).encode())
    return served


def report_on(served: Sequence[Served], *, window: int) -> dict[str, Any]:
    """
    What a run showed: acceptance of the draft that learned and, by replay on the same requests, of the same draft
    frozen; ready for JSON.

    Args:
        served (`Sequence[Served]`):
            All requests of the run.
        window (`int`):
            Requests of one entry of `windows`.
    """
    seconds = sum(s.seconds for s in served)
    emitted = sum(s.learned.emitted for s in served)
    domains = list(dict.fromkeys(s.domain for s in served))
    updates = [{"after_requests": i, **s.update} for i, s in enumerate(served, 1) if s.update is not None]
    return {
        "overall": _compared(served),
        "last_fifth": _compared(served[round(len(served) * 0.8) :]),
        "by_domain": [{"domain": d, **_compared([s for s in served if s.domain == d])} for d in domains],
        "windows": [
            {"first_request": i + 1, **_alphas(served[i : i + window])} for i in range(0, len(served), window)
        ],
        "updates": updates,
        "draft_version": updates[-1]["version"] if updates else 0,
        "seconds": seconds,
        "update_seconds": sum(u["seconds"] for u in updates),
        "tokens_per_second": emitted / seconds if seconds else None,
    }


def _compared(served: Sequence[Served]) -> dict[str, Any]:
    learned, frozen = (
        sum(stats, AcceptanceStats()) for stats in ([s.learned for s in served], [s.frozen for s in served])
    )
    interval = alpha_gain_interval(frozen, learned)
    gain = learned.alpha - frozen.alpha
    return {
        "requests": len(served),
        **{
            name: {key: value for key, value in stats.to_dict().items() if key != "requests"}
            for name, stats in (("learned", learned), ("frozen", frozen))
        },
        "gain": None if gain != gain else gain,
        "gain_interval": None if interval[0] != interval[0] else list(interval),
    }


def _alphas(served: Sequence[Served]) -> dict[str, Any]:
    sides = {"learned": [s.learned for s in served], "frozen": [s.frozen for s in served]}
    return {name: sum(stats, AcceptanceStats()).to_dict()["alpha"] for name, stats in sides.items()}


def _counts(stats: AcceptanceStats) -> dict[str, Any]:
    data = stats.to_dict()
    return {name: data[name] for name in _COUNTS}
