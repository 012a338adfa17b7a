"""The page and the endpoints for programs: their layout, and the handlers of all events."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from osd_hf.bundled import DOMAINS
from osd_hf.errors import ConfigError, OSDError
from osd_hf_app import view
from osd_hf_app.pair import GENERAL, NO_DOMAIN
from osd_hf_app.service import MAX_PUBLIC_NEW_TOKENS, Service
from osd_hf_app.sessions import MAX_NEW_TOKENS, Answer, Session, Settings
from osd_hf_app.sharing import visitor_id

logger = logging.getLogger(__name__)

SESSION_ID = re.compile(r"[\w-]{22}", re.ASCII)
AUTOMATIC = "automatic"
ALL = "all domains"
PROMPTS = 20
NEW_TOKENS, LARGE_NEW_TOKENS = 96, 192  # initial values; answers of larger models are longer
FRAME_SECONDS = 0.3  # between two updates of a growing answer
TICK_SECONDS = 2.0  # between two updates of the panels
LOOK_SECONDS = 5.0  # after which an unchanged page is updated, to notice that it was closed
PROGRAM_LOOK_SECONDS = 1.0  # the same for a program
CHAT_PIXELS = 430
K_CHOICES = ["auto", "1", "2", "3", "5", "8", "12"]
EVENT: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# Gradio would drop what is sent while the last frame of an answer is on its way.
SEND_EVENT: dict[str, Any] = {**EVENT, "trigger_mode": "multiple"}
OWNER_EVENT: dict[str, Any] = {**EVENT, "concurrency_limit": 1}

INTRO = """# A draft that learns while you chat
A **small draft** guesses the next few words; the **large target** checks them in one pass. Right guesses make the
answer faster and wrong ones are replaced, so you always read the target's own answer. Between answers, the draft
**learns from its mistakes**, and more of its guesses are accepted: compare the two curves.
"""

# Gradio's own scrolling stops once more than 100 pixels are added in one step, as by a long prompt.
FOLLOW = """
const sent = () => element.querySelectorAll(".osd-you").length;
let box = element, before = sent(), follows = true;
while (box.parentElement && !/auto|scroll/.test(getComputedStyle(box).overflowY)) box = box.parentElement;
box.addEventListener("scroll", () => { follows = box.scrollTop + box.clientHeight > box.scrollHeight - 40; });
new MutationObserver(() => {
    if (sent() > before) follows = true;
    before = sent();
    if (follows) box.scrollTop = box.scrollHeight;
}).observe(box, {childList: true, subtree: true, characterData: true});
"""


def build(service: Service, *, output_dir: Path = Path("osd_hf_app")) -> gr.Blocks:
    """Return the page, not launched. "Save" writes folders into `output_dir`."""
    handlers = _Handlers(service, output_dir)
    with gr.Blocks(title="osd_hf: a draft that learns while you chat", analytics_enabled=False) as page:
        # The browser keeps the chat's id through a reload and a restart of the app.
        session_id = gr.BrowserState(None, storage_key="osd-hf-chat")
        gr.Markdown(INTRO, elem_id="intro")
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                chat, prompt, send, stop = _chat(service)
                domain, twenty, shift, suggest, clear = _prompts(service)
                learn, private, *others = _settings(service)
            with gr.Column(scale=2, min_width=320):
                panel, shown = _panel(service)
                pushed_domain, loading = _owner_controls(service, handlers, session_id)
        settings = [session_id, private, domain, learn, *others]
        disabled_at_first = [prompt, send, twenty, shift, suggest, clear]
        domain_controls = [domain, shift, shown, pushed_domain]
        page.load(handlers.open, session_id, [session_id, chat, private, *disabled_at_first], **EVENT).then(
            handlers.follow, session_id, chat, **EVENT
        )
        page.load(handlers.show_domains, None, domain_controls, **EVENT)
        loading.then(handlers.show_domains, None, domain_controls, **EVENT)
        gr.on([send.click, prompt.submit], handlers.submit, [prompt, *settings], [chat, prompt], **SEND_EVENT)
        twenty.click(handlers.send_many, settings, chat, **SEND_EVENT)
        shift.click(handlers.next_domain, [session_id, domain], domain, **SEND_EVENT).then(
            handlers.send_many, settings, chat, **SEND_EVENT
        )
        suggest.click(handlers.suggest, [session_id, domain], prompt, queue=False, **EVENT)
        stop.click(handlers.stop, session_id, queue=False, **EVENT)
        clear.click(handlers.clear, session_id, chat, queue=False, **EVENT)
        private.input(handlers.set_private, [session_id, private], [private, chat], **EVENT)
        seen, timer = gr.State(None), gr.Timer(TICK_SECONDS)
        inputs, outputs = [session_id, shown, seen], [*panel, private, seen]
        gr.on([timer.tick, shown.change], handlers.tick, inputs, outputs, queue=False, **EVENT)
        gr.api(handlers.chat, api_name="chat")
        gr.api(handlers.statistics, api_name="statistics", queue=False)
    return page


def _chat(service: Service) -> tuple[gr.HTML, gr.Textbox, gr.Button, gr.Button]:
    empty = view.transcript(service.sessions.guest())
    chat = gr.HTML(empty, elem_id="chat", js_on_load=FOLLOW, min_height=CHAT_PIXELS, max_height=CHAT_PIXELS)
    with gr.Row(equal_height=True):
        # Enabled when the chat is open, so that no typed text is lost.
        hint, size = "Enter sends, Shift+Enter breaks the line", {"max_lines": 6, "scale": 5, "min_width": 200}
        prompt = gr.Textbox(label="Your prompt", placeholder=hint, elem_id="prompt", interactive=False, **size)
        with gr.Column(scale=1, min_width=100):
            send = gr.Button("Send", variant="primary", elem_id="send", interactive=False)
            stop = gr.Button("Stop", elem_id="stop")
    gr.HTML(view.LEGEND)
    return chat, prompt, send, stop


def _prompts(service: Service) -> tuple[gr.Radio, gr.Button, gr.Button, gr.Button, gr.Button]:
    visible = bool(service.pair.domains)
    info = "Each domain has its own draft. Automatic decides by the words of the prompt."
    choices = [AUTOMATIC, *DOMAINS, GENERAL]
    domain = gr.Radio(choices, value=AUTOMATIC, label="Domain", info=info, elem_id="domain", visible=visible)
    with gr.Row():
        twenty = gr.Button(f"Send {PROMPTS} prompts", elem_id="twenty", interactive=False)
        shift = gr.Button("Shift to the next domain", elem_id="shift", interactive=False, visible=visible)
    with gr.Row():
        suggest = gr.Button("Suggest a prompt", elem_id="suggest", interactive=False)
        clear = gr.Button("Clear the chat", elem_id="clear", interactive=False)
    return domain, twenty, shift, suggest, clear


def _settings(service: Service) -> list[gr.components.Component]:
    """Lay out the settings of a prompt, in the order of the arguments of `_settings_of`."""
    pair = service.pair
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        with gr.Row():
            learn = gr.Checkbox(True, label="Learn from my requests", elem_id="learn")
            label = "Private draft, which learns only from me (deleted when unticked)"
            private = gr.Checkbox(False, label=label, elem_id="private")
        with gr.Row():
            label = "Compare with the target alone"
            check = gr.Checkbox(not service.is_public, label=label, elem_id="check")
            remember = gr.Checkbox(not pair.is_bundled, label="Remember the earlier turns")
        info = "auto uses measured acceptance and costs, and also proposes earlier text of the chat"
        k = gr.Radio(K_CHOICES, value="auto", label="k, tokens drafted per round", info=info)
        maximum = MAX_PUBLIC_NEW_TOKENS if service.is_public else MAX_NEW_TOKENS
        initial = NEW_TOKENS if pair.is_bundled else LARGE_NEW_TOKENS
        tokens = gr.Slider(1, maximum, value=initial, step=1, precision=0, label="Maximum new tokens")
        do_sample = gr.Checkbox(False, label="Sample (greedy otherwise)")
        value = pair.sampling["temperature"]
        temperature = gr.Slider(0.1, 2.0, value=value, step=0.1, label="Temperature, if sampled")
        top_p = gr.Slider(0.1, 1.0, value=pair.sampling["top_p"], step=0.05, label="Top-p, if sampled")
    return [learn, private, k, do_sample, temperature, top_p, tokens, check, remember]


def _panel(service: Service) -> tuple[list[gr.HTML], gr.Radio]:
    """Lay out state, curves, and tables, in the order of `_Handlers.tick`, and the domain of the curves."""
    workspace = service.sessions.shared
    state = gr.HTML(view.learner_state(workspace, False, service.is_public), elem_id="state")
    curves = gr.HTML(view.curves(workspace, None), elem_id="curves")
    visible = bool(service.pair.domains)
    shown = gr.Radio([ALL, *DOMAINS, GENERAL], value=ALL, label="Curves of", elem_id="shown", visible=visible)
    table = gr.HTML(view.domain_table(workspace), elem_id="table")
    corrections = gr.HTML(view.corrections(service.sessions.guest().corrections), elem_id="corrections")
    return [state, curves, table, corrections], shown


def _owner_controls(service: Service, handlers: _Handlers, session_id: gr.BrowserState) -> tuple[gr.Dropdown, Any]:
    """Lay out the controls that are closed in public mode; return the pushed domain and the load event."""
    visible = not service.is_public
    with gr.Accordion("Reset, save, push", open=False, elem_id="keep", visible=visible):
        reset = gr.Button("Reset the draft", elem_id="reset")
        name = gr.Textbox("demo", label=f"Folder inside {handlers.output_dir}")
        save = gr.Button("Save", elem_id="save")
        choices = [*DOMAINS, GENERAL]
        has_domains = bool(service.pair.domains)
        domain = gr.Dropdown(choices, value=DOMAINS[0], label="Push the draft of", visible=has_domains)
        info = "A new repository is private. A public one is refused."
        repo = gr.Textbox(label="Hub repository", placeholder="user/name", info=info, elem_id="repo")
        info = "Empty: the login of this machine."
        token = gr.Textbox(label="Token with write access", type="password", info=info)
        push = gr.Button("Push to the Hub", elem_id="push")
        saved = gr.Markdown(elem_id="kept", container=False)
    with gr.Accordion("Models", open=False, elem_id="models", visible=visible):
        target = gr.Textbox(label="Target: Hub id or folder", elem_id="target", placeholder="the bundled one")
        draft = gr.Textbox(label="Draft: Hub id or folder", elem_id="draft", placeholder="the bundled one")
        load = gr.Button("Load this pair", elem_id="load")
        loaded = gr.Markdown(f"Serving {service.pair.name}.", elem_id="loaded", container=False)
    reset.click(handlers.reset, session_id, saved, **EVENT)
    save.click(handlers.save, [session_id, name], saved, **OWNER_EVENT)
    push.click(handlers.push, [session_id, domain, repo, token], saved, **OWNER_EVENT)
    return domain, load.click(handlers.load, [target, draft], loaded, **OWNER_EVENT)


class _Handlers:
    """Handle the events of the page and of programs. Gradio passes a request where the annotation says so."""

    def __init__(self, service: Service, output_dir: Path) -> None:
        self.service = service
        self.output_dir = output_dir

    def _visitor(self, request: gr.Request) -> str | None:
        return visitor_id(request.client and request.client.host) if self.service.is_public else None

    def _session(self, request: gr.Request, session_id: str | None) -> Session:
        is_valid = isinstance(session_id, str) and SESSION_ID.fullmatch(session_id)
        try:
            return self.service.sessions.open(session_id if is_valid else None, self._visitor(request))
        except OSDError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def _require_owner(self) -> None:
        if self.service.is_public:  # hidden controls can still be called
            raise gr.Error("Not available in public mode.", print_exception=False)

    def open(self, request: gr.Request, session_id: str | None) -> tuple[Any, ...]:
        session = self._session(request, session_id)
        return session.id, view.transcript(session), session.is_private, *[gr.update(interactive=True)] * 6

    def show_domains(self) -> list[Any]:
        return [gr.update(visible=bool(self.service.pair.domains))] * 4

    def follow(self, request: gr.Request, session_id: str) -> Iterator[str]:
        yield from _watch(self._session(request, session_id))

    def submit(self, request: gr.Request, prompt: str, session_id: str, private: bool, *values: Any) -> Iterator[Any]:
        session, ask = self._session(request, session_id), self.service.ask
        started = _try(session, lambda: ask(session, prompt or "", _settings_of(*values), wants_private=private))
        for html in _watch(session):
            yield html, "" if started else gr.skip()
            started = False  # cleared once: newly typed text stays

    def send_many(self, request: gr.Request, session_id: str, private: bool, *values: Any) -> Iterator[str]:
        session, send = self._session(request, session_id), self.service.send
        domain = _domain_of(session, values[0])
        _try(session, lambda: send(session, domain, PROMPTS, _settings_of(*values), wants_private=private))
        yield from _watch(session)

    def suggest(self, request: gr.Request, session_id: str, domain: str) -> str:
        return self.service.pair.samples(_domain_of(self._session(request, session_id), domain), 1)[0]

    def next_domain(self, request: gr.Request, session_id: str, domain: str) -> str:
        current = _domain_of(self._session(request, session_id), domain) or DOMAINS[0]
        return DOMAINS[(DOMAINS.index(current) + 1) % len(DOMAINS)]

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
        return session.is_private, view.transcript(session)

    def tick(self, request: gr.Request, session_id: str | None, shown: str, seen: Any) -> Any:
        if session_id is None:
            return gr.skip()
        session = self._session(request, session_id)
        workspace = session.workspace
        learner = view.learner_state(workspace, session.is_private, self.service.is_public)
        news = (session.id, id(workspace), workspace.count, learner, shown, session.corrections.total())
        if news == seen:
            return gr.skip()
        curves, table = view.curves(workspace, None if shown == ALL else shown), view.domain_table(workspace)
        return learner, curves, table, view.corrections(session.corrections), session.is_private, news

    def reset(self, request: gr.Request, session_id: str) -> str:
        self._require_owner()
        self.service.reset(self._session(request, session_id).workspace)
        return "The draft was reset."

    def save(self, request: gr.Request, session_id: str, name: str) -> str:
        self._require_owner()
        if not re.fullmatch(r"[\w.-]{1,64}", name) or name.strip(".") == "":
            return f"A folder's name may have letters, digits, `.`, `_` and `-`, got {name!r}."
        save, folder = self._session(request, session_id).workspace.save, self.output_dir / name
        return _report("Not everything was saved", lambda: "Saved: " + ", ".join(f"`{path}`" for path in save(folder)))

    def push(self, request: gr.Request, session_id: str, domain: str, repo: str, token: str) -> Iterator[str]:
        self._require_owner()
        yield "Pushing …"
        push = self._session(request, session_id).workspace.push
        yield _report("Not pushed", lambda: f"Pushed to {push(domain, repo, token)}")

    def load(self, target: str, draft: str) -> Iterator[str]:
        self._require_owner()
        yield "Loading …"
        load, failed = self.service.load, f"Still serving {self.service.pair.name}"
        yield _report(failed, lambda: f"Serving {load(target.strip() or None, draft.strip() or None).name}.")

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
            answer = self.service.ask(session, prompt, _settings_of(*values))
        except OSDError as error:
            raise gr.Error(str(error), print_exception=False) from error
        try:
            for _ in session.frames(FRAME_SECONDS, PROGRAM_LOOK_SECONDS, answer):
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
    for _ in session.frames(FRAME_SECONDS, LOOK_SECONDS):
        yield view.transcript(session)


def _try(session: Session, start: Callable[[], Any]) -> bool:
    """Return whether something could be started; if not, show the reason in the chat."""
    try:
        start()
        return True
    except OSDError as error:
        session.show(str(error))
        return False


def _report(failed: str, work: Callable[[], str]) -> str:
    """Return the result of some work, or why it failed."""
    try:
        return work()
    except (OSDError, OSError) as error:
        return f"{failed}: {error}"
    except Exception as error:
        logger.exception("%s.", failed)
        return f"{failed} ({type(error).__name__}). See the log of the app."


def _settings_of(domain: str, learn: bool, k: str, *others: Any) -> Settings:
    """Return the settings of a page or a program. Raises ConfigError if one is out of range."""
    try:
        drafted = "auto" if k == "auto" else int(k)
    except (TypeError, ValueError) as error:
        raise ConfigError(f'`k` must be a number or "auto", got {k!r}.') from error
    return Settings(None if domain == AUTOMATIC else domain, learn, drafted, *others)


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
        "tokens": [
            {"text": t.text, "origin": t.origin, "draft_said": t.drafted, "draft_probability": t.probability}
            for t in answer.tokens
        ],
        "alpha": None if stats is None or not stats.examined else stats.alpha,
        "text_alpha": None if stats is None or not stats.text_examined else stats.text_alpha,
        "tokens_per_target_pass": None if stats is None else stats.block_efficiency,
        "tokens_per_second": answer.tokens_per_second,
        "first_token_seconds": answer.first_token_seconds,
        "seconds": answer.seconds,
    }
