"""Checks whether an installed engine has the interfaces that a connector uses. The check reads the engine's sources and imports nothing of the engine.

The check compares imported names, attributes that the connector reads of the engine's objects, and methods that a connector's class overrides, with
their parameters. A method of the engine's class that the connector neither overrides nor knows is reported as new: the connector may need it.
"""

import ast
import importlib.machinery
import importlib.metadata
import os
from typing import NamedTuple


class Overridden(NamedTuple):
    """A connector's class: `ours` ("file:Class") overrides methods of the classes `bases` ("module:Class"). `known`: methods of the bases that the
    connector does not need to override; `later`: methods of the connector that only later versions of the engine call."""

    ours: str
    bases: tuple
    known: tuple = ()
    later: tuple = ()


class Called(NamedTuple):
    """A connector's class. The engine's `module` holds an object of this class in an attribute with the name `attribute`."""

    ours: str
    module: str
    attribute: str


class Part(NamedTuple):
    """A connector, by the module that an operator names. `names`: imported names; `reads`: attributes; both as "module:Class.attribute" or
    "module:name". `kinds`: base classes, as "module:Class"; every subclass in that module must be in `known_kinds`."""

    module: str
    names: tuple
    reads: tuple = ()
    overridden: tuple = ()
    called: tuple = ()
    kinds: tuple = ()
    known_kinds: tuple = ()


class Engine(NamedTuple):
    """An engine and its connectors. `tried`: versions of the engine that were tested with these connectors."""

    package: str
    distributions: tuple
    tried: tuple
    parts: tuple


class Finding(NamedTuple):
    """A difference between the engine and the connector. `how`: `missing`: the connector does not work without this interface; `uncalled`: the
    engine no longer calls this method; `changed`: the engine calls the method with more arguments; `new`: the connector does not use this interface."""

    part: str
    how: str
    name: str


class Report(NamedTuple):
    engine: str
    version: str | None
    tried: tuple
    findings: list

    def of(self, part):
        return [one for one in self.findings if one.part == part]

    @property
    def verdict(self):
        """`bad`: a connector cannot work, or the engine is not installed; `improve`: there are other findings, or the version is not tested;
        `good`: neither."""
        if self.version is None or any(one.how in ("missing", "changed") for one in self.findings):
            return "bad"
        return "improve" if self.findings or self.version not in self.tried else "good"


class Sources:
    """The sources of packages below a directory."""

    def __init__(self, place):
        self.place, self._trees = place, {}

    def tree(self, module):
        if module not in self._trees:
            path = os.path.join(self.place, *module.split("."))
            self._trees[module] = _parsed(path + ".py") or _parsed(os.path.join(path, "__init__.py"))
        return self._trees[module]

    def defined(self, module, name):
        """The statement that defines a name at the top of a module."""
        tree = self.tree(module)
        return None if tree is None else next((node for found, node in _names_of(tree.body) if found == name), None)

    def has(self, name, depth=0):
        """Whether "module:name" or "module:Class.attribute" exists; "module:" alone stands for the module."""
        module, _, path = name.partition(":")
        if not path:
            return self.tree(module) is not None
        owner, _, attribute = path.partition(".")
        node = self.defined(module, owner)
        if node is None or not attribute:
            return node is not None
        return any(attribute == found for place, one in self.classes(module, owner) for found in _members_of(one))

    def classes(self, module, name, depth=4):
        """A class and its bases, as far as their sources are below the directory: (module, node)."""
        node = self.defined(module, name)
        if isinstance(node, ast.ImportFrom) and depth:
            before = module.rsplit(".", node.level)[0] + "." if node.level else ""
            found = [(before + (node.module or ""), one.name) for one in node.names if (one.asname or one.name) == name]
            return [each for place in found for each in self.classes(*place, depth - 1)]
        if not isinstance(node, ast.ClassDef):
            return []
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        return [(module, node)] + [one for base in bases if isinstance(base, ast.Name) and depth for one in self.classes(module, base.id, depth - 1)]

    def methods(self, name):
        """method -> (its node, whether a connector must have it)."""
        found = {}
        for _, node in self.classes(*name.split(":")):
            for one in node.body:
                if isinstance(one, ast.FunctionDef):
                    found.setdefault(one.name, (one, any("abstractmethod" in ast.unparse(by) for by in one.decorator_list)))
        return found


def _parsed(path):
    try:
        with open(path, encoding="utf-8") as text:
            return ast.parse(text.read())
    except (OSError, ValueError, SyntaxError):
        return None


