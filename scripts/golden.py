"""Golden answers: what `transformers` says for a GGUF file, in float32, on the CPU.

The truth of a golden is a heavy peer, never inferax, so nothing of inferax is imported here. The configuration is built
from the file's metadata by hand and the weights come from the `gguf` package's dequantization; transformers' own GGUF
reading is then compared with it, bitwise. tests/golden/README.md says what the result holds.

    scripts/golden smollm2 path/to/SmolLM2-135M-Instruct.Q4_1.gguf
    scripts/golden gemma3  path/to/gemma-3-270m-q4_k_m.gguf
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import hashlib
import json
import math
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import llama_cpp
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
NEW_TOKENS = 64
TOP = 8
LLAMA_CPP_PROMPTS = 5
# Decode steps whose logits are kept, counted from the first generated token.
LOGIT_STEPS = (0, 7, 31, 62)
PERPLEXITY_LIMIT = 40.0
# One pass sums in another order than decode steps do; past the tolerance of the tests it would be a fault.
ONE_PASS_LIMIT = 1e-3
ENGLISH = (
    "The history of the lighthouse is the history of people who needed to come home at night. Long before there were "
    "towers, fires were lit on the hills above a harbour, and a boy was paid to keep them burning. Later the fires "
    "were raised on platforms of stone, so that they could be seen from farther away, and the boy became a keeper with "
    "a house, a garden and a book in which he wrote down the weather. The first electric lamps made the work easier, "
    "but they did not make it less important. A ship that sees the light knows where the land is, and a ship that does "
    "not see it knows that something is wrong."
)


class GoldenError(Exception):
    """A peer disagrees with another, or a file is not what this script reads."""


def field(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    found = reader.get_field(key)
    return default if found is None else found.contents()


def llama_config(reader: gguf.GGUFReader, vocab_size: int) -> LlamaConfig:
    def get(key: str, default: Any = None) -> Any:
        return field(reader, f"llama.{key}", default)

    if any(name.startswith("llama.rope.scaling.") for name in reader.fields):
        raise GoldenError("this script does not read RoPE scaling of llama files; add it before making a golden")
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=get("attention.head_count_kv"),
        head_dim=get("rope.dimension_count"),
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": get("rope.freq_base")},
        tie_word_embeddings=True,
    )


def gemma3_config(reader: gguf.GGUFReader, vocab_size: int) -> Gemma3TextConfig:
    def get(key: str, default: Any = None) -> Any:
        return field(reader, f"gemma3.{key}", default)

    if any(name.startswith("gemma3.rope.scaling.") for name in reader.fields):
        raise GoldenError("this script does not read RoPE scaling of gemma3 files; add it before making a golden")
    layers = get("block_count")
    head_dim = get("attention.key_length")
    # The file does not say these three; they are fixed for the architecture (every sixth layer is global, the local
    # layers' RoPE base is 10,000, attention is scaled by the head width except in the 62-layer model).
    local_theta, period, query_scalar = 10_000.0, 6, head_dim
    return Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=get("attention.head_count_kv"),
        head_dim=head_dim,
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        query_pre_attn_scalar=query_scalar,
        sliding_window=get("attention.sliding_window"),
        layer_types=["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": get("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        tie_word_embeddings=True,
    )


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a llama Q or K in pairs (2i, 2i+1) -> HF's halves (i, i + E/2) of each head."""
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORM_NAMES = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def state_dict(reader: gguf.GGUFReader, arch: str, config: Any) -> dict[str, torch.Tensor]:
    """The file's tensors, dequantized by the `gguf` package to float32, under HF's names and in HF's row order."""
    names = LAYER_NAMES | NORM_NAMES[arch]
    result = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            name = f"model.layers.{layer}.{names[part]}.weight"
            if arch == "llama" and part == "attn_q":
                values = unpermute(values, config.num_attention_heads)
            elif arch == "llama" and part == "attn_k":
                values = unpermute(values, config.num_key_value_heads)
        else:
            name = f"{TOP_NAMES[stem]}.weight"
        if arch == "gemma3" and stem.endswith("norm"):
            stored = values
            values = stored - np.float32(1)
            if not np.array_equal(np.float32(1) + values, stored):
                raise GoldenError(f"{tensor.name}: 1 + (w - 1) is not w in float32, so HF's norm is not the file's")
        result[name] = torch.from_numpy(values.copy())
    return result


