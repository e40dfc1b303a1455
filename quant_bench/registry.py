"""Registry: a plugin's name is its file's name; finds, checks and builds plugins, knows none of them and no torch."""

import ast
import dataclasses
import difflib
import importlib
import importlib.metadata
import inspect
import keyword
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

from quant_bench import schemes
from quant_bench._roots import plugin_folders
from quant_bench.cell import BASELINE_ARM
from quant_bench.coercion import coerce, setting_types
from quant_bench.errors import PluginError, SpecError, UnknownPlugin
from quant_bench.spec import Spec, joined

if TYPE_CHECKING:
    from quant_bench.arm import Arm
    from quant_bench.quantizer import Quantizer
    from quant_bench.task import Task

Kind = Literal["arms", "quantizers", "tasks"]
KINDS: tuple[Kind, ...] = ("arms", "quantizers", "tasks")

# the contracts import torch, so they are named here and imported with the first plugin of their kind
_CONTRACTS: Mapping[Kind, tuple[str, str]] = {
    "arms": ("quant_bench.arm", "Arm"),
    "quantizers": ("quant_bench.quantizer", "Quantizer"),
    "tasks": ("quant_bench.task", "Task"),
}
_named: dict[type, str] = {}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a plugin lies: a file in a plugin folder, or the entry point of an installed package."""

    name: str
    file: Path | None
    entry: importlib.metadata.EntryPoint | None

    def __str__(self) -> str:
        return str(self.file) if self.entry is None else f"entry point {self.entry.name} = {self.entry.value}"


def names(kind: Kind) -> tuple[str, ...]:
    """Names of every plugin of a kind, sorted; nothing is imported.

    Raises:
        PluginError: one name hides another.
    """
    return tuple(sorted(_places(kind)))


def load(kind: Kind, name: str) -> type:
    """Class of a plugin: the one concrete frozen dataclass of its file.

    Raises:
        UnknownPlugin: no plugin has that name.
        PluginError: the file breaks the contract. An error that the file itself raises passes through.
    """
    places = _places(kind)
    if name not in places:
        close = difflib.get_close_matches(name, places)
        hint = (
            f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(sorted(places)) or 'none'}"
        )
        if kind == "quantizers" and schemes.looks_like_one(name):
            hint = (
                "; schemes have 2 to 8 or 16 bits, then gN or -static, then -kvN, then -integer or -classic, such as "
                "w8a8, w4a16 and w4a4g128-kv8-integer; there are formats too, such as fp8"
            )
        raise UnknownPlugin(f"no {kind.removesuffix('s')} named {name!r}{hint}")
    place = places[name]
    found = _file_module(kind, place) if place.entry is None else place.entry.load()
    plugin = found if isinstance(found, type) else _plugin_of(kind, found)
    _check(kind, plugin, place)
    _named[plugin] = name
    return plugin


@overload
def build(kind: Literal["arms"], text: str) -> "Arm": ...
@overload
def build(kind: Literal["quantizers"], text: str) -> "Quantizer": ...
@overload
def build(kind: Literal["tasks"], text: str) -> "Task": ...
def build(kind: Kind, text: str) -> Any:
    """Instance that a text stands for: `name` or `name(key=value,…)`.

    For quantizers also `w4a4g128`, `gptq:w4a16` or `mxfp4`; for arms also several joined by `+`.

    Raises:
        UnknownPlugin: no plugin has that name.
        SpecError: the text cannot be read, or a setting is unknown or of the wrong type.
        PluginError: the file breaks the contract.
    """
    if kind == "arms" and len(parts := list(joined(text))) > 1:
        return _composed([build("arms", part) for part in parts])
    given = Spec.parse(text)
    shorthand = kind == "quantizers" and schemes.is_scheme(given.name)
    spec = schemes.expand(text) if shorthand else given
    plugin = load(kind, spec.name)
    types = setting_types(plugin)
    if shorthand and not schemes.is_format(given.name) and not set(schemes.DEFAULTS) <= set(types):
        raise SpecError(f"{spec.name} takes no scheme ({text!r}): it is no recipe over integer codes")
    for key in spec.settings:
        if key not in types:
            close = difflib.get_close_matches(key, types, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SpecError(f"{spec.name} has no setting {key!r}{hint} (it has {', '.join(types) or 'none'})")
    values = {key: coerce(value, types[key], f"{spec.name}: {key}") for key, value in spec.settings.items()}
    missing = [f.name for f in _fields(plugin) if _no_default(f) and f.name not in values]
    if missing:
        raise SpecError(f"{spec.name} needs {', '.join(missing)}: write {spec.name}({missing[0]}=…)")
    return plugin(**values)


def canonical(kind: Kind, instance: object) -> str:
    """The one text for an instance: settings at their default dropped, values of their field's type, keys sorted."""
    if parts := _parts(instance):
        return "+".join(canonical(kind, part) for part in parts)
    plugin = type(instance)
    defaults = {f.name: _default(f) for f in _fields(plugin)}
    kept = {key: value for key, value in settings(instance).items() if not _same(value, defaults[key])}
    return str(Spec(_name_of(kind, plugin), kept))


def settings(instance: object) -> dict[str, Any]:
    """Every setting in force, defaults included, each of its field's type; of composed arms one dict a name."""
    if parts := _parts(instance):
        return {_name_of("arms", type(part)): settings(part) for part in parts}
    plugin = type(instance)
    return {
        key: coerce(getattr(instance, key), hint, f"{plugin.__name__}: {key}")
        for key, hint in setting_types(plugin).items()
    }


