"""The site: the leaderboard, its models and arms as static pages that ask nobody for anything; knows no torch."""

from quant_bench.site.write import write_site

__all__ = ["write_site"]
