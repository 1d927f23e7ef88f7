"""The server on loopback, driven by the official client, with the real default model; answers are transformers'."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
import uvicorn
from pydantic import BaseModel

from inferax.engine.async_engine import AsyncEngine
from inferax.serving.protocol.fields import Body, ChatBody, CompletionBody
from inferax.serving.server import create_app
from tests.goldens import GoldenPrompt, load_golden

MODEL = "smollm2"
HELLO: Any = [{"role": "user", "content": "Name three primary colours."}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


class Served:
    """A server in a thread, and what it serves."""

    def __init__(self, **arguments: Any) -> None:
        self.engine = AsyncEngine(compute="exact", max_model_len=1024, max_num_seqs=8)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(create_app(self.engine, MODEL, **arguments), log_config=None, access_log=False)
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run, args=([listener],))
        self._thread.start()
        self.http = httpx2.Client(base_url=self.url, timeout=60)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def close(self) -> None:
        self.http.close()
        self.client.close()
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive() and not self.engine.is_running

    def metric(self, name: str) -> float:
        return next(m.value for m in self.engine.metrics() if m.name == name)

    def idle(self) -> bool:
        """Whether all that ran is gone within ten seconds."""
        end = time.monotonic() + 10
        while self.metric("num_requests_running") + self.metric("num_requests_waiting") and time.monotonic() < end:
            time.sleep(0.01)
        return not self.engine._streams and self.metric("num_requests_running") == 0

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


@pytest.fixture(scope="module")
def served(smollm2_path: Path) -> Iterator[Served]:
    del smollm2_path  # the default model is there
    server = Served(keep_alive_s=0.05)
    yield server
    server.close()


def prompts(chat: bool, count: int) -> list[GoldenPrompt]:
    found = [p for p in load_golden("smollm2").prompts if (p.messages is not None) == chat and len(p.prompt_ids) < 400]
    return found[:count]


def test_chats_are_transformers(served: Served) -> None:
    for prompt in prompts(True, 3):
        extra = {"ignore_eos": True, "return_token_ids": True}
        messages: Any = prompt.messages
        answer = served.client.chat.completions.create(messages=messages, max_tokens=64, extra_body=extra, **GREEDY)
        choice: Any = answer.choices[0]
        assert prompt.explain(choice.token_ids) is None
        assert answer.prompt_token_ids == prompt.prompt_ids  # type: ignore[attr-defined]
        assert choice.finish_reason == "length" and choice.message.role == "assistant"
        assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt.prompt_ids)
        assert answer.usage.completion_tokens == 64 and answer.usage.total_tokens == 64 + len(prompt.prompt_ids)


def test_a_batch_of_completions_is_transformers(served: Served) -> None:
    golden = prompts(False, 4)
    for given in ([p.text for p in golden], [p.prompt_ids for p in golden]):
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = served.client.completions.create(prompt=given, max_tokens=64, extra_body=extra, **GREEDY)  # type: ignore[arg-type]
        for prompt, choice in zip(golden, answer.choices, strict=True):
            assert prompt.explain(choice.token_ids) is None  # type: ignore[attr-defined]
            assert choice.prompt_token_ids == prompt.prompt_ids  # type: ignore[attr-defined]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_is_the_answer(served: Served, n: int) -> None:
    same: Any = {
        "model": MODEL, "messages": HELLO, "max_tokens": 24, "n": n, "temperature": 1, "seed": 7, "logprobs": True,
        "top_logprobs": 2,
    }  # fmt: skip
    whole = served.client.chat.completions.create(**same)
    stream = served.client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **same)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1]) and len({c.id for c in chunks}) == 1
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        assert mine[-1].seed == choice.seed == 7  # type: ignore[attr-defined]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        entries = [e for c in mine if c.logprobs is not None for e in c.logprobs.content or []]
        assert entries == choice.logprobs.content
        assert all(len(e.top_logprobs) == 2 and e.top_logprobs[0].logprob >= e.top_logprobs[1].logprob for e in entries)
        spelled = b"".join(bytes(e.bytes or []) for e in entries).decode()
        assert spelled.removesuffix("<|im_end|>") == choice.message.content


def test_usage_goes_on(served: Served) -> None:
    stream = served.client.chat.completions.create(
        messages=HELLO, max_tokens=8, stream=True, stream_options={"continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
        extra_body={"ignore_eos": True}, **GREEDY,
    )  # fmt: skip
    counts = [c.usage.completion_tokens for c in stream]
    assert counts == sorted(counts) and counts[-1] == 8


def test_echo_scores_the_prompt(served: Served) -> None:
    golden = prompts(False, 1)[0]
    answer = served.client.completions.create(prompt=golden.text, echo=True, logprobs=1, max_tokens=0, **GREEDY)
    choice = answer.choices[0]
    assert choice.text == golden.text and choice.logprobs is not None and answer.usage is not None
    scores, tops = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
    assert len(scores) == len(golden.prompt_ids) and scores[0] is None and tops[0] is None
    assert all(max(top.values()) >= score for score, top in zip(scores[1:], tops[1:], strict=True))
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset or [])
    for position, (ids, values) in golden.logits.items():
        follower = golden.prompt_ids[position + 1] if position + 1 < len(golden.prompt_ids) else None
        others = {int(i): float(v) for i, v in zip(ids, values, strict=True)}
        if follower in others:  # transformers' logits: differences are those of the log-probabilities
            best = max(others.values())
            assert scores[position + 1] - max(tops[position + 1].values()) == pytest.approx(
                others[follower] - best, abs=2e-4
            )
    streamed = served.client.completions.create(
        prompt=golden.text, echo=True, logprobs=1, max_tokens=4, stream=True, **GREEDY
    )
    whole = served.client.completions.create(prompt=golden.text, echo=True, logprobs=1, max_tokens=4, **GREEDY)
    chunks = [c.choices[0] for c in streamed]
    assert "".join(c.text for c in chunks) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    assert [t for c in chunks if c.logprobs for t in c.logprobs.text_offset or []] == (
        whole.choices[0].logprobs.text_offset
    )


class Colour(BaseModel):
    name: str
    red: int


def test_structured_outputs(served: Served) -> None:
    parsed = served.client.chat.completions.parse(
        messages=HELLO, response_format=Colour, max_tokens=200, **{**GREEDY, "temperature": 0.7}, seed=3
    )
    assert isinstance(parsed.choices[0].message.parsed, Colour)
    answer = served.client.chat.completions.create(
        messages=HELLO, response_format={"type": "json_object"}, max_tokens=300, seed=1, model=MODEL
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 3}
    tight = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    answer = served.client.chat.completions.create(messages=HELLO, extra_body=tight, max_tokens=100, model=MODEL)
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)


def test_many_at_once(served: Served) -> None:
    golden = prompts(False, 8)

    async def ask(client: openai.AsyncOpenAI, prompt: GoldenPrompt) -> list[int]:
        stream = await client.completions.create(
            prompt=prompt.prompt_ids, max_tokens=64, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True}, **GREEDY,
        )  # fmt: skip
        return [token async for chunk in stream for token in chunk.choices[0].token_ids]  # type: ignore[attr-defined]

    async def all_of_them() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in golden))

    for prompt, ids in zip(golden, asyncio.run(all_of_them()), strict=True):
        assert prompt.explain(ids) is None


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_aborted(served: Served, stream: bool) -> None:
    before = served.metric("generation_tokens")
    body = {**GREEDY, "messages": HELLO, "max_tokens": 900, "ignore_eos": True, "stream": stream}
    with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1]))) as client:
        content = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        while served.metric("generation_tokens") < before + 3:
            time.sleep(0.005)
    assert served.idle()
    assert served.metric("generation_tokens") < before + 450


def test_a_stream_with_nothing_to_say_stays_alive(served: Served) -> None:
    lines = []
    body = {**GREEDY, "prompt": [5] * 1000, "max_tokens": 2, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[0] == ": keep-alive" and lines[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("chat", {"messages": HELLO, "temperature": -1}, "temperature", "temperature: -1"),
        ("chat", {"messages": HELLO, "temperature": "warm"}, "temperature", "temperature: Input should be"),
        ("chat", {"messages": HELLO, "colour": 1}, "colour", "colour: it is not a field that is supported"),
        ("chat", {"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "tools:"),
        ("chat", {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "tool_choice:"),
        ("chat", {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "it needs logprobs"),
        ("chat", {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ("chat", {"messages": HELLO, "stream_options": {}}, "stream_options", "it needs stream"),
        ("chat", {"messages": HELLO, "n": 0}, "n", "n: "),
        ("chat", {"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
        ("chat", {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format", "type 'xml' is none of"),
        ("chat", {"messages": HELLO, "response_format": {"type": "text", "a": 1}}, "response_format", "no field 'a'"),
        ("chat", {"messages": HELLO, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "its own"),
        ("chat", {"messages": HELLO, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "its own"),
        ("chat", {"messages": HELLO, "logit_bias": {"9" * 5000: 1}}, "logit_bias", "is not a token id"),
        ("chat", {"messages": HELLO, "request_id": "a\r\nSet-Cookie: b"}, "request_id", "should match pattern"),
        ("chat", {"messages": HELLO, "top_k": 2**70}, "top_k", "is not less than"),
        ("chat", {"messages": HELLO, "min_tokens": 2**31, "max_tokens": 2**32}, "min_tokens", "is not less than"),
        ("chat", {"messages": HELLO, "dry_penalty_last_n": 2**31}, "dry_penalty_last_n", "is not less than"),
        ("chat", {"messages": HELLO, "temperature": 1e39}, "temperature", "is not a finite float32"),
        ("chat", {"messages": HELLO, "temperature": 10**400}, "temperature", "number"),
        ("completions", {"prompt": "\ud800"}, "text", "lone surrogate"),
        ("chat", {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differs"),
        ("chat", {"messages": []}, "messages", "messages"),
        ("chat", {}, "messages", "messages: Field required"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0",
            "only 'text' is",
        ),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "suffix:"),
        ("completions", {"prompt": "a", "best_of": 3}, "best_of", "samples are not ranked"),
        ("completions", {"prompt": []}, "prompt", "prompt: it is empty"),
        ("completions", {"prompt": [10**9]}, "prompt_token_ids", "is not in [0,"),
        ("completions", {"prompt": [5] * 1024}, "prompt", "leaves no room"),
        ("completions", {"prompt": ["a", [5]]}, "prompt", "prompt"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], param: str, text: str
) -> None:
    response = served.post(f"/v1/{'chat/completions' if path == 'chat' else path}", **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and text in error["message"] and error["type"] == "invalid_request_error"


def test_other_errors_have_openais_form(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as wrong:
        served.client.chat.completions.create(model="other", messages=HELLO)
    assert wrong.value.code == "model_not_found" and wrong.value.param == "model"
    assert served.http.get("/v1/nowhere").json()["error"]["message"] == "Not Found"
    assert served.http.get("/v1/completions").status_code == 405
    broken = served.http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
    assert broken.status_code == 400 and "not JSON" in broken.json()["error"]["message"]


def test_every_field_is_known() -> None:
    """What is honoured has a place; vLLM's other fields are refused by name, as extra fields are."""
    for body, required in ((ChatBody, {"messages": HELLO}), (CompletionBody, {"prompt": "a"})):
        assert body.model_config["extra"] == "forbid" and issubclass(body, Body)
        body.model_validate(required | dict.fromkeys(set(body.model_fields) - set(required)))  # null is absent


