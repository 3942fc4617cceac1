//! The classes of transformers 5.24 that make a tokenizer of the vocabulary and the merges of
//! `tokenizer.json`, with a normalizer, a pre-tokenizer and special tokens of their own.
//!
//! `python/tests/sockets/test_tokenizer_rules.py` compares each with the library.

use super::super::patterns::{QWEN2, QWEN35};
use super::parts::{
    AroundText, Given, ModelRule, Parts, bert, byte_level, byte_level_decoder, charsmap_only, meta,
    meta_decoder, meta_words, replace, replace_regex, sequence_of, spelled_decoder, split,
};
use serde_json::{Value, json};

/// A class whose rule is followed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Class {
    pub(super) name: &'static str,
    /// Special tokens that it has without a setting, by their keys.
    pub(super) tokens: &'static [(&'static str, &'static str)],
    /// Whether such a mask takes the space before it.
    pub(super) mask_strips: bool,
    /// Whether each special token loses its flags.
    pub(super) resets_flags: bool,
    pub(super) parts: fn(&Given<'_>) -> Parts,
}

/// Other names of classes.
const ALIASES: [(&str, &str); 12] = [
    ("BartTokenizer", "RobertaTokenizer"),
    ("DistilBertTokenizer", "BertTokenizer"),
    ("ElectraTokenizer", "BertTokenizer"),
    ("LEDTokenizer", "RobertaTokenizer"),
    ("LayoutLMTokenizer", "BertTokenizer"),
    ("LongformerTokenizer", "RobertaTokenizer"),
    ("LxmertTokenizer", "BertTokenizer"),
    ("MobileBertTokenizer", "BertTokenizer"),
    ("MvpTokenizer", "RobertaTokenizer"),
    ("Phi3Tokenizer", "LlamaTokenizer"),
    ("SqueezeBertTokenizer", "BertTokenizer"),
    ("CodeGenTokenizer", "GPT2Tokenizer"),
];

/// The class of a name without the suffix of earlier versions.
pub(super) fn followed(name: &str) -> Option<&'static Class> {
    let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| *name);
    CLASSES.iter().find(|class| class.name == name)
}

/// Whether a class does not read `tokenizer.json` as it is, and its rule is not followed.
pub(super) fn is_unfollowed(name: &str) -> bool {
    UNFOLLOWED.split_whitespace().any(|one| one == name)
}

/// Classes with rules that depend on languages or layouts, that change a text in Python, or that
/// read other files.
const UNFOLLOWED: &str = "
    BartphoTokenizer BertGenerationTokenizer BertJapaneseTokenizer BertTokenizerLegacy
    BertweetTokenizer BigBirdTokenizer BioGptTokenizer BlenderbotSmallTokenizer ByT5Tokenizer
    CLIPTokenizer CTRLTokenizer CanineTokenizer ClvpTokenizer CodeLlamaTokenizer ConvBertTokenizer
    CpmAntTokenizer CpmTokenizer DPRContextEncoderTokenizer DPRQuestionEncoderTokenizer
    DPRReaderTokenizer DiaTokenizer EsmTokenizer EsmcTokenizer FNetTokenizer FSMTTokenizer
    FastSpeech2ConformerTokenizer FlaubertTokenizer GPTNeoXJapaneseTokenizer GPTSw3Tokenizer
    LasrTokenizer LayoutLMv2Tokenizer LayoutLMv3Tokenizer LayoutXLMTokenizer LukeTokenizer
    M2M100Tokenizer MBart50Tokenizer MBartTokenizer MLukeTokenizer MarianTokenizer
    MarkupLMTokenizer MgpstrTokenizer MyT5Tokenizer NllbTokenizer NougatTokenizer PLBartTokenizer
    PegasusTokenizer PerceiverTokenizer PhobertTokenizer Pop2PianoTokenizer ProphetNetTokenizer
    RagTokenizer ReformerTokenizer RemBertTokenizer RoCBertTokenizer RoFormerTokenizer
    SeamlessM4TTokenizer Siglip2Tokenizer SiglipTokenizer Speech2TextTokenizer SpeechT5Tokenizer
    SplinterTokenizer TapasTokenizer Tipsv2Tokenizer UdopTokenizer VideoPrismTokenizer VitsTokenizer
    Wav2Vec2CTCTokenizer Wav2Vec2PhonemeCTCTokenizer WhisperTokenizer XGLMTokenizer XLMTokenizer";

type Tokens = &'static [(&'static str, &'static str)];

