"""A web application at an address until a signal ends it: then nothing begins any more, and what runs may end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from osd_hf.errors import ConfigError

__all__ = ["Running"]


def nothing() -> None:
    """Do nothing."""


class Running:
    """
    An address where an application is to be served. It is taken at once, so that one that cannot be had is refused
    before models are loaded.

    Args:
        host (`str`), port (`int`): Where to listen; port 0 is a free one.

    Raises:
        ConfigError: nobody can listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.is_local = ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback  # for this machine alone
            self._socket = socket.create_server((str(place[0]), int(place[1])), family=family)
            # For the connections that it accepts, too: the first event of a stream would wait for its client to
            # confirm the headers, which takes 40 ms. asyncio sees to that for sockets of its own making alone.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"The address {host}:{port} cannot be listened at: {error}. Choose another host or port, or stop what "
                "listens there."
            ) from error
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self._is_stopped = False
        self._server: _Server | None = None

    def run(
        self, app: Any, *, shutdown_seconds: float, on_start: Callable[[], object] = nothing,
        on_stop: Callable[[], object] = nothing,
    ) -> None:  # fmt: skip
        """
        Serve until SIGTERM, SIGINT or [`~Running.stop`], then return. Connections are accepted no more then; requests
        that are running have some seconds to end, and are cancelled after that. A second signal cancels them at once.
        In another thread than the main one no signal is heeded.

        Args:
            app (`Any`): An ASGI application, with a lifespan.
            shutdown_seconds (`float`): What running requests have to end.
            on_start (`Callable[[], object]`, *optional*): Called when the address answers, in the event loop.
            on_stop (`Callable[[], object]`, *optional*): Called when the end begins, in the event loop. Should it fail
                to say so, as nobody reads it any more, requests still have their time.
        """
        config = uvicorn.Config(
            app, lifespan="on", ws="none", log_config=None, access_log=False, server_header=False,
            proxy_headers=False,  # whose client is asked for nowhere
            timeout_graceful_shutdown=math.ceil(shutdown_seconds),
        )  # fmt: skip
        self._server = _Server(config, on_start, on_stop)
        self._server.should_exit = self._is_stopped
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))

    def stop(self) -> None:
        """End as a signal does, from any thread, also before it has begun."""
        self._is_stopped = True
        if self._server is not None:
            self._server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[], object], on_stop: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_start, self._on_stop = on_start, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        with contextlib.suppress(OSError):
            self._on_stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own raises the signal again in the end, by which the process would end, and not well.
        self.force_exit = self.should_exit
        self.should_exit = True
