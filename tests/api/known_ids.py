"""Ids that exist, for every other generated request: a generated id meets a row hardly ever."""

from __future__ import annotations

from collections.abc import Mapping

import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.schemas import APIOperation

KNOWN_IDS: Mapping[str, object] = {"session_id": "last", "turn": "last", "policy": "default", "version": 0}
"""By the name in the path; ids of keys and engines are not among them, as a request may delete what it names."""


def described_requests(operation: APIOperation, known: Mapping[str, object]) -> st.SearchStrategy[schemathesis.Case]:
    """Requests as the OpenAPI description has them, and such as it forbids.

    Args:
        known: ids by their name in the path.
    """
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))
    return st.tuples(cases, st.booleans()).map(lambda drawn: _with_known(drawn[0], known) if drawn[1] else drawn[0])


def _with_known(case: schemathesis.Case, known: Mapping[str, object]) -> schemathesis.Case:
    for name in case.path_parameters or ():
        if name in known:
            case.path_parameters[name] = known[name]
    return case
