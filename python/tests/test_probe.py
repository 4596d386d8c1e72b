"""What is told of an engine that is installed: over sources that are made up, which differ from what the connectors know in one thing each."""

import ast
import contextlib
import glob
import io
import json
import logging
import os
import re
import tempfile
import unittest
from unittest import mock

import doubles

doubles.install()

from kvarts import hooks, lmcache_compat, probe, sglang_compat, vllm_compat, vllm_plugin  # noqa: E402

HERE = os.path.dirname(os.path.abspath(hooks.__file__))
BASE = '''
from abc import abstractmethod
from .parent import Parent

if True:
    LATE = 1

class Base(Parent):
    field: int

    def __init__(self):
        self.made = 1

    @abstractmethod
    def load(self, layer): ...

    @abstractmethod
    def save(self, layer, **kwargs): ...

    def known(self): ...
    def _own(self): ...

class Kind: ...
class One(Kind): ...
'''
PARENT = """
class Parent:
    inherited: int
    def end(self): ...
"""
OURS = """
class Ours:
    def load(self, layer): ...
    def save(self, layer, **kwargs): ...
    def end(self): ...
    def soon(self): ...
    def _own(self, more): ...
"""
PART = hooks.Part(
    module="ours",
    names=("engine.base:Base", "engine.base:LATE", "engine.parent:"),
    reads=("engine.base:Base.field", "engine.base:Base.made", "engine.base:Base.inherited"),
    overridden=(hooks.Overridden("ours:Ours", ("engine.base:Base",), ("known",), ("soon",)),),
    kinds=("engine.base:Kind",),
    known_kinds=("Kind", "One"),
)