def load(path: Path, arch: str, vocab_size: int) -> tuple[Any, dict[str, Any]]:
    """The model by hand, and what was compared with transformers' own reading of the file."""
    reader = gguf.GGUFReader(path)
    config = (llama_config if arch == "llama" else gemma3_config)(reader, vocab_size)
    weights = state_dict(reader, arch, config)
    from_config: Any = AutoModelForCausalLM.from_config
    model = from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or missing not in ([], ["lm_head.weight"]):
        raise GoldenError(f"{path}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    if model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr():
        raise GoldenError(f"{path}: the output head is not tied to the embedding")

    # What from_pretrained(gguf_file=...) does, without the `accelerate` package that it insists on.
    read_by_transformers: Any = load_gguf_checkpoint
    peer = read_by_transformers(path, return_tensors=True, model_to_load=model)["tensors"]
    if peer.keys() != weights.keys():
        raise GoldenError(f"{path}: transformers' GGUF reading has other tensors: {peer.keys() ^ weights.keys()}")
    differing = [name for name, value in weights.items() if not torch.equal(value, peer[name])]
    if differing:
        raise GoldenError(f"{path}: transformers' GGUF reading has other values in {differing}")
    ignored = {
        "_name_or_path",
        "architectures",
        "dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
    }
    ours, other = config.to_dict(), AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    differences = {
        key: [ours.get(key), other.get(key)]
        for key in sorted((ours.keys() | other.keys()) - ignored)
        if ours.get(key) != other.get(key)
    }
    return model, {
        "weights_equal_transformers_gguf_reading": f"{len(peer)} tensors, bitwise",
        "config_differs_from_transformers_gguf_reading": differences,
    }


def shortest(values: np.ndarray) -> list[float]:
    """Doubles whose decimal text is the shortest that reads back as the same float32."""
    return [float(str(value)) for value in values.astype(np.float32)]


def render(prompt: dict[str, Any], tokenizer: Any) -> str:
    """The prompt's text: through the file's chat template, or as a plain transcript where it has none."""
    if "text" in prompt:
        return str(prompt["text"])
    if tokenizer.chat_template:
        return str(tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True))
    turns = [f"{message['role']}: {message['content']}" for message in prompt["messages"]]
    return "\n\n".join([*turns, "assistant:"])


def load_tokenizer(path: Path, pre: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if pre == "smollm":
        # transformers' GGUF reading ignores tokenizer.ggml.pre; the model's own tokenizer.json splits digits first.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def encode(text: str, tokenizer: Any, peer: llama_cpp.Llama, add_bos: bool) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    other = peer.tokenize(text.encode(), add_bos=False, special=True)
    if ids != other:
        raise GoldenError(
            f"transformers and llama.cpp encode {text[:60]!r}… differently, in {len(ids)} and {len(other)}"
        )
    return ([peer.token_bos()] if add_bos else []) + list(ids)


@torch.inference_mode()
def perplexity(model: Any, ids: list[int]) -> float:
    tokens = torch.tensor([ids])
    logits = model(tokens, use_cache=False).logits[0, :-1]
    return math.exp(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).item())


