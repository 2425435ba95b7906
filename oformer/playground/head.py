"""The head of an HTTP/1.1 request, parsed without repairing or guessing anything.

A proxy and the server behind it must agree on where a request ends; where they do not, the body of one client is
read as the request of another (request smuggling). So a head that two parsers could read in two ways is refused with
400: line breaks other than CRLF, folded lines, spaces around a field's name, several lengths, lengths that are not
plain digits, and a Content-Length beside a Transfer-Encoding. Every refused head closes its connection.
"""

import re
from http import HTTPStatus
from typing import NamedTuple

LONGEST = 2**16  # bytes of a head
FIELDS = 100
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(%s) ([\x21-\x7e]+) HTTP/1\.([01])" % _TOKEN)
_FIELD = re.compile(rb"(%s):([^\x00-\x08\x0a-\x1f\x7f]*)" % _TOKEN)


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: HTTPStatus, why: str, **headers: str):
        super().__init__(why)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class Head(NamedTuple):
    """Request line and header fields."""

    method: str
    target: str
    persistent: bool  # whether the connection stays open after the answer
    fields: tuple[tuple[str, str], ...]  # names in lower case
    length: int | None  # bytes of the body; None without a Content-Length, and then no body follows

    def all(self, name: str) -> list[str]:
        """The values of a field, which may occur several times."""
        return [value for field, value in self.fields if field == name]

    def get(self, name: str) -> str:
        """The first value of a field, or an empty string."""
        return next(iter(self.all(name)), "")


def check_beginning(received: bytearray) -> None:
    """Refuse a head whose end has not arrived yet, as soon as it is known to be malformed or too long."""
    if received.count(b"\n") != received.count(b"\r\n"):
        raise _malformed("lines that end in CR LF", "a line feed alone")
    if len(received) > LONGEST:
        raise _too_long(b"\r\n" in received)


def parse_head(text: bytes) -> Head:
    """Parse a head.

    Args:
        text: all lines up to the empty one, without it.

    Raises:
        Refused: the head is malformed or ambiguous, or announces a body in a form that is not read here.
    """
    request, *lines = text.split(b"\r\n")
    if len(text) > LONGEST or len(lines) > FIELDS:
        raise _too_long(len(request) <= LONGEST)
    parts = _REQUEST_LINE.fullmatch(request)
    if parts is None:
        raise _malformed("a request line such as `GET / HTTP/1.1`", _quoted(request))
    fields = tuple(_field(line) for line in lines)
    method, target, minor = parts[1].decode(), parts[2].decode(), int(parts[3])
    head = Head(method, target, False, fields, _length(fields, minor))
    options = {option.strip(" \t").lower() for value in head.all("connection") for option in value.split(",")}
    return head._replace(persistent="close" not in options and (minor == 1 or "keep-alive" in options))


def _field(line: bytes) -> tuple[str, str]:
    parts = _FIELD.fullmatch(line)
    if parts is None:
        raise _malformed("header lines of the form `Name: value`", _quoted(line))
    return parts[1].decode().lower(), parts[2].strip(b" \t").decode("latin-1")


def _length(fields: tuple[tuple[str, str], ...], minor: int) -> int | None:
    lengths = [value for name, value in fields if name == "content-length"]
    encodings = [value for name, value in fields if name == "transfer-encoding"]
    if encodings and (lengths or minor == 0):
        raise _malformed(
            "one length of the body",
            f"Transfer-Encoding in {'HTTP/1.0' if minor == 0 else 'a head with Content-Length'}",
        )
    if encodings:
        raise Refused(
            HTTPStatus.LENGTH_REQUIRED,
            f"Expected a body with a Content-Length, got Transfer-Encoding {encodings[0]!r:.60}.",
        )
    if len(lengths) > 1:
        raise _malformed("one Content-Length", f"{len(lengths)}")
    if lengths and not re.fullmatch("[0-9]{1,15}", lengths[0]):
        raise _malformed("a Content-Length of digits alone", f"`{lengths[0][:60]}`")
    return int(lengths[0]) if lengths else None


def _malformed(expected: str, got: str) -> Refused:
    return Refused(HTTPStatus.BAD_REQUEST, f"Expected {expected}, got {got}.")


def _too_long(fields: bool) -> Refused:
    if fields:
        return Refused(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"Expected a head of at most {FIELDS} lines and {LONGEST:,} bytes, got a longer one.",
        )
    return Refused(HTTPStatus.REQUEST_URI_TOO_LONG, f"Expected a request line of at most {LONGEST:,} bytes, got more.")


def _quoted(line: bytes) -> str:
    return f"`{ascii(line[:60].decode('latin-1'))[1:-1]}`"
