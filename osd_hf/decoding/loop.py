"""The decoding loop. Each round proposes candidates, verifies them by one target forward, accepts, and records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from osd_hf.decoding.checks import Limits
from osd_hf.decoding.draft_length import DraftLength, RoundPlan, RoundTime
from osd_hf.decoding.forward import TargetForward
from osd_hf.decoding.record import Request, Round
from osd_hf.decoding.rows import BatchTargetForward
from osd_hf.decoding.sources import Candidates, DraftSource
from osd_hf.decoding.text import Guess, RequestText
from osd_hf.logits_processors import RowProcessors
from osd_hf.models import vocab_size_of
from osd_hf.utils.context import to_device

logger = logging.getLogger(__name__)

MAX_TEXT_CANDIDATES = 16  # of a row and round
MIN_TEXT_PROBABILITY = 0.1  # text ends where the probability that all its tokens are right falls below this
NO_TOKEN = 1 << 40  # an id outside of every vocabulary


class Verdict(NamedTuple):
    """The result of one round."""

    accepted: Tensor  # (rows,), int64; number of accepted candidates
    token: Tensor  # (rows,), int64; the target's token behind them
    p: Tensor | None = None  # (rows, k), float32; with sampling, the target's probability of each candidate
    q: Tensor | None = None  # (rows, k), float32; the draft's


def accept(candidates: Candidates, scores: Tensor, *, do_sample: bool) -> Verdict:
    """Compare candidates with the target's choices (greedy), or apply the rejection sampling of arXiv 2211.17192,
    algorithm 1 (sampled), without a copy to the host. `scores` are the target's processed logits at each candidate and
    behind the last one, float32, `(rows, k + 1, vocab)`."""
    tokens, is_proposed = candidates.tokens, candidates.is_proposed
    k = tokens.shape[1]
    if not do_sample:
        chosen = scores.argmax(-1)
        if not k:
            return Verdict(torch.zeros_like(chosen[:, 0]), chosen[:, 0])
        accepted = ((tokens == chosen[:, :k]) & is_proposed).cumprod(1).sum(1)
        return Verdict(accepted, chosen.gather(1, accepted[:, None])[:, 0])
    rows = torch.arange(len(scores), device=scores.device)
    target = scores.softmax(-1)
    if not k:
        return Verdict(torch.zeros_like(rows), torch.multinomial(target[:, 0], 1)[:, 0])
    p = target[:, :k].gather(-1, tokens[..., None])[..., 0]
    q = torch.ones_like(p)
    if candidates.q is not None:
        q = candidates.q.gather(-1, tokens[..., None])[..., 0]
        if candidates.from_text is not None:
            q = q.where(~candidates.from_text, 1.0)
    accepted = (is_proposed & (torch.rand_like(p) < p / q)).long().cumprod(1).sum(1)
    own, at = target[rows, accepted], accepted.clamp(max=k - 1)
    is_rejected = (accepted < is_proposed.sum(1))[:, None]
    # A rejected token of text leaves all others; one of a draft leaves max(p - q, 0).
    rest = own.scatter(1, tokens[rows, at][:, None], 0.0)
    if candidates.q is not None:
        of_draft = (own - candidates.q[rows, at]).clamp(min=0)
        rest = of_draft if candidates.from_text is None else rest.where(candidates.from_text, of_draft)
    rest = rest.where(is_rejected, own)
    # If p and q are equal up to rounding, nothing is left: draw from p.
    rest = rest.where(rest.sum(-1, keepdim=True) > 0, own)
    token = torch.multinomial(rest / rest.sum(-1, keepdim=True), 1)[:, 0]
    return Verdict(accepted, token, p, q)


@dataclass(eq=False)
class Row:
    """The state of one row."""

    request: Request
    padding: int  # tokens before the prompt
    tokens: list[int]  # prompt and answer, without padding
    prompt_tokens: int
    text: RequestText | None = None  # that may continue the row
    guesses: list[Guess] = field(default_factory=list)  # its continuation in this round
    states: list[Tensor] = field(
        default_factory=list
    )  # of the target, if the draft reads them; `(tokens, width)` each
    source: DraftSource | None = None  # the draft of the row, once it has proposed
    end: int | None = None  # tokens of the answer, once it has ended
    accepted: int = 0  # drafted tokens so far
    examined: int = 0

    @property
    def emitted(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def length(self) -> int:
        """Number of tokens with padding."""
        return self.padding + len(self.tokens)


class Loop:
    """Decode the rows of one call of `generate`, whose drafts are leased. Rows that have ended leave the batch."""

    def __init__(self, call: Any) -> None:  # a `Call` of the hook
        self.call, self.model, self.kwargs, self.config = call, call.model, call.kwargs, call.config
        self.length: DraftLength = call.length
        self.limits: Limits = call.limits
        self.clock: Callable[[], float] = call.clock
        self.input_ids, self.do_sample = call.input_ids, bool(call.config.do_sample)
        self.vocab_size = vocab_size_of(self.model)
        self.max_new_tokens: int = int(self.config.max_length) - self.input_ids.shape[1]
        is_free = self.limits.allow_any(self.input_ids.shape[1], int(self.config.max_length) - 1)
        self.has_limits = not (is_free and self.limits.with_prompt)
        self.rows = self._make_rows()
        self.live = list(range(len(self.rows)))  # in the order of the target's cache
        self._read_criteria()
        processors = self.kwargs["logits_processor"]
        self.processors = RowProcessors(processors, self.input_ids, self.pad_id) if processors else None
        self.sources: list[DraftSource] | None = None  # drafts, from the first round that drafts
        self.emitted = 0  # tokens of all rows
        self.judged: list[tuple[int, int]] = []  # of a round; see `DraftLength.took`
        self.guessed: list[tuple[Guess, bool]] = []
        # Without the states of a prompt that is in the cache already, a head cannot draft.
        is_whole = not any(row.request.num_cached for row in self.rows)
        self.state_layers = self.call.draftings[0].state_layers if is_whole and not self.length.is_plain else []
        self.target = self._make_target()
        self.returned = _Returned(self) if self.config.return_dict_in_generate else None

    def _make_rows(self) -> list[Row]:
        name = "decoder_attention_mask" if self.model.config.is_encoder_decoder else "attention_mask"
        mask, prompts, rows = self.kwargs.get(name), self.input_ids.tolist(), list[Row]()
        masks = [[1] * len(ids) for ids in prompts]
        if isinstance(mask, Tensor) and mask.shape == self.input_ids.shape:
            masks = mask.tolist()
        for request, ids, shown in zip(self.call.requests, prompts, masks, strict=True):
            tokens = [token for token, is_shown in zip(ids, shown, strict=True) if is_shown]
            row = Row(request, len(ids) - len(tokens), tokens, len(tokens))
            if self.length.reads_text:
                most = int(self.config.max_length)
                row.text = RequestText(request.source_tokens, row.tokens, most, request.earlier)
            rows.append(row)
        return rows

    def _read_criteria(self) -> None:
        """Sort the stopping criteria: those that are checked here, and others, which see one token at a time."""
        criteria = self.kwargs["stopping_criteria"]
        eos = [c.eos_token_id.flatten().tolist() for c in criteria if type(c) is EosTokenCriteria]
        self.ends_with = {token for tokens in eos for token in tokens}
        self.strings = [c for c in criteria if type(c) is StopStringCriteria]
        known = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
        self.others = StoppingCriteriaList([c for c in criteria if type(c) not in known])
        self.checked = 0  # tokens of each answer that the others have seen
        # Without a token that ends answers, rows continue until the last one has ended.
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)
        pad = self.config._pad_token_tensor
        self.pad_id = 0 if pad is None else int(pad.reshape(-1)[0])

    def _make_target(self) -> TargetForward | BatchTargetForward:
        if self.call.target is not None:
            static: BatchTargetForward = self.call.target
            return static
        if len(self.rows) == 1:
            cached = self.rows[0].request.num_cached
            return TargetForward(self.model, self.input_ids, self.kwargs, cached, self.state_layers)
        texts, most, layers = [row.tokens for row in self.rows], self.max_new_tokens, self.state_layers
        return BatchTargetForward(self.model, self.input_ids, self.kwargs, texts, most, state_layers=layers)

    def decode(self) -> Any:
        """Return the answers as `generate` returns them."""
        is_first = True
        while self.live:
            began, emitted = self.clock(), self.emitted
            self.judged, self.guessed = [], []
            texts = self._look_up()
            looked_up = self.clock() - began
            plan = self.length.begin(len(self.live), texts)
            candidates = self._propose(plan)
            logits = self.target.verify(candidates.tokens, candidates.is_proposed)
            logits = logits.to(dtype=torch.float32, device=self.input_ids.device)
            scores = self._process(logits, candidates.tokens.shape[1] + 1)
            verdict = accept(candidates, scores, do_sample=self.do_sample)
            self._take(plan, candidates, logits, scores, verdict)
            k = candidates.tokens.shape[1]
            time = self._round_time(k, None if is_first else self.clock() - began, looked_up)
            if time.is_plain and self.target.reread:
                time = time._replace(rereads=True)
            self.length.took(time, self.emitted - emitted, self.judged, self.guessed)
            is_first = False
        for row in self.rows:
            self.length.ended(row.accepted, row.examined)
        return self._output()

    # --- propose ---

    def _room(self, row: Row) -> int:
        """Return how many candidates a row may have."""
        room = self.max_new_tokens - row.emitted - 1
        if self.has_limits:
            room = int(min(room, self.limits.max_candidates(row.length, row.padding + row.prompt_tokens)))
        return room

    def _look_up(self) -> dict[int, list[float]]:
        """Find how text would continue each row. Returns, for each row with a continuation, the probability that each
        of its tokens and all before it are right."""
        found: dict[int, list[float]] = {}
        for number in self.live if self.length.reads_text else ():
            row, chances = self.rows[number], list[float]()
            row.guesses = []
            assert row.text is not None
            while len(row.guesses) < min(MAX_TEXT_CANDIDATES, self._room(row)):
                guesses = [guess for guess in row.text.guesses() if guess.token < self.vocab_size]
                if not guesses:
                    break
                guess, chance = self.length.likeliest(guesses)
                row.guesses.append(guess)
                chances.append(chance * (chances[-1] if chances else 1.0))
                if guess.token in self.ends_with or chances[-1] < MIN_TEXT_PROBABILITY:
                    break
                row.text.proposed(guess.token)
            if chances:
                found[number] = chances
        return found

    def _propose(self, plan: RoundPlan) -> Candidates:
        """Return the candidates of all rows, in the order of the target's cache."""
        for source in self.sources or ():
            source.times = []
        parts = self._draft(plan) if plan.drafts and plan.k else []
        guessed = {number: self.rows[number].guesses[: plan.k] for number in plan.text_rows}
        device = self.input_ids.device
        if len(parts) == 1 and parts[0][0].rows == self.live and not guessed:
            return self._exact(parts[0][1])
        k = max([part.tokens.shape[1] for _, part in parts] + [len(guesses) for guesses in guessed.values()] + [0])
        tokens = torch.zeros(len(self.live), k, dtype=torch.long, device=device)
        is_proposed, place = tokens.bool(), {number: i for i, number in enumerate(self.live)}
        q = from_text = None
        if parts and self.do_sample:
            q = torch.zeros(*tokens.shape, self.vocab_size, dtype=torch.float32, device=device)
        for source, part in parts:
            at, width = [place[number] for number in source.rows], part.tokens.shape[1]
            tokens[at, :width], is_proposed[at, :width] = part.tokens, part.is_proposed
            if q is not None and part.q is not None:
                q[at, :width] = part.q
        for number, guesses in guessed.items():
            ids = to_device([guess.token for guess in guesses], device)
            tokens[place[number], : len(ids)] = ids
            is_proposed[place[number]] = torch.arange(k, device=device) < len(ids)
            if self.processors is not None:
                self.processors.write([number], [self.rows[number].length], ids[None])
        if guessed:
            from_text = to_device([[number in guessed] for number in self.live], device, torch.bool)
        return self._exact(Candidates(tokens, is_proposed, q, from_text))

    def _draft(self, plan: RoundPlan) -> list[tuple[DraftSource, Candidates]]:
        """Let each draft propose for its rows. A draft that fails proposes nothing from then on."""
        if self.sources is None:
            self.sources = self.call.draft_sources(self)
            for source in self.sources:
                for number in source.rows:
                    self.rows[number].source = source
        parts = []
        for source in self.sources:
            rows = [self.rows[number] for number in source.rows]
            if not rows or source.has_failed:
                continue
            try:
                part = source.propose(
                    plan.k,
                    [row.tokens for row in rows],
                    [row.length for row in rows],
                    list(map(self._room, rows)),
                    plan.threshold,
                )
            except Exception as error:  # noqa: BLE001 - models of any kind: the answer continues without the draft
                self.call.draft_failed(source.rows, error)
                self.length.stop_drafting()
                source.times, source.has_failed = [], True
                continue
            if part is not None:
                device = self.input_ids.device
                parts.append((source, part if part.tokens.device == device else part.to(device)))
        return parts

    def _exact(self, candidates: Candidates) -> Candidates:
        """Drop candidates that follow `Limits.last_token`."""
        if len(self.live) > 1 or self.limits.last_token is None:
            return candidates
        newest = self.rows[self.live[0]].tokens[-1]
        ends = (candidates.tokens[0] == self.limits.last_token).nonzero()
        if newest == self.limits.last_token:
            return candidates.cut(0)
        return candidates.cut(int(ends[0]) + 1) if len(ends) else candidates

    # --- verify ---

    def _process(self, logits: Tensor, count: int) -> Tensor:
        """Return the logits after the target's processors."""
        if self.processors is None:
            return logits
        rows = [number for number in self.live for _ in range(count)]
        lengths = [self.rows[number].length + i for number in self.live for i in range(count)]
        return self.processors(logits.flatten(0, 1).clone(), rows, lengths).view_as(logits)

    # --- accept and record ---

    def _take(self, plan: RoundPlan, candidates: Candidates, logits: Tensor, scores: Tensor, verdict: Verdict) -> None:
        """Extend each row by what was accepted. The results of the round are copied to the host once."""
        k, count = candidates.tokens.shape[1], candidates.is_proposed.sum(1)
        facts = torch.cat([candidates.tokens, torch.stack([count, verdict.accepted, verdict.token], 1)], 1).tolist()
        emitted_by_row = []
        for i, (number, fact) in enumerate(zip(self.live, facts, strict=True)):
            row, (num_proposed, num_accepted, newest) = self.rows[number], fact[k:]
            drafted, known = fact[:num_proposed], len(row.tokens)
            emitted = [*drafted[:num_accepted], newest]
            emitted, drafted, is_over = self._ended(row, drafted, emitted)
            is_text = number in plan.text_rows or not plan.drafts
            if row.end is None:
                accepted = min(num_accepted, len(drafted), len(emitted))
                if not is_text:
                    self.judged.append((accepted, min(accepted + 1, len(drafted), len(emitted))))
                    row.accepted += self.judged[-1][0]
                    row.examined += self.judged[-1][1]
                self._record(i, row, drafted, emitted, logits[i], verdict, is_text)
            if row.text is not None:
                self._check_guesses(row, emitted, len(drafted) if is_text else 1)
            if self.state_layers:
                row.states.append(self.target.states(i, len(emitted)))
            row.tokens += emitted
            self.emitted += len(emitted)
            if row.source is not None:  # the last token is still to be read, even if it was drafted
                row.source.keep(number, known if is_text else len(row.tokens) - 1)
            if self.processors is not None:
                ids = to_device([emitted], self.input_ids.device)
                self.processors.write([number], [row.length - len(emitted)], ids)
                self.processors.lengths[number] = row.length
            if is_over and row.end is None:
                row.end = row.emitted
            emitted_by_row.append(emitted)
        self._check_others(emitted_by_row, scores)
        self.target.keep(emitted_by_row)
        if self.returned is not None:
            self.returned.add(len(emitted_by_row[0]), logits, scores)
        if self.kwargs.get("streamer") is not None:
            self.kwargs["streamer"].put(torch.tensor(emitted_by_row, device="cpu"))
        self._remove_ended()

    def _remove_ended(self) -> None:
        ended = [n for n in self.live if self.rows[n].emitted >= self.max_new_tokens]
        ended += [n for n in self.live if self.pads and self.rows[n].end is not None]
        if not self.pads and all(row.end is not None for row in self.rows):
            total = max(row.end or 0 for row in self.rows)
            ended += [n for n in self.live if self.rows[n].emitted >= total]
        for number in dict.fromkeys(ended):
            place, last = self.live.index(number), self.live.pop()
            if last != number:
                self.live[place] = last
            self.target.leave(place)
            source = self.rows[number].source
            if source is not None and len(self.rows) > 1:
                source.leave(number)

    def _check_guesses(self, row: Row, emitted: list[int], count: int) -> None:
        """Count which of the first guesses were right, up to the first wrong one."""
        assert row.text is not None
        for guess, token in zip(row.guesses[:count], emitted, strict=False):
            self.guessed.append((guess, guess.token == token))
            if guess.token != token:
                break
        row.text.settled(emitted)

    def _record(
        self, i: int, row: Row, drafted: list[int], emitted: list[int], logits: Tensor, verdict: Verdict, is_text: bool
    ) -> None:
        """Record the round of the i-th row in its request."""
        p, q = (None if part is None or not drafted else part[i, : len(drafted)] for part in (verdict.p, verdict.q))
        from_text = [True] * len(drafted) if is_text else []
        row.request.rounds.append(Round(drafted, len(emitted), from_text, p, q))
        if row.request.rows.parts:
            rows = logits[: len(emitted)]  # recorded later, while the caller may change what is returned
            row.request.rows.add(rows if self.returned is None else rows.clone())

    # --- where answers end ---

    def _ended(self, row: Row, drafted: list[int], emitted: list[int]) -> tuple[list[int], list[int], bool]:
        """Return the tokens that a row emits before it ends, the drafted tokens cut behind the first that completes a
        stop string, and whether the row ends."""
        emitted = emitted[: self.max_new_tokens - row.emitted]
        is_over = len(emitted) == self.max_new_tokens - row.emitted
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

    def _first_met(self, row: Row, tokens: list[int]) -> int | None:
        """Return how many of these tokens complete a stop string; `None` if they do not."""
        if not tokens:
            return None
        width = max(criterion.maximum_token_len for criterion in self.strings)
        padding = self.input_ids[self.rows.index(row), : row.padding].tolist()
        before = row.tokens[-width:]
        if len(before) < width:
            before = ([NO_TOKEN] * width + padding + row.tokens)[-width:]
        sequence = before + tokens
        ids = torch.tensor([sequence[i + 1 : i + 1 + width] for i in range(len(tokens))], device=self.input_ids.device)
        met = StoppingCriteriaList(self.strings)(ids, None).tolist()
        return met.index(True) + 1 if True in met else None

    def _check_others(self, emitted_by_row: list[list[int]], scores: Tensor) -> None:
        """Call the other criteria as the target alone would: once per token, for all rows, when all unfinished rows
        have that token. A single row is cut at the token that meets one."""
        known = None if self.returned is None else self.returned.scores
        if known is not None:
            known += tuple(scores[:, i] for i in range(len(emitted_by_row[0])))
        while self.others and self.checked < self._reached():
            self.checked += 1
            answers = [self._answer(row, self.checked) for row in self.rows]
            ids = torch.cat([self.input_ids, self.input_ids.new_tensor(answers, dtype=torch.long)], 1)
            met = self.others(ids, None if known is None else known[: self.checked]).expand(len(self.rows)).tolist()
            for row, is_met in zip(self.rows, met, strict=True):
                if is_met and (row.end is None or row.end > self.checked):
                    row.end = self.checked
                    row.request.trim(self.checked)
        row = self.rows[0]
        if len(self.rows) == 1 and row.end is not None and row.emitted > row.end:
            excess = row.emitted - row.end
            del row.tokens[-excess:]
            del emitted_by_row[0][-excess:]

    def _reached(self) -> int:
        """Return the number of tokens that every answer has; rows that have ended and are padded do not count."""
        counts = [row.emitted for row in self.rows if row.end is None or not self.pads]
        if all(row.end is not None for row in self.rows):
            counts.append(max(row.end or 0 for row in self.rows))
        return min(counts)

    def _answer(self, row: Row, count: int) -> list[int]:
        """Return the first tokens of an answer, padded behind its end as the target alone would."""
        answer = row.tokens[row.prompt_tokens :][: row.end if self.pads else None][:count]
        return answer + [self.pad_id] * (count - len(answer))

    # --- results ---

    def _round_time(self, k: int, seconds: float | None, looked_up: float) -> RoundTime:
        drafted = [source for source in self.sources or () if source.times]
        if not drafted:  # the time of the lookup is subtracted: a plain round has none
            return RoundTime(k, seconds=seconds if k or seconds is None else seconds - looked_up)
        drafting, forwards = sum(sum(s.times) for s in drafted), max(len(s.times) for s in drafted)
        reads_prompt = any(source.reads_prompt for source in drafted)
        return RoundTime(k, forwards, drafting, None if reads_prompt else seconds)

    def _output(self) -> Any:
        total = max(row.end or 0 for row in self.rows)
        answers = self.input_ids.new_tensor([self._answer(row, total) for row in self.rows], dtype=torch.long)
        sequences = torch.cat([self.input_ids, answers], 1)
        for i, row in enumerate(self.rows):
            row.request.sequence = sequences[i : i + 1, : self.input_ids.shape[1] + (row.end or 0)]
            row.request.states = row.states
        if self.kwargs.get("streamer") is not None:
            self.kwargs["streamer"].end()
        return sequences if self.returned is None else self.returned.output(sequences)


