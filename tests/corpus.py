"""A corpus of 2,000 texts that is the same on every machine: what tokenizers must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from random import Random
from unicodedata import ucd_3_2_0

_ENGLISH = (
    "the of and to in is was for on that with as his they at be this have from or had by hot word but what some we can "
    "out other were all there when up use your how said an each she which their time if will way about many then them "
    "lighthouse harbour keeper electricity unbelievable internationalization antidisestablishmentarianism naïve café "
    "Zürich résumé I'm don't we've they'll she'd IT'S DON'T y'all o'clock rock'n'roll state-of-the-art e.g. i.e. "
    "U.S.A. HTTPServer iPhone snake_case camelCase SCREAMING_CASE x86_64 3.14 1,000,000 50% $9.99 #42 @user a/b (see)"
).split()
_CODE = (
    "def f(x: int) -> list[int]:\n    return [i ** 2 for i in range(x) if i % 2 == 0]  # squares",
    "if (a != b && c <= d) {\n\t\treturn a->next[i++] ^ ~mask;\n\t}",
    "SELECT u.id, COUNT(*) FROM users u LEFT JOIN logs l ON l.uid = u.id GROUP BY 1 HAVING COUNT(*) > 10;",
    "<div class=\"a b\" data-x='1'>&nbsp;&lt;tag/&gt;</div><!-- c -->",
    '#include <stdio.h>\r\nint main(void) {\r\n    printf("%d\\n", 0xDEADBEEF);\r\n}\r\n',
    "let s = `${a}\\u{1F600}`; // => 'x'\nconst re = /^[\\w.-]+@\\d{2,}$/gi;",
    '{"k": [1, 2.5e-10, null, true], "ü": "\\\\n"}',
    "git commit -m 'fix: #123' && cd ../.. || exit 1\n$ ls -la | grep -v '^d' > /dev/null 2>&1",
    'for i in 1..=100 { println!("{i:>8}"); }\n\n\n    // four\n\tx += 1;',
)
_SCRIPTS = (
    "人工智能是计算机科学的一个分支。它试图了解智能的实质！「你好」，世界：（一）《红楼梦》……２０２４年",
    "吾輩は猫である。名前はまだ無い。コンピューター・サイエンス、ﾊﾝｶｸ、「東京」へ行きました！ー々〆",
    "대한민국의 모든 국민은 법 앞에 평등하다. 한국어 처리는 재미있습니다! ㄱㄴㄷ ㅏㅑ ㅋㅋㅋ",
    "العربية لغة جميلة، وهي من أكثر اللغات تحدثًا. السَّلامُ عَلَيْكُمْ ١٢٣٤٥ ؟ ـــ",
    "עברית היא שפה שמית. שָׁלוֹם עֲלֵיכֶם, ״ירושלים״ – מה שלומך?",
    "हिन्दी भारत की राजभाषा है। क्षत्रिय ज्ञान श्री १२३४ नमस्ते, दुनिया!",
    "ภาษาไทยเป็นภาษาที่มีวรรณยุกต์ กรุงเทพมหานคร น้ำใจ ๑๒๓ ฯลฯ",
    "Русский язык — один из восточнославянских. Ёжик съел ещё щётку; «кавычки», №5, Москва-река.",
    "Η ελληνική γλώσσα, Ἀθῆναι ᾳ ῇ. Ünïcödé Straße ẞ İstanbul ığdır Đặng Nguyễn Æsop þorn ŁÓDŹ",
    "বাংলা ভাষা தமிழ் తెలుగు ಕನ್ನಡ മലയാളം ਪੰਜਾਬੀ ગુજરાતી සිංහල မြန်မာ ខ្មែរ ລາວ ქართული հայերեն አማርኛ ᏣᎳᎩ བོད་",
)
_EMOJI = "😀 😂 ❤️ 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 🇯🇵🇺🇸 1️⃣ #️⃣ 🤷🏿‍♀️ ☕ ♾️ 🫠 🧑🏻‍🚀 ©️ ™ ⚠︎ ✨✨✨".split()
# fmt: off
_MARKS = (
    "e\u0301", "a\u0300\u0316", "\u0301", "o\u0308\u0304", "n\u0303", "A\u030a", "\u1100\u1161\u11a8", "x\u20d7",
    "\u0e01\u0e33", "\u0915\u094d\u200d\u0937",
)
_SPACES = (
    " ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\n\n\n\n", "\r\n", " \n", "\n ", "\u00a0", "\u3000", "\u2009",
    "\u200b", "\ufeff", "\u2028", "\u0085", "\v", "\f", " " * 7, " " * 16, " " * 31, " " * 33, " " * 70, "\n" * 35,
    "\t" * 33,
)
_SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<unused5>",
    "<s>", "</s>", "<unk>", "<pad>", "<|im_start|", "|im_end|>", "< |im_end|>", "<0x0A>", "<0xE2>", "<0xZZ>", "[INST]",
    "<table>", "<mask>", "[multimodal]", "\u2581", "\u2581\u2581", "\u2581the", "<filename>", "<think>", "<|eot_id|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "\ufffd",
)
# fmt: on
_PUNCTUATION = "!?.,;:-–—…'\"`´’‘“”()[]{}<>/\\|@#$%^&*_+=~§°±×÷€£¥¿¡•·‰†"


class _Choice:
    """Choices by `Random.random` alone, whose sequence is guaranteed for a seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def of(self, items: Sequence[str]) -> str:
        return items[self.below(len(items))]

    def many(self, make: Callable[[], str], low: int, high: int, between: str = "") -> str:
        return between.join(make() for _ in range(low + self.below(high - low + 1)))


