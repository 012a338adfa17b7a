"""Serves and saves in children that are killed at random moments; says what each found and answered, as JSON lines."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
from pathlib import Path
from typing import Any

import models
import torch

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.learning import requests, session

CONFIG = OnlineConfig(update_strategy="interval",
    update_interval=2, steps_per_update=1, batch_size=4, num_logprobs=8, optimizer="adamw", learning_rate=3e-3,
)  # fmt: skip
PROMPTS = models.prompts(9)


def answer(generate: Any, number: int, **kwargs: Any) -> list[int]:
    ids = PROMPTS[number % len(PROMPTS)]
    output = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, **kwargs)
    return [int(token) for token in output[0, ids.shape[1] :]]


def state(assistant: OnlineAssistant) -> dict[str, Any]:
    drafts, lesson = assistant.drafts, assistant.drafts.requests[None].state_dict()
    return {
        "requests": assistant.stats.num_requests,
        "observed": lesson["observed"],
        "kept": sum(map(len, lesson["traces"].values())),
        "serving": drafts.serving_version(),
        "version": drafts.version,
        "decided": [decision.version for decision in assistant.decisions],
        "promoted": [decision.version for decision in assistant.decisions if decision.outcome == "promoted"],
        "finite": all(
            bool(p.isfinite().all()) for model in (drafts.model(None), drafts.updater(None).master)
            for p in model.parameters()
        ),
    }  # fmt: skip


def serve(pair: Any, folder: Path, out: int) -> None:
    def say(**facts: Any) -> None:
        os.write(out, (json.dumps(facts) + "\n").encode())

    assistant = OnlineAssistant(*pair, config=CONFIG, autosave=folder)
    if session.has_session(folder):
        assistant.load_state(folder)
    say(state=state(assistant))
    number = assistant.stats.num_requests
    while True:
        say(number=number, answer=answer(assistant.generate, number))
        number += 1


def newest(folder: Path) -> str:
    return max((path.name for path in folder.glob("state-*")), default="")


def main(folder: Path, kills: int) -> None:
    requests.HOLD_BACK_EVERY = 2  # enough to judge by, sooner; in this process and its children
    session.UPDATES_BETWEEN_SAVES = 1
    pair = models.pair(noise=0.2)
    print(json.dumps({"alone": [answer(pair[0].generate, i) for i in range(len(PROMPTS))]}), flush=True)
    with OnlineAssistant(*pair, config=CONFIG, autosave=folder.with_name("warm")) as warm:  # children begin at once
        for i in range(4):
            answer(warm.generate, i)
    moments = random.Random(0)
    for life in range(kills):
        # Every other life goes on until it has saved, however slow the disk is; the others die at any moment.
        before = newest(folder) if life % 2 else None
        begin, end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(begin)
            try:
                serve(pair, folder, end)
            finally:
                os._exit(1)
        os.close(end)
        said, answers = b"", moments.randrange(6)
        while (said.count(b"\n") <= answers or (life % 2 and newest(folder) == before)) and (
            part := os.read(begin, 1 << 16)
        ):
            said += part
        select.select([], [], [], moments.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        while part := os.read(begin, 1 << 16):
            said += part
        os.close(begin)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        lines = [json.loads(line) for line in said.decode().splitlines()]
        print(json.dumps({"killed": killed, "said": lines}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
