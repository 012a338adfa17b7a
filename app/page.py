"""The page and the endpoints for programs: what is laid out where, and which event calls what."""

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
from osd_hf_app.pair import NO_DOMAIN
from osd_hf_app.rooms import OTHER, Room
from osd_hf_app.service import PUBLIC_NEW_TOKENS, Service
from osd_hf_app.sharing import visitor_at
from osd_hf_app.visitors import MAX_NEW_TOKENS, Answer, Session, Settings

logger = logging.getLogger(__name__)

NAME = re.compile(r"[\w-]{22}", re.ASCII)  # of a chat
AUTOMATIC = "automatic"
ALL = "all domains"
PROMPTS = 20
NEW_TOKENS, NEW_TOKENS_OF_OTHERS = 96, 192  # where the page begins: answers of larger models are longer
FRAME_SECONDS = 0.3  # between two pictures of an answer that grows
TICK_SECONDS = 2.0
LOOK_SECONDS = 5.0  # after which a page is sent to again, which tells whether it is still there
PROGRAM_LOOK_SECONDS = 1.0  # the same for a program
CHAT_PIXELS = 430
KS = ["auto", "1", "2", "3", "5", "8", "12"]
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
# What is sent while the last frame of an answer is on its way is not to be lost; the service refuses the rest.
SENDING: dict[str, Any] = {**QUIET, "trigger_mode": "multiple"}

INTRO = """# A draft that learns while you chat
A **small draft** model guesses the next few words; the **large target** checks them all in one pass. Right guesses
make the answer faster, wrong ones are replaced: what you read is always the target's own answer. Here the draft
**learns from its mistakes between answers**, and more and more of its guesses are accepted: compare the two curves.
"""

# Gradio's own scrolling stays where it is once more than 100 pixels come at once, as with a long prompt.
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
    """The page, not launched. Where the service is public, nobody loads models, saves, pushes or resets what is
    shared. "Save" puts its folders into `output_dir`."""
    events = _Events(service, output_dir)
    with gr.Blocks(title="osd_hf: a draft that learns while you chat", analytics_enabled=False) as page:
        # The browser keeps the visitor's name: through a reload, and while the app is started anew.
        visitor = gr.BrowserState(None, storage_key="osd-hf-chat")
        gr.Markdown(INTRO, elem_id="intro")
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                chat, prompt, send, stop = _chat(service)
                domain, twenty, shift, suggest, clear = _domain(service)
                learn, private, *others = _settings(service)
            with gr.Column(scale=2, min_width=320):
                panel, shown = _panel(service)
                which, loading = _owners(service, events, visitor)
        settings = [visitor, private, domain, learn, *others]
        waiting = [prompt, send, twenty, shift, suggest, clear]
        of_domains = [domain, shift, shown, which]
        page.load(events.arrive, visitor, [visitor, chat, private, *waiting], **QUIET).then(
            events.follow, visitor, chat, **QUIET
        )
        page.load(events.laid_out, None, of_domains, **QUIET)
        loading.then(events.laid_out, None, of_domains, **QUIET)
        gr.on([send.click, prompt.submit], events.submit, [prompt, *settings], [chat, prompt], **SENDING)
        twenty.click(events.send_many, settings, chat, **SENDING)
        shift.click(events.next_domain, [visitor, domain], domain, **SENDING).then(
            events.send_many, settings, chat, **SENDING
        )
        suggest.click(events.suggested, [visitor, domain], prompt, queue=False, **QUIET)
        stop.click(events.end, visitor, queue=False, **QUIET)
        clear.click(events.forget, visitor, chat, queue=False, **QUIET)
        private.input(events.set_private, [visitor, private], [private, chat], **QUIET)
        seen, timer = gr.State(None), gr.Timer(TICK_SECONDS)
        gr.on(
            [timer.tick, shown.change], events.tick, [visitor, shown, seen], [*panel, private, seen],
            queue=False, **QUIET,
        )  # fmt: skip
        gr.api(events.chat, api_name="chat")
        gr.api(events.statistics, api_name="statistics", queue=False)
    return page


