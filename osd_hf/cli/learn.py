"""The command `osd-hf learn`: teaches a draft from collected requests while they come in, and publishes versions."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from osd_hf.acceptance import AcceptanceStats, Comparison
from osd_hf.cli import FAILED
from osd_hf.cli.arguments import flag, in_groups
from osd_hf.cli.flags import (
    NOTHING_DRAFTED,
    DraftRevision,
    Learning,
    Reporting,
    TargetLoading,
    adapters,
    learning,
    stopping,
)
from osd_hf.config import OnlineConfig
from osd_hf.engines.deploy import MIN_WATCHED_REQUESTS, Deployer, DeployMethod
from osd_hf.engines.learn import StoreLearner
from osd_hf.engines.versions import PLOT, VersionFolder, folder_name
from osd_hf.errors import ConfigError, StateError, StoreError
from osd_hf.evaluation.display import alpha_bar, plot_alpha, stats_interval
from osd_hf.hub.cards import facts_of
from osd_hf.hub.push import check_push, check_visibility
from osd_hf.learning.updater import make_accelerator
from osd_hf.models import align_vocab, load_config, load_model, load_pair, load_tokenizer
from osd_hf.server.metrics import learner_metrics, serve_metrics
from osd_hf.store.folder import StoreFollower
from osd_hf.utils.report import provenance

_models, _requests, _publishing, _deploying = in_groups("models", "requests", "publishing", "deploying")
END_SECONDS = 10.0  # that a load under way is waited for when the command ends


@dataclass(frozen=True, kw_only=True)
class LearnSettings(DraftRevision, TargetLoading, Learning, Reporting):
    """The flags of `osd-hf learn`."""

    store: list[Path] = flag("folder that collectors fill (repeat for several)", required=True, metavar="DIR")
    output_dir: Path = flag("where versions go; DIR/latest is the newest", required=True, metavar="DIR")
    draft: str | None = _models("where learning starts; the bundled one by default", metavar="ID|PATH")
    target: str | None = _models("model whose answers the stores hold, for its tokenizer and vocabulary (no weights "
                                 "are loaded); the bundled one by default", metavar="ID|PATH")  # fmt: skip
    lora_rank: int | None = _models("learn adapters of this rank on all linear layers, merged in what is published",
                                    metavar="R")  # fmt: skip
    threads: int | None = _models("threads of torch; its own choice by default", metavar="N")
    domain: str | None = _requests("learn from requests of this label only", metavar="NAME")
    by_domain: bool = _requests("teach each label a draft of its own, whose versions go to OUTPUT_DIR/LABEL", False)
    target_version: str | None = _requests("learn from requests of this version of the target only; of the newest by "
                                           "default", metavar="NAME")  # fmt: skip
    rescore: bool = _requests("let the target, whose weights are loaded, score those of other versions anew", False)
    once: bool = _requests("end when all that is there is learned; wait otherwise", False)
    num_requests: int | None = _requests("end after N more requests", metavar="N")
    poll_seconds: float = _requests("seconds between two looks at the stores, and at engines", 2.0, metavar="S")
    state_dir: Path | None = _publishing("session to go on with, which holds tokens of requests; OUTPUT_DIR-state by "
                                         "default", metavar="DIR")  # fmt: skip
    keep: int = _publishing("newest versions that are kept", 5, metavar="N")
    publish_seconds: float = _publishing("least seconds between two versions", 30.0, metavar="S")
    repo_id: str | None = _publishing("push each version to this repo of the Hub, too", metavar="USER/NAME")
    public: bool = _publishing("let everybody read what goes to --repo-id; otherwise a new repo is private, and a "
                               "public one is refused", False)  # fmt: skip
    token: str | None = _publishing("token of the Hub; the login of this machine by default")
    license: str | None = _publishing("license of the draft's base, as the Hub names it, for the card", metavar="NAME")
    metrics_port: int | None = _publishing("also answer scrapes of Prometheus on this port", metavar="PORT")
    metrics_host: str = _publishing("address that scrapes come to; other machines are let in by 0.0.0.0", "127.0.0.1")
    report_to: list[str] | None = _publishing("also log to trackio, tensorboard, wandb, ...", metavar="NAME")
    deploy: list[str] | None = _deploying(
        "load versions into an engine, watch it, and go back where fewer tokens are accepted (repeat for several): "
        "reload=URL (vLLM), 'restart=URL COMMAND' with {version} and {url} in it, or 'webhook=URL HOOK'; LABEL: goes "
        "before it with --by-domain", metavar="WAY=URL",
    )  # fmt: skip
    watch_requests: int = _deploying("requests that a version is watched for", 200, metavar="N")
    deploy_seconds: float = _deploying("the longest that loading into one engine may take", 600.0, metavar="S")
    config: OnlineConfig = learning(
        k="tokens drafted per round (k), in what is compared", **NOTHING_DRAFTED,
        update_strategy="an update is done as soon as its requests are there",
    )  # fmt: skip

    def ways(self) -> dict[str | None, list[DeployMethod]]:
        """The engines, by whose versions they get; raises ConfigError."""
        if not self.deploy and (given := self.changed("watch_requests", "deploy_seconds")):
            raise ConfigError(f"{given[0]} is for --deploy, which names engines.")
        found: dict[str | None, list[DeployMethod]] = {}
        for way in map(DeployMethod.parse, self.deploy or ()):
            if (way.domain is not None) != self.by_domain:
                told = "LABEL: goes before the way with --by-domain" if self.by_domain else "is for --by-domain"
                raise ConfigError(f"--deploy {way.domain or way.kind}: {told}.")
            if way.domain is not None and folder_name(way.domain) is None:
                raise ConfigError(f"--deploy {way.domain[:40]}...: the label is too long for the name of a folder.")
            if any(way.engine_name == other.engine_name for those in found.values() for other in those):
                raise ConfigError("--deploy names one engine twice: it can serve one draft, loaded in one way.")
            found.setdefault(way.domain, []).append(way)
        return found


def learn_command(settings: LearnSettings) -> int:
    """Learn until told to stop; returns the exit code."""
    settings.fixed_k()
    settings.check_together("draft", "target")
    settings.check_counts("num_requests", "threads", "lora_rank")
    settings.check_counts("watch_requests", least=MIN_WATCHED_REQUESTS)
    if settings.changed("metrics_host") and settings.metrics_port is None:
        raise ConfigError("--metrics-host is for --metrics-port, which says where scrapes are answered.")
    if settings.by_domain and settings.repo_id is not None:
        raise ConfigError("--repo-id takes one draft. Push the newest versions of --by-domain with `osd-hf push`.")
    if settings.public and settings.repo_id is None:
        raise ConfigError("--public is for --repo-id, which says where versions are pushed.")
    if settings.token is not None and settings.repo_id is None:
        raise ConfigError("--token is for --repo-id, which says where versions are pushed.")
    of_weights = settings.changed("device_map", "quantization")
    if of_weights and not settings.rescore:
        raise ConfigError(f"{of_weights[0]} is of the target's weights, which --rescore alone loads.")
    settings.check_not_negative("poll_seconds", "publish_seconds", "deploy_seconds")
    if not settings.deploy_seconds:
        raise ConfigError("--deploy-seconds must be more than 0: no engine loads in no time.")
    ways = settings.ways()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    learner, folder = _learner(settings)
    host, told = settings.metrics_host, partial(learner_metrics, learner)
    port = settings.metrics_port
    metrics = contextlib.nullcontext() if port is None else serve_metrics(port, told, host=host)
    with metrics, _deployers(settings, ways, learner) as deployers:
        is_done = _learn(settings, learner, folder, deployers)
    is_done &= _closed(learner, folder)  # the next process may come in when no engine is looked after any more
    report = _report(learner, deployers)
    frozen, learned = (stats_interval(_last_fifth(stats)) for stats in _compared(learner).sides.values())
    settings.say(
        f"{learner.requests} requests, {learner.tokens} tokens; {len(learner.published)} versions published, latest "
        f"{report['latest'] or 'none'}; {learner.learning_seconds:.1f} s of learning\n"
        f"alpha over the last fifth: {learned}, frozen {frozen}"
    )
    for deployer in deployers:
        settings.say(deployer.summary())
    for what, counts in (("left out", learner.skipped), ("set aside", learner.set_aside)):
        for reason, count in counts.most_common():
            settings.say(f"{what} {count} {reason}")
    if not learner.is_pushed:
        print(f"osd-hf: error: the newest version is not pushed to {settings.repo_id} yet", file=sys.stderr)
    settings.write_json(report)
    return 0 if is_done and learner.is_pushed else FAILED


def _learner(settings: LearnSettings) -> tuple[StoreLearner, Path]:
    """What learns, and the folder of its versions."""
    token, private = None, False if settings.public else None
    if settings.repo_id is not None:
        token = check_push(settings.repo_id, settings.token)
        check_visibility(settings.repo_id, token, private)
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
            draft, tokenizer, StoreFollower(settings.store), versions, settings.config, domain=settings.domain,
            by_domain=settings.by_domain, peft_config=adapters(settings.lora_rank),
            target_version=settings.target_version, target=target if settings.rescore else None,
            facts=facts, state=state.expanduser(), repo_id=settings.repo_id, token=token, private=private,
            publish_seconds=settings.publish_seconds,
            accelerator=make_accelerator(settings.report_to, settings.config),
        )  # fmt: skip
    except BaseException:
        versions.close()
        raise
    return learner, folder


@contextlib.contextmanager
def _deployers(
    settings: LearnSettings, ways: dict[str | None, list[DeployMethod]], learner: StoreLearner
) -> Iterator[list[Deployer]]:
    """What looks after the engines, each in a thread of its own inside the block."""
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
                except StateError as error:  # of the disk: it is tried again
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
            thread.join(END_SECONDS)
            deployer.close()


def _learn(settings: LearnSettings, learner: StoreLearner, folder: Path, deployers: Sequence[Deployer]) -> bool:
    """Learn until told to stop; whether all could be written in the end."""
    begun, shown, failed = learner.requests, 0, False
    with stopping() as stop, alpha_bar(settings.num_requests, "learning") as advance:
        while not stop.is_set():
            left = None if settings.num_requests is None else settings.num_requests - (learner.requests - begun)
            if left == 0:
                break
            try:
                taken = learner.step(advance, limit=left)
            except StateError as error:  # of the disk: learning goes on, and writing is tried again
                print(f"osd-hf: warning: {error}", file=sys.stderr)
                continue
            except StoreError as error:  # the stores are gone
                print(f"osd-hf: error: {error}", file=sys.stderr)
                failed = True
                break
            if len(learner.published) > shown:
                shown = len(learner.published)
                _plot(learner, folder)
            if not taken:
                if settings.once and not learner.follower.is_waiting:
                    break
                stop.wait(settings.poll_seconds)
    with contextlib.suppress(StateError):  # it is tried again, and told, when the learner is closed
        learner.publish()
    for deployer in () if stop.is_set() else deployers:  # what came last
        deployer.look()
    return not failed


def _closed(learner: StoreLearner, folder: Path) -> bool:
    """Close the learner; whether all could be written."""
    try:
        learner.close()
    except StateError as error:
        print(f"osd-hf: error: {error}", file=sys.stderr)
        return False
    finally:
        _plot(learner, folder)
    return True


def _compared(learner: StoreLearner) -> Comparison:
    sides = {"frozen": list(learner.frozen), "learned": list(learner.learned)}
    return Comparison([None] * len(learner.learned), sides)


def _last_fifth(stats: Sequence[AcceptanceStats]) -> AcceptanceStats:
    return sum(stats[-max(len(stats) // 5, 1) :], AcceptanceStats())


def _plot(learner: StoreLearner, folder: Path) -> None:
    if learner.learned:
        with contextlib.suppress(OSError):  # a picture is not worth ending for
            title = "Acceptance on the target's answers: the draft that learns, and the same draft frozen"
            plot_alpha(folder / PLOT, _compared(learner), title=title)


def _report(learner: StoreLearner, deployers: Sequence[Deployer]) -> dict[str, Any]:
    sides, latest = _compared(learner).sides, learner.versions.latest
    by_domain = Comparison(list(learner.domains), sides)
    return {
        "provenance": provenance(), "config": learner.config.to_dict(), "requests": learner.requests,
        "tokens": learner.tokens, "skipped": dict(learner.skipped), "set_aside": dict(learner.set_aside),
        "learning_seconds": learner.learning_seconds,
        "versions": learner.published, "latest": None if latest is None else latest.name, "pushed": learner.is_pushed,
        "deployed": [deployer.report() for deployer in deployers],
        "alpha_by_domain": {str(name): by_domain.of(name).alphas() for name in by_domain.names},
        **{f"alpha_{name}": [s.alpha for s in stats] for name, stats in sides.items()},
        **{f"alpha_{name}_last_fifth": _last_fifth(stats).alpha for name, stats in sides.items()},
    }  # fmt: skip
