"""Vocabularies for tests: goldens, metadata of real files, and small SentencePiece models as GGUF metadata."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.corpus import corpus

GOLDEN = Path(__file__).parents[1] / "golden"
FILE = Path("vocab.gguf")
SPACE = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]


@cache
def golden(name: str) -> dict[str, Any]:
    """tests/golden/tokenizer_NAME.json, whose corpus has to be ours."""
    values: dict[str, Any] = json.loads((GOLDEN / f"tokenizer_{name}.json").read_text(encoding="utf-8"))
    assert values["corpus_sha256"] == hashlib.sha256("\0".join(corpus()).encode()).hexdigest()
    return values


def split_digests(text: str) -> list[str]:
    return [text[start : start + 8] for start in range(0, len(text), 8)]


def superword_metadata(pre: str) -> dict[str, Any]:
    """Byte-level BPE whose merges cross all borders of words, so that each cut of a pre-tokenizer shows."""
    merges = golden("pre")["merges"]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }


def train_sentencepiece(texts: Iterable[str], **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A small SentencePiece model, trained here."""
    model = io.BytesIO()
    defaults: dict[str, Any] = {"vocab_size": 1200, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(list(texts)), model_writer=model, **(defaults | options)
    )
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.getvalue())
    return processor


def sentencepiece_metadata(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """The same model as GGUF metadata, the way llama.cpp's converter writes it."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(processor.serialized_model_proto())
    unigram = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
    normalizer = proto.normalizer_spec
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "t5" if unigram else "llama",
        "tokenizer.ggml.tokens": [
            piece.piece.replace(SPACE, " ") if piece.type == piece.USER_DEFINED else piece.piece
            for piece in proto.pieces
        ],
        "tokenizer.ggml.scores": np.array([piece.score for piece in proto.pieces], np.float32),
        "tokenizer.ggml.token_type": np.array([piece.type for piece in proto.pieces], np.int32),
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": normalizer.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
    }
    if normalizer.precompiled_charsmap:
        charsmap = np.frombuffer(normalizer.precompiled_charsmap, np.uint8)
        metadata["tokenizer.ggml.precompiled_charsmap"] = charsmap
    return metadata


def gguf_sentencepiece(metadata: Mapping[str, Any]) -> sentencepiece.SentencePieceProcessor:
    """The sentencepiece library over a GGUF file's BPE vocabulary: what the model was trained with."""
    proto = sentencepiece_model_pb2.ModelProto()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    unk = metadata["tokenizer.ggml.unknown_token_id"]
    for index, (token, score) in enumerate(
        zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"].tolist(), strict=True)
    ):
        piece = proto.pieces.add()
        piece.type = piece.UNKNOWN if index == unk else types[index]
        spaces = piece.type == piece.USER_DEFINED and len(token) > 1 and not token.strip(" ")
        piece.piece = SPACE * len(token) if spaces else token
        piece.score = 0.0 if piece.type == piece.USER_DEFINED else score
    spec = proto.trainer_spec
    spec.model_type, spec.byte_fallback, spec.vocab_size = spec.BPE, True, len(proto.pieces)
    for name, key in (("unk", "unknown"), ("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        index = metadata[f"tokenizer.ggml.{key}_token_id"]
        setattr(spec, f"{name}_id", index)
        setattr(spec, f"{name}_piece", proto.pieces[index].piece)
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = metadata["tokenizer.ggml.add_space_prefix"]
    proto.normalizer_spec.remove_extra_whitespaces = False
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(proto.SerializeToString())
    return processor


def byte_level() -> tokenizers.Tokenizer:
    """As of Llama 3: a Split, ByteLevel, BOS by the post-processor."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus(300), trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As of Llama 2: spaces are U+2581, bytes are tokens, one space is put before each text."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=200,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(300), trainer)
    # The trainer makes special tokens of the bytes, which they are not.
    source = json.loads(tokenizer.to_str())
    source["added_tokens"] = source["added_tokens"][: len(SPECIAL)]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(source))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """A decoder that looks at neighbours."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=1500, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(corpus(300), trainer)
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """As of T5: unigram, with a decoder for which the first token is another."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=1000, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    # The trainer would learn the special tokens' texts, and have them twice.
    tokenizer.train_from_iterator([text for text in corpus(300) if "<" not in text], trainer)
    return tokenizer
