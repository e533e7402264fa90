"""Encodes JSON values as bytes: equal values give equal bytes, different values different bytes.

Digests of the bytes are stored for years, so no library encodes them: orjson stops at 254 levels and 64-bit numbers,
`json` recurses, and either may write a number differently one day. Each value is written with its type and length in
front, so no concatenation is ambiguous.
"""

from __future__ import annotations

from pydantic import JsonValue


def encode(value: JsonValue) -> bytes:
    """The bytes of one JSON value.

    Key order does not matter. Numbers are doubles, as a JavaScript client writes them back: 1, 1.0 and 1e0 are equal.
    Any depth is supported.
    """
    out: list[bytes] = []
    stack: list[JsonValue] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            text = item.encode("utf-8", "surrogatepass")
            out.append(b"s%d:" % len(text))
            out.append(text)
        elif isinstance(item, dict):
            out.append(b"d%d:" % len(item))
            for key in sorted(item, reverse=True):
                stack.append(item[key])
                stack.append(key)
        elif isinstance(item, list):
            out.append(b"l%d:" % len(item))
            stack.extend(reversed(item))
        else:
            out.append(_scalar(item))
    return b"".join(out)


def _scalar(value: bool | int | float | None) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"t" if value else b"f"
    try:
        return b"#%s;" % repr(value + 0.0).encode()  # + 0.0 also makes -0.0 and 0 equal
    except OverflowError:
        return b"#%s;" % hex(value).encode() if isinstance(value, int) else b"#;"
