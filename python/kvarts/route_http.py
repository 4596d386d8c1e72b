"""HTTP/1.1 for the proxy `python -m kvarts.route`: one request for each connection, with limits of its head and its body.

The size of a request is checked before it is kept, and every wait has a limit. Answers of engines are forwarded to the client unchanged, framing
included.
"""

import asyncio
import json
import ssl
import urllib.parse

#: The limits of the head of a request or an answer: its bytes and its lines.
HEAD_MAX = 64 << 10
LINES_MAX = 128
#: Seconds that a client may take to send its head, to send its body, and to receive data.
HEAD_TIMEOUT, BODY_TIMEOUT, CLIENT_STALL = 15.0, 60.0, 60.0
#: Seconds for a connection to an engine.
CONNECT_TIMEOUT = 5.0
_PIECE = 64 << 10
#: Header fields of a single connection, which are not forwarded.
_OWN = frozenset(
    ["connection", "keep-alive", "proxy-connection", "proxy-authenticate", "te", "trailer", "upgrade", "host", "content-length", "expect"]
)
_REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout", 411: "Length Required",
    413: "Content Too Large", 431: "Request Header Fields Too Large", 502: "Bad Gateway", 503: "Service Unavailable",
}


class Refused(Exception):
    """A request that the proxy answers with an error."""

    def __init__(self, status, text, kind="invalid_request_error"):
        super().__init__(text)
        self.status, self.text, self.kind = status, text, kind


class Lost(Exception):
    """An engine that did not answer. `kind`: the kind of failure in metrics."""

    def __init__(self, text, kind="answer"):
        super().__init__(text)
        self.kind = kind


class Gone(Exception):
    """A client that has disconnected or receives no data."""


async def within(seconds, work):
    # ends: the work is cancelled after `seconds`
    return await asyncio.wait_for(work, seconds)


class Head:
    """The first line and the fields of a request or an answer."""

    def __init__(self, data):
        lines = data.decode("latin-1").split("\r\n")
        self.first, self.fields = lines[0].split(" ", 2), []
        if len(lines) > LINES_MAX:
            raise Refused(431, f"the head of the message has more than {LINES_MAX} lines")
        for line in lines[1:]:
            if not line:
                continue
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip() or "\n" in line or "\r" in line or "\0" in line:
                raise Refused(400, f"the header line {line[:100]!r} is not valid: write Name: value")
            self.fields.append((name, value.strip()))

    def get(self, name):
        """The value of a header field, or `None`. Raises `Refused` for different values."""
        found = {value for known, value in self.fields if known.lower() == name}
        if len(found) > 1:
            raise Refused(400, f"the header field {name} has several different values: send it once")
        return found.pop() if found else None

    def passed_on(self):
        return [(name, value) for name, value in self.fields if name.lower() not in _OWN]


class Request:
    def __init__(self, method, path, head, body=b""):
        self.method, self.path, self.head, self.body = method, path, head, body


class Room:
    """The limit of memory for the bodies of all requests."""

    def __init__(self, most):
        self.left = most

    def take(self, nbytes):
        if nbytes > self.left:
            raise Refused(503, "the proxy has reached its limit of memory for request bodies (--bodies-max): retry later", "overloaded_error")
        self.left -= nbytes

    def give_back(self, nbytes):
        self.left += nbytes


def length_of(request, body_max):
    """The length of the request's body; 0 without a body."""
    head = request.head
    if head.get("transfer-encoding") is not None:
        raise Refused(411, "the proxy does not support Transfer-Encoding in requests: send a Content-Length")
    length = head.get("content-length")
    if length is None:
        if request.method == "POST":
            raise Refused(411, "the request has no Content-Length: send one")
        return 0
    if not (length.isascii() and length.isdigit()) or len(length) > 18:
        raise Refused(400, "Content-Length is not a number of bytes")
    if int(length) > body_max:
        raise Refused(413, f"the body is longer than the limit of {body_max} bytes (--body-max)")
    return int(length)


async def read_head(reader):
    """Reads the head of a connection's request; `None` if the client sent nothing."""
    try:
        data = await within(HEAD_TIMEOUT, reader.readuntil(b"\r\n\r\n"))
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise Refused(400, "the client closed the connection before the end of the request's head") from None
    except asyncio.LimitOverrunError:
        raise Refused(431, f"the head of the request is longer than {HEAD_MAX} bytes") from None
    except asyncio.TimeoutError:
        raise Refused(408, f"the head of the request did not arrive within {HEAD_TIMEOUT:g} seconds") from None
    head = Head(data)
    if len(head.first) != 3 or not head.first[2].startswith("HTTP/1.") or not head.first[1].startswith("/"):
        raise Refused(400, "the request is not HTTP/1: its first line must be METHOD /PATH HTTP/1.1")
    return Request(head.first[0], head.first[1].partition("?")[0], head)


