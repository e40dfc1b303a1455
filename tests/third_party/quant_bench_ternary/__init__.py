"""Ternary weights for quant-bench."""
