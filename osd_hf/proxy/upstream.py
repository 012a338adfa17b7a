"""An engine behind the proxy: its connection, and when to avoid it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import httpx2

from osd_hf.engines.completions import parse_address
from osd_hf.errors import ConfigError, first_line

__all__ = ["DroppedConnectionError", "Headers", "Upstream"]

# An answer may take as long as its client waits, so only connecting has a timeout.
TIMEOUT = {"connect": 10.0, "read": None, "write": None, "pool": None}
# Less than the 5 s of engines behind uvicorn, which would close a connection while a request is sent on it.
KEEP_ALIVE_SECONDS = 2.0
DROPPED_SECONDS = 1.0  # a connection that ends this soon was probably closed before the request arrived
MIN_AVOID_SECONDS, MAX_AVOID_SECONDS = 1.0, 30.0
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 60.0, 3600.0
MAX_UNREADABLE = 8  # unreadable answers in a row after which recording pauses

logger = logging.getLogger(__name__)
Headers = list[tuple[bytes, bytes]]


class DroppedConnectionError(httpx2.ReadError):
    """The engine closed the connection immediately, probably before it read the request."""


class Upstream:
    """
    An engine behind the proxy.

    Args:
        url (`str`): Address such as `http://localhost:8000`, with or without `/v1`.
        transport (`httpx2.AsyncBaseTransport`, *optional*): Sends the requests; over the network by default.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): Returns the time in seconds.

    Attributes:
        name (`str`): The address without `/v1`.
        open_requests (`int`): Number of requests that the engine is answering.

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
        self.open_requests = 0
        self._url = httpx2.URL(self.name)
        self._prefix = self._url.raw_path.rstrip(b"/")
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_SECONDS)
        self._transport = transport or httpx2.AsyncHTTPTransport(limits=limits)
        self._clock = clock
        self._avoid_until = -float("inf")
        self._avoid_seconds = 0.0
        self._pause_until = -float("inf")
        self._pause_seconds = MIN_PAUSE_SECONDS
        self._num_unreadable = 0
        self._has_warned = False

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes) -> httpx2.Response:
        """
        Send a request and return the response with an unread body.

        Raises:
            DroppedConnectionError: the connection ended immediately.
            httpx2.TransportError: the request failed in another way.
        """
        extensions = {"target": self._prefix + target, "timeout": TIMEOUT}  # the path and query exactly as sent
        request = httpx2.Request(method, self._url, headers=headers, content=body, extensions=extensions)
        start = self._clock()
        try:
            return await self._transport.handle_async_request(request)
        except (httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
            if not isinstance(error, httpx2.ConnectError) and self._clock() - start < DROPPED_SECONDS:
                raise DroppedConnectionError(first_line(error)) from error
            raise

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    # --- availability -----------------------------------------------------------------------------------------------

    @property
    def is_avoided(self) -> bool:
        """Whether other engines are tried first because this one failed recently."""
        return self._clock() < self._avoid_until

    def failed(self, reason: str) -> None:
        """Avoid the engine for some seconds, twice as long after each failure."""
        if not self._avoid_seconds:
            logger.warning("%s does not answer: %s.", self.name, reason)
        if not self.is_avoided:  # requests that fail together count once
            self._avoid_seconds = min(max(2 * self._avoid_seconds, MIN_AVOID_SECONDS), MAX_AVOID_SECONDS)
            self._avoid_until = self._clock() + self._avoid_seconds

    def answered(self) -> None:
        """Use the engine like others again."""
        self._avoid_seconds = 0.0
        self._avoid_until = -float("inf")

    # --- recording --------------------------------------------------------------------------------------------------

    @property
    def can_record(self) -> bool:
        """Whether requests to this engine get extra fields now."""
        return self._clock() >= self._pause_until

    def pause_recording(self, reason: str) -> None:
        """Stop adding fields for some minutes, twice as long each time until an answer could be read."""
        if not self.can_record:  # other requests were under way
            return
        self._pause_until = self._clock() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)
        if not self._has_warned:
            logger.warning("Collecting from %s is paused for some minutes: %s.", self.name, reason)
        self._has_warned = True

    def answer_was_read(self) -> None:
        """Note that an answer with the extra fields could be read."""
        self._num_unreadable = 0
        self._pause_seconds = MIN_PAUSE_SECONDS
        self._has_warned = False

    def answer_was_unreadable(self, reason: str) -> None:
        """Pause recording after several unreadable answers in a row."""
        self._num_unreadable += 1
        if self._num_unreadable >= MAX_UNREADABLE:
            self._num_unreadable = 0
            self.pause_recording(reason)
