"""The command line: `inferax generate`, `chat`, `serve`, `info`, `plan` and `perplexity`. Documented in docs/cli.md.

Nothing heavy is imported before a command runs, so that `inferax --help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from inferax.errors import InferaxError, MemoryPlanError, RequestError

_INTERRUPTED, _BROKEN_PIPE = 130, 141  # what a shell reports for SIGINT and SIGPIPE
_KV_DTYPES = ("auto", "f32", "bf16", "int8", "fp8")
_MODEL_HELP = "a .gguf file, a folder of safetensors, or org/name[:QUANT][@REVISION] on the Hugging Face hub"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C.

    argv: the arguments without the program's name; by default those of the process.
    Raises SystemExit as argparse does: after --help, and with 2 for arguments that cannot be parsed.
    """
    top = build_parser()
    args = top.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the terminal's encoding lacks is no reason to fail
            stream.reconfigure(errors="replace")
    try:
        if args.version:
            from importlib.metadata import version

            print(f"inferax {version('inferax')}")
            return 0
        if args.command is None:
            top.error("a command is needed: generate, chat, serve, info, plan or perplexity")
        with _libraries_hushed(not args.debug):
            code = _run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would fail again, and be reported, when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except Exception as error:
        if args.debug:
            raise
        return _report(error, args)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = _Parser(
        prog="inferax",
        description="Runs large language models with JAX.",
        epilog="`inferax COMMAND --help` lists a command's options.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="store_true", help="print the version and leave")
    top.set_defaults(debug=False, command=None)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)

    generate = _command(commands, "generate", "answer one prompt: the answer goes to stdout, the rest to stderr")
    generate.add_argument("prompt", nargs="?", help="the prompt; - or nothing reads it from stdin")
    _add_model(generate, "--model")
    _add_sampling(generate)
    generate.add_argument("--raw", action="store_true", help="complete the prompt as it stands, without chat template")
    _add_output(generate)

    chat = _command(commands, "chat", "hold a conversation; /help there lists what can be done")
    _add_model(chat, "--model")
    _add_sampling(chat)
    _add_output(chat)

    serve = _command(commands, "serve", "serve a model through the OpenAI API")
    _add_model(serve, "model")
    _add_load(serve)
    _add_server(serve)
    _add_output(serve)

    info = _command(commands, "info", "say what a model is, without loading its weights")
    info.add_argument("model", nargs="?", metavar="MODEL", help=f"{_MODEL_HELP} (default: the built-in model)")
    info.add_argument("--revision", help="branch, tag or commit on the hub")
    info.add_argument("--json", action="store_true", help="print it as JSON")
    _add_output(info)

    plan = _command(commands, "plan", "say where an engine's memory goes and what fits, without loading the weights")
    _add_model(plan, "model")
    _add_load(plan)
    plan.add_argument("--no-compile", action="store_true", help="estimate temporaries, in place of compiling the step")
    plan.add_argument("--json", action="store_true", help="print it as JSON")
    _add_output(plan)

    scored = _command(commands, "perplexity", "say how well a model predicts a text")
    scored.add_argument("model", nargs="?", metavar="MODEL", help=f"{_MODEL_HELP} (default: the built-in model)")
    scored.add_argument("file", metavar="FILE", help="a text in UTF-8; - reads it from stdin")
    scored.add_argument("--revision", help="branch, tag or commit on the hub")
    scored.add_argument("--context", type=_window, default=512, metavar="TOKENS", help="of a window (default: 512)")
    scored.add_argument("--compute", choices=("exact", "fast"), default="fast", help="as for generate")
    scored.add_argument("--kv-cache-dtype", choices=_KV_DTYPES, default="auto", help="as for generate")
    scored.add_argument("--json", action="store_true", help="print it as JSON")
    _add_output(scored)
    return top


def _window(text: str) -> int:
    if not text.isdigit() or int(text) < 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, 4 or more")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"inferax: error: {message} (see {self.prog} --help)\n")


def _command(commands: argparse._SubParsersAction[_Parser], name: str, summary: str) -> _Parser:
    command = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
    )
    command.set_defaults(command=name)
    return command


def _add_model(command: argparse.ArgumentParser, name: str) -> None:
    group = command.add_argument_group("model")
    optional: dict[str, Any] = {} if name.startswith("-") else {"nargs": "?"}
    group.add_argument(name, **optional, metavar="MODEL", help=f"{_MODEL_HELP} (default: the built-in model)")
    group.add_argument("--revision", help="branch, tag or commit on the hub")
    group.add_argument(
        "--compute", choices=("exact", "fast"), default="fast", help="float32 throughout, or fast (the default)"
    )
    group.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="room for prompt and answer (default: the model's context)"
    )
    group.add_argument(
        "--kv-memory",
        "--kv-cache-memory-bytes",
        dest="kv_cache_memory_bytes",
        type=_size,
        metavar="SIZE",
        help="size of the KV cache: bytes, or 512M, 2G, 1.5GiB (default: what `inferax plan` says)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=_KV_DTYPES,
        default="auto",
        help="how the KV cache holds numbers (default: auto, which is bf16 for fast and f32 for exact)",
    )


