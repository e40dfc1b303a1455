"""Values of a spec take the type of their field, so that `alpha=4` and `alpha=4.0` are one row; knows no torch."""

import dataclasses
import math
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quant_bench.errors import PluginError, SpecError
from quant_bench.spec import Value

_SCALARS = (bool, int, float, str, types.NoneType)


def setting_types(plugin: type) -> dict[str, Any]:
    """Type of every setting, in order of the fields.

    Raises:
        PluginError: the class is no dataclass, or a field's type is none of bool, int, float, str, None, Literal and
            unions of them.
    """
    if not dataclasses.is_dataclass(plugin):
        raise PluginError(f"{plugin.__name__} must be a frozen dataclass: its fields are its settings")
    hints = get_type_hints(plugin)
    found = {field.name: hints[field.name] for field in dataclasses.fields(plugin) if field.init}
    for name, hint in found.items():
        if not all(option in _SCALARS or get_origin(option) is Literal for option in _options(hint)):
            raise PluginError(
                f"{plugin.__name__}.{name}: a setting is a bool, int, float, str, None or Literal; got {hint}"
            )
    return found


def coerce(value: object, hint: Any, where: str) -> Value:
    """A value as its field's type has it: 4 for a float is 4.0, 4.0 for an int is 4; text and numbers never mix.

    Args:
        value: as parsed or as an instance holds it.
        hint: the field's type, from `setting_types`.
        where: names the setting in the message.

    Raises:
        SpecError: the value does not fit.
    """
    options = _options(hint)
    # an exact fit comes first, or 4 would be taken for 4.0 in `float | int`
    for exact in (True, False):
        for option in options:
            fits, fitted = _fit(value, option, exact)
            if fits:
                return fitted
    raise SpecError(f"{where} must be {' or '.join(_described(option) for option in options)}; got {value!r}")


def _options(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(option for part in get_args(hint) for option in _options(part))
    return (hint,)


def _fit(value: object, option: Any, exact: bool) -> tuple[bool, Value]:
    if get_origin(option) is Literal:
        for allowed in get_args(option):
            fits, fitted = _fit(value, type(allowed), exact)
            if fits and fitted == allowed:
                return True, allowed
        return False, None
    if type(value) is option and (not isinstance(value, float) or math.isfinite(value)):
        return True, value  # type: ignore[return-value]
    if exact or isinstance(value, bool):
        return False, None
    if option is float and isinstance(value, int) and abs(value) <= 1 << 53:
        return True, float(value)
    if option is int and isinstance(value, float) and value.is_integer():
        return True, int(value)
    return False, None


def _described(option: Any) -> str:
    if get_origin(option) is Literal:
        return " or ".join(str(allowed) for allowed in get_args(option))
    return {bool: "True or False", int: "a whole number", float: "a finite number", str: "a text"}.get(option, "None")
