"""A batch of requests that are answered together, each as it would be alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from osd_hf.capture.guards import undrafted
from osd_hf.capture.request import Binding, Decoding, Request, Round, bears_any_token, hand_over
from osd_hf.drafting.batch import (
    BatchDraft,
    BatchPace,
    BatchRound,
    Candidates,
    Ragged,
    Verdict,
    first_columns,
    hindrance,
    judged,
)
from osd_hf.drafting.costs import PROMPT, RoundTime
from osd_hf.drafting.exactness import given_arguments, has_adapter_per_row, limits_of, log_failed_draft, log_once
from osd_hf.drafting.generator import LeanDrafting
from osd_hf.drafting.loop_inputs import WatchedProcessors, of_row
from osd_hf.drafting.text import Guess, RequestText, TextIndex
from osd_hf.logits_processors import ReplayedProcessor, RowProcessors
from osd_hf.models import vocab_size_of
from osd_hf.trace import num_accepted
from osd_hf.utils.kernels import fast_kernels

MOST_GUESSED, LEAST_CHANCE = 16, 0.1  # tokens of past text in a round, and how likely the last one is right
NO_TOKEN = 1 << 40  # stands for no token of any vocabulary


@dataclass(eq=False)
class _Row:
    """One request of a batch, as far as it has come."""

    request: Request
    padding: int
    text: list[int]  # without padding
    begins: int  # tokens of it that are the prompt
    past: RequestText | None = None  # what it may be continued by
    guesses: list[Guess] = field(default_factory=list)  # how that would go on now
    end: int | None = None  # tokens of the answer, once it has ended
    counts: list[int] = field(default_factory=lambda: [0, 0])  # accepted and examined candidates

    @property
    def emitted(self) -> int:
        return len(self.text) - self.begins

    @property
    def length(self) -> int:
        """Tokens with padding."""
        return self.padding + len(self.text)


class BatchRequest(Decoding):
    """
    What is gathered of a batch between its beginning and its end. Its rows are requests of their own, with drafts and
    traces of their own. Where they cannot go on independently, the target's own loop answers them, and the log says
    why, once.
    """

    def __init__(self, model: Any, input_ids: Tensor, kwargs: dict[str, Any], bindings: Sequence[Binding]) -> None:
        super().__init__(model, input_ids, kwargs, bindings)
        self.requests = [
            Request(model, input_ids[i : i + 1], of_row(kwargs, i, len(input_ids)), bindings)
            for i in range(len(input_ids))
        ]
        self.draftings: list[LeanDrafting] = []
        self.pace: BatchPace | None = None

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Entered around the batch: the drafts of all rows are leased inside."""
        with contextlib.ExitStack() as stack:
            for request in self.requests:
                request.lease(stack)
                model = request.kwargs.get("assistant_model")
                self.draftings.append(request.drafting or LeanDrafting(model, None))
            first = self.requests[0]
            may_repeat = all(map(bears_any_token, self.kwargs["logits_processor"]))
            do_sample = bool(self.config.do_sample)
            drafting, rows = self.draftings[0], len(self.requests)
            self.pace = BatchPace(drafting, first.domain, rows, do_sample=do_sample, may_repeat=may_repeat)
            drafts = {id(request.drafting): request.drafting.draft for request in self.requests if request.drafting}
            if drafts:
                stack.enter_context(fast_kernels(self.model, *drafts.values(), is_request=True))
            yield

    def decode(self) -> Any:
        """The answers, as the target's own loop returns them."""
        assert self.pace is not None
        why = self._hindrance()
        if why is not None:
            log_once(self.model, f"Batches are decoded without a draft: {why}.")
        elif not self.pace.is_plain:
            return _Rounds(self).decode()
        return self.decode_plainly(is_usual=why is None)

    def _hindrance(self) -> str | None:
        """Why the rows cannot go on independently; `None` where they can."""
        config, cache = self.config, self.kwargs.get("past_key_values")
        if why := undrafted(self.model, config, self.kwargs["logits_processor"]):
            return why
        others = list(given_arguments(self.kwargs))
        drafts = list({id(drafting.draft): drafting for drafting in self.draftings}.values())
        if self.kwargs.get("streamer") is not None or self.kwargs.get("synced_gpus"):
            return "they are streamed, or computed on several machines in step"
        if config.return_dict_in_generate:
            return "more than tokens is asked for (`return_dict_in_generate`)"
        for drafting in drafts:
            if why := drafting.hindrance():
                return why
        if self.kwargs.get("mm_encoder_outputs") is not None:
            return "a multimodal model numbers the positions of a batch by itself"
        if others:
            return f"`{others[0]}` was given"
        if has_adapter_per_row(self.model):
            return (
                "PEFT uses an adapter for each row (`adapter_names`, or aLoRA), and rows leave the batch as they end"
            )
        if any(type(p) is ReplayedProcessor for p in self.kwargs["logits_processor"]):
            return "a processor is replayed"
        if not all(map(bears_any_token, self.kwargs["logits_processor"])):
            return "a processor may not bear rows that are not as long as others yet"
        if not isinstance(cache, DynamicCache) or cache.offloading or self.cached_tokens:
            return "the cache is not one of the request's own"
        if not (all(request.prompts for request in self.requests) and _is_padded_left(self.kwargs, self.input_ids)):
            return "prompts are not token ids behind padding"
        limits = limits_of(self.model, self.input_ids, self.kwargs)
        # Rows are read by forwards of our own, which a model that reads its prompt again would not go through.
        if (
            not limits.allow_any(self.input_ids.shape[1], self.max_length - 1)
            or self.max_length > limits.max_length + 1
        ):
            return f"of {type(self.model).__name__}, {limits.reason}"
        for whose, model in (("the target", self.model), *(("the draft", drafting.draft) for drafting in drafts)):
            if why := hindrance(model):
                return f"{whose} cannot hold rows that go on independently: {why}"
        return None

    def decode_plainly(self, *, is_usual: bool = True) -> Any:
        """Let the target decode the batch alone, by its own loop, and keep its rows. The time of an unusual request,
        such as one without a cache, says nothing about others."""
        assert self.pace is not None
        clock, times, requests = self.draftings[0].clock, list[float](), self.requests

        def seen(scores: Tensor) -> None:
            times.append(clock())
            kept = scores.clone() if any(request.rows.parts for request in requests) else scores
            for i, request in enumerate(requests):
                if request.rows.parts:
                    request.rows.add(kept[i : i + 1])

        criteria = _WatchedCriteria(self.kwargs["stopping_criteria"])
        processors = WatchedProcessors(self.kwargs["logits_processor"], seen)
        output = self._sample(processors, stopping_criteria=criteria)
        sequences = output if isinstance(output, Tensor) else output.sequences
        begins, total = self.input_ids.shape[1], sequences.shape[1] - self.input_ids.shape[1]
        done = torch.stack([met.expand(len(requests)) for met in criteria.met[:total]]).cpu()
        ends = done.int().argmax(0).add(1).where(done.any(0), total).tolist()
        for i, (request, end) in enumerate(zip(requests, ends, strict=True)):
            request.sequence = sequences[i : i + 1, : begins + end]
            request.rounds = [Round(request.drafted, 1)] * end
        if len(times) > 1 and is_usual:
            rounds = len(times) - 1
            time = RoundTime(seconds=(times[-1] - times[0]) / rounds, rounds=rounds)
            self.pace.timed(time, sum(ends) - len(ends))
        return output

    def close(self) -> None:
        """The batch has ended, well or not."""

    def finish(self) -> None:
        """The batch has ended well: each listener gets the traces of its rows."""
        hand_over(self.requests)