def test_small_routes(served: Served) -> None:
    assert [m.id for m in served.client.models.list()] == [MODEL] and served.client.models.retrieve(MODEL).id == MODEL
    assert served.http.get("/health").json() == {"status": "ok"} and served.http.get("/ready").status_code == 200
    assert set(served.http.get("/version").json()) == {"version"}
    chat = prompts(True, 1)[0]
    found = served.post("/tokenize", messages=chat.messages, return_token_strs=True).json()
    assert found["tokens"] == chat.prompt_ids and found["count"] == len(found["token_strs"]) == len(chat.prompt_ids)
    assert served.post("/apply-template", messages=chat.messages).json() == {"prompt": chat.text}
    assert served.post("/detokenize", tokens=chat.prompt_ids).json() == {"prompt": chat.text}
    plain = prompts(False, 1)[0]
    assert served.post("/tokenize", prompt=plain.text).json()["tokens"] == plain.prompt_ids
    assert served.post("/tokenize", prompt="a", messages=HELLO).json()["error"]["param"] == "prompt"
    text = served.http.get("/metrics").text
    for name in (
        "num_requests_running",
        "generation_tokens_total",
        "compile_seconds_total",
        "step_time_seconds_bucket",
    ):
        assert f"inferax:{name}{{" in text, name
    assert 'inferax:request_success_total{finished_reason="length",model_name="smollm2"}' in text
    spec = served.http.get("/openapi.json").json()
    assert "/v1/chat/completions" in spec["paths"]


