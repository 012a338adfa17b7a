"""The server: answers are the target's own and told as OpenAI's API does, what cannot be given is refused by name."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import models
import openai
import pytest
import torch
from processes import ModuleProcess
from starlette.routing import Route
from starlette.testclient import TestClient
from waiting import LONG

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.cli.main import main
from osd_hf.cli.serve import make_parser, open_assistant, serve_command
from osd_hf.errors import ConfigError
from osd_hf.server.app import MAX_BODY_BYTES, MAX_DOMAINS, Job, Listener, Service, client_left_error, make_app
from osd_hf.server.openai_api import MAX_LOGIT_BYTES, ApiError, RequestReader
from osd_hf.utils.streaming import Rounds

TOKENIZER = models.tokenizer()
TOKENIZER.chat_template = "<s>{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{{ mark }}{% endfor %}"
KEY = {"authorization": "Bearer k", "content-type": "application/json"}
TOKENS = 24  # of an answer


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A tiny pair in double precision, of which each token is a character."""
    config = OnlineConfig(update_strategy="interval", update_interval=10_000, num_assistant_tokens=3)
    assistant = OnlineAssistant(*map(models.double, models.pair()), TOKENIZER, config)
    service = Service(assistant, "tiny", max_queue=1, max_new_tokens=TOKENS)
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_app(service, api_key="k"), headers=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(service: Service) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, of a server that listens."""
    running = Listener("127.0.0.1", 0)
    app, how = make_app(service, api_key="k"), {"shutdown_seconds": 5}
    server = threading.Thread(target=running.run, args=(app,), kwargs=how)
    server.start()
    with openai.OpenAI(base_url=f"{running.address}/v1", api_key="k", max_retries=0) as sdk:
        yield sdk
    running.stop()
    server.join()


def target_of(service: Service) -> Any:
    return service.assistant.target


def alone(service: Service, ids: list[int], **settings: Any) -> str:
    """The text of the target's own answer."""
    settings = {"do_sample": False, "max_new_tokens": TOKENS, **settings}
    output = target_of(service).generate(torch.tensor([ids]), **settings)
    return str(TOKENIZER.decode(output[0, len(ids) :], skip_special_tokens=True))


