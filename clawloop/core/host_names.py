"""The Host headers that a server accepts.

A web page could otherwise reach a server on loopback, or in its reader's network, through a host name of its own (DNS
rebinding). IP addresses cannot be rebound, so they need no allowance.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Set
from urllib.parse import urlsplit

LOOPBACK_NAMES = frozenset({"localhost"})


def is_answered(host: str | None, allowed: Set[str] = frozenset()) -> bool:
    """True for IP addresses, loopback names and allowed ones.

    Args:
        host: as `hostname` returns it.
        allowed: `*` allows all.
    """
    return is_allowed(host, allowed) or ip_address(host) is not None


def is_allowed(name: str | None, allowed: Set[str] = frozenset()) -> bool:
    """True for loopback names and allowed ones."""
    return name is not None and ("*" in allowed or name in allowed or name in LOOPBACK_NAMES)


def ip_address(name: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The name as an IP address; None if it is none."""
    try:
        return ipaddress.ip_address(name or "")
    except ValueError:
        return None


def hostname(url: str) -> str | None:
    """The host in a URL, lower-case; None if the URL has none or cannot be parsed. A Host header is one with `//`
    before it."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
