"""A harness of verifiers 0.4, written against its public interface: asks once, and runs the reply in the task's box.

Its program needs the standard library only, so nothing from outside.
"""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["ShellOnceHarness"]
_PROGRAM = """
import json, subprocess, sys, urllib.request

url, key, model, prompt = sys.argv[1:]
body = json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 64}).encode()
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers), timeout=120) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
subprocess.run(["bash", "-c", said], timeout=60)
"""


class ShellOnceConfig(vf.HarnessConfig):  # type: ignore[misc]
    pass


class ShellOnceHarness(vf.Harness[ShellOnceConfig]):  # type: ignore[misc]
    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        program = ["python3", "-c", _PROGRAM, endpoint, secret, ctx.model, data.prompt]
        return await runtime.run_program(program, {})
