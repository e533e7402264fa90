"""A stub engine that streams prepared chunks in vLLM's format, as fast as sockets allow or at a fixed rate.

Run as `python -m benchmarks.stub_engine PORT TOKENS MILLISECONDS_PER_TOKEN`; `GET /set?milliseconds=N` changes the
rate. The prompt's token ids, in the first chunk, are as many as a request of that size has: one for each four bytes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from dataclasses import dataclass

BYTES_PER_TOKEN = 4
# Prompts are rounded up to it, so that few sizes have to be prepared.
_STEP_TOKENS = 256


def _event(choice: dict[str, object], **top: object) -> bytes:
    chunk = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return _framed(b"data: " + json.dumps({**chunk, "choices": [choice], **top}).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    """One chunk of HTTP's chunked encoding."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@functools.lru_cache(maxsize=32)
def _first(prompt_tokens: int) -> bytes:
    delta = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return _event(delta, prompt_token_ids=list(range(prompt_tokens)))


def _rest(tokens: int) -> list[bytes]:
    chunks = [
        _event(
            {
                "index": 0,
                "delta": {"content": " word"},
                "logprobs": {"content": [{"token": " word", "logprob": -0.5, "bytes": [32], "top_logprobs": []}]},
                "finish_reason": "stop" if token == tokens - 1 else None,
                "token_ids": [token],
            }
        )
        for token in range(tokens)
    ]
    return [*chunks, _framed(b"data: [DONE]\n\n")]


@dataclass
class Stub:
    rest: list[bytes]
    pause_seconds: float

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    if b"/set?milliseconds=" in head:
                        self.pause_seconds = float(head.split(b"milliseconds=")[1].split()[0]) / 1000
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                length = next(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                await reader.readexactly(length)
                await self._answer(writer, -(-length // BYTES_PER_TOKEN // _STEP_TOKENS) * _STEP_TOKENS)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, prompt_tokens: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(_first(prompt_tokens))
        pause, loop = self.pause_seconds, asyncio.get_running_loop()
        began = loop.time()
        for number, chunk in enumerate(self.rest):
            # By the clock: a sleep that ends late must not slow the whole stream down.
            await asyncio.sleep(max(0.0, began + number * pause - loop.time()))
            writer.write(chunk)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def serve(port: int, tokens: int, pause_seconds: float) -> None:
    stub = Stub(_rest(tokens), pause_seconds)
    # As long a line as the longest prompt: the body is read as a whole.
    server = await asyncio.start_server(stub.serve_connection, "127.0.0.1", port, limit=2**21, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000))