class _Returned:
    """What `generate` returns beside the tokens of one row with `return_dict_in_generate`."""

    def __init__(self, loop: Loop) -> None:
        config, self.target, self.kwargs = loop.config, loop.target, loop.kwargs
        self.is_encoder_decoder = bool(loop.model.config.is_encoder_decoder)
        self.scores: tuple[Tensor, ...] | None = () if config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if config.output_logits else None
        self.attentions: tuple[Any, ...] | None = () if config.output_attentions else None
        self.cross_attentions: tuple[Any, ...] | None = () if config.output_attentions else None
        self.hidden_states: tuple[Any, ...] | None = () if config.output_hidden_states else None

    def add(self, count: int, logits: Tensor, scores: Tensor) -> None:
        """Add the emitted tokens of a round."""
        outputs: Any = getattr(self.target, "outputs", None)  # static forwards keep no states
        if self.scores is not None:
            self.scores += tuple(scores[:, i] for i in range(count))
        if self.logits is not None:
            self.logits += tuple(logits[:, i] for i in range(count))
        prefix, rejected = "decoder_" if self.is_encoder_decoder else "", logits.shape[1] - count
        if self.attentions is not None:
            self.attentions += _by_token(getattr(outputs, f"{prefix}attentions"), count, rejected, has_keys=True)
        if self.cross_attentions is not None and self.is_encoder_decoder:
            self.cross_attentions += _by_token(outputs.cross_attentions, count, rejected)
        if self.hidden_states is not None:
            self.hidden_states += _by_token(getattr(outputs, f"{prefix}hidden_states"), count, rejected)

    def output(self, sequences: Tensor) -> Any:
        """Return the output of `generate`."""
        cache = self.target.cache
        common = {"sequences": sequences, "scores": self.scores, "logits": self.logits, "past_key_values": cache}
        if not self.is_encoder_decoder:
            return GenerateDecoderOnlyOutput(**common, attentions=self.attentions, hidden_states=self.hidden_states)
        encoder = self.kwargs["encoder_outputs"]
        return GenerateEncoderDecoderOutput(
            **common,
            encoder_attentions=None if self.attentions is None else encoder.get("attentions"),
            encoder_hidden_states=None if self.hidden_states is None else encoder.get("hidden_states"),
            decoder_attentions=self.attentions,
            cross_attentions=self.cross_attentions,
            decoder_hidden_states=self.hidden_states,
        )


def _by_token(layers: Sequence[Tensor], count: int, rejected: int, *, has_keys: bool = False) -> tuple[Any, ...]:
    """Split states or attentions of one forward, `(..., tokens, states or keys)`, as `generate` without candidates
    returns them: those up to the last known token together, and those of each accepted candidate; `rejected` ones are
    left out. With `has_keys`, the last dimension counts keys, of which a token sees those up to itself."""
    if any(layer is None for layer in layers):
        return ()
    split, tokens = [], layers[0].shape[-2] - rejected - count + 1
    for i in range(count):
        first, end = (0 if i == 0 else tokens + i - 1), tokens + i
        hidden = layers[0].shape[-2] - end if has_keys else 0
        split.append(tuple(layer[..., first:end, : layer.shape[-1] - hidden] for layer in layers))
    return tuple(split)
