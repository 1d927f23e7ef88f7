"""OpenAI's dialect: chat completions and completions."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from inferax.engine.async_engine import AsyncEngine, Stream
from inferax.engine.outputs import CompletionDelta, CompletionOutput, Delta, Logprob
from inferax.engine.requests import Rendered
from inferax.errors import InferaxError, RequestError
from inferax.loaders.tokenizer import Tokenizer
from inferax.serving.protocol.fields import Body, ChatBody, CompletionBody
from inferax.serving.protocol.work import Work

Tables = Sequence[Mapping[int, Logprob]]


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text parts joined, and "developer" as the system that it replaced."""
    found = []
    for i, message in enumerate(messages):
        made = dict(message)
        if made.get("role") == "developer":
            made["role"] = "system"
        parts = made.get("content")
        if isinstance(parts, list):
            for j, part in enumerate(parts):
                kind = part.get("type") if isinstance(part, Mapping) else part
                if kind != "text" or not isinstance(part.get("text"), str):
                    raise RequestError(f"messages.{i}.content.{j}", f"type {kind!r} is not supported; only 'text' is")
            made["content"] = "".join(part["text"] for part in parts)
        found.append(made)
    return found


async def render(engine: AsyncEngine, body: Any) -> Rendered:
    """A body's conversation as text and token ids."""
    kwargs = dict(body.chat_template_kwargs or {})
    if getattr(body, "reasoning_effort", None) is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
    taken = {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"} & set(kwargs)
    if taken:
        raise RequestError("chat_template_kwargs", f"{min(taken)!r} has a meaning of its own")
    return await engine.render(
        conversation(body.messages),
        tools=body.tools or None,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        **kwargs,
    )


async def chat_work(engine: AsyncEngine, body: ChatBody, model: str) -> Work:
    """A chat request. Raises RequestError or TemplateError."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs", "it needs logprobs to be true")
    if body.max_completion_tokens is not None and body.max_tokens not in (None, body.max_completion_tokens):
        raise RequestError("max_tokens", "it differs from max_completion_tokens; give one of them")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling(max_tokens=limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    return _work(body, [await render(engine, body)], params, partial(_Chat, engine.model.tokenizer, body, model))


async def completion_work(engine: AsyncEngine, body: CompletionBody, model: str) -> Work:
    """A completion request of one prompt or more. Raises RequestError."""
    if body.best_of not in (None, body.n or 1):
        raise RequestError("best_of", f"{body.best_of} is not n; samples are not ranked")
    scored = body.logprobs if body.echo else None
    if body.echo and body.max_tokens == 0 and scored is None:
        scored = 0  # nothing to generate, only to look at
    params = body.sampling(logprobs=body.logprobs, prompt_logprobs=scored)
    tokenizer = engine.model.tokenizer
    prompts: list[Rendered] = []
    for prompt in _prompts(body):
        text, ids = await engine.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
        prompts.append((tokenizer.decode(ids) if text is None else text, ids))
    return _work(body, prompts, params, partial(_Completion, tokenizer, body, model))


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt", "it is empty")
    return [prompt] if isinstance(prompt[0], int) else prompt


def _work(body: Body, prompts: list[Rendered], params: Any, answer: Any) -> Work:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options", "it needs stream to be true")
    request_id = body.request_id or uuid.uuid4().hex
    return Work(request_id, prompts, params, bool(body.stream), body.priority or 0, partial(answer, request_id))


class _Answer:
    """What both kinds of completions have in common."""

    prefix = kind = chunk_kind = ""

    def __init__(self, tokenizer: Tokenizer, body: Any, model: str, request_id: str, streams: Sequence[Stream]) -> None:
        self.tokenizer, self.body, self.streams = tokenizer, body, streams
        self.head = {"id": f"{self.prefix}{request_id}", "created": int(time.time()), "model": model}
        options = body.stream_options
        self.with_usage = options is not None and options.include_usage
        self.continuous = options is not None and options.continuous_usage_stats
        self.n = body.n or 1

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(s.request.prompt_token_ids) for s in self.streams)
        new = sum(len(out.token_ids) for s in self.streams for out in s.request.outputs)
        cached = sum(s.seqs[0].cached for s in self.streams)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def timings(self) -> dict[str, float]:
        found = [s.request.metrics for s in self.streams if s.request.metrics is not None]
        return {
            "time_to_first_token_s": min((m.time_to_first_token_s for m in found), default=0.0),
            "total_s": max((m.total_s for m in found), default=0.0),
        }

    def opening(self) -> list[dict[str, Any]]:
        return []

    def events(self, prompt: int, delta: Delta) -> list[dict[str, Any]]:
        request = delta.request
        return [
            self._chunk([self._delta(prompt, new, request.outputs[new.index])])
            for new in delta.outputs
            if new.text or new.finish_reason or (new.token_ids and (new.logprobs or self.body.return_token_ids))
        ]

    def closing(self) -> list[dict[str, Any]]:
        if not self.with_usage:
            return []
        return [self._chunk([]) | {"usage": self.usage(), "timings": self.timings()}]

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(prompt, out) for prompt, s in enumerate(self.streams) for out in s.request.outputs]
        return self.head | {
            "object": self.kind,
            "choices": choices,
            "usage": self.usage(),
            "timings": self.timings(),
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk: dict[str, Any] = self.head | {"object": self.chunk_kind, "choices": choices}
        if self.with_usage or self.continuous:
            chunk["usage"] = self.usage() if self.continuous else None
        return chunk

    def _delta(self, prompt: int, new: CompletionDelta, so_far: CompletionOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, prompt: int, out: CompletionOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _end(self, prompt: int, out: CompletionOutput | CompletionDelta, seed: int | None) -> dict[str, Any]:
        """The fields of a choice that come with its end."""
        end: dict[str, Any] = {"index": prompt * self.n + out.index, "finish_reason": out.finish_reason}
        if out.finish_reason is not None:
            end |= {"stop_reason": out.stop_reason, "seed": seed}
        if self.body.return_token_ids:
            end["token_ids"] = list(out.token_ids)
        return end

    def _token(self, token: int) -> str:
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")


class _Chat(_Answer):
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": first, "logprobs": None, "finish_reason": None}]) for i in range(self.n)
        ]

    def _delta(self, prompt: int, new: CompletionDelta, so_far: CompletionOutput) -> dict[str, Any]:
        delta = {"content": new.text} if new.text or new.logprobs else {}
        return self._end(prompt, new, so_far.seed) | {
            "delta": delta,
            "logprobs": self._logprobs(new.token_ids, new.logprobs),
        }

    def _choice(self, prompt: int, out: CompletionOutput) -> dict[str, Any]:
        return self._end(prompt, out, out.seed) | {
            "message": {"role": "assistant", "content": out.text, "refusal": None},
            "logprobs": self._logprobs(out.token_ids, out.logprobs),
        }

    def whole(self) -> dict[str, Any]:
        more = {"prompt_token_ids": self.streams[0].request.prompt_token_ids} if self.body.return_token_ids else {}
        return super().whole() | more

    def _logprobs(self, ids: Sequence[int], tables: Tables | None) -> dict[str, Any] | None:
        if tables is None:
            return None
        content = [
            self._entry(token, table[token])
            | {"top_logprobs": [self._entry(t, entry) for t, entry in _best(table, self.body.top_logprobs or 0)]}
            for token, table in zip(ids, tables, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, entry: Logprob) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": self._token(token), "logprob": entry.logprob, "bytes": list(data)}


class _Completion(_Answer):
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._begun: set[tuple[int, int]] = set()
        self._texts: dict[tuple[int, int], _Offsets] = {}

    def _delta(self, prompt: int, new: CompletionDelta, so_far: CompletionOutput) -> dict[str, Any]:
        first = (prompt, new.index) not in self._begun
        self._begun.add((prompt, new.index))
        return self._made(prompt, new, so_far.seed, first)

    def _choice(self, prompt: int, out: CompletionOutput) -> dict[str, Any]:
        return self._made(prompt, out, out.seed, True)

    def _made(self, prompt: int, out: Any, seed: int | None, first: bool) -> dict[str, Any]:
        request = self.streams[prompt].request
        text, ids, tables = out.text, list(out.token_ids), out.logprobs
        if first and self.body.echo:
            text, ids = (request.prompt or "") + text, [*request.prompt_token_ids, *ids]
            if request.prompt_logprobs is not None and self.body.logprobs is not None:
                tables = [*(table or {} for table in request.prompt_logprobs), *(tables or ())]
        made = self._end(prompt, out, seed) | {"text": text, "logprobs": None}
        if self.body.logprobs is not None and tables is not None:
            made["logprobs"] = self._logprobs((prompt, out.index), ids, tables)
        if self.body.return_token_ids and first:
            made["prompt_token_ids"] = request.prompt_token_ids
        return made

    def _logprobs(self, key: tuple[int, int], ids: Sequence[int], tables: Tables) -> dict[str, Any]:
        offsets = self._texts.setdefault(key, _Offsets())
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, table in zip(ids, tables, strict=True):
            found["tokens"].append(self._token(token))
            found["token_logprobs"].append(table[token].logprob if token in table else None)
            best = _best(table, self.body.logprobs)
            found["top_logprobs"].append({self._token(t): e.logprob for t, e in best} if token in table else None)
            found["text_offset"].append(offsets.next(self.tokenizer.token_bytes(token)))
        return found


class _Offsets:
    """Where each token begins, in characters of the text that the tokens before it complete."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, data: bytes) -> int:
        at = self._at
        self._at += len(self._decoder.decode(data))
        return at


def _best(table: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest tokens, and those that were asked for by name."""
    ranked = [(token, e) for token, e in table.items() if e.rank is not None and e.rank <= count]
    named = [(token, e) for token, e in table.items() if e.rank is None]
    return sorted(ranked, key=lambda item: item[1].rank or 0) + named


def failed(streams: Sequence[Stream]) -> InferaxError | None:
    """The error of the first sample that failed."""
    return next((s.request.error for s in streams if s.request.error is not None), None)
