"""Runs gateways on an inherited socket as one process tree: `python -m benchmarks.gateways_on_a_socket FD COUNT`."""

from __future__ import annotations

import signal
import subprocess
import sys

from benchmarks.processes import free_port


def main(descriptor: int, count: int) -> None:
    ports = [free_port() for _ in range(count)]
    gateways = []
    for port in ports:
        command = [sys.executable, "-m", "clawloop.app.cli.main", "gateway", "--fd", str(descriptor)]
        if count > 1:
            command += ["--name", f"gateway-{port}", "--health-port", str(port)]
            command += [f"--peer={peer}" for peer in ports if peer != port]
        gateways.append(subprocess.Popen(command, pass_fds=(descriptor,)))

    def stop(number: int, frame: object) -> None:
        for gateway in gateways:
            gateway.send_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, stop)
    for gateway in gateways:
        gateway.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
