"""Tiny random models of every family, made by transformers: the truth for logits and greedy tokens.

`cases()` turns on every configuration feature that a family has, one or two at a time. `save_hf` and `write_gguf` store
a model the way the world does, without inferax having a part in it; tests/test_tiny_models.py holds `write_gguf` to
llama.cpp.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

# Room for every case: RoPE kinds that depend on the length switch at 32 tokens, windows are 16 or 24 wide.
SEQUENCE = 96
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True)
class TinyCase:
    """One configuration of a family.

    `family` is the HF `model_type`. `build` makes the model, always with the same weights: float32, eager attention,
    eval mode. `not_in_gguf` says why GGUF, as llama.cpp writes and reads it, cannot carry the case (None: it can).
    `length_dependent`: RoPE frequencies follow the length of the sequence, so that with a KV cache transformers' answer
    depends on how the sequence was fed.
    """

    name: str
    family: str
    build: Callable[[], PreTrainedModel]
    not_in_gguf: str | None = None
    length_dependent: bool = False

    def __repr__(self) -> str:
        return self.name


CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3_text": Gemma3TextConfig,
}
# All matrix widths are multiples of 32, so that every 32-wide block type can quantize them.
BASE: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILY_BASE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
GEMMA_SIX = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"]
SHORT_FACTOR = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0]
LONG_FACTOR = [1.0, 1.3, 1.9, 2.7, 3.6, 4.8, 6.1, 8.0]


def _yarn(**more: Any) -> dict[str, Any]:
    # A small base and few rotations, so that the ramp between the two kinds of frequencies lies inside 8 of them.
    base = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
    return base | {"beta_fast": 4.0, "beta_slow": 1.0} | more


def _longrope(**more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 32}
    return base | {"short_factor": SHORT_FACTOR, "long_factor": LONG_FACTOR} | more


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
NO_DYNAMIC = "llama.cpp has no dynamic NTK scaling"
NO_WINDOW = "llama.cpp has no sliding window for this architecture"
NO_FACTORS = "llama.cpp reads per-frequency factors only for the llama architecture"
# name -> (rope_parameters, other settings, why not in GGUF for llama, and for the others)
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None, str | None]] = {
    "theta": ({"rope_type": "default", "rope_theta": 500.0}, {}, None, None),
    "linear": ({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}, {}, None, None),
    "dynamic": (
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        {"max_position_embeddings": 32},
        NO_DYNAMIC,
        NO_DYNAMIC,
    ),
    "yarn": (_yarn(), {}, None, None),
    "llama3": (LLAMA3, {}, None, NO_FACTORS),
    "longrope": (_longrope(factor=4.0), {}, None, NO_FACTORS),
}
MORE_ROPES: dict[str, tuple[dict[str, Any], str | None]] = {
    "yarn-default-betas": (
        {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32},
        None,
    ),
    "yarn-attention-factor": (_yarn(attention_factor=0.8), None),
    "yarn-mscale-all-dim": (_yarn(mscale=1.0, mscale_all_dim=0.6), None),
    "yarn-mscale": (_yarn(mscale=0.7, mscale_all_dim=1.3), None),
    "yarn-no-truncate": (_yarn(truncate=False), "llama.cpp always truncates the range of the ramp"),
    # Without a factor the ratio of the two lengths counts for the attention factor.
    "longrope-no-factor": (_longrope(), None),
    "longrope-attention-factor": (_longrope(factor=4.0, attention_factor=1.3), None),
}


def cases() -> list[TinyCase]:
    """Every case, the same at each call."""
    return list(_cases())


def _cases() -> Iterator[TinyCase]:
    def case(family: str, feature: str, not_in_gguf: str | None = None, **settings: Any) -> TinyCase:
        name = f"{family}/{feature}"
        rope = settings.get("rope_parameters") or {}
        kinds = {inner.get("rope_type") for inner in (rope, *rope.values()) if isinstance(inner, dict)}
        dependent = bool(kinds & {"dynamic", "longrope"})
        config = BASE | FAMILY_BASE[family] | settings
        return TinyCase(name, family, functools.partial(_build, name, family, config), not_in_gguf, dependent)

    for family in ("llama", "mistral", "qwen2", "qwen3"):
        yield case(family, "gqa")
        yield case(family, "tied", tie_word_embeddings=True)
        for rope, (parameters, settings, llama_reason, reason) in ROPES.items():
            in_llama = family in ("llama", "mistral")
            yield case(
                family, f"rope-{rope}", llama_reason if in_llama else reason, rope_parameters=parameters, **settings
            )

    for rope, (parameters, reason) in MORE_ROPES.items():
        yield case("llama", f"rope-{rope}", reason, rope_parameters=parameters)
    # llama.cpp chooses the factors by the context that it allots, at least 256; transformers by the sequence.
    short = _longrope(factor=1.0, original_max_position_embeddings=512)
    yield case("llama", "rope-longrope-short", rope_parameters=short, max_position_embeddings=512)
    yield case("llama", "mha", num_key_value_heads=4)
    yield case("llama", "mqa-three-layers", num_key_value_heads=1, num_hidden_layers=3)
    yield case("llama", "wide-heads", head_dim=32)
    yield case("llama", "narrow-heads", head_dim=8)
    yield case("llama", "attention-bias", attention_bias=True)
    yield case("llama", "mlp-bias", mlp_bias=True)
    yield case("llama", "all-biases-tied", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    yield case("llama", "large-eps", rms_norm_eps=0.05)
    yield case("llama", "odd-vocab", vocab_size=277)
    yield case("llama", "odd-vocab-tied", vocab_size=301, tie_word_embeddings=True)
    yield case("llama", "small-vocab", "fewer tokens than bytes", vocab_size=131)
    yield case("llama", "gelu", "llama.cpp's llama has SiLU only", hidden_act="gelu")

    yield case("mistral", "window", NO_WINDOW, sliding_window=24)
    yield case(
        "mistral", "window-mqa-tied", NO_WINDOW, sliding_window=16, num_key_value_heads=1, tie_word_embeddings=True
    )
    yield case("mistral", "wide-heads", head_dim=32)

    yield case("qwen2", "mqa", num_key_value_heads=1)
    yield case("qwen2", "large-eps", rms_norm_eps=0.05, vocab_size=263)
    window = {"use_sliding_window": True, "sliding_window": 24}
    yield case("qwen2", "window-from-layer-1", NO_WINDOW, **window, max_window_layers=1, num_hidden_layers=3)
    yield case("qwen2", "window-all-layers", NO_WINDOW, **window, max_window_layers=0)
    yield case("qwen2", "window-layer-types", NO_WINDOW, **window, layer_types=["sliding_attention", "full_attention"])
    # A window in the file that use_sliding_window turns off.
    yield case("qwen2", "window-off", use_sliding_window=False, sliding_window=16, max_window_layers=0)

    yield case("qwen3", "wide-heads", head_dim=32)
    yield case("qwen3", "mha", num_key_value_heads=4)
    yield case("qwen3", "attention-bias", "llama.cpp's qwen3 has no attention biases", attention_bias=True)
    yield case("qwen3", "large-eps", rms_norm_eps=0.05, vocab_size=277)
    yield case("qwen3", "window-from-layer-1", NO_WINDOW, **window, max_window_layers=1, num_hidden_layers=3)

    yield from _gemma3_cases(case)


def _gemma3_cases(case: Callable[..., TinyCase]) -> Iterator[TinyCase]:
    local: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    family = "gemma3_text"

    def rope(full: dict[str, Any], sliding: dict[str, Any] = local) -> dict[str, Any]:
        return {"full_attention": {"rope_theta": 1e6} | full, "sliding_attention": sliding}

    yield case(family, "two-to-two")
    yield case(family, "six-to-one", num_hidden_layers=7, layer_types=GEMMA_SIX)
    yield case(family, "all-sliding", layer_types=["sliding_attention"] * 4)
    yield case(family, "mqa-wide-heads", num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32)
    yield case(family, "query-scalar", "the format has no query scale for gemma3", query_pre_attn_scalar=40)
    yield case(family, "final-softcap", final_logit_softcapping=3.0)
    # transformers' Gemma 3 keeps this setting of Gemma 2 but does not use it.
    yield case(family, "attention-softcap-unused", attn_logit_softcapping=2.0)
    yield case(family, "attention-bias", "llama.cpp's gemma3 has no attention biases", attention_bias=True)
    yield case(family, "untied", tie_word_embeddings=False)
    yield case(family, "large-eps-odd-vocab", rms_norm_eps=0.05, vocab_size=293)
    yield case(family, "rope-linear", rope_parameters=rope({"rope_type": "linear", "factor": 8.0}))
    yield case(
        family,
        "rope-theta",
        rope_parameters=rope({"rope_type": "default", "rope_theta": 2e3}, local | {"rope_theta": 300.0}),
    )
    yield case(family, "rope-yarn", rope_parameters=rope(_yarn()))
    yield case(family, "rope-llama3", NO_FACTORS, rope_parameters=rope(LLAMA3))
    yield case(family, "rope-longrope", NO_FACTORS, rope_parameters=rope(_longrope(factor=4.0)))
    dynamic = rope({"rope_type": "dynamic", "factor": 4.0})
    yield case(family, "rope-dynamic", NO_DYNAMIC, rope_parameters=dynamic, max_position_embeddings=32)


def _build(name: str, family: str, settings: dict[str, Any]) -> PreTrainedModel:
    config = CONFIGS[family](**copy.deepcopy(settings))
    from_config: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng():  # the constructors draw from the global generator
        model = from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_random(parameter_name, parameter.shape, model.config, generator))
    generation_config: Any = GenerationConfig
    model.generation_config = generation_config(eos_token_id=None, pad_token_id=0)
    result: PreTrainedModel = model.eval()
    return result


def _random(name: str, shape: torch.Size, config: PreTrainedConfig, generator: torch.Generator) -> torch.Tensor:
    """Weights that keep activations near 1, attention uneven and logits near ±2; norms and biases that matter."""
    normal = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 0.3 * normal.clamp(-2, 2) + (0.0 if config.model_type == "gemma3_text" else 1.0)
    if name.endswith(".bias"):
        return 0.3 * normal
    if "lm_head" in name or ("embed_tokens" in name and config.tie_word_embeddings):
        return 2.0 / math.sqrt(shape[1]) * normal
    if "embed_tokens" in name:
        return (0.2 if config.model_type == "gemma3_text" else 1.0) * normal
    gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
    return gain / math.sqrt(shape[1]) * normal


def token_batch(vocab_size: int, batch: int = 2, length: int = SEQUENCE, seed: int = 0) -> npt.NDArray[np.int32]:
    """Random tokens [batch, length] without the special ones."""
    rng = np.random.default_rng(seed)
    return rng.integers(len(SPECIAL_TOKENS), vocab_size, (batch, length), dtype=np.int32)


def _forget_length(model: PreTrainedModel) -> None:
    """Dynamic RoPE keeps the frequencies of the longest sequence seen; a reference must not depend on the last call."""
    decoder: Any = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Logits [B, L, V] float32 of tokens [B, L]: one pass, no cache, no padding."""
    _forget_length(model)
    logits: torch.Tensor = model(torch.as_tensor(np.asarray(tokens), dtype=torch.long), use_cache=False).logits
    result: npt.NDArray[np.float32] = logits.float().numpy()
    return result