def _chat(service: Service) -> tuple[gr.HTML, gr.Textbox, gr.Button, gr.Button]:
    """The chat, the prompt, and the buttons beside it."""
    empty = view.transcript(service.visitors.guest())
    chat = gr.HTML(empty, elem_id="chat", js_on_load=FOLLOW, min_height=CHAT_PIXELS, max_height=CHAT_PIXELS)
    with gr.Row(equal_height=True):
        # Not interactive until the visitor is known: nothing that is typed gets lost.
        prompt = gr.Textbox(
            label="Your prompt", lines=1, max_lines=6, scale=5, min_width=200, elem_id="prompt", interactive=False,
            placeholder="Enter sends, Shift+Enter breaks the line",
        )  # fmt: skip
        with gr.Column(scale=1, min_width=100):
            send = gr.Button("Send", variant="primary", elem_id="send", interactive=False)
            stop = gr.Button("Stop", elem_id="stop")
    gr.HTML(view.LEGEND)
    return chat, prompt, send, stop


def _domain(service: Service) -> tuple[gr.Radio, gr.Button, gr.Button, gr.Button, gr.Button]:
    """The domain, where there are any, and the buttons that send prompts of it."""
    seen = bool(service.pair.domains)
    domain = gr.Radio(
        [AUTOMATIC, *DOMAINS, OTHER], value=AUTOMATIC, label="Domain", elem_id="domain", visible=seen,
        info="Each has a draft of its own. Automatic goes by the words of the prompt.",
    )  # fmt: skip
    with gr.Row():
        twenty = gr.Button(f"Send {PROMPTS} prompts", elem_id="twenty", interactive=False)
        shift = gr.Button("Shift to the next domain", elem_id="shift", interactive=False, visible=seen)
    with gr.Row():
        suggest = gr.Button("Suggest a prompt", elem_id="suggest", interactive=False)
        clear = gr.Button("Clear the chat", elem_id="clear", interactive=False)
    return domain, twenty, shift, suggest, clear


def _settings(service: Service) -> list[gr.components.Component]:
    """How a prompt is answered, in the order in which `_chosen` takes it after the domain."""
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        with gr.Row():
            learn = gr.Checkbox(True, label="Learn from my requests", elem_id="learn")
            label = "A draft of my own, which learns from nobody but me (unticked, it is forgotten)"
            private = gr.Checkbox(False, label=label, elem_id="private")
        with gr.Row():
            label = "Let the target answer alone as well, to compare"
            check = gr.Checkbox(not service.is_public, label=label, elem_id="check")
            remember = gr.Checkbox(not service.pair.is_bundled, label="Remember the earlier turns")
        info = "auto decides by measured acceptance and costs, and takes what stood in the chat before as well"
        k = gr.Radio(KS, value="auto", label="k, tokens drafted per round", info=info)
        most = PUBLIC_NEW_TOKENS if service.is_public else MAX_NEW_TOKENS
        usual = NEW_TOKENS if service.pair.is_bundled else NEW_TOKENS_OF_OTHERS
        tokens = gr.Slider(1, most, value=usual, step=1, label="New tokens at most")
        do_sample = gr.Checkbox(False, label="Sample (greedy otherwise)")
        warm, likely = (service.pair.sampling[name] for name in ("temperature", "top_p"))
        temperature = gr.Slider(0.1, 2.0, value=warm, step=0.1, label="Temperature, if sampled")
        top_p = gr.Slider(0.1, 1.0, value=likely, step=0.05, label="Top-p, if sampled")
    return [learn, private, k, do_sample, temperature, top_p, tokens, check, remember]


