"""`clawloop demo chat`: a person is the user, and sees under each answer what became of it.

Knows nothing about judging: it asks the admin API. An answer is judged by what the person writes next, so its
verdict appears while the next answer is being read or written. Verdicts are shown as they come, above the prompt.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID, uuid4

from openai import APIError, AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam
from prompt_toolkit import PromptSession
from prompt_toolkit.patch_stdout import patch_stdout
from rich.console import Console
from rich.text import Text

from clawloop.demo.admin_client import AdminClient, WatchedTurn
from clawloop.demo.demo_folder import Address
from clawloop.errors import SetupError

_LOOK_SECONDS = 0.5
_BYE = ("/bye", "/quit", "/exit")


@dataclass
class Chat:
    """One session between a person and a policy.

    Attributes:
        messages: the conversation so far.
        answers: ids of the answers, in order.
        told: of which answers it has been shown what became of them.
    """

    client: AsyncOpenAI
    watcher: AdminClient | None
    console: Console
    policy_model: str = "policy"
    name: str = field(default_factory=lambda: f"chat-{uuid4().hex[:8]}")
    messages: list[ChatCompletionMessageParam] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    told: set[UUID] = field(default_factory=set)
    session: UUID | None = None
    _printing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def say(self, text: str) -> bool:
        """Say something and print the answer as it comes; False if there was none, and then it was not said."""
        async with self._printing:  # news would stand in the middle of the answer
            return await self._say(text)

    async def _say(self, text: str) -> bool:
        said: ChatCompletionMessageParam = {"role": "user", "content": text}
        try:
            stream = await self.client.chat.completions.create(
                model=self.policy_model,
                messages=[*self.messages, said],
                stream=True,
                extra_headers={"X-Session-Id": self.name},
            )
            pieces, model, answer_id = [], "", ""
            async with stream:
                async for chunk in stream:
                    model, answer_id = chunk.model, chunk.id
                    for choice in chunk.choices:
                        pieces.append(choice.delta.content or "")
                        self.console.print(pieces[-1], end="", markup=False, highlight=False, soft_wrap=True)
        except APIError as error:
            self.console.print(Text(f"\nno answer: {' '.join(str(error).split())}", style="red"))
            return False
        self.messages += [said, {"role": "assistant", "content": "".join(pieces)}]
        self.answers.append(answer_id)
        self.console.print(Text(f"\n  answer {len(self.answers)}, by {model}", style="dim"))
        return True

    async def watch(self) -> None:
        """Print what becomes of each answer, once it is known. Ends only by being cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self.show_news()

    async def show_news(self) -> None:
        """Print what became of answers since the last time."""
        if self.watcher is None or len(self.told) == len(self.answers):
            return
        if self.session is None:
            sessions = await self.watcher.sessions(None)
            self.session = next((session.id for session in sessions if session.name == self.name), None)
            if self.session is None:
                return
        turns = await self.watcher.main_turns(self.session)
        async with self._printing:
            for number, turn in enumerate(turns, 1):
                if turn.is_decided and turn.id not in self.told:
                    self.told.add(turn.id)
                    self.console.print(Text(f"  answer {number}: {fate(turn)}", style="cyan"))


def fate(turn: WatchedTurn) -> str:
    """What became of an answer, in words."""
    verdict = "no verdict" if turn.verdict is None else f"verdict {turn.verdict:+d}"
    hint = "" if turn.hint is None else f", hint “{turn.hint}”"
    outcome = f"trained in step {turn.step}" if turn.step is not None else turn.why or turn.outcome
    return f"{verdict}{hint}, version {turn.version}, {outcome}"


async def chat(address: Address, console: Console) -> None:
    """Chat until the person leaves (Ctrl-D, or /bye).

    Raises:
        SetupError: no gateway answers there, or it does not take the key.
    """
    async with AsyncOpenAI(base_url=f"{address.url}/v1", api_key=address.key, max_retries=0) as client:
        try:
            await client.models.list()
        except APIError as error:
            words = " ".join(str(error).split())
            raise SetupError(f"{address.url} cannot be chatted with: {words}; give --url and --key") from error
        watcher = None if address.admin_key is None else AdminClient(address.url, address.admin_key)
        try:
            await _talk(Chat(client, watcher, console), console)
        finally:
            if watcher is not None:
                await watcher.close()


async def _talk(chat: Chat, console: Console) -> None:
    console.print(Text("What you say next is the feedback on the answer before. Ctrl-D or /bye ends the chat."))
    if chat.watcher is None:
        console.print(Text("Without an admin key you will not see what becomes of the answers: --admin-key"))
    prompt: PromptSession[str] = PromptSession()
    watching = asyncio.create_task(chat.watch())
    try:
        with suppress(EOFError, KeyboardInterrupt):
            while (text := await _typed(prompt)) not in _BYE:
                if watching.done():
                    watching.result()
                if text:
                    await chat.say(text)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _typed(prompt: PromptSession[str]) -> str:
    with patch_stdout(raw=True):  # keeps lines that are printed meanwhile above what is being typed
        return (await prompt.prompt_async("you> ")).strip()
