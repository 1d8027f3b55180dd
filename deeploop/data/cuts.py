"""Decide where a text may be cut so that its spans encode to the tokens of the whole.

A cut is safe where the tokenizer's pre-tokenizer ends a word for certain, from the
characters on both sides alone: before a space between two letters or digits, for all
pre-tokenizers in `_cuts_of` below. A tokenizer for which no such place is known (no
pre-tokenizer, a normaliser that depends on the start of the text) encodes each document
whole.
"""

import re
from typing import Any

# Each matches the empty text at a place where a text may be cut.
ANYWHERE = re.compile(r"(?s:(?=.))")
_MARKS = r"\uFF0C\u3002\u3001\uFF01\uFF1F\uFF1B\uFF1A"  # , . , ! ? ; : of Chinese and Japanese
AT_WORDS = re.compile(rf"(?<=[^\W_])(?=[\n{_MARKS}]| [^\W_])")
AT_SPACES = re.compile(r"(?<=[^\W_])(?= [^\W_])")  # a word without a space before it gets one

# Normalisers of single characters, or of sequences that no place of AT_WORDS divides.
LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
# GPT-2's pattern, and those of GPT-4, Llama 3 and Qwen: each begins a word at a space or line
# end after a letter or digit, and looks at no character before a word.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
}


def safe_cuts(description: dict[str, Any]) -> re.Pattern[str] | None:
    """Return where a text may be cut for a Hugging Face tokenizer, None for nowhere.

    Args:
        description: the tokenizer's JSON.
    """
    normalizers = _members(description.get("normalizer"), "normalizers")
    if any(step["type"] not in LOCAL_NORMALIZERS for step in normalizers):
        return None
    rules = [_cuts_of(step) for step in _members(description.get("pre_tokenizer"), "pretokenizers")]
    if "unknown" in rules or not {"words", "spaces"} & set(rules):
        return None
    cuts = AT_SPACES if {"spaces", "prefix"} & set(rules) else AT_WORDS
    for token in description.get("added_tokens", ()):
        if not token["special"] and _may_span_a_cut(token):
            return None
    return cuts


def _members(step: dict[str, Any] | None, field: str) -> list[dict[str, Any]]:
    """List the steps of a normaliser or pre-tokenizer, those of a sequence one by one."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for member in step[field] for inner in _members(member, field)]
    return [step]


def _cuts_of(step: dict[str, Any]) -> str:
    """Return where a pre-tokenizer ends words.

    Returns:
        "words": at the places of AT_WORDS; "spaces": at those of AT_SPACES alone;
        "prefix": nowhere itself, but it puts a space before each text; "local": nowhere, and
        it divides by single characters; "unknown".
    """
    kind = step["type"]
    if kind == "ByteLevel":
        if step["add_prefix_space"]:
            return "spaces" if step.get("use_regex", True) else "prefix"
        return "words" if step.get("use_regex", True) else "local"
    if kind == "Split":
        known = step["pattern"].get("Regex") in WORD_PATTERNS and not step["invert"]
        return "words" if known and step["behavior"] == "Isolated" else "unknown"
    if kind == "Metaspace":
        return "spaces" if step.get("split", True) else "unknown"
    rules = {
        "Whitespace": "words",
        "BertPreTokenizer": "words",
        "WhitespaceSplit": "spaces",
        "Digits": "local",
        "Punctuation": "local",
    }
    return rules.get(kind, "unknown")


def _may_span_a_cut(token: dict[str, Any]) -> bool:
    """Return True if an added token may reach over a place of AT_WORDS, or depends on its ends."""
    depends = token["lstrip"] or token["rstrip"] or token["single_word"]
    return bool(depends or re.search(rf"[^\W_][\n {_MARKS}]", token["content"]))
