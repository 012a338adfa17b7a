"""The command `osd-hf learn`: train a draft on an engine's stored answers, publish its versions, and deploy them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from osd_hf.acceptance import AcceptanceStats, Comparison
from osd_hf.cli import FAILED
from osd_hf.cli.collect import CollectSettings, StoreSettings, run_collection
from osd_hf.cli.settings import (
    NOTHING_DRAFTED,
    PAPER,
    CommandParser,
    Loading,
    compared_k,
    flag,
    learning_parser,
    lora_config,
    stop_on_signal,
)
from osd_hf.config import OnlineConfig
from osd_hf.engines.deploy import MIN_WATCHED_REQUESTS, Deployer, DeployMethod
from osd_hf.engines.learn import StoreLearner
from osd_hf.engines.versions import PLOT, VersionFolder, folder_name
from osd_hf.errors import ConfigError, StateError, StoreError
from osd_hf.evaluation.display import alpha_bar, comparison_row, plot_alpha, text_table
from osd_hf.hub.cards import facts_of
from osd_hf.hub.push import check_push
from osd_hf.learning.updater import make_accelerator
from osd_hf.models import align_vocab, load_config, load_model, load_pair, load_tokenizer
from osd_hf.server.metrics import learner_metrics, serve_metrics
from osd_hf.store.folder import StoreFollower
from osd_hf.utils.report import provenance

CLOSE_SECONDS = 10.0  # to wait for a deployment when the command ends


@dataclass(frozen=True, kw_only=True)
class LearnSettings(StoreSettings, Loading):
    """Flags of `osd-hf learn`."""

    _argument_group_name: ClassVar[str] = "learn"

    store: list[Path] = flag("stores of collected answers", metavar="DIR")
    output_dir: Path | None = flag("folder of the versions; DIR/latest is the newest", None, metavar="DIR")
    draft: str | None = flag("draft to start from; by default the bundled one", None, metavar="ID|PATH")
    paper: bool = flag(PAPER, False)
    lora_rank: int | None = flag("train adapters of this rank, merged in published versions", None, metavar="R")
    threads: int | None = flag("number of torch threads", None, metavar="N")
    by_domain: bool = flag("train a draft for each label, published to OUTPUT_DIR/LABEL", False)
    rescore: bool = flag("load the target and recompute the log-probs of requests of its other versions", False)
    once: bool = flag("end when everything in the stores is learned", False)
    poll_seconds: float = flag("seconds between two looks at stores, logs and engines", 2.0, metavar="S")
    state_dir: Path | None = flag(
        "saved state to resume from, with tokens of requests; by default OUTPUT_DIR-state", None, metavar="DIR"
    )
    keep: int = flag("newest versions to keep", 5, metavar="N")
    publish_seconds: float = flag("minimum seconds between two versions", 30.0, metavar="S")
    repo_id: str | None = flag("also push each version to this Hub repository", None, metavar="USER/NAME")
    public: bool = flag("let everybody read --repo-id; by default it is private", False)
    token: str | None = flag("token of the Hub; by default this machine's login", None)
    license: str | None = flag("license of the draft's base, for the model card", None, metavar="NAME")
    metrics_port: int | None = flag("port for Prometheus metrics", None, metavar="PORT")
    metrics_host: str = flag("address of the metrics", "127.0.0.1")
    report_to: list[str] | None = flag("also log to trackio, tensorboard, wandb, ...", None, metavar="NAME")
    deploy: list[str] | None = flag("engines that get the versions: reload=URL, 'restart=URL COMMAND', or "
                                    "'webhook=URL HOOK', after LABEL: with --by-domain", None,
                                    metavar="WAY=URL")  # fmt: skip
    watch_requests: int = flag(
        "requests after which a deployed version is compared with the one before", 200, metavar="N"
    )
    deploy_seconds: float = flag("maximum seconds to load a version into an engine", 600.0, metavar="S")

    def check(self) -> None:
        """Raise ConfigError for values that are too small or do not go together."""
        self.check_store()
        self.check_together("draft", "target")
        self.check_counts("threads", "lora_rank")
        self.check_counts("watch_requests", minimum=MIN_WATCHED_REQUESTS)
        self.check_not_negative("poll_seconds", "publish_seconds", "deploy_seconds")
        if self.output_dir is None:
            raise ConfigError("--output-dir must name the folder of the versions.")
        if self.metrics_port is None:
            self.check_unused("it is for --metrics-port", "metrics_host")
        if self.repo_id is None:
            self.check_unused("it is for --repo-id", "public", "token")
        elif self.by_domain:
            raise ConfigError("--repo-id takes one draft. Push the versions of --by-domain with `osd-hf push`.")
        if not self.rescore:
            self.check_unused("only --rescore loads the target's weights", "device_map", "quantization")
        if not self.deploy:
            self.check_unused("it is for --deploy", "watch_requests", "deploy_seconds")
        if not self.deploy_seconds:
            raise ConfigError("--deploy-seconds must be more than 0.")

    def ways(self) -> dict[str | None, list[DeployMethod]]:
        """Return the engines by the label of their versions; raises ConfigError."""
        found: dict[str | None, list[DeployMethod]] = {}
        for way in map(DeployMethod.parse, self.deploy or ()):
            if (way.domain is not None) != self.by_domain:
                rule = "LABEL: goes before the way with --by-domain" if self.by_domain else "is for --by-domain"
                raise ConfigError(f"--deploy {way.domain or way.kind}: {rule}.")
            if way.domain is not None and folder_name(way.domain) is None:
                raise ConfigError(f"--deploy {way.domain[:40]}...: the label is too long for the name of a folder.")
            if any(way.engine_name == other.engine_name for those in found.values() for other in those):
                raise ConfigError("--deploy names one engine twice: an engine serves one draft, loaded in one way.")
            found.setdefault(way.domain, []).append(way)
        return found


def make_parser(arguments: Sequence[str], **how: Any) -> CommandParser:
    """Return the parser of the command."""
    return learning_parser(
        LearnSettings, arguments, without=NOTHING_DRAFTED, defaults={"num_assistant_tokens": 5},
        more=(CollectSettings,), **how,
    )  # fmt: skip


def learn_command(settings: LearnSettings, collecting: CollectSettings, config: OnlineConfig) -> int:
    """Collect if asked for, and learn until a signal; returns the exit code."""
    collecting.check()
    if collecting.url is not None or collecting.log is not None:
        settings.check_store()
        settings.check_not_negative("poll_seconds")
        if len(settings.store) > 1:
            raise ConfigError("--url and --log collect into one --store.")
        if collecting.url is not None and bool(settings.target) != bool(collecting.prompts):
            raise ConfigError("--target and --prompts go together: set both, or neither.")
        if not collecting.collect_only:
            settings.check()
        code = run_collection(
            collecting, settings, settings.store[0].expanduser(), num_logprobs=config.num_logprobs or sys.maxsize,
            seed=config.seed, poll_seconds=settings.poll_seconds,
        )  # fmt: skip
        if code or collecting.collect_only:
            return code
    settings.check()
    compared_k(config)
    ways = settings.ways()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    domain = collecting.domain[0] if collecting.domain else None
    limit = collecting.num_requests if collecting.url is None else None
    learner, folder = _make_learner(settings, config, domain)
    port = settings.metrics_port
    metrics = partial(learner_metrics, learner)
    serving = contextlib.nullcontext() if port is None else serve_metrics(port, metrics, host=settings.metrics_host)
    with serving, _deploying(settings, ways, learner) as deployers:
        is_done = _learn(settings, learner, folder, deployers, limit)
    is_done &= _close(learner, folder)  # after the deployers, as the next process may begin now
    report, compared = _report(learner, deployers), _compared(learner)
    settings.say(
        f"{learner.requests} requests, {learner.tokens} tokens; {len(learner.published)} versions published, latest "
        f"{report['latest'] or 'none'}; {learner.learning_seconds:.1f} s of learning"
    )
    if learner.learned:
        parts = compared.last_fifth().parts().items()
        header = ["last 20% of", "n", "alpha frozen", "alpha learned", "gain [95%]"]
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


def _make_learner(settings: LearnSettings, config: OnlineConfig, domain: str | None) -> tuple[StoreLearner, Path]:
    """Return the learner and the folder of its versions."""
    token, private = None, False if settings.public else None
    if settings.repo_id is not None:
        token = check_push(settings.repo_id, settings.token, private)
    assert settings.output_dir is not None
    folder = settings.output_dir.expanduser().absolute()
    state = settings.state_dir or folder.with_name(f"{folder.name}-state")
    if settings.draft and settings.target:
        target: Any = SimpleNamespace(config=load_config(settings.target, **settings.fetching))
        if settings.rescore:
            target = load_model(settings.target, **settings.target_loading)
        draft = align_vocab(load_model(settings.draft, **settings.draft_loading), target)
        tokenizer = load_tokenizer(settings.target, **settings.fetching)
    else:
        target, draft, tokenizer = load_pair(**settings.loading)
    versions = VersionFolder(folder, keep=settings.keep)
    try:
        facts = replace(facts_of(target, draft), license=settings.license, command=provenance()["command"])
        learner = StoreLearner(
            draft, tokenizer, StoreFollower(settings.store), versions, config, domain=domain,
            by_domain=settings.by_domain, peft_config=lora_config(settings.lora_rank),
            target_version=settings.target_version, target=target if settings.rescore else None, facts=facts,
            state=state.expanduser(), repo_id=settings.repo_id, token=token, private=private,
            publish_seconds=settings.publish_seconds, accelerator=make_accelerator(settings.report_to, config),
        )  # fmt: skip
    except BaseException:
        versions.close()
        raise
    return learner, folder


@contextlib.contextmanager
def _deploying(
    settings: LearnSettings, ways: dict[str | None, list[DeployMethod]], learner: StoreLearner
) -> Iterator[list[Deployer]]:
    """Run a thread for each label that deploys its versions to its engines."""
    deployers = []
    for domain, those in ways.items():
        try:
            deployer = Deployer(
                learner.versions.of(domain), those, domain=domain, watch_requests=settings.watch_requests,
                load_seconds=settings.deploy_seconds,
            )  # fmt: skip
            deployers.append(deployer)
            if deployer.serving is None:
                try:
                    learner.publish_start(domain)
                except StateError as error:  # the disk; publishing is tried again
                    print(f"osd-hf: warning: {error}", file=sys.stderr)
        except BaseException:
            learner.versions.close()
            raise
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
    with stop_on_signal() as stop, alpha_bar(limit, "learning") as advance:
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
                if settings.once and not learner.follower.is_waiting:
                    break
                stop.wait(settings.poll_seconds)
    with contextlib.suppress(StateError):  # `close` tries again and reports the error
        learner.publish()
    for deployer in () if stop.is_set() else deployers:
        deployer.look()
    return not failed


def _close(learner: StoreLearner, folder: Path) -> bool:
    """Close the learner; returns whether everything could be written."""
    try:
        learner.close()
    except StateError as error:
        print(f"osd-hf: error: {error}", file=sys.stderr)
        return False
    finally:
        _plot(learner, folder)
    return True


def _compared(learner: StoreLearner) -> Comparison:
    return Comparison(list(learner.domains), {"frozen": list(learner.frozen), "learned": list(learner.learned)})


def _last_fifth(stats: Sequence[AcceptanceStats]) -> AcceptanceStats:
    return sum(stats[-max(len(stats) // 5, 1) :], AcceptanceStats())


def _plot(learner: StoreLearner, folder: Path) -> None:
    if learner.learned:
        pooled = Comparison([None] * len(learner.learned), _compared(learner).sides)
        with contextlib.suppress(OSError):  # a missing plot must not end the command
            title = "Acceptance on the target's answers: the draft that learns, and the same draft frozen"
            plot_alpha(folder / PLOT, pooled, title=title)


def _report(learner: StoreLearner, deployers: Sequence[Deployer]) -> dict[str, Any]:
    compared, latest = _compared(learner), learner.versions.latest
    return {
        "provenance": provenance(), "config": learner.config.to_dict(), "requests": learner.requests,
        "tokens": learner.tokens, "skipped": dict(learner.skipped), "set_aside": dict(learner.set_aside),
        "learning_seconds": learner.learning_seconds,
        "versions": learner.published, "latest": None if latest is None else latest.name, "pushed": learner.is_pushed,
        "deployed": [deployer.report() for deployer in deployers],
        "alpha_by_domain": {str(name): compared.of(name).alphas() for name in compared.names},
        **{f"alpha_{name}": [s.alpha for s in stats] for name, stats in compared.sides.items()},
        **{f"alpha_{name}_last_fifth": _last_fifth(stats).alpha for name, stats in compared.sides.items()},
    }  # fmt: skip
