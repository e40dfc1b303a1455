"""The whole pipeline on a real model: perplexity, a run of many cells against separate processes, memory, storage.

    python benchmarks/pipeline.py --data DIR --windows 1024 2048 --rounds 5

1. Perplexity under integer W8A8 against float32: transformers' own forward with whole logits, and our packed path.
2. Five quantizers × four tasks in one `quant-bench run` against one process for each quantizer and task: lm-eval's `hf`
   over quanto for the lm-eval tasks and for the perplexity of the same windows, outliers by hooks and torch operations.
   quanto's `w8a8` has static ranges per tensor (calibrated on one sequence), and it has no 4-bit activations: its
   weight-only qint4 stands for both w4a4 schemes. The head stays in float everywhere.
3. Peak memory of that run. 4. Bytes of the quantized weights.

Time is CPU time (of a whole process with its children where it is one), so that other programs on the machine count
little. Without a mirror (`--data`, `QUANT_BENCH_DATA`) the text is Python's documentation, without lm-eval tasks.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline_plain import QUANTIZERS

WANTED_PERPLEXITY, WANTED_RUN, MOST_MEMORY = 1.6, 1.8, 4e9
SHARED_CACHE = ("dl", "wheels", "gguf", "digests")
Numbers = dict[str, float]


class Starter:
    """Starts processes that all have the same threads, data and cache."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        from quant_bench.cache import cache_folder
        from quant_bench.models.sources import LoadOptions, find

        self.scratch, self.user_cache = scratch, cache_folder()
        folder = find(options.model, LoadOptions()).folder
        self.has_data = bool(options.data or os.environ.get("QUANT_BENCH_DATA"))
        threads = str(options.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
        self.environment = os.environ | dict.fromkeys(names, threads)
        self.environment |= {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
        self.new_cache()
        if options.data:
            self.environment["QUANT_BENCH_DATA"] = str(options.data.resolve())
        limits = {"lambada": options.lambada, "hellaswag": options.hellaswag} if self.has_data else {}
        self.common = {
            "model": options.model,
            "folder": str(folder),
            "text": "wikitext2" if self.has_data else "python_docs",
            "limits": limits,
            "windows": options.count,
            "seq_length": options.seq_length,
            "hf_batch": options.hf_batch,
            "quantizers": list(QUANTIZERS),
        }
        self.tasks = [self.common["text"], *limits, "outliers"]

    def new_cache(self) -> None:
        """A cache with the converted model and nothing that an earlier run collected."""
        cache = Path(tempfile.mkdtemp(prefix="cache", dir=self.scratch))
        for name in SHARED_CACHE:
            (self.user_cache / name).mkdir(exist_ok=True)
            (cache / name).symlink_to(self.user_cache / name)
        self.environment["QUANT_BENCH_CACHE"] = str(cache)

    def run(self, kind: str, **asked: Any) -> tuple[Any, float, float]:
        """What a process found, its CPU seconds and its wall seconds."""
        out = self.scratch / "found.json"
        order = json.dumps(self.common | asked | {"out": str(out)})
        before, start = children(), time.perf_counter()
        script = "pipeline_plain.py" if kind in ("plain", "warm") else "pipeline_ours.py"
        command = [sys.executable, str(Path(__file__).with_name(script)), kind, order]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{kind} {asked} failed:\n{done.stderr[-3000:]}")
        return json.loads(out.read_text(encoding="ascii")), children() - before, time.perf_counter() - start


def children() -> float:
    """CPU seconds of all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def verdict(value: float, wanted: float, *, most: bool = False) -> str:
    if (value <= wanted) if most else (value >= wanted):
        return "reached"
    return f"MISSED by {abs(1 - value / wanted):.0%}"


def show_perplexity(starter: Starter, options: argparse.Namespace) -> bool:
    found, _, _ = starter.run("perplexity", sizes=options.windows, rounds=options.rounds)
    good = True
    for size, sides in found.items():
        print(f"\n1. perplexity, windows of {size} tokens, {options.rounds} rounds over the same windows, CPU time")
        times = sides["seconds"]
        for name, seconds in times.items():
            print(
                f"   {name:22} median {statistics.median(seconds):6.3f} s (from {min(seconds):.3f} to "
                f"{max(seconds):.3f}), mean loss {statistics.mean(sides['losses'][name]):.4f} nats"
            )
        for name in list(times)[:2]:
            ratio = statistics.median(a / b for a, b in zip(times[name], times["integer W8A8"], strict=True))
            good = good and ratio >= WANTED_PERPLEXITY
            print(f"   integer W8A8 against {name}: {ratio:.2f}x, wanted {WANTED_PERPLEXITY}: ", end="")
            print(verdict(ratio, WANTED_PERPLEXITY))
    return good


def our_run(starter: Starter, turn: int) -> tuple[Any, float, float, Path]:
    common, results = starter.common, starter.scratch / f"results{turn}"
    windows = f"limit={common['windows']},seq_length={common['seq_length']}"
    specs = [f"{common['text']}({windows})", f"outliers(text={common['text']},{windows})"]
    specs += [f"{task}(limit={limit})" for task, limit in common["limits"].items()]
    arguments = [common["model"], "--results", str(results)]
    arguments += [part for name in QUANTIZERS for part in ("--quantizer", name)]
    arguments += [part for spec in specs for part in ("--task", spec)]
    starter.new_cache()
    return *starter.run("ours", arguments=arguments), results


def plain_runs(starter: Starter) -> dict[tuple[str, str], tuple[Any, float, float]]:
    return {
        (name, task): starter.run("plain", quantizer=name, task=task) for name in QUANTIZERS for task in starter.tasks
    }


def show_run(starter: Starter, options: argparse.Namespace) -> tuple[bool, int]:
    """Ours and theirs take turns; the parts are told from the last round."""
    ratios, bounds = [], []
    for turn in range(options.run_rounds):
        if turn % 2:
            theirs, mine = plain_runs(starter), our_run(starter, turn)
        else:
            mine, theirs = our_run(starter, turn), plain_runs(starter)
        total = sum(cpu for _, cpu, _ in theirs.values())
        ratios.append(total / mine[1])
        # had quanto cost nothing: each of its processes takes no longer than the float one of the same task
        least = sum(min(cpu, theirs["none", task][1]) for (_, task), (_, cpu, _) in theirs.items())
        bounds.append(least / mine[1])
    found, cpu, wall, results = mine
    print(
        f"\n2. {len(QUANTIZERS)} quantizers × {', '.join(starter.tasks)}: limits {starter.common['limits']}, ", end=""
    )
    print(f"{options.count} windows of {options.seq_length}; {options.run_rounds} round(s), CPU seconds")
    print(
        f"   {'plain processes':18}"
        + "".join(task.rjust(12) for task in starter.tasks)
        + "  quanto weights, activations"
    )
    for name, scheme in QUANTIZERS.items():
        row = "".join(f"{theirs[name, task][1]:12.1f}" for task in starter.tasks)
        print(f"   {name:18}{row}  {', '.join(part or 'float' for part in scheme)}")
    walls = sum(wall for _, _, wall in theirs.values())
    stages: Counter[str] = Counter()
    for answer, _, _ in theirs.values():
        stages.update(answer["seconds"])
    print("   of all of them: " + ", ".join(f"{stage} {value:.1f}" for stage, value in stages.items()))
    print(f"   plain {total:.1f} s (wall {walls:.0f} s), one run {cpu:.1f} s (wall {wall:.0f} s)")
    ratio = statistics.median(ratios)
    print(
        f"   one run against separate processes: {ratio:.2f}x (from {min(ratios):.2f} to {max(ratios):.2f}), ", end=""
    )
    print(f"wanted {WANTED_RUN}: {verdict(ratio, WANTED_RUN)}")
    print(f"   had no quanto process taken longer than its float one: {statistics.median(bounds):.2f}x")
    agreement(results, theirs)
    show_parts(starter, found["seconds"], stages, total - cpu, cpu)
    return ratio >= WANTED_RUN, found["peak"]


def agreement(results: Path, theirs: dict[tuple[str, str], tuple[Any, float, float]]) -> None:
    """Float scores of both: a faster wrong answer is no gain."""
    print("   float scores, ours / plain: ", end="")
    shown = []
    for path in sorted(results.rglob("*.json")):
        record = json.loads(path.read_text(encoding="utf8"))
        if record["state"] != "measured":
            raise SystemExit(f"{path}: {record['state']}: {record['reason']}")
        task = record["cell"]["task"].partition("(")[0]
        if record["cell"]["quantizer"] != "none":
            continue
        for score in record["scores"]:
            other = theirs["none", task][0]["scores"].get(score["metric"])
            if other is not None:
                shown.append(f"{task} {score['metric']} {score['value']:.5g} / {other:.5g}")
    print(", ".join(shown))


def show_parts(starter: Starter, seconds: Numbers, theirs: Numbers, gap: float, cpu: float) -> None:
    """What each part saves, from timers in both, and for what is shared from a process that switches it off."""
    found, _, _ = starter.run("parts")
    asked = {name: sum(s for key, s in seconds.items() if key.startswith(f"ask {name} ")) for name in QUANTIZERS}
    integer = [name for name in QUANTIZERS if name.endswith("integer")]
    saved = {
        "one process starts instead of one a cell": theirs["start"] - seconds["start"],
        "model loaded once a quantizer": theirs["load"] - seconds["load"],
        "quantization (quanto: also calibration)": theirs["quantize"] - seconds["quantize"],
        "requests built, texts tokenized once": (len(QUANTIZERS) - 1) * seconds["requests"],
        "context shared by a question's endings": sum(f.get("alone", 0) - f.get("shared", 0) for f in found.values()),
        "one pass for perplexity and outliers": sum(f["pass"] for f in found.values()),
        "integer arithmetic against our float cells": sum(asked["none"] - asked[name] for name in integer),
    }
    stages = {key: seconds[key] for key in ("start", "load", "quantize", "requests")} | {"ask": sum(asked.values())}
    print("   our run: " + ", ".join(f"{key} {value:.1f}" for key, value in stages.items()), end="")
    print(f", rest (scores, records, distributions) {cpu - sum(stages.values()):.1f}")
    print("   our questions: " + ", ".join(f"{name} {value:.1f}" for name, value in asked.items()))
    print(f"   what each part saves of the {gap:.1f} s between plain and ours:")
    for name, value in (saved | {"the rest: quanto's products, whole logits": gap - sum(saved.values())}).items():
        print(f"      {name:46} {value:7.1f} s, {value / gap:4.0%}")
    print("   parts side by side in one process (the two windows; the endings):")
    for name, one in found.items():
        shared = f", endings alone {one['alone']:.2f} s, shared {one['shared']:.2f} s" if "alone" in one else ""
        print(f"      {name:18} windows {one['unpacked']:.2f} s, with packed float layers {one['pass']:.2f} s{shared}")
    print("\n4. storage of the quantized matrices (codes, scales, zero points) against float32")
    for name, one in found.items():
        if one["bytes"]:
            part = one["float_bytes"] / one["bytes"]
            print(
                f"   {name:18} {one['bytes'] / 1e6:7.1f} MB of {one['float_bytes'] / 1e6:.1f} MB: {part:.2f}x smaller"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, help="mirror folder")
    parser.add_argument("--windows", type=int, nargs="*", default=[1024, 2048], help="tokens, of the perplexity rounds")
    parser.add_argument("--rounds", type=int, default=5, help="of perplexity")
    parser.add_argument("--run-rounds", type=int, default=5, help="of the run against separate processes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lambada", type=int, default=8)
    parser.add_argument("--hellaswag", type=int, default=4)
    parser.add_argument("--count", type=int, default=2, help="windows of perplexity and outliers in the run")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of each of them")
    parser.add_argument("--hf-batch", type=int, default=1, help="of lm-eval's hf; its own default is 1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        starter = Starter(options, Path(scratch))
        load = os.getloadavg()
        print(f"{options.model}, {options.threads} thread(s) a process, load {load}, hf batch size {options.hf_batch}")
        if not starter.has_data:
            print("no mirror: text from Python's documentation, no lm-eval tasks")
        good = show_perplexity(starter, options) if options.windows else True
        if options.run_rounds:
            # quanto compiles once a machine
            starter.run("warm")
            fast, peak = show_run(starter, options)
            print(
                f"\n3. peak memory of our run: {peak / 1e9:.2f} GB, wanted below {MOST_MEMORY / 1e9:.0f} GB: ", end=""
            )
            print(verdict(peak, MOST_MEMORY, most=True))
            good = good and fast and peak < MOST_MEMORY
    print(f"\nCPU of all processes {children():.0f} s, load at the end {os.getloadavg()}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