const GPT2_TOKENS: Tokens = &[
    ("bos_token", "<|endoftext|>"),
    ("eos_token", "<|endoftext|>"),
    ("unk_token", "<|endoftext|>"),
];
const NEOX_TOKENS: Tokens = &[
    ("bos_token", "<|endoftext|>"),
    ("eos_token", "<|endoftext|>"),
    ("unk_token", "<|endoftext|>"),
    ("pad_token", "<|padding|>"),
];
const QWEN_TOKENS: Tokens = &[
    ("eos_token", "<|endoftext|>"),
    ("unk_token", "<|endoftext|>"),
    ("pad_token", "<|endoftext|>"),
];
const ROBERTA_TOKENS: Tokens = &[
    ("bos_token", "<s>"),
    ("eos_token", "</s>"),
    ("unk_token", "<unk>"),
    ("sep_token", "</s>"),
    ("pad_token", "<pad>"),
    ("cls_token", "<s>"),
    ("mask_token", "<mask>"),
];
const MPNET_TOKENS: Tokens = &[
    ("bos_token", "<s>"),
    ("eos_token", "</s>"),
    ("unk_token", "[UNK]"),
    ("sep_token", "</s>"),
    ("pad_token", "<pad>"),
    ("cls_token", "<s>"),
    ("mask_token", "<mask>"),
];
const BERT_TOKENS: Tokens = &[
    ("unk_token", "[UNK]"),
    ("sep_token", "[SEP]"),
    ("pad_token", "[PAD]"),
    ("cls_token", "[CLS]"),
    ("mask_token", "[MASK]"),
];
const DEBERTA_TOKENS: Tokens = &[
    ("bos_token", "[CLS]"),
    ("eos_token", "[SEP]"),
    ("unk_token", "[UNK]"),
    ("sep_token", "[SEP]"),
    ("pad_token", "[PAD]"),
    ("cls_token", "[CLS]"),
    ("mask_token", "[MASK]"),
];
const ALBERT_TOKENS: Tokens = &[
    ("bos_token", "[CLS]"),
    ("eos_token", "[SEP]"),
    ("unk_token", "<unk>"),
    ("sep_token", "[SEP]"),
    ("pad_token", "<pad>"),
    ("cls_token", "[CLS]"),
    ("mask_token", "[MASK]"),
];
const XLNET_TOKENS: Tokens = &[
    ("bos_token", "<s>"),
    ("eos_token", "</s>"),
    ("unk_token", "<unk>"),
    ("sep_token", "<sep>"),
    ("pad_token", "<pad>"),
    ("cls_token", "<cls>"),
    ("mask_token", "<mask>"),
];
const COHERE_TOKENS: Tokens = &[
    ("bos_token", "<BOS_TOKEN>"),
    ("eos_token", "<|END_OF_TURN_TOKEN|>"),
    ("unk_token", "<UNK>"),
    ("sep_token", "<SEP>"),
    ("pad_token", "<PAD>"),
    ("cls_token", "<CLS>"),
    ("mask_token", "<MASK_TOKEN>"),
];
const GEMMA_TOKENS: Tokens = &[
    ("bos_token", "<bos>"),
    ("eos_token", "<eos>"),
    ("unk_token", "<unk>"),
    ("pad_token", "<pad>"),
    ("mask_token", "<mask>"),
];
const HERBERT_TOKENS: Tokens = &[
    ("unk_token", "<unk>"),
    ("sep_token", "</s>"),
    ("pad_token", "<pad>"),
    ("cls_token", "<s>"),
    ("mask_token", "<mask>"),
];
const LLAMA_TOKENS: Tokens = &[("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")];
const T5_TOKENS: Tokens = &[("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>")];

/// A class without a special treatment of flags.
const fn class(name: &'static str, tokens: Tokens, parts: fn(&Given<'_>) -> Parts) -> Class {
    Class { name, tokens, mask_strips: false, resets_flags: false, parts }
}

const fn strips(class: Class) -> Class {
    Class { mask_strips: true, ..class }
}

static CLASSES: [Class; 22] = [
    class("AlbertTokenizer", ALBERT_TOKENS, albert),
    strips(class("BarthezTokenizer", ROBERTA_TOKENS, barthez)),
    class("BertTokenizer", BERT_TOKENS, wordpiece),
    strips(class("BlenderbotTokenizer", ROBERTA_TOKENS, blenderbot)),
    strips(class("CamembertTokenizer", ROBERTA_TOKENS, camembert)),
    class("CohereTokenizer", COHERE_TOKENS, cohere),
    class("DebertaTokenizer", DEBERTA_TOKENS, roberta),
    class("DebertaV2Tokenizer", DEBERTA_TOKENS, deberta_v2),
    class("FunnelTokenizer", XLNET_TOKENS, funnel),
    class("GPT2Tokenizer", GPT2_TOKENS, gpt2),
    class("GPTNeoXTokenizer", NEOX_TOKENS, gpt_neox),
    class("GemmaTokenizer", GEMMA_TOKENS, gemma),
    class("HerbertTokenizer", HERBERT_TOKENS, herbert),
    class("LlamaTokenizer", LLAMA_TOKENS, llama),
    strips(class("MPNetTokenizer", MPNET_TOKENS, wordpiece)),
    class("OpenAIGPTTokenizer", &[("unk_token", "<unk>")], openai),
    Class { resets_flags: true, ..class("Qwen2Tokenizer", QWEN_TOKENS, qwen2) },
    class("Qwen3_5Tokenizer", QWEN_TOKENS, qwen3_5),
    class("RobertaTokenizer", ROBERTA_TOKENS, roberta),
    class("T5Tokenizer", T5_TOKENS, t5),
    class("XLMRobertaTokenizer", ROBERTA_TOKENS, xlm_roberta),
    strips(class("XLNetTokenizer", XLNET_TOKENS, xlnet)),
];

