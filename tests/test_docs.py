"""The README and the documentation: code runs, commands parse, links exist, and tables match their reports."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from saved_pair import save_pair
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

import osd_hf
from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.cli.main import COMMANDS, parse
from osd_hf.loading import Pair
from osd_hf.proxy.recorder import add_fields
from osd_hf.server.app import Service, make_app

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
SKILL = ROOT / "skills/osd-hf/SKILL.md"  # for coding agents
PAGES = [README, SKILL, *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "app/README.md", "recipes/README.md"))]
RESULTS = ROOT / "recipes/results"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DRAFTS = ("0.5B", "0.6B", "160m", "135M")  # in the ids of small models; others are targets
FOREIGN = set(  # programs that are not run here
    "tail cd cp curl git llama-server ln vllm pip bash docker trackio".split()
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Return the fenced blocks of a language, with the number of their first line."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n") + 1, match[1]) for match in found]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub cache with a tiny model for each id that the pages name."""
    pair, cache = save_pair(tmp_path_factory.mktemp("pair")), tmp_path_factory.mktemp("hub")
    for name in {name for page in PAGES for name in re.findall(r'["\s](\w[\w-]*/[\w.-]+)', page.read_text())}:
        place = cache / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs/main").write_text("0" * 40)
        (place / "snapshots").mkdir()
        kind = "draft" if any(size in name for size in DRAFTS) else "target"
        (place / "snapshots" / ("0" * 40)).symlink_to(pair / kind)
    return cache


@pytest.fixture
def stand_ins(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder where Hub ids and bundled pairs are tiny models and answers are short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    target, draft = sorted(hub.glob("models--Qwen--Qwen2.5-*B-Instruct"), key=lambda p: "0.5B" in p.name)

    def tiny(*_: Any, **__: Any) -> Pair:
        folders = [next((place / "snapshots").iterdir()) for place in (target, draft)]
        return Pair(*map(AutoModelForCausalLM.from_pretrained, folders), AutoTokenizer.from_pretrained(folders[0]))

    monkeypatch.setattr("osd_hf.bundled.load_bundled", tiny)
    generate, make, distill = OnlineAssistant.generate, osd_hf.make_draft, osd_hf.distill

    def answer(*args: Any, **how: Any) -> Any:
        return generate(*args, **{**how, "max_new_tokens": 8})

    def short_distill(*, config: Any, dataset: Any, eval_dataset: Any, **how: Any) -> Any:
        config.max_new_tokens, config.num_train_epochs = 4, 1
        return distill(config=config, dataset=dataset[:4], eval_dataset=eval_dataset[:2], **how)

    monkeypatch.setattr(OnlineAssistant, "generate", answer)
    monkeypatch.setattr("osd_hf.assistant.static_target", lambda *_, **__: None)  # compiling takes seconds
    monkeypatch.setattr("osd_hf.recording.TIMED_SECONDS", 0.0)

    def client(**how: Any) -> openai.OpenAI:
        """Return a client of a server inside this process."""
        service = Service(OnlineAssistant(*tiny()), "tiny", max_queue=1, max_new_tokens=8)
        return OpenAI(**how, http_client=TestClient(make_app(service)))

    OpenAI = openai.OpenAI
    monkeypatch.setattr(openai, "OpenAI", client)
    # No draft pays for a target of two layers, so only the arguments are checked.
    monkeypatch.setattr(osd_hf, "make_draft", lambda *args, **how: signature(make).bind(*args, **how) and tiny().draft)
    monkeypatch.setattr(osd_hf, "distill", short_distill)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=relative)