class Looked(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.place = made.name
        self.write("engine-1.2.3.dist-info/METADATA", "Name: engine\nVersion: 1.2.3\n")
        self.write("engine/__init__.py", "")

    def write(self, name, text):
        path = os.path.join(self.place, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def found(self, part=PART, base=BASE, ours=OURS, parent=PARENT):
        self.write("engine/base.py", base)
        self.write("engine/parent.py", parent)
        self.write("ours.py", ours)
        engine = hooks.Engine("engine", ("engine",), ("1.2.3",), (part,))
        with mock.patch.object(hooks, "__file__", os.path.join(self.place, "hooks.py")):
            self.report = hooks.look(engine, self.place)
        return [(one.how, one.name) for one in self.report.findings]

    def test_an_engine_that_is_as_it_is_known_has_nothing_to_tell(self):
        self.assertEqual(self.found(), [])
        self.assertEqual((self.report.version, self.report.verdict), ("1.2.3", "good"))
        self.assertEqual(hooks.told(self.report), ["engine 1.2.3"])

    def test_each_thing_that_is_not_as_it_is_known_is_named(self):
        for why, changes, how, name, verdict in (
            ("a name", dict(base=BASE.replace("LATE", "LATER")), "missing", "engine.base:LATE", "bad"),
            ("a field", dict(base=BASE.replace("field", "other")), "missing", "engine.base:Base.field", "bad"),
            ("what a method sets", dict(base=BASE.replace("made", "once")), "missing", "engine.base:Base.made", "bad"),
            ("what is inherited", dict(parent=PARENT.replace("inherited", "left")), "missing", "engine.base:Base.inherited", "bad"),
            ("one that must be there", dict(ours=OURS.replace("def load", "def _load")), "missing", "engine.base:Base.load", "bad"),
            ("one that is not called", dict(parent=PARENT.replace("end", "finish")), "uncalled", "engine.base:Base.end", "improve"),
            ("one more parameter", dict(base=BASE.replace("load(self, layer", "load(self, layer, step")), "changed", "engine.base:Base.load(step)", "bad"),
            ("a hook", dict(base=BASE + "\n", parent=PARENT + "    def more(self): ...\n"), "new", "engine.base:Base.more", "improve"),
            ("a kind", dict(base=BASE + "class Two(One): ...\n"), "new", "engine.base:Two", "improve"),
        ):
            with self.subTest(why):
                found = self.found(**changes)
                self.assertIn((how, name), found)
                self.assertLessEqual(len(found), 2, found)
                self.assertEqual(self.report.verdict, verdict)
                self.assertTrue(any(name in line for line in hooks.told(self.report)))
        # What takes anything takes one more.
        self.assertEqual(self.found(base=BASE.replace("save(self, layer", "save(self, layer, step")), [])

    def test_what_an_engine_calls_of_an_object_of_ours_is_looked_up(self):
        part = hooks.Part("ours", (), called=(hooks.Called("ours:Ours", "engine.base", "_client"),))
        calls = "class User:\n    def go(self):\n        self._client.load(1)\n        return self._client.{}(2)\n"
        self.assertEqual(self.found(part, base=calls.format("save")), [])
        self.assertEqual(self.found(part, base=calls.format("flush")), [("missing", "ours.Ours.flush")])

    def test_a_version_that_was_not_tried_and_an_engine_that_is_not_there_are_told(self):
        self.write("engine-1.2.3.dist-info/METADATA", "Name: engine\nVersion: 1.3.0\n")
        self.assertEqual(self.found(), [])
        self.assertEqual((self.report.verdict, hooks.told(self.report)), ("improve", ["engine 1.3.0: this version is not tested with Kvarts; tested versions: 1.2.3"]))
        report = hooks.look(hooks.Engine("engine", ("engine",), ("1",), (PART,)), os.path.join(self.place, "engine"))
        self.assertEqual((report.version, report.verdict), (None, "bad"))
        self.assertEqual(hooks.told(report), ["engine is not installed for this Python: install engine, or give its directory with --place"])

    def test_sources_that_cannot_be_read_are_missing_and_the_start_of_an_engine_goes_on(self):
        self.assertIn(("missing", "engine.base:Base"), self.found(base="class Base(:"))
        engine = hooks.Engine("engine", ("engine",), ("1",), (PART,))
        with mock.patch.object(hooks, "look", side_effect=RuntimeError("a defect")), self.assertLogs("kvarts", "ERROR") as logs:
            hooks.tell(engine, "ours", logging.getLogger("kvarts"))
        self.assertIn("could not check", logs.output[0])

    def test_an_engine_that_starts_is_told_of_its_own_connector_alone(self):
        other = PART._replace(module="other")
        finding = [hooks.Finding("ours", "new", "x:one"), hooks.Finding("other", "new", "x:two")]
        report = hooks.Report("engine", "1.2.3", ("1.2.3",), finding)
        engine = hooks.Engine("engine", ("engine",), ("1.2.3",), (PART, other))
        with mock.patch.object(hooks, "look", return_value=report), self.assertLogs("kvarts", "WARNING") as logs:
            hooks.tell(engine, "ours", logging.getLogger("kvarts"))
        self.assertTrue("x:one" in "".join(logs.output) and "x:two" not in "".join(logs.output), logs.output)

    def test_the_command_says_it_in_words_and_in_json(self):
        self.found(base=BASE + "class Two(One): ...\n")
        engine = hooks.Engine("engine", ("engine",), ("1.2.3",), (PART, PART._replace(module="other", overridden=(), kinds=())))

        def ran(*arguments):
            out = io.StringIO()
            with mock.patch.object(probe, "engine_of", lambda name: engine), contextlib.redirect_stdout(out):
                with mock.patch.object(hooks, "__file__", os.path.join(self.place, "hooks.py")):
                    return probe.main(["vllm", *arguments]), out.getvalue()

        code, text = ran("--place", self.place)
        self.assertEqual((code, text.splitlines()), (0, ["engine 1.2.3", "ours: the engine has a new interface that the connector does not use: engine.base:Two", "other: the engine has all interfaces that the connector needs"]))
        code, text = ran("--place", self.place, "--json")
        told = {"engine": "engine", "version": "1.2.3", "tried": ["1.2.3"], "is_tried": True, "verdict": "improve"}
        told["connectors"] = [{"connector": "ours", "findings": [{"how": "new", "name": "engine.base:Two"}]}]
        self.assertEqual((code, json.loads(text)), (0, told))
        code, text = ran("--place", os.path.join(self.place, "engine"), "--json")
        self.assertEqual((code, json.loads(text)["version"], json.loads(text)["verdict"]), (1, None, "bad"))


class Known(unittest.TestCase):
    """What the tables say, against the connectors themselves."""

    def imports(self, pattern):
        """(file, module) of what these files import of an engine."""
        for file in glob.glob(os.path.join(HERE, pattern)):
            with open(file, encoding="utf-8") as text:
                tree = ast.parse(text.read())
            for node in ast.walk(tree):
                names = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                yield from ((os.path.basename(file), name) for name in names if not getattr(node, "level", 0))

    def test_engines_are_imported_in_one_place_alone(self):
        for engine in ("vllm", "sglang", "lmcache"):
            found = [(file, name) for file, name in self.imports("*.py") if name.split(".")[0] == engine]
            self.assertEqual(found, [], engine)

    def test_every_class_that_the_tables_name_is_there(self):
        for compat in (vllm_compat, sglang_compat, lmcache_compat):
            ours = hooks.Sources(HERE)
            for part in compat.ENGINE.parts:
                self.assertTrue(os.path.exists(os.path.join(HERE, part.module.removeprefix("kvarts.") + ".py")), part.module)
                for one in [*part.overridden, *part.called]:
                    self.assertTrue(ours.methods(one.ours), one.ours)
                    left_out = set(getattr(one, "known", ())) & ours.methods(one.ours).keys()
                    self.assertEqual(left_out, set(), "left out, and there")

    def test_what_is_imported_with_needed_is_in_the_table(self):
        with open(os.path.join(HERE, "sglang_pools.py"), encoding="utf-8") as text:
            asked = re.findall(r'needed\((ASSEMBLER|HYBRID), "(\w+)"\)', text.read())
        self.assertGreater(len(asked), 5)
        told = {name for part in sglang_compat.ENGINE.parts for name in [*part.names, *part.reads]}
        for module, name in asked:
            place = f"{getattr(sglang_compat, module)}:{name}"
            self.assertTrue(any(one == place or one.startswith(place + ".") for one in told), place)

    def test_a_name_that_is_not_there_is_told_with_the_version_and_what_names_all(self):
        with mock.patch.dict(vllm_compat._NAMES, {"Gone": "vllm.v1.gone"}), self.assertRaisesRegex(ImportError, "vllm.v1.gone.Gone.*tested version .0.32.0.*kvarts.probe vllm"):
            vllm_compat.Gone  # noqa: B018
        with mock.patch.dict(sglang_compat._NAMES, {"Gone": "sglang.srt.gone"}), self.assertRaisesRegex(ImportError, "sglang.srt.gone.Gone.*kvarts.probe sglang"):
            sglang_compat.Gone  # noqa: B018
        for compat in (vllm_compat, sglang_compat):
            with self.assertRaises(AttributeError):
                compat.never  # noqa: B018
        # vLLM 0.31 has no sources of hits.
        with mock.patch.dict("sys.modules", {"vllm.v1.metrics.cache_hit_source": None}):
            self.assertIsNone(vllm_compat.CacheHitSource.DISK)
        self.assertIsNotNone(vllm_compat.CacheHitSource.DISK)


class Plugin(unittest.TestCase):
    """vLLM's plugin, with doubles of the three classes that it uses."""

    def setUp(self):
        class Factory:
            registry = {}

            @classmethod
            def register_connector(cls, name, module, klass):
                if name in cls.registry:
                    raise ValueError("already")
                cls.registry[name] = module, klass

        class Arguments:
            kv_transfer_config = kv_offloading_size = None

            def create_engine_config(self, context=None):
                """Made."""
                return self.kv_transfer_config, context

        Factory.registry = {}
        self.factory, self.arguments = Factory, Arguments
        made = {"KVConnectorFactory": Factory, "EngineArgs": Arguments, "KVTransferConfig": lambda **given: given}
        patched = mock.patch.dict(vars(vllm_compat), made)
        patched.start()
        self.addCleanup(patched.stop)

    def register(self, value=None):
        with mock.patch.dict(os.environ, {vllm_plugin.VARIABLE: value} if value is not None else {}):
            vllm_plugin.register()

    def test_both_connectors_are_known_by_name_however_often_it_runs(self):
        self.register()
        self.register()
        self.assertEqual(self.factory.registry, {"KvartsLayers": ("kvarts.vllm_layers", "KvartsLayers"), "Kvarts": ("kvarts.vllm", "Kvarts")})
        self.assertIsNone(self.arguments().create_engine_config()[0])

    def test_one_variable_switches_it_on_where_nothing_was_configured(self):
        with self.assertLogs("kvarts", "WARNING") as logs:
            self.register("/run/kvarts/s")
            self.register("/run/kvarts/s")
            made, context = self.arguments().create_engine_config("there")
        self.assertEqual(made, {"kv_connector": "KvartsLayers", "kv_connector_module_path": "kvarts.vllm_layers", "kv_role": "kv_both", "kv_connector_extra_config": {"server": "/run/kvarts/s"}})
        self.assertEqual((context, len(logs.output)), ("there", 1), logs.output)
        self.assertEqual(self.arguments.create_engine_config.__doc__, "Made.")
        for name in ("kv_transfer_config", "kv_offloading_size"):
            other = self.arguments()
            setattr(other, name, "own")
            with self.assertLogs("kvarts", "WARNING") as logs:
                self.assertEqual(other.create_engine_config()[0], "own" if name == "kv_transfer_config" else None)
            self.assertIn("is ignored", logs.output[0])

    def test_the_variable_may_say_all_of_it(self):
        found = vllm_plugin.configuration('{"connector": "Kvarts", "server": "s", "cpu_bytes_to_use": 5}')
        self.assertEqual((found["kv_connector"], found["kv_connector_module_path"], found["kv_connector_extra_config"]), ("Kvarts", "kvarts.vllm", {"server": "s", "cpu_bytes_to_use": 5}))

    def test_whatever_is_wrong_is_told_and_vllm_goes_on(self):
        for value, told in (("{not json", "neither"), ('{"connector": "Other"}', "KvartsLayers, Kvarts")):
            with self.subTest(value), self.assertLogs("kvarts", "ERROR") as logs:
                self.register(value)
                self.assertIn(told, logs.output[0])
                self.assertIsNone(self.arguments().create_engine_config()[0])
        with mock.patch.object(self.factory, "register_connector", side_effect=RuntimeError("another vLLM")), self.assertLogs("kvarts", "ERROR"):
            self.register()
        del self.arguments.create_engine_config
        with self.assertLogs("kvarts", "ERROR") as logs:
            self.register("/run/kvarts/s")
        self.assertIn("without the plugin", logs.output[0])

    def test_the_entry_point_names_it(self):
        project = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "pyproject.toml")
        with open(project, encoding="utf-8") as text:
            [place] = re.findall(r'\[project.entry-points."vllm.general_plugins"\]\nkvarts = "([\w.]+):register"', text.read())
        self.assertEqual(place, vllm_plugin.__name__)


if __name__ == "__main__":
    unittest.main()
