"""CPU-free LLM serving, readable: after Blink (arXiv 2604.07609), in Python and Numba."""

__version__ = "0.1.0"
