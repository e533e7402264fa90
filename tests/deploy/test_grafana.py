"""The dashboard and the alert rules ask for metrics and labels that exist, and for all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from clawloop.core.telemetry.metrics import (
    EngineMetrics,
    EnvironmentMetrics,
    GatewayMetrics,
    TrainerMetrics,
    WorkerMetrics,
)

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
_SERIES = re.compile(r"\b(clawloop_\w+)(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"by \(([\w, ]+)\)")
_UP = re.compile(r'up\{job=~"clawloop\.\*"(?:, process="([\w-]+)")?\}')  # Prometheus' own


REGISTRIES: list[CollectorRegistry] = [
    of().registry for of in (GatewayMetrics, WorkerMetrics, TrainerMetrics, EngineMetrics, EnvironmentMetrics)
]


def metrics() -> dict[str, set[str]]:
    """Labels by the names of all series of all processes."""
    found: dict[str, set[str]] = {}
    for registry in REGISTRIES:
        for collector in registry._collector_to_names:
            labels = set(collector._labelnames)  # type: ignore[attr-defined]
            for metric in collector.collect():
                name = f"{metric.name}_total" if metric.type == "counter" else metric.name
                names = [f"{name}_bucket"] if metric.type == "histogram" else [name]
                found |= {each: labels | ({"le"} if metric.type == "histogram" else set()) for each in names}
    return found


METRICS = metrics()
FROM_THE_START = {sample.name for registry in REGISTRIES for metric in registry.collect() for sample in metric.samples}
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
SHOWN = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def used(expression: str) -> set[str]:
    return {name for name, _ in _SERIES.findall(expression)}


def grouped(expression: str) -> set[str]:
    """The labels that an expression keeps."""
    return {label.strip() for group in _GROUPED.findall(expression) for label in group.split(",")}


@pytest.mark.parametrize("expression", [*SHOWN, *(rule["expr"] for rule in RULES)])
def test_each_expression_asks_for_what_exists(expression: str) -> None:
    names = used(expression)
    assert names or _UP.search(expression)
    assert names <= METRICS.keys()
    for name, chosen in _SERIES.findall(expression):
        assert set(re.findall(r"(\w+)\s*[=!]", chosen)) <= METRICS[name], name
        assert grouped(expression) <= METRICS[name], name


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for expression in SHOWN for name in used(expression)}
    assert METRICS.keys() - shown == {"clawloop_gateway_spool_bytes"}  # the number of turns is shown


def test_each_legend_names_labels_that_its_series_has() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            there = grouped(target["expr"])
            if "sum" not in target["expr"]:  # nothing is added up: all labels are there
                there = set().union(*(METRICS[name] for name in used(target["expr"])))
            assert named <= there, panel["title"]
            assert there - {"le"} <= named, panel["title"]


def test_what_an_alert_counts_is_there_before_the_first_event() -> None:
    """`increase` sees no rise in a series that begins at 1."""
    for rule in RULES:
        for name in re.findall(r"increase\((clawloop_\w+)", rule["expr"]):
            assert name in FROM_THE_START, rule["alert"]


def test_a_process_that_is_no_target_any_more_is_missed() -> None:
    """A stopped container has no name and so no `up`: each of our processes but the optional one has its `absent`."""
    absent = " ".join(found for rule in RULES for found in re.findall(r"absent\((.+?)\)(?: or|$)", rule["expr"]))
    of = (GatewayMetrics, WorkerMetrics, TrainerMetrics, EngineMetrics)
    for metrics_of in of:
        own = {sample.name for metric in metrics_of().registry.collect() for sample in metric.samples}
        assert used(absent) & own, metrics_of
    [scraped] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    [label] = scraped["relabel_configs"]
    processes = {name for found in scraped["dns_sd_configs"] for name in found["names"]}
    assert (label["source_labels"], label["target_label"]) == (["__meta_dns_name"], "process")
    # A judge has the metrics of an orchestrator, whose rule is that of sweeps.
    assert set(_UP.findall(absent)) == {"judge"} <= processes


def test_each_alert_says_what_to_do() -> None:
    for rule in RULES:
        assert rule["annotations"]["summary"]
        told = re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"]))
        assert set(told) <= grouped(rule["expr"]), rule["alert"]
        assert rule["annotations"]["description"].endswith(".")


def test_panels_do_not_overlap() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
