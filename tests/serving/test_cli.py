"""The command line as its users meet it: what goes to stdout and to stderr, exit codes, and errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedModel

import inferax.serving.info
from inferax.engine.params import SamplingParams
from inferax.loaders.tensors import MappedTensors
from inferax.serving.chat import chat
from inferax.serving.cli import build_parser, main
from inferax.serving.text import printable, with_unit
from tests.tiny_models import cases, greedy, save_hf, tiny_tokenizer, write_gguf

CLI = [sys.executable, "-m", "inferax.serving.cli"]
PROMPT = "ethers on the marsh"
# The same programs for all tests, of which only the first compiles them.
ENDLESS = ("--compute", "exact", "--ignore-eos", "--max-tokens", "60000")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return next(case for case in cases() if case.name == "llama/gqa").build()


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template, as safetensors in three shards, with room for a long answer."""
    path = tmp_path_factory.mktemp("tiny") / "hf"
    save_hf(model, path, max_shard_size="150KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 16}))
    return path


@pytest.fixture(scope="module")
def file(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a GGUF file, with a context of 128 tokens."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_gguf(model, path, "Q8_0")
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user without cached programs, whose next starts find those of the first."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "PYTHONIOENCODING": "utf-8"}


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """For calls of `main` here, in which nothing is compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    assert not (tmp_path / "cache").exists()


def run(environment: dict[str, str], *args: str | Path, stdin: bytes | None = None, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a process that ends with `code`."""
    feed = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    done = subprocess.run([*CLI, *map(str, args)], env=environment, capture_output=True, timeout=120, **feed)  # type: ignore[call-overload]
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


def answer_of(model: PreTrainedModel, prompt: str, count: int) -> str:
    """The greedy answer that transformers gives."""
    tokenizer = tiny_tokenizer(model.config.vocab_size)
    ids = greedy(model, tokenizer.encode(prompt).ids, count)
    return tokenizer.decode(ids)


# -- starting


def test_help_is_light_and_quick() -> None:
    script = (
        "import sys\nfrom inferax.serving.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "heavy = {'jax', 'numpy', 'inferax.engine', 'inferax.loaders', 'logging'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        taken.append(time.perf_counter() - started)
        assert done.returncode == 0, done.stderr
        assert all(command in done.stdout for command in ("generate", "chat", "info"))
    assert min(taken) < 0.3


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"inferax {version('inferax')}\n"


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield name
                yield from _flags(command)


def test_docs_name_every_flag() -> None:
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    named = set(re.findall(r"--[a-z][a-z-]*", page))
    parser = {flag for flag in _flags(build_parser()) if flag.startswith("--")}
    assert len(parser) > 15
    assert parser == named
    assert all(f"## inferax {name}" in page for name in _flags(build_parser()) if not name.startswith("--"))


# -- generate


def test_generate_streams_the_answer_of_transformers(
    model: PreTrainedModel, folder: Path, environment: dict[str, str]
) -> None:
    flags = ("--model", folder, *ENDLESS, "--temperature", "0", "--max-tokens")
    out, err = run(environment, "generate", PROMPT, "--raw", *flags, "12", "--progress")
    expected = answer_of(model, PROMPT, 12)
    assert out == expected + ("" if expected.endswith("\n") else "\n")
    # Progress and figures are on stderr.
    assert "Loading" in err and "Compiling forward" in err
    figures = err[err.rindex("[") :]
    assert f"{len(tiny_tokenizer(model.config.vocab_size).encode(PROMPT).ids)} tokens in, 12 out" in figures
    assert re.search(r"first token after \d+\.\d\d s, then \d+\.\d tokens/s, --max-tokens 12 reached", figures)
    assert "4 programs compiled" in figures and "seed" not in figures
    cache = Path(environment["XDG_CACHE_HOME"]) / "inferax"
    assert list((cache / "programs").iterdir())

    # By the chat template; from stdin, with the stop at a token's limit and nothing on stderr.
    rendered = f"<|bos|>[system] {PROMPT}\n[user] {PROMPT}\n[assistant]"
    expected = answer_of(model, rendered, 9)
    stdin = (PROMPT + "\n").encode()
    out, err = run(environment, "generate", "--system", PROMPT, "--quiet", *flags, "9", stdin=stdin)
    assert (out, err) == (expected + ("" if expected.endswith("\n") else "\n"), "")


def test_second_start_compiles_nothing_and_a_seed_repeats(folder: Path, environment: dict[str, str]) -> None:
    flags = ("generate", "-", "--raw", "--model", folder, *ENDLESS, "--max-tokens", "20")
    first, err = run(environment, *flags, stdin=PROMPT.encode())
    assert "\r" not in err and err.count("\n") == 1  # no bars where nobody watches
    seed = re.findall(r"seed (\d+)", err)[0]
    again, err = run(environment, *flags, "--seed", seed, stdin=PROMPT.encode())
    assert again == first
    assert "compiled" not in err


def test_prompt_that_fills_the_context(file: Path, environment: dict[str, str]) -> None:
    out, err = run(environment, "generate", "e" * 200, "--raw", "--model", file, code=1)
    assert out == ""
    assert re.fullmatch(r"inferax: error: prompt: it has 200 tokens, .* context of 128 tokens.*\n", err)


@pytest.fixture
def answering(folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process well into an endless answer."""
    flags = ("--raw", "--model", folder, *ENDLESS)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*CLI, "generate", PROMPT, *flags], env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        if not process.stdout.read(1):
            pytest.fail(process.stderr.read().decode())
        yield process


def test_reader_that_leaves(answering: subprocess.Popen[bytes]) -> None:
    assert answering.stdout is not None and answering.stderr is not None
    answering.stdout.close()
    assert answering.stderr.read() == b""
    assert answering.wait(60) == 141


def test_ctrl_c_ends_generate_quietly(answering: subprocess.Popen[bytes]) -> None:
    answering.send_signal(signal.SIGINT)
    out, err = answering.communicate(timeout=60)
    assert out.endswith(b"\n")
    assert err == b""
    assert answering.returncode == 130


def test_default_model(smollm2_path: Path) -> None:
    """The built-in model, with the user's own cache."""
    del smollm2_path  # it is there
    flags = ("--temperature", "0", "--max-tokens", "12")
    out, err = run({**os.environ}, "generate", "What is the capital city of Japan?", *flags)
    assert out == "The capital city of Japan is Tokyo.\n"
    assert re.match(r"\[38 tokens in, 9 out, first token after ", err)


# -- info


def test_info_of_a_gguf_reads_no_weights(
    model: PreTrainedModel, file: Path, in_process: None, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(MappedTensors, "read", lambda *_: pytest.fail("a tensor was read"))
    assert main(["info", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    reader = gguf.GGUFReader(file)
    assert found["parameters"] == model.num_parameters() == sum(int(t.n_elements) for t in reader.tensors)
    assert found["weight_bytes"] == sum(int(t.n_bytes) for t in reader.tensors)
    by_type: dict[str, list[int]] = {}
    for tensor in reader.tensors:
        share = by_type.setdefault(tensor.tensor_type.name, [0, 0, 0])
        for i, value in enumerate((1, int(tensor.n_elements), int(tensor.n_bytes))):
            share[i] += value
    assert {t["type"]: [t["tensors"], t["weights"], t["bytes"]] for t in found["types"]} == by_type
    assert set(by_type) == {"Q8_0", "F32"}
    c = model.config
    kv = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    assert found["kv_bytes_per_token"] == {"bfloat16": 2 * kv, "float32": 4 * kv}
    assert (found["layers"], found["heads"], found["kv_heads"], found["context_length"]) == (2, 4, 2, 128)
    assert found["files"] == {"tiny.gguf": file.stat().st_size}
    assert found["tokenizer"] == {
        "kind": "BPE (gpt2 gpt-2)", "size": 272, "bos": 1, "eos": [2], "pad": 0, "unk": None, "adds_bos": False,
    }  # fmt: skip
    assert found["chat_template"].startswith("{{ bos_token }}") and found["problems"] == []

    assert main(["info", str(file)]) == 0
    table = capsys.readouterr().out
    for text in (
        "GGUF v3",
        "llama",
        f"{model.num_parameters():,}",
        "Q8_0: ",
        "128 tokens",
        "EOS 2",
        "yes, 2 lines: {{",
    ):
        assert text in table


def test_info_of_a_folder(
    folder: Path, model: PreTrainedModel, in_process: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["info", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == model.num_parameters()
    assert found["weight_bytes"] == 4 * model.num_parameters()
    assert len(found["files"]) == len(list(folder.glob("*.safetensors")))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert found["tokenizer"]["size"] == len(tokenizer)
    assert found["tokenizer"]["eos"] == [tokenizer.eos_token_id]
    assert found["chat_template"] == tokenizer.chat_template

    # It says what can be said of a folder without tokenizer.
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert main(["info", str(tmp_path / "bare")]) == 0
    table = capsys.readouterr().out
    assert "tokenizer     none" in table and "template      none" in table
    assert re.search(r"^problem .*tokenizer", table, re.MULTILINE)


def test_info_tells_windows(in_process: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = next(case for case in cases() if case.name == "gemma3_text/six-to-one")
    write_gguf(case.build(), tmp_path / "gemma.gguf")
    assert main(["info", str(tmp_path / "gemma.gguf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["windows"] == [[16, 5], [None, 1], [16, 1]]
    assert main(["info", str(tmp_path / "gemma.gguf")]) == 0
    assert "6 layers in a window of 16 tokens, 1 layers in full" in capsys.readouterr().out


# -- errors


def fails(capsys: pytest.CaptureFixture[str], code: int, *args: str | Path) -> str:
    """The one line that a failing command says."""
    try:
        found = main([*map(str, args)])
    except SystemExit as error:
        found = int(error.code or 0)
    captured = capsys.readouterr()
    assert (found, captured.out) == (code, "")
    assert re.fullmatch(r"inferax: error: [^\n]+\n", captured.err)
    return captured.err


@pytest.mark.parametrize("command", ["generate hi --model", "chat --model", "info"])
def test_broken_models(
    command: str, file: Path, folder: Path, in_process: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = command.split()
    whole = file.read_bytes()
    for name, content, told in (
        ("magic.gguf", b"GGML" + whole[4:], "b'GGML'"),
        ("header.gguf", whole[:700], "ends at"),
        ("data.gguf", whole[:-1000], "tensor '"),
        ("empty.gguf", b"", "empty"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        message = fails(capsys, 1, *words, path)
        assert name in message and told in message

    strange = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(strange, "lama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = fails(capsys, 1, *words, strange)
    assert "strange.gguf" in message and "'lama'" in message and "'llama'" in message

    assert "nowhere.gguf" in fails(capsys, 1, *words, tmp_path / "nowhere.gguf")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    message = fails(capsys, 1, *words, pickled)
    assert "pickled" in message and "pytorch_model.bin" in message and "safetensors" in message

    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    shard = sorted(cut.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in fails(capsys, 1, *words, cut)
    if command != "info":  # which says what it can
        bare = tmp_path / "bare"
        shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
        message = fails(capsys, 1, *words, bare)
        assert "bare" in message and "tokenizer.json" in message


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (["--temperature", "-1"], "--temperature: -1.0 "),
        (["--temperature", "nan"], "--temperature: nan "),
        (["--temperature", "hot"], "--temperature: invalid float value: 'hot'"),
        (["--top-p", "0"], "--top-p: 0.0 "),
        (["--top-k", "-2"], "--top-k: -2 "),
        (["--min-p", "1.5"], "--min-p: 1.5 "),
        (["--seed", str(2**64)], f"--seed: {2**64} "),
        (["--max-tokens", "0"], "--max-tokens: 0 "),
        (["--stop", ""], "--stop: '' "),
        (["--max-model-len", "500"], "--max-model-len: 500 is not in [2, 128]"),
        (["--kv-cache-memory-bytes", "10"], "--kv-cache-memory-bytes: 10 bytes"),
        (["--compute", "slow"], "--compute: invalid choice: 'slow'"),
        (["--raw", "--system", "Be brief."], "--system: --raw"),
        (["--temp", "1"], "--temp"),
        (["one prompt too many"], "one prompt too many"),
    ],
)
def test_wrong_values_name_the_flag(
    args: list[str], flag: str, file: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag in fails(capsys, 2, "generate", "hi", "--model", file, *args)


def test_wrong_usage(in_process: None, capsys: pytest.CaptureFixture[str], environment: dict[str, str]) -> None:
    assert "generate, chat, serve, info, plan or perplexity" in fails(capsys, 2)
    assert "'generat'" in fails(capsys, 2, "generat", "hi")
    assert "revision" in fails(capsys, 1, "info", "--revision", "main")
    _, err = run(environment, "generate", stdin=b"caf\xe9", code=1)
    assert err == "inferax: error: prompt: stdin is not UTF-8 (unexpected end of data at byte 3)\n"


def test_unexpected_errors_are_told_in_one_line(
    file: Path, in_process: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise ZeroDivisionError("so\nit is")

    monkeypatch.setattr(inferax.serving.info, "describe", broken)
    assert "unexpected ZeroDivisionError: so it is (--debug" in fails(capsys, 1, "info", file)
    with pytest.raises(ZeroDivisionError):
        main(["info", str(file), "--debug"])


def test_model_without_a_template(folder: Path, environment: dict[str, str], tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain, ignore=shutil.ignore_patterns("chat_template*"))
    config = json.loads((plain / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (plain / "tokenizer_config.json").write_text(json.dumps(config))
    _, err = run(environment, "chat", "--model", plain, code=1)
    assert re.fullmatch(r"inferax: error: .*plain: it has no chat template; use `inferax generate` .*\n", err)
    _, err = run(environment, "generate", "hi", "--system", "Be brief.", "--model", plain, code=2)
    assert re.fullmatch(r"inferax: error: --system: .*plain has no chat template.*\n", err)


# -- chat


def test_chat_from_a_pipe_keeps_the_conversation(
    model: PreTrainedModel, folder: Path, environment: dict[str, str]
) -> None:
    def rendered(*messages: str) -> str:
        return "<|bos|>" + "".join(f"{m}\n" for m in messages) + "[assistant]"

    lines = ["tres", "/system B", " /od", "/odd", "/reset", '"""a', 'b"""', "/exit", "not read"]
    first = answer_of(model, rendered("[user] tres"), 2)
    second = answer_of(model, rendered("[system] B", "[user] tres", f"[assistant] {first}", "[user] /od"), 2)
    third = answer_of(model, rendered("[system] B", "[user] a\nb"), 2)
    flags = (*ENDLESS, "--temperature", "0", "--max-tokens", "2", "--quiet")
    out, err = run(environment, "chat", "--model", folder, *flags, stdin="\n".join(lines).encode())
    assert out == "".join(text + ("" if text.endswith("\n") else "\n") for text in (first, second, third))
    assert err == "/odd is not a command; /help lists them\n"


def test_chat_drops_a_message_that_does_not_fit(folder: Path, environment: dict[str, str]) -> None:
    lines = ["e" * 70_000, "tres"]
    flags = (*ENDLESS, "--max-tokens", "4", "--quiet")
    out, err = run(environment, "chat", "--model", folder, *flags, stdin="\n".join(lines).encode())
    assert out
    assert re.fullmatch(r"inferax: error: prompt: it has \d+ tokens, .*; the message is dropped\n", err)


class Terminal:
    """A program on a terminal of its own, as a person sees it."""

    # Makes the terminal the process's controlling one, so that Ctrl-C there is a signal.
    _LAUNCH = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )

    def __init__(self, args: list[str], environment: dict[str, str]) -> None:
        pty = pytest.importorskip("pty")
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", self._LAUNCH, *args],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**environment, "TERM": "dumb"},
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str, timeout_s: float = 60) -> str:
        """What is shown up to the end of `pattern`, from where the last wait ended."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come in {timeout_s} s, but {self.seen[-2000:]!r}"
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:  # Linux's end of a terminal
                data = b""
            assert data, f"the program left before {pattern!r}: {self.seen[-2000:]!r}"
            self.seen += data.decode(errors="replace")
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_chat_in_a_terminal(folder: Path, environment: dict[str, str]) -> None:
    terminal = Terminal([*CLI, "chat", "--model", str(folder), *ENDLESS, "--seed", "1"], environment)
    try:
        terminal.wait_for(">>> ")
        terminal.type("/help\n")
        assert "/reset" in terminal.wait_for("\n>>> ")
        terminal.type("tres\n")
        terminal.wait_for(r"tres\r\n[^\r]*\S{20}")  # well into an endless answer
        terminal.type("\x03")
        shown = terminal.wait_for("\n>>> ")
        assert re.search(r"\[\d+ tokens in, \d+ out, .* stopped, seed 1", shown)
        count = int(re.findall(r"(\d+) tokens in", shown)[0])

        terminal.type("half a line")
        terminal.wait_for("half a line")
        time.sleep(0.2)  # Python overlooks a signal that comes just before it waits for the next key
        terminal.type("\x03")  # drops the line, and nothing else
        terminal.wait_for("\n>>> ")
        terminal.type("/reset\n")
        terminal.wait_for("\n>>> ")
        terminal.type("tres\n")
        terminal.wait_for(r"tres\r\n[^\r]*\S{20}")
        terminal.type("\x03")
        shown = terminal.wait_for("\n>>> ")
        # The conversation began anew: as many tokens as at first.
        assert int(re.findall(r"(\d+) tokens in", shown)[0]) == count
        terminal.type("tres\n")
        terminal.wait_for(r"tres\r\n[^\r]*\S{20}")
        terminal.type("\x03\x03")
        terminal.wait_for("\n>>> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()


def test_second_ctrl_c_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes, the conversation goes on without the message."""
    seen: list[list[str]] = []

    def answer(prompt: Any, params: SamplingParams, stop: Callable[[], bool]) -> str:
        seen.append([message["content"] for message in prompt])
        if "endless" in prompt[-1]["content"]:
            assert not stop()
            signal.raise_signal(signal.SIGINT)
            assert stop()
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second signal should have been an exception")
        return "yes"

    session: Any = SimpleNamespace(llm=mock.MagicMock(), answer=answer, render=lambda m: m, note=lambda text: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\nendless\ntwo"))
    before = signal.getsignal(signal.SIGINT)
    assert chat(session, SamplingParams(), system=None) == 0
    assert seen == [["one"], ["one", "yes", "endless"], ["one", "yes", "two"]]
    assert signal.getsignal(signal.SIGINT) is before


def test_end_of_input_leaves_a_chat(folder: Path, environment: dict[str, str]) -> None:
    terminal = Terminal([*CLI, "chat", "--model", str(folder), *ENDLESS], environment)
    try:
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()


# -- text


def test_text_for_a_terminal() -> None:
    assert printable("a\tb\n\x1b[31mred\x9b\x7f\r") == "a\tb\n\ufffd[31mred\ufffd\ufffd\ufffd"
    sizes = [with_unit(n) for n in (0, 1023, 1024, 1536, 1 << 20, (1 << 30) + 1, 1 << 40, 1 << 52)]
    assert sizes == ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 GiB", "1.0 TiB", "4096.0 TiB"]
