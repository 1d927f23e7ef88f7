"""`LLM` and `SamplingParams`: vLLM's names and shapes, and a typed error for every value that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import inferax
from inferax import SamplingParams
from inferax.errors import RequestError, StepError
from tests.engine.harness import failing

GREEDY = SamplingParams(temperature=0, max_tokens=8)
QUESTION = [{"role": "user", "content": "What is the capital city of Japan?"}]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> inferax.LLM:
    return inferax.LLM(smollm2_path, max_model_len=256, max_num_seqs=4)


def test_generate_takes_what_vllm_takes(llm: inferax.LLM) -> None:
    text = "The capital of France is"
    ids = llm.tokenizer.encode(text)
    want = llm.generate(text, GREEDY)[0]
    assert want.outputs[0].text.startswith(" Paris")
    for prompts in ([text], {"prompt": text}, [{"prompt_token_ids": ids}], ids, [ids]):
        (output,) = llm.generate(prompts, GREEDY)
        assert (output.prompt_token_ids, output.outputs[0].token_ids) == (ids, want.outputs[0].token_ids)
        assert output.finished and output.outputs[0].finish_reason == "length"


def test_one_set_of_parameters_for_each_prompt(llm: inferax.LLM) -> None:
    outputs = llm.generate(["One", "Two"], [GREEDY, SamplingParams(temperature=0, max_tokens=3)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [8, 3]
    with pytest.raises(RequestError, match="sampling_params: 1 given for 2 prompts"):
        llm.generate(["One", "Two"], [GREEDY])


def test_chat_stream_and_generate_agree(llm: inferax.LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    (answer,) = llm.chat(QUESTION, greedy)
    assert answer.outputs[0].text == "The capital city of Japan is Tokyo."
    assert answer.outputs[0].finish_reason == "stop"
    pieces = list(llm.stream(llm.render(QUESTION, add_generation_prompt=True), greedy))
    assert "".join(text for text, _ in pieces) == answer.outputs[0].text
    assert pieces[-1][1].finished and pieces[-1][1].metrics is not None
    both = llm.chat([QUESTION, QUESTION], greedy)
    assert [o.outputs[0].text for o in both] == [answer.outputs[0].text] * 2


def test_n_samples_differ_and_repeat_by_seed(llm: inferax.LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, logprobs=1)
    first, again = (llm.generate("Once upon a time", params)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]
    assert [o.cumulative_logprob for o in first.outputs] == [o.cumulative_logprob for o in again.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3
    assert [o.index for o in first.outputs] == [0, 1, 2]


def test_a_seed_is_drawn_and_told(llm: inferax.LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=6)
    (output,) = llm.generate("Once upon a time", params)
    seed = output.outputs[0].seed
    (again,) = llm.generate("Once upon a time", SamplingParams(temperature=1.0, max_tokens=6, seed=seed))
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


def test_logprobs_have_text(llm: inferax.LLM) -> None:
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1, logprobs=2))
    (table,) = output.outputs[0].logprobs or []
    assert table[output.outputs[0].token_ids[0]].decoded_token == " Paris"
    assert sorted(entry.rank for entry in table.values()) == [1, 2]


def test_stop_strings(llm: inferax.LLM) -> None:
    (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=20, stop="pan"))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("The capital city of Ja", "pan")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: it has no tokens"),
        ({"prompt_token_ids": []}, "prompt: it has no tokens"),
        ({"text": "x"}, "prompt: a prompt mapping needs"),
        ([[1, -1]], r"prompt_token_ids: -1 is not in \[0, 49152\)"),
        ([[1, 49152]], "prompt_token_ids: 49152 is not"),
        ([[1, "x"]], "prompt_token_ids: 'x' is not a token id"),
        ([[1] * 256], "prompt: it has 256 tokens.*context of 256 tokens"),
    ],
)
def test_a_wrong_prompt(llm: inferax.LLM, prompt: Any, message: str) -> None:
    if prompt == []:
        assert llm.generate([], GREEDY) == []
        return
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY)
    assert llm.generate("Still here", GREEDY)[0].finished


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 1.5), ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "hot"),
        ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("top_k", 0.5), ("min_p", -0.1), ("min_p", 2), ("seed", 2**64),
        ("seed", "x"), ("max_tokens", 0), ("max_tokens", True), ("logprobs", -1), ("logprobs", 21), ("stop", [""]),
        ("stop", [1]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("ignore_eos", 1),
        ("presence_penalty", 2.5), ("frequency_penalty", -3), ("repetition_penalty", 0), ("min_tokens", -1),
        ("min_tokens", 17), ("logit_bias", {1: 200.0}), ("logit_bias", {-1: 2.0}), ("logit_bias", {"a": 2.0}),
        ("allowed_token_ids", []), ("allowed_token_ids", [-5]), ("bad_words", "x"),
        ("bad_words", [""]), ("prompt_logprobs", 21),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field}: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute": "quick"}, "compute: 'quick'"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: 0"),
        ({"max_model_len": 9000}, r"max_model_len: 9000 is not in \[2, 8192\]"),
        ({"kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes: 10 bytes hold 0 tokens; one sequence of 8192 needs"),
    ],
)
def test_an_impossible_engine(llm: inferax.LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        inferax.LLM(llm.model, **arguments)


def test_streams_read_in_turns_run_together(llm: inferax.LLM) -> None:
    texts = ["One", "The capital of France is"]
    alone = [output.outputs[0].text for output in llm.generate(texts, GREEDY)]
    got = ["", ""]
    streams = [llm.stream(text, GREEDY) for text in texts]
    for first, second in zip(*streams, strict=True):
        got = [got[0] + first[0], got[1] + second[0]]
        assert llm.generate("Between", SamplingParams(temperature=0, max_tokens=1))[0].finished
    assert got == alone


def test_a_failing_step_raises_when_all_others_have_finished(llm: inferax.LLM) -> None:
    texts = [f"Number {i} of ten is" for i in range(10)]
    alone = [output.outputs[0].token_ids for output in llm.generate(texts, GREEDY)]
    with failing(llm.runner, "forward", lambda n: n == 2, RuntimeError("the device is gone")):
        with pytest.raises(StepError, match="the device is gone") as caught:
            llm.generate(texts, GREEDY)
    assert len(caught.value.outputs) == 10
    failed = [output.error is not None for output in caught.value.outputs]
    assert 1 <= sum(failed) <= 4
    for output, want, bad in zip(caught.value.outputs, alone, failed, strict=True):
        assert output.finished
        assert output.outputs[0].finish_reason == "error" if bad else output.outputs[0].token_ids == want
    assert [output.outputs[0].token_ids for output in llm.generate(texts, GREEDY)] == alone


def test_an_interrupt_leaves_a_usable_engine(llm: inferax.LLM) -> None:
    want = llm.generate("Still", GREEDY)[0].outputs[0].token_ids
    with failing(llm.runner, "sample", lambda n: n == 3, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        llm.generate(["Still", "Here"] * 4, GREEDY)
    assert llm.core.scheduler.live == []
    llm.core.check_integrity()
    assert llm.generate("Still", GREEDY)[0].outputs[0].token_ids == want
    assert {metric.name: metric.value for metric in llm.metrics()}["num_requests_running"] == 0


def test_echo_puts_the_prompt_in_front(llm: inferax.LLM) -> None:
    text = "The capital of France is"
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=1)
    (output,) = llm.generate(text, params)
    echoed, plain = output.echo(), output.outputs[0]
    assert echoed.text == text + plain.text and echoed.token_ids == output.prompt_token_ids + plain.token_ids
    assert echoed.logprobs is not None and len(echoed.logprobs) == len(echoed.token_ids) and echoed.logprobs[0] == {}
    assert all(t in table for t, table in zip(echoed.token_ids[1:], echoed.logprobs[1:], strict=True))
    (scored,) = llm.generate([llm.tokenizer.encode(text)], SamplingParams(max_tokens=0, prompt_logprobs=0))
    with pytest.raises(RequestError, match="echo: the prompt was given as token ids"):
        scored.echo()
    only = scored.echo(prompt=text)
    assert only.text == text and only.finish_reason == "length" and len(only.logprobs or ()) == len(only.token_ids)
