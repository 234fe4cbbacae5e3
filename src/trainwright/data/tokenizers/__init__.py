"""Tokenizers: bytes, BPE trained here, Hugging Face folders."""

from trainwright.data.tokenizers.base import Tokenizer, TokenizerConfig
from trainwright.data.tokenizers.hf import load_tokenizer

__all__ = ["Tokenizer", "TokenizerConfig", "load_tokenizer"]
