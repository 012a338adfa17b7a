"""The endpoints for programs: `/chat` and `/statistics`, as `gradio_client` calls them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from osd_hf import OSDError
from osd_hf_app.answers import Answer, Settings, parsed_k
from osd_hf_app.service import Service
from osd_hf_app.visitors import visitor_at

__all__ = ["add_api"]

FRAME_SECONDS = 0.3  # between two pictures of an answer that grows
LOOK_SECONDS = 1.0  # after which a program is sent to again, which tells whether it is still there


def add_api(service: Service, automatic: str) -> None:
    """Add the endpoints to the page that is being built; `automatic` is the word for a domain found by the prompt."""

    def chat(
        prompt: str,
        domain: str = automatic,
        max_new_tokens: int = 96,
        k: str = "5",
        do_sample: bool = False,
        temperature: float = 1.0,
        top_p: float = 1.0,
        learn: bool = True,
        remember: bool = False,
        request: gr.Request = None,  # type: ignore[assignment]  # gradio passes it
    ) -> Iterator[dict[str, Any]]:
        """Answer a prompt as the page does; streams what there is so far, the last item with all figures."""
        visitor = visitor_at(request.client.host) if service.is_public and request.client else None
        try:
            name = f"program {request.session_hash}"
            session = service.session(name, visitor) if remember else service.guest(visitor)
            settings = Settings(
                None if domain == automatic else domain, learn, parsed_k(k),
                do_sample, temperature, top_p, max_new_tokens, remember=remember,
            )  # fmt: skip
            answer = service.ask(session, prompt, settings)
        except OSDError as error:
            raise gr.Error(str(error), print_exception=False) from error
        try:
            for _ in session.frames(FRAME_SECONDS, LOOK_SECONDS):
                if answer.is_done:  # the chat may be at the next one
                    break
                yield _told(answer)
        finally:
            answer.stop.set()  # the program has gone, if it is not done
        if answer.error:
            raise gr.Error(answer.error, print_exception=False)
        yield _told(answer)

    def statistics() -> dict[str, Any]:
        """Acceptance of the learning and the frozen draft, by domain, and the state of the shared learner."""
        return service.shared.statistics()

    gr.api(chat, api_name="chat")
    gr.api(statistics, api_name="statistics", queue=False)


def _told(answer: Answer) -> dict[str, Any]:
    stats = answer.stats
    return {
        "text": answer.text,
        "done": stats is not None,
        "domain": answer.domain,
        "draft_version": answer.version,
        "tokens": [
            {"text": t.text, "origin": t.origin, "draft_said": t.said, "draft_probability": t.prob}
            for t in answer.tokens
        ],
        "alpha": None if stats is None or not stats.examined else stats.alpha,
        "tokens_per_target_pass": None if stats is None else stats.block_efficiency,
        "tokens_per_second": answer.tokens_per_second,
        "first_token_seconds": answer.first_token_seconds,
        "seconds": answer.seconds,
    }
