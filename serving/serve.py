"""`inferax serve`: one model behind the OpenAI API."""

from __future__ import annotations

import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from inferax.engine.async_engine import AsyncEngine
from inferax.errors import InferaxError, RequestError, SourceError
from inferax.serving.server import create_app
from inferax.serving.session import keep_compilations, shows_progress


def serve(args: Namespace) -> int:
    """Serves until SIGINT or SIGTERM; then what runs has `--drain-seconds` to end."""
    keys = _keys(args.api_key or [], args.api_key_file)
    with _bound(args.host, args.port) as listener:  # before the model is loaded, so that a taken port is told at once
        keep_compilations()
        engine = AsyncEngine(
            args.model,
            revision=args.revision,
            compute=args.compute,
            max_model_len=args.max_model_len,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            kv_cache_dtype=args.kv_cache_dtype,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_waiting_requests=args.max_waiting_requests,
            progress=shows_progress(args),
        )
        name = args.served_model_name or engine.model.source.name.removesuffix(".gguf")
        config = uvicorn.Config(
            create_app(engine, name, api_keys=keys),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=args.drain_seconds,
        )
        if not args.quiet:
            host, port = listener.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            print(f"[{name} is served at http://{host}:{port}/v1]", file=sys.stderr, flush=True)
        uvicorn.Server(config).run([listener])
    return 0


def _bound(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise RequestError("port", f"{port} is not in [0, 65535]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise InferaxError(f"{host}:{port} cannot be listened at: {error}") from None
    return listener


def _keys(given: Sequence[str], file: str | None) -> list[str]:
    keys = list(given)
    if file is not None:
        try:
            keys += [line.strip() for line in Path(file).read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(file, f"it cannot be read: {error}", "Give a text file with a key on each line") from None
        if not keys:
            raise SourceError(file, "it has no key", "Give a text file with a key on each line")
    if not all(keys):
        raise RequestError("api_key", "it is empty")
    return keys
