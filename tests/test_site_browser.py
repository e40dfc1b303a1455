"""The site in a real browser: what a reader does with it, and what a hostile record cannot."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from quant_bench import schemes
from quant_bench.record import Cell, Record, Store
from quant_bench.report.compare import command_for
from quant_bench.report.text import between, number, signed
from quant_bench.score import Delta, Metric, Score
from quant_bench.site import write_site
from quant_bench.statistics import spread_of

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is in the dependency group `test`")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")

RESULTS = Path(__file__).parent.parent / "results"
MODEL = "smollm2-135m-instruct"
TIER = "tier%3Atoy-3"
NASTY = "../x</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&{{7*7}}<b>bold</b>"
Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of one model's committed results: what is measured of others later changes no test."""
    folder = tmp_path_factory.mktemp("real")
    shutil.copytree(RESULTS / MODEL, folder / "results" / MODEL)
    return write_site(folder / "results", folder / "site").index.parent


@pytest.fixture(scope="module")
def arm_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of an arm with committed results of several seeds."""
    folder = tmp_path_factory.mktemp("arms")
    for arm in ("softmax", "sink_logit"):
        shutil.copytree(RESULTS / TIER / arm, folder / "results" / TIER / arm)
    return next(write_site(folder / "results", folder / "site").index.parent.glob("arms/sink-logit*"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # a container's root has no sandbox of the browser's own
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:
    """Opens pages from the disk; afterwards nothing may have been complained about, and nobody asked for anything."""
    contexts: list[Any] = []
    said: list[str] = []

    def opened(path: Path, address: str = "", **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1400, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{path.name}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"{path.name}: {error}"))
        page.on("dialog", lambda dialog: said.append(f"{path.name}: dialog {dialog.message}"))
        page.on(
            "request", lambda request: request.url.startswith(("file:", "data:", "blob:")) or said.append(request.url)
        )
        page.goto(path.as_uri() + address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []


def pages_of(site: Path) -> list[Path]:
    return sorted(site.glob("*.html")) + sorted(site.glob("*/*.html"))


def table_of(page: Any) -> list[list[str]]:
    """Texts of the leaderboard's cells, without room for rows out of sight."""
    script = "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    return page.eval_on_selector_all("#table tbody tr:not(.space)", script)


def plots_drawn(page: Any) -> None:
    for figure in page.query_selector_all("figure.plot"):
        figure.scroll_into_view_if_needed()
        figure.wait_for_selector(".main-svg")


