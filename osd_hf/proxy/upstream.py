"""An engine behind a proxy: how it is reached, whether it is well, and how it writes its answers."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterable, Callable

import httpx2

from osd_hf.engines.completions import parse_address
from osd_hf.errors import ConfigError, first_line
from osd_hf.proxy.extra_fields import Shape
from osd_hf.proxy.network import EndedError, Headers, StaleError, Transport
from osd_hf.proxy.recorder import Asking

__all__ = ["Engine", "Kind", "reason_of"]

CONNECT_SECONDS = 10.0  # an answer may take as long as the client waits
KEEP_ALIVE_SECONDS = (
    2.0  # less than the 5 of engines behind uvicorn, which would close a connection just as it is used
)
FIRST_REST, LONGEST_REST = 1.0, 30.0  # seconds in which an engine that failed is tried last
STALE_SECONDS = 1.0  # after which a connection that ends has not been closed before the request came
DOUBT_SECONDS = 300.0  # after which it is looked again how an engine writes
MOST_SHAPES = 256

logger = logging.getLogger(__name__)
Kind = tuple[str, str, bool]  # the path and the model of an answer, and whether it is a stream


class Engine:
    """
    An engine behind the proxy.

    Args:
        url (`str`): Such as `http://localhost:8000`, with or without `/v1`.
        transport (`Transport`, *optional*): Sends requests to it; over the network by default.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): Seconds.

    Raises:
        ServerError: the URL is no address.
        ConfigError: it holds a password, where clients' own keys are passed on.
    """

    def __init__(
        self,
        url: str,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        address, user, password = parse_address(url)
        self.name = str(address).rstrip("/").removesuffix("/v1")
        if user or password:
            raise ConfigError(f"{self.name} is given with a user; the proxy passes on the keys of its clients alone.")
        parsed = httpx2.URL(self.name)
        self._clock, self._prefix = clock, parsed.raw_path.rstrip(b"/")
        self._transport = transport or Transport(parsed, CONNECT_SECONDS, KEEP_ALIVE_SECONDS)
        self.asking = Asking(self.name, clock)
        self.shapes: dict[Kind, tuple[Shape, float]] = {}  # and when they were seen
        self.busy = 0  # requests under way
        self._rests_until, self._rest = -float("inf"), 0.0

    async def send(
        self, method: str, target: bytes, headers: Headers, content: bytes | AsyncIterable[bytes]
    ) -> httpx2.Response:
        """Its response, whose body is still to be read; raises `httpx2.TransportError`, which is a [`StaleError`]
        where an old connection was closed just as it was used."""
        began = self._clock()
        try:
            return await self._transport.send(method, self._prefix + target, headers, content)
        except StaleError as error:
            if self._clock() - began > STALE_SECONDS:
                raise EndedError(str(error)) from error
            raise

    def failed(self, why: str) -> None:
        """Try others first for a while."""
        if not self._rest:
            logger.warning("%s does not answer: %s.", self.name, why)
        if not self.is_resting:  # what fails at once fails for one reason
            self._rest = min(max(2 * self._rest, FIRST_REST), LONGEST_REST)
            self._rests_until = self._clock() + self._rest
        self.shapes.clear()  # it may come back as another version

    def shape(self, kind: Kind) -> Shape | None:
        """How it writes answers of a kind; `None` where the next one is to show that."""
        shape, seen = self.shapes.get(kind, (None, 0.0))
        if shape is not None and self._clock() - seen > DOUBT_SECONDS:
            self.saw(kind, shape)  # until that one has ended
            return None
        return shape

    def saw(self, kind: Kind, shape: Shape) -> None:
        """Remember how it writes answers of a kind."""
        if len(self.shapes) >= MOST_SHAPES:
            self.shapes.clear()
        self.shapes[kind] = shape, self._clock()

    @property
    def is_resting(self) -> bool:
        """Whether it has failed just now."""
        return self._clock() < self._rests_until

    def answered(self) -> None:
        """Say that it is there."""
        self._rest, self._rests_until = 0.0, -float("inf")

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


def reason_of(error: httpx2.TransportError) -> str:
    """Why an engine does not answer, in words that may be logged."""
    return first_line(error) if isinstance(error, httpx2.ConnectError | EndedError) else type(error).__name__