def test_the_command(tmp_path: Path) -> None:
    """`inferax serve` tells where it serves, wants its key, ends what runs at SIGTERM, and says why it cannot."""
    (tmp_path / "keys").write_text("first\n\nsecond\n")
    command = [sys.executable, "-m", "inferax.serving.cli", "serve", "--max-model-len", "512"]
    server = subprocess.Popen(
        [*command, "--port", "0", "--api-key-file", str(tmp_path / "keys"), "--served-model-name", "small"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        assert line.startswith("[small is served at http://127.0.0.1:"), line
        url = line.split()[4].removesuffix("/v1]")
        refused = httpx2.get(f"{url}/v1/models", headers={"Authorization": "Bearer third"})
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert httpx2.get(f"{url}/ready").status_code == 401 and httpx2.get(f"{url}/health").status_code == 200
        with openai.OpenAI(base_url=f"{url}/v1", api_key="second", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="small", messages=HELLO, max_tokens=64, stream=True, extra_body={"ignore_eos": True}
            )
            first = next(iter(stream))
            taken = subprocess.run([*command, "--port", url.rsplit(":", 1)[1]], capture_output=True, text=True)
            assert taken.returncode == 1 and "cannot be listened at" in taken.stderr
            server.send_signal(signal.SIGTERM)
            assert first.choices[0].delta.role == "assistant"
            assert [c.choices[0].finish_reason for c in stream][-1] == "length"
        server.wait(30)
    finally:
        server.kill()
        server.wait()
        assert server.stderr is not None
        server.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["--api-key-file", "nowhere"], 1, "nowhere: it cannot be read"),
        (["--api-key", ""], 2, "--api-key: it is empty"),
        (["--port", "70000"], 2, "--port: 70000 is not in"),
        (["--host", "203.0.113.1"], 1, "203.0.113.1:0 cannot be listened at"),
        (["--max-waiting-requests", "0"], 2, "--max-waiting-requests: 0 is less than 1"),
    ],
)
def test_wrong_flags(arguments: list[str], code: int, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    from inferax.serving.cli import main

    assert main(["serve", "--port", "0", *arguments]) == code
    assert problem in capsys.readouterr().err
