"""What Megatron core tells of its tokenizers, which goes into the names of its cache files.

    python make.py > expected.json       needs megatron-core 0.16.1 and torch

`build_tokenizer` is called with the defaults of the flags. Only the library behind a tokenizer is
left out: what is told does not depend on it.
"""

import json
import sys
from types import SimpleNamespace

from megatron.core.tokenizers.text import text_tokenizer
from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer

text_tokenizer.MegatronTokenizerText._restore_model = lambda self, **kwargs: SimpleNamespace()

DEFAULTS = dict(
    tokenizer_model=None, vocab_file=None, merge_file=None, vocab_size=None,
    tokenizer_special_tokens=None, tokenizer_hf_use_fast=True, trust_remote_code=False,
    tokenizer_hf_include_special_tokens=True, tokenizer_sentencepiece_legacy=False,
    tiktoken_pattern=None, tiktoken_num_special_tokens=1000, tokenizer_metadata=None,
)


def of(kind, **flags):
    arguments = SimpleNamespace(tokenizer_type=kind, **{**DEFAULTS, **flags})
    return build_tokenizer(arguments).unique_identifiers


json.dump(
    {
        "gpt2": of("GPT2BPETokenizer"),
        "gpt2_special": of("GPT2BPETokenizer", tokenizer_special_tokens=["<a>", "it's"]),
        "null": of("NullTokenizer", vocab_size=100),
        "bert_lower": of("BertWordPieceLowerCase", vocab_file="<vocab>"),
        "bert_case": of("BertWordPieceCase", vocab_file="<vocab>"),
        "sentencepiece": of("SentencePieceTokenizer", tokenizer_model="<model>"),
        "gpt_sentencepiece": of("GPTSentencePieceTokenizer", tokenizer_model="<model>"),
        "llama2": of("Llama2Tokenizer", tokenizer_model="<model>"),
        "tiktoken": of(
            "TikTokenizer", tokenizer_model="<model>", tiktoken_pattern="v2",
            tiktoken_num_special_tokens=20, vocab_size=276,
        ),
        "hf": of("HuggingFaceTokenizer", tokenizer_model="<model>"),
        "hf_special": of(
            "HuggingFaceTokenizer", tokenizer_model="<model>",
            tokenizer_special_tokens=["<a>", "it's"], tokenizer_hf_include_special_tokens=False,
        ),
        "gpt2_slow": of("GPT2BPETokenizer", tokenizer_hf_use_fast=False),
        "bert_plain": of(
            "BertWordPieceLowerCase", vocab_file="<vocab>",
            tokenizer_hf_include_special_tokens=False, tokenizer_hf_use_fast=False,
        ),
        "hf_trusted": of(
            "HuggingFaceTokenizer", tokenizer_model="<model>", trust_remote_code=True,
        ),
    },
    sys.stdout,
    indent=1,
)
print()
