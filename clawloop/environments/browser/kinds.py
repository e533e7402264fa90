"""The kinds of browser tasks, in the manner of MiniWoB (arXiv 1802.08802), and their pages."""

from __future__ import annotations

import html
import importlib.resources
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# Pages ----------------------------------------------------------------------------------------------------------------
# Pages of browser tasks: plain HTML with one script of ours. None of them knows what is right.

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
    """A form that posts its fields to this path."""
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


# Kinds ----------------------------------------------------------------------------------------------------------------
# The kinds of browser tasks, in the manner of MiniWoB (arXiv 1802.08802). Each draws names and values, and says what
# its site must have been sent, once, and where the tab must be at the end.

_NAMES = ("Ada", "Boris", "Chen", "Dana", "Emil", "Farah", "Grace", "Hugo", "Ines", "Jonas", "Kaia", "Leo", "Mira")
_PLACES = ("Accra", "Bergen", "Cusco", "Delhi", "Essen", "Fukuoka", "Ghent", "Havana", "Izmir", "Jaipur", "Kyoto")
_THINGS = ("Apple", "Basket", "Candle", "Drum", "Engine", "Feather", "Guitar", "Hammer", "Kettle", "Lamp", "Mirror")
_WORDS = ("river", "stone", "cloud", "paper", "green", "music", "north", "silver", "window", "garden", "winter")
_BUTTONS = ("Save", "Cancel", "Print", "Copy", "Share", "Rename", "Archive", "Refresh", "Export")
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November")
_ASKED = {"Name": _NAMES, "Place": _PLACES, "Gift": _THINGS, "Month": _MONTHS, "Word": _WORDS}
_STEPS = ("one", "two", "three", "four", "five")
_FIELDS = {"City": "city", "First name": "first", "Company": "company", "Street": "street"}


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the solution.

    Args:
        tool: `click`, `type`, `select` or `scroll`.
        on: role and name of the element, as the page's snapshot shows them: `button "Save"`.
        given: further arguments.
    """

    tool: str
    on: str
    given: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Scenario:
    """
    Args:
        pages: by path; the tab begins at /.
        fields: what must be posted, in this order; None: nothing.
        at: the path of the tab at the end; if something is posted, where to.
        solution: calls that do it.
    """

    instruction: str
    pages: Mapping[str, Page]
    fields: Sequence[tuple[str, str]] | None
    at: str
    solution: Sequence[Step]


FIRST_LEVEL = 2
HARDEST_LEVEL = 3


Kind = Callable[[random.Random, int], Scenario]
"""A task of a level from 1: the higher it is, the more there is on the page or to be done."""


def _at(level: int, *sizes: int) -> int:
    return sizes[level - 1]


def _step(tool: str, on: str, **given: str) -> Step:
    return Step(tool, on, given)


def _click(*names: str) -> list[Step]:
    return [_step("click", f'button "{name}"') for name in names]


def press(rng: random.Random, level: int) -> Scenario:
    names = rng.sample(_BUTTONS, _at(level, 3, 5, 9))
    wanted = rng.choice(names)
    pages = {"/": Page("Tools", form("/pressed", "".join(button(name) for name in names)))}
    return Scenario(f"Press the button {wanted}.", pages, [("pressed", wanted)], "/pressed", _click(wanted))


def write(rng: random.Random, level: int) -> Scenario:
    labels = rng.sample(sorted(_FIELDS), _at(level, 2, 3, 4))
    wanted, text = rng.choice(labels), " ".join(rng.sample(_WORDS, 2))
    body = "".join(field(label, _FIELDS[label]) for label in labels) + button("Send")
    fields = [(_FIELDS[label], text if label == wanted else "") for label in labels] + [("pressed", "Send")]
    solution = [_step("type", f'textbox "{wanted}"', text=text), *_click("Send")]
    instruction = f'Write "{text}" into the field {wanted}, and press Send.'
    return Scenario(instruction, {"/": Page("Address", form("/address", body))}, fields, "/address", solution)


def choose(rng: random.Random, level: int) -> Scenario:
    places, things = rng.sample(_PLACES, _at(level, 3, 5, 11)), rng.sample(_THINGS, _at(level, 3, 4, 11))
    place, thing = rng.choice(places[1:]), rng.choice(things[1:])
    body = choice("Place", "place", places) + choice("Thing", "thing", things) + button("Order")
    solution = [
        _step("select", 'combobox "Place"', option=place),
        _step("select", 'combobox "Thing"', option=thing),
        *_click("Order"),
    ]
    fields = [("place", place), ("thing", thing), ("pressed", "Order")]
    instruction = f"Choose {place} as the place and {thing} as the thing, and press Order."
    return Scenario(instruction, {"/": Page("Order", form("/order", body))}, fields, "/order", solution)


def check(rng: random.Random, level: int) -> Scenario:
    options = rng.sample(_THINGS, _at(level, 3, 6, 11))
    wanted = rng.sample(options, _at(level, 1, 2, 4))
    # Were it the one that is wanted, nothing would be left to do.
    before = rng.sample([option for option in options if level > 1 or option not in wanted], 1)
    changed = [option for option in options if (option in wanted) != (option in before)]
    solution = [*(_step("click", f'checkbox "{option}"') for option in changed), *_click("Pack")]
    body = ticks("checkbox", "thing", options, before) + button("Pack")
    fields = [*(("thing", option) for option in options if option in wanted), ("pressed", "Pack")]
    instruction = f"Check {' and '.join(wanted)}, uncheck all others, and press Pack."
    return Scenario(instruction, {"/": Page("Suitcase", form("/pack", body))}, fields, "/pack", solution)


def pick(rng: random.Random, level: int) -> Scenario:
    options = rng.sample(_NAMES, _at(level, 3, 5, 13))
    wanted = rng.choice(options)
    solution = [_step("click", f'radio "{wanted}"'), *_click("Vote")]
    body = ticks("radio", "for", options) + button("Vote")
    pages = {"/": Page("Election", form("/vote", body))}
    return Scenario(f"Vote for {wanted}.", pages, [("for", wanted), ("pressed", "Vote")], "/vote", solution)


def date(rng: random.Random, level: int) -> Scenario:
    """The day of arrival; from level 2 also who arrives, and at level 3 the day of departure."""
    day, month, year = rng.randint(1, 28), rng.randint(1, len(_MONTHS)), rng.randint(2027, 2031)
    shown, typed = f"{day} {_MONTHS[month - 1]}", f"-{month:02}-{day:02}"
    name = rng.choice(_NAMES)
    asked = [("Name", "name", "text", name), ("Day of arrival", "day", "date", f"{year}{typed}")]
    instruction = f"Book for {name}, who arrives on {shown} {year}."
    if level == 1:
        asked, instruction = asked[1:], f"Book from {shown} {year}."
    elif level > FIRST_LEVEL:
        asked.append(("Day of departure", "last", "date", f"{year + 1}{typed}"))
        instruction = f"Book for {name}, who arrives on {shown} {year} and leaves a year later, on {shown} {year + 1}."
    body = "".join(field(label, key, kind) for label, key, kind, _ in asked) + button("Book")
    solution = [*(_step("type", f'textbox "{label}"', text=text) for label, _, _, text in asked), *_click("Book")]
    instruction += " Dates are typed as YYYY-MM-DD."
    fields = [*((key, text) for _, key, _, text in asked), ("pressed", "Book")]
    return Scenario(instruction, {"/": Page("Hotel", form("/book", body))}, fields, "/book", solution)


def search(rng: random.Random, level: int) -> Scenario:
    """A task to search for an item and open its page. It is solved by where the tab is; nothing is posted."""
    places, things = _at(level, 2, 5, 11), _at(level, 2, 4, 8)
    titles = [
        f"{place} {thing.lower()}" for place in rng.sample(_PLACES, places) for thing in rng.sample(_THINGS, things)
    ]
    paths = {title: f"/items/{rng.randrange(10**8)}" for title in titles}
    wanted = rng.choice(titles)
    links = "".join(f'<li hidden><a href="{paths[title]}">{escaped(title)}</a></li>' for title in titles)
    body = f"<div>{field('Search', 'q')}{action('Find', finds='found')}</div><ul id=found>{links}</ul>"
    pages = {paths[title]: Page(title, "<p>In stock.</p>") for title in titles}
    solution = [
        _step("type", 'textbox "Search"', text=wanted),
        *_click("Find"),
        _step("click", f'link "{wanted}"'),
    ]
    instruction = f'Search for "{wanted}" and open its page.'
    return Scenario(instruction, {"/": Page("Shop", body), **pages}, None, paths[wanted], solution)


def steps(rng: random.Random, level: int) -> Scenario:
    asked = {label: rng.choice(_ASKED[label]) for label in list(_ASKED)[: _at(level, 2, 3, 5)]}
    body = ""
    solution: list[Step] = []
    for number, (label, text) in enumerate(asked.items(), 1):
        is_last = number == len(asked)
        hidden = "" if number == 1 else f" id={_STEPS[number - 1]} hidden"
        onward = button("Finish") if is_last else action("Next", shows=_STEPS[number])
        legend = f"<legend>{number} of {len(asked)}</legend>"
        body += f"<fieldset{hidden}>{legend}{field(label, label.lower())}{onward}</fieldset>"
        solution += [_step("type", f'textbox "{label}"', text=text), *_click("Finish" if is_last else "Next")]
    fields = [*((label.lower(), text) for label, text in asked.items()), ("pressed", "Finish")]
    told = ", ".join(f"the {label.lower()} {text}" for label, text in asked.items())
    instruction = f"Sign up: {told.replace('the name', 'the name is', 1)}."
    return Scenario(instruction, {"/": Page("Sign up", form("/signup", body))}, fields, "/signup", solution)


def tab(rng: random.Random, level: int) -> Scenario:
    offices = _at(level, 2, 3, 6)
    titles, codes = rng.sample(_PLACES, offices), rng.sample(range(1000, 9999), offices)
    chosen = rng.randrange(1, offices)
    tabs = "".join(
        f'<button type="button" role="tab" aria-controls="panel{number}" aria-selected="{str(number == 0).lower()}">'
        f"{escaped(title)}</button>"
        for number, title in enumerate(titles)
    )
    panels = "".join(
        f'<div role="tabpanel" id="panel{number}" {"" if number == 0 else "hidden"}><p>Number {code}</p>'
        f"{form('/call', button(f'Call {code}', 'call'))}</div>"
        for number, code in enumerate(codes)
    )
    solution = [_step("click", f'tab "{titles[chosen]}"'), *_click(f"Call {codes[chosen]}")]
    pages = {"/": Page("Offices", f"<div role=tablist>{tabs}</div>{panels}")}
    instruction = f"Call the office in {titles[chosen]}."
    return Scenario(instruction, pages, [("call", f"Call {codes[chosen]}")], "/call", solution)


def dialog(rng: random.Random, level: int) -> Scenario:
    names = rng.sample(_NAMES, _at(level, 2, 4, 9))
    wanted = rng.choice(names)
    rows = "".join(f"<li>{escaped(name)} {action(f'Delete {name}', opens=f'd-{name}')}</li>" for name in names)
    dialogs = "".join(
        f'<dialog id="d-{name}" aria-label="Delete {name}?"><p>Delete {name}?</p>'
        f"{form('/delete', f'<input type=hidden name=name value={name}>' + button('Yes, delete', 'sure'))}"
        f"{action('No, keep', closes=f'd-{name}')}</dialog>"
        for name in names
    )
    pages = {"/": Page("Contacts", f"<ul>{rows}</ul>{dialogs}")}
    fields = [("name", wanted), ("sure", "Yes, delete")]
    return Scenario(
        f"Delete {wanted} from the contacts.", pages, fields, "/delete", _click(f"Delete {wanted}", "Yes, delete")
    )


def sort(rng: random.Random, level: int) -> Scenario:
    rows_in_all = _at(level, 3, 5, 9)
    things, prices = rng.sample(_THINGS, rows_in_all), rng.sample(range(5, 400), rows_in_all)
    rising = rng.random() < 0.5
    ordered = [thing for _, thing in sorted(zip(prices, things, strict=True), reverse=not rising)]
    rows = "".join(
        f"<tr><td>{thing}<input type=hidden name=row value={thing}></td><td>{price}</td></tr>"
        for thing, price in zip(things, prices, strict=True)
    )
    table = (
        f"<table><thead><tr><th>{action('Name')}</th><th>{action('Price')}</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )
    fields = [*(("row", thing) for thing in ordered), ("pressed", "Save order")]
    first = "lowest" if rising else "highest"
    instruction = f"Sort the table by price, the {first} first, and press Save order."
    pages = {"/": Page("Stock", form("/sorted", table + button("Save order")))}
    return Scenario(instruction, pages, fields, "/sorted", _click(*["Price"] * (1 if rising else 2), "Save order"))


def count(rng: random.Random, level: int) -> Scenario:
    things = rng.sample(_THINGS, _at(level, 2, 3, 5))
    wanted, number = rng.choice(things), rng.randint(_at(level, 1, 2, 5), _at(level, 2, 4, 8))
    rows = "".join(
        f"<p>{field(thing, thing.lower(), more='value=0 readonly')}{action(f'Less {thing}', adds='-1')}"
        f"{action(f'More {thing}', adds='1')}</p>"
        for thing in things
    )
    fields = [(thing.lower(), str(number) if thing == wanted else "0") for thing in things] + [("pressed", "Buy")]
    pages = {"/": Page("Basket", form("/buy", rows + button("Buy")))}
    pieces = "piece" if number == 1 else "pieces"
    instruction = f"Buy {number} {pieces} of {wanted} and nothing else."
    return Scenario(instruction, pages, fields, "/buy", _click(*[f"More {wanted}"] * number, "Buy"))


def agree(rng: random.Random, level: int) -> Scenario:
    name, paragraphs = rng.choice(_NAMES), rng.randint(_at(level, 6, 8, 20), _at(level, 8, 12, 24))
    terms = "".join(f"<p>{number}. {' '.join(rng.sample(_WORDS, 8))}.</p>" for number in range(1, paragraphs))
    body = (
        f'<div class=long role=region aria-label="Terms" tabindex=0 data-unlocks=agree>{terms}</div>'
        f"<label><input type=checkbox id=agree name=agree value=yes disabled> I agree</label>{field('Name', 'name')}"
        + button("Join")
    )
    scroll = [_step("scroll", 'region "Terms"', direction="down")] * _at(level, 3, 4, 12)
    solution = [
        *scroll,
        _step("click", 'checkbox "I agree"'),
        _step("type", 'textbox "Name"', text=name),
        *_click("Join"),
    ]
    fields = [("agree", "yes"), ("name", name), ("pressed", "Join")]
    instruction = f"Join as {name}. The terms can be agreed to when they have been scrolled to their end."
    return Scenario(instruction, {"/": Page("Club", form("/join", body))}, fields, "/join", solution)


def mail(rng: random.Random, level: int) -> Scenario:
    mails = _at(level, 2, 4, 9)
    names, subjects = rng.sample(_NAMES, mails), rng.sample(_WORDS, mails)
    does, wanted = rng.choice(("Archive", "Star", "Report")), rng.randrange(mails)
    rows = "".join(
        f'<li aria-label="From {name}"><b>{name}</b>: about {subject} '
        + form(f"/{number}", "".join(button(f"{word} {number}", "do") for word in ("Archive", "Star", "Report")))
        + "</li>"
        for number, (name, subject) in enumerate(zip(names, subjects, strict=True), 1)
    )
    asked, solved = f"{does} the mail from {names[wanted]}.", f"{does} {wanted + 1}"
    pages = {"/": Page("Mail", f"<ul>{rows}</ul>")}
    return Scenario(asked, pages, [("do", solved)], f"/{wanted + 1}", _click(solved))


KINDS: tuple[Kind, ...] = (
    *(press, write, choose, check, pick, date, search),
    *(steps, tab, dialog, sort, count, agree, mail),
)
KINDS_BY_NAME: Mapping[str, Kind] = {kind.__name__: kind for kind in KINDS}