class _WatchedCriteria(StoppingCriteriaList):
    """The target's stopping criteria, whose answers are kept."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.met: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        met: Tensor = super().__call__(input_ids, scores, **kwargs)
        self.met.append(met)
        return met


def _is_padded_left(kwargs: dict[str, Any], input_ids: Tensor) -> bool:
    """Whether what the mask hides is padding before each prompt, and positions are counted behind it."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and (mask.shape != input_ids.shape or not bool(mask[:, -1].all() & (mask.diff() >= 0).all())):
        return False
    counted = (torch.ones_like(input_ids) if mask is None else mask.long()).cumsum(-1) - 1
    return positions is None or bool((positions == counted.clamp(min=0)).all())


# --- the rounds -----------------------------------------------------------------------------------------------------


class _Rounds:
    """The loop over a batch: all rows draft and verify together, and each goes on by its own accepted tokens. A row
    that has ended leaves, so that the batch shrinks."""

    def __init__(self, batch: BatchRequest) -> None:
        assert batch.pace is not None
        self.model, self.kwargs, self.input_ids = batch.model, batch.kwargs, batch.input_ids
        self.pace, self.clock = batch.pace, batch.draftings[0].clock
        config, criteria, prompts = batch.config, batch.kwargs["stopping_criteria"], batch.input_ids.tolist()
        mask = batch.kwargs.get("attention_mask")
        padding = [0] * len(prompts) if mask is None else (mask == 0).sum(-1).tolist()
        self.rows = [
            _Row(request, pad, ids[pad:], len(ids) - pad)
            for request, pad, ids in zip(batch.requests, padding, prompts, strict=True)
        ]
        for row in self.rows if self.pace.reads_text else ():
            row.past = RequestText(TextIndex, (), row.text, int(config.max_length), row.request.earlier)
        self.plan = BatchRound(0)
        self.do_sample, self.begins = bool(config.do_sample), self.input_ids.shape[1]
        self.most = int(config.max_length) - self.begins  # tokens of an answer
        eos = [c.eos_token_id.flatten().cpu() for c in criteria if type(c) is EosTokenCriteria]
        self.eos = torch.cat(eos) if eos else None
        self.ends_with = set(() if self.eos is None else self.eos.tolist())
        self.strings = [c for c in criteria if type(c) is StopStringCriteria]
        # Those of others may look at the batch as a whole, and count their calls.
        known = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
        self.others = StoppingCriteriaList([c for c in criteria if type(c) not in known])
        self.asked = 0  # tokens of each answer that they were asked about
        # Without a token that ends answers, rows go on until the last one has ended.
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)
        pad = config._pad_token_tensor
        self.pad_id = 0 if pad is None else int(pad.reshape(-1)[0])
        self.processors = RowProcessors(batch.kwargs["logits_processor"], self.input_ids, self.pad_id)
        self.live = list(range(len(self.rows)))  # in the order of the target's cache
        self.ragged: Ragged | None = None
        self.drafts = self._drafts(batch.draftings)
        self.failed = list[BatchDraft]()

    def _drafts(self, draftings: Sequence[LeanDrafting]) -> list[BatchDraft]:
        """One for the rows of each draft."""
        groups: dict[int, list[int]] = {}
        for row, drafting in enumerate(draftings):
            groups.setdefault(id(drafting.draft), []).append(row)
        return [
            BatchDraft(
                draftings[rows[0]], rows, self.processors, vocab_size=vocab_size_of(self.model),
                do_sample=self.do_sample, eos=self.eos, threshold=self.pace.threshold,
            )
            for rows in groups.values()
        ]  # fmt: skip

    def decode(self) -> Tensor:
        """The answers behind their prompts, int64, `(rows, tokens)`."""
        is_first = True
        while self.live:
            began, count = self.clock(), len(self.live)
            emitted = sum(row.emitted for row in self.rows)
            texts = {number: chances for number in self.live if (chances := self._look_up(self.rows[number]))}
            looked_up = self.clock() - began
            self.plan = self.pace.begin(count, texts)
            candidates = self._propose()
            raw = self._verify(candidates)
            scores = raw
            if self.processors:
                rows, starts = self._of_each(candidates.tokens.shape[1] + 1)
                scores = self.processors(raw.flatten(0, 1).clone(), rows, starts).view_as(raw)
            self._take(candidates, raw, judged(candidates, scores, do_sample=self.do_sample))
            del raw, scores
            time = self._round_time(candidates, None if is_first else self.clock() - began, looked_up)
            self.pace.timed(time, sum(row.emitted for row in self.rows) - emitted)
            is_first = False
        for row in self.rows:
            self.pace.ended(*row.counts)
        return self._output()

    def _round_time(self, candidates: Candidates, seconds: float | None, looked_up: float) -> RoundTime:
        drafted = [draft for draft in self.drafts if draft.times]
        if not drafted:
            k = candidates.tokens.shape[1]  # a plain round is one that looks nothing up
            return RoundTime(k, seconds=seconds if k or seconds is None else seconds - looked_up)
        first, others = (sum(part) for part in zip(*((d.times[0], sum(d.times[1:])) for d in drafted), strict=True))
        fed, forwards = max(d.fed for d in drafted), max(len(d.times) for d in drafted)
        if fed > PROMPT:
            seconds = None  # it read prompts
        return RoundTime(candidates.tokens.shape[1], forwards, fed, first, others, seconds)

    def _of_each(self, count: int) -> tuple[list[int], list[int]]:
        """The row, and the length, of each position of a round that has so many for each row."""
        rows = [row for row in self.live for _ in range(count)]
        return rows, [self.rows[row].length + j for row in self.live for j in range(count)]

    # --- candidates and the target --------------------------------------------------------------------------------

    def _look_up(self, row: _Row) -> list[float]:
        """Fill in how past text would go on with a row; how likely each of these tokens and all before it are
        right."""
        row.guesses, chances, size = [], list[float](), vocab_size_of(self.model)
        while row.past is not None and len(row.guesses) < min(MOST_GUESSED, self.most - row.emitted - 1):
            found = [guess for guess in row.past.guesses() if guess.token < size]
            if not found:
                break
            guess, chance = self.pace.likeliest(found)
            row.guesses.append(guess)
            chances.append(chance * (chances[-1] if chances else 1.0))
            if guess.token in self.ends_with or chances[-1] < LEAST_CHANCE:
                break
            row.past.proposed(guess.token)
        return chances

    def _propose(self) -> Candidates:
        """What past text and the drafts propose, in the order of the target's cache."""
        rows = {row: self.rows[row] for row in self.live}
        room = {number: self.most - row.emitted - 1 for number, row in rows.items()}
        texts = {number: row.text for number, row in rows.items()}
        lengths = {number: row.length for number, row in rows.items()}
        device = self.input_ids.device
        most, guessed = self.plan.k if self.plan.drafts else 0, self.plan.texts
        parts = list[tuple[BatchDraft, Candidates]]()
        for draft in self.drafts:
            none = torch.zeros(len(draft.rows), 0, dtype=torch.long, device=device)
            part = Candidates(none, none.bool())
            try:
                if draft.rows and draft not in self.failed:
                    part = draft.propose(most, texts, lengths, room, self.clock)
            except Exception as error:  # noqa: BLE001 - of models of any kind: the batch goes on without the draft
                log_failed_draft(draft.model, error)
                self.failed.append(draft)
                draft.times = []
            parts += [(draft, part)] if draft.rows else []
        if len(parts) == 1 and parts[0][0].rows == self.live and not guessed:
            tokens, live, logits = parts[0][1]
            return Candidates(tokens.to(device), live.to(device), None if logits is None else logits.to(device))
        k = max(part.tokens.shape[1] for _, part in parts)
        proposed = {number: [g.token for g in rows[number].guesses[: self.plan.k]] for number in guessed}
        k = max([k, *map(len, proposed.values())])
        tokens = torch.zeros(len(rows), k, dtype=torch.long, device=device)
        live, logits = tokens.bool(), None
        if self.do_sample and k:
            logits = torch.zeros(len(rows), k, vocab_size_of(self.model), dtype=torch.float32, device=device)
        place = {number: i for i, number in enumerate(self.live)}
        for draft, part in parts:
            at, width = [place[number] for number in draft.rows], part.tokens.shape[1]
            tokens[at, :width], live[at, :width] = part.tokens.to(device), part.live.to(device)
            if logits is not None and part.logits is not None:
                logits[at, :width] = part.logits.to(device)
        for number, ids in proposed.items():
            here, ours = place[number], torch.tensor(ids, device=device)
            tokens[here, : len(ids)] = ours
            live[here] = torch.arange(k, device=device) < len(ids)
            if logits is not None:  # certainty
                logits[here] = -torch.inf
                logits[here, : len(ids)].scatter_(1, ours[:, None], 0.0)
                logits[here, len(ids) :] = 0.0
            self.processors.write([number], [lengths[number]], ours[None])
        return Candidates(tokens, live, logits)

    def _verify(self, candidates: Candidates) -> Tensor:
        """The target's logits at each candidate, and behind the last one, float32, `(rows, k + 1, vocab)`."""
        tokens, k = candidates.tokens, candidates.tokens.shape[1]
        if self.ragged is None:
            logits = self._read(tokens)[:, -k - 1 :]
        else:
            rows = [self.rows[row] for row in self.live]
            newest = torch.tensor([[row.text[-1]] for row in rows], device=tokens.device)
            starts = [len(row.text) - 1 for row in rows]
            last = torch.tensor(starts, device=tokens.device)[:, None] + candidates.live.sum(1, keepdim=True)
            logits = self.ragged.feed(torch.cat([newest, tokens], 1), starts, last)
        return logits.to(dtype=torch.float32, device=tokens.device)

    def _read(self, tokens: Tensor) -> Tensor:
        """The logits of the prompts and the first candidates behind them, by a forward such as the loop's own."""
        kwargs, k = dict(self.kwargs), tokens.shape[1]
        for name in ("logits_processor", "stopping_criteria", "generation_config", "inputs_tensor", "assistant_model",
                     "assistant_tokenizer", "tokenizer", "streamer", "synced_gpus"):  # fmt: skip
            kwargs.pop(name, None)
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is not None:
            kwargs["attention_mask"] = torch.cat([mask, torch.ones_like(tokens, dtype=mask.dtype)], 1)
        if positions is not None:
            behind = positions[:, -1:] + 1 + torch.arange(k, device=positions.device)
            kwargs["position_ids"] = torch.cat([positions, behind], 1)
        kwargs["past_key_values"].activate_past_recording()
        inputs = self.model.prepare_inputs_for_generation(
            torch.cat([self.input_ids, tokens], 1), next_sequence_length=None, is_first_iteration=True, **kwargs
        )
        inputs["past_key_values"] = kwargs["past_key_values"]  # Phi-3 drops an empty one behind a length
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = k + 1
        logits: Tensor = self.model(**inputs, return_dict=True).logits
        padding, size = [row.padding for row in self.rows], first_columns(self.begins, self.most)
        self.ragged = Ragged(self.model, kwargs["past_key_values"], padding, size)
        return logits

    # --- what becomes of them ---------------------------------------------------------------------------------------

    def _take(self, candidates: Candidates, raw: Tensor, verdict: Verdict) -> None:
        """Let each row go on by what it got."""
        counts = torch.stack([candidates.live.sum(1), verdict.accepted, verdict.token], 1)
        k, ended = candidates.tokens.shape[1], list[int]()
        drafts = {number: draft for draft in self.drafts for number in draft.rows}
        for i, (number, fact) in enumerate(
            zip(self.live, torch.cat([candidates.tokens, counts], 1).tolist(), strict=True)
        ):
            row, (count, accepted, token) = self.rows[number], fact[k:]
            drafted, known = fact[:count], len(row.text)
            is_text = number in self.plan.texts
            emitted, drafted, is_over = self._ended(row, drafted, [*drafted[:accepted], token])
            # The last token is still to be read, also where it was drafted: behind a stop string.
            drafts[number].settle(number, known, 0 if is_text else len(emitted) - 1)
            if row.end is None:
                self._note(row, drafted, emitted, raw[i], verdict, i, is_text)
            if row.past is not None:
                self._look_back(row, emitted, len(drafted) if is_text else 1)
            if self.processors:
                self.processors.write([number], [row.length], self.input_ids.new_tensor([emitted], dtype=torch.long))
            row.text += emitted
            self.processors.lengths[number] = row.length
            if is_over and row.end is None:
                row.end = row.emitted
            if (self.pads and row.end is not None) or row.emitted >= self.most:
                ended.append(number)
        self._ask()
        ended += [number for number in self.live if self.pads and self.rows[number].end is not None]
        if not self.pads and all(row.end is not None for row in self.rows):
            total = max(row.end or 0 for row in self.rows)
            ended += [number for number in self.live if self.rows[number].emitted >= total]
        for number in dict.fromkeys(ended):
            self._leave(number, drafts[number])

    def _leave(self, number: int, draft: BatchDraft) -> None:
        place, last = self.live.index(number), self.live.pop()
        if last != number:
            self.live[place] = last
        assert self.ragged is not None
        self.ragged.leave(place)
        draft.leave(number)

    def _look_back(self, row: _Row, emitted: list[int], count: int) -> None:
        """Tell how so many guesses did, up to the first that was wrong, and go on from what was emitted."""
        assert row.past is not None
        for guess, token in zip(row.guesses[:count], emitted, strict=False):
            self.pace.guessed(guess, guess.token == token)
            if guess.token != token:
                break
        row.past.settled(emitted)

    def _note(
        self, row: _Row, drafted: list[int], emitted: list[int], raw: Tensor, verdict: Verdict, i: int, is_text: bool
    ) -> None:
        """Keep what a trace tells of a row's round."""
        accepted = num_accepted(drafted, emitted)
        examined = min(accepted + 1, len(drafted), len(emitted))
        if not is_text:
            row.counts = [row.counts[0] + accepted, row.counts[1] + examined]
            self.pace.judged(accepted, examined)
        p, q = (None if part is None or not drafted else part[i, : len(drafted)] for part in (verdict.p, verdict.q))
        request, from_text = row.request, [True] * len(drafted) if is_text else []
        request.rounds.append(
            Round(torch.tensor(drafted, dtype=torch.long, device="cpu"), len(emitted), from_text, p, q)
        )
        if request.rows.parts:
            request.rows.add(raw[: len(emitted)].clone())

    def _ended(self, row: _Row, drafted: list[int], emitted: list[int]) -> tuple[list[int], list[int], bool]:
        """What a row emits of these tokens before it ends; what it drafted, up to a token that would have ended it
        otherwise than the end token does; and whether it ends."""
        emitted = emitted[: self.most - row.emitted]
        is_over = len(emitted) == self.most - row.emitted
        at = next((i for i, token in enumerate(emitted) if token in self.ends_with), None)
        if at is not None:
            emitted, is_over = emitted[: at + 1], True
        if self.strings and row.end is None:
            met = self._first_met(row, drafted)
            drafted = drafted if met is None else drafted[:met]
            met = self._first_met(row, emitted)
            if met is not None:
                emitted, is_over = emitted[:met], True
        return emitted, drafted, is_over

    def _first_met(self, row: _Row, tokens: list[int]) -> int | None:
        """How many of these tokens it takes behind a row until a stop string is complete; `None` if it never is."""
        if not tokens:
            return None
        width = max(criterion.maximum_token_len for criterion in self.strings)
        padding = self.input_ids[self.rows.index(row), : row.padding].tolist()
        before = ([NO_TOKEN] * width + padding + row.text)[-width:] if len(row.text) < width else row.text[-width:]
        sequence = before + tokens
        ids = torch.tensor([sequence[i + 1 : i + 1 + width] for i in range(len(tokens))], device=self.input_ids.device)
        met = StoppingCriteriaList(self.strings)(ids, None).tolist()
        return met.index(True) + 1 if True in met else None

    def _ask(self) -> None:
        """Ask the other criteria as the target's own loop does: about the whole batch, once for each token, as soon as
        every row that goes on has come so far."""
        while self.others and self.asked < self._reached():
            self.asked += 1
            answers = [self._answer(row, self.asked) for row in self.rows]
            ids = torch.cat([self.input_ids, self.input_ids.new_tensor(answers, dtype=torch.long)], 1)
            met = self.others(ids, None).expand(len(self.rows)).tolist()
            for row, is_met in zip(self.rows, met, strict=True):
                if is_met and (row.end is None or row.end > self.asked):
                    row.end = self.asked
                    row.request.trim(self.asked)

    def _reached(self) -> int:
        """Tokens that every answer has, those of rows that have ended and are padded left aside."""
        going = [row.emitted for row in self.rows if row.end is None or not self.pads]
        if all(row.end is not None for row in self.rows):
            going.append(max(row.end or 0 for row in self.rows))
        return min(going)

    def _answer(self, row: _Row, count: int) -> list[int]:
        """The first tokens of an answer, as the target's own loop has them."""
        answer = row.text[row.begins :][: row.end if self.pads else None][:count]
        return answer + [self.pad_id] * (count - len(answer))

    def _output(self) -> Tensor:
        total = max(row.end or 0 for row in self.rows)
        answers = self.input_ids.new_tensor([self._answer(row, total) for row in self.rows], dtype=torch.long)
        sequences = torch.cat([self.input_ids, answers], 1)
        for i, row in enumerate(self.rows):
            row.request.sequence = sequences[i : i + 1, : self.begins + (row.end or 0)]
        return sequences
