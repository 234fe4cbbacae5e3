import importlib.util
import json
from pathlib import Path

import pytest


def _load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def templates():
    return _load("chat_templates")


@pytest.fixture(scope="session")
def chatml(tmp_path_factory, templates):
    """``chatml(template)``: a small byte-level BPE with merges and the marks of ChatML, as a folder's tokenizer."""
    from trainwright.data.tokenizers._fast import FastTokenizer, hf_config
    from trainwright.data.tokenizers.bpe import train_bpe

    text = " ".join(f"hello world, what is {i} plus {i}? The answer is {2 * i}.\n" for i in range(200))
    backend = train_bpe([text], 400, special_tokens=["<|end|>", "<|bos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"])

    def make(template=templates.CHATML):
        import tokenizers

        own = tokenizers.Tokenizer.from_str(backend.to_str())
        return FastTokenizer(own, hf_config("<|im_end|>", "<|bos|>", "<|pad|>", template))

    return make


@pytest.fixture
def rows_file(tmp_path):
    """``rows_file(rows)`` -> path of a JSON Lines file."""

    def write(rows, name="chats.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
        return str(path)

    return write
