"""The tools of OpenAI's Responses: to functions, which engines know, and from a function's name back to the tool.

A namespace's tools are functions named `namespace__tool`. A custom tool, whose input is any text, is a function of one
text. Tools whose loading is deferred are shown once an item of the history has loaded them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from api.wire.reading import objects, text

SEARCH = "tool_search"
INPUT = "input"
_QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


@dataclass(frozen=True, slots=True)
class Origin:
    """The tool that a function stands for."""

    kind: Literal["function", "custom", "search"]
    name: str
    namespace: str | None = None


class ResponsesTools:
    """
    Attributes:
        origins: by the function's name; without plain functions.
    """

    def __init__(self) -> None:
        self.origins: dict[str, Origin] = {}
        self._shown: dict[str, dict[str, Any]] = {}
        self._deferred: dict[str, dict[str, Any]] = {}
        self._owners: dict[str, tuple[str, str | None]] = {}
        self._searched_elsewhere = False

    def declare(self, tools: Any, place: str, ignored: list[str]) -> None:
        """Add the tools of a request.

        Args:
            ignored: gets those that only a server of OpenAI's can run.
        """
        self._add(tools, place, ignored, load=False)

    def load(self, tools: Any, place: str, ignored: list[str]) -> list[str]:
        """Add tools that an item of the history brings; returns the names of their functions."""
        return self._add(tools, place, ignored, load=True)

    def function_name(self, name: str, namespace: object) -> str:
        """The function that stands for a tool; of one that is not there as well, for calls in the history."""
        within = namespace if isinstance(namespace, str) and namespace else None
        wanted = (name, within)
        flat = name if within is None else f"{within}__{name}"
        while self._owners.get(flat, wanted) != wanted:
            flat += "_"  # another tool has this very name
        return flat

    def named(self, name: str, namespace: object = None) -> str | None:
        """The function of a tool that is shown, or can be, by its own name; None if there is none."""
        wanted = self.function_name(name, namespace)
        if wanted in self._deferred:
            self._shown[wanted] = self._deferred.pop(wanted)
        if wanted in self._shown:
            return wanted
        return next(
            (flat for flat, origin in self.origins.items() if origin.name == name and flat in self._shown), None
        )

    def functions(self, only: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """The functions that are shown to the model, in the form of a chat request.

        Args:
            only: names of functions; None: all.
        """
        if self._searched_elsewhere:
            # The search is a server's of OpenAI's, and without it none could ever be found.
            self._shown |= self._deferred
        chosen = self._shown if only is None else {name: self._shown[name] for name in only if name in self._shown}
        return [{"type": "function", "function": function} for function in chosen.values()]

    def _add(
        self, tools: Any, place: str, ignored: list[str], *, load: bool, within: dict[str, Any] | None = None
    ) -> list[str]:
        names: list[str] = []
        for tool, at in objects(tools, place):
            match tool.get("type"):
                case "namespace":
                    text(tool.get("name"), f"{at}.name")
                    names += self._add(tool.get("tools") or [], f"{at}.tools", ignored, load=load, within=tool)
                case "function" | "custom" as kind:
                    names.append(self._keep(tool, kind, at, load=load, within=within))
                case "tool_search" if tool.get("execution") == "client":
                    names.append(self._keep(tool | {"name": SEARCH}, "search", at, load=load))
                case other:
                    # Run by OpenAI's servers.
                    self._searched_elsewhere |= other == SEARCH
                    ignored.append(f"{at}.{other}")
        return names

    def _keep(
        self,
        tool: dict[str, Any],
        kind: Literal["function", "custom", "search"],
        place: str,
        *,
        load: bool,
        within: dict[str, Any] | None = None,
    ) -> str:
        own, namespace = text(tool.get("name"), f"{place}.name"), None if within is None else within["name"]
        name = self.function_name(own, namespace)
        description = tool.get("description") or (within or {}).get("description")
        function: dict[str, Any] = {"name": name}
        function |= {"description": description} if description is not None else {}
        if kind == "custom":
            function |= _of_text(tool, description)
        elif tool.get("parameters") is not None or kind == "search":
            function["parameters"] = tool.get("parameters") or _QUERY
        if tool.get("strict"):
            function["strict"] = True
        self._owners[name] = (own, namespace)
        if kind != "function" or name != own:
            self.origins[name] = Origin(kind, own, namespace)
        if tool.get("defer_loading") and not load and name not in self._shown:
            self._deferred[name] = function
        else:
            self._deferred.pop(name, None)
            self._shown[name] = function
        return name


def origins_of(recorded: Any) -> dict[str, Origin]:
    """The tools that functions stand for, by the function's name.

    Args:
        recorded: for each function the kind, name and namespace of its tool, as JSON; None: all are plain functions.
    """
    return {function: Origin(*origin) for function, origin in (recorded or {}).items()}


def given_again(functions: list[dict[str, Any]], origins: Mapping[str, Origin]) -> list[dict[str, Any]]:
    """The client's tools that these functions stand for; functions of a namespace become one tool.

    Args:
        functions: as Responses has them.
    """
    tools: list[dict[str, Any]] = []
    spaces: dict[str, dict[str, Any]] = {}
    for function in functions:
        origin = origins.get(function["name"]) or Origin("function", function["name"])
        named = function | {"name": origin.name}
        if origin.kind != "function":
            described = {"name": origin.name, "description": function.get("description")}
            search = {"type": "tool_search", "execution": "client", "description": function.get("description")}
            named = search if origin.kind == "search" else {"type": "custom"} | described
        if origin.namespace is None:
            tools.append(named)
        elif origin.namespace in spaces:
            spaces[origin.namespace]["tools"].append(named)
        else:
            spaces[origin.namespace] = {"type": "namespace", "name": origin.namespace, "tools": [named]}
            tools.append(spaces[origin.namespace])
    return tools


def _of_text(tool: dict[str, Any], description: Any) -> dict[str, Any]:
    said = str(description or "")
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        said += f"\n\nThe input has this form ({form.get('syntax')}):\n{form.get('definition')}"
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {"description": said.strip(), "parameters": parameters}


def input_of(arguments: str) -> str:
    """The text that a custom tool is called with."""
    given = arguments_of(arguments)
    said = given.get(INPUT)
    return said if isinstance(said, str) else arguments


def arguments_of(arguments: str) -> dict[str, Any]:
    """Arguments as an object; empty if they are none."""
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return given if isinstance(given, dict) else {}
