"""Collect the answers of an engine to prompts, as traces in a store."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from osd_hf.engines.completions import CompletionClient, RequestRefusedError, ResponseReader
from osd_hf.errors import DataError, ServerError, without_credentials
from osd_hf.prompts import Prompt
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import Trace

MAX_FAILURES = 8  # requests that fail in a row before the collection ends
MAX_REASONS = 256  # counted separately, because servers may give a different reason each time
POLL_SECONDS = 0.2  # between two checks of `stop`
GRACE_SECONDS = 5.0  # for requests under way when a collection ends early

T = TypeVar("T")


@dataclass
class CollectionReport:
    """The result of a collection: stored traces and their tokens, and answers that cannot be learned from."""

    requests: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    unanswered: int = 0  # prompts without an answer when the collection ended
    seconds: float = 0.0
    _reasons: dict[str, str] = field(default_factory=dict, repr=False)  # reason without numbers -> first such reason

    def skip(self, reason: str) -> None:
        """Count an answer that cannot be learned from."""
        reason = without_credentials(reason)
        kind = re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", reason)
        if kind not in self._reasons and len(self._reasons) >= MAX_REASONS:
            kind = reason = "other reasons"
        self.skipped[self._reasons.setdefault(kind, reason)] += 1


def collect(
    prompts: Sequence[tuple[Prompt, list[int]]],
    client: CompletionClient,
    reader: ResponseReader,
    store: CorrectionStore,
    *,
    max_new_tokens: int,
    concurrency: int = 4,
    report: CollectionReport | None = None,
    on_request: Callable[[Trace], object] | None = None,
    stop: threading.Event | None = None,
    **settings: Any,
) -> CollectionReport:
    """
    Send prompts with their token ids to a server, `concurrency` at a time, and store the answers. `settings` are
    passed to [`~CompletionClient.complete`]. `report` is filled with counts, also if an error ends the collection.

    A prompt with an answer that is refused or cannot be learned from is counted and left out. The collection ends with
    the reason if that happens eight times in a row, or to all prompts, and when `stop` is set.

    Raises:
        ServerError, DataError, StoreError: the server, its answers, or the store fail. Earlier answers are stored.
    """
    report = report or CollectionReport()
    waiting, running = deque(prompts), set[Future[list[Trace]]]()
    failures: list[RequestRefusedError | DataError] = []  # since the last stored answer
    start = time.perf_counter()

    def ask(prompt: Prompt, ids: list[int]) -> list[Trace]:
        num_logprobs = reader.num_logprobs
        request, response = client.complete(ids, max_new_tokens=max_new_tokens, num_logprobs=num_logprobs, **settings)
        return reader.traces(response, request, domain=prompt.domain)

    def keep(done: set[Future[list[Trace]]]) -> ServerError | DataError | None:
        """Store answers; returns the error that should end the collection."""
        fatal: ServerError | DataError | None = None
        for future in done:
            running.remove(future)
            try:
                traces = future.result()
            except (RequestRefusedError, DataError) as error:
                report.skip(str(error))
                failures.append(error)
                if len(failures) >= MAX_FAILURES:
                    fatal = error
            except ServerError as error:
                report.unanswered += 1
                fatal = error
            else:
                failures.clear()
                for trace in traces:
                    store.append(trace)
                    report.requests += 1
                    report.tokens += len(trace)
                    if on_request is not None:
                        on_request(trace)
        return fatal

    fatal: ServerError | DataError | None = None
    try:
        while fatal is None and not (stop is not None and stop.is_set()):
            while waiting and len(running) < concurrency:
                running.add(_run_in_daemon(ask, *waiting.popleft()))
            if not running:
                break
            fatal = keep(wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED).done)
        keep(wait(running, timeout=GRACE_SECONDS).done)
    finally:
        report.unanswered += len(waiting) + len(running)
        report.seconds += time.perf_counter() - start
        store.flush()
    if failures and not report.requests:
        fatal = fatal or failures[-1]
    if fatal is not None:
        raise fatal
    return report


def _run_in_daemon(call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Run a call in a thread that, unlike those of an executor, does not delay the end of the program."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001  # raised where the result is read
            future.set_exception(error)

    threading.Thread(target=run, name="osd_hf-collect", daemon=True).start()
    return future
