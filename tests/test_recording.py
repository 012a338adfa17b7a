from typing import Any

import models
import numpy as np
import pytest
import torch

from osd_hf import Trace, capture_traces, replay
from osd_hf.errors import ConfigError
from osd_hf.recording import record_traces


def recorded(target: Any, prompts: list[list[int]], **settings: Any) -> list[Trace]:
    return list(record_traces(target, prompts, **{"max_new_tokens": 12, **settings}))


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_recordings_are_what_the_target_answers(architecture: str) -> None:
    target, draft = models.pair(architecture)
    prompts = models.prompts(5)
    first = target.generate(prompts[0], attention_mask=torch.ones_like(prompts[0]), do_sample=False, max_new_tokens=12)
    target.generation_config.eos_token_id = [int(first[0, -5]), 9]
    captured: list[Trace] = []
    with capture_traces(target, captured.append):
        for ids in prompts:
            kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
            target.generate(ids, assistant_model=draft, **kwargs)
    for batch_size in (1, 3):
        for ours, theirs in zip(
            recorded(target, [p[0].tolist() for p in prompts], batch_size=batch_size), captured, strict=True
        ):
            assert ours.completion_ids.tolist() == theirs.completion_ids.tolist()
            assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist()
            assert ours.top_ids[:, :3].tolist() == theirs.top_ids[:, :3].tolist()
            np.testing.assert_allclose(np.exp(ours.kept_logprobs()), np.exp(theirs.kept_logprobs()), atol=1e-3)
            assert (ours.decoder_prompt_ids is None) == (theirs.decoder_prompt_ids is None)
            assert ours.rounds == ()
            assert ours.sampling["max_new_tokens"] == theirs.sampling["max_new_tokens"] == 12
            assert ours.sampling["eos_token_id"] == theirs.sampling["eos_token_id"]
    assert len(captured[0]) < 12


def test_an_empty_prompt_is_named() -> None:
    with models.ForwardCounter(target := models.build()) as forwards:
        with pytest.raises(ConfigError, match="Prompt 1 is empty"):
            recorded(target, [[3], []])
        assert forwards.count == 0
    assert recorded(target, []) == []


def test_a_target_answers_without_its_processors_which_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    target = models.build()
    plain = recorded(target, [[3, 4, 5]])[0].completion_ids.tolist()
    settings = target.generation_config
    settings.repetition_penalty, settings.guidance_scale = 5.0, 2.0
    assert recorded(target, [[3, 4, 5]])[0].completion_ids.tolist() == plain
    assert target.generation_config is settings

    def fails(**_: Any) -> Any:
        assert target.generation_config.repetition_penalty is None
        raise RuntimeError("no memory")

    monkeypatch.setattr(target, "generate", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        recorded(target, [[3, 4, 5]])
    assert target.generation_config is settings
    assert (settings.repetition_penalty, settings.guidance_scale) == (5.0, 2.0)


def test_sampled_recordings_replay_as_the_target_sampled_them(caplog: pytest.LogCaptureFixture) -> None:
    target, draft = models.pair()
    prompts, how = [p[0].tolist() for p in models.prompts(8)], {"temperature": 0.7, "top_k": 9, "top_p": 0.9}
    traces = recorded(target, prompts, sampling=how, seed=1, num_logprobs=None)
    assert all(trace.is_sampled and how.items() <= trace.sampling.items() for trace in traces)
    assert replay(target, traces).alpha > 0.999 > replay(draft, traces).alpha
    assert "rebuild" not in caplog.text
    ids = [trace.completion_ids.tolist() for trace in traces]
    assert ids == [t.completion_ids.tolist() for t in recorded(target, prompts, sampling=how, seed=1)]
    assert ids != [t.completion_ids.tolist() for t in recorded(target, prompts, sampling=how, seed=2)]
    # Only tokens of the nucleus are sampled.
    for trace in traces:
        probs = torch.from_numpy(np.exp(trace.kept_logprobs())).pow(1 / 0.7)
        ranks = (probs > probs.gather(1, torch.from_numpy(trace.completion_ids.astype(np.int64))[:, None])).sum(1)
        assert int(ranks.max()) < 9