def _add_load(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("load")
    group.add_argument("--max-num-seqs", type=int, default=16, metavar="N", help="sequences at once (default: 16)")
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=256, metavar="TOKENS", help="tokens per step (default: 256)"
    )


def _add_server(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: 8000)")
    group.add_argument("--served-model-name", metavar="NAME", help="the model's name for clients (default: its file's)")
    group.add_argument("--api-key", action="append", metavar="KEY", help="demand this key; may be repeated")
    group.add_argument("--api-key-file", metavar="FILE", help="demand one of the keys in FILE, one on each line")
    group.add_argument(
        "--max-waiting-requests", type=int, default=1024, metavar="N", help="refuse more with 429 (default: 1024)"
    )
    group.add_argument(
        "--drain-seconds", type=int, default=30, metavar="S", help="for what runs at SIGTERM to end in (default: 30)"
    )


def _size(text: str) -> int:
    """Bytes of a size as people write it: 4096, 512M, 2G, 1.5GiB, 500MB. K, M, G and T are powers of 1024, with B of
    1000."""
    import re

    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?B)?|B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M, 2G, 1.5GiB or a number of bytes")
    number, unit, suffix = found.groups()
    base = 1000 if (suffix or "").upper() == "B" else 1024
    power = 1 + "KMGT".index(unit.upper()) if unit else 0
    return int(round(float(number) * float(base**power)))


def _add_sampling(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("answer")
    group.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    group.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest token (default: 0.7)")
    group.add_argument("--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling (default: 0.95)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="likeliest tokens to keep (default: 0, all)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="least share of the best (default: 0)")
    group.add_argument("--seed", type=int, help="makes the answer repeatable (default: a random one, which is told)")
    group.add_argument("--max-tokens", type=int, default=1024, metavar="TOKENS", help="longest answer (default: 1024)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before TEXT; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end of answer")


def _add_output(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("output")
    group.add_argument("--quiet", action="store_true", help="no figures and no progress, only errors, on stderr")
    group.add_argument("--progress", action="store_true", help="progress bars even where stderr is not a terminal")
    group.add_argument("--debug", action="store_true", help="Python's traceback and the libraries' logs on errors")


def _run(args: argparse.Namespace) -> int:
    if args.command == "info":
        from inferax.serving.info import info

        return info(args)
    if args.command == "plan":
        from inferax.serving.plan import plan

        return plan(args)
    if args.command == "perplexity":
        from inferax.serving.perplexity import perplexity

        return perplexity(args)
    if args.command == "serve":
        from inferax.serving.serve import serve

        return serve(args)
    from inferax.engine.params import SamplingParams

    # Before the model is loaded, so that a wrong value is told at once.
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
    )
    if args.command == "generate":
        if args.raw and args.system is not None:
            raise RequestError("system", "--raw has no conversation for a system message to be in")
        prompt = _prompt(args.prompt)
        from inferax.serving.session import Session

        return Session(args).generate(prompt, params, system=args.system, raw=args.raw)
    from inferax.serving.chat import chat
    from inferax.serving.session import Session

    return chat(Session(args), params, system=args.system)


def _prompt(argument: str | None) -> str:
    if argument not in (None, "-"):
        return argument or ""
    if argument is None and sys.stdin.isatty():
        raise RequestError("prompt", 'give one, as in `inferax generate "Why is the sky blue?"`, or - to type it')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("prompt", f"stdin is not UTF-8 ({error.reason} at byte {error.start})") from None
    return text.removesuffix("\n").removesuffix("\r")


def _report(error: Exception, args: argparse.Namespace) -> int:
    from inferax.serving.text import printable

    code, text = 1, str(error)
    if isinstance(error, RequestError):
        # The engine names its parameters; here they are flags.
        names = vars(args).keys() - {"prompt", "command", "file"}
        flags = {name: f"--{name.replace('_', '-')}" for name in names}
        if error.field in flags:
            code, text = 2, f"{flags[error.field]}{text.removeprefix(error.field)}"
        for name, flag in flags.items():
            text = text.replace(name, flag) if "_" in name else text
        code = 1 if args.command == "plan" and isinstance(error, MemoryPlanError) else code
        code = 2 if error.field == "prompt" and args.prompt is None and sys.stdin.isatty() else code
    elif not isinstance(error, InferaxError):
        text = f"unexpected {type(error).__name__}: {' '.join(text.split())} (--debug shows where it comes from)"
    print(f"inferax: error: {printable(text)}", file=sys.stderr)
    return code


@contextmanager
def _libraries_hushed(hush: bool) -> Iterator[None]:
    """Keeps stderr for what concerns the user: no warnings and logs of libraries."""
    if not hush:
        yield
        return
    import logging
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


if __name__ == "__main__":
    sys.exit(main())
