import io
import random
import string
import sys
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osd_hf import router as routing
from osd_hf.errors import ConfigError, StateError, UnsupportedModelError
from osd_hf.router import CallableRouter, LabelRouter, LanguageRouter, RoutedPrompt, TopicRouter, as_router

VOCAB, WIDTH, OWN = 600, 64, 100
TEMPLATE = [1, 3, 4]


class Target(torch.nn.Module):
    """Embeddings and nothing else: words of a topic resemble each other a little, as in a trained model."""

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(VOCAB, WIDTH, generator=generator)
        rows += 0.6 * torch.randn(VOCAB // OWN, WIDTH, generator=generator).repeat_interleave(OWN, 0)
        self.table = torch.nn.Embedding.from_pretrained(rows.to(dtype))

    def get_input_embeddings(self):
        return self.table


def ids_of(topic, rng, length=20):
    """A prompt: half of it in words that all topics share, half in words of its own topic."""
    shared = [rng.randrange(10, OWN) for _ in range(length // 2)]
    own = [OWN * (1 + topic) + rng.randrange(OWN) for _ in range(length - length // 2)]
    return np.array([*TEMPLATE, *rng.sample(shared + own, length), 5], np.int32)


def traffic(order, seed=0, prefix=()):
    rng = random.Random(seed)
    return [np.concatenate([np.array(prefix, np.int32), ids_of(topic, rng)]) for topic in order]


def route_all(router, prompts):
    return [router.route(RoutedPrompt(ids)) for ids in prompts]


def names_by_topic(order, names):
    got = {}
    for topic, name in zip(order, names, strict=True):
        got.setdefault(topic, []).append(name)
    return got


def commonest(order, names):
    """The name that at least nine in ten prompts of each topic got."""
    out = {}
    for topic, those in names_by_topic(order, names).items():
        out[topic] = max(set(those) - {None}, key=those.count, default=None)
        assert out[topic] is not None
        assert those.count(out[topic]) >= 0.9 * len(those)
    return out


def mixed(topics, n, seed=0):
    order = [i % topics for i in range(n)]
    return random.Random(seed).sample(order, n)


# --- prompts and simple routers -------------------------------------------------------------------------------------


def test_labels_route_no_prompt_and_learn_nothing():
    assert LabelRouter().route(RoutedPrompt(np.array([3, 4]))) is None
    assert LabelRouter().state_dict() == {}
    with pytest.raises(StateError, match="learns nothing"):
        LabelRouter().load_state_dict({"router": "topics"})


def test_a_function_routes_by_the_text():
    tokenizer = models.tokenizer()
    router = CallableRouter(lambda text: "greeting" if "hello" in text else None)
    by_text = {
        text: router.route(RoutedPrompt(np.array(tokenizer(text)["input_ids"]), tokenizer))
        for text in ("hello", "else")
    }
    assert by_text == {"hello": "greeting", "else": None}
    for returned in (3, b"sql", "", ["sql"], False):
        with pytest.raises(ConfigError, match="a name or None"):
            CallableRouter(lambda text, value=returned: value).route(RoutedPrompt(np.array([10]), tokenizer))


def test_what_a_user_may_pass_as_a_router():
    router = LabelRouter()
    assert as_router(None) is None
    assert as_router(router) is router
    wrapped = as_router(str.lower)
    assert isinstance(wrapped, CallableRouter)
    assert wrapped.function is str.lower
    for wrong in ("topics", 3, LabelRouter, {}):
        with pytest.raises(ConfigError, match="router"):
            as_router(wrong)


# --- languages ------------------------------------------------------------------------------------------------------

PROMPTS = {
    "en": "What is the capital of France, and how many people live there?",
    "de": "Was ist die Hauptstadt von Frankreich, und wie viele Menschen leben dort?",
    "fr": "Quelle est la capitale de la France, et combien de personnes y vivent ?",
    "es": "¿Cuál es la capital de Francia y cuántas personas viven allí?",
    "ja": "フランスの首都はどこですか。そこには何人が住んでいますか。",
    "ru": "Какой город является столицей Франции и сколько людей там живёт?",
}
FOREIGN = "Qual è la capitale della Francia e quante persone vivono lì?"
SYSTEM = "You are a helpful assistant. Answer every question in full sentences and stay with the facts."


@pytest.fixture(scope="module")
def chat():
    """A tokenizer with characters for tokens, whose chat template writes roles as plain words, as ChatML does."""
    text = {*string.printable, *"".join(PROMPTS.values()), *FOREIGN}
    tokenizer = models.tokenizer(1000, "".join(sorted(text)))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    return tokenizer


@pytest.fixture(scope="module")
def six():
    pytest.importorskip("py3langid", reason='needs the extra: pip install "osd-hf[language]"')
    return LanguageRouter(PROMPTS)


def spoken(tokenizer, *turns):
    roles = ("system", "user") if len(turns) == 2 else ("user",)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    ids = tokenizer.apply_chat_template(messages)["input_ids"]
    return RoutedPrompt(np.array(ids, np.int32), tokenizer)


@pytest.mark.parametrize("code", PROMPTS)
def test_a_language_is_recognized_behind_the_words_of_a_template(six, chat, code):
    assert six.route(spoken(chat, PROMPTS[code])) == code
    assert six.route(spoken(chat, SYSTEM * 5, PROMPTS[code])) == code


@pytest.mark.parametrize("text", ["", " \n ", "1234 + 5678 =", "ok"])
def test_what_has_no_language_goes_to_the_base_draft(six, chat, text):
    assert six.route(spoken(chat, text)) is None
    assert six.route(spoken(chat, SYSTEM, text)) is None or text.strip() == ""


def test_a_language_that_was_not_asked_for_goes_to_the_base_draft(six, chat):
    assert six.route(spoken(chat, FOREIGN)) is None
    assert LanguageRouter("it").route(spoken(chat, FOREIGN)) == "it"
    assert LanguageRouter().route(spoken(chat, FOREIGN)) == "it"


def test_a_language_needs_text_and_settings_are_checked(six):
    with pytest.raises(ConfigError, match="pass a tokenizer"):
        six.route(RoutedPrompt(np.array([3, 4])))
    for languages, message in ((["xx"], "xx"), ([], "languages")):
        with pytest.raises(ConfigError, match=message):
            LanguageRouter(languages)


def test_without_the_identifier_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(ConfigError, match=r"osd-hf\[language\]"):
        LanguageRouter()


# --- topics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_mixed_topics_are_told_apart(seed):
    order = mixed(4, 600, seed)
    names = route_all(router := TopicRouter(Target()), traffic(order, seed))
    assert len(router.topics) == len(set(commonest(order[200:], names[200:]).values())) == 4
    assert names[200:].count(None) <= 0.03 * 400


def test_one_topic_stays_one_and_keeps_its_newest_prompts():
    router = TopicRouter(Target())
    names = route_all(router, traffic([0] * 400))
    assert router.topics == ["topic-1"]
    assert router.state_dict()["vectors"][0].shape == (routing.MEMORY, WIDTH)
    assert names[:16] == [None] * 16
    assert names[16:].count("topic-1") >= 0.97 * len(names[16:])


def test_a_shift_opens_a_topic_and_what_returns_finds_its_name():
    order = [0] * 300 + [1] * 100 + [0] * 100 + [2] * 100 + [1] * 100
    names = route_all(router := TopicRouter(Target()), traffic(order))
    assert router.topics == ["topic-1", "topic-2", "topic-3"]
    for start, stop, name in [(20, 300, 1), (320, 400, 2), (400, 500, 1), (520, 600, 3), (600, 700, 2)]:
        part = names[start:stop]
        assert set(part) <= {f"topic-{name}", None}
        assert part.count(f"topic-{name}") >= 0.9 * len(part)


def test_a_shared_system_prompt_does_not_drown_the_topics():
    rng = random.Random(5)
    prefix = [rng.randrange(10, VOCAB) for _ in range(300)]
    order = [0] * 150 + mixed(3, 300)
    names = route_all(router := TopicRouter(Target()), traffic(order, prefix=prefix))
    assert len(router.topics) == 3
    got = names_by_topic(order[300:], names[300:])
    assert all(len(set(those) - {None}) == 1 and those.count(None) <= 0.1 * len(those) for those in got.values())


def test_far_from_all_topics_goes_to_the_base_draft_when_there_is_no_room():
    router = TopicRouter(Target(), max_topics=2)
    order = mixed(2, 200) + [2] * 100 + mixed(2, 60)
    names = route_all(router, traffic(order))
    assert router.topics == ["topic-1", "topic-2"]
    assert names[200:300].count(None) >= 90
    got = names_by_topic(order[300:], names[300:])
    assert got[0].count(None) + got[1].count(None) <= 6
    assert len(set(got[0]) - {None}) == len(set(got[1]) - {None}) == 1


@settings(max_examples=25)
@given(order=st.lists(st.integers(0, 4), max_size=150), limit=st.integers(1, 4), seed=st.integers(0, 10))
def test_never_more_topics_than_the_limit_and_names_only_of_topics(order, limit, seed):
    router = TopicRouter(Target(), max_topics=limit)
    for ids in traffic(order, seed):
        name = router.route(RoutedPrompt(ids))
        assert name is None or name in router.topics
        assert router.topics == [f"topic-{i + 1}" for i in range(len(router.topics))]
        assert len(router.topics) <= limit


@settings(max_examples=10)
@given(cut=st.integers(0, 200), seed=st.integers(0, 10))
def test_a_loaded_router_goes_on_as_if_it_had_never_stopped(cut, seed):
    prompts = traffic(mixed(3, 260, seed), seed, prefix=range(10, 40))
    straight = route_all(TopicRouter(Target()), prompts)
    first, second = TopicRouter(Target()), TopicRouter(Target())
    names = route_all(first, prompts[:cut])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    route_all(first, prompts[:30])  # what was saved is a copy
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert names + route_all(second, prompts[cut:]) == straight


def test_states_of_others_are_refused():
    state = TopicRouter(Target()).state_dict()
    with pytest.raises(StateError, match="another target"):
        TopicRouter(Target(seed=1)).load_state_dict(state)
    for wrong in ({}, {"router": "languages"}):
        with pytest.raises(StateError, match="Not the state"):
            TopicRouter(Target()).load_state_dict(wrong)
    router = TopicRouter(Target())
    route_all(router, traffic(mixed(3, 200)))
    with pytest.raises(StateError, match="max_topics"):
        TopicRouter(Target(), max_topics=2).load_state_dict(router.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_routes_like_full_precision(dtype):
    prompts = traffic(mixed(3, 200))
    half, full = (TopicRouter(Target(kind)) for kind in (dtype, torch.float32))
    same = [a == b for a, b in zip(route_all(half, prompts), route_all(full, prompts), strict=True)]
    assert np.mean(same) > 0.97
    assert half.state_dict()["vectors"][0].dtype == torch.float32
    half.load_state_dict(full.state_dict())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_wrapped_targets_give_their_embeddings():
    from peft import LoraConfig, get_peft_model

    target = models.build("llama")
    compiled = torch.compile(target, backend="eager")
    adapted = get_peft_model(target, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    closed = SimpleNamespace(peft_config={}, get_base_model=lambda: compiled)  # passes no attribute on
    for wrapped in (compiled, adapted, closed):
        assert TopicRouter(wrapped).route(RoutedPrompt(models.prompt()[0].numpy())) is None


def test_a_target_without_embeddings_is_refused():
    with pytest.raises(UnsupportedModelError, match="no input embeddings"):
        TopicRouter(models.bigram(0))
    with torch.device("meta"):
        empty = torch.nn.Embedding(8, 4)
    target = Target()
    target.table = empty
    with pytest.raises(UnsupportedModelError, match="meta"):
        TopicRouter(target)


@pytest.mark.parametrize("limit", [0, -1, 2.0, True, None])
def test_the_limit_must_be_a_number_of_topics(limit):
    with pytest.raises(ConfigError, match="max_topics"):
        TopicRouter(Target(), max_topics=limit)


def test_an_empty_prompt_or_unknown_ids_get_the_base_draft_and_teach_nothing():
    router = TopicRouter(Target())
    assert router.route(RoutedPrompt(np.zeros(0, np.int64))) is None
    assert router.route(RoutedPrompt(np.array([VOCAB, VOCAB + 7, -1]))) is None
    assert router.topics == []
    prompts = traffic(mixed(3, 200), prefix=range(10, 40))
    expected = route_all(TopicRouter(Target()), prompts)
    got = []
    for ids in prompts:
        router.route(RoutedPrompt(np.zeros(0, np.int64)))
        got.append(router.route(RoutedPrompt(ids)))
    assert got == expected


def test_a_topic_router_keeps_nothing_of_what_it_may_not_learn_from() -> None:
    router = TopicRouter(models.pair()[0])
    for ids in models.prompts(30):
        router.route(RoutedPrompt(ids[0].numpy()))

    def plain(value: object) -> object:
        if isinstance(value, dict | list | tuple):
            return [plain(v) for v in (value.values() if isinstance(value, dict) else value)]
        return value.tolist() if isinstance(value, torch.Tensor) else value

    before = plain(router.state_dict())
    for ids in models.prompts(60)[30:]:
        router.route(RoutedPrompt(ids[0].numpy(), learn=False))
    assert plain(router.state_dict()) == before
