"""What Kubernetes takes as a name, a label or an annotation's key.

Covers: the patterns, anchored and without lookahead of a length, which is checked
beside them. Does not cover: which of them a field wants.
"""

import re

_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_WORD = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"

DNS_LABEL_PATTERN = rf"^{_LABEL}$"
DNS_1035_PATTERN = r"^[a-z](?:[-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN_PATTERN = rf"^{_LABEL}(?:\.{_LABEL})*$"
LABEL_VALUE_PATTERN = rf"^(?:{_WORD})?$"
QUALIFIED_NAME_PATTERN = rf"^(?:{_LABEL}(?:\.{_LABEL})*/)?{_WORD}$"
PORT_NAME_PATTERN = r"^(?=.*[a-z])[a-z0-9]+(?:-[a-z0-9]+)*$"
CONFIG_KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"

LONGEST_LABEL = 63
LONGEST_SUBDOMAIN = 253


def is_dns_label(text: str) -> bool:
    """Whether it may name a namespace, a pod's host, a container or a volume."""
    return len(text) <= LONGEST_LABEL and _fits(DNS_LABEL_PATTERN, text)


def is_dns_1035(text: str) -> bool:
    """Whether it may name a Service."""
    return len(text) <= LONGEST_LABEL and _fits(DNS_1035_PATTERN, text)


def is_dns_subdomain(text: str) -> bool:
    """Whether it may name most other objects."""
    return len(text) <= LONGEST_SUBDOMAIN and _fits(DNS_SUBDOMAIN_PATTERN, text)


def is_label_value(text: str) -> bool:
    """Whether it may be the value of a label."""
    return len(text) <= LONGEST_LABEL and _fits(LABEL_VALUE_PATTERN, text)


def is_qualified_name(text: str) -> bool:
    """Whether it may be the key of a label, an annotation or a taint."""
    prefix, _, name = text.rpartition("/")
    lengths = len(prefix) <= LONGEST_SUBDOMAIN and len(name) <= LONGEST_LABEL
    return lengths and _fits(QUALIFIED_NAME_PATTERN, text)


def is_port_name(text: str) -> bool:
    """Whether it may name a container's port."""
    return len(text) <= 15 and _fits(PORT_NAME_PATTERN, text)


def is_config_key(text: str) -> bool:
    """Whether it may be a key of a ConfigMap."""
    fits = len(text) <= LONGEST_SUBDOMAIN and _fits(CONFIG_KEY_PATTERN, text)
    return fits and text not in (".", "..") and not text.startswith("..")


def _fits(pattern: str, text: str) -> bool:
    # fullmatch, since `$` would let a line break pass at the end.
    return re.fullmatch(pattern, text, re.ASCII) is not None