def greedy(model: PreTrainedModel, ids: list[int], n: int, *, use_cache: bool = True) -> list[int]:
    """Exactly `n` greedy tokens after `ids`, by transformers' `generate`; no token ends the answer."""
    _forget_length(model)
    tokens = torch.tensor([ids])
    generate: Any = model.generate
    out = generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=n, use_cache=use_cache
    )
    new: list[int] = out[0, len(ids) :].tolist()
    if len(new) != n:
        raise RuntimeError(f"transformers made {len(new)} tokens instead of {n}")
    return new


# -- vocabulary


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2), in the order of the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def vocabulary(vocab_size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of a byte-level BPE of that size: special tokens, the bytes, then pairs of letters."""
    pairs = [(first, second) for first in "Ġetaoin" for second in "shrdlucm"]
    base = [*SPECIAL_TOKENS, *_byte_characters()]
    merges = pairs[: vocab_size - len(base)]
    if not merges or len(base) + len(merges) != vocab_size:
        raise ValueError(
            f"a byte-level vocabulary here has {len(base) + 1} to {len(base) + len(pairs)} tokens, not {vocab_size}"
        )
    return base + [first + second for first, second in merges], merges


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """The `tokenizers` object of `vocabulary(vocab_size)`; it adds no special tokens by itself."""
    tokens, merges = vocabulary(vocab_size)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


# -- Hugging Face directories


def save_hf(
    model: PreTrainedModel,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    max_shard_size: str = "5GB",
    legacy_config: bool = False,
) -> None:
    """A Hugging Face directory: config.json, safetensors in `dtype`, and a tokenizer if the vocabulary has all bytes.

    `legacy_config` writes RoPE as files before transformers 5 have it: `rope_theta` and `rope_scaling` (for Gemma 3
    also `rope_local_base_freq` and, where it fits, `sliding_window_pattern` in place of `layer_types`).
    """
    stored: Any = copy.deepcopy(model)
    stored.to(dtype)
    stored.save_pretrained(directory, max_shard_size=max_shard_size)
    vocab_size = int(model.config.vocab_size)
    if vocab_size > len(SPECIAL_TOKENS) + 256:
        tiny_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": SPECIAL_TOKENS[0],
            "bos_token": SPECIAL_TOKENS[1],
            "eos_token": SPECIAL_TOKENS[2],
            "chat_template": CHAT_TEMPLATE,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if legacy_config:
        path = directory / "config.json"
        path.write_text(json.dumps(_legacy(json.loads(path.read_text())), indent=2))


def _legacy(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        types = config["layer_types"]
        period = types.index("full_attention") + 1 if "full_attention" in types else 0
        if period and all((kind == "full_attention") == ((i + 1) % period == 0) for i, kind in enumerate(types)):
            del config["layer_types"]
            config["sliding_window_pattern"] = period
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    return config


# -- GGUF

ARCHES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def write_gguf(model: PreTrainedModel, path: Path, qtype: str = "F32") -> None:
    """The model as llama.cpp's converter would write it: matrices in `qtype`, norms, biases and factors in F32.

    Where the type is not F32 the file holds other weights than the model; `load_gguf_weights` gives those back to it.
    Raises ValueError for a vocabulary smaller than the bytes, and what the `gguf` package raises for a type that it
    cannot quantize or a width that is no multiple of the block.
    """
    config: Any = model.config
    arch = ARCHES[config.model_type]
    writer = GGUFWriter(path, arch)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    ggml_type = GGMLQuantizationType[qtype]
    writer.add_name(f"tiny {config.model_type}")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_file_type({"F32": 0, "F16": 1}.get(qtype, 7))
    head_dim = _head_dim(config)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if arch == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        if config.final_logit_softcapping is not None:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _add_rope_scaling(writer, rope, config)
    _add_vocabulary(writer, config.vocab_size)

    for name, factors in _rope_factors(rope, head_dim).items():
        writer.add_tensor(name, factors)
    for name, values in gguf_tensors(model).items():
        if values.ndim == 1 or qtype == "F32":
            writer.add_tensor(name, values)
        else:
            data = gguf.quants.quantize(values, ggml_type)
            writer.add_tensor(name, data, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_gguf_weights(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """A copy of the model with the weights of the file that `write_gguf` made of it, dequantized by `gguf`."""
    result = copy.deepcopy(model)
    state = result.state_dict()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        for name, (hf_name, heads, offset) in _gguf_names(model).items():
            tensor = tensors[name]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if heads:
                values = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            state[hf_name].copy_(torch.from_numpy(values - np.float32(offset)))
    return result


def gguf_tensors(model: PreTrainedModel) -> dict[str, npt.NDArray[np.float32]]:
    """The model's weights under GGUF's names, in GGUF's row order and with GGUF's norm weights."""
    state = model.state_dict()
    tensors = {}
    for name, (hf_name, heads, offset) in _gguf_names(model).items():
        values = state[hf_name].float().numpy()
        if heads:
            # Each head's halves (i, i + E/2) become neighbours (2i, 2i + 1).
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        tensors[name] = np.ascontiguousarray(values + np.float32(offset))
    return tensors


def _gguf_names(model: PreTrainedModel) -> dict[str, tuple[str, int, float]]:
    """GGUF name -> HF name, number of heads whose rows are permuted (0: none), and what is added to the values."""
    config: Any = model.config
    arch = ARCHES[config.model_type]
    name_map = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch), config.num_hidden_layers
    )
    names: dict[str, tuple[str, int, float]] = {}
    for hf_name in model.state_dict():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = name_map.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"the gguf package knows no name for {hf_name} in {arch}")
        heads = 0
        if arch == "llama" and ".q_proj." in hf_name:
            heads = config.num_attention_heads
        elif arch == "llama" and ".k_proj." in hf_name:
            heads = config.num_key_value_heads
        names[name] = (hf_name, heads, 1.0 if arch == "gemma3" and "norm" in hf_name else 0.0)
    return names


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add_rope_scaling(writer: GGUFWriter, rope: dict[str, Any], config: Any) -> None:
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if "beta_slow" in rope:
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        attention = rope.get("attention_factor")
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        if attention is None and mscale and all_dim:
            attention = (1 + 0.1 * mscale * math.log(rope["factor"])) / (1 + 0.1 * all_dim * math.log(rope["factor"]))
        if attention is not None:
            # llama.cpp multiplies its own YaRN magnitude with attn_factor, where HF's attention factor replaces it. Of
            # these architectures it reads yarn_log_multiplier for none.
            writer.add_rope_scaling_attn_factors(attention / (1 + 0.1 * math.log(rope["factor"])))
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        factor = rope.get("factor") or config.max_position_embeddings / original
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or default)


def _rope_factors(rope: dict[str, Any], head_dim: int) -> dict[str, npt.NDArray[np.float32]]:
    """Tensors of divisors of the rotary frequencies, [E / 2] each."""
    if rope["rope_type"] == "longrope":
        return {
            "rope_factors_long.weight": np.array(rope["long_factor"], np.float32),
            "rope_factors_short.weight": np.array(rope["short_factor"], np.float32),
        }
    if rope["rope_type"] == "llama3":
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        rotations = original / (2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim))
        smooth = np.clip((rotations - low) / (high - low), 0, 1)
        return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)}
    return {}


def _add_vocabulary(writer: GGUFWriter, vocab_size: int) -> None:
    tokens, merges = vocabulary(vocab_size)
    special = len(SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * special + [TokenType.NORMAL] * (vocab_size - special))
    writer.add_token_merges([f"{first} {second}" for first, second in merges])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