fn gpt2(given: &Given<'_>) -> Parts {
    Parts {
        pre_tokenizer: byte_level(given.flag("add_prefix_space", false), true),
        decoder: byte_level_decoder(),
        ..Parts::of(ModelRule::bpe())
    }
}

fn gpt_neox(given: &Given<'_>) -> Parts {
    let around = AroundText::Keys(&[], &[]);
    Parts { normalizer: json!({ "type": "NFC" }), around, ..gpt2(given) }
}

fn roberta(given: &Given<'_>) -> Parts {
    Parts { around: CLS_SEP, ..gpt2(given) }
}

fn blenderbot(given: &Given<'_>) -> Parts {
    let prefixed = given.flag("add_prefix_space", true);
    Parts { pre_tokenizer: byte_level(prefixed, true), ..gpt2(given) }
}

fn cohere(given: &Given<'_>) -> Parts {
    let digits = json!({ "type": "Digits", "individual_digits": true });
    let bytes = byte_level(given.flag("add_prefix_space", false), true);
    Parts {
        normalizer: json!({ "type": "NFC" }),
        pre_tokenizer: sequence_of("pretokenizers", vec![digits, bytes]),
        ..gpt2(given)
    }
}

fn qwen2(given: &Given<'_>) -> Parts {
    qwen(given, QWEN2)
}

fn qwen3_5(given: &Given<'_>) -> Parts {
    qwen(given, QWEN35)
}

fn qwen(given: &Given<'_>, pattern: &str) -> Parts {
    let bytes = byte_level(given.flag("add_prefix_space", false), false);
    Parts {
        normalizer: json!({ "type": "NFC" }),
        pre_tokenizer: sequence_of("pretokenizers", vec![split(pattern), bytes]),
        ..gpt2(given)
    }
}

fn llama(given: &Given<'_>) -> Parts {
    let prefixed = given.flag("add_prefix_space", true);
    let scheme = match (prefixed, given.flag("legacy", false)) {
        (false, _) => "never",
        (true, true) => "always",
        (true, false) => "first",
    };
    Parts {
        pre_tokenizer: meta(scheme, false),
        decoder: spelled_decoder(prefixed),
        ..Parts::of(ModelRule { fuse_unk: true, byte_fallback: true, ..ModelRule::bpe() })
    }
}

fn gemma(given: &Given<'_>) -> Parts {
    let model = ModelRule {
        fuse_unk: true,
        byte_fallback: true,
        unk_token: given.token("unk_token"),
        ..ModelRule::bpe()
    };
    Parts {
        normalizer: replace(" ", "▁"),
        pre_tokenizer: json!({
            "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious",
            "invert": false,
        }),
        decoder: spelled_decoder(false),
        ..Parts::of(model)
    }
}

const CLS_SEP: AroundText = AroundText::Keys(&["cls_token"], &["sep_token"]);
const BOS_EOS: AroundText = AroundText::Keys(&["bos_token"], &["eos_token"]);

fn wordpiece(given: &Given<'_>) -> Parts {
    let lowercase = given.flag("do_lower_case", true);
    let accents = given.config["strip_accents"].clone();
    let chinese = given.flag("tokenize_chinese_chars", true);
    Parts {
        normalizer: bert(true, chinese, &accents, lowercase),
        pre_tokenizer: json!({ "type": "BertPreTokenizer" }),
        decoder: json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }),
        around: CLS_SEP,
        ..Parts::of(ModelRule::wordpiece(given.token("unk_token")))
    }
}

fn funnel(given: &Given<'_>) -> Parts {
    let mut parts = wordpiece(given);
    parts.normalizer["clean_text"] = given.flag("clean_text", true).into();
    parts
}

fn herbert(given: &Given<'_>) -> Parts {
    Parts {
        normalizer: bert(true, true, &Value::from(false), false),
        // These are ids, whatever the tokens are.
        around: AroundText::Ids(&[0], &[2]),
        ..openai(given)
    }
}

