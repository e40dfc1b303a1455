"""Specs and schemes: text <-> meaning."""

import dataclasses
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quant_bench import schemes
from quant_bench.coercion import coerce
from quant_bench.errors import SpecError
from quant_bench.quantizer import SchemeQuantizer
from quant_bench.spec import Spec

KEYS = st.builds(
    "".join, st.tuples(st.sampled_from(string.ascii_letters + "_"), st.text(string.ascii_letters + "_09", max_size=8))
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["True", "None", "nan", "inf", "1e5", "-3", "a,b=c", "'", '"', "\\", "", " ", "a b", "w4a4-kv8"]),
)
SPECS = st.builds(Spec, KEYS, st.dictionaries(KEYS, VALUES, max_size=5))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SPECS)
def test_canonical_text_is_read_back_with_every_type(spec: Spec) -> None:
    back = Spec.parse(str(spec))
    assert back == spec
    assert [(key, type(value), value) for key, value in back.settings.items()] == [
        (key, type(value), value) for key, value in spec.settings.items()
    ]
    assert str(back) == str(spec)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SPECS, SPECS)
def test_two_specs_with_one_text_are_one(first: Spec, second: Spec) -> None:
    same = first.name == second.name and {k: (type(v), repr(v)) for k, v in first.settings.items()} == {
        k: (type(v), repr(v)) for k, v in second.settings.items()
    }
    assert (str(first) == str(second)) == same == (first == second)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_with_a_spec_error(text: str) -> None:
    try:
        spec = Spec.parse(text)
    except SpecError:
        return
    assert Spec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("rtn", "rtn"),
        ("rtn()", "rtn"),
        (" rtn ( weight_bits = 4 , scope = full ) ", "rtn(scope=full,weight_bits=4)"),
        ("rtn(b=1,a=2)", "rtn(a=2,b=1)"),
        ("lm_eval(task='arc_easy')", "lm_eval(task=arc_easy)"),
        ('lm_eval(task="4")', 'lm_eval(task="4")'),
        ("x(a=1e-3,b=None,c=True,d=-.5)", "x(a=0.001,b=None,c=True,d=-0.5)"),
        ("x(a=1,)", "x(a=1)"),
    ],
)
def test_one_meaning_has_one_text(text: str, canonical: str) -> None:
    assert str(Spec.parse(text)) == canonical


@pytest.mark.parametrize(
    "text",
    [
        *("", "4rtn", "rtn(", "rtn)", "rtn(4)", "rtn(a=)", "rtn(a=1,a=2)", "rtn(a=1 2)", "rtn(a=__import__('os'))"),
        *("rtn(a=1j)", "rtn(a=[1])", 'rtn(a="\\x")', "rtn(a='b)", "rtn(a=1)x", "rtn(a=0x10)", "rtn(a=1_0)", "rtn(a=٤)"),
        "a b",
    ],
)
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        Spec.parse(text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_no_text_gives_back_is_refused(value: float) -> None:
    with pytest.raises(SpecError):
        Spec("rtn", {"a": value})


def test_a_spec_is_a_dictionary_key() -> None:
    assert {Spec("a", {"x": 1}): "int", Spec("a", {"x": 1.0}): "float", Spec("a", {"x": True}): "bool"} == {
        Spec.parse("a(x=1)"): "int",
        Spec.parse("a(x=1.0)"): "float",
        Spec.parse("a(x=True)"): "bool",
    }


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (4, float, 4.0),
        (4.0, int, 4),
        (4.0, float, 4.0),
        (True, bool, True),
        (4, int | None, 4),
        (None, int | None, None),
        (4, float | int, 4),
        (4, float | None, 4.0),
    ],
)
def test_a_value_takes_the_type_of_its_field(value: object, hint: object, expected: object) -> None:
    found = coerce(value, hint, "x")
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    ("value", "hint"),
    [(4.5, int), (True, int), (True, float), (1, bool), ("4", int), (4, str), (None, int), ((1 << 53) + 1, float)],
)
def test_text_numbers_and_truth_never_mix(value: object, hint: object) -> None:
    with pytest.raises(SpecError, match="x must be"):
        coerce(value, hint, "x")


