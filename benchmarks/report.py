"""What reading many records costs, making the leaderboard and the site of them, and using a large table.

    python benchmarks/report.py --records 10000 --rows 5000

Records are as large as those of a perplexity of a model with 210 matrices. Each step is a process of its own, from a
cold start with imports; CPU time counts the process alone, wall time whatever else the machine does. The browser's
times need chromium and playwright, and are left out without them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quant_bench.record import Cell, Record
from quant_bench.record_json import dumped
from quant_bench.score import Delta, Metric, Score
from quant_bench.site import write_site

LIMIT_READ, LIMIT_PAINT, LIMIT_FILTER = 5.0, 1.0, 0.1
STEPS = {
    "read": "records = Store.read(root).valid()",
    "leaderboard": "report.rendered(report.leaderboard(root), 'markdown')",
    "site": "from quant_bench.site import write_site; write_site(root, root.parent / 'site')",
}
SCRIPT = """
import sys, time
from pathlib import Path
from quant_bench import report
from quant_bench.record import Store
root = Path(sys.argv[1])
{step}
import json, resource
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(json.dumps([time.process_time(), time.time() - float(sys.argv[2]), peak, "torch" in sys.modules]))
"""


def template() -> dict[str, Any]:
    """A measured record as JSON."""
    names = [f"model.layers.{layer}.{part}" for layer in range(30) for part in range(7)]
    how = "W8 per channel x A8 per token, int32 accumulators by vnni tiles"
    metrics = [Metric(f"metric_{index}", "1", "lower", "exp") for index in range(5)]
    record = Record(
        state="measured",
        reason=None,
        cell=Cell("m", "softmax", "rtn", "wikitext2"),
        settings={
            "model": {"dtype": "float32", "name": "m"},
            "arm": {},
            "quantizer": {"execution": "simulated", "weight_bits": 8, "activation_bits": 8, "kv_bits": 16},
            "task": {},
        },
        versions={"arm": 1, "quantizer": 1, "task": 1},
        identity={f"{name}_sha256": "a" * 64 for name in ("weights", "tokenizer", "data", "calibration")},
        convention="P1 seq=2048 prefix=none",
        coverage={
            "quantized": {f"{name}.projection_of_this_layer": how for name in names},
            "skipped": {},
            "tied": {},
            "mac_share": 0.79,
            "notes": [],
        },
        scores=tuple(Score(metric, 20.0, 0.5, (19.0, 21.0), 148, Delta(1.0, (0.9, 1.1), "none")) for metric in metrics),
    )
    found: dict[str, Any] = json.loads(record.to_text())
    return found


def cells(count: int) -> Iterator[Cell]:
    """Different cells: ten models, twenty arms, and as many quantizers as are needed."""
    for index in range(count):
        place, arm, model = index // 200, index // 10 % 20, index % 10
        quantizer = "none" if place == 0 else f"rtn(group_size={place})"
        yield Cell(f"model-{model}", f"arm_{arm}", quantizer, "wikitext2")


def write(root: Path, count: int) -> float:
    """Write records without the schema's check, which would take minutes; megabytes written."""
    document = template()
    size = 0
    for index, cell in enumerate(cells(count)):
        document["cell"] = {name: getattr(cell, name) for name in ("model", "arm", "quantizer", "task", "seed")}
        for score in document["scores"]:
            score["value"] = 20.0 + index % 997 / 100
        path = cell.path(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        size += path.write_bytes(dumped(document).encode())
    return size / 1e6


def measure(root: Path) -> bool:
    """Print what each step takes; whether reading with the leaderboard stays within its limit."""
    within = True
    for name, step in STEPS.items():
        command = [sys.executable, "-c", SCRIPT.format(step=step), str(root), str(time.time())]
        cpu, wall, peak, torch = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        loaded = "loaded" if torch else "not loaded"
        print(f"{name:<12} {cpu:6.2f} s CPU  {wall:6.2f} s wall  {peak:5.2f} GB  torch {loaded}")
        within &= not torch and (name != "leaderboard" or cpu < LIMIT_READ)
    return within


def browse(index: Path) -> bool:
    """Print first paint and filter times of a leaderboard; whether they stay within their limits."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("browser      needs chromium and playwright")
        return True
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(index.as_uri())
        page.wait_for_timeout(500)
        paint, ready = page.evaluate(
            "[performance.getEntriesByName('first-contentful-paint')[0].startTime,"
            " performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd]"
        )
        times = page.evaluate(
            """() => [...document.querySelectorAll('[data-facet="arm"] input')].slice(0, 10).map((box) => {
              const start = performance.now();
              box.click();
              document.querySelector('#table').offsetHeight;
              return performance.now() - start;
            })"""
        )
        browser.close()
    slowest = max(times) / 1000
    print(f"first paint  {paint / 1000:6.2f} s, table ready {ready / 1000:.2f} s")
    print(f"filter       {slowest:6.3f} s, the slowest of {len(times)}")
    return bool(ready / 1000 < LIMIT_PAINT and slowest < LIMIT_FILTER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=5_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "results"
        print(f"{given.records:,} records, {write(root, given.records):,.0f} MB")
        within = measure(root)
        print(f"{given.rows:,} rows")
        write(Path(folder) / "rows", given.rows)
        within &= browse(write_site(Path(folder) / "rows", Path(folder) / "table").index)
    sys.exit(not within)


if __name__ == "__main__":
    main()
