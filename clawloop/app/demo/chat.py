"""`clawloop chat`: an interactive chat that shows what became of each answer, and in which a person can rate the last.

The next message is the feedback on an answer, so its result appears while the next answer is being read or written.
Results are polled from the admin API and printed above the prompt.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID, uuid4

from openai import APIConnectionError, APIError, AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam
from prompt_toolkit import PromptSession
from prompt_toolkit.patch_stdout import patch_stdout
from rich.console import Console
from rich.text import Text

from clawloop.app.demo.admin_client import AdminClient
from clawloop.app.demo.demo_folder import Address
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.contracts.views import TurnView
from clawloop.core.errors import ScopeMissing, SetupError
from clawloop.core.ids import SessionId
from clawloop.core.turns.titles import shortened

_POLL_SECONDS = 0.5
# A small model on a busy processor begins its answer within some seconds; an engine that still starts takes minutes.
_PATIENCE_SECONDS = 5.0
_EXIT_COMMANDS = ("/bye", "/quit", "/exit")
_RATINGS = {"/good": "up", "/bad": "down"}
_HELP = (
    "Your next message is the feedback on the answer before it. /good or /bad rates the last answer, with a reason if "
    "you like: “/bad it should be shorter”. Ctrl-D or /bye ends the chat."
)
_VERDICTS = {1: "good", 0: "neither good nor bad", -1: "bad"}
_QUOTED = 80  # characters of a hint


@dataclass
class Chat:
    """One session between a person and a policy.

    Attributes:
        messages: the conversation so far.
        answer_ids: in order.
        shown: the result that was printed last of each turn.
    """

    client: AsyncOpenAI
    admin: AdminClient | None
    console: Console
    policy_model: str = "policy"
    name: str = field(default_factory=lambda: f"chat-{uuid4().hex[:8]}")
    messages: list[ChatCompletionMessageParam] = field(default_factory=list)
    answer_ids: list[str] = field(default_factory=list)
    shown: dict[UUID, str] = field(default_factory=dict)
    session: SessionId | None = None
    _printing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def send(self, text: str) -> bool:
        """Send a message and print the answer as it streams. On failure, discard the message and return False."""
        async with self._printing:  # keeps results from being printed inside the answer
            return await self._stream_answer(text)

    async def rate(self, rating: str, reason: str) -> bool:
        """Rate the last answer, and say what the rating does. False if there is none, or it was not taken.

        Args:
            rating: `up` or `down`.
            reason: in the person's words; may be empty.
        """
        if not self.answer_ids:
            self.console.print(Text("  there is no answer to rate yet", style="red"))
            return False
        body = {"response_id": self.answer_ids[-1], "rating": rating} | ({"text": reason} if reason else {})
        try:
            taken = await self.client.post("/feedback", body=body, cast_to=dict[str, str])
        except APIError as error:
            self.console.print(Text(f"  not rated: {_reason(error)}", style="red"))
            return False
        self.console.print(Text(f"  answer {len(self.answer_ids)}: {taken['message']}", style="dim"))
        return True

    async def _stream_answer(self, text: str) -> bool:
        message: ChatCompletionMessageParam = {"role": "user", "content": text}
        waiting = asyncio.create_task(self._say_what_it_waits_for())
        try:
            stream = await self.client.chat.completions.create(
                model=self.policy_model,
                messages=[*self.messages, message],
                stream=True,
                extra_headers={"X-Session-Id": self.name},
            )
            pieces, model, answer_id = [], "", ""
            async with stream:
                async for chunk in stream:
                    waiting.cancel()
                    model, answer_id = chunk.model, chunk.id
                    for choice in chunk.choices:
                        pieces.append(choice.delta.content or "")
                        self.console.print(pieces[-1], end="", markup=False, highlight=False, soft_wrap=True)
        except APIError as error:
            self.console.print(Text(f"\nno answer: {_reason(error)}", style="red"))
            return False
        finally:
            waiting.cancel()
        self.messages += [message, {"role": "assistant", "content": "".join(pieces)}]
        self.answer_ids.append(answer_id)
        self.console.print(Text(f"\n  answer {len(self.answer_ids)}, by {model}", style="dim"))
        return True

    async def _say_what_it_waits_for(self) -> None:
        await asyncio.sleep(_PATIENCE_SECONDS)
        said = "  no answer yet: the engine is busy, or still starts, as `clawloop status` tells; Ctrl-C ends the chat"
        self.console.print(Text(said, style="dim"))

    async def poll_results(self) -> None:
        """Print the result of each answer once it is decided. Runs until cancelled, or until they cannot be read."""
        try:
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                await self.show_results()
        except SetupError as error:
            why = "the key has not the scope admin" if isinstance(error, ScopeMissing) else str(error)
            async with self._printing:
                self.console.print(Text(f"  verdicts are not shown: {why}", style="red"))

    async def show_results(self) -> None:
        """Print the results that were decided, or changed, since the last call."""
        if self.admin is None or not self.answer_ids:
            return
        if self.session is None:
            session = (await self.admin.sessions(None)).get(self.name)
            if session is None:
                return
            self.session = session.id
        turns = await self.admin.main_turns(self.session)
        async with self._printing:
            for number, turn in enumerate(turns, 1):
                said = describe_turn(turn)
                if turn.outcome is not TurnOutcome.WAITING and self.shown.get(turn.id) != said:
                    self.shown[turn.id] = said
                    self.console.print(Text(f"  answer {number}: {said}", style="cyan"))


def describe_turn(turn: TurnView) -> str:
    """The result of an answer in words."""
    parts = [] if turn.verdict is None else [f"judged {_VERDICTS[turn.verdict]}"]
    if turn.hints:
        hint = turn.hints[0]
        text = shortened(" ".join(hint.text.split()), _QUOTED)
        parts.append(f"your words “{text}” teach it" if hint.source == "message" else f"hint “{text}”")
    if turn.step is not None:
        parts.append(f"trained in step {turn.step}")
    else:
        parts.append("waits for the next training step" if turn.outcome is TurnOutcome.SAMPLED else turn.why)
    return f"{', '.join(parts)} (by version {turn.version})"


def _reason(error: APIError) -> str:
    """What a person can do about it, in one line."""
    if isinstance(error, APIConnectionError):
        return "nothing answers there: `clawloop up` says `ready` once a chat is; `--url` names another gateway"
    return " ".join(error.message.split())


async def chat(address: Address, console: Console) -> None:
    """Chat until the person enters Ctrl-D or /bye.

    Raises:
        SetupError: no gateway answers at the address, or it rejects the key.
    """
    async with AsyncOpenAI(base_url=f"{address.url}/v1", api_key=address.key, max_retries=0) as client:
        try:
            await client.models.list()
        except APIError as error:
            raise SetupError(f"cannot chat with {address.url}: {_reason(error)}") from error
        admin = None if address.admin_key is None else AdminClient(address.url, address.admin_key)
        try:
            await _chat_loop(Chat(client, admin, console), console)
        finally:
            if admin is not None:
                await admin.close()


async def _chat_loop(chat: Chat, console: Console) -> None:
    console.print(Text(_HELP))
    if chat.admin is None:
        console.print(Text("What becomes of an answer is not shown without an admin key: give --admin-key"))
    prompt: PromptSession[str] = PromptSession()
    polling = asyncio.create_task(chat.poll_results())
    try:
        with suppress(EOFError, KeyboardInterrupt):
            while (text := await _read_line(prompt)) not in _EXIT_COMMANDS:
                if polling.done():
                    polling.result()
                word, _, rest = text.partition(" ")
                if word in _RATINGS:
                    await chat.rate(_RATINGS[word], rest.strip())
                elif word.startswith("/") and word.isascii() and word[1:].isalpha():
                    console.print(Text(f"  {word} is not known here. {_HELP}", style="red"))
                elif text:
                    await chat.send(text)
    finally:
        polling.cancel()
        with suppress(asyncio.CancelledError):
            await polling


async def _read_line(prompt: PromptSession[str]) -> str:
    with patch_stdout(raw=True):  # prints other output above the line being typed
        return (await prompt.prompt_async("you> ")).strip()
