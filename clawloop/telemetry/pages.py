"""Prometheus pages of several processes on one page: each series is named after its process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


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