def corpus(count: int = 2000) -> list[str]:
    """`count` texts of mixed kinds; the first are the same whatever the count."""
    choice = _Choice(20240229)

    def english() -> str:
        word = choice.of(_ENGLISH)
        return (word, word, word.capitalize(), word.upper(), word + choice.of(_PUNCTUATION))[choice.below(5)]

    def piece_of(texts: Sequence[str]) -> str:
        text = choice.of(texts)
        start = choice.below(len(text))
        return text[start : start + 1 + choice.below(40)]

    def number() -> str:
        digits = choice.many(lambda: choice.of("0123456789"), 1, 22)
        return (
            digits,
            "-" + digits,
            digits[:3] + "." + digits[3:],
            digits + choice.of(("%", "px", "st", "½", "²", "٣", "Ⅷ")),
        )[choice.below(4)]

    def any_character() -> str:
        kind = choice.below(10)
        if kind < 4:
            return chr(0x20 + choice.below(0x60))
        if kind < 7:
            return chr(0xA0 + choice.below(0x2F00))
        return chr(choice.below(0x30000))

    def character() -> str:
        # Of Unicode 3.2, since every tokenizer has its own version of the tables.
        found = any_character()
        return "?" if ucd_3_2_0.category(found) in ("Cn", "Cs") else found

    kinds: tuple[Callable[[], str], ...] = (
        lambda: choice.many(english, 3, 25, " "),
        lambda: choice.many(english, 2, 12, " "),
        lambda: piece_of(_CODE) + choice.of(_SPACES) + piece_of(_CODE),
        lambda: choice.of(_CODE) + choice.of(_SPACES) + english() + choice.of(_SPACES) + choice.of(_CODE),
        lambda: choice.of(_SCRIPTS) + choice.of(_SPACES) + english() + number(),
        lambda: choice.many(lambda: piece_of(_SCRIPTS), 1, 4, " "),
        lambda: choice.many(lambda: choice.of((piece_of(_SCRIPTS), english(), number())), 2, 9, choice.of(("", " "))),
        lambda: choice.many(lambda: choice.of((choice.of(_EMOJI), english())), 1, 10, choice.of(("", " "))),
        lambda: choice.many(lambda: english() + choice.of(_MARKS), 1, 6, choice.of(("", " "))),
        lambda: choice.many(number, 1, 6, choice.of((" ", ",", "", ", ", "\n"))),
        lambda: choice.many(lambda: choice.of(_SPACES), 1, 8),
        lambda: choice.many(lambda: choice.of((english(), choice.of(_SPACES))), 3, 20),
        lambda: choice.many(lambda: choice.of((english(), choice.of(_SPECIAL), choice.of(_SPACES))), 2, 10),
        lambda: choice.many(lambda: choice.of((choice.of(_PUNCTUATION), english())), 1, 20),
        lambda: choice.many(character, 1, 30),
    )
    return [kinds[index % len(kinds)]() for index in range(count)]


def digest(ids: Sequence[int]) -> str:
    """Eight hexadecimal digits that stand for a sequence of token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:8]
