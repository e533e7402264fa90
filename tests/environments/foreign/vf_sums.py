"""An environment of verifiers 0.4, written against its public interface; it knows nothing of Clawloop.

Sums: the agent may say "wait" before it answers, and is right with the one number. Its harness runs in the process of
verifiers, so no command of a model runs anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import verifiers.v1 as vf

__all__ = ["SumsHarness", "SumsTaskset"]


class SumsData(vf.TaskData):  # type: ignore[misc]
    answer: int = 0


class SumsTask(vf.Task[SumsData]):  # type: ignore[misc]
    @vf.reward(weight=2.0)  # type: ignore[untyped-decorator]
    async def right(self, task: SumsData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(task.answer))

    @vf.metric  # type: ignore[untyped-decorator]
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):  # type: ignore[misc]
    count: int = 40
    turns: int = 3


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[SumsTask]:
        for n in range(self.config.count):
            data = SumsData(prompt=f"What is {n} + {n * n}? One number.", answer=n + n * n)
            yield SumsTask(data, self.config.task)


class SumsHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    pass


class SumsHarness(vf.Harness[SumsHarnessConfig]):  # type: ignore[misc]
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

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
        """Ask until the reply is no "wait"."""
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=120) as client:
            while True:
                body = {"model": ctx.model, "messages": messages, "max_tokens": 64, "temperature": 0.7}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.is_error:
                    return vf.ProgramResult(1, "", answer.text)
                message = answer.json()["choices"][0]["message"]
                messages += [{"role": "assistant", "content": message["content"]}]
                if not (message["content"] or "").startswith("wait"):
                    return vf.ProgramResult(0, "", "")
                messages += [{"role": "user", "content": "Go on."}]
