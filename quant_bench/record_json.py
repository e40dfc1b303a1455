"""The JSON form of a record: strict text, the schema, and the quick check that a reader of thousands can afford."""

import json
from functools import cache
from importlib import resources
from itertools import islice
from typing import Any, Final, NoReturn

import orjson

from quant_bench.errors import RecordError

SCHEMA_VERSION: Final = 1
# squares and differences of numbers within it are finite, and no measurement is beyond
LARGEST_NUMBER: Final = 1e150
# characters; a report repeats a text in every table
LONGEST_TEXT: Final = 10_000

_TEXT, _NUMBER, _COUNT, _NONE = (str,), (int, float), (int,), (type(None),)
_OBJECT, _LIST = (dict,), (list,)
_SIZED: Final = (str, float, int)
_FLAT: Final = (str, bool, int, float, type(None))
_DIGESTS: Final = ("weights_sha256", "tokenizer_sha256", "data_sha256", "calibration_sha256")
_IDENTITY_TEXTS: Final = (*_DIGESTS, "training_sha256", "quantized_sha256", "note")
_MODEL_TEXTS: Final = ("name", "dtype", "revision")
_STATES: Final = ("measured", "failed", "blocked", "not_applicable")
# faults looked through for the one that says most: a hostile file may have millions
_FAULTS: Final = 100
_FIELDS: Final[dict[str, tuple[type, ...]]] = {
    "schema": _COUNT,
    "state": _TEXT,
    "reason": _TEXT + _NONE,
    "cell": _OBJECT,
    "settings": _OBJECT,
    "versions": _OBJECT,
    "identity": _OBJECT,
    "environment": _OBJECT,
    "convention": _TEXT + _NONE,
    "coverage": _OBJECT + _NONE,
    "scores": _LIST,
    "details": _OBJECT,
    "took_seconds": _NUMBER,
    "prepare_seconds": _NUMBER,
    "peak_memory_bytes": _COUNT + _NONE,
}
_CELL: Final[dict[str, tuple[type, ...]]] = {key: _TEXT for key in ("model", "arm", "quantizer", "task")} | {
    "seed": _COUNT
}
_SCORE: Final[dict[str, tuple[type, ...]]] = {
    "metric": _TEXT,
    "unit": _TEXT,
    "better": _TEXT,
    "reduction": _TEXT,
    "chance": _NUMBER + _NONE,
    "value": _NUMBER,
    "stderr": _NUMBER + _NONE,
    "ci95": _LIST + _NONE,
    "n": _COUNT + _NONE,
    "delta": _OBJECT + _NONE,
}
_ARM_SCORE: Final = _SCORE | {"arm_delta": _OBJECT}
_BETTER: Final = ("higher", "lower", "neither")
_REDUCTIONS: Final = ("mean", "exp", "none")
_DELTA: Final[dict[str, tuple[type, ...]]] = {
    "value": _NUMBER,
    "ci95": _LIST + _NONE,
    "reference": _TEXT,
    "p_value": _NUMBER + _NONE,
}


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of a record, as the package ships it."""
    text = resources.files("quant_bench").joinpath("record.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(schema())
    return Draft202012Validator(schema())


def validate(document: object) -> None:
    """Hold a document against the whole schema.

    Raises:
        RecordError: it does not fit; the message says where and why.
    """
    # imported where it is needed: a report of sound records needs no schema
    from jsonschema.exceptions import best_match

    error = best_match(islice(_validator().iter_errors(document), _FAULTS))
    if error is not None:
        where = error.json_path.removeprefix("$").removeprefix(".") or "the file"
        raise RecordError(f"{where}: {error.message[:300]}")


def refuse(document: Any) -> NoReturn:
    """Say why a document that does not look right is no record.

    Raises:
        RecordError: always; by the schema where that sees the reason.
    """
    validate(document)
    names: set[str] = set()
    for index, score in enumerate(document["scores"]):
        if score["metric"] in names:
            raise RecordError(f"{score['metric']} stands twice among the scores")
        names.add(score["metric"])
        for part in (score, score["delta"] or {}, score.get("arm_delta", {})):
            low, high = part.get("ci95") or (0, 0)
            if low > high:
                raise RecordError(f"scores[{index}]: the interval [{low!r}, {high!r}] ends before it begins")
    raise RecordError(f"a number has more than 64 bits, or a text more than {LONGEST_TEXT:,} characters")


def looks_right(document: Any) -> bool:
    """Whether keys, types and numbers of a record are those that its readers rely on: a small part of the schema."""
    if not _has(document, _FIELDS) or not _has(document["cell"], _CELL) or document["schema"] != SCHEMA_VERSION:
        return False
    if not _names_itself(document):
        return False
    if document["coverage"] is not None and not _is_share(document["coverage"].get("mac_share")):
        return False
    measured, scores = document["state"] == "measured", document["scores"]
    if document["state"] not in _STATES or measured != (document["reason"] is None) or measured != bool(scores):
        return False
    if measured and not _says_what_was_measured(document):
        return False
    return all(map(_is_score, scores)) and len({score["metric"] for score in scores}) == len(scores)


def _says_what_was_measured(document: Any) -> bool:
    digests = (document["identity"][name] for name in _DIGESTS[:3])
    return None not in (document["convention"], document["coverage"], *digests)


def _is_score(score: Any) -> bool:
    return (
        _has(score, _ARM_SCORE if type(score) is dict and "arm_delta" in score else _SCORE)
        and score["metric"] != ""
        and score["better"] in _BETTER
        and score["reduction"] in _REDUCTIONS
        # the exponential of something; reports take its logarithm
        and (score["reduction"] != "exp" or score["value"] > 0)
        and _is_interval(score["ci95"])
        and (score["delta"] is None or _is_delta(score["delta"]))
        and ("arm_delta" not in score or _is_delta(score["arm_delta"]))
    )


def plain(document: object) -> Any:
    """A document as JSON gives it back: keys are texts, tuples are lists.

    Raises:
        RecordError: a number that is not finite, half a surrogate pair in a text, or a value that JSON does not have;
            the message says where.
    """
    try:
        return orjson.loads(json.dumps(document, allow_nan=False))
    except RecursionError as error:
        raise RecordError(f"nested too deeply: {error}") from error
    except (ValueError, TypeError) as error:
        raise RecordError(f"{_offender(document, '') or 'the record'} has no place in strict JSON: {error}") from error


def dumped(document: object) -> str:
    """The one text of a document; it has ASCII characters only, so that no reader's encoding can change it."""
    return json.dumps(document, allow_nan=False, sort_keys=True, indent=1) + "\n"


