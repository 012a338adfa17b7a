"""Many requests at once, or one promotion: a request drafts with one version from beginning to end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from osd_hf.errors import LearnerError

__all__ = ["Promotion"]


class Promotion:
    """A gate that requests pass together, and that a change of the serving draft has to itself."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests = 0
        self._promoting = False
        self._own = threading.local()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Entered around each use of the serving draft; waits while it is being changed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._promoting)
            self._requests += 1
        self._own.depth = getattr(self._own, "depth", 0) + 1
        try:
            yield
        finally:
            self._own.depth -= 1
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def promotion(self) -> Iterator[None]:
        """
        Entered around a change of the serving draft; waits until no request is running.

        Raises:
            LearnerError: called from inside a request, which would wait for itself.
        """
        if getattr(self._own, "depth", 0):
            raise LearnerError(
                "The draft cannot change while this thread is in the middle of a request (a streamer, a logits "
                "processor or a stopping criterion?). Call again when the request has ended."
            )
        with self._changed:
            self._changed.wait_for(lambda: not self._promoting)
            self._promoting = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._requests == 0)
            yield
        finally:
            with self._changed:
                self._promoting = False
                self._changed.notify_all()
