"""Store the answers in a request log of an engine, for `osd-hf learn`.

    python recipes/collect_log.py requests.jsonl --target TARGET --store corrections
    tail -n +1 -F requests.jsonl | python recipes/collect_log.py - --target TARGET --store corrections

A line is a response, an object with `request` and `response`, or a line of an OpenAI batch output file. The requests
must have asked for log-probs and token ids, see docs/vllm.md. Answers that the store has already are left out, so the
command can be repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osd_hf import CorrectionStore, Trace
from osd_hf.engines.completions import CollectionReport, ResponseReader
from osd_hf.errors import DataError
from osd_hf.models import load_config, load_eos_ids


def parse_line(line: str) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
    """Return the request, if there is one, and the response of a line; raises DataError."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError("a line is cut off, or no JSON") from error
    if not isinstance(parsed, dict):
        raise DataError("a line is no JSON object")
    request, response = parsed.get("request"), parsed.get("response", parsed)
    if isinstance(response, dict) and "body" in response:
        if (status := response.get("status_code", 200)) != 200:
            raise DataError(f"the server answered with status {status}")
        response = response["body"]
    if isinstance(request, dict) and "body" in request:
        request = request["body"]
    if not isinstance(response, dict):
        raise DataError("there is no response")
    return request if isinstance(request, dict) else None, response


def identity(trace: Trace) -> tuple[bytes, bytes, float]:
    """Return what identifies an answer."""
    return trace.prompt_ids.tobytes(), trace.completion_ids.tobytes(), trace.created_at_seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", help="file of JSON lines, or - for the standard input")
    parser.add_argument("--target", required=True, help="model that the engine serves")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--target-version", help="by default the model's name in the responses")
    parser.add_argument("--domain", help="label of the answers")
    parser.add_argument("--num-logprobs", type=int, default=64, help="that are kept per position")
    args = parser.parse_args()
    size = int(load_config(args.target).get_text_config().vocab_size)
    reader = ResponseReader(size, min(args.num_logprobs, size), load_eos_ids(args.target), args.target_version)
    report = CollectionReport()
    source = sys.stdin.fileno() if args.log == "-" else args.log
    with (
        open(source, encoding="utf-8", errors="replace") as lines,
        CorrectionStore(args.store) as store,
        contextlib.suppress(KeyboardInterrupt),
    ):
        known = {identity(trace) for trace in store}
        for line in filter(str.strip, lines):
            try:
                request, response = parse_line(line)
                traces = reader.traces(response, request, domain=args.domain)
            except DataError as error:
                report.skip(str(error))
                continue
            for trace in traces:
                if identity(trace) in known:
                    report.skip("it is in the store already")
                    continue
                known.add(identity(trace))
                store.append(trace)
                report.requests += 1
    print(f"{report.requests} answers stored in {args.store}")
    for reason, count in report.skipped.most_common():
        print(f"left out {count}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