fn openai(given: &Given<'_>) -> Parts {
    let unk_token = given.token("unk_token");
    let end_of_word_suffix = Some("</w>");
    Parts {
        normalizer: bert(true, true, &Value::Null, true),
        pre_tokenizer: json!({ "type": "BertPreTokenizer" }),
        decoder: json!({ "type": "BPEDecoder", "suffix": "</w>" }),
        ..Parts::of(ModelRule { unk_token, end_of_word_suffix, ..ModelRule::bpe() })
    }
}

/// Words of a unigram model, with a map of characters if the file has one.
fn words(given: &Given<'_>, scheme: &str, unk_id: usize) -> Parts {
    Parts {
        normalizer: charsmap_only(given),
        pre_tokenizer: meta_words(scheme),
        decoder: meta_decoder(scheme),
        ..Parts::of(ModelRule::unigram(unk_id))
    }
}

fn scheme(given: &Given<'_>) -> &'static str {
    if given.flag("add_prefix_space", true) { "always" } else { "never" }
}

fn t5(given: &Given<'_>) -> Parts {
    let count = given.config["extra_ids"].as_u64().unwrap_or(100).min(EXTRA_IDS_MAX);
    Parts {
        around: AroundText::Keys(&[], &["eos_token"]),
        extra: (0..count).map(|index| format!("<extra_id_{index}>")).collect(),
        ..words(given, "always", 2)
    }
}

/// T5 has 100; more than this is none of its folders.
const EXTRA_IDS_MAX: u64 = 10_000;

fn xlm_roberta(given: &Given<'_>) -> Parts {
    Parts { around: BOS_EOS, ..words(given, scheme(given), 3) }
}

fn camembert(given: &Given<'_>) -> Parts {
    let unk_id = given.token("unk_token").and_then(|token| given.place_of(&token));
    Parts {
        around: BOS_EOS,
        extra: ["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"].map(str::to_owned).to_vec(),
        ..words(given, scheme(given), unk_id.unwrap_or(0))
    }
}

fn albert(given: &Given<'_>) -> Parts {
    let keeps_accents = given.flag("keep_accents", false);
    Parts {
        normalizer: quotes(given, keeps_accents, given.flag("do_lower_case", true)),
        around: CLS_SEP,
        ..words(given, scheme(given), 1)
    }
}

fn xlnet(given: &Given<'_>) -> Parts {
    let unk_id = given.config["unk_id"].as_u64().unwrap_or(0) as usize; // fits: 64 bits
    Parts {
        normalizer: quotes(given, false, given.flag("do_lower_case", false)),
        around: AroundText::Keys(&[], &["sep_token", "cls_token"]),
        extra: ["<eop>", "<eod>"].map(str::to_owned).to_vec(),
        ..words(given, "always", unk_id)
    }
}

fn quotes(given: &Given<'_>, keeps_accents: bool, lowercase: bool) -> Value {
    let mut steps = vec![replace("``", "\""), replace("''", "\"")];
    if !keeps_accents {
        steps.extend([json!({ "type": "NFKD" }), json!({ "type": "StripAccents" })]);
    }
    if lowercase {
        steps.push(json!({ "type": "Lowercase" }));
    }
    steps.extend(Some(charsmap_only(given)).filter(|step| !step.is_null()));
    sequence_of("normalizers", steps)
}

fn barthez(given: &Given<'_>) -> Parts {
    let scheme = scheme(given);
    Parts {
        normalizer: sequence_of("normalizers", one_spaces()),
        pre_tokenizer: meta(scheme, true),
        ..words(given, scheme, 3)
    }
}

fn deberta_v2(given: &Given<'_>) -> Parts {
    let scheme = if given.flag("add_prefix_space", true) { "always" } else { "first" };
    let mut steps = one_spaces();
    if given.flag("do_lower_case", false) {
        steps.insert(0, json!({ "type": "Lowercase" }));
    }
    let mut splits = vec![meta(scheme, true)];
    if given.flag("split_by_punct", false) {
        splits.insert(0, json!({ "type": "Punctuation", "behavior": "Isolated" }));
    }
    let set = given.config["unk_id"].as_u64().unwrap_or(1) as usize; // fits: 64 bits
    let unk_id = given.token("unk_token").and_then(|token| given.unscored_place_of(&token));
    Parts {
        normalizer: sequence_of("normalizers", steps),
        pre_tokenizer: sequence_of("pretokenizers", splits),
        around: CLS_SEP,
        ..words(given, scheme, unk_id.unwrap_or(set))
    }
}

fn one_spaces() -> Vec<Value> {
    vec![
        replace_regex(r"\s{2,}|[\n\r\t]", " "),
        json!({ "type": "NFC" }),
        json!({ "type": "Strip", "strip_left": false, "strip_right": true }),
    ]
}
