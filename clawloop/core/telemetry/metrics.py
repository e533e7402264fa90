"""Prometheus metrics of each process, and pages of several. Names and labels are public."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from clawloop.core.errors import (
    AdapterUnreadable,
    AdapterUnusable,
    DiskFull,
    ModelUnsupported,
    NothingToTrain,
    RankOutOfMemory,
    SampleUnusable,
    StepDiverged,
    StepTooLarge,
    StreamsUnusable,
    TrainerFailed,
    TrainerUnavailable,
)

# Metrics --------------------------------------------------------------------------------------------------------------
# Prometheus metrics of each process. Names and labels are public: dashboards and alerts use them.
#
# Each object has its own registry, so that two gateways in one test process do not share counts.

_STEP_ERRORS = (
    AdapterUnreadable,
    AdapterUnusable,
    DiskFull,
    ModelUnsupported,
    NothingToTrain,
    RankOutOfMemory,
    SampleUnusable,
    StepDiverged,
    StepTooLarge,
    StreamsUnusable,
    TrainerFailed,
    TrainerUnavailable,
)


class GatewayMetrics:
    """Metrics of a gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "clawloop_gateway_requests_total",
            "Chat requests by HTTP status",
            ["status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "clawloop_gateway_requests_in_flight", "Chat requests being answered", registry=self.registry
        )
        self.held = Gauge(
            "clawloop_gateway_requests_held",
            "Requests that wait for a healthy engine, or a place on one",
            registry=self.registry,
        )
        self.turns = Counter(
            "clawloop_gateway_turns_total",
            "Turns recorded, by kind, status and place: `postgres`, `spool`, `memory`, `rejected`, `lost`",
            ["kind", "status", "place"],
            registry=self.registry,
        )
        self.turns_without_tokens = Counter(
            "clawloop_gateway_turns_without_tokens_total",
            "Turns recorded without token ids, as the engine sent none, too few, or some that disagree; never trained",
            registry=self.registry,
        )
        self.tokens = Counter(
            "clawloop_gateway_response_tokens_total", "Sampled tokens recorded", registry=self.registry
        )
        self.first_token_seconds = Histogram(
            "clawloop_gateway_first_token_seconds",
            "From the request's last byte to the first byte of the answer",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
            registry=self.registry,
        )
        self.record_seconds = Histogram(
            "clawloop_gateway_record_seconds",
            "Storing one turn, in PostgreSQL or in the spool",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1),
            registry=self.registry,
        )
        self.spool_turns = Gauge(
            "clawloop_gateway_spool_turns",
            "Turns on local disk that wait for PostgreSQL",
            registry=self.registry,
        )
        self.spool_bytes = Gauge("clawloop_gateway_spool_bytes", "Size of the spooled turns", registry=self.registry)
        self.spool_stuck = Gauge(
            "clawloop_gateway_spool_stuck",
            "1 while spooled turns cannot be stored, or their files not removed, although PostgreSQL answers"
            " (a missing key, the disk, a bug): they are tried again each second, and the log says why",
            registry=self.registry,
        )
        self.held_turns = Gauge(
            "clawloop_gateway_held_turns",
            "Turns in memory, as PostgreSQL and the disk take none",
            registry=self.registry,
        )
        self.turns_lost = Counter(
            "clawloop_gateway_turns_lost_total",
            "Turns that could not be stored, by reason; must stay 0",
            ["why"],
            registry=self.registry,
        )
        _begin_at_zero(self.turns_lost, "spool full", "disk", "rejected", "stopped")
        self.notifications = Counter(
            "clawloop_gateway_announcements_total",
            "Turns and feedback, by whether their session's workflow was notified at once",
            ["result"],
            registry=self.registry,
        )
        self.engines_healthy = Gauge(
            "clawloop_gateway_engines_healthy", "Engines that take requests", registry=self.registry
        )


class WorkerMetrics:
    """Metrics of a worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns_judged = Counter(
            "clawloop_worker_turns_judged_total",
            "Judgements, by the outcome of their turn",
            ["outcome"],
            registry=self.registry,
        )
        self.answers = Counter(
            "clawloop_worker_judge_answers_total",
            "Votes and hints of new judgements, valid and missing",
            ["kind", "result"],
            registry=self.registry,
        )
        self.judge_seconds = Histogram(
            "clawloop_worker_judge_request_seconds",
            "One request to a judge, by result",
            ["result"],
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
            registry=self.registry,
        )
        self.sessions_closed = Counter(
            "clawloop_worker_sessions_closed_total",
            "Sessions closed, by whether the at-least-one rule gave them a sample",
            ["guaranteed"],
            registry=self.registry,
        )
        self.sweeps = Counter("clawloop_worker_sweeps_total", "Sweeps done", registry=self.registry)
        self.found = Counter(
            "clawloop_worker_swept_total",
            "Signals sent by sweeps: turns, feedback, sessions to close; `stuck`: sessions whose signal failed",
            ["what"],
            registry=self.registry,
        )

    def answered(self, kind: str, valid: int, missing: int) -> None:
        """Count a judgement's answers of a kind (`vote`, `hint`): those that are valid, and those that it lacks."""
        self.answers.labels(kind, "valid").inc(valid)
        self.answers.labels(kind, "missing").inc(missing)

    def judged(self, outcome: str) -> None:
        self.turns_judged.labels(outcome).inc()

    def closed(self, guaranteed: bool) -> None:
        """Count a session that was closed; `guaranteed`: the at-least-one rule gave it a sample."""
        self.sessions_closed.labels(str(guaranteed).lower()).inc()

    def swept(self, turns: int, feedback: int, sessions: int, stuck: int) -> None:
        """Count a sweep, the signals it sent for turns and feedback, and the sessions it woke; `stuck` could not be
        notified."""
        self.sweeps.inc()
        for what, count in (("turns", turns), ("feedback", feedback), ("sessions", sessions), ("stuck", stuck)):
            self.found.labels(what).inc(count)

    def observe_judge_request(self, result: str, seconds: float) -> None:
        """Record one request to a judge; `result` is `answered`, `unavailable` or `refused`."""
        self.judge_seconds.labels(result).observe(seconds)


