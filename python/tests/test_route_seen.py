"""The proxy `python -m kvarts.route`: what it tells Prometheus, and TLS towards its clients and its engines."""

import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import unittest

import test_route
from test_route import MODEL, SOON, Double

TLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests/testdata/tls")
AUTHORITY, CERTIFICATE, KEY = (os.path.join(TLS, name) for name in ("authority.pem", "server.pem", "server.key"))


def of_server():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    return context


class Metrics(test_route.Proxied):
    def of(self, engine, name, **labels):
        told = ",".join(f'{label}="{value}"' for label, value in {"engine": engine.url, **labels}.items())
        return self.metrics().get(f"{name}{{{told}}}")

    def test_requests_failures_and_retries_are_counted_by_engine_and_why(self):
        a, b = self.engines(Double("a"), Double("b"))
        self.proxy([a, b], "--policy", "round-robin")
        self.assertEqual((self.of(a, "engine_up"), self.of(a, "failures_total", kind="answer"), self.metrics()["retries_total"]), (1, 0, 0))
        self.assertEqual([self.complete([1]) for _ in range(4)], ["a", "b"] * 2)
        self.assertEqual([self.of(one, "requests_total", reason="round-robin") for one in (a, b)], [2, 2])
        a.dies = True
        self.assertEqual({self.complete([1]) for _ in range(2)}, {"b"})
        self.assertEqual((self.of(a, "engine_up"), self.of(b, "engine_up"), self.of(a, "failures_total", kind="answer")), (0, 1, 1))
        self.assertEqual((self.of(b, "requests_total", reason="again"), self.metrics()["retries_total"]), (1, 1))
        b.fails = 503
        self.assertEqual(self.ask("/v1/completions", {"prompt": "1"})[0], 502)
        found = self.metrics()
        self.assertEqual((self.of(b, "failures_total", kind="503"), found['refused_total{status="502"}'], found["retries_total"]), (1, 1, 2))
        self.assertEqual((found['prompts_total{known="text"}'], found["connections"]), (7, 1))
        b.fails, b.breaks, a.fails = 0, True, 503
        with self.assertRaises((http.client.IncompleteRead, ConnectionError)):
            self.ask("/v1/completions", {"prompt": "1", "stream": True})
        self.assertEqual(self.of(b, "failures_total", kind="broken"), 1)
        self.assertEqual((self.of(b, "in_flight", state="waiting"), self.of(b, "in_flight", state="decoding")), (0, 0))

    def test_what_is_under_way_is_a_gauge_and_a_client_that_goes_away_is_counted(self):
        (engine,) = self.engines(Double("a"))
        self.proxy([engine], "--policy", "round-robin")
        engine.hangs = True
        with socket.create_connection(self.address.split(":"), timeout=SOON) as connection:
            connection.sendall(b'POST /v1/completions HTTP/1.1\r\nContent-Length: 15\r\n\r\n{"prompt": "1"}')
            self.until("the engine is asked", lambda: engine.asked)
            self.assertEqual((self.of(engine, "in_flight", state="waiting"), self.metrics()["connections"]), (1, 2))
        self.until("it is counted", lambda: self.metrics()["clients_gone_total"] == 1)
        self.assertEqual(self.of(engine, "in_flight", state="waiting"), 0)

    def test_hand_overs_are_counted_and_a_prefill_that_was_refused(self):
        prefill, decode = self.engines(Double("p"), Double("d"))
        self.proxy([prefill, decode], "--policy", "owner", roles=["prefill", "decode"])
        self.complete([1, 2, 3])
        prefill.fails = 400
        self.complete([1, 2, 3])
        found = self.metrics()
        self.assertEqual((found['hand_overs_total{outcome="handed"}'], found['hand_overs_total{outcome="alone"}']), (1, 1))
        self.assertEqual(self.of(prefill, "failures_total", kind="prefill"), 1)
        self.assertEqual((self.of(decode, "requests_total", reason="decode"), self.of(decode, "requests_total", reason="decode-alone")), (1, 1))

    def test_the_text_is_as_prometheus_takes_it(self):
        engines = self.engines(Double("a"), Double("b"))
        self.proxy(engines, "--policy", "random")
        self.complete([1])
        lines = self.ask("/metrics")[1].decode().splitlines()
        names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
        self.assertEqual((len(names), names), (len(set(names)), [line.split()[2] for line in lines if line.startswith("# HELP")]))
        at = None
        for line in lines:
            if line.startswith("#"):
                at = line.split()[2]
            else:
                # The samples of a name stand together, each once.
                self.assertEqual(line.partition("{")[0].split(" ")[0], at)
        samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
        self.assertEqual(len(samples), len(set(samples)))


