"""The page and the endpoints for programs: their layout, and the handlers of all events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradio as gr

from osd_hf.bundled import DOMAINS, GENERAL
from osd_hf.errors import ConfigError, OSDError
from osd_hf_app import view
from osd_hf_app.pair import NO_DOMAIN
from osd_hf_app.service import MAX_PUBLIC_NEW_TOKENS, Service
from osd_hf_app.sessions import AUTOMATIC, K_CHOICES, MAX_NEW_TOKENS, Answer, Session, Settings
from osd_hf_app.sharing import visitor_id

ALL = "all domains"
PROMPTS = 20
NEW_TOKENS, LARGE_NEW_TOKENS = 96, 192  # initial values; answers of larger models are longer
TICK_SECONDS = 2.0  # between two updates of the panels
EVENT: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# Gradio would drop what is sent while the last frame of an answer is on its way.
SEND_EVENT: dict[str, Any] = {**EVENT, "trigger_mode": "multiple"}

INTRO = """# A draft that learns while you chat
A **small draft** guesses the next tokens, the **target** checks them in one pass, and the answer is always the
target's own. Between answers the draft **learns**: more guesses are right, and fewer passes are needed.
"""


def build(service: Service, *, output_dir: Path = Path("osd_hf_app")) -> gr.Blocks:
    """Return the page, not launched. "Save" writes folders into `output_dir`."""
    handlers = _Handlers(service, output_dir)
    pair, workspace, is_owner = service.pair, service.sessions.shared, not service.is_public
    domains: dict[str, Any] = {"elem_id": "domain", "visible": bool(pair.domains)}
    with gr.Blocks(title="osd_hf: a draft that learns while you chat", analytics_enabled=False) as page:
        # The browser keeps the chat's id through a reload and a restart of the app.
        session_id = gr.BrowserState(None, storage_key="osd-hf-chat")
        gr.Markdown(INTRO, elem_id="intro")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                headline = gr.HTML(view.headline(workspace), elem_id="headline")
                curves = gr.HTML(view.curves(workspace, None), elem_id="curves")
            with gr.Column(scale=3, min_width=320):
                compared = gr.HTML(view.comparison(service.sessions.guest()), elem_id="compared")
                gr.HTML(view.LEGEND)
                balance = gr.HTML(view.balance(workspace), elem_id="balance")
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                empty = view.transcript(service.sessions.guest())
                chat = gr.HTML(empty, elem_id="chat", js_on_load=view.FOLLOW, min_height=430, max_height=430)
                with gr.Row(equal_height=True):
                    # Enabled when the chat is open, so that no typed text is lost.
                    hint = "Enter sends, Shift+Enter breaks the line"
                    size: dict[str, Any] = {"max_lines": 6, "scale": 5, "min_width": 200}
                    prompt = gr.Textbox(
                        label="Your prompt", placeholder=hint, elem_id="prompt", interactive=False, **size
                    )
                    with gr.Column(scale=1, min_width=100):
                        send = gr.Button("Send", variant="primary", elem_id="send", interactive=False)
                        stop = gr.Button("Stop", elem_id="stop")
                info = "Each domain has its own draft. Automatic decides by the words of the prompt."
                domain = gr.Radio(
                    [AUTOMATIC, *DOMAINS, GENERAL], value=AUTOMATIC, label="Domain", info=info, **domains
                )
                with gr.Row():
                    twenty = gr.Button(f"Send {PROMPTS} prompts", elem_id="twenty", interactive=False)
                    suggest = gr.Button("Suggest a prompt", elem_id="suggest", interactive=False)
                    clear = gr.Button("Clear the chat", elem_id="clear", interactive=False)
                with gr.Accordion("Settings", open=False, elem_id="settings"):
                    with gr.Row():
                        learn = gr.Checkbox(True, label="Learn from my requests", elem_id="learn")
                        label = "Private draft, which learns only from me (deleted when unticked)"
                        private = gr.Checkbox(False, label=label, elem_id="private")
                    with gr.Row():
                        check = gr.Checkbox(is_owner, label="Compare with the target alone", elem_id="check")
                        remember = gr.Checkbox(not pair.is_bundled, label="Remember the earlier turns")
                    info = "auto uses measured acceptance and costs, and also proposes earlier text of the chat"
                    k = gr.Radio(list(K_CHOICES), value="auto", label="k, tokens drafted per round", info=info)
                    maximum = MAX_NEW_TOKENS if is_owner else MAX_PUBLIC_NEW_TOKENS
                    initial = NEW_TOKENS if pair.is_bundled else LARGE_NEW_TOKENS
                    tokens = gr.Slider(1, maximum, value=initial, step=1, precision=0, label="Maximum new tokens")
                    do_sample = gr.Checkbox(False, label="Sample (greedy otherwise)")
                    warm, most = pair.sampling["temperature"], pair.sampling["top_p"]
                    temperature = gr.Slider(0.1, 2.0, value=warm, step=0.1, label="Temperature, if sampled")
                    top_p = gr.Slider(0.1, 1.0, value=most, step=0.05, label="Top-p, if sampled")
            with gr.Column(scale=2, min_width=320):
                choices, domains = [ALL, *DOMAINS, GENERAL], {**domains, "elem_id": "shown"}
                shown = gr.Radio(choices, value=ALL, label="Curves of", **domains)
                with gr.Accordion("Versions and domains", open=False, elem_id="versions"):
                    state = gr.HTML(view.learner_state(workspace, service.is_public), elem_id="state")
                    table = gr.HTML(view.domain_table(workspace), elem_id="table")
                with gr.Accordion("Reset, save, push", open=False, elem_id="keep", visible=is_owner):
                    reset = gr.Button("Reset the draft", elem_id="reset")
                    save = gr.Button(f"Save to {output_dir}", elem_id="save")
                    info = "The draft of the chosen domain is pushed." if pair.domains else None
                    repo = gr.Textbox(label="Hub repository", placeholder="user/name", info=info, elem_id="repo")
                    private_repo = gr.Checkbox(True, label="Private repository", elem_id="private-repo")
                    push = gr.Button("Push to the Hub", elem_id="push")
                    kept = gr.Markdown(elem_id="kept", container=False)

        # In the order of the fields of `Settings`.
        settings = [session_id, private, domain, learn, k, do_sample, temperature, top_p, tokens, check, remember]
        enabled = [prompt, send, twenty, suggest, clear]
        page.load(handlers.open, session_id, [session_id, chat, private, *enabled], **EVENT).then(
            handlers.follow, session_id, chat, **EVENT
        )
        gr.on([send.click, prompt.submit], handlers.submit, [prompt, *settings], [chat, prompt], **SEND_EVENT)
        twenty.click(handlers.send_many, settings, chat, **SEND_EVENT)
        suggest.click(handlers.suggest, [session_id, domain], prompt, queue=False, **EVENT)
        stop.click(handlers.stop, session_id, queue=False, **EVENT)
        clear.click(handlers.clear, session_id, chat, queue=False, **EVENT)
        private.input(handlers.set_private, [session_id, private], [private, chat], **EVENT)
        seen, timer = gr.State(None), gr.Timer(TICK_SECONDS)
        inputs, outputs = [session_id, shown, seen], [headline, curves, compared, balance, state, table, private, seen]
        gr.on([timer.tick, shown.change], handlers.tick, inputs, outputs, queue=False, **EVENT)
        reset.click(handlers.reset, session_id, kept, **EVENT)
        save.click(handlers.save, session_id, kept, concurrency_limit=1, **EVENT)
        push.click(handlers.push, [session_id, domain, repo, private_repo], kept, concurrency_limit=1, **EVENT)
        gr.api(handlers.chat, api_name="chat")
        gr.api(handlers.statistics, api_name="statistics", queue=False)
    return page


class _Handlers:
    """Handle the events of the page and of programs. Gradio passes a request where the annotation says so."""

    def __init__(self, service: Service, output_dir: Path) -> None:
        self.service = service
        self.output_dir = output_dir

    def _visitor(self, request: gr.Request) -> str | None:
        return visitor_id(request.client and request.client.host) if self.service.is_public else None

    def _session(self, request: gr.Request, session_id: str | None) -> Session:
        try:
            return self.service.sessions.open(session_id, self._visitor(request))
        except OSDError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def _require_owner(self) -> None:
        if self.service.is_public:  # hidden controls can still be called
            raise gr.Error("Not available in public mode.", print_exception=False)

    def open(self, request: gr.Request, session_id: str | None) -> tuple[Any, ...]:
        session = self._session(request, session_id)
        return session.id, view.transcript(session), session.workspace.is_private, *[gr.update(interactive=True)] * 5

    def follow(self, request: gr.Request, session_id: str) -> Iterator[str]:
        yield from _watch(self._session(request, session_id))

    def submit(self, request: gr.Request, prompt: str, session_id: str, private: bool, *values: Any) -> Iterator[Any]:
        session, ask = self._session(request, session_id), self.service.ask
        started = _try(session, lambda: ask(session, prompt or "", Settings(*values), wants_private=private))
        for html in _watch(session):
            yield html, "" if started else gr.skip()
            started = False  # cleared once: newly typed text stays

    def send_many(self, request: gr.Request, session_id: str, private: bool, *values: Any) -> Iterator[str]:
        session, send = self._session(request, session_id), self.service.send
        domain = _domain_of(session, values[0])
        _try(session, lambda: send(session, domain, PROMPTS, Settings(*values), wants_private=private))
        yield from _watch(session)

    def suggest(self, request: gr.Request, session_id: str, domain: str) -> str:
        return self.service.pair.samples(_domain_of(self._session(request, session_id), domain), 1)[0]

    def stop(self, request: gr.Request, session_id: str) -> None:
        job = self._session(request, session_id).job
        if job is not None:
            job.stop.set()

    def clear(self, request: gr.Request, session_id: str) -> str:
        session = self._session(request, session_id)
        _try(session, lambda: self.service.sessions.clear(session))
        return view.transcript(session)

    def set_private(self, request: gr.Request, session_id: str, is_private: bool) -> tuple[Any, Any]:
        session = self._session(request, session_id)
        _try(session, lambda: self.service.sessions.set_private(session, is_private is True))
        return session.workspace.is_private, view.transcript(session)

    def tick(self, request: gr.Request, session_id: str | None, shown: str, seen: Any) -> Any:
        if session_id is None:
            return gr.skip()
        session = self._session(request, session_id)
        workspace = session.workspace
        panels = (
            view.headline(workspace),
            view.curves(workspace, None if shown == ALL else shown),
            view.comparison(session),
            view.balance(workspace),
            view.learner_state(workspace, self.service.is_public),
            view.domain_table(workspace),
        )
        news = (session.id, id(workspace), hash(panels))
        return gr.skip() if news == seen else (*panels, session.workspace.is_private, news)

    def reset(self, request: gr.Request, session_id: str) -> str:
        self._require_owner()
        with self.service.queue.slot():
            self._session(request, session_id).workspace.reset()
        return "The draft was reset."

    def save(self, request: gr.Request, session_id: str) -> str:
        self._require_owner()
        try:
            paths = self._session(request, session_id).workspace.save(self.output_dir)
        except (OSDError, OSError) as error:
            return f"Not everything was saved: {error}"
        return f"Saved: {', '.join(f'`{path}`' for path in paths)}."

    def push(self, request: gr.Request, session_id: str, domain: str, repo: str, is_private: bool) -> Iterator[str]:
        self._require_owner()
        session = self._session(request, session_id)
        assistant = session.workspace.assistant
        name = _domain_of(session, domain) if domain == AUTOMATIC else domain
        yield "Pushing …"
        try:
            if not assistant.drafts.serving_version(name):
                raise ConfigError("this draft has learned nothing yet.")
            url = assistant.push_to_hub(repo.strip(), domain=assistant.drafts.key(name), private=is_private)
            yield f"Pushed the draft{name and f' of {name}'} to {url}"
        except OSDError as error:
            yield f"Not pushed: {error}"

    def chat(
        self,
        prompt: str,
        domain: str = AUTOMATIC,
        max_new_tokens: int = 96,
        k: str = "auto",
        do_sample: bool = False,
        temperature: float = 1.0,
        top_p: float = 1.0,
        learn: bool = True,
        remember: bool = False,
        request: gr.Request = None,
    ) -> Iterator[dict[str, Any]]:
        """Answer a prompt as the page does. Streams the answer so far; the last item has all figures."""
        # For programs, like `statistics`. Gradio shows both docstrings.
        sessions, visitor = self.service.sessions, self._visitor(request)
        try:
            name = f"program {request.session_hash}"
            session = sessions.open(name, visitor) if remember else sessions.guest(visitor)
            values = (domain, learn, k, do_sample, temperature, top_p, max_new_tokens, False, remember)
            answer = self.service.ask(session, prompt, Settings(*values))
        except OSDError as error:
            raise gr.Error(str(error), print_exception=False) from error
        try:
            for _ in session.frames(answer):
                if answer.error:
                    raise gr.Error(answer.error, print_exception=False)
                yield _answer_json(answer)
        finally:
            answer.stop.set()  # the program may have disconnected

    def statistics(self) -> dict[str, Any]:
        """Return acceptance of the learning and the frozen draft, by domain, and the state of the shared learner."""
        return self.service.sessions.shared.statistics()


def _watch(session: Session) -> Iterator[str]:
    """Yield the chat until the current job is done."""
    for _ in session.frames():
        yield view.transcript(session)


def _try(session: Session, start: Callable[[], Any]) -> bool:
    """Return whether something could be started; if not, show the reason in the chat."""
    try:
        start()
        return True
    except OSDError as error:
        session.show(str(error))
        return False


def _domain_of(session: Session, chosen: str) -> str:
    """Return the chosen domain, or that of the newest request, or the first one."""
    domains = session.workspace.pair.domains
    found = [e.domain for e in session.entries if not (isinstance(e, Answer) and e.error)]
    return next((domain for domain in (chosen, *found[-1:], *domains) if domain in domains), NO_DOMAIN)


def _answer_json(answer: Answer) -> dict[str, Any]:
    stats = answer.stats
    return {
        "text": answer.text,
        "done": stats is not None,
        "domain": answer.domain,
        "draft_version": answer.version,
        "tokens": [asdict(token) for token in answer.tokens],
        "alpha": stats.alpha if stats and stats.examined else None,
        "text_alpha": stats.text_alpha if stats and stats.text_examined else None,
        "tokens_per_target_pass": stats.block_efficiency if stats else None,
        "tokens_per_second": stats.emitted / answer.seconds if stats else None,
        "seconds": answer.seconds,
    }