class TrainerMetrics:
    """Metrics of a trainer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.steps = Counter(
            "clawloop_trainer_steps_total", "Steps computed, by result", ["result"], registry=self.registry
        )
        _begin_at_zero(self.steps, "trained", *(error.__name__ for error in _STEP_ERRORS))
        self.step_seconds = Histogram(
            "clawloop_trainer_step_seconds",
            "From a batch's arrival until its adapter is written",
            buckets=(0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600),
            registry=self.registry,
        )
        self.tokens = Counter("clawloop_trainer_tokens_total", "Trained response tokens", registry=self.registry)
        self.dropped = Counter(
            "clawloop_trainer_samples_dropped_total", "Samples dropped from steps", registry=self.registry
        )
        self.loss = Gauge("clawloop_trainer_loss", "Loss of the newest step", ["policy"], registry=self.registry)
        self.kl = Gauge(
            "clawloop_trainer_kl_nats",
            "Mean KL to the base model in the newest step",
            ["policy"],
            registry=self.registry,
        )
        self.ratio = Gauge(
            "clawloop_trainer_ratio",
            "Mean ratio to the recorded log-probs in the newest step",
            ["policy"],
            registry=self.registry,
        )


class EngineMetrics:
    """Metrics of an engine's agent."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.loads = Counter(
            "clawloop_engine_loads_total", "Versions loaded, by result", ["result"], registry=self.registry
        )
        self.load_seconds = Histogram(
            "clawloop_engine_load_seconds",
            "Checking, loading and probing one version",
            buckets=(0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=self.registry,
        )
        self.unloads = Counter("clawloop_engine_unloads_total", "Versions unloaded", registry=self.registry)
        self.adapters = Gauge("clawloop_engine_adapters", "Adapters the engine has loaded", registry=self.registry)
        self.healthy = Gauge("clawloop_engine_healthy", "1 while the engine answers", registry=self.registry)
        self.restarts = Counter(
            "clawloop_engine_restarts_total", "Runs of the engine's restart command", registry=self.registry
        )


class EnvironmentMetrics:
    """Metrics of a worker that runs episodes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.episodes = Counter(
            "clawloop_environment_episodes_total",
            "Attempts of agents, by environment and how they ended",
            ["environment", "ending"],
            registry=self.registry,
        )
        self.episode_seconds = Histogram(
            "clawloop_environment_episode_seconds",
            "One attempt of an agent, its sandbox included",
            ["environment"],
            buckets=(0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600),
            registry=self.registry,
        )
        self.verified = Counter(
            "clawloop_environment_verified_total",
            "Runs of verifiers, by environment and whether they gave a reward",
            ["environment", "result"],
            registry=self.registry,
        )
        self.sandboxes = Gauge(
            "clawloop_environment_sandboxes", "Sandboxes of agents and verifiers that run now", registry=self.registry
        )


def _begin_at_zero(counter: Counter, *values: str) -> None:
    """Show a series before its first event: `increase` sees no rise in a series that begins at 1, so that an alert
    would miss the first one."""
    for value in values:
        counter.labels(value)


# Pages ----------------------------------------------------------------------------------------------------------------
# Prometheus pages of several processes on one page: each series is named after its process.


class LabelledRegistry(Collector):
    """The families of a registry, each series with one more label."""

    def __init__(self, registry: CollectorRegistry, label: str, value: str) -> None:
        self._registry = registry
        self._label = label
        self._value = value

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, self._label: self._value}) for sample in family.samples
            ]
            yield family


def page_of(collector: Collector) -> bytes:
    """The page of one collector."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


def merge_pages(pages: Iterable[bytes]) -> bytes:
    """One page with the series of all pages; no two pages may have a series in common."""
    families: dict[str, Metric] = {}
    for page in pages:
        for family in text_string_to_metric_families(page.decode()):
            if (known := families.setdefault(family.name, family)) is not family:
                known.samples.extend(family.samples)
    return page_of(_Families(families.values()))


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