def _composed(arms: list["Arm"]) -> Any:
    """Arms in one order whatever the text's, so that a cell has one name.

    Raises:
        SpecError: one mechanism would have two names, or two arms of one name could not be told apart.
    """
    composed: Any = importlib.import_module("quant_bench.arm").Composed
    found = [_name_of("arms", type(arm)) for arm in arms]
    for name in found:
        if name == BASELINE_ARM:
            raise SpecError(f"{name} is the model as it is: leave it out of {'+'.join(found)!r}")
        if found.count(name) > 1:
            raise SpecError(f"{name} stands more than once in {'+'.join(found)!r}")
    return composed(tuple(sorted(arms, key=lambda arm: canonical("arms", arm))))


def _parts(instance: object) -> tuple[object, ...]:
    """Arms that a composed one is made of; nothing for any other plugin."""
    arm = sys.modules.get("quant_bench.arm")
    return instance.parts if arm is not None and isinstance(instance, arm.Composed) else ()


def summary(kind: Kind, name: str) -> str:
    """First line of a plugin's docstring, read without importing it; empty for entry points."""
    file = _places(kind)[name].file
    try:
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) if file is not None else None
    except (SyntaxError, ValueError) as error:
        # one broken plugin must not hide the others
        return f"(no Python: {error})"
    return (text or "").partition("\n")[0]


def class_name(name: str) -> str:
    """CamelCase of a plugin's name; a Python keyword gets an underscore, as PEP 8 says (`none` -> `None_`)."""
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return f"{camel}_" if keyword.iskeyword(camel) else camel


def _places(kind: Kind) -> dict[str, Place]:
    found: dict[str, Place] = {}
    files = [file for folder in plugin_folders(kind) for file in sorted(Path(folder).glob("*.py"))]
    places = [Place(file.stem, file, None) for file in files if not file.name.startswith("_")]
    # an editable install beside a checkout can list one entry point twice
    entries = {
        (entry.name, entry.value): entry for entry in importlib.metadata.entry_points(group=f"quant_bench.{kind}")
    }
    for place in places + [Place(entry.name, None, entry) for entry in entries.values()]:
        if not place.name.isidentifier() or place.name != place.name.lower():
            raise PluginError(f"a plugin's name is lower case with underscores; got {place.name!r} ({place})")
        if place.name in found:
            raise PluginError(f"{place} hides {found[place.name]}: rename one of the two {kind}")
        if kind == "quantizers" and schemes.is_scheme(place.name):
            raise PluginError(f"{place} hides the scheme {place.name}: rename it")
        found[place.name] = place
    return found


def _file_module(kind: Kind, place: Place) -> ModuleType:
    package = importlib.import_module(f"quant_bench.{kind}")
    # QUANT_BENCH_PATH may have changed since the package was imported
    package.__path__ = plugin_folders(kind)
    importlib.invalidate_caches()
    path = f"quant_bench.{kind}.{place.name}"
    known = sys.modules.get(path)
    if known is not None and known.__file__ != str(place.file):
        del sys.modules[path]
    return importlib.import_module(path)


def _contract(kind: Kind) -> type:
    module, name = _CONTRACTS[kind]
    contract: type = getattr(importlib.import_module(module), name)
    return contract


def _plugin_of(kind: Kind, module: ModuleType) -> type:
    contract = _contract(kind)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, contract)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    if len(found) != 1:
        listed = ", ".join(plugin.__name__ for plugin in found) or "none"
        raise PluginError(f"{module.__name__} must hold exactly one concrete {contract.__name__}; it holds {listed}")
    return found[0]


def _check(kind: Kind, plugin: type, place: Place) -> None:
    contract = _contract(kind)
    if not issubclass(plugin, contract) or inspect.isabstract(plugin):
        raise PluginError(f"{place}: {plugin.__name__} must be a concrete {contract.__name__}")
    if plugin.__name__ != class_name(place.name):
        raise PluginError(
            f"{place}: the class of {place.name!r} is named {class_name(place.name)}, not {plugin.__name__}"
        )
    # looked for in the class itself: one without the decorator inherits the mark of its base, but no fields of its own
    if not getattr(vars(plugin).get("__dataclass_params__"), "frozen", False):
        raise PluginError(f"{place}: {plugin.__name__} must be decorated with @dataclass(frozen=True)")
    fields = {f.name: f for f in _fields(plugin)}
    if set(schemes.DEFAULTS) <= set(fields):
        for key, value in schemes.DEFAULTS.items():
            if not _same(_default(fields[key]), value):
                raise PluginError(f"{place}: {key} must keep its default {value!r}, or schemes would change meaning")


def _name_of(kind: Kind, plugin: type) -> str:
    """Name under which the registry loaded a class; for one that it did not load, its module's last part."""
    return _named.get(plugin) or plugin.__module__.rpartition(".")[2]


def _fields(plugin: Any) -> list["dataclasses.Field[Any]"]:
    """Fields that are settings."""
    return [field for field in dataclasses.fields(plugin) if field.init]


def _no_default(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: "dataclasses.Field[Any]") -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _same(value: object, default: object) -> bool:
    """Equal and of one kind: True is not 1, and an int default of a float field is its float."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)