async def read_body(request, length, reader, writer):
    if (request.head.get("expect") or "").lower() == "100-continue":
        await send(writer, b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        request.body = await within(BODY_TIMEOUT, reader.readexactly(length))
    except asyncio.IncompleteReadError:
        raise Refused(400, "the body is shorter than its Content-Length") from None
    except asyncio.TimeoutError:
        raise Refused(408, f"the body of the request did not arrive within {BODY_TIMEOUT:g} seconds") from None


async def until_gone(reader):
    """Waits until the client closes its side of the connection; discards further data."""
    while await reader.read(_PIECE):
        pass


async def send(writer, data):
    """Sends data to the client."""
    try:
        writer.write(data)
        await within(CLIENT_STALL, writer.drain())
    except (OSError, asyncio.TimeoutError) as error:
        raise Gone(str(error)) from None


def answer(status, told):
    """The bytes of the proxy's own answer: text as it is (metrics), everything else as JSON."""
    body, kind = (told, "text/plain; version=0.0.4") if isinstance(told, str) else (json.dumps(told), "application/json")
    body = body.encode()
    head = f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return (head + "Connection: close\r\n\r\n").encode() + body


def refusal(error):
    """An error in the form of OpenAI's errors."""
    return answer(error.status, {"error": {"message": error.text, "type": error.kind, "param": None, "code": error.status}})


def parsed(body):
    """The JSON object in a body."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not valid JSON: {error}"[:200]) from None
    if not isinstance(found, dict):
        raise Refused(400, "the body is not a JSON object")
    return found


class Answered:
    """An engine's answer whose head has arrived."""

    def __init__(self, reader, writer, head):
        self.reader, self.writer, self.head = reader, writer, head
        try:
            self.status, self.length = int(head.first[1]), head.get("content-length")
        except (IndexError, ValueError):
            raise Lost("the engine's answer is not HTTP/1") from None

    def begin(self):
        """The head for the client."""
        fields = [*self.head.passed_on(), ("Connection", "close")]
        if self.length is not None:
            fields.append(("Content-Length", self.length))
        return (" ".join(self.head.first) + "\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields) + "\r\n").encode("latin-1")

    async def pieces(self, stall):
        """Yields the body in pieces, framing included. Raises `Lost` if the body is incomplete."""
        came, tail = 0, b""
        while True:
            try:
                piece = await within(stall, self.reader.read(_PIECE))
            except (OSError, asyncio.TimeoutError) as error:
                raise Lost(f"the engine's answer is incomplete: {error or f'no data arrived for {stall:g} seconds'}", "broken") from None
            if not piece:
                if self._is_cut(came, tail):
                    raise Lost("the engine's answer is incomplete", "broken")
                return
            came, tail = came + len(piece), (tail + piece[-4:])[-4:]
            yield piece

    def _is_cut(self, came, tail):
        if self.length is not None:
            return str(came) != self.length
        return self._is_chunked() and tail != b"\r\n\r\n"

    def _is_chunked(self):
        return "chunked" in (self.head.get("transfer-encoding") or "").lower()

    async def whole(self, most, stall):
        """Reads the whole body of a short answer, without framing."""
        data = b""
        async for piece in self.pieces(stall):
            data += piece
            if len(data) > most:
                raise Lost(f"the engine's answer is longer than {most} bytes")
        return _unframed(data) if self._is_chunked() else data

    def close(self):
        self.writer.close()


def _unframed(data):
    found = b""
    while True:
        size, line, data = data.partition(b"\r\n")
        try:
            size = int(size.split(b";")[0], 16)
        except ValueError:
            raise Lost("the chunks of the engine's answer are not valid") from None
        if not line or len(data) < size:
            raise Lost("the engine's answer is incomplete", "broken")
        if size == 0:
            return found
        found, data = found + data[:size], data[size + 2 :]


def listener_tls(certificate, key):
    """The TLS settings of the proxy's listener. Raises `OSError` if a file is not a certificate or its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


def engine_tls(authority):
    """The TLS settings for engines. Their certificates must be from this authority (a file), or from one that this machine trusts."""
    return ssl.create_default_context(cafile=authority)


async def ask(url, method, path, fields, body, timeout, tls=None):
    """Sends a request to an engine and waits for the head of its answer. Raises `Lost`. `tls`: the settings for `https://`."""
    place = urllib.parse.urlsplit(url)
    secure = tls if place.scheme == "https" else None
    port = place.port or (443 if secure else 80)
    try:
        connecting = asyncio.open_connection(place.hostname, port, ssl=secure, limit=HEAD_MAX)
        reader, writer = await within(CONNECT_TIMEOUT, connecting)
    except (OSError, asyncio.TimeoutError) as error:
        raise Lost(f"no connection to the engine: {error or f'timeout after {CONNECT_TIMEOUT:g} seconds'}", "connection") from None
    try:
        lines = [f"{method} {place.path.rstrip('/')}{path} HTTP/1.1", f"Host: {place.netloc}", "Connection: close"]
        lines += [f"Content-Length: {len(body)}"] if body or method == "POST" else []
        lines += [f"{name}: {value}" for name, value in fields]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body)
        await within(timeout, writer.drain())
        return Answered(reader, writer, Head(await within(timeout, reader.readuntil(b"\r\n\r\n"))))
    except (OSError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError, Refused) as error:
        writer.close()
        raise Lost(f"no answer from the engine: {error or f'timeout after {timeout:g} seconds'}") from None
    except BaseException:
        writer.close()
        raise
