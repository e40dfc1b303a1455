"""`python -m quant_bench` is `quant-bench`."""

from quant_bench.cli import main

main(prog_name="quant-bench")