def chat_ids(*contents: str) -> list[int]:
    """The prompt of a chat whose turns alternate."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return list(TOKENIZER.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"])


def user(text: Any) -> Any:
    return [{"role": "user", "content": text}]


def events(response: httpx2.Response) -> list[Any]:
    """The JSON of a stream, which has to end as it should."""
    *parts, done = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert done == "[DONE]"
    return list(map(json.loads, parts))


def held(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """From now on answers wait when the tokens of a round have been told."""
    put, begun = Rounds.put, set[Rounds]()

    def held_put(self: Rounds, value: torch.Tensor) -> None:
        put(self, value)
        if self in begun:  # the prompt comes first
            wait()
        begun.add(self)

    monkeypatch.setattr(Rounds, "put", held_put)


def settled(service: Service) -> None:
    """Wait until nobody is answered or learned from."""
    for job in list(service.jobs):
        with contextlib.suppress(asyncio.CancelledError):
            job.future.result(LONG)


# --- by OpenAI's own client -----------------------------------------------------------------------------------------


def test_a_chat_is_the_targets_own_whole_and_as_a_stream(service: Service, sdk: openai.OpenAI) -> None:
    expected = alone(service, chat_ids("one", "two", "three"))
    turns: Any = [{"role": r, "content": c} for r, c in (("user", "one"), ("assistant", "two"), ("user", "three"))]
    whole = sdk.chat.completions.create(model="tiny", messages=turns, temperature=0)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(chat_ids("one", "two", "three")), TOKENS)
    options: Any = {"include_usage": True}
    *parts, last = sdk.chat.completions.create(model="tiny", messages=turns, stream=True, stream_options=options)
    assert parts[0].choices[0].delta.role == "assistant"
    assert len(parts) > 4
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert {part.id for part in (*parts, last)} == {last.id}


def test_a_completion_goes_on_with_a_text_or_with_ids(service: Service, sdk: openai.OpenAI) -> None:
    ids = list(TOKENIZER("abc")["input_ids"])
    expected = alone(service, ids, max_new_tokens=16)
    prompts: list[Any] = ["abc", ids, ["abc"], [ids]]
    for prompt in prompts:
        assert sdk.completions.create(model="tiny", prompt=prompt).choices[0].text == expected
    parts = list(sdk.completions.create(model="tiny", prompt="abc", stream=True))
    assert "".join(part.choices[0].text for part in parts) == expected
    assert sdk.models.list().data[0].id == "tiny"


def test_an_answer_ends_before_a_text_of_which_no_stream_tells_anything(service: Service, sdk: openai.OpenAI) -> None:
    text = alone(service, chat_ids("stop"))
    stop = text[7:10]
    assert len(TOKENIZER(stop)["input_ids"]) == 3
    longer = text[6:10]  # comes with the same token, and begins before
    whole = sdk.chat.completions.create(model="tiny", messages=user("stop"), stop=["never", stop, longer])
    assert whole.choices[0].message.content == text[: text.index(longer)]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == text.index(stop) + 3
    parts = list(sdk.chat.completions.create(model="tiny", messages=user("stop"), stop=stop, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text[: text.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


def test_a_client_that_leaves_ends_its_answer_within_a_round(
    service: Service, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(service)
    with monkeypatch.context() as patched:
        held(patched, lambda: next(iter(service.jobs)).is_left.wait(LONG))
        stream = sdk.chat.completions.create(model="tiny", messages=user("leave"), stream=True, max_tokens=200)
        assert next(stream).choices[0].delta.role == "assistant"
        (job,) = service.jobs
        stream.close()
        job.future.result(LONG)
    assert 1 <= len(job.answer.ids) < 20
    expected = alone(service, chat_ids("next"))
    assert sdk.chat.completions.create(model="tiny", messages=user("next")).choices[0].message.content == expected


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin, length", [(0, 1), (0, 4), (5, 1), (5, 7), (12, 3)])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_may_stand_anywhere(
    begin: int, length: int, is_stream: bool, service: Service, client: TestClient
) -> None:
    text = alone(service, chat_ids("anywhere"))
    stop = text[begin : begin + length]
    # The beginning of the other one comes as well, and is told when something else follows it.
    stops = [stop, text[3:5] + "\n"]
    body = {"messages": user("anywhere"), "stop": stops, "stream": is_stream}
    response = client.post("/v1/chat/completions", json=body)
    if is_stream:
        told = "".join(event["choices"][0]["delta"].get("content", "") for event in events(response))
    else:
        told = response.json()["choices"][0]["message"]["content"]
    assert told == text[: text.index(stop)]


def test_a_stop_that_never_comes_keeps_nothing_back(service: Service, client: TestClient) -> None:
    text = alone(service, chat_ids("never"))
    body = {"messages": user("never"), "stop": text[-3:] + "\n", "stream": True}
    parts = events(client.post("/v1/chat/completions", json=body))
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == text
    # Nor does one that stands in the prompt, or begins there.
    body = {"prompt": f"x{text[0]}", "stop": [f"x{text[0]}"], "max_tokens": 4}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == alone(service, TOKENIZER(f"x{text[0]}")["input_ids"], max_new_tokens=4)


def test_an_answer_that_ends_by_itself_says_so(
    service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "end", "max_tokens": 20, "logprobs": 0}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    token = TOKENIZER(text[9])["input_ids"][0]
    monkeypatch.setattr(target_of(service).generation_config, "eos_token_id", token)
    response = client.post("/v1/completions", json=body).json()
    assert response["choices"][0]["finish_reason"] == "stop"
    assert response["choices"][0]["text"] == text[: text.index(text[9]) + 1]
    assert response["usage"]["completion_tokens"] == text.index(text[9]) + 1


def test_log_probs_are_the_targets(service: Service, client: TestClient) -> None:
    ids = list(TOKENIZER("logs")["input_ids"])
    body = {"prompt": "logs", "max_tokens": 6, "logprobs": 3, "temperature": 0}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    told = choice["logprobs"]
    answer = TOKENIZER(choice["text"], add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = target_of(service)(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
    values, tokens = logits.log_softmax(-1).topk(3)
    near = 10 * models.rounding(1)  # they are kept in single precision
    assert told["tokens"] == list(choice["text"])
    assert told["token_logprobs"] == pytest.approx(values[:, 0].tolist(), rel=near, abs=near)
    for row, its_tokens, its_values in zip(told["top_logprobs"], tokens.tolist(), values.tolist(), strict=True):
        assert list(row) == [TOKENIZER.decode([token]) for token in its_tokens]
        assert list(row.values()) == pytest.approx(its_values, rel=near, abs=near)
    assert told["text_offset"] == list(range(6))
    body = {"messages": user("logs"), "max_tokens": 6, "logprobs": True, "top_logprobs": 1, "stop": choice["text"][4]}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    told = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in told if not one["token"].startswith("<")) == choice["message"]["content"]
    assert all(one["top_logprobs"][0] == {n: one[n] for n in ("token", "logprob", "bytes")} for one in told)


def test_a_seed_gives_the_sampled_answer_that_the_target_gives_from_it(service: Service, client: TestClient) -> None:
    body = {"prompt": "seed", "temperature": 1.5, "seed": 7, "max_tokens": TOKENS}
    texts = [client.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(2)]
    settled(service)  # which takes the seed back
    torch.manual_seed(7)
    sampling = {"do_sample": True, "temperature": 1.5, "top_k": 0}
    assert texts == 2 * [alone(service, TOKENIZER("seed")["input_ids"], **sampling)]
    other = client.post("/v1/completions", json=body | {"seed": 8}).json()["choices"][0]["text"]
    assert other != texts[0]


def test_settings_reach_the_target(service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, seen = service.assistant.generate, list[dict[str, Any]]()

    def spied(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return generate(*args, **kwargs)

    monkeypatch.setattr(service.assistant, "generate", spied)
    headers = {"x-osd-learn": "false", "x-osd-domain": "sql"}
    body = {"messages": user("a"), "max_completion_tokens": 3, "max_tokens": 5, "user": "ann"}
    sampled = {"temperature": 0.5, "top_p": 0.9, "top_k": 4}
    client.post("/v1/chat/completions", json=body | sampled, headers=headers).raise_for_status()
    client.post("/v1/chat/completions", json=body).raise_for_status()
    settled(service)
    first, second = seen
    wanted = {"learn": False, "domain": "sql", "owner": "ann", "max_new_tokens": 3, "do_sample": True, **sampled}
    assert {name: first[name] for name in wanted} == wanted
    assert (second["learn"], second["domain"], second["do_sample"]) == (True, None, False)
    assert "sql" in service.assistant.stats_by_domain
    seen.clear()
    for number in range(MAX_DOMAINS + 1):  # labels that clients make up are bounded
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-osd-domain": f"{number}"})
    settled(service)
    assert [kwargs["domain"] for kwargs in seen[-3:]] == [f"{MAX_DOMAINS - 2}", None, None]


# --- the line -------------------------------------------------------------------------------------------------------


async def told(job: Job) -> tuple[str, ApiError | None]:
    """All that a client is told."""
    text = ""
    while isinstance(news := await job.updates.get(), str):
        text += news
    return text, news


def test_requests_wait_in_a_line_that_who_leaves_makes_shorter(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(service)
    gate = threading.Event()
    held(monkeypatch, lambda: gate.wait(LONG))

    async def line() -> None:
        assert service.reader is not None
        asked = service.reader.completion({"prompt": "line", "max_tokens": 4})
        first, second = (service.begin(asked, learn=True, domain=None) for _ in range(2))
        with pytest.raises(ApiError, match="1 requests are waiting") as full:
            service.begin(asked, learn=True, domain=None)
        assert (full.value.status, full.value.code) == (503, "queue_full")
        second.leave(client_left_error())
        assert second.answer.ids == []
        third = service.begin(asked, learn=True, domain=None)
        gate.set()
        expected = alone(service, list(asked.prompt_ids), max_new_tokens=4)
        assert await told(first) == await told(third) == (expected, None)

    asyncio.run(line())


def test_the_end_lets_requests_go_on_for_a_while_and_then_tells_them(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(service)
    other = Service(service.assistant, "tiny", max_queue=1, max_new_tokens=TOKENS)
    client = TestClient(make_app(other, routes=[Route("/more", lambda _: None)]))
    assert client.get("/ready").status_code == 200
    assert any(getattr(route, "path", "") == "/more" for route in client.app.routes)  # type: ignore[attr-defined]
    held(monkeypatch, lambda: next(iter(other.jobs)).is_left.wait(LONG))

    async def end() -> None:
        asked = other.reader.completion({"prompt": "end", "max_tokens": 200})
        job = other.begin(asked, learn=True, domain=None)
        other.stop(LONG)
        with pytest.raises(ApiError) as late:
            other.begin(asked, learn=True, domain=None)
        assert (late.value.status, late.value.code) == (503, "stopping")
        assert not job.is_left.is_set()
        other.cancel_all()
        text, why = await told(job)
        assert why is not None
        assert why.status == 503
        assert len(text) < 20

    asyncio.run(end())
    assert client.get("/ready").json() == {"status": "stopping"}
    whole = {"content": b" " * (MAX_BODY_BYTES + 1), "headers": KEY}
    assert client.post("/v1/completions", **whole).status_code == 503  # before it is read
    assert client.get("/health").status_code == 200
    settled(other)
    service.assistant.resume()


# --- what is refused ------------------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {"messages": user("a"), "max_tokens": 2}


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"n": 2}, "n", "not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0]", "whose `role` is one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "type `text`"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "itself reads"),
        ({"messages": user("\ud800")}, "messages[0].content", "must be a text"),
        ({"temperature": -1}, "temperature", "must be a number from 0"),
        ({"temperature": float("nan")}, "temperature", "must be a number"),
        ({"top_p": 1.5}, "top_p", "from 0 to 1"),
        ({"top_k": 1.5}, "top_k", "an integer"),
        ({"stop": ["a" * 257]}, "stop", "each of 1 to 256"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "opposite of `continue_final_message`"),
        ({"stream_options": {}}, "stream_options", "needs `stream: true`"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"logprobs": True, "stream": True}, "logprobs", "not supported in streams"),
        ({"user": "u" * 257}, "user", "at most 256 characters"),
        ({"chat_template_kwargs": {"mark": "\ud800"}}, "chat_template_kwargs", "surrogate"),
        ({"max_tokens": 1000}, "max_tokens", "The model has 256 positions"),
    ],
)  # fmt: skip
def test_what_cannot_be_given_is_named(
    change: dict[str, Any], param: str, said: str, service: Service, client: TestClient
) -> None:
    content = json.dumps(CHAT | change).encode()
    response = client.post("/v1/chat/completions", content=content)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert said in error["message"]


@pytest.mark.parametrize("prompt", [None, "", "\ud800", [], ["a", "b"], [[]], [1, "a"], [1.5], [64], [-1], 5])
def test_a_prompt_is_one_text_or_its_tokens(prompt: Any, client: TestClient) -> None:
    response = client.post("/v1/completions", content=json.dumps({"prompt": prompt}).encode())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


def test_what_changes_nothing_is_passed_over(service: Service, client: TestClient) -> None:
    body = CHAT | {
        "n": 1, "tools": [], "tool_choice": "auto", "logit_bias": {}, "frequency_penalty": 0.0, "min_p": 0,
        "echo": False, "response_format": {"type": "text"}, "stop": None, "seed": None, "made_up": 1, "model": None,
    }  # fmt: skip
    for temperature in (0, 1e-60, None):
        response = client.post("/v1/chat/completions", json=body | {"temperature": temperature})
        assert response.json()["choices"][0]["message"]["content"] == alone(service, chat_ids("a"), max_new_tokens=2)
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    turns = [{"role": "developer", "content": parts}]
    body = {"messages": turns, "max_tokens": 2, "chat_template_kwargs": {"mark": "M"}}
    response = client.post("/v1/chat/completions", json=body)
    expected = alone(service, TOKENIZER("<s>sbcM")["input_ids"], max_new_tokens=2)
    assert response.json()["choices"][0]["message"]["content"] == expected


def test_one_model_can_be_asked_for_by_name(sdk: openai.OpenAI, client: TestClient) -> None:
    assert sdk.models.retrieve("tiny") == sdk.models.list().data[0]
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.models.retrieve("org/other")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()
    assert client.get("/v1/models/tiny", headers={"authorization": "Bearer K"}).status_code == 401


def test_a_chat_may_hold_tool_calls_and_null_content(service: Service, client: TestClient) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        *user("a"), {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "c", "content": "b"}, {"role": "assistant", "tool_calls": []}, *user("d"),
    ]  # fmt: skip
    body = {"messages": turns, "temperature": 0, "max_tokens": 2}
    response = client.post("/v1/chat/completions", json=body)
    expected = alone(service, TOKENIZER("<s>uaatbaud")["input_ids"], max_new_tokens=2)
    assert response.json()["choices"][0]["message"]["content"] == expected
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{{ messages[1].tool_calls[0].function.arguments.x }}{{ messages[2].tool_call_id }}"
    asked = RequestReader("tools", target_of(service), tokenizer, TOKENS).chat(body)
    assert tokenizer.decode(asked.prompt_ids) == "1c"


def test_minus_one_and_null_are_no_length(service: Service) -> None:
    reader = service.reader
    assert reader is not None
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (-1, None, -1.0):
            assert reader.chat({"messages": user("a"), name: value}).max_new_tokens == TOKENS
        assert reader.chat({"messages": user("a"), name: 5.0}).max_new_tokens == 5
    for value in (-1, None):
        assert reader.completion({"prompt": "a", "max_tokens": value}).max_new_tokens == TOKENS
    assert reader.completion({"prompt": "a"}).max_new_tokens == 16
    assert reader.completion({"prompt": "a" * 250, "max_tokens": -1}).max_new_tokens == 256 - 250


def test_a_last_message_of_the_assistant_is_continued_if_asked(service: Service) -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}e{% endfor %}{{ 'P' if add_generation_prompt }}"
    )
    reader = RequestReader("tiny", target_of(service), tokenizer, TOKENS)
    body = CHAT | {"messages": [*user("a"), {"role": "assistant", "content": "b"}]}
    for more, expected in (({}, "aebeP"), ({"continue_final_message": True, "add_generation_prompt": False}, "aeb")):
        assert TOKENIZER.decode(reader.chat(body | more).prompt_ids) == expected


def test_the_server_has_settings_of_the_chat_template_that_a_request_can_change(service: Service) -> None:
    how: dict[str, Any] = {"max_queue": 0, "max_new_tokens": TOKENS, "chat_template_kwargs": {"mark": "M"}}
    other = Service(service.assistant, "tiny", **how)
    for more, expected in (({}, "uaM"), ({"chat_template_kwargs": {"mark": "N"}}, "uaN")):
        assert other.reader.chat(CHAT | more).prompt_ids == tuple(TOKENIZER(f"<s>{expected}")["input_ids"])
    for tokenizer, kwargs, said in (
        (TOKENIZER, {"tokenize": True}, "what the chat template itself reads"),
        (models.tokenizer(), {"mark": "M"}, "has no chat template"),
    ):
        with pytest.raises(ConfigError, match=said):
            RequestReader("tiny", target_of(service), tokenizer, TOKENS, chat_template_kwargs=kwargs)


def test_a_web_page_can_ask_nothing(service: Service) -> None:
    client = TestClient(make_app(service, hosts=("localhost", "[::1]")), base_url="http://localhost:8000")
    for kind, status in (
        ("application/json", 200), ("Application/JSON; charset=utf-8", 200), ("text/plain", 415), ("", 415),
    ):  # fmt: skip
        content, headers = b'{"prompt": "a", "max_tokens": 1}', {"content-type": kind}
        assert client.post("/v1/completions", content=content, headers=headers).status_code == status
    for host, status in (("evil.example", 400), ("localhost:1", 200), ("[::1]:8000", 200)):
        assert client.get("/v1/models", headers={"host": host}).status_code == status


def test_a_chat_without_a_length_has_what_fits(service: Service, client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json={"messages": user("a" * 240)})
    assert response.json()["usage"]["total_tokens"] == 256
    response = client.post("/v1/chat/completions", json={"messages": user("a" * 255)})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_bodies_that_are_none_and_addresses_that_are_none(client: TestClient) -> None:
    for content, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b" " * (MAX_BODY_BYTES + 1), 413)):
        response = client.post("/v1/completions", content=content)
        assert response.status_code == status
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        response = client.request(method, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]


def test_headers_are_looked_at(client: TestClient) -> None:
    for headers, param in (({"x-osd-learn": "no"}, "x-osd-learn"), ({"x-osd-domain": "d" * 65}, "x-osd-domain")):
        response = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert response.json()["error"]["param"] == param
    for headers in ({"authorization": "Bearer K"}, {"authorization": "k"}, {"authorization": "Bearer ké".encode()}):
        assert client.get("/v1/models", headers=headers).status_code == 401
        assert client.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 401
        assert client.get("/health", headers=headers).status_code == 200


def test_a_tokenizer_without_a_chat_template_and_rows_that_do_not_fit(service: Service) -> None:
    reader = RequestReader("plain", target_of(service), models.tokenizer(), TOKENS)
    with pytest.raises(ApiError, match="has no chat template"):
        reader.chat(CHAT)
    config = target_of(service).config.__class__(vocab_size=MAX_LOGIT_BYTES // 4)  # one row fits
    wide = SimpleNamespace(config=config, generation_config=target_of(service).generation_config)
    with pytest.raises(ApiError, match="may be 1 at most with `logprobs`"):
        RequestReader("wide", wide, models.tokenizer(), TOKENS).completion(
            {"prompt": "a", "logprobs": 1, "max_tokens": 2}
        )


def test_what_fails_is_told_and_logged(
    service: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settled(service)
    monkeypatch.setattr(service.assistant, "generate", lambda *args, **kwargs: 1 / 0)
    for stream in (False, True):
        response = client.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
    assert "ZeroDivisionError" in caplog.text


# --- the command ----------------------------------------------------------------------------------------------------


def test_a_server_that_is_told_to_stop_ends_what_runs_and_saves_its_session(tmp_path: Path, capsys: Any) -> None:
    flags = ["--pair", "bundled", "--port", "0", "--threads", "1", "--state-dir", str(tmp_path / "session")]
    with open(tmp_path / "log", "w") as log:
        command = [sys.executable, "-m", "osd_hf.cli.main", "serve", *flags]
        process = ModuleProcess(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ)
    line = process.stdout.readline()
    assert line.startswith("bundled is served at http://127.0.0.1:"), (tmp_path / "log").read_text()
    with pytest.raises(ConfigError, match="Another server saves to .*session. Choose another folder."):
        serve_command(*make_parser(flags).parse_settings(flags))
    body = {"messages": user("What is net income?"), "stream": True}
    address = f"{line.split()[-1]}/chat/completions"
    with httpx2.stream("POST", address, json=body, timeout=LONG) as response:
        parts = response.iter_lines()
        told = [next(parts)]
        process.terminate()  # by SIGTERM
        told += [part for part in parts if part]
    process.communicate()
    assert process.poll() == 0
    assert told[-1] == "data: [DONE]"
    assert json.loads(told[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"
    with open_assistant(*make_parser(flags).parse_settings(flags)) as assistant:  # as the next one begins
        assert assistant.stats.num_requests == 1
    assert f"continues {tmp_path / 'session'}: 1 requests, draft version 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status", "is_warned"),
    [
        ([], 400, False), (["--host", "localhost"], 400, False), (["--api-key", "k"], 200, False),
        (["--host", "0.0.0.0"], 200, True), (["--host", "0.0.0.0", "--api-key", "k"], 200, False),
    ],
)  # fmt: skip
def test_without_a_key_it_is_for_this_machine_or_says_that_it_is_not(
    flags: list[str], status: int, is_warned: bool, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    statuses = list[int]()

    def looked_at(running: Listener, app: Any, *, on_start: Any, **_: Any) -> None:
        running._socket.close()
        on_start()
        statuses.extend(
            TestClient(app, base_url=f"http://{host}").get("/health").status_code for host in ("x", "localhost")
        )

    monkeypatch.setattr("osd_hf.cli.serve.open_assistant", lambda *_: service.assistant)
    monkeypatch.setattr(Service, "close", lambda _: None)
    monkeypatch.setattr(Listener, "run", looked_at)
    serve_command(*make_parser(flags).parse_settings(["--pair", "bundled", "--port", "0", *flags]))
    assert statuses == [status, 200]
    assert ("without a key" in caplog.text) == is_warned


@pytest.mark.parametrize("key", ["", " ", "k\n\n k", "ké", "a b", "\x01"])
def test_a_key_is_one_that_clients_can_send(key: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(key)
    for flag, value in (("--api-key", key), ("--api-key-file", str(file))):
        settings, _ = make_parser([]).parse_settings(["--pair", "bundled", flag, value])
        with pytest.raises(ConfigError, match="must hold a key of printable ASCII"):
            _ = settings.key
    file.write_text("fine\n")
    assert make_parser([]).parse_settings(["--pair", "bundled", "--api-key-file", str(file)])[0].key == "fine"


def test_a_pair_that_cannot_be_loaded_ends_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--target", str(tmp_path), "--draft", str(tmp_path), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "cannot be loaded" in said
    assert "stopping" not in said
    assert main(["serve", "--pair", "bundled", "--port", "0", "--chat-template-kwargs", '{"tokenize": true}']) == 2
    said = capsys.readouterr().err
    assert "`chat_template_kwargs` must hold what the chat template itself reads" in said
    assert "stopping" not in said
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--pair", "bundled", "--port", port]) == 2
    assert f"The address 127.0.0.1:{port} cannot be listened at" in capsys.readouterr().err