def _panel(service: Service) -> tuple[list[gr.HTML], gr.Radio]:
    """What the drafts have shown, in the order in which `_Events.tick` draws it, and what the curves are of."""
    state = gr.HTML(view.learner_state(service.visitors.shared, False, service.is_public), elem_id="state")
    room = service.visitors.shared
    curves = gr.HTML(_curves(room, ALL), elem_id="curves")
    seen = bool(service.pair.domains)
    shown = gr.Radio([ALL, *DOMAINS, OTHER], value=ALL, label="Curves of", elem_id="shown", visible=seen)
    table = gr.HTML(view.domain_table(room), elem_id="table")
    corrections = gr.HTML(view.corrections(service.visitors.guest().corrections), elem_id="corrections")
    return [state, curves, table, corrections], shown


def _owners(service: Service, events: _Events, visitor: gr.BrowserState) -> tuple[gr.Dropdown, Any]:
    """What is the owner's alone: to reset, save and push drafts, and to load models. Returns what chooses a domain,
    and the event that may bring another pair."""
    mine: dict[str, Any] = {"interactive": not service.is_public}
    one: dict[str, Any] = {**QUIET, "concurrency_limit": 1}
    with gr.Accordion("Reset, save, push", open=False, elem_id="keep", visible=not service.is_public):
        reset = gr.Button("Reset the draft to how it was", elem_id="reset")
        name = gr.Textbox("demo", label=f"Save into this folder of {events.output_dir}", **mine)
        save = gr.Button("Save", elem_id="save", **mine)
        seen = bool(service.pair.domains)
        which = gr.Dropdown([*DOMAINS, OTHER], value=DOMAINS[0], label="Push the draft of", visible=seen)
        info = "A new one is private. One that everybody may read is refused."
        repo = gr.Textbox(label="Hub repo", placeholder="user/name", info=info, elem_id="repo", **mine)
        label, info = "Token with the right to write", "Empty takes the login of this machine."
        token = gr.Textbox(label=label, type="password", info=info, **mine)
        pushing = gr.Button("Push to the Hub", elem_id="push", **mine)
        kept = gr.Markdown(elem_id="kept", container=False)
    with gr.Accordion("Models", open=False, elem_id="models", visible=not service.is_public):
        target, draft = (
            gr.Textbox(label=f"{name}: Hub id or folder", placeholder="the bundled one", elem_id=name.lower(), **mine)
            for name in ("Target", "Draft")
        )
        load = gr.Button("Load this pair", elem_id="load", **mine)
        loaded = gr.Markdown(f"Serving {service.pair.name}.", elem_id="loaded", container=False)
    reset.click(events.reset_draft, visitor, kept, **QUIET)
    save.click(events.keep, [visitor, name], kept, **one)
    pushing.click(events.publish, [visitor, which, repo, token], kept, **one)
    return which, load.click(events.load_pair, [target, draft], loaded, **one)


