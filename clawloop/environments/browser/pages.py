"""Pages of browser tasks: plain HTML with one script of ours. None of them knows what is right."""

from __future__ import annotations

import html
import importlib.resources
from collections.abc import Iterable
from dataclasses import dataclass

_STYLE = """
body { font: 15px/1.5 sans-serif; margin: 1rem; max-width: 40rem }
label, fieldset, li { display: block; margin: .4rem 0 }
[hidden] { display: none }
table { border-collapse: collapse } td, th { border: 1px solid #999; padding: .2rem .6rem }
.long { height: 8rem; overflow: auto; border: 1px solid #999; padding: .4rem }
"""
SENT = "<!doctype html><meta charset=utf-8><title>Sent</title><p>Sent.</p>"


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    body: str

    @property
    def html(self) -> str:
        """The whole page."""
        script = (importlib.resources.files("clawloop.environments.browser") / "inside" / "page.js").read_text()
        title = escaped(self.title)
        return (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
            f"<h1>{title}</h1>{self.body}<script>{script}</script></html>"
        )


def escaped(text: str) -> str:
    return html.escape(text, quote=True)


def form(path: str, body: str) -> str:
    """What is in it is posted to this path."""
    return f'<form method="post" action="{path}" autocomplete="off">{body}</form>'


def button(text: str, name: str = "pressed") -> str:
    """A button that posts its form, and its text under this name."""
    return f'<button name="{name}" value="{escaped(text)}">{escaped(text)}</button>'


def action(text: str, **does: str) -> str:
    """A button that posts nothing; `opens="d"` becomes `data-opens="d"`, which the script knows."""
    data = "".join(f' data-{name}="{escaped(value)}"' for name, value in does.items())
    return f'<button type="button"{data}>{escaped(text)}</button>'


def field(label: str, name: str, kind: str = "text", more: str = "") -> str:
    return f'<label>{escaped(label)} <input type="{kind}" name="{name}" {more}></label>'


def choice(label: str, name: str, options: Iterable[str]) -> str:
    listed = "".join(f"<option>{escaped(option)}</option>" for option in options)
    return f'<label>{escaped(label)} <select name="{name}">{listed}</select></label>'


def ticks(kind: str, name: str, options: Iterable[str], ticked: Iterable[str] = ()) -> str:
    """Check boxes or radio buttons of one name."""
    chosen = set(ticked)
    return "".join(
        f'<label><input type="{kind}" name="{name}" value="{escaped(option)}"'
        f"{' checked' if option in chosen else ''}> {escaped(option)}</label>"
        for option in options
    )
