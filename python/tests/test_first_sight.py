"""What a reader meets first: `help()`, messages about slips, and the page's script."""

import ast
import os
import re
import tempfile
import unittest
import warnings

import kvarts
import kvarts.gpu
from served import Server

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = os.path.join(HERE, "..", "README.md")
IDENTITY = dict(model="m", revision="r", engine="mine", layout="canonical", block_tokens=16)


def promised(module):
    """Docstrings of a module's stub: by class and method."""
    with open(os.path.join(HERE, "..", "kvarts", module + ".pyi"), encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield (node.name,), ast.get_docstring(node)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                yield (node.name, inner.name), ast.get_docstring(inner)


class FirstSight(unittest.TestCase):
    def test_help_says_what_the_stub_does(self):
        seen = 0
        for module, name in ((kvarts, "__init__"), (kvarts.gpu, "gpu")):
            docs = {}
            for path, doc in promised(name):
                docs.setdefault(path, doc)
            for path, doc in docs.items():
                found = module
                for part in path:
                    found = getattr(found, part, None)
                # Exceptions are Python's own classes.
                if doc is None or found is None or isinstance(found, type) and issubclass(found, kvarts.Error):
                    continue
                with self.subTest(".".join(path)):
                    self.assertEqual(" ".join((found.__doc__ or "").split()), " ".join(doc.split()))
                    seen += 1
        self.assertGreater(seen, 120)

    def test_slips_are_answered_with_what_was_probably_meant(self):
        with tempfile.TemporaryDirectory() as place, kvarts.open(place, 256 << 20) as client:
            with self.assertRaises(kvarts.Invalid) as wrong:
                client.pages(spec="lama-3.1-8b", dtype="bf16", **IDENTITY)
            self.assertEqual(str(wrong.exception), 'spec: no shipped model is named "lama-3.1-8b"; did you mean "llama-3.1-8b"?')
            with self.assertRaises(kvarts.Invalid) as wrong:
                client.pages(spec="nothing-like-it-at-all", dtype="bf16", **IDENTITY)
            self.assertIn("`kvarts model list`", str(wrong.exception))
            with self.assertWarnsRegex(UserWarning, 'did you mean "bf16"'):
                client.pages(spec="llama-3.1-8b", dtype="bf61", **IDENTITY)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                client.pages(spec="llama-3.1-8b", dtype="auto/bfloat16", **IDENTITY)

    def test_the_page_s_script_runs_as_it_stands(self):
        with open(PAGE, encoding="utf-8") as file:
            script = re.search(r"```python\n(.*?)```", file.read(), re.DOTALL).group(1)
        server = Server()
        self.addCleanup(server.stop)
        socket = "/run/user/1000/kvarts.sock"
        self.assertIn(socket, script)
        out = []
        exec(compile(script.replace(socket, server.socket), PAGE, "exec"), {"print": lambda *what: out.append(" ".join(map(str, what)))})
        said = re.findall(r"print\(.*\)  # (.*)$", script, re.MULTILINE)
        self.assertEqual([line for line in out if "blocks" not in line], said)
        self.assertEqual(sum("of 4 blocks" in line for line in out), 32)


if __name__ == "__main__":
    unittest.main()
