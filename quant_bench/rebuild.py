"""What a module class of quantized models declares, so that a saved module is made again without pickles."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn

from quant_bench.errors import ModelError, PluginError


@dataclass(frozen=True)
class Parts:
    """What a module is made of again.

    Attributes:
        settings: what `settings_of` gave, through JSON.
        tensors: its own parameters and buffers, by name.
        children: child modules whose classes are declared too, by name.
        before: what stood in its place in the float model (with its arm): what a wrapper wraps; None if nothing did.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    children: Mapping[str, nn.Module] = field(default_factory=dict)
    before: nn.Module | None = None


Kind = TypeVar("Kind", bound=type[nn.Module])
Hook = Callable[[nn.Module], None]
_kinds: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {}
_hooks: dict[str, Hook] = {}


def rebuildable(*settings: str) -> Callable[[Kind], Kind]:
    """Declare a module class: recipes that can be saved put no other classes into a model.

    A module is made again by its constructor, each argument of which is found by name: among the attributes named
    here, the module's tensors, its children, or else it is the module that was wrapped. A class for which that is not
    right has a method `settings() -> dict` (what JSON can hold), a class method `rebuilt(parts: Parts)`, or both.

    Args:
        settings: attributes that are neither tensors nor modules.

    Raises:
        PluginError: another class has its name.
    """

    def declare(kind: Kind) -> Kind:
        known = _kinds.get(kind.__name__, (kind,))[0]
        if known.__module__ != kind.__module__:
            raise PluginError(f"{kind.__module__}.{kind.__name__} has the name of a class of {known.__module__}")
        _kinds[kind.__name__] = (kind, settings)
        return kind

    return declare


def hooks_child(name: str) -> Callable[[Hook], Hook]:
    """Declare the function that registers a module's hook whose state is the child `name`."""

    def declare(install: Hook) -> Hook:
        _hooks[name] = install
        return install

    return declare


def is_rebuildable(module: nn.Module) -> bool:
    """Whether a module's own class (not a base of it) is declared."""
    return _kinds.get(type(module).__name__, (None,))[0] is type(module)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """What must be known of a declared module beside tensors and children.

    Raises:
        ModelError: JSON would not give it back.
    """
    own: Callable[[], dict[str, Any]] | None = getattr(module, "settings", None)
    found = _named_settings(module) if own is None else own()
    try:
        kept = json.loads(json.dumps(found, allow_nan=False)) == found
    except (TypeError, ValueError):
        kept = False
    if not kept:
        raise ModelError(f"JSON does not give back the settings of a {type(module).__name__}: {found}")
    return found


def _named_settings(module: nn.Module) -> dict[str, Any]:
    names: set[str] = set(_kinds[type(module).__name__][1])
    if not hasattr(module, "rebuilt"):
        # what is None has no tensor, and must not be taken for the wrapped module
        names |= {name for name in _arguments(type(module)) if getattr(module, name, module) is None}
    return {name: getattr(module, name) for name in sorted(names)}


def rebuilt(name: str, parts: Parts) -> nn.Module:
    """A module of the class declared under a name, made of its parts.

    Raises:
        ModelError: no class of that name is declared.
    """
    if name not in _kinds:
        raise ModelError(f"no module class {name!r} is declared here: the plugin of its recipe is missing or another")
    kind: Any = _kinds[name][0]
    own: Callable[[Parts], nn.Module] | None = getattr(kind, "rebuilt", None)
    if own is not None:
        return own(parts)
    known = {**parts.children, **parts.tensors, **parts.settings}
    return kind(**{argument: known.get(argument, parts.before) for argument in _arguments(kind)})


def _arguments(kind: type[nn.Module]) -> list[str]:
    """Names of a constructor's arguments; a class without one of its own has `nn.Module`'s, which has no names."""
    parameters = inspect.signature(kind).parameters.values()
    return [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def install_hook(module: nn.Module, child: str) -> None:
    """Register the hook whose state is this child, where a child of that name has one."""
    if child in _hooks:
        _hooks[child](module)
