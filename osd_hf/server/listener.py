"""Serve a web application until a signal ends it, and let running requests finish."""

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


class Listener:
    """
    An address where an application will be served, bound immediately; port 0 selects a free one.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            # Whether only this machine can connect.
            self.is_local = ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback
            self._socket = socket.create_server((str(place[0]), int(place[1])), family=family)
            # Also for accepted connections: otherwise the first event of a stream waits 40 ms until its client
            # confirms the headers. asyncio sets it only for sockets that it makes.
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
        self,
        app: Any,
        *,
        shutdown_seconds: float,
        on_start: Callable[[], object] = lambda: None,
        on_stop: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Serve an ASGI application until SIGTERM, SIGINT or [`~Listener.stop`].

        Then no connections are accepted, and running requests are canceled after some seconds, or at a second signal.
        `on_start` and `on_stop` are called in the event loop when the address answers, and when stopping begins.
        """
        config = uvicorn.Config(
            app,
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(shutdown_seconds),
        )
        self._server = _Server(config, on_start, on_stop)
        self._server.should_exit = self._is_stopped
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))

    def stop(self) -> None:
        """Stop as after a signal, from any thread, also before [`~Listener.run`]."""
        self._is_stopped = True
        if self._server is not None:
            self._server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[], object], on_stop: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        with contextlib.suppress(OSError):
            self._on_stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own method raises the signal again in the end, so the process would not exit with code 0.
        self.force_exit = self.should_exit
        self.should_exit = True
