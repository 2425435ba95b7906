"""The head of an HTTP/1.1 request, parsed without repairing or guessing anything.

A proxy and the server behind it must agree on where a request ends; where they do not, the body of one client is
read as the request of another (request smuggling). A head that two parsers could read in two ways is refused with
400: line breaks other than CRLF, folded lines, spaces around a field's name, several lengths, lengths that are not
plain digits, and a Content-Length beside a Transfer-Encoding. Every refused head closes its connection.
"""

import re
from http import HTTPStatus
from typing import NamedTuple

LONGEST = 2**16  # bytes of a head
FIELDS = 100
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_HEAD = re.compile(
    rb"(%b) ([\x21-\x7e]+) HTTP/1\.([01])\r\n((?:%b:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)*+)\r\n" % (_TOKEN, _TOKEN)
)


class Refused(Exception):
    """A request that is answered with an error: a status, a sentence, and headers (`Retry_After` is Retry-After)."""

    def __init__(self, status: HTTPStatus, why: str, **headers: str):
        super().__init__(why)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class Head(NamedTuple):
    """Request line and header fields."""

    method: str
    target: str
    persistent: bool  # whether the connection stays open after the answer
    fields: dict[str, list[str]]  # values by name in lower case; a field may occur several times
    length: int | None  # bytes of the body; None without a Content-Length, and then no body follows

    def get(self, name: str) -> str:
        """First value of a field, or an empty string."""
        return self.fields.get(name, [""])[0]


def parse_head(text: bytes) -> Head:
    """Parse a head, which includes the empty line at its end.

    Raises:
        Refused: the head is malformed or ambiguous, or announces a body in a form that is not read here.
    """
    lines = text.split(b"\r\n")
    if len(lines[0]) > LONGEST:
        why = f"Expected a request line of at most {LONGEST:,} bytes, got a longer one."
        raise Refused(HTTPStatus.REQUEST_URI_TOO_LONG, why)
    if len(text) > LONGEST or len(lines) > FIELDS + 3:
        why = f"Expected a head of at most {FIELDS} lines and {LONGEST:,} bytes, got a longer one."
        raise Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, why)
    parts = _HEAD.fullmatch(text)
    if parts is None:
        got = f"`{ascii(text[:60].decode('latin-1'))[1:-1]}`"
        raise _malformed("a line such as `GET / HTTP/1.1`, then lines of the form `Name: value` and CR LF", got)
    fields: dict[str, list[str]] = {}
    for line in lines[1:-2]:
        name, _, value = line.decode("latin-1").partition(":")
        fields.setdefault(name.lower(), []).append(value.strip(" \t"))
    old = parts[3] == b"0"
    options = {option.strip(" \t").lower() for value in fields.get("connection", ()) for option in value.split(",")}
    persistent = "close" not in options and (not old or "keep-alive" in options)
    return Head(parts[1].decode(), parts[2].decode(), persistent, fields, _length(fields, old))


def _length(fields: dict[str, list[str]], old: bool) -> int | None:
    """Bytes of the body.

    Args:
        fields: of the head.
        old: whether the request is of HTTP/1.0, which has no Transfer-Encoding.
    """
    lengths, encodings = fields.get("content-length", []), fields.get("transfer-encoding", [])
    if encodings and (lengths or old):
        got = f"Transfer-Encoding in {'HTTP/1.0' if old else 'a head with Content-Length'}"
        raise _malformed("one length of the body", got)
    if encodings:
        why = f"Expected a body with a Content-Length, got Transfer-Encoding {encodings[0]!r:.60}."
        raise Refused(HTTPStatus.LENGTH_REQUIRED, why)
    if not lengths:
        return None
    if len(lengths) > 1 or not re.fullmatch("[0-9]{1,15}", lengths[0]):
        raise _malformed("one Content-Length of digits alone", f"{', '.join(lengths)!r:.60}")
    return int(lengths[0])


def _malformed(expected: str, got: str) -> Refused:
    return Refused(HTTPStatus.BAD_REQUEST, f"Expected {expected}, got {got}.")
