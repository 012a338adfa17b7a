"""A Hub of one's own: what huggingface_hub asks of it to create a repo, commit to it, and read it back."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from fake_engine import listening

TOKEN = "hf_fake"
COMMIT = "0" * 40


class FakeHub:
    """
    Repos in memory.

    Attributes:
        repos: (kind, id) -> file -> bytes.
        public: those of them that everybody may read.
        asked: (method, path) of each request.
        refuse: path pattern -> status that is given instead, or `"drop"` to hang up.
    """

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], dict[str, bytes]] = {}
        self.public: set[tuple[str, str]] = set()
        self.blobs: dict[str, bytes] = {}
        self.cards: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.refuse: dict[str, Any] = {}
        self.address = ""


def handler_of(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def json(self, data: Any, status: int = 200) -> None:
            self.answer(status, json.dumps(data).encode(), {"Content-Type": "application/json"})

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.split("?")[0]
            hub.asked.append((self.command, path))
            for pattern, outcome in hub.refuse.items():
                if re.search(pattern, path):
                    if outcome == "drop":
                        self.close_connection = True
                        self.connection.close()
                        return
                    self.json({"error": f"refused with {outcome}"}, outcome)
                    return
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                kind = asked.get("type") or "model"
                if (kind, name) in hub.repos:
                    self.json({"error": "You already created this repo", "url": f"{hub.address}/{name}"}, 409)
                    return
                hub.repos[kind, name] = {}
                if asked.get("visibility", "public") == "public" and not asked.get("private"):
                    hub.public.add((kind, name))
                prefix = "datasets/" if kind == "dataset" else ""
                self.json({"url": f"{hub.address}/{prefix}{name}", "name": name})
            elif path == "/api/validate-yaml":
                hub.cards.append(json.loads(body)["content"])
                self.json({"errors": [], "warnings": []})
            elif match := re.fullmatch(r"/api/(model|dataset)s/(.+)/preupload/main", path):
                files = json.loads(body)["files"]
                large = (".safetensors", ".parquet", ".png")
                self.json({"files": [
                    {"path": f["path"], "shouldIgnore": False,
                     "uploadMode": "lfs" if f["path"].endswith(large) else "regular"} for f in files
                ]})  # fmt: skip
            elif path.endswith(".git/info/lfs/objects/batch"):
                objects = json.loads(body)["objects"]
                self.json({"transfer": "basic", "objects": [
                    {"oid": o["oid"], "size": o["size"],
                     "actions": {"upload": {"href": f"{hub.address}/upload/{o['oid']}"}}} for o in objects
                ]})  # fmt: skip
            elif path.startswith("/upload/"):
                assert hashlib.sha256(body).hexdigest() == path.split("/")[-1]
                hub.blobs[path.split("/")[-1]] = body
                self.answer(200)
            elif match := re.fullmatch(r"/api/(model|dataset)s/(.+)/commit/main", path):
                repo = hub.repos[match[1], match[2]]
                for line in body.decode().splitlines():
                    operation = json.loads(line)
                    value = operation["value"]
                    if operation["key"] == "file":
                        repo[value["path"]] = base64.b64decode(value["content"])
                    elif operation["key"] == "lfsFile":
                        repo[value["path"]] = hub.blobs[value["oid"]]
                    elif operation["key"] == "deletedFile":
                        del repo[value["path"]]
                self.json({"success": True, "commitUrl": f"{hub.address}/{match[2]}/commit/{COMMIT}",
                           "commitOid": COMMIT, "hookOutput": ""})  # fmt: skip
            elif match := re.fullmatch(r"/(datasets/)?(.+?)/resolve/[^/]+/(.+)", path):
                file = hub.repos.get(("dataset" if match[1] else "model", match[2]), {}).get(match[3])
                if file is None:
                    self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
                    return
                etag = hashlib.sha256(file).hexdigest()
                self.answer(200, file, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})
            elif match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(/revision/[^/]+)?", path):
                repo = hub.repos.get((match[1], match[2]))
                if repo is None:
                    self.json({"error": "Repository not found"}, 404)
                    return
                is_private = (match[1], match[2]) not in hub.public
                self.json({"id": match[2], "sha": COMMIT, "private": is_private, "tags": [], "downloads": 0,
                           "likes": 0, "siblings": [{"rfilename": name} for name in repo]})  # fmt: skip
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+(/.*)?", path):
                repo = hub.repos.get(("model", match[1]), {})
                self.json([{"type": "file", "path": name, "size": len(data),
                            "oid": hashlib.sha1(data).hexdigest()} for name, data in repo.items()])  # fmt: skip
            else:
                self.json({"error": f"the fake Hub knows nothing of {self.command} {path}"}, 404)

        do_GET = do_POST = do_PUT = do_HEAD = do_PATCH = handle_any

    return Handler


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A Hub that serves on a port of this machine."""
    hub = FakeHub()
    with listening(handler_of(hub)) as hub.address:
        yield hub
