"""The command `osd-hf learn`: collect answers of an engine, train a draft on them, publish and deploy its versions."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedConfig

from osd_hf.acceptance import Comparison
from osd_hf.cli import FAILED, INTERRUPTED
from osd_hf.cli.settings import (
    NOTHING_SERVED,
    PAPER,
    CommandParser,
    PairSettings,
    PromptSettings,
    Reporting,
    flag,
    learning_parser,
    lora_config,
    read_key,
    stop_on_signal,
)
from osd_hf.config import OnlineConfig
from osd_hf.engines.completions import CollectionReport, CompletionClient, ResponseReader, collect, parse_address
from osd_hf.engines.deploy import MIN_WATCHED_REQUESTS, Deployer, DeployMethod
from osd_hf.engines.learn import StoreLearner
from osd_hf.engines.versions import PLOT, VersionFolder, folder_name
from osd_hf.errors import ConfigError, DataError, ServerError, StateError, StoreError
from osd_hf.evaluation.display import COMPARED, comparison_row, learning_bar, plot_learning, text_table
from osd_hf.hub import check_push, facts_of
from osd_hf.learning.updater import make_accelerator
from osd_hf.loading import is_head, load_draft
from osd_hf.models import align_vocab, eos_ids, load_config, load_eos_ids, load_tokenizer, prompt_room
from osd_hf.server.metrics import learner_metrics, serve_metrics
from osd_hf.store.folder import StoreFollower
from osd_hf.store.store import CorrectionStore
from osd_hf.utils.report import provenance

CLOSE_SECONDS = 10.0  # to wait for a deployment when the command ends


@dataclass(frozen=True, kw_only=True)
class StoreSettings(PairSettings, Reporting):
    """A store of an engine's answers, and the target that the engine serves."""

    target: str | None = flag("model that the engine serves; by default the bundled one", None, metavar="ID|PATH")
    target_version: str | None = flag("version of the target; by default from responses", None, metavar="NAME")
    flush_every: int = flag("maximum requests per file of the store", 16, minimum=1, needs="url")
    max_bytes: int | None = flag("maximum size; the oldest requests are deleted", None, minimum=1, needs="url")
    max_age_days: float | None = flag("days after which requests are deleted", None, needs="url", metavar="DAYS")

    def read_target(self, num_logprobs: int, *, is_text: bool = True) -> tuple[PreTrainedConfig, Any, ResponseReader]:
        """Return the target's configuration, its tokenizer if `is_text`, and the reader of its answers."""
        if self.target:
            config, ends = load_config(self.target, **self.fetching), load_eos_ids(self.target, **self.fetching)
            tokenizer = load_tokenizer(self.target, **self.fetching) if is_text else None
        else:
            target, _, tokenizer = self.load_pair()
            config, ends = target.config, eos_ids(target.generation_config)
        size = int(config.get_text_config().vocab_size)
        return config, tokenizer, ResponseReader(size, min(num_logprobs, size), ends, self.target_version)

    def open_store(self, folder: Path) -> CorrectionStore:
        """Open the store for writing; raises StoreError."""
        age = None if self.max_age_days is None else self.max_age_days * 86400
        return CorrectionStore(folder, flush_every=self.flush_every, max_bytes=self.max_bytes, max_age_seconds=age)