def test_python_of_a_page_runs(page: Path, stand_ins: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for line, code in blocks(page, "python"):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile("\n" * line + code, str(page), "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "text")], ids=relative)
def test_shown_output_of_the_cost_model_is_what_it_prints(page: Path) -> None:
    for (_, code), (_, shown) in zip(blocks(page, "python"), blocks(page, "text"), strict=False):
        if "expected_speedup" in code:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, {})
            assert printed.getvalue() == shown


def shell_lines() -> Iterator[Any]:
    for page in [*PAGES, ROOT / "app/README.md"]:
        for line, code in blocks(page, "sh"):
            for offset, command in enumerate(re.sub(r"\\\n", lambda _: "\x00", code).split("\n")):
                words = shlex.split(command.replace("\x00", " "), comments=True)
                if words:
                    yield pytest.param(words, id=f"{relative(page)}:{line + offset + 1}")


@pytest.mark.parametrize("words", [*shell_lines()])
def test_a_shell_line_parses(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("distill.yaml").write_text(blocks(ROOT / "docs/training.md", "yaml")[0][1])
    words = list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    match words:
        case ["osd-hf", *rest]:
            settings, *_ = parse(rest)[1]
            if rest[0] == "push":  # from Python a draft is saved without a card
                assert settings.pair or settings.target
                assert settings.export or settings.pair or settings.before
        case ["make", *targets]:
            phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert phony and set(targets) <= set(phony[1].split())
        case ["pip", "install", *rest]:
            extras = {extra for word in rest for found in re.findall(r"\[(.*)\]", word) for extra in found.split(",")}
            assert extras <= set(PROJECT["optional-dependencies"])
        case ["python", file, *_] if file.endswith(".py"):
            assert (ROOT / file).is_file() or file == "convert_hf_to_gguf.py"
        case ["python", "-m", module, *_]:
            assert module.startswith(("sglang", "pytest"))
        case [program, *_]:
            assert program in FOREIGN


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=relative)
def test_links_and_named_files_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for address in re.findall(r"\]\(([^)\s]+)\)", text):
        if address.startswith(("http://", "https://")):
            assert re.fullmatch(r"https://[\w.-]+\.[a-z]+(/[\w./%#?=&~+-]*)?", address), address
            continue
        place, _, anchor = address.partition("#")
        there = (page.parent / place).resolve() if place else page
        assert there.exists(), address
        assert not anchor or anchor in anchors(there), address
    for name in re.findall(r"`((?:osd_hf|app|recipes|docs|tests)/[\w./]*)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_the_fields_for_a_log_are_those_that_the_proxy_adds() -> None:
    (_, shown), *others = blocks(ROOT / "docs/vllm.md", "json")
    assert not others
    assert json.loads(shown) == json.loads(
        add_fields(b"{}", {}, is_chat=False, num_logprobs=OnlineConfig().num_logprobs)
    )


def test_each_recipe_has_one_row() -> None:
    rows = re.findall(r"^\| (`[^|]*)\|", (ROOT / "recipes/README.md").read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+\.(?:py|sh))`", row)]
    files = {path.name for path in (ROOT / "recipes").iterdir() if path.suffix in (".py", ".sh")}
    assert sorted(named) == sorted(files - {"common.py"})


def commits_of(names: list[str]) -> str:
    """Return the note that a table from these reports needs. Fail if they were measured with other defaults."""
    commits = dict[str, None]()
    now = json.loads(json.dumps(OnlineConfig().to_dict()))
    for name in names:
        report = json.loads((RESULTS / name).read_text())
        facts = report["provenance"]
        commits |= dict.fromkeys(f["commit"] for f in (facts if isinstance(facts, list) else [facts]))
        assert "defaults" in report, f"{name} does not say with which defaults it was measured"
        settings = report["defaults"]
        if settings.get("compile_target") is False:
            settings["compile_target"] = "auto"  # the same on a CPU
        changed = [key for key in now if key != "seed" and settings.get(key, "none") != now[key]]
        assert not changed, f"{name} was measured before these defaults changed: {', '.join(changed)}"
    return f"Measured at commit {', '.join(f'`{commit}`' for commit in commits)}."


def measured_tables(text: str) -> list[tuple[str | None, str]]:
    """Return the comment before each table of measurements, and the text up to the next table or heading."""
    found = []
    for table in re.finditer(r"(?:^<!-- (.*?) -->\n)?((?:^\|.*\n)+)", text, re.MULTILINE):
        if (table[1] or "").startswith("report") or re.search(r"\| [*+-]*\d+\.\d\d", table[2]):
            after = re.split(r"^(?:#|\||<!-- report)", text[table.end() :], maxsplit=1, flags=re.MULTILINE)[0]
            found.append((table[1], " ".join(after.split())))
    return found


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_a_table_names_its_report_and_the_defaults_are_unchanged(page: Path) -> None:
    for comment, after in measured_tables(page.read_text()):
        assert comment is not None and comment.startswith("report: "), f"a table without its report, before: {after}"
        names = comment.removeprefix("report: ").split()
        expected = commits_of(names)
        assert expected in after, f"Write below the table of {names}: *{expected}*"


def test_the_readme_begins_with_what_to_type() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    first = "\n".join(lines[:45])
    assert all(text in first for text in ("make quickstart", "pip install", "OnlineAssistant("))
    assert len([*(ROOT / "docs").rglob("*.md")]) <= 16, "15 pages, and the index"


def test_an_agent_finds_the_skill_and_in_it_what_there_is() -> None:
    text = SKILL.read_text()
    assert len(text.splitlines()) < 80
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["name"] == SKILL.parent.name
    assert 0 < len(head["description"]) <= 1024
    assert set(head) == {"name", "description"}
    assert set(re.findall(r"`osd-hf ([a-z]+)", text)) <= COMMANDS.keys()


def test_the_reference_has_every_public_name_and_command() -> None:
    page = (ROOT / "docs/api.md").read_text()
    named = set(re.findall(r"auto(?:class|function):: osd_hf\.(\w+)$", page, re.MULTILINE))
    assert named == {*osd_hf.__all__, "DraftRound"}
    assert "```{commands}" in (ROOT / "docs/commands.md").read_text()


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


def test_versions_are_those_that_the_tests_run_with() -> None:
    newest, lowest = (
        dict(re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / name).read_text(), re.MULTILINE))
        for name in ("constraints.txt", "constraints-lowest.txt")
    )
    expected = f"transformers {lowest['transformers']} to {newest['transformers']}, torch {newest['torch']}"
    for page in (README, ROOT / "docs/guarantees.md"):
        assert expected in page.read_text()
        assert f"Python {PROJECT['requires-python'].removeprefix('>=')}" in page.read_text()


