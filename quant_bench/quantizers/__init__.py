"""Built-in and third-party quantizers; asked for through `quant_bench.registry`, never imported by path."""

from quant_bench._roots import plugin_folders

__path__ = plugin_folders("quantizers")
