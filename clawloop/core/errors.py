"""Clawloop's errors, one tree. The class says whether a retry can help.

ClawloopError
├── PermanentError              a retry gives the same result
│   ├── RequestRejected         invalid HTTP request: names the field and the remedy
│   ├── ValueRejected           a value of an operation is malformed: names the field and what it takes
│   ├── NotFound                a named policy, version or recipe does not exist
│   ├── AmbiguousId             the beginning of an id, or a client's name, that several have
│   ├── StateConflict           the policy's state does not permit the operation
│   ├── AlreadyAnswered         another request with this Idempotency-Key was answered meanwhile
│   ├── EngineRejected          an engine refused the request; has its status, code and message
│   ├── EngineAnswerUnusable    an engine's answer cannot be parsed, or its lengths disagree
│   ├── PromptTooLong           a prompt and its reply exceed the engine's context
│   ├── RecordUnusable          a record that cannot be stored, or refers to something that does not exist
│   │   ├── ContentUnreadable   encrypted content that no key opens, or that was changed
│   │   └── EpisodeUnusable     an episode's task, image, artifact or reward cannot be used: says which and why
│   ├── ModelUnsupported        the trainer cannot load this checkpoint: says what it can load
│   ├── SampleUnusable          a sample cannot be trained: too long, or its parts disagree
│   ├── AdapterUnusable         an adapter directory is damaged, or made for another base model
│   ├── StepTooLarge            memory ended five attempts at a step, each with less at once: says what to set
│   ├── DiskFull                no room for another version: says what to set
│   ├── RecipeRejected          a recipe with unknown, wrong or contradictory keys: names the key
│   ├── StreamsUnusable         per-token numbers of a sample disagree in length, are not finite or impossible
│   ├── NothingToTrain          a batch or sample in which no token would get a gradient
│   ├── StepDiverged            a step is not finite, or its KL or ratio out of bounds: it is quarantined
│   ├── JudgeRefused            a judge does not accept this prompt: too long, or its address or key is wrong
│   └── SetupError              wrong settings or machine: says what to change
│       ├── ScopeMissing        a gateway takes the key, but not for this request
│       └── WorkerKeyRefused    a gateway refuses the key of a worker of environments
└── TransientError              a retry may succeed
    ├── EncryptionKeyMissing    content whose key the file lacks: readable once the key is there
    ├── StoreUnavailable        PostgreSQL did not answer in time
    │   ├── StoreContended      another transaction holds a row that is needed
    │   └── StoreTimedOut       a statement took PostgreSQL too long
    ├── EngineUnavailable       no engine could take the request in time
    │   └── EnginesBusy         those that could have as many chats as they may
    ├── EngineBroke             an engine failed in the middle of an answer
    ├── AdapterUnreadable       an adapter's disk does not answer, or is not mounted
    ├── JudgeUnavailable        a judge did not answer, or asked for a later retry
    ├── SandboxFailed           a sandbox itself did not work, whatever ran in it
    ├── TrainerUnavailable      a training process or one of its ranks is down; the same step is retried
    │   └── TrainerFailed       it failed at the step itself: after five attempts training pauses
    │       └── RankOutOfMemory memory ran out on one of several ranks: all begin again with less at once
    └── SignalFailed            Temporal did not take a signal; the sweep retries it
"""

from __future__ import annotations

from collections.abc import Sequence


class ClawloopError(Exception):
    """Base of all errors that Clawloop raises on purpose."""


class PermanentError(ClawloopError):
    """A retry gives the same result."""


class TransientError(ClawloopError):
    """A retry may succeed."""


