"""Learning from stores that others fill: as a simulated run does, published whole, resumed wherever it was killed."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import models
import pytest
import torch
from fake_engine import completion
from fake_vllm import FakeVLLM, connecting
from processes import run_python
from safetensors.torch import load_file
from saved_pair import save_pair
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from waiting import Clock, full

from osd_hf import CorrectionStore, LabelRouter, OnlineConfig, Trace, replay, simulate
from osd_hf.cli import learn as learn_command
from osd_hf.cli.main import main
from osd_hf.cli.settings import lora_config
from osd_hf.engines import deploy
from osd_hf.engines import learn as module
from osd_hf.engines.completions import ResponseReader
from osd_hf.engines.deploy import Deployer
from osd_hf.engines.learn import StoreLearner
from osd_hf.engines.versions import VersionFolder, folder_name
from osd_hf.engines.vllm_reload import weights_digest
from osd_hf.errors import StateError
from osd_hf.learning import session as session_module
from osd_hf.learning.gate import GateDecision
from osd_hf.prompts import encode_turn
from osd_hf.recording import record_traces
from osd_hf.replay import replay_each
from osd_hf.store.folder import StoreFollower

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it

# Without the gate each update is a version.
CONFIG = OnlineConfig(update_strategy="interval",
    update_interval=3, steps_per_update=1, batch_size=4, num_logprobs=8, optimizer="adamw", learning_rate=3e-3,
    gate=False, num_assistant_tokens=4,
)  # fmt: skip
MUON = replace(CONFIG, optimizer="muon", steps_per_update=2)
REQUESTS = 16
VERSIONS = 5


@pytest.fixture(autouse=True)
def save_after_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd_hf.learning.session.UPDATES_BETWEEN_SAVES", 1)


SELDOM = 1e9  # seconds between two publications: the first version goes out, and the last
TOKENIZER = models.tokenizer()
TEMPLATE = functools.cache(jinja2.Template)
PLOT = learn_command.plot_learning


@pytest.fixture(autouse=True)
def written_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template of a card is read once, not for each version, and no figure is drawn where none is looked at."""
    monkeypatch.setattr(jinja2, "Template", TEMPLATE)
    monkeypatch.setattr(learn_command, "plot_learning", lambda path, *args, **kwargs: path.touch())


@pytest.fixture(scope="module")
def pair() -> Any:
    return models.pair(noise=0.2, num_hidden_layers=1)


@pytest.fixture(scope="module")
def traces(pair: Any) -> list[Trace]:
    prompts = [p[0].tolist() for p in models.prompts(REQUESTS)]
    return list(record_traces(pair[0], prompts, max_new_tokens=8, num_logprobs=8))


def written(path: Path, traces: Any, flush_every: int = 5) -> Path:
    with CorrectionStore(path, flush_every=flush_every) as store:
        for trace in traces:
            store.append(trace)
    return path


@pytest.fixture
def store(tmp_path: Path, traces: list[Trace]) -> Path:
    return written(tmp_path / "store", traces)


@pytest.fixture
def begin(pair: Any, tmp_path: Path, store: Path) -> Iterator[Callable[..., StoreLearner]]:
    """Makes learners; a new one ends the one before without a word, as a kill does."""
    begun: list[VersionFolder] = []

    def begin(
        config: OnlineConfig = CONFIG, *, path: Path | None = None, versions: str = "drafts", draft: Any = pair[1],
        **settings: Any,
    ) -> StoreLearner:  # fmt: skip
        while begun:
            begun.pop().close()  # of its lock, a kill lets go as well
        begun.append(VersionFolder(tmp_path / versions))
        return StoreLearner(draft, TOKENIZER, StoreFollower([path or store]), begun[-1], config, **settings)

    yield begin
    while begun:
        begun.pop().close()


def learn(learner: StoreLearner, limit: int = 4) -> None:
    while learner.step(limit=limit):
        pass


