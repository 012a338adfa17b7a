"""The app, but its batches of two domains go on after three answers only when their visitor stops them."""

from __future__ import annotations

import sys
from typing import Any

from osd_hf.cli.main import main
from osd_hf_app.service import Service
from osd_hf_app.visitors import Batch

HELD = ("python", "sql")
ANSWERS = 3

_answer = Service._answer


def answer_when_stopped(service: Service, session: Any, answer: Any, *rest: Any) -> None:
    job = session.job
    if isinstance(job, Batch) and job.domain in HELD and len(job.answers) > ANSWERS:
        job.stop.wait()
    _answer(service, session, answer, *rest)


if __name__ == "__main__":
    Service._answer = answer_when_stopped  # type: ignore[method-assign]
    sys.exit(main(["app", *sys.argv[1:]]))
