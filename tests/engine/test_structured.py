"""Structured output through the engine: answers of a given form, beside others, after preemption, and refused forms.
tests/engine/test_grammar.py tests the grammars themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import inferax
from inferax import SamplingParams
from inferax.engine.structured import StructuredOutputs
from inferax.errors import RequestError

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "langs": {"type": "array", "items": {"enum": ["de", "fr", "it"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "langs"],
    "additionalProperties": False,
}
PROMPT = "A person as JSON: "


def asking(temperature: float = 1.0, max_tokens: int = 80, **form: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=3, max_tokens=max_tokens, structured_outputs=StructuredOutputs(**form)
    )


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> inferax.LLM:
    return inferax.LLM(smollm2_path, max_model_len=256, max_num_seqs=8)


def texts(llm: inferax.LLM, params: list[SamplingParams]) -> list[str]:
    outputs = llm.generate([PROMPT] * len(params), params)
    assert all(o.outputs[0].finish_reason == "stop" for o in outputs), [o.outputs[0] for o in outputs]
    return [o.outputs[0].text for o in outputs]


def test_every_kind_beside_each_other_and_beside_a_free_answer(llm: inferax.LLM) -> None:
    free = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True, logprobs=0)
    (alone,) = llm.generate([PROMPT], [free])
    forms = [
        asking(json=PERSON, disable_any_whitespace=True),
        asking(temperature=0, json=PERSON, disable_any_whitespace=True),
        asking(regex=r"[a-f]{3}-\d{2,4}"),
        asking(choice=["yes", "no", "maybe so"]),
        asking(grammar='root ::= "<" [0-9]+ ">" "!"?', max_tokens=200),
    ]
    outputs = llm.generate([PROMPT] * 6, [*forms, free])
    person, greedy, pattern, choice, gbnf = (o.outputs[0].text for o in outputs[:5])
    for text in (person, greedy):
        jsonschema.validate(json.loads(text), PERSON)
    assert re.fullmatch(r"[a-f]{3}-\d{2,4}", pattern)
    assert choice in ("yes", "no", "maybe so")
    assert re.fullmatch(r"<\d+>!?", gbnf) or outputs[4].outputs[0].finish_reason == "length"
    beside, lone = outputs[5].outputs[0], alone.outputs[0]
    assert (beside.token_ids, beside.cumulative_logprob) == (lone.token_ids, lone.cumulative_logprob)


def test_the_same_answer_alone_and_in_a_crowd_that_is_preempted(smollm2_path: Path) -> None:
    model = inferax.load(smollm2_path)
    roomy = inferax.LLM(model, max_model_len=128, max_num_seqs=1)
    want = texts(roomy, [asking(json=PERSON, disable_any_whitespace=True)])
    page = roomy.config.kv_bytes_per_token("bfloat16") * 16
    tight = inferax.LLM(model, max_model_len=128, max_num_seqs=8, kv_cache_memory_bytes=12 * page)
    got = texts(tight, [asking(json=PERSON, disable_any_whitespace=True)] * 6)
    assert got == want * 6


def test_samples_of_one_request_go_their_own_ways(llm: inferax.LLM) -> None:
    params = SamplingParams(n=4, temperature=1.5, seed=1, max_tokens=60, structured_outputs={"regex": "[a-z]{4}"})
    (output,) = llm.generate([PROMPT], [params])
    assert all(re.fullmatch("[a-z]{4}", o.text) for o in output.outputs)
    assert len({o.text for o in output.outputs}) > 1


def test_the_form_begins_after_the_reasoning(smollm2_path: Path) -> None:
    # The model does not reason by itself: here its reasoning is its first sentence.
    llm = inferax.LLM(smollm2_path, max_model_len=256, max_num_seqs=2, reasoning_end=".")
    params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=StructuredOutputs(regex="[0-9]{3}x"))
    (output,) = llm.generate(["The capital of France is"], [params])
    reasoning, _, answer = output.outputs[0].text.partition(".")
    assert reasoning.startswith(" Paris") and re.fullmatch(r"[0-9]{3}x", answer.strip()), output.outputs[0].text
    at_once = StructuredOutputs(regex="[0-9]{3}x", enable_in_reasoning=True)
    (output,) = llm.generate(["Let me think. "], [SamplingParams(max_tokens=60, structured_outputs=at_once)])
    assert re.fullmatch(r"[0-9]{3}x", output.outputs[0].text)


def test_a_wrong_form_refuses_its_request_only(llm: inferax.LLM) -> None:
    for form, field in (
        ({"json": {"type": "nothing"}}, "structured_outputs.json"),
        ({"regex": "(a"}, "structured_outputs.regex"),
        ({"grammar": "root ::= nowhere"}, "structured_outputs.grammar"),
    ):
        with pytest.raises(RequestError) as caught:
            llm.generate([PROMPT], [SamplingParams(structured_outputs=form)])
        assert caught.value.field == field
    for given, problem in (
        ({"jsn": {}}, "structured_outputs: it has no field 'jsn'"),
        ("x", "structured_outputs: 'x'"),
    ):
        with pytest.raises(RequestError, match=problem):
            SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
    assert texts(llm, [asking(choice=["a"])]) == ["a"]