def test_scheme_defaults_are_those_of_the_contract() -> None:
    contract = {field.name: field.default for field in dataclasses.fields(SchemeQuantizer)}
    assert dict(schemes.DEFAULTS) == contract


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("w8a8", {}),
        ("w8a8-integer", {"execution": "integer"}),
        ("w4a4", {"weight_bits": 4, "activation_bits": 4}),
        ("w8a16", {"activation_bits": 16}),
        ("w4a8", {"weight_bits": 4, "weight_granularity": "group"}),
        ("w6a6", {"weight_bits": 6, "activation_bits": 6, "weight_granularity": "group"}),
        ("w2a16", {"weight_bits": 2, "activation_bits": 16, "weight_granularity": "group"}),
        (
            "w4a4g64-kv4-classic",
            {"weight_bits": 4, "activation_bits": 4, "weight_granularity": "group", "activation_granularity": "group"}
            | {"group_size": 64, "kv_bits": 4, "execution": "classic"},
        ),
        (
            "w8a8-static",
            {"weight_granularity": "tensor", "weight_range": "mse", "activation_granularity": "tensor"}
            | {"activation_symmetric": False, "activation_static": True, "activation_range": "running_minmax"}
            | {"percentile": 99.999, "scope": "full"},
        ),
        ("w8a8(execution=integer)", {"execution": "integer"}),
    ],
)
def test_a_scheme_means_what_the_table_says(text: str, settings: dict[str, object]) -> None:
    spec = schemes.expand(text)
    assert spec.name == "rtn"
    assert dict(schemes.DEFAULTS) | dict(spec.settings) == dict(schemes.DEFAULTS) | settings


@pytest.mark.parametrize("text", list(schemes.SCHEMES))
@pytest.mark.parametrize("suffix", ["", "-kv8", "-kv4-integer", "-classic"])
@pytest.mark.parametrize("recipe", ["", "gptq:"])
def test_a_label_is_the_scheme_again(text: str, suffix: str, recipe: str) -> None:
    spec = schemes.expand(f"{recipe}{text}{suffix}")
    dropped = {key: value for key, value in spec.settings.items() if schemes.DEFAULTS[key] != value}
    canonical = str(Spec(spec.name, dropped))
    shown = schemes.label(canonical)
    if dropped or not recipe:
        full = dict(schemes.DEFAULTS) | dropped
        again = schemes.expand(shown) if schemes.is_scheme(Spec.parse(shown).name) else Spec.parse(shown)
        assert dict(schemes.DEFAULTS) | dict(again.settings) == full
    if not recipe:
        assert shown == f"{text}{suffix}"


def test_a_label_says_what_the_scheme_does_not() -> None:
    assert schemes.label("rtn(activation_bits=4,weight_bits=4,weight_range=mse)") == "w4a4(weight_range=mse)"
    assert schemes.label("rtn(weight_bits=4)") == "rtn(weight_bits=4)"
    # 8 bits are the default, which no canonical text says
    static = {key: value for key, value in schemes.expand("w8a8-static").settings.items() if not key.endswith("_bits")}
    assert schemes.label(str(Spec("smoothquant", static | {"alpha": 0.8}))) == "smoothquant:w8a8-static(alpha=0.8)"
    assert schemes.label("none") == "none"
    assert schemes.label("smoothquant", tuple(schemes.DEFAULTS)) == "smoothquant:w8a8"
    assert schemes.label("smoothquant(alpha=0.8)", ("alpha", *schemes.DEFAULTS)) == "smoothquant:w8a8(alpha=0.8)"
    assert schemes.label("quanto", ("weights", "activations")) == "quanto"
    assert schemes.label("quanto(weights=qint8)") == "quanto(weights=qint8)"


def test_the_execution_is_told_apart() -> None:
    assert schemes.execution_of("rtn(execution=integer,weight_bits=4)") == ("rtn(weight_bits=4)", "integer")
    assert schemes.execution_of("none") == ("none", None)


@pytest.mark.parametrize("text", ["w9a8", "w8", "w8a8-kv16", "w8a8-fast", "w4a16-static", "w8a8g128-static", "w4a4g0"])
def test_what_is_no_scheme_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        schemes.expand(text)


def test_a_setting_must_not_contradict_its_scheme() -> None:
    with pytest.raises(SpecError, match="already says execution=integer"):
        schemes.expand("w8a8-integer(execution=classic)")


def test_long_blanks_and_many_settings_are_read_in_one_pass() -> None:
    # in the square of its length this would take hours
    with pytest.raises(SpecError):
        Spec.parse("a" + " " * 1_000_000 + "!")
    many = ",".join(f"a{index}=1" for index in range(50_000))
    assert len(Spec.parse(f"a({many})").settings) == 50_000


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-20, 20),
    st.floats(-20, 20),
    st.sampled_from(["fp8", "float", "a b", "", "8"]),
)


@given(
    st.sampled_from(["rtn", "fp", "gptq", "none"]),
    st.dictionaries(st.sampled_from([*schemes.DEFAULTS, "weights", "activations", "more"]), VALUES, max_size=4),
)
def test_every_quantizer_of_a_record_has_a_label_that_can_be_read(name: str, given_settings: dict[str, Any]) -> None:
    canonical = str(Spec(name, given_settings))
    label = schemes.label(canonical)
    assert str(Spec.parse(label)) == label
