"""The metrics of the proxy `python -m kvarts.route` at `/metrics`, in Prometheus' text format 0.0.4. The number of label values is bounded: engines
and servers are those of the command line, and the numbers of reasons and kinds are limited."""

#: Kinds of an engine's failures: no connection, no answer, a status that another engine may avoid, an incomplete answer, a failed prefill.
FAILURES = ("connection", "answer", "502", "503", "504", "broken", "prefill")
_FAMILIES = {
    "requests_total": ("counter", "Requests that an engine has begun to answer, by the reason for the choice of the engine."),
    "failures_total": ("counter", "Requests that an engine did not answer completely, by kind of failure."),
    "retries_total": ("counter", "Requests that the proxy sent to another engine after an engine had failed."),
    "refused_total": ("counter", "Requests that the proxy answered with an error, by status."),
    "clients_gone_total": ("counter", "Requests whose client disconnected before the end of the answer."),
    "hand_overs_total": ("counter", "Requests with separate prefill and decode engines, by outcome: `handed` (the decode engine received the prefill), or `alone` (the decode engine computed the prompt)."),
    "prompts_total": ("counter", "Prompts, by form: `tokens` if the proxy has the tokens of the prompt, or `text` if it has only the text."),
    "in_flight": ("gauge", "Requests at an engine, by state: `waiting` for the first byte of the answer, or `decoding`."),
    "queue_seconds": ("gauge", "Estimated prefill time of the waiting requests of an engine."),
    "connections": ("gauge", "Open client connections."),
    "engine_up": ("gauge", "1: the engine receives requests; 0: the engine failed and is excluded for a while."),
    "server_up": ("gauge", "1: the proxy queries the Kvarts server; 0: the server did not answer and is excluded for a while."),
}


def _samples(proxy):
    """(family, labels, value)."""
    for engine in proxy.engines:
        of = {"engine": engine.url}
        for reason, count in engine.answered.items():
            yield "requests_total", {**of, "reason": reason}, count
        for kind in FAILURES:
            yield "failures_total", {**of, "kind": kind}, engine.failures.get(kind, 0)
        yield "in_flight", {**of, "state": "waiting"}, engine.waiting
        yield "in_flight", {**of, "state": "decoding"}, engine.decoding
        yield "queue_seconds", of, engine.queue_ms / 1000
        yield "engine_up", of, int(not engine.is_away())
    for server in proxy.servers:
        yield "server_up", {"server": server.endpoint}, int(not server.is_away())
    yield "retries_total", {}, proxy.retried
    for status, count in proxy.refused.items():
        yield "refused_total", {"status": str(status)}, count
    yield "clients_gone_total", {}, proxy.gone
    for outcome, count in proxy.handed.items():
        yield "hand_overs_total", {"outcome": outcome}, count
    for known, count in proxy.prompts.items():
        yield "prompts_total", {"known": known}, count
    yield "connections", {}, proxy.connections


def _escaped(value):
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def text(proxy):
    by_family = {name: [] for name in _FAMILIES}
    for name, labels, value in _samples(proxy):
        told = ",".join(f'{label}="{_escaped(of)}"' for label, of in labels.items())
        by_family[name].append(f"kvarts_route_{name}{{{told}}} {value}" if told else f"kvarts_route_{name} {value}")
    lines = []
    for name, (kind, meaning) in _FAMILIES.items():
        lines += [f"# HELP kvarts_route_{name} {meaning}", f"# TYPE kvarts_route_{name} {kind}", *by_family[name]]
    return "\n".join(lines) + "\n"
