"""Execution on integer codes: storage, activation rules, QuantLinear, kernels and their start-up self-test; formats."""
