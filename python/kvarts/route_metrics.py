"""What the proxy `python -m kvarts.route` tells Prometheus at `/metrics`: the text format 0.0.4. Labels are bounded: engines and servers are those of the
command line, reasons and kinds are few."""

#: How an engine's failure is called: no connection to it, no answer in time, an answer that another engine may give better, one that broke off.
FAILURES = ("connection", "answer", "502", "503", "504", "broken", "prefill")
_FAMILIES = {
    "requests_total": ("counter", "Requests that an engine has begun to answer, by the reason for which it was chosen."),
    "failures_total": ("counter", "Requests that an engine did not answer, or whose answer broke off, by kind."),
    "retries_total": ("counter", "Requests that were sent to another engine because one had failed."),
    "refused_total": ("counter", "Requests that the proxy itself answered with an error, by status."),
    "clients_gone_total": ("counter", "Requests whose client went away first."),
    "hand_overs_total": ("counter", "Requests before engines that prefill and others that decode: the prefill was handed over, or the other one computes alone."),
    "prompts_total": ("counter", "Prompts, by whether their tokens are known or their text alone."),
    "in_flight": ("gauge", "Requests with an engine: waiting for the begin of the answer, or decoding."),
    "queue_seconds": ("gauge", "Time that an engine is thought to compute for the requests that wait."),
    "connections": ("gauge", "Open connections of clients."),
    "engine_up": ("gauge", "1: the engine gets requests; 0: it failed, and is left out for a while."),
    "server_up": ("gauge", "1: the Kvarts server is asked; 0: it did not answer, and is left out for a while."),
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
