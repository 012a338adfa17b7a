"""The app with SmolLM2: free text in several turns and no domains; a tiny pair is in its place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
import torch
from saved_pair import save_pair
from test_app_strangers import parsed
from waiting import LONG

from osd_hf.cli.app import app_command
from osd_hf.errors import ConfigError
from osd_hf.models import load_model
from osd_hf_app import launch, view
from osd_hf_app.page import build
from osd_hf_app.pair import NAME, ServedPair, everyday_prompts, smollm2_pair
from osd_hf_app.service import Service
from osd_hf_app.sessions import Answer, Batch, Session, Settings

OF_DOMAINS = ("domain", "shown")
SHORT = Settings(max_new_tokens=8, remember=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is once the model was fetched, with its draft."""
    folder = save_pair(tmp_path_factory.mktemp("cache"))
    (folder / "target").rename(folder / NAME)
    return folder


@pytest.fixture(autouse=True)
def small_draft(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd_hf_app.pair.load_layers", lambda *_: load_model(str(cache / "draft"), dtype="float32"))


@pytest.fixture
def service(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("OSD_HF_CACHE", str(cache))
    made = Service(ServedPair(smollm2_pair(), is_smollm2=True), config={"update_strategy": "manual"}, threads=1)
    yield made
    made.sessions.close()


def ended(session: Session) -> None:
    with session.changed:
        assert session.changed.wait_for(lambda: session.job is None, LONG)


def asked(service: Service, session: Session, prompt: str) -> Answer:
    answer = service.ask(session, prompt, SHORT)
    ended(session)
    assert answer.error is None
    return answer


def components(service: Service) -> dict[str, Any]:
    """What the page begins with, by name."""

    async def built() -> gr.Blocks:
        return build(service)

    page = asyncio.run(built())
    page.close()
    return {getattr(b, "elem_id", None) or getattr(b, "label", None): b for b in page.blocks.values()}


def test_the_flag_serves_what_the_cache_has(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[ServedPair] = []

    def made(pair: ServedPair, **settings: Any) -> Any:
        served.append(pair)
        raise ConfigError("enough")

    monkeypatch.setenv("OSD_HF_CACHE", str(cache))
    monkeypatch.setattr(launch, "Service", made)
    with pytest.raises(ConfigError, match="enough"):
        launch.launch(parsed("--pair", "smollm2", "--public"))  # type: ignore[arg-type]
    (pair,) = served
    assert pair.name == NAME
    assert (pair.is_bundled, pair.domains, pair.target.dtype) == (False, (), torch.float32)
    assert pair.target.config.name_or_path == str(cache / NAME)
    with pytest.raises(ConfigError, match="--pair and --target exclude each other"):
        app_command(parsed("--pair", "smollm2", "--target", "a"))


def test_two_turns_of_free_text(service: Service) -> None:
    session, pair = service.sessions.open(None), service.pair
    first, second = asked(service, session, "SELECT a song."), asked(service, session, "Why?")
    ids = pair.encode("Why?", 8, [("SELECT a song.", first.text)])
    assert f"[user]SELECT a song.[assistant]{first.text}[user]Why?[answer]" in pair.tokenizer.decode(ids[0])
    own = pair.target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    plain = pair.target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, repetition_penalty=1.0
    )
    assert not torch.equal(plain, own)  # it does not run in circles as it would
    assert second.text == pair.tokenizer.decode(pair.new_tokens(ids, own), skip_special_tokens=True)
    # One draft learns from all of it, whatever a prompt is like, and nothing says otherwise.
    assert service.sessions.shared.assistant.drafts.domains in ((), (None,))
    shown = view.transcript(session)
    assert "sql" not in shown
    assert "general" not in shown
    assert f'<div class="osd-figures">{second.stats and second.stats.emitted} tokens' in shown
    told = service.sessions.shared.statistics()
    assert (told["requests"], told["by_domain"], told["pair"]) == (2, {}, NAME)
    assert view.domain_table(service.sessions.shared).count("<tr>") == 2  # the heads, and all


def test_everyday_prompts_are_suggested_and_sent(service: Service) -> None:
    session = service.sessions.open(None)
    assert service.pair.samples("", 2) == everyday_prompts()[:2]
    batch = service.send(session, "", 2, SHORT)
    ended(session)
    assert isinstance(batch, Batch)
    assert [answer.prompt for answer in batch.answers] == everyday_prompts()[2:4]
    assert '<div class="osd-you">2 prompts</div>' in view.transcript(session)
    count = len(everyday_prompts())
    assert service.pair.samples("", count)[-4:] == everyday_prompts()[:4]  # then they come again
    with pytest.raises(ConfigError, match="prompts of no particular domain, got 'sql'"):
        service.send(session, "sql", 2, SHORT)


def test_the_page_says_which_model_answers_and_nothing_of_domains(service: Service) -> None:
    found = components(service)
    assert {name: found[name].visible for name in OF_DOMAINS} == dict.fromkeys(OF_DOMAINS, False)
    hint = found["chat"].value
    assert f"{NAME} by Hugging Face (Apache License 2.0)" in hint
    assert "SQL" not in hint
    assert "domain" not in found["curves"].value
    assert found["Remember the earlier turns"].value is True
    values = [found[f"{name}, if sampled"].value for name in ("Temperature", "Top-p")]
    assert values == [0.2, 0.9]
