"""A stub engine that streams prepared chunks in vLLM's format, as fast as sockets allow or at a fixed rate.

Run as `python -m benchmarks.stub_engine PORT TOKENS MILLISECONDS_PER_TOKEN`.
"""

from __future__ import annotations

import asyncio
import json
import sys


def _event(choice: dict[str, object], **top: object) -> bytes:
    chunk = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return b"data: " + json.dumps({**chunk, "choices": [choice], **top}).encode() + b"\n\n"


def _chunks(tokens: int) -> list[bytes]:
    first = _event(
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        prompt_token_ids=list(range(1000)),
    )
    chunks = [first]
    for token in range(tokens):
        chunks.append(
            _event(
                {
                    "index": 0,
                    "delta": {"content": " word"},
                    "logprobs": {"content": [{"token": " word", "logprob": -0.5, "bytes": [32], "top_logprobs": []}]},
                    "finish_reason": "stop" if token == tokens - 1 else None,
                    "token_ids": [token],
                }
            )
        )
    return [*chunks, b"data: [DONE]\n\n"]


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunks: list[bytes], pause_seconds: float
) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                continue
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
            )
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for chunk in chunks:
                writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                await writer.drain()
                await asyncio.sleep(pause_seconds)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def serve(port: int, tokens: int, pause_seconds: float) -> None:
    chunks = _chunks(tokens)
    server = await asyncio.start_server(lambda r, w: _answer(r, w, chunks, pause_seconds), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000))
