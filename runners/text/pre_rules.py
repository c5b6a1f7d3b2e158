"""Word-splitting rules of GGUF BPE vocabularies, by the name in `tokenizer.ggml.pre`.

A GGUF file names its pre-tokenizer instead of carrying it. Each rule is a list of Oniguruma patterns applied in turn:
every pattern cuts each piece so far into its matches and the text between them. Splits equal llama.cpp's, also where
that simplifies a model's own pattern (gpt-4o, tekken: a letter outside ASCII counts as upper and lower case at once).
Source: the published tokenizer.json files, and llama.cpp's vocabulary loader for names and flags.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_CONTRACTION = "'s|'t|'re|'ve|'m|'ll|'d"
# Spelled out: (?i:…) would also fold 'ſ' onto 's'.
_CONTRACTION_ANY_CASE = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTION_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_LINES}"
_QWEN2 = rf"{_CONTRACTION_ANY_CASE}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_LINES}"
_QWEN35 = (
    rf"{_CONTRACTION_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_SEED_CODER = rf"{_CONTRACTION_ANY_CASE}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"
_BAILING = rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|{_SPACES}"
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_CASED_WORD = r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{tail}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{tail}"
_TEKKEN = _CASED_WORD.format(upper=_UPPER, lower=_LOWER, tail="") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
_GPT4O = (
    _CASED_WORD.format(upper=_UPPER, lower=_LOWER, tail=f"(?:{_CONTRACTION_ANY_CASE})?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
)
_SENTENCE_WORDS = r" ?[^(\s|.,!?…。，、।۔،)]+"
# Letters with case as DeepSeek's tokenizer lists them; \p{LC} of a current Unicode version holds more.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376-\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183-\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2-\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_PUNCTUATION = r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}-\x{3002}]"
# White space inside these blocks stays white space.
_DEEPSEEK_CJK = r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}&&[^\s]]+"
_PUNCTUATION = r"[\p{P}$+<=>^~|]+"


@dataclass(frozen=True, slots=True)
class PreRule:
    """How a vocabulary splits text into words before merging, and the flags that go with the name.

    ignore_merges: a word that is a token is that token, whatever the merges say. add_bos: default where the file is
    silent.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


DEFAULT_RULE = PreRule((_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

_RULE_GPT2 = PreRule((_GPT2,))
_RULE_DIGITS = PreRule((r"\p{N}", _GPT2))
_RULE_LLAMA3 = PreRule((_LLAMA3,))
_RULE_QWEN2 = PreRule((_QWEN2,))
_RULE_DEEPSEEK3 = PreRule((r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+", _DEEPSEEK3))
_RULE_GPT4O = PreRule((_GPT4O,))
_RULE_SENTENCE = PreRule((_SENTENCE_WORDS,))
_RULE_BAILING = PreRule((_BAILING,))

_NAMES_BY_RULE: tuple[tuple[PreRule, str], ...] = (
    (DEFAULT_RULE, "default"),
    (_RULE_GPT2, "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum granite-docling modern-bert"),
    (_RULE_GPT2, "jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe"),
    (_RULE_DIGITS, "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (replace(_RULE_LLAMA3, ignore_merges=True, add_bos=True), "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral"),
    (replace(_RULE_LLAMA3, ignore_merges=True, add_bos=True), "midm-2.0 lfm2 jina-v5-nano"),
    (replace(_RULE_LLAMA3, ignore_merges=True), "glm4 glm5"),
    (_RULE_LLAMA3, "dbrx smaug-bpe chatglm-bpe"),
    (_RULE_QWEN2, "qwen2 deepseek-r1-qwen megrez kormo f2llmv2 hunyuan solar-open grok-2 stablelm2"),
    (PreRule((_QWEN35,)), "qwen35"),
    (PreRule((_SEED_CODER,)), "seed-coder"),
    (_RULE_BAILING, "bailingmoe bailingmoe2 llada-moe"),
    (PreRule((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (_RULE_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreRule((_PUNCTUATION.replace("|]", "|`]"), _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (_RULE_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (PreRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")), "deepseek-coder"),
    (
        PreRule(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                rf"\s?{_DEEPSEEK_PUNCTUATION}+",
                r"\s+\z",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (_RULE_SENTENCE, "bloom poro-chat gpt3-finnish"),
    (PreRule((_SENTENCE_WORDS, r"\p{N}")), "viking"),
)

PRE_RULES: dict[str, PreRule] = {name: rule for rule, names in _NAMES_BY_RULE for name in names.split()}
"""Rule of every supported `tokenizer.ggml.pre` name."""
