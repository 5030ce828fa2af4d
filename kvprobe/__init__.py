"""Where a language model's attention goes, how small its KV cache could be, and what that would cost."""

__version__ = "0.1.0"
