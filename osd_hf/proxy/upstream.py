"""An engine behind the proxy: its connection, and when to avoid it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import httpx2

from osd_hf.engines.completions import parse_address
from osd_hf.errors import ConfigError

# An answer may take as long as its client waits, so only connecting has a timeout.
TIMEOUT = {"connect": 10.0, "read": None, "write": None, "pool": None}
KEEP_ALIVE_SECONDS = 2.0  # less than the 5 s of engines behind uvicorn
CONNECTION_LOST = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)
AVOID_SECONDS = 5.0  # after a failure
PAUSE_SECONDS = 600.0  # of recording
MAX_UNREADABLE = 8  # unreadable answers in a row after which recording pauses

logger = logging.getLogger(__name__)
Headers = list[tuple[bytes, bytes]]


class Upstream:
    """
    An engine behind the proxy.

    Args:
        url (`str`): Address such as `http://localhost:8000`, with or without `/v1`.
        transport (`httpx2.AsyncBaseTransport`, *optional*): Sends the requests; over the network by default.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): Returns the time in seconds.

    Raises:
        ServerError: the URL is not an address.
        ConfigError: the URL contains a user, but the proxy passes on the keys of its clients.
    """

    def __init__(
        self,
        url: str,
        transport: httpx2.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        address, user, password = parse_address(url)
        self.name = str(address).rstrip("/").removesuffix("/v1")
        if user or password:
            raise ConfigError(f"{self.name} is given with a user; the proxy passes on the keys of its clients alone.")
        self.open_requests = 0  # that the engine is answering
        self._url = httpx2.URL(self.name)
        self._prefix = self._url.raw_path.rstrip(b"/")
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_SECONDS)
        self._transport = transport or httpx2.AsyncHTTPTransport(limits=limits)
        self._clock = clock
        self._is_failing = False
        self._avoid_until = -float("inf")
        self._pause_until = -float("inf")
        self._num_unreadable = 0

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes) -> httpx2.Response:
        """
        Send a request and return the response with an unread body; raises httpx2.TransportError.

        An engine may close a connection that was kept alive while a request is sent on it. Then the request is sent
        again on a new connection.
        """
        is_new_connection = False

        async def trace(event: str, info: object) -> None:
            nonlocal is_new_connection
            is_new_connection = is_new_connection or event.startswith("connection.connect_tcp")

        # The target is the path and query exactly as sent.
        extensions = {"target": self._prefix + target, "timeout": TIMEOUT, "trace": trace}
        request = httpx2.Request(method, self._url, headers=headers, content=body, extensions=extensions)
        try:
            return await self._transport.handle_async_request(request)
        except CONNECTION_LOST:
            if is_new_connection:
                raise
            return await self._transport.handle_async_request(request)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    # --- availability -----------------------------------------------------------------------------------------------

    @property
    def is_avoided(self) -> bool:
        """Whether other engines are tried first because this one failed recently."""
        return self._clock() < self._avoid_until

    def failed(self, reason: str) -> None:
        """Avoid the engine for some seconds."""
        if not self._is_failing:
            logger.warning("%s does not answer: %s.", self.name, reason)
        self._is_failing = True
        self._avoid_until = self._clock() + AVOID_SECONDS

    def answered(self) -> None:
        """Use the engine like others again."""
        self._is_failing = False
        self._avoid_until = -float("inf")

    # --- recording --------------------------------------------------------------------------------------------------

    @property
    def can_record(self) -> bool:
        """Whether requests to this engine get extra fields now."""
        return self._clock() >= self._pause_until

    def pause_recording(self, reason: str) -> None:
        """Add no fields for ten minutes."""
        if self.can_record:  # otherwise other requests were under way
            self._pause_until = self._clock() + PAUSE_SECONDS
            logger.warning("Collecting from %s is paused for some minutes: %s.", self.name, reason)

    def answer_was_read(self) -> None:
        """Note that an answer with the extra fields could be read."""
        self._num_unreadable = 0

    def answer_was_unreadable(self, reason: str) -> None:
        """Pause recording after several unreadable answers in a row."""
        self._num_unreadable += 1
        if self._num_unreadable >= MAX_UNREADABLE:
            self._num_unreadable = 0
            self.pause_recording(reason)
