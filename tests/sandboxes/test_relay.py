"""The way from a sandbox to the gateway, tried from inside."""

from __future__ import annotations

import asyncio

import pytest

from clawloop.sandboxes.boxes import MIB, Limits, Sandboxes
from tests.sandboxes.test_bubblewrap import folders, python, sandboxes

__all__ = ["folders", "sandboxes"]

pytestmark = pytest.mark.slow


async def test_the_gateway_is_reached_where_no_process_can_be_started(sandboxes: Sandboxes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readexactly(5))[::-1])
        await writer.drain()
        writer.close()

    code = """
import os, socket, time
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
except OSError:
    pass
for _ in range(3):
    with socket.create_connection(('127.0.0.1', 8080), 20) as gateway:
        gateway.sendall(b'hello')
        print(gateway.recv(100).decode())
"""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    gateway = ("127.0.0.1", server.sockets[0].getsockname()[1])
    async with server:
        result = await python(sandboxes, code, gateway=gateway, limits=Limits(processes=16))
    assert result.output == b"olleh\n" * 3


async def test_much_goes_both_ways_at_once_on_several_connections(sandboxes: Sandboxes) -> None:
    """More than sockets hold, each way waiting for the other."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    code = f"""
import hashlib, os, socket, threading
sent = os.urandom({4 * MIB})
def talk():
    with socket.create_connection(('127.0.0.1', 8080), 60) as gateway:
        def send():
            gateway.sendall(sent)
            gateway.shutdown(socket.SHUT_WR)
        threading.Thread(target=send).start()
        got = bytearray()
        while chunk := gateway.recv(65536):
            got += chunk
        print(got == sent)
talking = [threading.Thread(target=talk) for _ in range(4)]
for thread in talking:
    thread.start()
for thread in talking:
    thread.join()
"""
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    gateway = ("127.0.0.1", server.sockets[0].getsockname()[1])
    async with server:
        assert (await python(sandboxes, code, gateway=gateway)).output == b"True\n" * 4


async def test_a_client_that_goes_away_is_gone_for_the_gateway_and_others_stay(sandboxes: Sandboxes) -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(1) == b"2":
            await gone.wait()  # the first client's end was seen before the second is answered
            writer.write(b"still here")
            writer.close()
            return
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        except ConnectionError:
            gone.set()

    code = """
import socket
second = socket.create_connection(('127.0.0.1', 8080), 60)
second.sendall(b'2')
with socket.create_connection(('127.0.0.1', 8080), 60) as first:
    first.sendall(b'1')
    first.recv(10)
print(second.recv(100).decode())
"""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    gateway = ("127.0.0.1", server.sockets[0].getsockname()[1])
    async with server:
        assert (await python(sandboxes, code, gateway=gateway)).output == b"still here\n"
