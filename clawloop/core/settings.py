"""Settings from the environment, read once in `clawloop.app.cli.main` and passed on.

Variables begin with `CLAWLOOP_`, except `DATABASE_URL` and `TEMPORAL_ADDRESS`, which other tools read too. Nothing else
in Clawloop reads the environment.
"""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    SecretStr,
    ValidationError,
    field_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from clawloop.core.errors import SetupError

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's `--max-lora-rank` accepts."""


class WhenStorageIsFull(StrEnum):
    """Treatment of chats while turns cannot be recorded: PostgreSQL, disk and memory are full or unreachable."""

    ANSWER = "answer"
    REFUSE = "refuse"


class ChatBounds(BaseModel):
    """The largest chat request that a gateway sends to an engine.

    One engine serves everybody: what it renders or compiles for one request delays all others. Times are vLLM 0.32's on
    one core, with a vocabulary of 151,000 tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: PositiveInt = 20_000
    """Messages, their content parts and tool calls. Rendering 100,000 empty messages holds the engine for 9 s."""

    tools: PositiveInt = 512
    """Tools. OpenAI takes 128; agents with several tool servers have more."""

    grammar_bytes: PositiveInt = 64 * 1024
    """Bytes of all that forces a form: response format, structured outputs, schemas of forced or strict tools."""

    schema_nodes: PositiveInt = 1000
    """Objects and arrays in those schemas. The time to compile grows with the square: 0.2 s for 1,000 properties."""

    choices: PositiveInt = 1000
    """Entries of `structured_outputs.choice`. 20,000 hold the engine for 10 s."""

    regex_length: PositiveInt = 512
    """Characters of one regular expression. 800 characters of nested repetition take 6 s."""

    repetitions: PositiveInt = 500
    """Repetitions with a number, and characters of strings with a length, in all schemas and expressions of a request:
    each up to 256, equal ones once, an optional part as 16. A string of 200 characters takes 5 s, 40 optional letters
    9 s."""

    free_grammars: bool = False
    """Grammars of clients (`structured_outputs.grammar`). One of 1,700 bytes holds the engine for minutes, and with it
    all that others, the judge too, want in a form; no bound on its size prevents that."""

    stop_length: PositiveInt = 16 * 1024
    """Characters of all entries of `stop`, and of `bad_words`, which vLLM splits into tokens while all others wait."""

    stop: PositiveInt = 64
    """Entries of `stop`, `stop_token_ids` and `bad_words`, each; OpenAI takes 4 of the first."""

    token_ids: PositiveInt = 1024
    """Entries of `logit_bias`, `allowed_token_ids` and `logprob_token_ids`, each."""

    counted_characters: PositiveInt = 1_000_000
    """Characters of the messages, and of the tools, of a request to count tokens. A million take 0.6 to 1.8 s, by
    script, of the one thread that splits all chats into tokens (tokenizers' byte-level BPE with 20,000 tokens)."""

    json_values: PositiveInt = 1_000_000
    """Commas and opening brackets of a body. 32 MiB of empty lists take a gateway 1 GB and hold it for seconds; 4 MB of
    code, a million tokens, have 300,000."""

    n: Annotated[int, Field(ge=1, le=128)] = 128
    """Choices of one request; OpenAI's own bound."""

    structured_requests: PositiveInt = 4
    """Requests of one key that may wait for their grammar at once. The engine compiles on half of its cores."""

    structured_requests_together: PositiveInt = 4
    """Structured requests of all keys at once on one engine; judges wait behind them for up to 10 s each."""

    blocked_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Seconds in all that a reply may wait for its client to read it; meanwhile it keeps its places on the engine. A
    token takes about 220 bytes of a stream, so who reads 100 kbit/s takes 50 tokens a second, and lets none wait."""


class Settings(BaseSettings):
    """Settings of every process."""

    model_config = SettingsConfigDict(
        env_prefix="CLAWLOOP_", env_nested_delimiter="__", frozen=True, populate_by_name=True
    )

    data: Path = Path("./.clawloop")
    """Folder of everything that survives a restart: database, adapters, spool, logs, keys."""

    database_url: Annotated[str | None, Field(validation_alias=AliasChoices("DATABASE_URL"))] = None
    """PostgreSQL, e.g. `postgresql://user:password@host/name`. None: `clawloop up` runs its own."""

    temporal_address: Annotated[str | None, Field(validation_alias=AliasChoices("TEMPORAL_ADDRESS"))] = None
    """Temporal's `host:port`. None: `clawloop up` runs its own."""

    temporal_ui: str | None = None
    """Address of Temporal's UI for people, e.g. `http://127.0.0.1:8233`, for links to workflows. None: the UI that
    `clawloop up` started, else no links."""

    page: str | None = None
    """Address of the page for people, e.g. `http://127.0.0.1:30000/ui`: Temporal's UI links to it from each workflow
    that is started from then on. None: it names the page's path alone."""

    engines: Annotated[tuple[str, ...], NoDecode] = ()
    """URLs of vLLM servers, separated by commas. Empty: `clawloop up` runs one."""

    engine_chats: PositiveInt | None = None
    """Choices of chats that one gateway has in flight on one engine; more wait for their turn, the key with the fewest
    first. What all gateways leave of an engine's `--max-num-seqs` stays free for the judge, the gate and probes, which
    share it. None: `clawloop up` leaves an eighth of its engines free; on engines of your own there is no bound."""

    probes_at_once: PositiveInt = 2
    """Probes that a worker asks the engines at the same time, for the gate; engines compute chats first, for 10 s.
    `clawloop up` gives as many as its gateways leave free of an engine's `--max-num-seqs`: an eighth."""

    engine_secret: SecretStr | None = None
    """Sent to engines as `Authorization: Bearer …`: the secret of their guard, or of vLLM's `--api-key`. None: none."""

    engine_secret_file: Path | None = None
    """A file with one such secret a line: the first is sent, the guards of engines accept all. It is read again when it
    was changed. None: that of the engines that `clawloop up` starts."""

    model: str | None = None
    """The base model, for the trainer: a folder, `smollm2`, or a name of the Hugging Face Hub. `clawloop up` gives the
    trainer the model that it serves."""

    max_lora_rank: int = 16
    """The largest LoRA rank that engines load: `clawloop up` starts its engine with it; for other engines give the
    value of their `--max-lora-rank`. A larger one costs every engine memory and time, whatever the adapters' rank."""

    min_free_disk_gib: Annotated[float, Field(ge=0)] = 2.0
    """GiB that training leaves free on the disk of the adapters, for what chats write. Below twice as much, adapters
    that no engine has are deleted earlier; below it, training pauses."""

    conversation_cache_mib: Annotated[float, Field(ge=0)] = 256.0
    """MiB of conversations that each gateway, worker and trainer keeps in memory at most; what is not kept is read from
    PostgreSQL. 256 MiB hold 1,000 conversations of 32,000 tokens."""

    session_idle_minutes: Annotated[float, Field(gt=0)] = 30.0
    """A session without a new turn for this long is closed; the next turn reopens it."""

    artifact_days: Annotated[float, Field(ge=2)] = 14.0
    """Days after which the artifacts of episodes' agents are deleted; 2 at least, since a rollout group has a day to be
    verified."""

    judge_url: str | None = None
    """An OpenAI-compatible API as judge. None: the base model on Clawloop's engines."""

    judge_model: str | None = None
    """The model name to ask for at `judge_url`."""

    judge_api_key: SecretStr | None = None
    """API key for `judge_url`, if it needs one."""

    judge_form: Literal["auto", "free", "grammar", "examples"] | None = None
    """`grammar`: constrain the output to an answer (vLLM only). `free`: the judge may think first. `auto` (vLLM only):
    the judge is asked whether its model can think; then `free`, within a bound of tokens, else `grammar`, or the form
    that `clawloop judge try` found best. `examples` (vLLM only): direct votes after twelve examples, for a small model.
    None: `auto` on Clawloop's engines, elsewhere `free`. A recipe's `signal.judge_form` comes first."""

    judge_try: bool = False
    """The judge worker tries a judge that it does not know yet, as `clawloop judge try` does, unless a form is forced
    on it or it thinks first. `clawloop up --model` sets it."""

    judge_images: bool = False
    """The judge can see: it gets the images of conversations themselves, not only their descriptions."""

    judge_learns: bool = False
    """The judge at `judge_url` is a policy of this Clawloop, asked through its gateway, and learns: its votes on turns
    of episodes are rewarded by whether they agree with the outcome."""

    chat_bounds: ChatBounds = ChatBounds()
    """The largest chat request; each bound by itself, e.g. `CLAWLOOP_CHAT_BOUNDS__TOOLS=2000`."""

    key_stored_mib: PositiveInt | None = None
    """MiB of turns and comments that a key may store, if it has no limit of its own (`clawloop key limit`). None: no
    limit, since a history should not end at a limit that no operator chose."""

    when_storage_is_full: WhenStorageIsFull = WhenStorageIsFull.ANSWER
    """A chat whose turn could be stored neither in PostgreSQL nor on the gateway's disk nor in its memory: `answer` it
    and count the turn as lost, or `refuse` it with 503 before the first token."""

    encryption_key_file: Path | None = None
    """A file of keys, made by `clawloop encryption key`: the content of conversations is encrypted in PostgreSQL, the
    spool and the artifacts. None: it is not. Every process needs the same file."""

    engine_fields: Annotated[tuple[str, ...], NoDecode] = ()
    """Fields of a chat request, separated by commas, that go to the engine although the gateway would drop or refuse
    them."""

    prefix_cache: Literal["key", "all"] = "key"
    """Sharing of the engines' prefix cache. `key`: each key uses only the prompts that it sent itself. `all`: all keys
    share the cache, which saves memory and time if many keys send one long system prompt, and lets a key measure
    whether another key sent a text."""

    guarded_pages: Annotated[tuple[Literal["metrics", "openapi"], ...], NoDecode] = ()
    """Pages of the gateway, separated by commas, that need a key with the scope `read` or `admin`: `metrics`,
    `openapi`."""

    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = ("127.0.0.1", "::1")
    """Addresses and networks of proxies, separated by commas, whose `X-Forwarded-For` and `X-Forwarded-Proto` the
    gateway believes: the page counts refused keys by the client's address, and its cookie is for HTTPS alone where the
    client uses HTTPS. Anybody else could name an address of their own choice."""

    run_log: str | None = None
    """`tensorboard:DIR`: the trainer keeps the figures of each step in DIR, for TensorBoard. None: nowhere but in
    PostgreSQL."""

    crash_points: Path | None = None
    """A folder for fault tests, whose files name points at which a process kills itself, each once."""

    @property
    def model_folder(self) -> Path | None:
        """Folder of the base model, fetched or not."""
        if self.model is None or Path(self.model).is_dir():
            return None if self.model is None else Path(self.model)
        return self.data / "models" / self.model.partition("@")[0]

    @property
    def secrets(self) -> tuple[str, ...]:
        """Passwords and secrets as they were given, which no log may contain."""
        given = [self.engine_secret, self.judge_api_key]
        secrets = [secret.get_secret_value() for secret in given if secret is not None]
        addresses = [self.database_url, self.judge_url, *self.engines]
        return (*secrets, *(password for address in addresses if address and (password := _password(address))))

    @property
    def min_free_disk_bytes(self) -> int:
        return int(self.min_free_disk_gib * 2**30)

    @property
    def conversation_cache_bytes(self) -> int:
        return int(self.conversation_cache_mib * 2**20)

    @field_validator("max_lora_rank")
    @classmethod
    def _check_rank(cls, value: int) -> int:
        if value not in ENGINE_RANKS:
            raise ValueError(f"engines take one of {', '.join(map(str, ENGINE_RANKS))}")
        return value

    @property
    def tensorboard_folder(self) -> Path | None:
        """The folder of the run log."""
        return None if self.run_log is None else Path(self.run_log.partition(":")[2]).expanduser()

    @field_validator("run_log")
    @classmethod
    def _check_run_log(cls, value: str | None) -> str | None:
        if not value:
            return None
        kind, _, folder = value.partition(":")
        if kind != "tensorboard" or not folder:
            raise ValueError("it must be tensorboard:DIR")
        return value

    @field_validator("temporal_ui", "page")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if not value:
            return None
        # The page links to it: a browser runs `javascript:` addresses.
        if not value.startswith(("http://", "https://")):
            raise ValueError("it must begin with http:// or https://")
        return value.rstrip("/")

    @field_validator("engines", mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return tuple(url.strip().rstrip("/") for url in value.split(",") if url.strip())

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in value:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                raise ValueError(f"{proxy!r} is no address or network, such as 10.0.0.5 or 10.0.0.0/24") from None
        return value

    @field_validator("engine_fields", "guarded_pages", "trusted_proxies", mode="before")
    @classmethod
    def _split_names_at_commas(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return tuple(name.strip() for name in value.split(",") if name.strip())


def _password(address: str) -> str | None:
    try:
        return urlsplit(address).password
    except ValueError:
        return None


def read_settings() -> Settings:
    """The settings of the environment.

    Raises:
        SetupError: a value is invalid; names the first such variable and the remedy.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = str(first["loc"][0])
        name = "__".join(str(part) for part in first["loc"])
        name = f"CLAWLOOP_{name.upper()}" if field in Settings.model_fields else field  # an alias is the variable
        problem = first["msg"].removeprefix("Value error, ")
        raise SetupError(f"{name}: {problem[:1].lower()}{problem[1:]}; correct it or unset it") from None
