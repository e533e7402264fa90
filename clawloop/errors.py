"""Our errors, one tree. The type says whether trying again can help.

ClawloopError
├── PermanentError              trying again gives the same answer
│   ├── RequestRejected         the caller's input is at fault: names the field and the remedy
│   ├── EngineRejected          an engine refused the request; its status, code and message are kept
│   ├── EngineAnswerUnusable    an engine's answer cannot be read, or its lengths disagree
│   ├── PromptTooLong           a prompt and its reply are more than the engine's context holds
│   ├── RecordUnusable          a spooled turn that cannot be entered
│   ├── ModelUnsupported        the trainer cannot load this checkpoint: says what it can load
│   ├── SampleUnusable          a sample cannot be trained as it is: too long, or its parts disagree
│   ├── AdapterUnusable         an adapter directory is damaged, or made for another base model
│   ├── RecipeRejected          a recipe with unknown, wrong or contradictory keys: names the key
│   ├── StreamsUnusable         per-token numbers of a sample disagree in length, are not finite or impossible
│   ├── NothingToTrain          a batch or sample in which no token would get a gradient
│   ├── StepDiverged            a step is not finite, or its KL or ratio out of bounds: it is quarantined
│   ├── JudgeRefused            a judge will not take this question: too long, or its address or key is wrong
│   └── SetupError              this machine or its settings are at fault: says what to change
└── TransientError              trying again later may help
    ├── StoreUnavailable        PostgreSQL did not answer in time
    ├── EngineUnavailable       no engine could take the request in time
    ├── EngineBroke             an engine went away in the middle of an answer
    ├── JudgeUnavailable        a judge did not answer, or asked us to come back later
    ├── TrainerUnavailable      a training process or one of its ranks is not there; the same step again
    └── SignalFailed      a session's workflow could not be told; the sweep will tell it
"""

from __future__ import annotations


class ClawloopError(Exception):
    """Root of everything we raise on purpose."""


class PermanentError(ClawloopError):
    """Trying again gives the same answer."""


class TransientError(ClawloopError):
    """Trying again later may help."""


class RequestRejected(PermanentError):
    """The caller's input is at fault.

    Args:
        message: what is wrong and what to do about it, for the caller.
        status: HTTP status.
        code: OpenAI's machine-readable code, e.g. `model_not_found`.
        field: the field at fault, as the caller spells it; None if it is not one field.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", field: str | None = None):
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.field = field


class EngineRejected(PermanentError):
    """An engine refused the request.

    Args:
        status: the engine's HTTP status, 4xx or 5xx.
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
    """An engine's answer cannot be read, or its lengths disagree."""


class PromptTooLong(PermanentError):
    """A rendered prompt and the reply to it are more than the engine's context holds; the message says how many."""


class RecordUnusable(PermanentError):
    """A spooled turn that cannot be entered; it is set aside, not deleted."""


class ModelUnsupported(PermanentError):
    """The trainer cannot load this checkpoint; the message says what it found and what it can load."""


class SampleUnusable(PermanentError):
    """A sample cannot be trained as it is; it is left out of the batch for good.

    Args:
        sample: its key.
        reason: shown to people, e.g. `9000 tokens, the trainer takes 8192`.
    """

    def __init__(self, sample: str, reason: str):
        super().__init__(f"sample {sample}: {reason}")
        self.sample = sample
        self.reason = reason


class AdapterUnusable(PermanentError):
    """An adapter directory is damaged, or made for another base model; training pauses with this reason."""


class RecipeRejected(PermanentError):
    """A recipe with unknown, wrong or contradictory keys.

    Args:
        problem: what is wrong and what to do about it.
        field: the dotted key at fault, e.g. `train.loss.kl`; None if it is the file.
        near: the key or value that was probably meant; None if nothing comes near.
    """

    def __init__(self, problem: str, *, field: str | None = None, near: str | None = None):
        where = f"{field}: " if field else ""
        meant = f"; did you mean {near!r}?" if near else ""
        super().__init__(f"{where}{problem}{meant}")
        self.problem = problem
        self.field = field
        self.near = near


class StreamsUnusable(PermanentError):
    """Per-token numbers of a sample disagree in length, are not finite, or cannot be what they are called."""


class NothingToTrain(PermanentError):
    """A batch or a sample in which no token would get a gradient; it must not fill a place in a batch."""


class StepDiverged(PermanentError):
    """A step's numbers are not finite, or its KL or ratio is out of bounds.

    The optimiser has not moved; the step is not committed and its samples are quarantined with this reason.
    """


class JudgeRefused(PermanentError):
    """A judge will not take this question; its message names the status, never what was asked.

    Args:
        too_long: a shorter question may pass.
    """

    def __init__(self, message: str, *, too_long: bool = False):
        super().__init__(message)
        self.too_long = too_long


class SetupError(PermanentError):
    """This machine or its settings are at fault; the message is one line that says what to change."""


class StoreUnavailable(TransientError):
    """PostgreSQL did not answer in time; the caller goes on from its cache or spool."""


class EngineUnavailable(TransientError):
    """No engine could take the request in time; the client is told when to come back."""


class EngineBroke(TransientError):
    """An engine went away in the middle of an answer.

    Args:
        engine_id: which engine; None if it is not known.
    """

    def __init__(self, message: str, engine_id: str | None = None):
        super().__init__(message)
        self.engine_id = engine_id


class JudgeUnavailable(TransientError):
    """A judge did not answer, or asked us to come back later; the message never holds what was asked.

    Args:
        retry_after_seconds: when the judge wants to be asked again; None if it did not say.
    """

    def __init__(self, message: str, *, retry_after_seconds: float | None = None):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class TrainerUnavailable(TransientError):
    """A training process or one of its ranks died, does not answer or holds another model; the same step is computed
    again. Its message never holds anything of a conversation."""


class SignalFailed(TransientError):
    """A session's workflow could not be told; a turn or feedback waits in Postgres for the sweep."""
