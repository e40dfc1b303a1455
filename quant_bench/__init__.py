"""quant-bench: does this language model survive W8A8 and W4A4, and why?"""

__version__ = "0.1.0"
