"""The page: what is laid out where, and which event calls what."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from osd_hf import OSDError
from osd_hf.bundled.prompts import DOMAINS
from osd_hf_app import view
from osd_hf_app.answers import MAX_NEW_TOKENS, Answer, Settings, parsed_k
from osd_hf_app.api import add_api
from osd_hf_app.curves import WINDOW
from osd_hf_app.curves import curves as drawn
from osd_hf_app.domains import OTHER
from osd_hf_app.room import Record
from osd_hf_app.service import PUBLIC_NEW_TOKENS, Service, Session
from osd_hf_app.visitors import visitor_at

__all__ = ["AUTOMATIC", "build", "watch"]

logger = logging.getLogger(__name__)

NAME = re.compile(r"[\w-]{22}", re.ASCII)  # of a chat
AUTOMATIC = "automatic"
ALL = "all domains"
PROMPTS = 20
FRAME_SECONDS = 0.3  # between two pictures of an answer that grows
TICK_SECONDS = 2.0
LOOK_SECONDS = 5.0  # after which a page is sent to again, which tells whether it is still there
CHAT_PIXELS = 430
KS = ["auto", "1", "2", "3", "5", "8", "12"]

INTRO = """# A draft that learns while you chat
A **small draft** model guesses the next few words; the **large target** checks them all in one pass. Right guesses
make the answer faster, wrong ones are replaced: what you read is always the target's own answer. Here the draft
**learns from its mistakes between answers**, and more and more of its guesses are accepted: compare the two curves.
"""


def watch(session: Session) -> Iterator[str]:
    """The chat, again and again, until nothing more is being answered."""
    for _ in session.frames(FRAME_SECONDS, LOOK_SECONDS):
        yield view.transcript(session)


def build(service: Service, *, output_dir: Path = Path("osd_hf_app")) -> gr.Blocks:
    """
    The page, not launched.

    Args:
        service (`Service`):
            What answers. Where it is public, nobody loads models, saves, pushes or resets what is shared.
        output_dir (`Path`, *optional*):
            Where "Save" puts its folders.
    """
    is_public = service.is_public
    with gr.Blocks(title="osd_hf: a draft that learns while you chat", analytics_enabled=False) as page:
        visitor = gr.BrowserState(None, storage_key="osd-hf-chat")
        # The browser keeps the visitor's name: through a reload, and while the app is started anew.
        seen = gr.State(None)
        gr.Markdown(INTRO, elem_id="intro")
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                chat = gr.HTML(
                    view.transcript(service.guest()),
                    elem_id="chat",
                    autoscroll=True,
                    min_height=CHAT_PIXELS,
                    max_height=CHAT_PIXELS,
                )
                with gr.Row(equal_height=True):
                    prompt = gr.Textbox(
                        label="Your prompt",
                        lines=1,
                        max_lines=6,
                        scale=5,
                        min_width=200,
                        elem_id="prompt",
                        placeholder="Enter sends, Shift+Enter breaks the line",
                        interactive=False,  # until the visitor is known: nothing that is typed gets lost
                    )
                    with gr.Column(scale=1, min_width=100):
                        send = gr.Button("Send", variant="primary", elem_id="send", interactive=False)
                        stop = gr.Button("Stop", elem_id="stop")
                gr.HTML(view.LEGEND)
                domain = gr.Radio(
                    [AUTOMATIC, *DOMAINS, OTHER],
                    value=AUTOMATIC,
                    label="Domain",
                    elem_id="domain",
                    info="Each has a draft of its own. Automatic goes by the words of the prompt.",
                )
                with gr.Row():
                    twenty = gr.Button(f"Send {PROMPTS} prompts of this domain", elem_id="twenty", interactive=False)
                    shift = gr.Button("Shift to the next domain", elem_id="shift", interactive=False)
                with gr.Row():
                    suggest = gr.Button("Suggest a prompt", elem_id="suggest", interactive=False)
                    clear = gr.Button("Clear the chat", elem_id="clear", interactive=False)
                with gr.Accordion("Settings", open=False, elem_id="settings"):
                    with gr.Row():
                        learn = gr.Checkbox(True, label="Learn from my requests", elem_id="learn")
                        private = gr.Checkbox(
                            False,
                            label="A draft of my own, which learns from nobody but me (unticked, it is forgotten)",
                            elem_id="private",
                        )
                    with gr.Row():
                        check = gr.Checkbox(
                            not is_public, label="Let the target answer alone as well, to compare", elem_id="check"
                        )
                        remember = gr.Checkbox(not service.pair.is_bundled, label="Remember the earlier turns")
                    k = gr.Radio(
                        KS,
                        value="5",
                        label="k, tokens drafted per round",
                        info="auto decides by measured acceptance and costs, and may not draft at all",
                    )
                    most = PUBLIC_NEW_TOKENS if is_public else MAX_NEW_TOKENS
                    tokens = gr.Slider(1, most, value=96, step=1, label="New tokens at most")
                    do_sample = gr.Checkbox(False, label="Sample (greedy otherwise)")
                    temperature = gr.Slider(0.1, 2.0, value=1.0, step=0.1, label="Temperature, if sampled")
                    top_p = gr.Slider(0.1, 1.0, value=1.0, step=0.05, label="Top-p, if sampled")
            with gr.Column(scale=2, min_width=320):
                state = gr.HTML(view.learner_state(service.shared, False, is_public), elem_id="state")
                curves = gr.HTML(_curves([], ALL), elem_id="curves")
                shown = gr.Radio([ALL, *DOMAINS, OTHER], value=ALL, label="Curves of", elem_id="shown")
                table = gr.HTML(view.domain_table(service.shared), elem_id="table")
                corrections = gr.HTML(view.corrections(service.guest().corrections), elem_id="corrections")
                with gr.Accordion("Reset, save, push", open=False, elem_id="keep", visible=not is_public):
                    reset = gr.Button("Reset the draft to how it was", elem_id="reset")
                    name = gr.Textbox(
                        "demo", label=f"Save into this folder of {output_dir}", interactive=not is_public
                    )
                    save = gr.Button("Save", interactive=not is_public, elem_id="save")
                    which = gr.Dropdown([*DOMAINS, OTHER], value=DOMAINS[0], label="Push the draft of")
                    repo = gr.Textbox(
                        label="Hub repo",
                        placeholder="user/name",
                        info="A new one is private. One that everybody may read is refused.",
                        interactive=not is_public,
                        elem_id="repo",
                    )
                    token = gr.Textbox(
                        label="Token with the right to write",
                        type="password",
                        info="Empty takes the login of this machine.",
                        interactive=not is_public,
                    )
                    pushing = gr.Button("Push to the Hub", interactive=not is_public, elem_id="push")
                    kept = gr.Markdown(elem_id="kept", container=False)
                with gr.Accordion("Models", open=False, elem_id="models", visible=not is_public):
                    target_id = gr.Textbox(
                        label="Target: Hub id or folder",
                        placeholder="the bundled one",
                        interactive=not is_public,
                        elem_id="target",
                    )
                    draft_id = gr.Textbox(
                        label="Draft: Hub id or folder",
                        placeholder="the bundled one",
                        interactive=not is_public,
                        elem_id="draft",
                    )
                    load = gr.Button("Load this pair", interactive=not is_public, elem_id="load")
                    loaded = gr.Markdown(f"Serving {service.pair.name}.", elem_id="loaded", container=False)
        timer = gr.Timer(TICK_SECONDS)

        def of(request: gr.Request, session_id: str | None) -> Session:
            if session_id is not None and not (isinstance(session_id, str) and NAME.fullmatch(session_id)):
                session_id = None
            try:
                return service.session(session_id, visitor_at(request.client.host) if is_public else None)
            except OSDError as error:
                raise gr.Error(str(error), print_exception=False) from error

        def told(session: Session, begin: Callable[[], Any]) -> bool:
            """Whether it could begin; if not, the chat says why."""
            try:
                begin()
                return True
            except OSDError as error:
                session.notice = str(error)
                session.touch()
                return False

        def said(failed: str, work: Callable[[], str]) -> str:
            """What has come of it, or why nothing has."""
            try:
                return work()
            except (OSDError, OSError) as error:
                return f"{failed}: {error}"
            except Exception as error:
                logger.exception("%s.", failed)
                return f"{failed} ({type(error).__name__}). The log of the app says more."

        def chosen(*values: Any) -> Settings:
            domain, learn, k, do_sample, temperature, top_p, tokens, check, remember = values
            domain = None if domain == AUTOMATIC else domain
            return Settings(
                domain, learn, parsed_k(k), do_sample, temperature, top_p, int(tokens or 0), check, remember
            )

        def arrive(request: gr.Request, session_id: str | None) -> tuple[Any, ...]:
            session = of(request, session_id)
            ready = [gr.update(interactive=True)] * len(waiting)
            return session.id, view.transcript(session), session.is_private, *ready

        def follow(request: gr.Request, session_id: str) -> Iterator[str]:
            yield from watch(of(request, session_id))

        def submit(
            request: gr.Request, prompt: str, session_id: str, private: bool, *values: Any
        ) -> Iterator[tuple[Any, Any]]:
            session = of(request, session_id)
            began = told(session, lambda: service.ask(session, prompt or "", chosen(*values), wants_private=private))
            for html in watch(session):
                yield html, "" if began else gr.skip()
                began = False  # what is typed meanwhile stays

        def send_many(request: gr.Request, session_id: str, private: bool, *values: Any) -> Iterator[str]:
            session, domain = of(request, session_id), values[0]
            if domain not in DOMAINS:
                domain = _last_domain(session)
            told(session, lambda: service.send(session, domain, PROMPTS, chosen(*values), wants_private=private))
            yield from watch(session)

        def suggested(request: gr.Request, session_id: str, domain: str) -> str:
            return service.pair.samples(domain if domain in DOMAINS else _last_domain(of(request, session_id)), 1)[0]

        def next_domain(request: gr.Request, session_id: str, domain: str) -> str:
            now = domain if domain in DOMAINS else _last_domain(of(request, session_id))
            return DOMAINS[(DOMAINS.index(now) + 1) % len(DOMAINS)]

        def end(request: gr.Request, session_id: str) -> None:
            job = of(request, session_id).job
            if job is not None:
                job.stop.set()

        def forget(request: gr.Request, session_id: str) -> str:
            session = of(request, session_id)
            told(session, lambda: service.clear(session))
            return view.transcript(session)

        def set_private(request: gr.Request, session_id: str, is_private: bool) -> tuple[Any, Any]:
            session = of(request, session_id)
            told(session, lambda: service.go_private(session, is_private is True))
            return session.is_private, view.transcript(session)

        def tick(request: gr.Request, session_id: str | None, shown: str, seen: Any) -> Any:
            if session_id is None:
                return gr.skip()
            session = of(request, session_id)
            room = session.room
            news = (
                session.id, id(room), room.count, room.state, len(room.assistant.decisions), session.is_private, shown,
                session.corrections.total(),
            )  # fmt: skip
            if news == seen:
                return gr.skip()
            curves = _curves(room.snapshot(None if shown == ALL else shown), shown)
            return (
                view.learner_state(room, session.is_private, is_public), curves, view.domain_table(room),
                view.corrections(session.corrections), session.is_private, news,
            )  # fmt: skip

        def reset_draft(request: gr.Request, session_id: str) -> str:
            refuse_strangers()
            service.reset(of(request, session_id).room)
            return "The draft is as it was."

        def keep(request: gr.Request, session_id: str, name: str) -> str:
            refuse_strangers()
            if not re.fullmatch(r"[\w.-]{1,64}", name) or name.strip(".") == "":
                return f"A folder's name has letters, digits, `.`, `_` and `-`, got {name!r}."
            return said(
                "Not all saved", lambda: "Saved: " + _listed(of(request, session_id).room.save(output_dir / name))
            )

        def publish(request: gr.Request, session_id: str, which: str, repo: str, token: str) -> Iterator[str]:
            refuse_strangers()
            yield "Pushing …"
            yield said("Not pushed", lambda: f"Pushed to {of(request, session_id).room.push(which, repo, token)}")

        def load_pair(target: str, draft: str) -> Iterator[str]:
            refuse_strangers()
            yield "Loading …"

            def loaded() -> str:
                service.load(target.strip() or None, draft.strip() or None)
                return f"Serving {service.pair.name}."

            yield said(f"Still serving {service.pair.name}", loaded)

        def refuse_strangers() -> None:
            if is_public:  # a hidden button is no lock
                raise gr.Error("This is not for visitors of a public app.", print_exception=False)

        settings = [domain, learn, k, do_sample, temperature, top_p, tokens, check, remember]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        # What is sent while the last frame of an answer is on its way is not to be lost; the service refuses the rest.
        sending: dict[str, Any] = {**quiet, "trigger_mode": "multiple"}
        waiting = [prompt, send, twenty, shift, suggest, clear]
        page.load(arrive, visitor, [visitor, chat, private, *waiting], **quiet).then(follow, visitor, chat, **quiet)
        gr.on([send.click, prompt.submit], submit, [prompt, visitor, private, *settings], [chat, prompt], **sending)
        twenty.click(send_many, [visitor, private, *settings], chat, **sending)
        shift.click(next_domain, [visitor, domain], domain, **sending).then(
            send_many, [visitor, private, *settings], chat, **sending
        )
        suggest.click(suggested, [visitor, domain], prompt, queue=False, **quiet)
        stop.click(end, visitor, queue=False, **quiet)
        clear.click(forget, visitor, chat, queue=False, **quiet)
        private.input(set_private, [visitor, private], [private, chat], **quiet)
        panel = [state, curves, table, corrections, private, seen]
        gr.on([timer.tick, shown.change], tick, [visitor, shown, seen], panel, queue=False, **quiet)
        one: dict[str, Any] = {**quiet, "concurrency_limit": 1}
        reset.click(reset_draft, visitor, kept, **quiet)
        save.click(keep, [visitor, name], kept, **one)
        pushing.click(publish, [visitor, which, repo, token], kept, **one)
        load.click(load_pair, [target_id, draft_id], loaded, **one)
        add_api(service, AUTOMATIC)
    return page


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


def _last_domain(session: Session) -> str:
    """That of the newest request; the first one where there is none of a domain with prompts."""
    found = [e.domain for e in session.entries if not (isinstance(e, Answer) and e.error)]
    return found[-1] if found and found[-1] in DOMAINS else DOMAINS[0]


def _curves(records: Sequence[Record], shown: str) -> str:
    return drawn(records, f"α over {WINDOW} requests, {shown}")