def parsed(text: str | bytes) -> Any:
    """What a strict JSON text says.

    Raises:
        RecordError: the text is no JSON, is cut short, holds NaN or Infinity, or half a surrogate pair: that is JSON,
            but no text in UTF-8, and so neither data frames nor files could hold it.
    """
    try:
        # in 40 % of the standard library's time, which is most of what reading thousands takes
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RecordError(f"no strict JSON: {error}") from error


def _names_itself(document: Any) -> bool:
    """Whether settings, versions and identity have what a report groups by."""
    settings, versions, identity = (document[key] for key in ("settings", "versions", "identity"))
    if not all(type(settings.get(key)) is dict for key in ("arm", "quantizer", "task")):
        return False
    model = settings.get("model", {})
    if type(model) is not dict or not all(type(part) in _FLAT for part in (*model.values(), *identity.values())):
        return False
    texts = [identity.get(name) for name in _IDENTITY_TEXTS] + [model.get(name) for name in _MODEL_TEXTS]
    if not all(text is None or (type(text) is str and _fits(text)) for text in texts):
        return False
    versions_of_plugins = [versions.get(key) for key in ("arm", "quantizer", "task")]
    return all(map(_is_count, versions_of_plugins)) and all(key in identity for key in _DIGESTS)


def _has(document: Any, fields: dict[str, tuple[type, ...]]) -> bool:
    if type(document) is not dict or document.keys() != fields.keys():
        return False
    for key, allowed in fields.items():
        value = document[key]
        # type, not isinstance: True is no count
        kind = type(value)
        if kind not in allowed or (kind in _SIZED and not _fits(value)):
            return False
    return True


def _fits(value: Any) -> bool:
    """Whether a number or text has a size that reports can bear: whole numbers are those that data frames hold."""
    if type(value) is float:
        return -LARGEST_NUMBER <= value <= LARGEST_NUMBER
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return type(value) is not str or len(value) <= LONGEST_TEXT


def _is_count(value: Any) -> bool:
    return type(value) is int and _fits(value)


def _is_share(value: Any) -> bool:
    return type(value) in _NUMBER and 0 <= value <= 1


def _is_interval(value: Any) -> bool:
    if value is None:
        return True
    return len(value) == 2 and all(type(end) in _NUMBER and _fits(end) for end in value) and value[0] <= value[1]


def _is_delta(value: Any) -> bool:
    return _has(value, _DELTA) and _is_interval(value["ci95"])


def _offender(value: object, where: str) -> str:
    """Path of the first value that a record cannot hold, or an empty text."""
    if isinstance(value, dict):
        found = (_offender(inner, f"{where}.{key}" if where else str(key)) for key, inner in value.items())
        return next((path for path in found if path), "")
    if isinstance(value, list | tuple):
        found = (_offender(inner, f"{where}[{index}]") for index, inner in enumerate(value))
        return next((path for path in found if path), "")
    try:
        orjson.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError):
        return f"{where} ({value!r})"
    return ""