class RequestRejected(PermanentError):
    """An HTTP request is invalid; raised by `api` only.

    Args:
        message: what is wrong and how to fix it, for the caller.
        status: HTTP status.
        code: OpenAI's machine-readable code, e.g. `model_not_found`.
        field: the invalid field, as the caller spells it; None if it is not one field.
        retry_after: seconds until the same request may be accepted, for the Retry-After header; None: it never is.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        field: str | None = None,
        retry_after: str | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.status = status
        self.code = code
        self.field = field


class ValueRejected(PermanentError):
    """A value that the caller gave an operation is malformed, whatever the state of things.

    Args:
        message: what the field takes, for the caller.
        field: the caller's field.
    """

    def __init__(self, message: str, *, field: str):
        super().__init__(message)
        self.field = field


class NotFound(PermanentError):
    """Something that the caller named does not exist.

    Args:
        message: for the caller.
        code: machine-readable, e.g. `policy_not_found`.
        field: the caller's field that named it.
    """

    def __init__(self, message: str, *, code: str, field: str):
        super().__init__(message)
        self.code = code
        self.field = field


class AmbiguousId(PermanentError):
    """The beginning of an id, or a client's name, that several have.

    Args:
        message: names some of them, for the caller.
        field: the caller's field that named it.
    """

    def __init__(self, message: str, *, field: str):
        super().__init__(message)
        self.field = field


class StateConflict(PermanentError):
    """The policy's state does not permit the operation.

    Args:
        message: the conflict and its remedy, for the caller.
        code: machine-readable, e.g. `version_pinned`.
        field: the caller's field in conflict; None if it is not one field.
    """

    def __init__(self, message: str, *, code: str, field: str | None = None):
        super().__init__(message)
        self.code = code
        self.field = field


class AlreadyAnswered(PermanentError):
    """Another request with the same Idempotency-Key was answered meanwhile; this one had no effect."""


class EngineRejected(PermanentError):
    """An engine refused the request.

    Args:
        status: the engine's HTTP status, any but 200.
        error: the engine's error object in OpenAI's shape: message, type, param, code.
        retry_after: the engine's Retry-After header, if it sent one.
        engine_id: which engine.
    """

    def __init__(
        self, status: int, error: dict[str, object], retry_after: str | None = None, engine_id: str | None = None
    ):
        super().__init__(f"engine answered {status}")
        self.engine_id = engine_id
        self.status = status
        self.error = error
        self.retry_after = retry_after


class EngineAnswerUnusable(PermanentError):
    """An engine's answer cannot be parsed, or its lengths disagree."""


class PromptTooLong(PermanentError):
    """A rendered prompt and its reply exceed the engine's context; the message has the lengths."""


class RecordUnusable(PermanentError):
    """A record that PostgreSQL can never store, or that refers to something that does not exist."""


class ContentUnreadable(RecordUnusable):
    """Content that is encrypted and cannot be decrypted here; the message names where it is stored and the setting."""


class EpisodeUnusable(RecordUnusable):
    """An episode's task, image, artifact or reward cannot be used.

    The message names it and says why; it is shown as the reason that the episode has no reward. It never contains text
    that the agent wrote or was told.
    """


class TaskUnusable(EpisodeUnusable):
    """A task that cannot be played, or whose rewards cannot be trusted; no further attempt changes that."""


class ModelUnsupported(PermanentError):
    """The trainer cannot load this checkpoint; the message says what was found and what is supported."""


class FamilyUnknown(ModelUnsupported):
    """The trainer knows no model of this family; engines may serve it."""


class SampleUnusable(PermanentError):
    """A sample cannot be trained; it is dropped from the batch for good.

    Args:
        sample: its id.
        reason: shown to people, e.g. `9000 tokens, the trainer takes 8192`.
    """

    def __init__(self, sample: str, reason: str):
        super().__init__(f"sample {sample}: {reason}")
        self.sample = sample
        self.reason = reason


class AdapterUnusable(PermanentError):
    """An adapter directory is damaged, or made for another base model; training pauses with this reason."""


class AdapterUnreadable(TransientError):
    """An adapter's files cannot be read now: their disk fails, or is not mounted. Nothing says that they are wrong."""


class RecipeRejected(PermanentError):
    """A recipe with unknown, wrong or contradictory keys.

    Args:
        problem: what is wrong and how to fix it.
        field: the dotted key, e.g. `train.loss.kl`; None if it is the file.
        near: the key or value that was probably meant; None if none is similar.
        further: other problems of the same recipe, which the message names as well.
    """

    def __init__(
        self,
        problem: str,
        *,
        field: str | None = None,
        near: str | None = None,
        further: Sequence[RecipeRejected] = (),
    ):
        where = f"{field}: " if field else ""
        meant = f"; did you mean {near!r}?" if near else ""
        self.lines: list[str] = [f"{where}{problem}{meant}", *(line for other in further for line in other.lines)]
        super().__init__("; ".join(self.lines))
        self.problem = problem
        self.field = field
        self.near = near

    @classmethod
    def of(cls, problems: Sequence[RecipeRejected]) -> RecipeRejected:
        """All problems of a recipe as one."""
        first, *further = problems
        return cls(first.problem, field=first.field, near=first.near, further=further)


