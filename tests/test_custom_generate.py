"""What a draft's repo carries for `custom_generate`: the same answers and the same rounds as this package's own."""

import ast
import gc
import logging
import subprocess
import sys
import tomllib
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import models
import pytest
import torch
from test_lossless import transitions_fit
from transformers import AutoModelForCausalLM, LogitsProcessorList, MinNewTokensLengthLogitsProcessor

from osd_hf import ConfigError, OnlineAssistant, OnlineConfig, Trace
from osd_hf.hub.custom_generate import LEAST
from osd_hf.hub.push import save_draft
from osd_hf.hub.standalone import standalone, write_custom_generate

CONFIG = OnlineConfig(update_strategy="manual", text_scope="request")


class Carried:
    """The file, as transformers runs it, and what it drafts."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.module: Any = sys.modules[models.build().load_custom_generate(folder, trust_remote_code=True).__module__]
        self.rounds: list[tuple[int, int, int]] = []  # tokens drafted, accepted, emitted
        generator = self.module._Generator
        propose, judge = generator.get_candidates, generator.update_candidate_strategy
        drafted: list[int] = []

        def get_candidates(this: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
            found = propose(this, ids, **kwargs)
            drafted[:] = found[0][0, ids.shape[1] :].tolist()
            return found

        def update_candidate_strategy(this: Any, ids: torch.Tensor, *args: Any) -> None:
            emitted = ids[0, this._seen :].tolist()
            same = [a == b for a, b in zip(drafted, emitted, strict=False)]
            self.rounds.append((len(drafted), (*same, False).index(False), len(emitted)))
            judge(this, ids, *args)

        generator.get_candidates, generator.update_candidate_strategy = get_candidates, update_candidate_strategy

    def generate(self, target: Any, ids: torch.Tensor, draft: Any = None, **settings: Any) -> Any:
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 16, **settings}
        self.rounds.clear()
        return target.generate(
            ids, custom_generate=self.folder, trust_remote_code=True, assistant_model=draft, **settings
        )


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Carried]:
    folder = tmp_path_factory.mktemp("carried")
    write_custom_generate(folder / "repo", None)
    with models.code_of_repos_in(folder / "modules"):
        yield Carried(folder / "repo")


@pytest.fixture
def timed(carried: Carried, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets forwards of the file's target and draft take so many seconds, and nothing else any."""
    return lambda seconds: monkeypatch.setattr(carried.module, "clock", models.ForwardTime(seconds))