class _Events:
    """What the page and the programs call; Gradio passes a request where the annotation says so."""

    def __init__(self, service: Service, output_dir: Path) -> None:
        self.service, self.output_dir = service, output_dir

    def _visitor(self, request: gr.Request) -> str | None:
        return visitor_at(request.client and request.client.host) if self.service.is_public else None

    def _session(self, request: gr.Request, session_id: str | None) -> Session:
        if session_id is not None and not (isinstance(session_id, str) and NAME.fullmatch(session_id)):
            session_id = None
        try:
            return self.service.visitors.session(session_id, self._visitor(request))
        except OSDError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def _refuse_strangers(self) -> None:
        if self.service.is_public:  # a hidden button is no lock
            raise gr.Error("This is not for visitors of a public app.", print_exception=False)

    def arrive(self, request: gr.Request, session_id: str | None) -> tuple[Any, ...]:
        session = self._session(request, session_id)
        return session.id, view.transcript(session), session.is_private, *[gr.update(interactive=True)] * 6

    def laid_out(self) -> list[Any]:
        """What is about domains is shown where the pair has drafts by domain."""
        return [gr.update(visible=bool(self.service.pair.domains))] * 4

    def follow(self, request: gr.Request, session_id: str) -> Iterator[str]:
        yield from watch(self._session(request, session_id))

    def submit(self, request: gr.Request, prompt: str, session_id: str, private: bool, *values: Any) -> Iterator[Any]:
        session, ask = self._session(request, session_id), self.service.ask
        began = _begun(session, lambda: ask(session, prompt or "", _chosen(*values), wants_private=private))
        for html in watch(session):
            yield html, "" if began else gr.skip()
            began = False  # what is typed meanwhile stays

    def send_many(self, request: gr.Request, session_id: str, private: bool, *values: Any) -> Iterator[str]:
        session, send = self._session(request, session_id), self.service.send
        domain = _domain_of(session, values[0])
        _begun(session, lambda: send(session, domain, PROMPTS, _chosen(*values), wants_private=private))
        yield from watch(session)

    def suggested(self, request: gr.Request, session_id: str, domain: str) -> str:
        return self.service.pair.samples(_domain_of(self._session(request, session_id), domain), 1)[0]

    def next_domain(self, request: gr.Request, session_id: str, domain: str) -> str:
        now = _domain_of(self._session(request, session_id), domain) or DOMAINS[0]
        return DOMAINS[(DOMAINS.index(now) + 1) % len(DOMAINS)]

    def end(self, request: gr.Request, session_id: str) -> None:
        job = self._session(request, session_id).job
        if job is not None:
            job.stop.set()

    def forget(self, request: gr.Request, session_id: str) -> str:
        session = self._session(request, session_id)
        _begun(session, lambda: self.service.visitors.clear(session))
        return view.transcript(session)

    def set_private(self, request: gr.Request, session_id: str, is_private: bool) -> tuple[Any, Any]:
        session = self._session(request, session_id)
        _begun(session, lambda: self.service.visitors.go_private(session, is_private is True))
        return session.is_private, view.transcript(session)

    def tick(self, request: gr.Request, session_id: str | None, shown: str, seen: Any) -> Any:
        if session_id is None:
            return gr.skip()
        session = self._session(request, session_id)
        room = session.room
        news = (
            session.id, id(room), room.count, room.state, len(room.assistant.decisions), session.is_private, shown,
            session.corrections.total(),
        )  # fmt: skip
        if news == seen:
            return gr.skip()
        return (
            view.learner_state(room, session.is_private, self.service.is_public),
            _curves(room, shown),
            view.domain_table(room), view.corrections(session.corrections), session.is_private, news,
        )  # fmt: skip

    def reset_draft(self, request: gr.Request, session_id: str) -> str:
        self._refuse_strangers()
        self.service.reset(self._session(request, session_id).room)
        return "The draft is as it was."

    def keep(self, request: gr.Request, session_id: str, name: str) -> str:
        self._refuse_strangers()
        if not re.fullmatch(r"[\w.-]{1,64}", name) or name.strip(".") == "":
            return f"A folder's name has letters, digits, `.`, `_` and `-`, got {name!r}."

        save = self._session(request, session_id).room.save
        place = self.output_dir / name
        return _outcome("Not all saved", lambda: "Saved: " + ", ".join(f"`{path}`" for path in save(place)))

    def publish(self, request: gr.Request, session_id: str, which: str, repo: str, token: str) -> Iterator[str]:
        self._refuse_strangers()
        yield "Pushing …"
        push = self._session(request, session_id).room.push
        yield _outcome("Not pushed", lambda: f"Pushed to {push(which, repo, token)}")

    def load_pair(self, target: str, draft: str) -> Iterator[str]:
        self._refuse_strangers()
        yield "Loading …"

        load = self.service.load
        failed = f"Still serving {self.service.pair.name}"
        yield _outcome(failed, lambda: f"Serving {load(target.strip() or None, draft.strip() or None).name}.")

    def chat(self, prompt: str, domain: str = AUTOMATIC, max_new_tokens: int = 96, k: str = "auto",
             do_sample: bool = False, temperature: float = 1.0, top_p: float = 1.0, learn: bool = True,
             remember: bool = False, request: gr.Request = None) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Answer a prompt as the page does; streams what there is so far, the last item with all figures."""
        # An endpoint for programs, as is `statistics`; Gradio shows both docstrings.
        visitors, visitor = self.service.visitors, self._visitor(request)
        try:
            name = f"program {request.session_hash}"
            session = visitors.session(name, visitor) if remember else visitors.guest(visitor)
            values = (domain, learn, k, do_sample, temperature, top_p, max_new_tokens)
            answer = self.service.ask(session, prompt, _asked(*values, remember=remember))
        except OSDError as error:
            raise gr.Error(str(error), print_exception=False) from error
        try:
            for _ in session.frames(FRAME_SECONDS, PROGRAM_LOOK_SECONDS, answer):
                if answer.error:
                    raise gr.Error(answer.error, print_exception=False)
                yield _told(answer)
        finally:
            answer.stop.set()  # the program has gone, if it is not done

    def statistics(self) -> dict[str, Any]:
        """Acceptance of the learning and the frozen draft, by domain, and the state of the shared learner."""
        return self.service.visitors.shared.statistics()


def watch(session: Session) -> Iterator[str]:
    """The chat, again and again, until what is being answered is done."""
    for _ in session.frames(FRAME_SECONDS, LOOK_SECONDS):
        yield view.transcript(session)


def _begun(session: Session, begin: Callable[[], Any]) -> bool:
    """Whether it could begin; if not, the chat says why."""
    try:
        begin()
        return True
    except OSDError as error:
        session.say(str(error))
        return False


def _outcome(failed: str, work: Callable[[], str]) -> str:
    """What has come of it, or why nothing has."""
    try:
        return work()
    except (OSDError, OSError) as error:
        return f"{failed}: {error}"
    except Exception as error:
        logger.exception("%s.", failed)
        return f"{failed} ({type(error).__name__}). The log of the app says more."


def _chosen(domain: str, learn: bool, k: str, do_sample: bool, temperature: float, top_p: float, tokens: Any,
            *others: bool) -> Settings:  # fmt: skip
    """What the page's controls say."""
    return _asked(domain, learn, k, do_sample, temperature, top_p, int(tokens or 0), *others)