class StepTooLarge(PermanentError):
    """Memory ended a trainer or one of its ranks at five attempts at a step, each with less at once than the last.

    The batch is good; training pauses. The message says what to set.
    """


class DiskFull(PermanentError):
    """There is no room for another version; training pauses with this reason, so that chat keeps the rest."""


class StreamsUnusable(PermanentError):
    """Per-token numbers of a sample disagree in length, are not finite, or are outside their range."""


class NothingToTrain(PermanentError):
    """A batch or a sample in which no token would get a gradient; it must not take up a place in a batch."""


class StepDiverged(PermanentError):
    """A step's numbers are not finite, or its KL or ratio is out of bounds.

    The step makes no version, and its samples are quarantined with this reason; the next step begins from the parent.
    """


class JudgeRefused(PermanentError):
    """A judge does not accept this prompt; the message names the status, never the prompt.

    Args:
        too_long: a shorter prompt may be accepted.
    """

    def __init__(self, message: str, *, too_long: bool = False):
        super().__init__(message)
        self.too_long = too_long


class SetupError(PermanentError):
    """Settings or the machine are wrong; the message is one line that says what to change."""


class ScopeMissing(SetupError):
    """A gateway knows the key, which has not the scope that this request needs."""


class WorkerKeyRefused(SetupError):
    """A gateway refuses the key of a worker of environments. The message names the gateway, never the key."""


class EncryptionKeyMissing(TransientError):
    """Content whose key this process does not have; the message names the key. Nothing is wrong with the content."""


class StoreUnavailable(TransientError):
    """PostgreSQL did not answer in time; the caller continues from its cache or spool."""


class StoreContended(StoreUnavailable):
    """Another transaction holds a row that this one needs; a smaller transaction may need fewer."""


class StoreTimedOut(StoreUnavailable):
    """PostgreSQL ended a statement that took too long; a smaller transaction may take less."""


class EngineUnavailable(TransientError):
    """No engine could take the request in time; the client gets a Retry-After."""


class EnginesBusy(EngineUnavailable):
    """Every engine that could take the request has as many choices of chats as it may.

    Args:
        limit: choices on one engine, of one gateway.
        seconds: how long the request has waited.
    """

    def __init__(self, limit: int, seconds: float):
        super().__init__(f"no place among {limit} became free within {seconds:.0f} s")
        self.limit = limit
        self.seconds = seconds


class EngineBroke(TransientError):
    """An engine failed in the middle of an answer.

    Args:
        engine_id: which engine; None if unknown.
    """

    def __init__(self, message: str, engine_id: str | None = None):
        super().__init__(message)
        self.engine_id = engine_id


class JudgeUnavailable(TransientError):
    """A judge did not answer, or asked for a later retry; the message never holds the prompt.

    Args:
        retry_after_seconds: the judge's Retry-After; None if it sent none.
    """

    def __init__(self, message: str, *, retry_after_seconds: float | None = None):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class SandboxFailed(TransientError):
    """A sandbox did not work, whatever ran in it. Its message quotes what makes sandboxes, never what ran inside."""


class TrainerUnavailable(TransientError):
    """A training process or one of its ranks died, does not answer or holds another model; the step is retried.

    The message never holds anything of a conversation.
    """


class TrainerFailed(TrainerUnavailable):
    """A trainer failed at a step: no memory, a failed GPU, a rank that died. After five attempts training pauses.

    The message is then the reason, and says what to set.
    """


class RankOutOfMemory(TrainerFailed):
    """Memory ran out on one of several ranks where no rank waits for it, so that all know and can begin again."""


class SignalFailed(TransientError):
    """A workflow could not be signalled; what it should learn is in PostgreSQL, and the sweep retries."""