@dataclass(frozen=True, kw_only=True)
class CollectSettings(PromptSettings):
    """How to collect answers of an engine before learning."""

    url: str | None = flag("first ask this OpenAI-compatible server, and store its answers", None)
    model: str | None = flag("name of the served model; by default the only one", None, needs="url", metavar="NAME")
    api_key: str | None = flag(
        "key, which others on this machine can see; or OSD_HF_API_KEY",
        None,
        needs="url",
        excludes="api_key_file",
    )
    api_key_file: Path | None = flag("file with the key", None, needs="url", metavar="FILE")
    allow_plain_http: bool = flag("send a key to another machine over plain HTTP", False, needs="url")
    concurrency: int = flag("requests at once", 4, minimum=1, needs="url")
    patience_seconds: float = flag("seconds to retry a server that is away or busy", 30.0, minimum=0, needs="url")
    max_new_tokens: int = flag("maximum tokens of an answer", 128, minimum=1, needs="url")
    temperature: float = flag("temperature of sampling; 0 = greedy", 0.0, minimum=0, needs="url")
    top_p: float | None = flag("probability mass to sample from", None, needs="temperature")
    top_k: int | None = flag("number of tokens to sample from", None, needs="temperature")
    resume: bool = flag("leave out prompts whose answers are stored already", False, needs="url")

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of sampling for a request."""
        return {n: v for n in ("temperature", "top_p", "top_k") if (v := getattr(self, n)) is not None}

    def key(self) -> str | None:
        """Return the key that is sent to the server; raises ConfigError if it is missing."""
        if self.api_key_file is not None:
            if key := read_key(self.api_key_file):
                return key
            raise ConfigError(f"The file {self.api_key_file} holds no key.")
        _, user, password = parse_address(str(self.url))
        return self.api_key or (None if user or password else os.environ.get("OSD_HF_API_KEY"))


POLL_SECONDS = 2.0
# Flags that a collection does not use, besides those of the assistant.
OF_LEARNING = """
    output_dir draft paper lora_rank threads by_domain once state_dir keep publish_seconds repo_id public token
    license metrics_port metrics_host report_to deploy watch_requests deploy_seconds
    dtype device attn_implementation poll_seconds
