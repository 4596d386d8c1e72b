"""Whether an engine that is installed has what a connector uses of it: by the engine's sources, without importing them.

Three things are compared: names that are imported, attributes that are read of the engine's objects, and methods that a connector's class
overrides, with their parameters. What the engine's class has beside these and nothing here knows is told as new: an engine that asks something new
of its connectors may need an answer.
"""

import ast
import importlib.machinery
import importlib.metadata
import os
from typing import NamedTuple


class Overridden(NamedTuple):
    """A class of a connector's: `ours` ("file:Class") overrides methods of the classes `bases` ("module:Class"). `known`: methods of theirs that it
    needs not; `later`: of its own, those that only later versions call."""

    ours: str
    bases: tuple
    known: tuple = ()
    later: tuple = ()


class Called(NamedTuple):
    """A class of a connector's of which the engine's `module` has an object, as the attribute `attribute` of its own."""

    ours: str
    module: str
    attribute: str


class Part(NamedTuple):
    """A connector, by the module that an operator names. `names`: what is imported, and `reads`: attributes, as "module:Class.attribute" or
    "module:name"; `kinds`: classes of a module that derive from those named here, as "module:Class", all of which must be known."""

    module: str
    names: tuple
    reads: tuple = ()
    overridden: tuple = ()
    called: tuple = ()
    kinds: tuple = ()
    known_kinds: tuple = ()


class Engine(NamedTuple):
    """`tried`: versions that were run with these connectors."""

    package: str
    distributions: tuple
    tried: tuple
    parts: tuple


class Finding(NamedTuple):
    """What is not as the connectors know it. `how`: `missing`, without which the connector does not work; `uncalled`: a method that the engine
    does not call any more; `changed`: one that it calls with more; `new`."""

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
        """`bad`: a connector cannot work; `improve`: a person should check it; `good`."""
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
        """What defines a name at the top of a module."""
        tree = self.tree(module)
        return None if tree is None else next((node for found, node in _names_of(tree.body) if found == name), None)

    def has(self, name, depth=0):
        """Whether there is "module:name" or "module:Class.attribute"; "module:" alone is the module."""
        module, _, path = name.partition(":")
        if not path:
            return self.tree(module) is not None
        owner, _, attribute = path.partition(".")
        node = self.defined(module, owner)
        if node is None or not attribute:
            return node is not None
        return any(attribute == found for place, one in self.classes(module, owner) for found in _members_of(one))

    def classes(self, module, name, depth=4):
        """A class and those it derives from, as far as their sources are here: (module, node)."""
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
    """(name, what defines it) of statements, also of those that depend on a condition."""
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
    """Names in the body of a class, and those that its methods set."""
    yield from (name for name, _ in _names_of(node.body))
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and isinstance(one.value, ast.Name) and one.value.id == "self":
            yield one.attr


def _parameters(node):
    """(names, whether it takes others)."""
    names = [one.arg for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    return [name for name in names if name not in ("self", "cls")], node.args.kwarg is not None or node.args.vararg is not None


def place_of(package):
    """The directory that has an installed package, or `None`."""
    spec = importlib.machinery.PathFinder.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return os.path.dirname(os.path.abspath(places[0])) if places else None


def _version(engine, place):
    for one in importlib.metadata.distributions(path=[place]):
        if (one.metadata["Name"] or "").lower().replace("_", "-") in engine.distributions:
            return one.version
    return None


def look(engine, place=None):
    """`place`: the directory that has the engine's package, where it is not this interpreter's."""
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
    """Methods that an engine calls of an object of ours."""
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
        return  # that the class is not there is told by its name
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
    """Lines for people."""
    if report.version is None:
        return [f"{report.engine} is not installed for this Python"]
    tried = ", ".join(report.tried)
    lines = [f"{report.engine} {report.version}" + ("" if report.version in report.tried else f": this version is not tested; tested: {tried}")]
    words = {
        "missing": "lacks an interface that the connector needs",
        "changed": "is called with arguments that the connector does not support",
        "uncalled": "is not called any more",
        "new": "is new, and the connector does not know it",
    }
    lines += [f"{one.part}: {words[one.how]}: {one.name}" for one in report.findings]
    return lines


def tell(engine, module, logger):
    """Tells of one connector what is not as it is known. For an engine that starts: it never raises."""
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
        logger.exception("kvarts: the interfaces of the engine could not be checked")
