"""How each `tokenizer.ggml.pre` cuts text before byte-level BPE.

A GGUF file names its pre-tokenizer and nothing more. The chains here are those of the models' own tokenizer.json with
their normalizer, as far as they are published. llama.cpp's regexes are approximations of them: it has no normalizer and
no classes of upper and lower case. The names, and the chains of models without a published one, are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

Step = Callable[[], PreTokenizer]


@dataclass(frozen=True)
class Pre:
    """A pre-tokenizer, and what else its name says about a vocabulary.

    nfc: the model's normalizer is NFC. raw: tokens are spelled in UTF-8 with ▁ for a space, not in GPT-2's letters for
    bytes. ignore_merges: a piece that is a token as it stands is taken whole. add_bos: where the file does not say.
    """

    steps: tuple[Step, ...] = ()
    nfc: bool = False
    raw: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> PreTokenizer | None:
        """The `tokenizers` object, or None where text is not cut."""
        steps = [step() for step in self.steps]
        if not self.raw and _gpt2 not in self.steps:
            steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
        return Sequence(steps) if steps else None


def _split(regex: str, behavior: str = "isolated") -> Step:
    return lambda: Split(Regex(regex), behavior)


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _cased(number: str, suffix: str = "", only: str = "", tail: str = r"[\r\n/]*") -> str:
    """Words are upper case, then lower case letters: o200k's scheme. `only` narrows both classes of letters."""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{only}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{only}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}"
        rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+{tail}|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_digits: Step = partial(Digits, individual_digits=True)

_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = f"{_SUFFIX}|{_CL100K_WORDS}"
_QWEN2_WORDS = _CL100K_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN2 = f"{_SUFFIX}|{_QWEN2_WORDS}"
_QWEN35 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_JAIS2 = (
    _CL100K.removesuffix(r"|\s+(?!\S)|\s+")
    + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
_SEED_CODER = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    _SUFFIX + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_O200K = _cased(r"\p{N}{1,3}", _SUFFIX + "?")
_KIMI = r"[\p{Han}]+|" + _cased(r"\p{N}{1,3}", _SUFFIX + "?", r"&&[^\p{Han}]", r"[\r\n]*")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_CHINESE_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CHINESE_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = _DEEPSEEK3_WORDS + r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPARK = _DEEPSEEK3_WORDS + r"|[\r\n]|\s+(?!\S)|\s+"
# The cased letters of Unicode 11, as DeepSeek LLM's tokenizer.json spells them out.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CHINESE_JAPANESE
)
_AFMOE_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)

_GPT2_PRE = Pre((_gpt2,))
_DIGITS_PRE = Pre((_digits, _gpt2))
_CL100K_PRE = Pre((_split(_CL100K),))
_LLAMA3_PRE = replace(_CL100K_PRE, ignore_merges=True, add_bos=True)
_QWEN2_PRE = Pre((_split(_QWEN2),))
_QWEN2_NFC_PRE = replace(_QWEN2_PRE, nfc=True)
_O200K_PRE = Pre((_split(_O200K),), ignore_merges=True)
_BLOOM_PRE = Pre((_split(_BLOOM),))
_BAILING_PRE = Pre((_split(_BAILING),))
_DEEPSEEK3_PRE = Pre((_split(r"\p{N}{1,3}"), _split(_CHINESE_JAPANESE), _split(_DEEPSEEK3)))
_TINY_AYA_PRE = Pre((_split(r"\d{1,3}(?=(?:\d{3})*\b)"), _split(_O200K)))
_RAW_PRE = Pre(raw=True)