@torch.inference_mode()
def answer(model: Any, ids: list[int], eos: int, probe: np.ndarray) -> dict[str, Any]:
    """Greedy tokens with the KV cache; then one pass over the whole sequence, as a measure of the rounding."""
    tokens = torch.tensor([ids])
    # Without an end token nothing stops early: exactly NEW_TOKENS come back.
    generation_config: Any = GenerationConfig
    model.generation_config = generation_config(eos_token_id=None, pad_token_id=0)
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    steps = torch.stack([step[0] for step in out.logits]).numpy()  # [NEW_TOKENS, V]
    new = out.sequences[0, len(ids) :].tolist()
    order = np.argsort(-steps, axis=1, kind="stable")[:, :TOP]
    if len(new) != NEW_TOKENS or new != order[:, 0].tolist():
        raise GoldenError(f"generate() gave {len(new)} tokens, or not the largest logits")

    whole = model(torch.tensor([ids + new[:-1]]), use_cache=False).logits[0].numpy()  # [len(ids) + NEW_TOKENS - 1, V]
    one_pass = whole[len(ids) - 1 :]
    rounding = float(np.abs(one_pass - steps).max())
    if rounding > ONE_PASS_LIMIT:
        raise GoldenError(f"decode steps and one pass over the sequence differ by {rounding}")

    rows = {len(ids) - 1 + step: steps[step] for step in LOGIT_STEPS}
    if len(ids) > 1:
        rows[(len(ids) - 1) // 2] = whole[(len(ids) - 1) // 2]
    logits = []
    for position, row in sorted(rows.items()):
        kept = np.concatenate([np.argsort(-row, kind="stable")[:TOP], probe])
        logits.append({"position": position, "ids": kept.tolist(), "values": shortest(row[kept])})
    top2 = np.take_along_axis(steps, order[:, :2], axis=1)
    return {
        "prompt_ids": ids,
        "output_ids": new,
        "runner_up_ids": order[:, 1].tolist(),
        "margins": [round(float(margin), 6) for margin in top2[:, 0] - top2[:, 1]],
        "eos_step": new.index(eos) if eos in new else None,
        "one_pass_output_ids_equal": one_pass.argmax(1).tolist() == new,
        "one_pass_max_difference": float(f"{rounding:.3g}"),
        "logits": logits,
    }


def llama_cpp_peer(path: Path, threads: int) -> llama_cpp.Llama:
    """llama.cpp without its repacked weights: its AMX path traps where the kernel does not grant the tile registers."""
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def without_repacking() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    with mock.patch.object(llama_cpp.llama_cpp, "llama_model_default_params", without_repacking):
        return llama_cpp.Llama(str(path), n_ctx=2048, n_threads=threads, verbose=False)


def llama_cpp_top5(peer: Any, ids: list[int]) -> list[list[float]]:
    """llama.cpp's five best first tokens as [id, log-probability], in its own (quantized) arithmetic."""
    peer.reset()
    peer.eval(ids)
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(peer.ctx, -1), shape=(peer.n_vocab(),))
    logprobs = np.array(peer.logits_to_logprobs(logits))
    return [[int(i), round(float(logprobs[i]), 4)] for i in np.argsort(-logprobs)[:5]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of the golden: NAME.json.gz")
    parser.add_argument("model", type=Path, help="GGUF file, architecture llama or gemma3")
    parser.add_argument("--prompts", type=Path, default=GOLDEN / "prompts.json")
    parser.add_argument("--out", type=Path, default=GOLDEN, help="folder of the result (default: tests/golden)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging: Any = transformers_logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    reader = gguf.GGUFReader(args.model)
    arch = field(reader, "general.architecture")
    if arch not in NORM_NAMES:
        raise GoldenError(f"{args.model}: architecture {arch!r}; this script reads {', '.join(NORM_NAMES)}")
    vocab_size = len(reader.fields["tokenizer.ggml.tokens"].data)
    add_bos = bool(field(reader, "tokenizer.ggml.add_bos_token", False))
    eos = field(reader, "tokenizer.ggml.eos_token_id")
    pre = field(reader, "tokenizer.ggml.pre", "")
    del reader

    tokenizer = load_tokenizer(args.model, pre)
    peer = llama_cpp_peer(args.model, args.threads)
    model, checks = load(args.model, arch, vocab_size)
    checks["perplexity_of_english_paragraph"] = round(
        perplexity(model, encode(ENGLISH, tokenizer, peer, add_bos=add_bos)), 3
    )
    if not checks["perplexity_of_english_paragraph"] < PERPLEXITY_LIMIT:
        raise GoldenError(f"{args.model}: perplexity {checks['perplexity_of_english_paragraph']} on plain English")

    probe = np.sort(np.random.default_rng(16).choice(vocab_size, 16, replace=False))
    prompts: list[dict[str, Any]] = []
    for prompt in json.loads(args.prompts.read_text())["prompts"]:
        text = render(prompt, tokenizer)
        ids = encode(text, tokenizer, peer, add_bos)
        made = {"name": prompt["name"], "text": text, "messages": prompt.get("messages")}
        made |= answer(model, ids, eos, probe)
        if len(prompts) < LLAMA_CPP_PROMPTS:
            made["llama_cpp_top5"] = llama_cpp_top5(peer, ids)
        prompts.append(made)
        print(
            f"{made['name']:24} {len(ids):5} tokens  smallest margin {min(made['margins']):9.6f}  "
            f"one pass within {made['one_pass_max_difference']:.1e}, tokens equal {made['one_pass_output_ids_equal']}  "
            f"{tokenizer.decode(made['output_ids'])[:60]!r}",
            flush=True,
        )

    packages = ("transformers", "torch", "gguf", "tokenizers", "numpy", "llama_cpp_python")
    golden = {
        "format": 1,
        "name": args.name,
        "model": {
            "file": args.model.name,
            "bytes": args.model.stat().st_size,
            "sha256": hashlib.sha256(args.model.read_bytes()).hexdigest(),
        },
        "made": {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": f"scripts/golden {args.name} {args.model.name}",
            "python": platform.python_version(),
            "machine": platform.machine(),
            **{package: version(package) for package in packages},
        },
        "checks": checks,
        "add_bos": add_bos,
        "prompts": prompts,
    }
    data = json.dumps(golden, ensure_ascii=False, separators=(",", ":")).encode()
    out = args.out / f"{args.name}.json.gz"
    out.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{out}: {out.stat().st_size} bytes; {json.dumps(checks)}")


if __name__ == "__main__":
    try:
        main()
    except GoldenError as error:
        sys.exit(f"golden: {error}")