class Secure(test_route.Proxied):
    def setUp(self):
        self.tls = ssl.create_default_context(cafile=AUTHORITY)

    def test_both_ways(self):
        (engine,) = self.engines(Double("a", tls=of_server()))
        self.proxy([engine], "--policy", "cost", "--certificate", CERTIFICATE, "--key", KEY, "--engine-ca", AUTHORITY)
        self.assertEqual((self.scheme, self.complete([1, 2])), ("https", "a"))
        # An engine's tokeniser is reached, too.
        self.assertEqual(self.status()["prompts"], {"tokens": 1, "text": 0})
        status, told = self.ask("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "1 2"}], "stream": True})
        self.assertEqual((status, told), (200, b"".join(engine.pieces())))
        self.assertIn("engine_up", next(name for name in self.metrics() if "engine_up" in name))
        # Without TLS nothing is told, and a client that does not trust the certificate says nothing.
        self.assertEqual(self.raw(b"GET /status HTTP/1.1\r\n\r\n"), b"")
        trusting, self.tls = self.tls, ssl.create_default_context()
        with self.assertRaises(ssl.SSLError):
            self.ask("/status")
        self.tls = trusting
        # A client that goes away is seen through TLS.
        engine.hangs = True
        body = b'{"prompt": "1"}'
        host, port = self.address.split(":")
        with socket.create_connection((host, int(port)), timeout=SOON) as plain, self.tls.wrap_socket(plain, server_hostname=host) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            self.until("the engine is asked", lambda: len(engine.asked) == 3)
        self.until("the engine is let go", lambda: engine.gone == 1)

    def test_an_engine_whose_certificate_is_of_another_authority_is_not_asked(self):
        (engine,) = self.engines(Double("a", tls=of_server()))
        self.proxy([engine], "--policy", "round-robin")
        status, told = self.ask("/v1/completions", {"prompt": "1"})
        self.assertEqual((status, engine.asked), (502, []))
        self.assertIn("certificate", json.loads(told)["error"]["message"])
        self.assertEqual(self.metrics()[f'failures_total{{engine="{engine.url}",kind="connection"}}'], 1)

    def test_wrong_files_and_half_of_what_is_needed_are_told(self):
        def say(*arguments):
            done = subprocess.run([sys.executable, "-m", "kvarts.route", *arguments], capture_output=True, timeout=SOON, text=True)
            return done.returncode, done.stdout + done.stderr

        for arguments, code, told in [
            (("--engine", "http://x", "--key", KEY), 2, "must be given together"),
            (("--engine", "http://x", "--engine-ca", AUTHORITY), 2, "no engine has an https:// address"),
            (("--engine", "https://x", "--engine-ca", KEY), 1, "--engine-ca"),
            (("--engine", "http://x", "--certificate", KEY, "--key", KEY), 1, "--certificate"),
            (("--engine", "http://x", "--certificate", "/nowhere", "--key", KEY), 1, "--certificate"),
        ]:
            with self.subTest(arguments):
                found, said = say(*arguments)
                self.assertEqual(found, code, said)
                self.assertIn(told, said)
                self.assertNotIn("Traceback", said)


if __name__ == "__main__":
    unittest.main()