"""
OF_LEARNING += " ".join(f.name for f in fields(OnlineConfig) if f.name not in ("num_logprobs", "seed"))


@dataclass(frozen=True, kw_only=True)
class LearnSettings(CollectSettings, StoreSettings):
    """Flags of `osd-hf learn`."""

    store: list[Path] = flag("stores of collected answers")
    output_dir: Path | None = flag("folder of the versions; DIR/latest is the newest", None)
    paper: bool = flag(PAPER, False)
    lora_rank: int | None = flag("train adapters of this rank, merged in versions", None, minimum=1)
    threads: int | None = flag("number of torch threads", None, minimum=1)
    by_domain: bool = flag("train a draft for each label, published to OUTPUT_DIR/LABEL", False)
    collect_only: bool = flag("end when the answers are stored", False, needs="url", excludes=OF_LEARNING)
    once: bool = flag("end when everything in the stores is learned", False)
    poll_seconds: float = flag("seconds between two looks at stores and engines", POLL_SECONDS, minimum=0)
    state_dir: Path | None = flag("saved state, with tokens of requests; by default OUTPUT_DIR-state", None)
    keep: int = flag("newest versions to keep", 5)
    publish_seconds: float = flag("minimum seconds between two versions", 30.0, minimum=0)
    repo_id: str | None = flag("also push each version to this Hub repository", None, metavar="USER/NAME")
    public: bool = flag("let everybody read --repo-id; by default it is private", False, needs="repo_id")
    token: str | None = flag("token of the Hub; by default this machine's login", None, needs="repo_id")
    license: str | None = flag("license of the draft's base, for the model card", None, metavar="NAME")
    metrics_port: int | None = flag("port for Prometheus metrics", None, metavar="PORT")
    metrics_host: str = flag("address of the metrics", "127.0.0.1", needs="metrics_port")
    report_to: list[str] | None = flag("also log to trackio, tensorboard, wandb, ...", None, metavar="NAME")
    deploy: list[str] | None = flag("engines: [LABEL:]reload=URL or 'restart=URL COMMAND'", None, metavar="WAY=URL")
    watch_requests: int = flag(
        "requests before a version is judged", 200, minimum=MIN_WATCHED_REQUESTS, needs="deploy"
    )
    deploy_seconds: float = flag("maximum seconds to load a version", 600.0, minimum=1, needs="deploy")

    def check(self) -> None:
        if self.url and len(self.store) > 1:
            raise ConfigError("--url collects into one --store.")
        if self.url is not None:
            self.check_together("target", "prompts")
        elif len(self.domain or ()) > 1:
            raise ConfigError("Give --domain once.")
        if self.collect_only:
            return
        self.check_together("draft", "target")
        if self.once and not self.deploy and self.poll_seconds != POLL_SECONDS:
            raise ConfigError("--poll-seconds would change nothing with --once and without --deploy.")
        if self.output_dir is None:
            raise ConfigError("--output-dir must name the folder of the versions.")
        if self.repo_id is not None and self.by_domain:
            raise ConfigError("--repo-id takes one draft. Push the versions of --by-domain with `osd-hf push`.")

    def state(self, folder: Path) -> Path:
        """Return the folder of the saved state of a learner that publishes to `folder`."""
        return (self.state_dir or folder.with_name(f"{folder.name}-state")).expanduser()

    def ways(self) -> dict[str | None, list[DeployMethod]]:
        """Return the engines by the label of their versions; raises ConfigError."""
        found: dict[str | None, list[DeployMethod]] = {}
        for way in map(DeployMethod.parse, self.deploy or ()):
            if (way.domain is not None) != self.by_domain:
                rule = "LABEL: goes before the way with --by-domain" if self.by_domain else "is for --by-domain"
                raise ConfigError(f"--deploy {way.domain or way.engine_name}: {rule}.")
            if way.domain is not None and folder_name(way.domain) is None:
                raise ConfigError(f"--deploy {way.domain[:40]}...: the label is too long for the name of a folder.")
            if any(way.engine_name == other.engine_name for those in found.values() for other in those):
                raise ConfigError("--deploy names one engine twice: an engine serves one draft, loaded in one way.")
            found.setdefault(way.domain, []).append(way)
        return found


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    return learning_parser(LearnSettings, arguments, without=NOTHING_SERVED, k=5, **how)


def learn_command(settings: LearnSettings, config: OnlineConfig) -> int:
    """Collect if asked for, and learn until a signal; returns the exit code."""
    if settings.url is not None:
        code = _collect(settings, config)
        if code or settings.collect_only:
            return code
    ways = settings.ways()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    limit = settings.num_requests if settings.url is None else None
    assert settings.output_dir is not None
    folder, port = settings.output_dir.expanduser().absolute(), settings.metrics_port
    private = False if settings.public else None
    token = None if settings.repo_id is None else check_push(settings.repo_id, settings.token, private)
    with contextlib.closing(VersionFolder(folder, keep=settings.keep)) as versions:
        learner = _make_learner(settings, config, versions, token)
        metrics = partial(learner_metrics, learner)
        serving = (
            contextlib.nullcontext() if port is None else serve_metrics(port, metrics, host=settings.metrics_host)
        )
        with serving, _deploying(settings, ways, learner) as deployers:
            is_done = _learn(settings, learner, folder, deployers, limit)
        try:
            learner.close()  # after the deployers, as the next process may begin now
            print(f"osd-hf: the state is saved in {settings.state(folder)}", file=sys.stderr)
        except StateError as error:
            print(f"osd-hf: error: {error}", file=sys.stderr)
            is_done = False
        _plot(learner, folder)
    report, compared = _report(learner, deployers), _compared(learner)
    settings.say(
        f"{learner.requests} requests, {learner.tokens} tokens; {len(learner.published)} versions published, latest "
        f"{report['latest'] or 'none'}; {learner.learning_seconds:.1f} s of learning"
    )
    if learner.learned:
        parts = compared.last_fifth().parts().items()
        header = ["last 20% of", *COMPARED[1:]]
        settings.say("\n" + text_table(header, [comparison_row(name, part) for name, part in parts]) + "\n")
    for deployer in deployers:
        settings.say(deployer.summary())
    for what, counts in (("left out", learner.skipped), ("set aside", learner.set_aside)):
        for reason, count in counts.most_common():
            settings.say(f"{what} {count} {reason}")
    if not learner.is_pushed:
        print(f"osd-hf: error: the newest version is not pushed to {settings.repo_id} yet", file=sys.stderr)
    settings.write_json(report)
    return 0 if is_done and learner.is_pushed else FAILED


def _collect(settings: LearnSettings, config: OnlineConfig) -> int:
    """Collect into the store until everything is there, and report; returns the exit code."""
    folder = settings.store[0].expanduser()
    key = settings.key()
    target_config, tokenizer, reader = settings.read_target(config.num_logprobs or sys.maxsize)
    room = prompt_room(target_config, target_config, settings.max_new_tokens)
    encoded = settings.encode_prompts(tokenizer, room, seed=config.seed)
    if settings.resume and folder.exists():
        known = {trace.prompt_ids.tobytes() for trace in CorrectionStore(folder)}
        rest = [(p, ids) for p, ids in encoded.prompts if np.array(ids, np.int32).tobytes() not in known]
        encoded = replace(encoded, prompts=tuple(rest))
    store, report = settings.open_store(folder), CollectionReport()
    bytes_before = store.nbytes
    has_failed = False
    bar = tqdm(total=len(encoded.prompts), desc="collecting", unit="request", dynamic_ncols=True)
    try:
        with (
            store,
            stop_on_signal() as stop,
            bar,
            CompletionClient(
                str(settings.url),
                settings.model,
                api_key=key,
                allow_plain_http=settings.allow_plain_http,
                patience_seconds=settings.patience_seconds,
            ) as client,
        ):
            collect(
                encoded.prompts,
                client,
                reader,
                store,
                max_new_tokens=settings.max_new_tokens,
                concurrency=settings.concurrency,
                report=report,
                on_request=lambda _: bar.update(),
                stop=stop,
                **settings.sampling,
                **({"seed": config.seed} if settings.temperature else {}),
            )
    except (StoreError, ServerError, DataError) as error:
        print(f"osd-hf: error: {error}", file=sys.stderr)
        has_failed = True
    written = store.nbytes - bytes_before
    per_token = written / report.tokens if report.tokens else None
    shown = "" if per_token is None else f" ({per_token:.1f} per token)"
    settings.say(
        f"{report.requests} requests with {report.tokens} tokens in {folder}, {written:,} bytes written{shown}, "
        f"{report.seconds:.1f} s"
    )
    for reason, count in report.skipped.most_common():
        settings.say(f"left out {count}: {reason}")
    if settings.collect_only:
        found = {name: getattr(report, name) for name in ("requests", "tokens", "seconds", "skipped")}
        settings.write_json({"provenance": provenance(), "bytes": written, "bytes_per_token": per_token, **found})
    if report.unanswered and not has_failed:
        print(f"osd-hf: interrupted: go on with --resume, {report.unanswered} prompts are left", file=sys.stderr)
        return INTERRUPTED
    return FAILED if has_failed or (report.skipped and not report.requests) else 0


def _make_learner(
    settings: LearnSettings, config: OnlineConfig, versions: VersionFolder, token: str | None
) -> StoreLearner:
    if settings.draft and settings.target:
        target: Any = SimpleNamespace(config=load_config(settings.target, **settings.fetching))
        if is_head(settings.draft, **settings.draft_fetching):
            target, _ = settings.load_target()
        draft = align_vocab(load_draft(settings.draft, target, **settings.draft_loading), target)
        tokenizer = load_tokenizer(settings.target, **settings.fetching)
    else:
        target, draft, tokenizer = settings.load_pair()
    facts = replace(facts_of(target, draft), license=settings.license, command=provenance()["command"])
    return StoreLearner(
        draft,
        tokenizer,
        StoreFollower(settings.store),
        versions,
        config,
        domain=settings.domain[0] if settings.domain else None,
        by_domain=settings.by_domain,
        peft_config=lora_config(settings.lora_rank),
        target=target,
        target_version=settings.target_version,
        facts=facts,
        state=settings.state(versions.path),
        repo_id=settings.repo_id,
        token=token,
        private=False if settings.public else None,
        publish_seconds=settings.publish_seconds,
        accelerator=make_accelerator(settings.report_to, config),
    )


@contextlib.contextmanager
def _deploying(
    settings: LearnSettings, ways: dict[str | None, list[DeployMethod]], learner: StoreLearner
) -> Iterator[list[Deployer]]:
    """Run a thread for each label that deploys its versions to its engines."""
    deployers = []
    for domain, those in ways.items():
        how: dict[str, Any] = {"watch_requests": settings.watch_requests, "load_seconds": settings.deploy_seconds}
        learner.publish_start(domain)
        deployers.append(Deployer(learner.versions.of(domain), those, domain=domain, **how))
    threads = [
        threading.Thread(target=deployer.run, args=(settings.poll_seconds,), daemon=True) for deployer in deployers
    ]
    for thread in threads:
        thread.start()
    try:
        yield deployers
    finally:
        for deployer in deployers:
            deployer.stop.set()
        for deployer, thread in zip(deployers, threads, strict=True):
            thread.join(CLOSE_SECONDS)
            deployer.close()


def _learn(
    settings: LearnSettings, learner: StoreLearner, folder: Path, deployers: Sequence[Deployer], limit: int | None
) -> bool:
    """Learn until a signal or the limit; returns whether the stores could be read."""
    num_before, num_published, failed = learner.requests, 0, False
    with stop_on_signal() as stop, learning_bar(limit, "learning") as advance:
        while not stop.is_set():
            left = None if limit is None else limit - (learner.requests - num_before)
            if left == 0:
                break
            try:
                taken = learner.step(advance, limit=left)
            except StateError as error:  # the disk; writing is tried again
                print(f"osd-hf: warning: {error}", file=sys.stderr)
                continue
            except StoreError as error:  # the stores are gone
                print(f"osd-hf: error: {error}", file=sys.stderr)
                failed = True
                break
            if len(learner.published) > num_published:
                num_published = len(learner.published)
                _plot(learner, folder)
            if not taken:
                if settings.once:
                    break
                stop.wait(settings.poll_seconds)
    with contextlib.suppress(StateError):  # `close` tries again and reports the error
        learner.publish()
    for deployer in () if stop.is_set() else deployers:
        deployer.look()
    return not failed


def _compared(learner: StoreLearner) -> Comparison:
    return Comparison(list(learner.domains), {"frozen": list(learner.frozen), "learned": list(learner.learned)})


def _plot(learner: StoreLearner, folder: Path) -> None:
    if learner.learned:
        title = "Acceptance on the target's answers: the draft that learns, and the same draft frozen"
        with contextlib.suppress(OSError):  # a missing plot must not end the command
            plot_learning(folder / PLOT, _compared(learner), title=title)


def _report(learner: StoreLearner, deployers: Sequence[Deployer]) -> dict[str, Any]:
    compared, latest = _compared(learner), learner.versions.latest
    return {
        "provenance": provenance(),
        "config": learner.config.to_dict(),
        "requests": learner.requests,
        "tokens": learner.tokens,
        "skipped": dict(learner.skipped),
        "set_aside": dict(learner.set_aside),
        "learning_seconds": learner.learning_seconds,
        "versions": learner.published,
        "latest": None if latest is None else latest.name,
        "pushed": learner.is_pushed,
        "deployed": [deployer.report() for deployer in deployers],
        "alpha_by_domain": {name: part.alphas() for name, part in compared.parts().items()},
        **{f"alpha_{name}": [s.alpha for s in stats] for name, stats in compared.sides.items()},
        **{f"alpha_{name}_last_fifth": alpha for name, alpha in compared.last_fifth().alphas().items()},
    }