def until(page: Any, expression: str) -> None:
    """Wait for what an expression says; the browser library's own wait needs eval, which pages of ours forbid."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(expression)


def facet(page: Any, name: str, *values: str) -> None:
    page.click(f'[data-facet="{name}"] summary')
    for value in values:
        page.check(f'[data-facet="{name}"] input[value="{value}"]')
    page.keyboard.press("Escape")


def test_every_page_opens_without_complaint_or_request_and_fits_a_phone(site: Path, visit: Visit) -> None:
    for path in pages_of(site):
        page = visit(path)
        plots_drawn(page)
        assert page.inner_text("h1")
        page.set_viewport_size({"width": 390, "height": 844})
        until(page, "document.documentElement.scrollWidth <= 390")


def test_no_page_has_a_serious_accessibility_problem(site: Path, arm_page: Path, visit: Visit) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    # without preload: it would fetch style sheets, which pages from the disk may not
    everything: dict[str, Any] = {"preload": False}
    contrast = everything | {"runOnly": ["color-contrast"]}
    found = []
    for path in (*pages_of(site), arm_page):
        page = visit(path)
        plots_drawn(page)
        for scheme, rules in (("light", everything), ("dark", contrast)):
            page.emulate_media(color_scheme=scheme)
            for problem in axe.run(page, options=rules).response["violations"]:
                if problem["impact"] in ("serious", "critical"):
                    nodes = [node["html"][:200] for node in problem["nodes"][:3]]
                    found.append((path.name, scheme, problem["id"], nodes))
    assert found == []


def test_numbers_are_written_as_the_command_line_writes_them(site: Path, visit: Visit) -> None:
    values = [0.0, -0.0, 1.0, -3.0, 12345.0, 999999999.0, 1e9, 0.5, 0.03125, 0.09375, 1000.5, 1001.5, 10.125, 10.375]
    values += [
        sign * 10.0**power * digits
        for power in range(-7, 9)
        for digits in (1, 1.00005, 2.5, 9.9999999)
        for sign in (1, -1)
    ]
    values += [2.0**power for power in range(-30, 40)] + [1 / 3, 2 / 3, 0.12345, 1.0005, 9.9995, 99.995, 999.995]
    values += [1.005e9, 1.015e9, -3.265e10, 9.425e16]
    page = visit(site / "index.html")
    shown = page.evaluate("values => values.map(value => [quantBench.number(value), quantBench.signed(value)])", values)
    assert shown == [[number(value), signed(value)] for value in values]


def test_the_table_shows_values_and_differences_with_their_intervals(site: Path, visit: Visit) -> None:
    records = {(r.cell.quantizer, r.cell.task): r for r in Store.read(RESULTS).valid()}
    score = records["rtn(execution=integer)", "wikitext2"].scores[0]
    assert score.ci95 is not None
    assert score.delta is not None
    assert score.delta.ci95 is not None
    rows = table_of(visit(site / "index.html"))
    row = next(row for row in rows if row[0].startswith("w8a8") and row[2] == "integer")
    expected = (
        f"{number(score.value)} {between(*score.ci95)}",
        f"Δ {signed(score.delta.value)} {between(*score.delta.ci95, signed)}",
    )
    assert tuple(row[3].splitlines()) == expected


def test_a_heading_sorts_by_value_with_what_is_missing_last(site: Path, visit: Visit) -> None:
    page = visit(site / "index.html")
    press = page.locator("#table thead button", has_text="token_perplexity").first
    for order, reverse in (("ascending", False), ("descending", True)):
        press.click()
        assert page.locator("th[aria-sort]").get_attribute("aria-sort") == order
        column = [row[3] for row in table_of(page)]
        values = [float(text.split()[0].replace(",", "")) for text in column if text != "–"]
        assert len(values) > 5
        assert values == sorted(values, reverse=reverse)
        assert column == [text for text in column if text != "–"] + ["–"] * (len(column) - len(values))
    press.click()
    assert page.locator("th[aria-sort]").count() == 0


def test_filters_leave_what_they_name_and_a_task_leaves_its_columns(site: Path, visit: Visit) -> None:
    page = visit(site / "index.html")
    facet(page, "execution", "integer")
    facet(page, "bits", "W4 A4")
    rows = table_of(page)
    assert {row[2] for row in rows} == {"integer"}
    keys, asked = ("execution", "weight_bits", "activation_bits"), ("integer", 4, 4)
    wanted = {
        schemes.label(schemes.execution_of(record.cell.quantizer)[0])
        for record in Store.read(site / "records").records
        if tuple(record.settings["quantizer"].get(key) for key in keys) == asked
    }
    assert {row[0].split()[0] for row in rows} == wanted
    assert {"w4a4", "w4a4g128"} <= wanted
    facet(page, "task", "hellaswag")
    headings = page.eval_on_selector_all("#table thead small", "all => all.map(one => one.innerText)")
    assert headings
    assert all(text.startswith("hellaswag ") for text in headings)
    page.fill("#search", "w8a8")
    assert table_of(page) == []
    assert "None of" in page.inner_text("#status")
    page.click("#reset")
    assert len(table_of(page)) == len({record.cell.quantizer for record in Store.read(site / "records").records})


def test_an_address_gives_back_the_view_that_it_was_copied_from(site: Path, visit: Visit) -> None:
    page = visit(site / "index.html")
    facet(page, "execution", "integer", "float")
    facet(page, "columns", "bits")
    page.click('[data-facet="columns"] summary')
    page.locator('[data-facet="columns"] label', has_text="parity: wrong_accumulators").click()
    page.keyboard.press("Escape")
    page.select_option("#by", "d")
    page.locator("#table thead button", has_text="token_perplexity").first.click()
    page.locator("tbody .pick").nth(1).check()
    again = visit(site / "index.html", page.evaluate("location.hash"))
    assert table_of(again) == table_of(page)
    assert again.locator("th[aria-sort]").count() == 1
    assert again.locator("tbody .pick:checked").count() == 1
    assert again.inner_text("#status") == page.inner_text("#status")
    assert "bits" in page.inner_text("#table thead")


def test_an_address_of_another_time_breaks_nothing(site: Path, visit: Visit) -> None:
    for odd in ("#sort=toString&columns=constructor,__proto__", "#sort=-__proto__&by=constructor&row=toString"):
        page = visit(site / "index.html", odd)
        assert page.locator("th[aria-sort]").count() == 0
        assert page.locator("tbody .pick").count() > 0
    page = visit(site / "index.html", "#model=gone&sort=nothing&columns=a.b.c,arm&row=x&by=q&search=%3Cimg%20src=x%3E")
    assert "None of" in page.inner_text("#status")
    page.click("#reset")
    assert len(table_of(page)) == len({record.cell.quantizer for record in Store.read(site / "records").records})


def test_a_number_names_its_record_and_the_command_that_measures_it(site: Path, visit: Visit) -> None:
    page = visit(site / "index.html")
    page.locator("#table tbody tr", has_text="w8a8-static").locator("a.number").first.click()
    shown = page.inner_text("#detail")
    assert "P1 seq=2048 prefix=none" in shown
    link = page.get_attribute("#detail a.record", "href")
    copy = site / unquote(link)
    record = Record.read(copy, site / "records")
    assert page.inner_text("#detail pre") == command_for(record, [record.cell.arm])
    assert repr(record.scores[0].value) in shown
    page.click("#detail-close")
    assert not page.is_visible("#detail")
    model = next((site / "models").glob("smollm2*"))
    page = visit(model)
    page.locator("a.number", has_text=number(record.scores[0].value)).first.click()
    assert page.inner_text("#detail pre") == command_for(record, [record.cell.arm])


def test_the_comparison_has_the_interval_of_the_record_or_says_that_there_is_none(site: Path, visit: Visit) -> None:
    page = visit(site / "index.html")
    for label in ("w8a8", "none"):
        page.locator("#table tbody tr", has_text="integer" if label == "w8a8" else "float").filter(
            has=page.locator(f'span[title="{label}"]')
        ).locator(".pick").check()
    page.click("#compare")
    page.wait_for_selector("#pair:not([hidden]) tbody tr")
    records = {(r.cell.quantizer, r.cell.task): r for r in Store.read(RESULTS).valid()}
    delta = records["rtn(execution=integer)", "wikitext2"].scores[0].delta
    assert delta is not None
    assert delta.ci95 is not None
    row = page.locator("tbody tr", has_text="token_perplexity").first
    assert row.locator(".difference").inner_text() == signed(delta.value)
    assert row.locator(".ends").inner_text() == between(*delta.ci95, signed)
    page.click("#swap")
    low, high = delta.ci95
    assert row.locator(".difference").inner_text() == signed(-delta.value)
    assert row.locator(".ends").inner_text() == between(-high, -low, signed)
    page.select_option("#second", label="w4a4 · integer · softmax")
    page.select_option("#first", label="w8a8 · integer · softmax")
    assert row.locator(".ends").inner_text() == "–"
    assert "no paired interval is known here" in row.inner_text()


def test_any_two_rows_of_several_seeds_have_an_interval(arm_page: Path, visit: Visit) -> None:
    page = visit(arm_page.parent.parent / "compare.html")
    values = {
        name: [
            Record.read(path).scores[0].value
            for path in sorted((RESULTS / TIER / arm).glob(f"{quantizer}/validation*.json"))
        ]
        for name, arm, quantizer in (
            ("w4a4 · integer · softmax", "softmax", "rtn,activation_bits=4,execution=integer,weight_bits=4"),
            ("none · float · sink_logit", "sink_logit", "none"),
        )
    }
    for place, name in zip(("#first", "#second"), values, strict=True):
        page.select_option(place, label=name)
    spread = spread_of([a - b for a, b in zip(*values.values(), strict=True)])
    row = page.locator("tbody tr", has_text="loss (nats/token)").first
    assert row.locator(".difference").inner_text() == signed(spread.mean)
    assert row.locator(".ends").inner_text() == between(*spread.ci95, signed)
    assert "over 3 seeds" in row.inner_text()


def test_a_stored_difference_to_another_cell_than_there_is_now_gets_no_interval(tmp_path: Path, visit: Visit) -> None:
    stale = Delta(-0.2, (-0.3, -0.1), "none")
    for one in (made("none", 0.5), made("rtn", 0.4, delta=stale)):
        one.write(tmp_path / "results")
    page = visit(write_site(tmp_path / "results", tmp_path / "site").index.with_name("compare.html"))
    row = page.locator("tbody tr").nth(1)
    assert row.locator(".difference").inner_text() == "-0.1000"
    assert row.locator(".ends").inner_text() == "–"
    assert "measure both again" in row.inner_text()


def test_a_comparison_goes_by_the_seeds_of_the_two_numbers(tmp_path: Path, visit: Visit) -> None:
    w4, delta = "rtn(activation_bits=4,weight_bits=4)", Delta(-0.1, (-0.2, -0.05), "none")
    # a record of one seed has no difference, and one row has a seed in one task only
    of_seeds = [made("none", 0.5), made("none", 0.6, seed=1), made("rtn", 0.4, delta=delta), made("rtn", 0.45, seed=1)]
    once = [made("none", 0.5, task="arc_easy"), made(w4, 0.4, task="arc_easy", delta=delta), made(w4, 0.4, delta=delta)]
    for one in of_seeds + once:
        one.write(tmp_path / "results")
    compared = write_site(tmp_path / "results", tmp_path / "site").index.with_name("compare.html")
    page = visit(compared)

    def rows(first: str) -> list[list[str]]:
        page.select_option("#first", label=f"{first} · simulated · softmax")
        page.select_option("#second", label="none · float · softmax")
        script = "rows => rows.map(row => [...row.cells].slice(3).map(cell => cell.innerText))"
        return page.eval_on_selector_all("tbody tr:not(.between)", script)

    spread = spread_of([0.4 - 0.5, 0.45 - 0.6])
    over_seeds = [signed(spread.mean), between(*spread.ci95, signed), "paired, 95 % over 2 seeds"]
    assert rows("w8a8")[0] == over_seeds
    of_items = ["-0.1000", between(*delta.ci95, signed), "paired, 95 % over items"]
    of_one = [*of_items[:2], "paired, 95 % over items, of the one seed that both have"]
    assert sorted(rows("w4a4")) == sorted([of_items, of_one])
    # what the address names is not always there
    said = page.inner_text("#status")
    address = page.evaluate("location.hash")
    assert visit(compared, address).inner_text("#status") == said
    assert (
        visit(compared, address[:-1] + "x").inner_text("#status").startswith("The address names a row that is not here")
    )


def test_rows_of_other_weights_are_shown_and_not_subtracted(tmp_path: Path, visit: Visit) -> None:
    other = made("rtn", 0.4, model="other")
    for one in (made("none", 0.5), replace(other, identity=dict(other.identity) | {"weights_sha256": "b" * 64})):
        one.write(tmp_path / "results")
    page = visit(write_site(tmp_path / "results", tmp_path / "site").index.with_name("compare.html"))
    page.select_option("#first", index=1)
    row = page.locator("tbody tr").nth(1)
    assert "0.4000" in row.inner_text()
    assert "0.5000" in row.inner_text()
    assert row.locator(".difference").inner_text() == "–"
    assert "other weights" in row.inner_text()


def test_the_heat_map_shows_the_record_that_is_chosen(site: Path, visit: Visit) -> None:
    page = visit(next((site / "models").glob("smollm2*")))
    figure = page.locator("#figure-size")
    figure.scroll_into_view_if_needed()
    figure.locator(".main-svg").first.wait_for()
    figure.locator('select[data-list="statistic"]').select_option(index=1)
    figure.locator('select[data-list="quantizer"]').select_option(label="w8a8 integer")
    figure.locator("summary").click()
    record = next(
        r
        for r in Store.read(RESULTS).valid()
        if (r.cell.quantizer, r.cell.task) == ("rtn(execution=integer)", "outliers")
    )
    expected = {
        (row["kind"].replace("_", " "), row["layer"]): number(float(f"{row['kurtosis']:.6g}"))
        for row in record.details["tensors"].values()
        if row["kurtosis"] is not None and row["layer"] is not None
    }
    cells = figure.locator("details tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    head, *rows = cells
    shown = {
        (row[0], int(heading.split()[-1])): text
        for row in rows
        for heading, text in zip(head[1:], row[1:], strict=True)
    }
    assert shown == expected
    drawn = page.evaluate("document.querySelector('#figure-size .canvas').data[0].z")
    assert sum(value is not None for row in drawn for value in row) == len(expected)
    assert (
        figure.locator("a", has_text="record of this map")
        .get_attribute("href")
        .endswith("rtn%2Cexecution%3Dinteger/outliers.json")
    )


def test_doses_and_heads_are_marked_where_they_are(arm_page: Path, visit: Visit) -> None:
    page = visit(arm_page)
    for name, marks in (("injection", ["0.2", "0.4", "0.8", "1.6"]), ("attention", ["0"])):
        figure = page.locator(f"#figure-{name}")
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for()
        assert figure.locator(".xtick text").all_text_contents() == marks


def test_the_leaderboard_is_used_by_keyboard(site: Path, visit: Visit) -> None:
    page = visit(site / "index.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus('[data-facet="execution"] summary')
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert "execution=" in page.evaluate("location.hash")
    page.keyboard.press("Escape")
    assert page.locator(".facet[open]").count() == 0
    assert page.evaluate("document.activeElement.innerText").startswith("Execution (1)")
    page.focus("#table thead button")
    page.keyboard.press("Enter")
    assert page.locator("th[aria-sort]").count() == 1
    assert page.evaluate("document.activeElement.dataset.sort") == "quantizer"
    page.locator("a.number").first.focus()
    page.keyboard.press("Enter")
    assert page.is_visible("#detail")
    page.keyboard.press("Escape")
    assert not page.is_visible("#detail")
    assert page.evaluate("document.activeElement.className") == "number"


def test_tables_of_models_and_arms_need_no_scripts(site: Path, visit: Visit) -> None:
    page = visit(next((site / "models").glob("smollm2*")), java_script_enabled=False)
    assert page.locator(".question table").count() > 4
    assert "22.37" in page.locator(".question").first.inner_text()


def test_the_theme_follows_the_button_and_is_kept(site: Path, visit: Visit) -> None:
    page = visit(site / "index.html")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    page.click("#theme")
    assert page.inner_text("#theme") == "Theme: dark"
    assert page.evaluate(ground) != light
    page.reload()
    assert page.inner_text("#theme") == "Theme: dark"
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('td')).color") == "rgb(27, 29, 31)"


def test_text_of_records_does_nothing_but_appear(tmp_path: Path, visit: Visit) -> None:
    details = {"tensors": {NASTY: {"kind": NASTY, "layer": 0, "inf_norm": 1.0, "kurtosis": 4.0}}}
    measured = made("rtn", 0.4, model=NASTY, convention=NASTY, name=NASTY)
    notes = {**(measured.coverage or {}), "quantized": {NASTY: NASTY}, "notes": [NASTY]}
    records = [
        made("none", 0.5, model=NASTY, convention=NASTY, name=NASTY),
        replace(measured, coverage=notes, identity={**measured.identity, "note": NASTY}),
        replace(made("rtn", 0.4, model=NASTY, task="outliers"), details=details),
        made("rtn", None, model=NASTY, task="gsm8k", state="blocked", reason=NASTY),
    ]
    for one in records:
        one.write(tmp_path / "results")
    site = write_site(tmp_path / "results", tmp_path / "site").index.parent
    for path in pages_of(site):
        page = visit(path)
        plots_drawn(page)
        assert page.locator("img, main b:not(.best)").count() == 0
        assert page.evaluate("document.querySelectorAll('script:not([src]):not([type])').length") == 0
    page = visit(site / "index.html")
    page.locator("a.number", has_text="blocked").first.click()
    assert NASTY in page.inner_text("#detail")


def made(quantizer: str, value: float | None, **changes: Any) -> Record:
    """A record of one score, or of none."""
    parts = {"model": "m", "arm": "softmax", "quantizer": quantizer, "task": "hellaswag", "seed": 0}
    parts |= {key: changes.pop(key) for key in list(changes) if key in parts}
    metric = Metric(changes.pop("name", "acc"), "share", "higher", "mean")
    interval = None if value is None else (value - 0.02, value + 0.02)
    scores = () if value is None else (Score(metric, value, 0.01, interval, 100, changes.pop("delta", None)),)
    execution = "integer" if "execution=integer" in quantizer else "simulated"
    record = Record(
        state="measured",
        reason=None,
        cell=Cell(**parts),
        settings={
            "model": {"dtype": "float32"},
            "arm": {},
            "quantizer": {}
            if quantizer == "none"
            else {"execution": execution, "weight_bits": 8, "activation_bits": 8},
            "task": {},
        },
        versions={"arm": 1, "quantizer": 1, "task": 1},
        identity={f"{name}_sha256": "a" * 64 for name in ("weights", "tokenizer", "data", "calibration")},
        convention="lm-eval v1" if scores else None,
        coverage={"quantized": {}, "skipped": {}, "tied": {}, "mac_share": 0.5, "notes": []} if scores else None,
        scores=scores,
    )
    return replace(record, **changes)


@pytest.mark.slow
def test_five_thousand_rows_are_sorted_filtered_and_scrolled_with_a_few_elements(tmp_path: Path, visit: Visit) -> None:
    quantizers = ["none", *(f"rtn(group_size={size})" for size in range(1, 25))]
    values = {}
    for model in range(10):
        for arm in range(20):
            for place, quantizer in enumerate(quantizers):
                value = 0.3 + (model * 7919 + arm * 104729 + place * 1299709) % 5000 / 10_000
                one = made(quantizer, value, model=f"model-{model}", arm=f"arm_{arm}")
                one.write(tmp_path / "results")
                values[f"model-{model}", f"arm_{arm}", place] = value
    page = visit(write_site(tmp_path / "results", tmp_path / "site").index)
    assert "5,000 of 5,000 rows" in page.inner_text("#status")
    assert page.locator("#table tbody tr").count() < 60
    assert page.get_attribute("#table", "aria-rowcount") == "5001"
    page.check("#across")
    press = page.locator("#table thead button", has_text="acc")
    press.click()
    shown = sorted(values.values(), reverse=True)
    assert [float(row[4].split()[0]) for row in table_of(page)[:20]] == pytest.approx(shown[:20], abs=5e-5)
    page.evaluate("document.querySelector('#scroller').scrollTop = 1e9")
    until(page, "document.querySelector('#table tbody tr:last-child').getAttribute('aria-rowindex') === '5001'")
    assert [float(row[4].split()[0]) for row in table_of(page)[-20:]] == pytest.approx(shown[-20:], abs=5e-5)
    page.evaluate(
        "document.querySelector('#scroller').scrollTop = document.querySelector('#scroller').scrollHeight / 2"
    )
    until(
        page,
        "[...document.querySelectorAll('#table tbody tr')].some(row => row.getAttribute('aria-rowindex') === '2500')",
    )
    middle = page.locator('#table tbody tr[aria-rowindex="2500"]')
    assert float(middle.locator("a.number").inner_text().split()[0]) == pytest.approx(shown[2498], abs=5e-5)
    facet(page, "model", "model-3")
    facet(page, "arm", "arm_7", "arm_8")
    assert "50 of 5,000 rows" in page.inner_text("#status")
    assert {(row[1], row[2]) for row in table_of(page)} == {("model-3", "arm_7"), ("model-3", "arm_8")}
    again = visit(tmp_path / "site" / "index.html", page.evaluate("location.hash"))
    assert table_of(again) == table_of(page)
    page.click("#reset")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#table tbody tr").count() == 5000
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("#table tbody tr").count() < 60
