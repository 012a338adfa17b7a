"""The command `osd-hf collect`: what an engine answers, kept for a draft to learn from."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from osd_hf.bundled import load_bundled
from osd_hf.cli.flags import (
    BUNDLED_REQUESTS,
    FAILED,
    INTERRUPTED,
    add_prompts,
    bundled_mix,
    check_counts,
    check_not_negative,
    output_stream,
    prompt_source,
    stopping,
    warn_skipped,
    write_json,
)
from osd_hf.engine.client import CompletionClient, environment_key, parse_address
from osd_hf.engine.collect import CollectionReport, LogReader, collect, collect_log
from osd_hf.engine.responses import ResponseReader
from osd_hf.errors import ConfigError, DataError, ServerError, StoreError
from osd_hf.pair import eos_ids, load_config, load_eos_ids, load_tokenizer, prompt_room
from osd_hf.prompts import EncodedPrompts, encode_prompts, read_prompts
from osd_hf.store.store import CorrectionStore
from osd_hf.utils.report import provenance

__all__ = ["add_collect", "collect_command"]

OF_SERVER = (
    "model", "api_key", "api_key_file", "api_key_env", "allow_plain_http", "concurrency", "patience_seconds",
    "prompts", "split", "subset", "column", "prompt_template", "no_chat_template", "domain_column", "num_requests",
    "max_new_tokens", "temperature", "top_p", "top_k", "seed", "resume",
)  # fmt: skip


def add_collect(parser: argparse.ArgumentParser) -> None:
    """The arguments of `osd-hf collect`, but for those of learning."""
    parser.add_argument("--store", required=True, metavar="DIR", help="where the requests are kept")
    parser.add_argument("--target", metavar="ID|PATH", help="model that the server serves, for its tokenizer and "
                        "vocabulary (no weights are loaded); the bundled one by default")  # fmt: skip
    parser.add_argument("--num-logprobs", type=int, default=64, metavar="K", help="kept per position")
    group = parser.add_argument_group("from a server")
    group.add_argument("--url", help="of an OpenAI-compatible server, such as http://localhost:8000")
    group.add_argument("--model", help="name that it serves; its only one by default")
    keys = group.add_mutually_exclusive_group()
    keys.add_argument("--api-key", help="other users of this machine can see it, so the next two are better; by "
                      "default the environment's OSD_HF_API_KEY, or its OPENAI_API_KEY where the URL is OpenAI's or "
                      "that of OPENAI_BASE_URL")  # fmt: skip
    keys.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the key")
    keys.add_argument("--api-key-env", metavar="NAME", help="variable of the environment that holds the key")
    group.add_argument("--allow-plain-http", action="store_true",
                       help="send a key to another machine over plain HTTP, too")  # fmt: skip
    group.add_argument("--concurrency", type=int, default=4, metavar="N", help="requests at once")
    group.add_argument("--patience-seconds", type=float, default=30.0, metavar="S",
                       help="how long to try a server that is away or too busy")  # fmt: skip
    add_prompts(parser.add_argument_group("prompts sent to it"))
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="bound of an answer")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    group.add_argument("--top-p", type=float, help="with a temperature")
    group.add_argument("--top-k", type=int, help="with a temperature")
    group.add_argument("--seed", type=int, help="of sampling, sent with each request")
    group.add_argument("--resume", action="store_true", help="leave out prompts that the store has already")
    group = parser.add_argument_group("from a request log")
    group.add_argument("--log", type=Path, metavar="FILE",
                       help="JSON lines, each a response, {request, response}, or of an OpenAI batch output; lines "
                       "read before into this store are left out")  # fmt: skip
    group.add_argument("--follow", action="store_true", help="wait for more lines, until interrupted")
    group.add_argument("--poll-seconds", type=float, default=5.0, metavar="S", help="between two looks at it")
    group = parser.add_argument_group("store")
    group.add_argument("--flush-every", type=int, default=16, metavar="N", help="requests in a file, at most")
    group.add_argument("--max-bytes", type=int, metavar="N", help="most bytes kept; the oldest requests go")
    group.add_argument("--max-age-days", type=float, metavar="DAYS", help="older requests go")


def collect_command(args: argparse.Namespace) -> int:
    """`osd-hf collect`; the exit code."""
    _check_collect(args)
    key = None if args.url is None else _key(args)
    args.store = Path(args.store).expanduser()
    config, tokenizer, reader = _target(args)
    encoded = None if args.url is None else _encoded(args, config, tokenizer)
    store = CorrectionStore(
        args.store, max_bytes=args.max_bytes, flush_every=args.flush_every,
        max_age_seconds=None if args.max_age_days is None else args.max_age_days * 86400,
    )  # fmt: skip
    log = None if args.log is None else LogReader(args.log, LogReader.place_in(args.store, args.log))
    report, failed = CollectionReport(), None
    try:
        with store:
            if encoded is not None:
                _from_server(args, key, encoded, reader, store, report)
            if log is not None:
                _from_log(args, log, reader, store, report)
    except (StoreError, ServerError, DataError) as error:  # what was collected is reported all the same
        failed = error
    _report(args, report, store.written_nbytes)
    if failed is not None:
        print(f"osd-hf: error: {failed}", file=sys.stderr)
    if failed is None and report.unanswered:
        print(f"osd-hf: interrupted: go on with --resume, {report.unanswered} prompts are left", file=sys.stderr)
        return INTERRUPTED
    return FAILED if failed is not None or (report.skipped and not report.requests) else 0


def _report(args: argparse.Namespace, report: CollectionReport, written: int) -> None:
    out, per_token = output_stream(args), written / report.tokens if report.tokens else None
    print(
        f"{report.requests} requests with {report.tokens} tokens in {args.store}, {written:,} bytes written"
        + (f" ({per_token:.1f} a token)" if per_token is not None else "")
        + f", {report.seconds:.1f} s",
        file=out,
    )
    for reason, count in report.skipped.most_common():
        print(f"left out {count}: {reason}", file=out)
    write_json(
        args,
        {
            "provenance": provenance(), "requests": report.requests, "tokens": report.tokens, "bytes": written,
            "bytes_per_token": per_token, "seconds": report.seconds, "skipped": dict(report.skipped),
        },
    )  # fmt: skip


def _check_collect(args: argparse.Namespace) -> None:
    if (args.url is None) == (args.log is None):
        raise ConfigError("One of --url and --log says where requests come from.")
    if args.log is not None:
        defaults = argparse.ArgumentParser()
        add_collect(defaults)
        asked = [n for n in OF_SERVER if getattr(args, n) != defaults.get_default(n)]
        if asked:
            raise ConfigError(f"--{' and --'.join(asked)} are for --url; a log has its own.".replace("_", "-"))
    if args.log is not None and args.domain is not None and len(args.domain) > 1:
        raise ConfigError("A log has one label: give --domain once.")
    if args.follow and args.log is None:
        raise ConfigError("--follow is for --log.")
    check_counts(
        args, "num_logprobs", "concurrency", "max_new_tokens", "flush_every", "num_requests", "max_bytes"
    )  # fmt: skip
    check_not_negative(args, "patience_seconds", "poll_seconds", "temperature")
    if args.temperature == 0 and (args.top_p is not None or args.top_k is not None):
        raise ConfigError("--top-p and --top-k need a --temperature.")
    if args.url is not None and (args.target is None) != (args.prompts is None):
        raise ConfigError("--target and --prompts go together: name both, or neither for the bundled pair.")


def _key(args: argparse.Namespace) -> str | None:
    """What is sent to the server; raises ConfigError where it is not there."""
    if args.api_key_file is not None:
        try:
            key = str(args.api_key_file.expanduser().read_text().strip())
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"The key cannot be read from {args.api_key_file}: {why}.") from None
        if not key:
            raise ConfigError(f"The file {args.api_key_file} holds no key.")
        return key
    if args.api_key_env is not None:
        if not os.environ.get(args.api_key_env):
            raise ConfigError(f"--api-key-env names {args.api_key_env}, which is not set in the environment.")
        return os.environ[args.api_key_env]
    address, user, password = parse_address(args.url)
    if args.api_key or user or password:
        return str(args.api_key) if args.api_key else None
    found = os.environ.get("OSD_HF_API_KEY") or environment_key(args.url)
    if found is None and os.environ.get("OPENAI_API_KEY"):
        print(
            f"osd-hf: OPENAI_API_KEY is not sent to {address.host}, which it may not belong to; if it does: "
            "--api-key-env OPENAI_API_KEY",
            file=sys.stderr,
        )
    return found


def _target(args: argparse.Namespace) -> tuple[Any, Any, ResponseReader]:
    """Configuration and tokenizer of the target, and what reads its answers."""
    if args.target:
        config, tokenizer, ends = load_config(args.target), load_tokenizer(args.target), load_eos_ids(args.target)
    else:
        target, _, tokenizer = load_bundled()
        config, ends = target.config, eos_ids(target.generation_config)
    size = int(config.get_text_config().vocab_size)
    return config, tokenizer, ResponseReader(size, min(args.num_logprobs, size), ends)


def _encoded(args: argparse.Namespace, config: Any, tokenizer: Any) -> EncodedPrompts:
    if args.prompts is None:
        prompts = iter(bundled_mix(args.domain, args.num_requests or BUNDLED_REQUESTS, args.seed or 0))
    else:
        prompts = read_prompts(prompt_source(args))
    encoded = encode_prompts(
        prompts, tokenizer, limit=args.num_requests, chat_template=not args.no_chat_template,
        max_prompt_tokens=prompt_room(config, config, args.max_new_tokens),
    )  # fmt: skip
    warn_skipped(encoded, args.max_new_tokens)
    if not args.resume or not args.store.exists():
        return encoded
    known = {trace.prompt_ids.tobytes() for trace in CorrectionStore(args.store)}
    rest = [(p, ids) for p, ids in encoded.prompts if np.array(ids, np.int32).tobytes() not in known]
    return replace(encoded, prompts=tuple(rest))


def _from_server(
    args: argparse.Namespace, key: str | None, encoded: EncodedPrompts, reader: ResponseReader,
    store: CorrectionStore, report: CollectionReport,
) -> None:  # fmt: skip
    settings = {name: value for name in ("top_p", "top_k", "seed") if (value := getattr(args, name)) is not None}
    with (
        CompletionClient(
            args.url,
            args.model,
            api_key=key,
            allow_plain_http=args.allow_plain_http,
            patience_seconds=args.patience_seconds,
        ) as client,
        stopping() as stop,
        tqdm(total=len(encoded.prompts), desc="collecting", unit="request", dynamic_ncols=True) as bar,
    ):
        collect(
            encoded.prompts, client, reader, store, max_new_tokens=args.max_new_tokens, concurrency=args.concurrency,
            report=report, on_request=lambda _: bar.update(), stop=stop, temperature=args.temperature, **settings,
        )  # fmt: skip


def _from_log(
    args: argparse.Namespace, log: LogReader, reader: ResponseReader, store: CorrectionStore, report: CollectionReport
) -> None:
    domain = args.domain[0] if args.domain else None
    with contextlib.closing(log), stopping() as stop, tqdm(desc="collecting", unit="request") as bar:
        while True:
            collect_log(log, reader, store, domain=domain, report=report, on_request=lambda _: bar.update(), stop=stop)
            if not args.follow or stop.wait(args.poll_seconds):
                break
        if log.has_rest:
            print("osd-hf: the last line has no end yet; it is read when it has one", file=sys.stderr)