PRE: Mapping[str, Pre] = MappingProxyType(
    {
        # What llama.cpp does where a file does not name one, which old files do not.
        "default": Pre((_split(r"[\p{P}\$\+<=>\^~\|]+"), _split(_GPT2), _split(r"\p{N}+"), _split("[0-9][0-9][0-9]"))),
        "gpt-2": _GPT2_PRE,
        "phi-2": _GPT2_PRE,
        "gigachat": _GPT2_PRE,
        "a.x-4.0": _GPT2_PRE,
        "mellum": _GPT2_PRE,
        "jais": _GPT2_PRE,
        "exaone4": _GPT2_PRE,
        "trillion": _GPT2_PRE,
        "granite-docling": _GPT2_PRE,
        "mpt": replace(_GPT2_PRE, nfc=True),
        "olmo": replace(_GPT2_PRE, nfc=True),
        "modern-bert": replace(_GPT2_PRE, nfc=True),
        "smollm": _DIGITS_PRE,
        "starcoder": _DIGITS_PRE,
        "refact": _DIGITS_PRE,
        "codeshell": _DIGITS_PRE,
        "exaone": _DIGITS_PRE,
        "minerva-7b": _DIGITS_PRE,
        "mellum2": _DIGITS_PRE,
        "command-r": replace(_DIGITS_PRE, nfc=True),
        "llama-bpe": _LLAMA3_PRE,
        "llama3": _LLAMA3_PRE,
        "llama-v3": _LLAMA3_PRE,
        "falcon3": _LLAMA3_PRE,
        "falcon-h1": _LLAMA3_PRE,
        "pixtral": _LLAMA3_PRE,
        "midm-2.0": _LLAMA3_PRE,
        "lfm2": _LLAMA3_PRE,
        "jina-v5-nano": _LLAMA3_PRE,
        "dbrx": _CL100K_PRE,
        "smaug-bpe": _CL100K_PRE,
        "chatglm-bpe": _CL100K_PRE,
        "glm4": replace(_CL100K_PRE, ignore_merges=True),
        "glm5": replace(_CL100K_PRE, ignore_merges=True),
        "jais-2": Pre((_split(_JAIS2),)),
        "minicpm5": Pre((_split(r"\p{N}{1,3}"), _split(_CL100K.replace(r"\p{N}{1,3}", r"\p{N}+"))), ignore_merges=True),
        "qwen2": _QWEN2_NFC_PRE,
        "deepseek-r1-qwen": _QWEN2_NFC_PRE,
        "f2llmv2": _QWEN2_NFC_PRE,
        "megrez": _QWEN2_NFC_PRE,
        "kormo": _QWEN2_PRE,
        "stablelm2": _QWEN2_PRE,
        "hunyuan": _QWEN2_PRE,
        "solar-open": _QWEN2_PRE,
        "grok-2": _QWEN2_PRE,
        "qwen35": Pre((_split(_QWEN35),), nfc=True),
        "ufakzeka": Pre((_split(_QWEN2_WORDS),)),
        "laguna": Pre((_split(r"(?:\r?\n)+(?!\r?\n)", "merged_with_next"), _split(_QWEN2))),
        "seed-coder": Pre((_split(_SEED_CODER),)),
        "bailingmoe": _BAILING_PRE,
        "bailingmoe2": _BAILING_PRE,
        "llada-moe": _BAILING_PRE,
        "exaone-moe": Pre((_split(_EXAONE_MOE),)),
        "gpt-4o": _O200K_PRE,
        "llama4": _O200K_PRE,
        "kanana2": _O200K_PRE,
        "talkie": _O200K_PRE,
        "minimax-m2": _O200K_PRE,
        "granite-embed-multi-97m": _O200K_PRE,
        "tekken": Pre((_split(_cased(r"\p{N}")),), ignore_merges=True, add_bos=True),
        "kimi-k2": Pre((_split(_KIMI),)),
        "tiny_aya": _TINY_AYA_PRE,
        "cohere2moe": _TINY_AYA_PRE,
        "bloom": _BLOOM_PRE,
        "gpt3-finnish": _BLOOM_PRE,
        "poro-chat": _BLOOM_PRE,
        "viking": Pre((_split(_BLOOM), _digits)),
        "falcon": Pre(
            (
                partial(Punctuation, "contiguous"),
                _gpt2,
                partial(Digits, individual_digits=False),
                _split("[0-9][0-9][0-9]"),
            )
        ),
        "deepseek-llm": Pre(
            (
                _split(r"[\r\n]"),
                _split(rf"\s?[{_DEEPSEEK_LETTERS}]+"),
                _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
                _split(r"\s+$"),
                _split(_CHINESE_KOREAN),
                _digits,
            )
        ),
        "deepseek-coder": Pre(
            (_split(r"[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _split(_CHINESE_KOREAN), _digits)
        ),
        "deepseek-v3": _DEEPSEEK3_PRE,
        "hunyuan-dense": _DEEPSEEK3_PRE,
        "joyai-llm": _DEEPSEEK3_PRE,
        "hy_v4": _DEEPSEEK3_PRE,
        "spark2_5": Pre((_split(r"\p{N}{1,3}"), _split(_CHINESE_JAPANESE), _split(_SPARK), _split(r"\p{N}"))),
        "youtu": Pre((_split(_YOUTU), _split(_cased(r"\p{N}", _SUFFIX + "?"))), ignore_merges=True),
        # A number is cut into threes from its end.
        "afmoe": Pre((_split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"), _split(_AFMOE_ASIAN), _split(_DEEPSEEK3))),
        "superbpe": Pre((_split(r"\p{N}+"), _split(r"(?=(\d{3})+(?!\d))"))),
        "chameleon": Pre(
            (
                _split("<sentinel:[0-9]+>"),
                _split("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
                _split("([\t\n]|    |  )"),
                _digits,
                partial(Punctuation, "isolated"),
                _gpt2,
            ),
            add_bos=True,
        ),
        "gemma4": _RAW_PRE,
        "granite-embed-multi-311m": _RAW_PRE,
        "sarvam-moe": _RAW_PRE,
    }
)