def weights(learner: StoreLearner) -> list[torch.Tensor]:
    """Those that serve, and those that learning goes on with."""
    serving = learner.learner.drafts.model(None)
    return [
        p.detach().clone()
        for model in (serving, learner.learner.drafts.updater(None).master)
        for p in model.parameters()
    ]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def facts(versions: VersionFolder | Path) -> Any:
    path = versions if isinstance(versions, Path) else versions.path
    return json.loads((path / "latest" / "version.json").read_text())


# --- what is learned ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "limit"),
    [(CONFIG, 1), (CONFIG, 99), (OnlineConfig.paper(update_interval=3, num_logprobs=8), 5),
     (replace(MUON, update_interval=7), 5)],
)  # fmt: skip
def test_it_learns_as_a_simulated_run_does(
    begin: Any, pair: Any, traces: list[Trace], config: OnlineConfig, limit: int
) -> None:
    learner, seen = begin(config, publish_seconds=SELDOM), []
    while learner.step(lambda *request: seen.append(request), limit=limit):
        pass
    report = simulate(pair[1], traces, config)
    assert list(learner.learned) == list(report.stats)
    assert [version for *_, version in seen] == [trace.draft_version for trace in report.traces]
    assert [learned for learned, *_ in seen] == list(report.stats)
    assert equal(
        weights(learner)[: len(list(report.draft.parameters()))], [p.detach() for p in report.draft.parameters()]
    )
    assert (learner.requests, learner.tokens) == (REQUESTS, sum(map(len, traces)))
    assert learner.learner.drafts.serving_version() == len(report.updates) > 0
    assert learner.learning_seconds > 0


