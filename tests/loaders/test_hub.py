"""The hub, spoken to through the real `huggingface_hub` over HTTP: a stand-in server on this machine's loopback."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

from inferax.errors import SourceError
from inferax.loaders.sources import resolve

MAIN, OLD = "a" * 40, "b" * 40
REPO = "someone/Model-1B"


@dataclass
class Hub:
    """The parts of the hub's protocol that downloads use: model info, tree, HEAD and GET with ranges."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by commit
    revisions: dict[str, str] = field(default_factory=lambda: {"main": MAIN})
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)  # by first letters of the path
    breaks: dict[str, list[int]] = field(default_factory=dict)  # by file: where transfers break, one after the other
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range

    def fetched(self) -> list[str]:
        return [
            path.rpartition("/resolve/")[2].partition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        ]

    def answer(self, method: str, path: str, byte_range: str | None) -> tuple[int, dict[str, str], bytes, int | None]:
        """Status, headers, body, and where the connection breaks."""
        self.requests.append((method, path, byte_range))
        for start, (status, code) in self.refusals.items():
            if path.startswith(start):
                return status, {"X-Error-Code": code} if code else {}, b"", None
        for kind in (f"/api/models/{REPO}/revision/", f"/api/models/{REPO}/tree/", f"/{REPO}/resolve/"):
            if path.startswith(kind):
                revision, _, name = path.removeprefix(kind).partition("/")
                break
        else:
            return 401, {}, b"", None  # so the hub answers for a name it will not speak about
        commit = self.revisions.get(revision, revision)
        if commit not in self.files:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"", None
        files = self.files[commit]
        if "/resolve/" not in kind:
            listing: Any = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
            ]
            if "/revision/" in kind:
                listing = {"id": REPO, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(listing).encode(), None
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"", None
        data, status = files[name], 200
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if byte_range is not None:
            first = int(byte_range.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            data, status = data[first:], 206
        breaks = self.breaks.get(name) if method == "GET" else None
        return status, headers, data, breaks.pop(0) if breaks else None


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def endpoint(hub: Hub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            status, headers, body, breaks_at = hub.answer(self.command, path, self.headers.get("Range"))
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:breaks_at])
            self.close_connection = True

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def nowhere() -> str:
    """An address at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def gguf(name: str) -> bytes:
    return b"GGUF" + name.encode() * 10


SAFETENSORS = {
    "config.json": b"{}",
    "tokenizer.json": b'{"t": 1}',
    "tokenizer_config.json": b"{ }",
    "tokenizer.model": b"sp",
    "chat_template.jinja": b"{{ x }}",
    "model-00001-of-00002.safetensors": b"first" * 1000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
    "model.safetensors.index.json": b'{"weight_map": {}}',
}
UNWANTED = {
    "README.md": b"#",
    ".gitattributes": b"*",
    "modeling_x.py": b"import os",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.pth": b"pickle",
    "consolidated.safetensors": b"the same again",
    "onnx/model.onnx": b"o",
    "model-Q4_K_M.gguf": gguf("q"),
}


def snapshot(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_safetensors_and_nothing_else(hub: Hub, endpoint: str, capfd: pytest.CaptureFixture[str]) -> None:
    hub.files[MAIN] = SAFETENSORS | UNWANTED
    path = resolve(REPO, endpoint=endpoint)
    assert snapshot(path) == SAFETENSORS
    assert sorted(hub.fetched()) == sorted(SAFETENSORS)
    assert capfd.readouterr() == ("", "")

    # Again: only the question whether there is something newer.
    hub.requests.clear()
    assert resolve(REPO, endpoint=endpoint) == path
    assert [path for _, path, _ in hub.requests] == [f"/api/models/{REPO}/revision/main"]


def test_progress_bars_go_to_stderr(hub: Hub, endpoint: str, capfd: pytest.CaptureFixture[str]) -> None:
    hub.files[MAIN] = SAFETENSORS
    resolve(REPO, endpoint=endpoint, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "100%" in err


def test_newer_commit_and_pinned_revision(hub: Hub, endpoint: str) -> None:
    old, new = {"config.json": b"{}", "model.safetensors": b"old"}, {"config.json": b"{}", "model.safetensors": b"new"}
    hub.files |= {OLD: old, MAIN: new}
    hub.revisions |= {"main": OLD, "v1": OLD, "refs/pr/1": OLD}
    assert snapshot(resolve(REPO, endpoint=endpoint)) == old
    hub.revisions["main"] = MAIN
    assert snapshot(resolve(REPO, endpoint=endpoint)) == new
    assert snapshot(resolve(f"{REPO}@v1", endpoint=endpoint)) == old
    assert snapshot(resolve(REPO, revision=OLD, endpoint=endpoint)) == old


GGUFS = {
    "config.json": b"{}",
    "README.md": b"#",
    "Model-1B-Q8_0.gguf": gguf("Q8_0"),
    "Model-1B-Q4_K_S.gguf": gguf("Q4_K_S"),
    "Model-1B-Q4_K_M.gguf": gguf("Q4_K_M"),
    "Model-1B-IQ4_XS.gguf": gguf("IQ4_XS"),
    "mmproj-F16.gguf": gguf("projector"),
    "BF16/Model-1B-BF16-00001-of-00002.gguf": gguf("BF16 1"),
    "BF16/Model-1B-BF16-00002-of-00002.gguf": gguf("BF16 2"),
    "UD/Model-1B-UD-Q2_K_XL.gguf": gguf("Q2_K_XL"),
}


@pytest.mark.parametrize(
    ("source", "quant", "name"),
    [
        (REPO, None, "Model-1B-Q4_K_M.gguf"),
        (f"{REPO}:Q8_0", None, "Model-1B-Q8_0.gguf"),
        (f"{REPO}:q4_k_s@main", None, "Model-1B-Q4_K_S.gguf"),
        (f"{REPO}@main:iq4_xs", None, "Model-1B-IQ4_XS.gguf"),
        (REPO, "UD-Q2_K_XL", "UD/Model-1B-UD-Q2_K_XL.gguf"),
        (f"{REPO}:Model-1B-Q8_0.gguf", None, "Model-1B-Q8_0.gguf"),
    ],
)
def test_gguf_by_quantization(hub: Hub, endpoint: str, source: str, quant: str | None, name: str) -> None:
    hub.files[MAIN] = GGUFS
    path = resolve(source, quant=quant, endpoint=endpoint)
    assert path.name == name.rpartition("/")[2]
    assert path.read_bytes() == GGUFS[name]
    assert hub.fetched() == [name]


def test_split_gguf_is_fetched_whole(hub: Hub, endpoint: str) -> None:
    hub.files[MAIN] = GGUFS
    path = resolve(f"{REPO}:bf16", endpoint=endpoint)
    first, second = (name for name in GGUFS if name.startswith("BF16/"))
    assert sorted(hub.fetched()) == [first, second]
    assert path.name == first.rpartition("/")[2]
    assert {file.name for file in path.parent.iterdir()} == {path.name, second.rpartition("/")[2]}


@pytest.mark.parametrize(
    ("files", "source", "said"),
    [
        (GGUFS, f"{REPO}:Q5_K_M", "no GGUF file of quantization 'Q5_K_M'; it holds .*Q8_0"),
        (GGUFS, f"{REPO}:Q4_K", "no GGUF file of quantization 'Q4_K'"),
        (GGUFS, f"{REPO}:F16", "no GGUF file of quantization 'F16'"),
        (SAFETENSORS, f"{REPO}:Q4_K_M", "no GGUF file of quantization 'Q4_K_M'; it holds no GGUF file"),
        ({"a-Q4_K_M.gguf": b"", "b-Q4_K_M.gguf": b""}, REPO, "holds 2 GGUF models: a-Q4_K_M.gguf, b-Q4_K_M.gguf"),
        ({"a.gguf": b"", "b.gguf": b""}, REPO, "holds 2 GGUF models: a.gguf, b.gguf"),
        ({"a-00001-of-00002.gguf": b""}, REPO, "incomplete: a-00002-of-00002.gguf"),
        ({"config.json": b"", "model-00002-of-00002.safetensors": b""}, REPO, "incomplete: model-00001-of-00002"),
        (
            {"config.json": b"", "pytorch_model.bin": b"", "x/y.pth": b""},
            REPO,
            "pickled.* weights \\(pytorch_model.bin, x",
        ),
        ({"model.safetensors": b""}, REPO, "no config.json to go with model.safetensors"),
        ({"config.json": b"", "adapter_model.safetensors": b""}, REPO, "of an adapter only: adapter_model.safetensors"),
        ({"README.md": b"", "config.json": b""}, REPO, "holds no model file"),
    ],
)
def test_no_model_to_choose(hub: Hub, endpoint: str, files: dict[str, bytes], source: str, said: str) -> None:
    hub.files[MAIN] = files
    with pytest.raises(SourceError, match=said) as caught:
        resolve(source, endpoint=endpoint)
    assert caught.value.file == REPO and caught.value.remedy
    assert hub.fetched() == [], "nothing was fetched, pickles least of all"


def test_broken_transfer_is_resumed(hub: Hub, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)  # what comes in smaller pieces is asked for again
    data = bytes(range(256)) * 2000
    hub.files[MAIN] = {"m.gguf": data}
    hub.breaks["m.gguf"] = [300_000]
    try:
        path = resolve(REPO, endpoint=endpoint)
    except SourceError:  # some releases of the library leave the rest to the next call
        path = resolve(REPO, endpoint=endpoint)
    assert path.read_bytes() == data
    ranges = [byte_range for method, path, byte_range in hub.requests if method == "GET" and path.endswith("m.gguf")]
    first, second = ranges
    assert first is None and second is not None
    assert second == "bytes=300000-"


def test_failed_transfer_looks_whole_to_nobody(hub: Hub, endpoint: str, nowhere: str) -> None:
    hub.files[MAIN] = SAFETENSORS
    hub.refusals[f"/{REPO}/resolve/{MAIN}/model-00002"] = 403, ""
    with pytest.raises(SourceError, match="403"):
        resolve(REPO, endpoint=endpoint)
    with pytest.raises(SourceError, match="could not be fetched .*; the snapshot in .* is incomplete: model-00002-of"):
        resolve(REPO, endpoint=nowhere)
    hub.refusals.clear()
    hub.requests.clear()
    assert snapshot(resolve(REPO, endpoint=endpoint)) == SAFETENSORS
    assert hub.fetched() == ["model-00002-of-00002.safetensors"], "what had come before was kept"


@pytest.mark.parametrize(
    ("refusals", "source", "said", "remedy"),
    [
        ({}, "no/such", "no/such: is not on the hub, or is private", "hf auth login.* local path"),
        ({"/api/": (404, "RepoNotFound")}, REPO, f"{REPO}: is not on the hub", "Check the name"),
        ({f"/{REPO}/resolve/": (401, "GatedRepo")}, REPO, f"{REPO}: is gated", "Accept them at http.*HF_TOKEN"),
        ({"/api/": (403, "GatedRepo")}, REPO, f"{REPO}: is gated", "Accept them at http.*HF_TOKEN"),
        ({}, f"{REPO}@v9", "no revision 'v9'", "branch, tag or commit"),
        ({"/api/": (500, "")}, REPO, "the hub refused: .*500", "Try again later"),
        ({}, "no--such/name", "not a model's name on the hub", "org/name"),
    ],
)
def test_refusals(
    hub: Hub, endpoint: str, refusals: dict[str, tuple[int, str]], source: str, said: str, remedy: str
) -> None:
    hub.files[MAIN] = SAFETENSORS
    hub.refusals = refusals
    with pytest.raises(SourceError, match=said) as caught:
        resolve(source, endpoint=endpoint)
    assert re.search(remedy, caught.value.remedy)


@pytest.mark.parametrize("trouble", ["no network", "offline mode", "server error", "token expired"])
def test_cached_snapshot_serves(
    hub: Hub,
    endpoint: str,
    nowhere: str,
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.files[MAIN] = SAFETENSORS
    path = resolve(REPO, endpoint=endpoint)
    hub.requests.clear()
    if trouble == "offline mode":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif trouble == "server error":
        hub.refusals["/"] = 503, ""
    elif trouble == "token expired":
        hub.refusals["/"] = 401, "RepoNotFound"
    assert resolve(REPO, endpoint=nowhere if trouble == "no network" else endpoint) == path
    assert hub.fetched() == []
    assert (REPO in caplog.text) == (trouble != "offline mode"), "said, unless it was asked for"


def test_cached_gguf_serves_by_its_tag(hub: Hub, endpoint: str, nowhere: str) -> None:
    hub.files[MAIN] = GGUFS
    path = resolve(f"{REPO}:Q8_0", endpoint=endpoint)
    assert resolve(f"{REPO}:Q8_0", endpoint=nowhere) == path
    with pytest.raises(SourceError, match=r"could not be fetched .*; the snapshot in .* has no GGUF .* 'Q4_K_M'"):
        resolve(f"{REPO}:Q4_K_M", endpoint=nowhere)


def test_nothing_cached(nowhere: str) -> None:
    with pytest.raises(SourceError, match="could not be fetched from the hub .*Connect to the network"):
        resolve(REPO, endpoint=nowhere)


def test_unknown_revision_is_not_served_from_the_cache(hub: Hub, endpoint: str) -> None:
    hub.files |= {MAIN: SAFETENSORS, OLD: SAFETENSORS}
    hub.revisions["v1"] = OLD
    resolve(f"{REPO}@v1", endpoint=endpoint)
    del hub.revisions["v1"]
    with pytest.raises(SourceError, match="no revision 'v1'"):
        resolve(f"{REPO}@v1", endpoint=endpoint)


def test_cache_that_cannot_be_written(hub: Hub, endpoint: str, cache: Path) -> None:
    hub.files[MAIN] = SAFETENSORS
    cache.write_text("a file where the folder should be")
    with pytest.raises(SourceError, match=f"could not be written to the cache {cache}"):
        resolve(REPO, endpoint=endpoint)


def test_environment_variables_of_the_hub(hub: Hub, endpoint: str, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE, as a user sets them."""
    hub.files[MAIN] = SAFETENSORS
    program = f"""
from inferax.loaders.sources import SourceError, resolve
try:
    print(resolve({REPO!r}))
except SourceError as error:
    print(error)
"""
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint}
    env.pop("HF_HUB_CACHE", None)

    def run(**more: str) -> str:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=env | more, check=True, capture_output=True, text=True, timeout=60).stdout

    online = run()
    assert snapshot(Path(online.strip())) == SAFETENSORS and str(tmp_path / "home") in online
    hub.requests.clear()
    assert run(HF_HUB_OFFLINE="1") == online
    nothing = run(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "other"))
    assert f"{REPO}: is not in the cache {tmp_path / 'other' / 'hub'}, and offline mode is on" in nothing
    assert hub.requests == []
