"""A conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from inferax.engine.params import SamplingParams
from inferax.errors import InferaxError, UnsupportedError
from inferax.serving.session import Session
from inferax.serving.text import printable

_HELP = """\
/reset        forget the conversation; the system message stays
/system TEXT  set the system message; without TEXT, remove it
/help         this list
/exit         leave (or Ctrl-D)
Ctrl-C stops an answer; once more, it stops at once. \"\"\" begins and ends a message of several lines.
A message that begins with a command's name goes through with a space before it."""


def chat(session: Session, params: SamplingParams, *, system: str | None) -> int:
    """Reads messages from stdin and answers them until its end. Returns the exit code."""
    llm = session.llm
    if llm.model.template is None:
        raise UnsupportedError(f"{llm.model.source}: it has no chat template; use `inferax generate` with it instead")
    if sys.stdin.isatty():
        session.note("/help lists the commands, Ctrl-D leaves")
    history: list[dict[str, str]] = []
    for message in _messages():
        command, _, rest = message.partition(" ")
        if command in ("/exit", "/quit"):
            break
        elif command == "/reset":
            history.clear()
        elif command == "/system":
            system = rest.strip() or None
        elif command == "/help":
            print(_HELP, file=sys.stderr)
        elif command.startswith("/") and command[1:].isalpha():
            print(f"{printable(command)} is not a command; /help lists them", file=sys.stderr)
        elif message.strip():
            first = [] if system is None else [{"role": "system", "content": system}]
            asked = [*history, {"role": "user", "content": message.strip()}]
            try:
                with _interruptible() as stopped:
                    answer = session.answer(session.render([*first, *asked]), params, stopped)
            except InferaxError as error:
                print(f"inferax: error: {printable(str(error))}; the message is dropped", file=sys.stderr)
            except KeyboardInterrupt:
                session.note("stopped; the message is dropped")
            else:
                history = [*asked, {"role": "assistant", "content": answer}]
    return 0


def _messages() -> Iterator[str]:
    """Messages from stdin: a line each, or several between triple quotes."""
    if sys.stdin.isatty():
        try:
            import readline  # noqa: F401  # input() edits lines with it
        except ImportError:
            pass
    while True:
        try:
            message = _line(">>> ")
            if message.startswith('"""'):
                message = message[3:]
                while not message.rstrip().endswith('"""'):
                    message += "\n" + _line("... ")
                message = message.rstrip()[:-3]
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        except EOFError:
            if sys.stdin.isatty():
                print(file=sys.stderr)
            return
        yield message


def _line(prompt: str) -> str:
    if sys.stdin.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C only makes the given function true; the next one is a KeyboardInterrupt again."""
    pressed = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