def test_its_gate_decides_as_that_of_a_simulated_run(
    begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.pair("gpt2", noise=0.3)
    traces = list(record_traces(target, [p[0].tolist() for p in models.prompts(36)], max_new_tokens=8, num_logprobs=8))
    config = replace(MUON, gate=True, update_interval=6)
    reports: list[Any] = []
    monkeypatch.setattr(module, "log_update", lambda accelerator, report, *rest: reports.append(report))
    learner = begin(config, path=written(tmp_path / "longer", traces), draft=draft)
    learn(learner)
    simulated = simulate(draft, traces, config)
    assert [report.decision for report in reports] == list(simulated.decisions)
    outcomes = [decision.outcome for decision in simulated.decisions]
    assert outcomes[0] == "kept back"
    assert "promoted" in outcomes
    assert len(learner.published) <= outcomes.count("promoted")
    assert (
        learner.published[-1]["decision"] == [d for d in simulated.decisions if d.outcome == "promoted"][-1].to_dict()
    )


def test_sampled_requests_are_learned_from(begin: Any, pair: Any, tmp_path: Path, caplog: Any) -> None:
    reader, sampled = ResponseReader(models.VOCAB, 8), []
    for seed, ids in enumerate(models.prompts(8)):
        asked = {
            "prompt": ids[0].tolist(), "max_tokens": 8, "temperature": 0.7, "top_k": 20, "seed": seed, "logprobs": 8,
            "return_token_ids": True,
        }  # fmt: skip
        sampled += reader.traces(completion(pair[0], asked), asked)
    path = written(tmp_path / "sampled", sampled)
    learner = begin(path=path, publish_seconds=SELDOM)
    with caplog.at_level(logging.WARNING):
        learn(learner)
    assert learner.requests == 8
    assert learner.learner.drafts.serving_version() == 2
    expected = replay_each(pair[1], sampled, CONFIG.num_assistant_tokens)
    assert [stats.alpha for stats in learner.frozen] == pytest.approx([stats.alpha for stats in expected])
    assert not caplog.records
    learned, frozen = (replay(d, sampled, 4).alpha for d in (learner.learner.drafts.model(None), pair[1]))
    assert learned > frozen
    corrections = begin(OnlineConfig.paper(num_logprobs=8), path=path, versions="others")
    learn(corrections)
    assert corrections.requests == 0
    assert corrections.skipped == {"sampled, whose corrections cannot be known": 8}


def said(traces: Sequence[Trace], names: str) -> list[Trace]:
    """Traces that say these versions of their target, one a letter, one after the other."""
    return [
        replace(t, target=None if name == "-" else 16 * name, created_at_seconds=float(number))
        for number, (t, name) in enumerate(zip(traces, names, strict=False))
    ]


@pytest.mark.parametrize(
    ("asked", "names", "kept"),
    [(None, "abbbabb", "bbbbb"), ("a", "aaaabb-abb", "aaaaa"), (None, "zz--zz", "zz--zz"), (None, "aa-bb", "bb")],
)  # fmt: skip
def test_only_the_newest_target_is_learned_from_unless_asked(
    begin: Any, traces: list[Trace], tmp_path: Path, asked: str | None, names: str, kept: str
) -> None:
    path = written(tmp_path / "mixed", said(traces, names))
    learner = begin(path=path, target_version=asked and 16 * asked, publish_seconds=SELDOM)
    learn(learner)
    assert learner.requests == len(kept)
    others = len(names) - len(kept)
    assert learner.skipped == ({"of another version of the target": others} if others else {})
    if len(kept) > 2:
        config = json.loads((learner.versions.path / "latest" / "config.json").read_text())
        # A name that an engine gives may be a folder's: it goes nowhere.
        assert config.get("osd_hf_target") == (16 * kept[0] if kept[0] in "abcdef" else None)


def later(traces: Sequence[Trace], names: str, seconds: float) -> list[Trace]:
    return [replace(t, created_at_seconds=t.created_at_seconds + seconds) for t in said(traces, names)]


def test_a_target_that_comes_back_is_learned_from_again(begin: Any, traces: list[Trace], tmp_path: Path) -> None:
    store, settings = written(tmp_path / "growing", said(traces, "aabb")), {"state": tmp_path / "state"}
    learner = begin(path=store, **settings)
    learn(learner)
    assert learner.requests == 2
    written(store, later(traces, "aaaa", 50))
    learn(learner)
    assert (learner.requests, learner.skipped["of another version of the target"]) == (6, 2)
    learner.save()
    written(store, later(traces, "bbb", 99))
    again = begin(path=store, **settings)
    learn(again)
    assert (again.requests, again.skipped) == (9, {})
    again.save()
    # A store that comes to it later holds an older version alone.
    again = begin(path=written(tmp_path / "older", said(traces, "cc")), **settings)
    learn(again)
    assert (again.requests, again.skipped) == (9, {"of another version of the target": 2})


def test_requests_that_do_not_fit_are_left_out_and_counted(
    begin: Any, pair: Any, traces: list[Trace], tmp_path: Path, caplog: Any
) -> None:
    ids = [[5, 6, 7]] * 2
    mixed = [
        *[replace(trace, domain="sql") for trace in traces[:6]],
        *[replace(trace, domain="math") for trace in traces[6:9]],
        *[replace(t, domain="sql") for t in record_traces(pair[0], ids, max_new_tokens=8, num_logprobs=16)],
        *[replace(t, domain="sql") for t in record_traces(pair[0], ids[:1], max_new_tokens=8, num_logprobs=None)],
        *record_traces(models.build(vocab_size=80), ids, max_new_tokens=8, num_logprobs=8, domain="sql"),
        *record_traces(models.build("t5"), ids[:1], max_new_tokens=8, num_logprobs=8, domain="sql"),
        replace(traces[0], completion_ids=traces[0].completion_ids[:0], top_logits=traces[0].top_logits[:0],
                top_ids=traces[0].top_ids[:0], tail_logprob=traces[0].tail_logprob[:0], domain="sql"),
    ]  # fmt: skip
    mixed = [replace(trace, target=None) for trace in mixed]  # as if of one target
    learner = begin(path=written(tmp_path / "mixed", mixed), domain="sql")
    learn(learner)
    assert learner.requests == 6
    assert sum(learner.skipped.values()) == 10
    counted = {reason.split(",")[0]: count for reason, count in learner.skipped.items()}
    assert counted == {
        "of another domain": 3, "with 16 entries per position": 2, "with all entries per position": 1,
        "of a vocabulary of 80": 2, "of an encoder-decoder": 1, "without target rows": 1,
    }  # fmt: skip
    report = simulate(pair[1], [replace(t, domain=None) for t in traces[:6]], CONFIG)
    assert list(learner.learned) == list(report.stats)


# --- what is published ----------------------------------------------------------------------------------------------


def test_the_latest_version_is_what_serves(begin: Any, pair: Any, traces: list[Trace]) -> None:
    learner = begin()
    learn(learner)
    learner.close()
    path = learner.versions.path / "latest"
    loaded = AutoModelForCausalLM.from_pretrained(path).eval()
    drafting = GenerationConfig.from_pretrained(path)
    assert (drafting.num_assistant_tokens, drafting.num_assistant_tokens_schedule) == (4, "constant")
    serving = learner.learner.drafts.model(None)
    assert equal([p.detach() for p in loaded.parameters()], [p.detach() for p in serving.parameters()])
    assert replay_each(loaded, traces, 4) == replay_each(serving, traces, 4)
    assert replay(loaded, traces, 4).alpha > replay(pair[1], traces, 4).alpha
    assert AutoTokenizer.from_pretrained(path).get_vocab() == TOKENIZER.get_vocab()
    found = facts(learner.versions)
    assert found == json.loads(json.dumps(learner.published[-1]))
    assert (found["requests"], found["tokens"]) == (REQUESTS, sum(map(len, traces)))
    assert found["draft_version"] == learner.learner.drafts.serving_version() == VERSIONS
    assert (path / "README.md").is_file()


@pytest.mark.parametrize("place", ["save_draft", "check_written", "fsync"])
def test_a_version_that_cannot_be_written_is_published_later(
    begin: Any, pair: Any, traces: list[Trace], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    clock = Clock()
    learner = begin(publish_seconds=5.0, clock=clock)
    learner.step(limit=3)
    assert facts(learner.versions)["draft_version"] == 1
    clock.now = 5.0
    with monkeypatch.context() as patch:
        patch.setattr(os if place == "fsync" else module, place, full)
        with pytest.raises(StateError, match="No space left"):
            learner.step(limit=3)
        assert learner.requests == 6
        assert facts(learner.versions)["draft_version"] == 1
        AutoModelForCausalLM.from_pretrained(learner.versions.path / "latest")
        if place != "fsync":  # under which the session cannot be saved either
            assert learner.step(limit=3) == 3  # before it is tried again
    clock.now = 5.0 + module.RETRY_SECONDS
    learn(learner, limit=99)
    assert facts(learner.versions)["draft_version"] > 1
    learner.close()
    assert facts(learner.versions)["draft_version"] == VERSIONS
    assert list(learner.learned) == list(simulate(pair[1], traces, CONFIG).stats)


# --- taken back by engines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 2])
def test_it_goes_on_from_the_version_that_engines_went_back_to(begin: Any, rank: int | None) -> None:
    clock = Clock()
    learner = begin(peft_config=lora_config(rank), publish_seconds=10.0, clock=clock)
    learner.publish_start()
    versions = learner.versions
    start = AutoModelForCausalLM.from_pretrained(versions.latest)
    versions.pin([0])
    learner.step(limit=3)
    versions.pin([0, 1])  # as engines do that serve the first version
    first = [p.detach().clone() for p in learner.learner.drafts.model(None).parameters()]
    for clock.now in (10.0, 20.0, 21.0):
        learner.step(limit=3)
    assert versions.number == 3  # and another one waits
    clock.now = 99.0
    versions.reject(GateDecision("rolled back", 3, 1, None, "worse"))
    assert versions.latest is not None
    assert versions.latest.name == "v000001"
    learner.step(limit=1)  # too few for an update
    serving = learner.learner.drafts.model(None)
    assert equal([p.detach() for p in serving.parameters()], first)
    assert (learner.learner.drafts.serving_version(), versions.number) == (1, 3)
    assert learner.learner.take_decisions() == []
    master = learner.learner.drafts.updater(None)
    if rank is None:
        assert equal([p.detach() for p in master.master.parameters()], first)
    assert not any(optimizer.state for optimizer in master.optimizers)
    learn(learner)
    assert versions.number > 3
    versions.reject(GateDecision("rolled back", versions.number, 0, None, "worse"))
    learner.step()
    serving = learner.learner.drafts.model(None)
    assert equal([p.detach() for p in serving.parameters()], [p.detach() for p in start.parameters()])


def test_a_rejection_is_saved_at_once_and_pushed(begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    monkeypatch.setattr(module, "push_folder", lambda folder, *_, **__: pushed.append(folder.name))
    learner = begin(state=tmp_path / "state", repo_id="me/draft")
    learner.publish_start()
    learner.step(limit=6)
    learner.versions.pin([0])
    learner.save()
    with monkeypatch.context() as patch:
        patch.setattr(learner.follower, "take", full)  # killed right after
        learner.versions.reject(GateDecision("rolled back", learner.versions.number, 0, None, "worse"))
        with pytest.raises(OSError, match="No space"):
            learner.step()
    again = begin(state=tmp_path / "state", repo_id="me/draft")
    assert again.learner.drafts.serving_version() == 0
    assert not again.is_pushed
    again.publish()
    assert pushed[-1] == "v000000"
    newer = again.versions.publish(lambda folder: folder.mkdir(), {})
    again.versions.reject(GateDecision("rolled back", 9, 1, None, "worse"))  # whose weights are not at hand
    assert newer.name != "v000001"
    again.publish()
    assert pushed[-1] == "v000001"


# --- a draft per domain ---------------------------------------------------------------------------------------------


def labelled(traces: Sequence[Trace], labels: str) -> list[Trace]:
    """These traces of domains that letters name; `-` is none."""
    names = (None if name == "-" else f"{name}/." for name in labels)
    return [replace(trace, domain=name) for trace, name in zip(traces, names, strict=False)]


@pytest.mark.parametrize("rank", [None, 2])
def test_each_domain_teaches_a_draft_of_its_own(
    begin: Any, pair: Any, traces: list[Trace], tmp_path: Path, rank: int | None
) -> None:
    mixed = labelled(traces, "abababab-aabbbba")
    path = written(tmp_path / "mixed", mixed)
    learner = begin(path=path, by_domain=True, peft_config=lora_config(rank), publish_seconds=SELDOM)
    learn(learner)
    learner.close()
    assert learner.skipped == {"without a domain": 1}
    config = CONFIG
    named = [trace for trace in mixed if trace.domain is not None]
    report = simulate(pair[1], named, config, router=LabelRouter(), peft_config=lora_config(rank))
    assert list(learner.learned) == list(report.stats)
    assert [trace.domain for trace in named] == list(learner.domains)
    for name, folder in (("a/.", "a%2F."), ("b/.", "b%2F.")):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "drafts" / folder / "latest")
        wanted = report.learner.drafts.model(name)
        assert equal([p.detach() for p in loaded.parameters()], [p.detach() for p in wanted.parameters()])
        found = facts(tmp_path / "drafts" / folder)
        own = [trace for trace in named if trace.domain == name]
        assert (found["requests"], found["tokens"]) == (len(own), sum(map(len, own)))
        assert found["decision"]["domain"] == name
    assert not (tmp_path / "drafts" / "latest").exists()
    assert learner.requests == len(named)


def test_drafts_of_domains_are_gone_on_with_and_bounded(
    begin: Any, traces: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osd_hf.learning.drafts.MAX_DRAFTS", 2)
    config = CONFIG
    store = written(tmp_path / "growing", labelled(traces, "abcabcabc"))
    settings: Any = {"path": store, "by_domain": True, "state": tmp_path / "state"}
    learner = begin(config, publish_seconds=SELDOM, clock=Clock(), **settings)
    learn(learner)
    assert learner.skipped == {"of more domains than get a draft": 3}
    learner.save()  # what waits to be published waits behind a kill
    again = begin(config, **settings)
    assert (again.requests, again.tokens) == (learner.requests, learner.tokens)
    assert equal(*([p.detach() for p in each.learner.drafts.model("b/.").parameters()] for each in (learner, again)))
    again.close()
    assert [facts(tmp_path / "drafts" / f"{name}%2F.")["draft_version"] for name in "ab"] == [1, 2]
    with pytest.raises(StateError, match="drafts per domain"):
        begin(config, path=store, state=tmp_path / "state")


def test_labels_are_names_of_folders(tmp_path: Path) -> None:
    versions = VersionFolder(tmp_path)
    assert folder_name("x" * 201) is None
    names = {"..": "%2E.", "a/b": "a%2Fb", "": "%", "Sägen v1.2": "S%C3%A4gen%20v1.2", "latest": "%6Catest"}
    names |= {"V000001": "%56000001", "learning.png": "%6Cearning.png", "deploy.jsonl": "%64eploy.jsonl"}
    for label, name in names.items():
        assert folder_name(label) == name
        assert versions.of(label).path == tmp_path / name
    versions.close()
    VersionFolder(tmp_path / "a%2Fb").close()


# --- killed, and resumed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "killed_after"), [(CONFIG, 1), (replace(MUON, gate=True, update_interval=4), 1)])
def test_a_learner_that_is_killed_goes_on_where_it_stood(
    begin: Any, tmp_path: Path, killed_after: int, config: OnlineConfig
) -> None:
    straight = begin(config, versions="straight-drafts", publish_seconds=SELDOM)
    learn(straight)
    state, learner, steps = tmp_path / "state", begin(config, state=tmp_path / "state"), 0
    while learner.step(limit=4):  # with an update in each, behind which it is saved
        steps += 1
        assert steps < 99
        if steps % killed_after == 0:
            learner = begin(config, state=state)
    assert steps == REQUESTS / 4
    assert (learner.requests, learner.tokens) == (straight.requests, straight.tokens) == (REQUESTS, straight.tokens)
    assert learner.follower.state_dict() == straight.follower.state_dict()
    assert learner.learner.drafts.serving_version() == straight.learner.drafts.serving_version()
    assert equal(weights(learner), weights(straight))
    lessons = [each.learner.state_dict()["requests"][0] for each in (learner, straight)]
    assert lessons[0]["observed"] == lessons[1]["observed"]
    sizes = [{name: len(kept) for name, kept in lesson["traces"].items()} for lesson in lessons]
    assert sizes[0] == sizes[1]


class Killed(BaseException):
    """As by SIGKILL."""


@pytest.fixture(scope="module")
def straight(pair: Any, traces: list[Trace], tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """Weights of a learner that nobody disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    versions = VersionFolder(folder / "drafts")
    follower = StoreFollower([written(folder / "store", traces)])
    learner = StoreLearner(pair[1], TOKENIZER, follower, versions, CONFIG, publish_seconds=SELDOM)
    learn(learner, limit=99)
    versions.close()
    return weights(learner)


@pytest.mark.parametrize(
    ("home", "place", "number"),
    [
        (session_module.torch, "save", 1), (session_module.pq, "write_table", 1),
        (os, "replace", 1), (os, "replace", 6), (os, "symlink", 2), (module, "save_session", 2),
        (module, "save_draft", 2), (module, "check_written", 2),
    ],
)  # fmt: skip
def test_a_learner_that_is_killed_inside_a_step_learns_each_request_once(
    begin: Any, straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Any, place: str, number: int
) -> None:
    learner, real, calls = begin(state=tmp_path / "state"), getattr(home, place), [0]

    def kill(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise Killed
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(home, place, kill)
        with pytest.raises(Killed):
            learn(learner)
    learner = begin(state=tmp_path / "state", publish_seconds=SELDOM)
    learn(learner)
    assert learner.requests == REQUESTS
    assert equal(weights(learner), straight)
    learner.close()
    assert facts(learner.versions)["draft_version"] == VERSIONS
    assert len(list((tmp_path / "state").glob("state-*"))) == 1


def test_a_session_of_another_draft_width_or_command_is_refused(
    begin: Any, tmp_path: Path, traces: list[Trace]
) -> None:
    learner = begin(state=tmp_path / "state")
    learner.step(limit=3)
    learner.close()
    with pytest.raises(StateError, match="num_logprobs"):
        begin(replace(CONFIG, num_logprobs=16), state=tmp_path / "state")
    other = models.draft_of(models.build("gpt2"))
    versions = VersionFolder(tmp_path / "others")
    with pytest.raises(StateError):
        StoreLearner(other, TOKENIZER, StoreFollower([tmp_path / "store"]), versions, CONFIG, state=tmp_path / "state")
    versions.close()
    module.save_session(tmp_path / "run", learner.learner.state_dict(), {"requests": 3})
    with pytest.raises(StateError, match="is of another command"):
        begin(state=tmp_path / "run")


def test_a_session_that_cannot_be_saved_is_saved_later(
    begin: Any, straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = begin(state=tmp_path / "state", publish_seconds=SELDOM, clock=Clock())
    learner.step(limit=3)
    with monkeypatch.context() as patch:
        patch.setattr(session_module.pq, "write_table", full)
        with pytest.raises(StateError, match="The session cannot be saved"):
            learner.step(limit=3)
    again = begin(state=tmp_path / "state", publish_seconds=SELDOM)
    assert again.requests == 3
    learn(again)
    assert equal(weights(again), straight)


# --- the command ----------------------------------------------------------------------------------------------------


SMALL = [
    "--num-logprobs", "8", "--update-interval", "4", "--steps-per-update", "1", "--batch-size", "4",
    "--optimizer", "adamw", "--learning-rate", "3e-3", "--no-gate", "--num-assistant-tokens", "3", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def recorded(saved: Path) -> list[Trace]:
    target = AutoModelForCausalLM.from_pretrained(saved / "target")
    tokenizer = AutoTokenizer.from_pretrained(saved / "target")
    prompts = [encode_turn(tokenizer, f"what is {i}?") for i in range(12)]
    return list(record_traces(target, prompts, max_new_tokens=8, num_logprobs=8, domain="sums"))


@pytest.fixture
def flags(saved: Path, recorded: list[Trace], tmp_path: Path) -> list[str]:
    store = written(tmp_path / "collected", recorded[:8], flush_every=3)
    return ["learn", *map(str, ["--store", store, "--output-dir", tmp_path / "out", "--target", saved / "target",
            "--draft", saved / "draft", *SMALL])]  # fmt: skip


def test_the_command_learns_and_publishes(
    flags: list[str], saved: Path, recorded: list[Trace], tmp_path: Path, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(learn_command, "plot_learning", PLOT)
    report = tmp_path / "report.json"
    assert main([*flags, "--once", "--publish-seconds", "0", "--json", str(report)]) == 0
    draft = AutoModelForCausalLM.from_pretrained(saved / "draft")
    config = OnlineConfig(update_strategy="interval",
        num_logprobs=8, update_interval=4, steps_per_update=1, batch_size=4, optimizer="adamw", learning_rate=3e-3,
        gate=False, num_assistant_tokens=3,
    )  # fmt: skip
    simulated = simulate(draft, recorded[:8], config)
    found = json.loads(report.read_text())
    assert found["alpha_learned"] == [stats.alpha for stats in simulated.stats]
    assert found["alpha_frozen"] == [stats.alpha for stats in replay_each(draft, recorded[:8], 3)]
    assert (found["requests"], found["skipped"]) == (8, {})
    assert found["versions"][-1]["draft_version"] == 2
    latest = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "latest")
    assert replay_each(latest, recorded, 3) == replay_each(simulated.draft, recorded, 3)
    assert (tmp_path / "out" / "learning.png").read_bytes().startswith(b"\x89PNG")
    assert "8 requests, " in capsys.readouterr().out
    assert facts(tmp_path / "out")["version"] == int(str(found["latest"]).lstrip("v"))


def test_the_command_deploys_and_goes_on_from_what_serves(
    flags: list[str], recorded: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    engine, report = FakeVLLM("http://engine:8000", seed=1), tmp_path / "report.json"
    engine.serve(1000)
    monkeypatch.setattr(deploy.httpx2, "Client", connecting(engine))
    flags += ["--deploy", f"sums:reload={engine.url}", "--by-domain", "--lora-rank", "2", "--publish-seconds", "0"]
    flags += ["--once", "--json", str(report), "--poll-seconds", "0"]
    ran: list[float] = []
    closed: list[object] = []
    for kind in (Deployer, VersionFolder):
        close = lambda self, close=kind.close: (closed.append(type(self)), close(self))  # noqa: E731
        monkeypatch.setattr(kind, "close", close)
    with monkeypatch.context() as patch:
        patch.setattr(Deployer, "run", lambda deployer, seconds: ran.append(seconds))
        assert main([*flags, "--num-requests", "4"]) == 0  # the version of the end is loaded at the end
    assert ran == [0.0]
    assert closed[0] is Deployer and set(closed[1:]) == {VersionFolder}  # engines are left alone first
    found = json.loads(report.read_text())["deployed"]
    assert [(each["domain"], each["serving"], each["watched"]) for each in found] == [("sums", 0, 1)]
    assert "http://engine:8000: version 0 of 'sums' serves, version 1 is watched" in capsys.readouterr().out
    folder = tmp_path / "out" / "sums"
    assert engine.digest == weights_digest(folder / "latest")
    before, after = (load_file(folder / name / "model.safetensors") for name in ("v000000", "latest"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if "_proj" in name} == changed  # by an adapter
    engine.alphas[engine.digest] = 0.2
    look = Deployer.look

    def busy(deployer: Deployer) -> None:
        for _ in range(20):
            engine.serve(10)
            look(deployer)

    monkeypatch.setattr(Deployer, "look", busy)
    written(tmp_path / "collected", recorded[8:])
    assert main(flags) == 0  # another process, which goes on with the watch
    bad = json.loads((folder / "v000001" / "REJECTED.json").read_text())
    assert (bad["serving"], bad["domain"], bad["outcome"]) == (0, "sums", "rolled back")
    assert engine.loads[:2] == ["v000001", "v000000"]
    assert json.loads(report.read_text())["deployed"][0]["decisions"][0]["version"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--deploy", "http://engine"], "--deploy takes reload=URL"),
        (["--deploy", "sums:reload=http://engine"], "--deploy sums: is for --by-domain"),
        (["--by-domain", "--deploy", "reload=http://e"], "LABEL: goes before the way with --by-domain"),
        (["--watch-requests", "99"], "--watch-requests would change nothing without --deploy"),
        (["--by-domain", "--repo-id", "me/draft"], "--repo-id takes one draft"),
        (["--keep", "1"], "At least 2 versions are kept"),
        (["--store", "{tmp}/out"], "is not a store"),
    ],
)
def test_bad_flags_are_refused(
    flags: list[str], changes: list[str], message: str, capsys: Any, tmp_path: Path
) -> None:
    if changes[0] == "--store":
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").touch()
    assert main([*flags, "--once", *[change.format(tmp=tmp_path) for change in changes]]) == 2
    assert message in capsys.readouterr().err


# Told to stop by a real signal, sent as soon as everything that is there is learned.
STOPPED = """
import os, signal, sys
from osd_hf.cli import learn as learn_command
from osd_hf.cli.main import main

class Learner(learn_command.StoreLearner):
    def step(self, *args, **kwargs):
        taken = super().step(*args, **kwargs)
        if not taken:
            os.kill(os.getpid(), signal.SIGTERM)
        return taken

learn_command.StoreLearner = Learner
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_sigterm_ends_it_with_everything_written(flags: list[str], tmp_path: Path) -> None:
    assert learn_command.StoreLearner is StoreLearner
    report = str(tmp_path / "report.json")
    flags += ["--poll-seconds", "60"]  # which the signal cuts short
    environment = {**os.environ, "MPLBACKEND": "agg"}
    done = run_python(STOPPED, *flags, "--json", report, "--publish-seconds", "1000", environment=environment)
    assert done.returncode == 0, done.stderr
    assert "osd-hf: stopping" in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["requests"] == 8
    assert facts(tmp_path / "out")["draft_version"] == 2  # what waited for its time went out at the end
    assert session_module.has_session(tmp_path / "out-state")