def _names_of(body):
    """(name, defining statement) of a list of statements, conditional ones included."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for one in node.names:
                yield (one.asname or one.name).split(".")[0], node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _names_of(node.body)
            yield from _names_of(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _names_of(handler.body)


def _members_of(node):
    """Names in the body of a class, and attributes that its methods set."""
    yield from (name for name, _ in _names_of(node.body))
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and isinstance(one.value, ast.Name) and one.value.id == "self":
            yield one.attr


def _parameters(node):
    """(names of parameters, whether the function accepts any others)."""
    names = [one.arg for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    return [name for name in names if name not in ("self", "cls")], node.args.kwarg is not None or node.args.vararg is not None


def place_of(package):
    """The directory that contains an installed package, or `None`."""
    spec = importlib.machinery.PathFinder.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return os.path.dirname(os.path.abspath(places[0])) if places else None


def _version(engine, place):
    for one in importlib.metadata.distributions(path=[place]):
        if (one.metadata["Name"] or "").lower().replace("_", "-") in engine.distributions:
            return one.version
    return None


def look(engine, place=None):
    """Compares an engine with its connectors. `place`: the directory that contains the engine's package (default: this interpreter's)."""
    place = place or place_of(engine.package)
    if place is None or not os.path.isdir(os.path.join(place, engine.package)):
        return Report(engine.package, None, engine.tried, [])
    sources, findings = Sources(place), []
    for part in engine.parts:
        findings += [Finding(part.module, how, name) for how, name in _compared(part, sources)]
    return Report(engine.package, _version(engine, place) or "unknown", engine.tried, findings)


def _compared(part, sources):
    for name in [*part.names, *part.reads]:
        if not sources.has(name):
            yield "missing", name
    ours = Sources(os.path.dirname(os.path.abspath(__file__)))
    for one in part.overridden:
        yield from _of_methods(one, sources, ours)
    for one in part.called:
        yield from _of_calls(one, sources, ours)
    for name in part.kinds:
        module, _, base = name.partition(":")
        tree = sources.tree(module)
        for node in tree.body if tree is not None else ():
            is_unknown = isinstance(node, ast.ClassDef) and node.name not in part.known_kinds
            if is_unknown and any(found.name == base for _, found in sources.classes(module, node.name)):
                yield "new", f"{module}:{node.name}"


def _of_calls(one, sources, ours):
    """Compares the methods that the engine calls of the connector's object with those that the object has."""
    mine, tree = ours.methods(one.ours), sources.tree(one.module)
    calls = set()
    for node in ast.walk(tree) if tree is not None else ():
        owner = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(owner, ast.Attribute) and owner.attr == one.attribute:
            calls.add(node.attr)
    for name in sorted(calls - mine.keys()):
        yield "missing", f"{one.ours.replace(':', '.')}.{name}"


def _of_methods(one, sources, ours):
    mine, theirs = ours.methods(one.ours), {}
    for base in one.bases:
        for name, found in sources.methods(base).items():
            theirs.setdefault(name, (base, *found))
    if not theirs:
        return  # the missing class is reported among the names
    for name, (node, _) in mine.items():
        if name.startswith("_") or name in one.later:
            continue
        if name not in theirs:
            yield "uncalled", f"{one.bases[0]}.{name}"
            continue
        base, called, _ = theirs[name]
        takes, takes_any = _parameters(node)
        given, _ = _parameters(called)
        if len(given) > len(takes) and not takes_any:
            yield "changed", f"{base}.{name}({', '.join(one for one in given if one not in takes)})"
    for name, (base, node, is_abstract) in theirs.items():
        if name.startswith("_") or name in mine or name in one.known:
            continue
        yield "missing" if is_abstract else "new", f"{base}.{name}"


def told(report):
    """The report as lines of text."""
    if report.version is None:
        return [f"{report.engine} is not installed for this Python: install {report.engine}, or give its directory with --place"]
    tried = ", ".join(report.tried)
    lines = [f"{report.engine} {report.version}" + ("" if report.version in report.tried else f": this version is not tested with Kvarts; tested versions: {tried}")]
    words = {
        "missing": "the engine lacks an interface that the connector needs",
        "changed": "the engine calls a method with arguments that the connector does not support",
        "uncalled": "the engine no longer calls a method of the connector",
        "new": "the engine has a new interface that the connector does not use",
    }
    lines += [f"{one.part}: {words[one.how]}: {one.name}" for one in report.findings]
    return lines


def tell(engine, module, logger):
    """Logs the findings of one connector when an engine starts. Never raises."""
    try:
        report = look(engine)
        if report.version is None:
            return
        found = [one for one in report.findings if one.part == module]
        lines = told(report._replace(findings=found))
        tell_it = logger.warning if found or report.version not in report.tried else logger.info
        for line in lines:
            tell_it("kvarts: %s", line)
    except Exception:
        logger.exception("kvarts: could not check the interfaces of the engine; the connector starts without the check")
