"""Unigram or BPE trained by SentencePiece on the run's own training split, as Llama 2, Mistral and Gemma have it.

Pieces are strings of characters; white space is the mark U+2581; characters that are too rare for the vocabulary fall
back to their bytes. The trained model is turned into a tokenizer.json of the `tokenizers` library, with equal ids, so
that training a model, exporting it and transformers need no SentencePiece.

Kudo and Richardson, arXiv:1808.06226. Unlike its defaults, text is not normalised and gets no space in front, so that
decoding is exact, except for U+2581 itself, which becomes a space. Training reads lines: a line feed is a byte piece.

Needs: pip install 'trainwright[sentencepiece]'.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import Field

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import register
from trainwright.data.tokenizers._trained import BOS, EOS, PAD, TrainedTokenizerConfig

MARK = "\u2581"
UNK = "<unk>"
# Longer lines are cut, at a space where there is one; SentencePiece would drop them.
LINE_BYTES = 4096


def train_sentencepiece(
    texts: Iterable[str],
    vocab_size: int,
    kind: Literal["unigram", "bpe"] = "unigram",
    character_coverage: float = 0.9995,
    special_tokens: Iterable[str] = (),
) -> Any:
    """The trained ``sentencepiece.SentencePieceProcessor``; ids 0 to 3 are EOS, BOS, padding and unknown.

    Raises DataError where SentencePiece refuses, for example a vocabulary that does not hold the alphabet.
    """
    try:
        import sentencepiece
    except ModuleNotFoundError:
        raise ConfigError("needs: pip install 'trainwright[sentencepiece]'", key="tokenizer.name") from None
    special = [EOS, BOS, PAD, *(t for t in special_tokens if t not in (EOS, BOS, PAD))]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=kind,
            character_coverage=character_coverage,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            split_digits=True,
            hard_vocab_limit=False,
            max_sentence_length=2 * LINE_BYTES,
            eos_id=0,
            bos_id=1,
            pad_id=2,
            unk_id=3,
            eos_piece=EOS,
            bos_piece=BOS,
            pad_piece=PAD,
            unk_piece=UNK,
            control_symbols=special[3:],
            # See as_backend: text that spells a special token must have another cut.
            required_chars="".join(sorted({c for t in [*special, UNK] for c in t if not c.isspace()})),
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"tokenizer sentencepiece: vocab_size={vocab_size} cannot be trained ({reason})") from None
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def as_backend(processor: Any) -> Any:
    """A ``tokenizers.Tokenizer`` with the pieces and ids of a SentencePiece model that this module trained."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    size = processor.get_piece_size()
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(size)]
    control = [processor.id_to_piece(i) for i in range(size) if processor.is_control(i) or processor.is_unknown(i)]
    ordinary = {processor.id_to_piece(i) for i in range(size) if not processor.is_byte(i)} - set(control)
    model: Any
    # Scores of a BPE are minus the rank of the piece's merge, whole numbers; those of a Unigram are log-probabilities.
    if all(score == round(score) for _, score in pieces):
        ids = {piece: i for i, (piece, _) in enumerate(pieces)}
        model = models.BPE(ids, _merges(ordinary, ids), unk_token=UNK, fuse_unk=True, byte_fallback=True)
    else:
        # In `tokenizers` special tokens are pieces as any other. Below what their letters cost together, text that
        # spells one is never cut as it; no other cut depends on it.
        lowest = min(score for _, score in pieces)
        never = lowest * (max(map(len, control)) + 1) - 1
        pieces = [(piece, never if piece in control else score) for piece, score in pieces]
        model = models.Unigram(pieces, unk_id=processor.unk_id(), byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(control)
    return backend


def _merges(pieces: set[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece, by the rank of what they make: SentencePiece merges by that alone."""
    found = []
    for piece in pieces:
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        found += [(ids[piece], ids[a], ids[b], (a, b)) for a, b in pairs if a in pieces and b in pieces]
    return [pair for *_, pair in sorted(found)]


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.splitlines():
            while len(line.encode()) > LINE_BYTES:
                head = line.encode()[:LINE_BYTES].decode(errors="ignore")
                cut = head.rfind(" ")
                head = head[:cut] if cut > 0 else head
                yield head
                line = line[len(head) :]
            if line and "\0" not in line:  # which SentencePiece refuses
                yield line


@register("tokenizer", "sentencepiece", paper="arXiv:1808.06226", seed_id="B022")
class SentencePieceConfig(TrainedTokenizerConfig):
    """Unigram or BPE over characters with byte fallback, trained by SentencePiece (extra `sentencepiece`)."""

    kind: Literal["unigram", "bpe"] = Field("unigram", description="Algorithm.")
    character_coverage: float = Field(
        0.9995, gt=0, le=1, description="Share of the text's characters that get a piece; the rest falls back to bytes."
    )

    def train(self, texts: list[str]) -> Any:
        return as_backend(
            train_sentencepiece(texts, self.vocab_size, self.kind, self.character_coverage, self.special_tokens)
        )
