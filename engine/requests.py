"""`Requests`: turns prompts and parameters into sequences, and refuses by name what cannot be done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from inferax.engine.outputs import RequestOutput
from inferax.engine.params import SamplingParams
from inferax.engine.sampler import LogitsProcessor
from inferax.engine.sequence import Sequence as Seq
from inferax.engine.vocabulary import Breakers, bad_word_ids, check_processors
from inferax.errors import RequestError
from inferax.loaders.detokenizer import Detokenizer
from inferax.loaders.model import Model
from inferax.loaders.template import encode_chat

if TYPE_CHECKING:
    from inferax.engine.grammar import GrammarCompiler

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
Rendered = tuple[str | None, list[int]]


class Requests:
    """Makes the sequences of requests to one model.

    max_model_len: tokens of prompt and answer at most. seed: makes the seeds of requests without one reproducible.
    processors: the runner's. reasoning_end: the text or token ids at which a reasoning block ends; the form that a
        request asks for holds from there on.
    """

    def __init__(
        self,
        model: Model,
        max_model_len: int,
        seed: int | None = None,
        processors: Sequence[LogitsProcessor] = (),
        reasoning_end: str | Sequence[int] | None = None,
    ) -> None:
        self._model, self._config, self._tokenizer = model, model.config, model.tokenizer
        self._max_model_len = max_model_len
        self._processors = processors
        self._breakers = Breakers(model.tokenizer)
        self._reasoning_end = reasoning_end
        self._seeds = np.random.default_rng(seed)

    def render(self, messages: Messages, **kwargs: Any) -> Rendered:
        """A conversation as the text and token ids that the model sees. Never doubles the BOS token.

        Raises TemplateError where the model has no template, or the template raises.
        """
        if self._model.template is None:
            raise RequestError(
                "messages", f"{self._model.source} has no chat template; use generate with a plain prompt instead"
            )
        text = self._model.template.render(messages, **kwargs)
        return text, self._ids(encode_chat(self._tokenizer, text))

    def prompt(self, prompt: Prompt | Rendered, *, add_special_tokens: bool = True) -> Rendered:
        """A prompt as text, where there is one, and token ids. add_special_tokens: BOS before a text, as the model's
        tokenizer has it."""
        if _is_rendered(prompt):
            return prompt  # type: ignore[return-value]
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), self._ids(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return self.prompt(prompt["prompt"], add_special_tokens=add_special_tokens)
            raise RequestError("prompt", "a prompt mapping needs 'prompt' (a string) or 'prompt_token_ids'")
        if isinstance(prompt, str):
            return prompt, self._ids(self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        return None, self._ids(prompt)

    def _ids(self, ids: Any) -> list[int]:
        out = []
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise RequestError("prompt_token_ids", f"{token!r} is not a token id")
            if not 0 <= token < self._config.vocab_size:
                raise RequestError("prompt_token_ids", f"{token} is not in [0, {self._config.vocab_size})")
            out.append(int(token))
        return out

    def make(
        self, request_id: str, prompt: Rendered, params: SamplingParams, *, priority: int = 0
    ) -> tuple[RequestOutput, list[Seq]]:
        """The output of a request, still empty, and its sequences. Raises RequestError for what cannot be done."""
        text, ids = prompt
        p = params
        if not ids:
            raise RequestError("prompt", "it has no tokens")
        if len(ids) >= self._max_model_len:
            raise RequestError(
                "prompt",
                f"it has {len(ids)} tokens, which leaves no room for an answer in the context of "
                f"{self._max_model_len} tokens; shorten it or raise max_model_len",
            )
        room = self._max_model_len - len(ids)
        for field, named in p.named_tokens.items():
            for token in named:
                if token >= self._config.vocab_size:
                    raise RequestError(field, f"{token} is not in [0, {self._config.vocab_size})")
        if p.logits_processors:
            p = replace(p, logits_processors=check_processors(p.logits_processors, self._processors))
        bad_words = bad_word_ids(self._tokenizer, p.bad_words or ())
        breaks = self._breakers.tokens(p.dry_sequence_breakers) if p.dry_multiplier else ()
        form = None if p.structured_outputs is None else self._compiler.compile(p.structured_outputs)  # type: ignore[arg-type]
        seed = int(self._seeds.integers(2**63)) if p.seed is None else p.seed
        # Where frequencies follow the prompt's length, its keys fit no prompt of another length.
        salt = f"{len(ids)}".encode() if any(r.length_dependent for r in self._config.rotaries) else b""
        seqs = [
            Seq(
                request_id=request_id,
                prompt=ids,
                params=p,
                seed=seed,
                index=i,
                max_tokens=room if p.max_tokens is None else min(room, p.max_tokens),
                eos_ids=frozenset(self._tokenizer.eos_ids),
                detokenizer=self._detokenizer(p, ids),
                token_text=self._tokenizer.token_text,
                salt=salt,
                priority=priority,
                grammar=None if form is None else form.matcher(),
                bad_words=bad_words,
                breaks=breaks,
                processors=[q.name for q in self._processors],
            )
            for i in range(p.n)
        ]
        for other in seqs[1:]:
            other.sibling = seqs[0]
        output = RequestOutput(request_id, text, ids, [s.output for s in seqs], False)
        output.prompt_logprobs = seqs[0].prompt_logprobs
        return output, seqs

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        from inferax.engine.grammar import GrammarCompiler

        return GrammarCompiler(self._tokenizer, self._config.vocab_size, reasoning_end=self._reasoning_end)

    def _detokenizer(self, params: SamplingParams, ids: list[int]) -> Detokenizer | None:
        if not params.detokenize:
            return None
        return Detokenizer(self._tokenizer, ids, skip_special_tokens=params.skip_special_tokens)


def _is_rendered(prompt: Any) -> bool:
    return isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], list)