def test_the_containers_run_existing_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"\$\{(\w+)[^}]*\}", r"\1", (ROOT / "docs/compose.yaml").read_text())
    compose = yaml.safe_load(text)
    services, run = compose["services"], set()
    for service in services.values():
        for volume in service.get("volumes", []):
            name = volume.partition(":")[0]
            assert name in compose["volumes"] or (ROOT / "docs" / name).is_file()
        assert {entry["source"] for entry in service.get("configs", [])} <= set(compose["configs"])
        assert set(service.get("depends_on", {})) <= set(services)
        match service.get("command"):
            case ["osd-hf", *words]:
                asked, (settings, *_) = parse(words)
                run.add(asked.__name__.removesuffix("_command"))
                settings.check()
            case [*words]:
                assert json.loads(words[-1])["model"] in services["export"]["command"]
    assert run == {"push", "proxy", "learn"}
    configs = {name: yaml.safe_load(entry["content"]) for name, entry in compose["configs"].items()}
    scraped = {job["job_name"]: job["static_configs"][0]["targets"] for job in configs["prometheus"]["scrape_configs"]}
    assert set(scraped) <= set(services)
    assert f"learner:{parse(services['learner']['command'][1:])[1][0].metrics_port}" in scraped["learner"]
    assert set(re.findall(r"http://(\w+):\d+", text)) - {"localhost"} <= set(services)


def test_the_tables_of_models_are_made_from_the_code() -> None:
    module = runpy.run_path(str(ROOT / "docs/models_tables.py"))
    assert module["tables"]() in (ROOT / "docs/models.md").read_text(), "run `python docs/models_tables.py`"