def _asked(domain: str, learn: bool, k: str, *others: Any, **more: Any) -> Settings:
    """Settings as a visitor or a program gives them; raises ConfigError where one is out of its range."""
    try:
        drafted = "auto" if k == "auto" else int(k)
    except (TypeError, ValueError) as error:
        raise ConfigError(f'`k` must be a number, or "auto", got {k!r}.') from error
    return Settings(None if domain == AUTOMATIC else domain, learn, drafted, *others, **more)


def _domain_of(session: Session, chosen: str) -> str:
    """The domain that is chosen, or that of the newest request; the first one where neither has prompts."""
    domains = session.room.pair.domains
    found = [e.domain for e in session.entries if not (isinstance(e, Answer) and e.error)]
    return next((domain for domain in (chosen, *found[-1:], *domains) if domain in domains), NO_DOMAIN)


def _curves(room: Room, shown: str) -> str:
    has_domains, title = bool(room.pair.domains), f"α over {view.WINDOW} requests"
    records = room.snapshot(shown if has_domains and shown != ALL else None)
    return view.curves(records, f"{title}, {shown}" if has_domains else title)


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
        "text_alpha": None if stats is None or not stats.text_examined else stats.text_alpha,
        "tokens_per_target_pass": None if stats is None else stats.block_efficiency,
        "tokens_per_second": answer.tokens_per_second,
        "first_token_seconds": answer.first_token_seconds,
        "seconds": answer.seconds,
    }
