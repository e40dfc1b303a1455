"""The commands of `quant-bench`, one a file; none needs torch before it runs."""
