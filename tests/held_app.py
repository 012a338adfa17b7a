"""The app, but its batches of two domains go on after three answers only when their visitor stops them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from processes import say_into

from osd_hf.cli.main import main
from osd_hf_app import launch, page
from osd_hf_app.service import Service
from osd_hf_app.sessions import Batch

HELD = ("python", "sql")
ANSWERS = 3

_answer = Service._answer


def answer_when_stopped(service: Service, session: Any, answer: Any, *rest: Any) -> None:
    job = session.job
    if isinstance(job, Batch) and job.domain in HELD and len(job.answers) > ANSWERS:
        job.stop.wait()
    _answer(service, session, answer, *rest)


def serve(output: Connection, environment: Mapping[str, str], flags: Sequence[str], config: dict[str, Any]) -> None:
    """Serve the app in this process, which says into `output` what it says; `config` in place of the app's own."""
    say_into(output.fileno(), output.fileno())
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    Service._answer = answer_when_stopped  # type: ignore[method-assign]
    if config.pop("demonstrates", False) is False:
        Service.demonstrate = lambda self: None  # type: ignore[method-assign]
    page.TICK_SECONDS = 0.7  # what looks at the panels waits for less
    launch.Service = functools.partial(Service, config=config)  # type: ignore[misc]
    sys.exit(main(["app", *flags]))