def requests_of(target: Any, number: int) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Plain requests, long and penalized ones, and one that ends early; for a decoder one that is padded."""
    for i, ids in enumerate(models.prompts(number)):
        mask = torch.ones_like(ids)
        settings: dict[str, Any] = {"max_new_tokens": 2 * models.WINDOW, "attention_mask": mask}
        if i % 3 == 1:
            settings["repetition_penalty"] = 1.3
        if i % 3 == 2 and not target.config.is_encoder_decoder:
            ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
            settings["attention_mask"] = (torch.arange(ids.shape[1]) >= 4).long()[None]
        if i % 4 == 3:
            answer = target.generate(ids, do_sample=False, **settings)
            settings["eos_token_id"] = int(answer[0, -9])
        yield ids, settings


@pytest.mark.parametrize(
    ("seconds", "number"), [(0.1, 3), (3.0, 2), *(pytest.param(s, 100, marks=pytest.mark.slow) for s in (0.1, 3.0))]
)
@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_answers_and_rounds_are_those_of_the_package(
    architecture: str, number: int, seconds: float, carried: Carried, timed: Any
) -> None:
    target = models.build(architecture, **models.SHALLOW[architecture])
    target, draft = models.double(target), models.double(models.draft_of(target, noise=0.05))
    assistant = OnlineAssistant(target, draft, config=CONFIG)
    assert assistant.drafting is not None
    assistant.drafting.clock = models.ForwardTime({target: 1.0, assistant.draft: seconds})
    timed({target: 1.0, draft: seconds})
    counted = 0
    for ids, settings in requests_of(target, number):
        traces: list[Trace] = []
        theirs = assistant.generate(ids, do_sample=False, on_trace=traces.append, **settings)
        ours = carried.generate(target, ids, draft, **settings)
        assert ours.tolist() == theirs.tolist() == target.generate(ids, do_sample=False, **settings).tolist()
        rounds = [(r.num_drafted, r.num_accepted, r.num_emitted) for r in traces[0].rounds]
        assert carried.rounds == rounds or (not carried.rounds and {r[0] for r in rounds} == {0})
        counted += sum(accepted for _, accepted, _ in carried.rounds)
    assert counted > 0 or seconds > 1


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN")
def test_the_file_computes_by_the_kernels_of_the_package(
    carried: Carried, timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, products = carried.module, list[torch.Tensor]()
    own, (target, draft), ids = file._onednn, models.pair(), models.prompts(1)[0]

    def noted(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        products.append(weight)
        return own(states, weight, bias)

    for name, value in {"_timed": lambda: True, "LEAST_WEIGHTS": 1, "_onednn": noted}.items():
        monkeypatch.setattr(file, name, value)
    timed({target: 1.0, draft: 0.1})
    alone, theirs = (
        target.generate(ids, do_sample=False, max_new_tokens=16).tolist(),
        set(map(id, target.parameters())),
    )
    assert carried.generate(target, ids, draft).tolist() == alone
    assert theirs & set(map(id, products))
    products.clear()
    assert carried.generate(target, ids, draft).tolist() == alone
    assert products and not theirs & set(map(id, products))  # packed
    assert {type(m) for m in target.modules() if isinstance(m, torch.nn.Linear)} == {torch.nn.Linear}
    layer, states = torch.nn.Linear(6, 4), torch.randn(3, 6)
    gradients = []
    for kind in (torch.nn.Linear, file.Linear):  # as for somebody who learns meanwhile
        layer.__class__ = kind
        gradients.append(torch.autograd.grad(layer(states).square().sum(), list(layer.parameters())))
    assert all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))


def test_each_token_of_sampled_answers_is_drawn_as_the_target_draws_it(carried: Carried, timed: Any) -> None:
    target, draft = models.bigram(0), models.bigram(1)
    timed({target: 1.0, draft: 0.1})
    answers, drafted = [], 0
    for start in range(5):
        settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 80}
        answers.append(carried.generate(target, torch.tensor([[start]]), draft, **settings)[0].tolist())
        drafted += sum(count for count, _, _ in carried.rounds)
    assert transitions_fit(answers, target.by_token.detach().double().softmax(-1).numpy()) > 1e-3
    assert drafted > 50


def test_an_answer_ends_at_the_token_of_its_stop_string(carried: Carried, timed: Any) -> None:
    target, tokenizer = models.build(), models.tokenizer()
    draft = models.draft_of(target, noise=0.0)
    timed({target: 1.0, draft: 0.1})
    for ids in models.prompts(2):
        answer = target.generate(ids, do_sample=False, max_new_tokens=4, attention_mask=torch.ones_like(ids))
        word = tokenizer.convert_ids_to_tokens(int(answer[0, ids.shape[1] + 3]))
        stopped = carried.generate(target, ids, draft, stop_strings=[word], tokenizer=tokenizer)
        assert stopped.shape[1] <= answer.shape[1]
        assert stopped.tolist() == answer[:, : stopped.shape[1]].tolist()


def state_of(model: Any) -> Any:
    return type(model), dict(vars(model)), dict(vars(type(model))), model.generation_config.to_dict(), model.config


class Broken:
    """A streamer that fails at the second round."""

    def __init__(self) -> None:
        self.left = 2

    def put(self, ids: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("gone")

    def end(self) -> None:
        pass


def test_nothing_is_left_on_the_target(carried: Carried) -> None:
    target, draft = models.pair()
    before, ids = state_of(target), models.prompt()
    carried.generate(target, ids, draft)
    assert carried.rounds
    with pytest.raises(OSError, match="gone"):
        carried.generate(target, ids, draft, streamer=Broken())
    with pytest.raises(ValueError, match="The draft has 32 tokens, the model 64"):
        carried.generate(target, ids, models.build(vocab_size=32))
    assert state_of(target) == before
    known = weakref.ref(draft)
    del draft
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("forwards", [0, 3])
@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_a_draft_that_fails_costs_no_answer(
    architecture: str, forwards: int, carried: Carried, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = models.pair(architecture)
    left = [forwards]

    def fail(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no memory")

    draft.register_forward_pre_hook(fail)
    ids = models.prompt()
    alone = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(carried.generate(target, ids, draft, max_new_tokens=24), alone)
    assert left[0] == -1  # it is asked no more
    assert ["goes on without it" in record.message for record in caplog.records] == [True]
    assert "no memory" in caplog.text


def test_what_cannot_be_drafted_for_is_answered_by_the_target_alone(carried: Carried) -> None:
    target, draft = models.pair()
    ids = models.prompt()
    cache = target(ids[:, :4]).past_key_values
    own = LogitsProcessorList([type("Own", (MinNewTokensLengthLogitsProcessor,), {"__module__": "own"})(1, 2, [2])])
    with models.ForwardCounter(draft) as forwards:
        for given, settings in (
            (ids.repeat(2, 1), {}), (ids, {"num_beams": 2}), (ids, {"logits_processor": own}),
            (ids, {"past_key_values": cache}),
        ):  # fmt: skip
            settings = {"max_new_tokens": 4, **settings}
            ours = carried.generate(target, given, draft, **settings)
            if "past_key_values" in settings:
                cache.crop(-(cache.get_seq_length() - 4))
            mask = torch.ones_like(given)
            assert torch.equal(ours, target.generate(given, attention_mask=mask, do_sample=False, **settings))
    assert forwards.count == 0


# --- the repo -------------------------------------------------------------------------------------------------------


def test_a_saved_draft_brings_itself(carried: Carried, tmp_path: Path) -> None:
    target, draft = models.pair()
    save_draft(tmp_path / "draft", draft, models.tokenizer(), custom_generate=True)
    assert "custom_generate=" in (tmp_path / "draft/README.md").read_text()
    ids = models.prompt()
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
    how = {"custom_generate": str(tmp_path / "draft"), "trust_remote_code": True}
    alone = target.generate(ids, **settings)
    assert torch.equal(target.generate(ids, **how, **settings), alone)
    module = sys.modules[target.load_custom_generate(tmp_path / "draft", trust_remote_code=True).__module__]
    (own,) = module._drafts[target].values()
    with models.ForwardCounter(own) as forwards:
        assert torch.equal(target.generate(ids, **how, **settings), alone)
    assert forwards.count > 0
    # Loaded with its code, the draft has this as its own `generate`, also when another one's loop calls it.
    itself = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", trust_remote_code=True)
    assert torch.equal(itself.generate(inputs=ids, **settings), draft.generate(ids, **settings))
    assert itself not in module._drafts


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_carries_no_code(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(models.pair()[1], peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"needs the whole draft, got an adapter.*merge_and_unload"):
        save_draft(tmp_path / "draft", adapted, custom_generate=True)
    assert not (tmp_path / "draft").exists()


def test_the_file_needs_nothing_but_transformers_and_torch() -> None:
    nodes = list(ast.walk(ast.parse(standalone("me/draft"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    needed = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    tried = {alias.name for node in nodes if isinstance(node, ast.Try) for s in node.body if isinstance(s, ast.Import)
             for alias in s.names}  # fmt: skip
    assert needed - tried == {"torch", "transformers"}
    assert tried == {"psutil"}  # which says whether there is memory for a second copy of weights


def test_the_file_reads_like_the_package(tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    write_custom_generate(tmp_path, "me/draft")
    folder = tmp_path / "custom_generate"
    text = (folder / "drafting.py").read_text()
    assert text == standalone("me/draft") and '"""' in text.split("import", 1)[0]
    # What transformers parses at each call is the words that say what is done, and next to nothing else.
    assert len(ast.parse((folder / "generate.py").read_text()).body) == 3
    root = Path(__file__).parent.parent
    for command in (["format", "--check"], ["check", "--ignore", "RUF100,SIM102"]):
        settings = ["--config", str(root / "pyproject.toml"), "--no-cache", str(folder)]
        done = subprocess.run([sys.executable, "-m", "ruff", *command, *settings], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert 'REPO: str | None = "me/draft"' in text
    assert "osd_hf." not in text.replace("osd_hf 0.1.0", "")


@pytest.mark.parametrize("version", ["5.19.1", "4.57.0", "5.20.0", "5.100.0.dev0", "6.0"])
def test_an_older_transformers_is_refused_in_words(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    monkeypatch.setitem(sys.modules, "drafting", file := ModuleType("drafting"))
    if version[:4] in ("5.19", "4.57"):
        with pytest.raises(ImportError, match=f"needs transformers 5.20 or newer, and {version} is installed"):
            exec(standalone(), vars(file))
    else:
        exec(standalone(), vars(file))


def test_the_requirement_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert f"transformers>={'.'.join(map(str, LEAST))},<6" in project["dependencies"]
