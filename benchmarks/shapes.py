"""Real-world shapes of the ops: one list that tests and benchmarks share.

Widths are those of published models' configs. `scaled` keeps a model's head geometry and divides the rest, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ModelShape:
    """The widths of one model, in elements; `window` in tokens (None: full attention only)."""

    name: str
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    norm_eps: float
    theta: float
    window: int | None = None
    qk_norm: bool = False

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def scaled(self, divisor: int, *, kv_heads: int | None = None, vocab_size: int | None = None) -> ModelShape:
        """The same head width and heads per kv head, with `kv_heads` kv heads and the other widths divided."""
        kv = kv_heads or self.num_kv_heads
        return replace(
            self,
            name=f"{self.name}/{divisor}",
            width=self.width // divisor,
            num_heads=self.num_heads // self.num_kv_heads * kv,
            num_kv_heads=kv,
            mlp_width=self.mlp_width // divisor,
            vocab_size=vocab_size or self.vocab_size // divisor,
        )


SMOLLM2_135M = ModelShape("smollm2-135m", 576, 9, 3, 64, 1536, 49_152, 1e-5, 1e5)
GEMMA3_270M = ModelShape("gemma3-270m", 640, 4, 1, 256, 2048, 262_144, 1e-6, 1e6, window=512, qk_norm=True)
LLAMA3_8B = ModelShape("llama3-8b", 4096, 32, 8, 128, 14_336, 128_256, 1e-5, 5e5)
QWEN3_0_6B = ModelShape("qwen3-0.6b", 1024, 16, 8, 128, 3072, 151_936, 1e-6, 1e6, qk_norm=True)

MODELS = (SMOLLM2_135M, GEMMA3_270M, LLAMA3_8B, QWEN3_0_6B)


@dataclass(frozen=True)
class RaggedShape:
    """A ragged batch: for each sequence, how many tokens are cached already and how many are new."""

    name: str
    chunks: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.chunks)

    @property
    def longest(self) -> int:
        return max((cached + new for cached, new in self.chunks), default=0)


# Short enough for a test, yet each crosses pages and windows.
EMPTY = RaggedShape("empty", ())
ONE_ROW = RaggedShape("one-row", ((0, 1),))
ONE_LATE_ROW = RaggedShape("one-late-row", ((37, 1),))
DECODE = RaggedShape("decode", ((33, 1), (0, 1), (15, 1), (16, 1), (46, 1)))
PREFILL = RaggedShape("prefill", ((0, 37),))
MIXED = RaggedShape("mixed", ((33, 1), (0, 13), (16, 16), (5, 3), (47, 1)))

# What an engine runs.
DECODE_64_OF_2K = RaggedShape("decode-64x2k", ((2047, 1),) * 64)
DECODE_1_OF_8K = RaggedShape("decode-1x8k", ((8191, 1),))
PREFILL_1K = RaggedShape("prefill-1k", ((0, 1024),))
PREFILL_TAIL_OF_8K = RaggedShape("prefill-256-of-8k", ((7936, 256),))

RAGGED = (DECODE_64_OF_2K, DECODE_1_OF_8K, PREFILL_1K, PREFILL_TAIL_OF_8K)
ROWS = (1, 8, 64, 256, 1024)
