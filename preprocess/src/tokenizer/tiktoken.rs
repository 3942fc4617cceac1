//! tiktoken's vocabularies: tokens with ranks, and no list of merges.
//!
//! Two files hold them. OpenAI's has a line `base64 rank` for each token, where the rank is the id;
//! the pattern and the special tokens are not in it, but follow from the number of its tokens or
//! are given by the user. Special tokens that are spelled in a text are ordinary text then.
//! Megatron's `TikTokenizer` reads a list in JSON, the form of Mistral's Tekken, cuts it to the
//! vocabulary's size, puts a thousand special tokens before it, and recognizes them in a text.

use serde::Deserialize;
use serde_json::json;
use storage::Crc64;

use super::added::{Added, AddedToken};
use super::base64;
use super::bpe::{Bpe, BpeEncoder};
use super::merge::ID_LIMIT;
use super::python::repr_list;
use super::ranks::Unfit;
use super::read::{bad, parse_error, read_bytes};
use super::split::Pattern;
use super::{Encoder, Tokenizer, TokenizerSpec};
use crate::{Error, Result};

/// Its names on the command line and in Megatron.
pub(super) const KINDS: [&str; 2] = ["tiktoken", "TikTokenizer"];

/// A vocabulary of tiktoken's kind.
#[derive(Debug)]
pub struct Tiktoken {
    model: String,
    bpe: Bpe,
    /// By id; some ids have no token.
    tokens: Vec<Option<Vec<u8>>>,
    eod: Option<u32>,
    /// Special tokens that are recognized in a text.
    specials: Added,
    fingerprint: String,
    /// As Megatron calls its arguments, in its order.
    arguments: Vec<(&'static str, String)>,
}

/// Encodes one text after another.
#[derive(Debug)]
struct TiktokenEncoder<'a> {
    tiktoken: &'a Tiktoken,
    bpe: BpeEncoder<'a>,
}

/// A published vocabulary, which is recognized by the number of its tokens.
struct Published {
    token_count: usize,
    pattern: Pattern,
    specials: &'static [(&'static str, u32)],
    eod: u32,
}

const PUBLISHED: [Published; 6] = [
    // r50k_base
    Published {
        token_count: 50_256,
        pattern: Pattern::Gpt2,
        specials: &[("<|endoftext|>", 50_256)],
        eod: 50_256,
    },
    // p50k_base, whose tokens continue after the special one
    Published {
        token_count: 50_280,
        pattern: Pattern::Gpt2,
        specials: &[("<|endoftext|>", 50_256)],
        eod: 50_256,
    },
    // cl100k_base
    Published {
        token_count: 100_256,
        pattern: Pattern::Cl100k,
        specials: &[
            ("<|endoftext|>", 100_257),
            ("<|fim_prefix|>", 100_258),
            ("<|fim_middle|>", 100_259),
            ("<|fim_suffix|>", 100_260),
            ("<|endofprompt|>", 100_276),
        ],
        eod: 100_257,
    },
    // o200k_base
    Published {
        token_count: 199_998,
        pattern: Pattern::O200k,
        specials: &[("<|endoftext|>", 199_999), ("<|endofprompt|>", 200_018)],
        eod: 199_999,
    },
    // Llama 3
    Published {
        token_count: 128_000,
        pattern: Pattern::Llama3,
        specials: &[
            ("<|begin_of_text|>", 128_000),
            ("<|end_of_text|>", 128_001),
            ("<|eot_id|>", 128_009),
            ("<|reserved_special_token_250|>", 128_255),
        ],
        eod: 128_001,
    },
    // Qwen
    Published {
        token_count: 151_643,
        pattern: Pattern::Qwen2,
        specials: &[
            ("<|endoftext|>", 151_643),
            ("<|im_start|>", 151_644),
            ("<|im_end|>", 151_645),
            ("<|extra_204|>", 151_850),
        ],
        eod: 151_643,
    },
];

/// Megatron's special tokens that have names, in the order of their ids.
const MEGATRON_SPECIALS: [&str; 7] = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"];
const MEGATRON_SPECIAL_COUNT: u32 = 1000;
const MEGATRON_VOCAB_SIZE: u32 = 1 << 17;

/// A token of Megatron's list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    rank: usize,
    token_bytes: String,
    #[serde(rename = "token_str")]
    _token_str: Option<String>,
}

/// The contents of a file, before the engine is built.
#[derive(Debug, Default)]
struct VocabParts {
    /// Ids and bytes.
    tokens: Vec<(u32, Vec<u8>)>,
    specials: Vec<AddedToken>,
    /// Special tokens that are spelled in a text are recognized.
    recognized: bool,
    eod: Option<u32>,
    arguments: Vec<(&'static str, String)>,
}

impl Tiktoken {
    /// Reads the file that a spec names as its model: Megatron's list if it begins with a bracket,
    /// else OpenAI's lines.
    ///
    /// # Errors
    /// [`Error::BadOption`] for a spec without a model or with a pattern that is not known,
    /// [`Error::BadVocab`] for a file that is no vocabulary of the kind, [`Error::Storage`].
    pub fn open(spec: &TokenizerSpec) -> Result<Self> {
        let model = spec.model.as_deref().ok_or_else(|| Error::BadOption {
            name: "tokenizer-model",
            found: "none".to_owned(),
            expected: "a tiktoken vocabulary".to_owned(),
            hint: None,
        })?;
        let bytes = read_bytes(model)?;
        let asked = spec.tiktoken_pattern.as_deref().map(pattern_of).transpose()?;
        let listed = bytes.trim_ascii_start().first() == Some(&b'[');
        let (parts, pattern) = if listed {
            (megatron(model, &bytes, spec)?, asked.unwrap_or(Pattern::TekkenV2))
        } else {
            super::refuse_special_tokens(spec)?;
            openai(model, &bytes, asked)?
        };
        Tiktoken::new(model, parts, pattern, spec.eod_token.as_deref())
    }

    fn new(model: &str, parts: VocabParts, pattern: Pattern, eod: Option<&str>) -> Result<Self> {
        let unfit = |unfit: Unfit| bad(model, unfit.found, &unfit.expected);
        let ranked = parts.tokens.iter().map(|(id, token)| (token.as_slice(), *id));
        let bpe = Bpe::from_ranks(ranked, pattern).map_err(unfit)?;
        let id_of = |token: &str| {
            let special = parts.specials.iter().find(|special| special.content == token);
            special.map(|special| special.id).ok_or_else(|| Error::BadOption {
                name: "eod-token",
                found: format!("'{token}'"),
                expected: format!("a special token of {model}"),
                hint: None,
            })
        };
        let eod = eod.map(id_of).transpose()?.or(parts.eod);
        let mut tokens: Vec<Option<Vec<u8>>> = Vec::new();
        let named = parts.specials.iter().map(|one| (one.id, one.content.clone().into_bytes()));
        for (id, token) in named.chain(parts.tokens) {
            let place = id as usize;
            tokens.resize(tokens.len().max(place + 1), None);
            if tokens[place].replace(token).is_some() {
                return Err(bad(model, format!("id {id} twice"), "every id once"));
            }
        }
        let searched = if parts.recognized { &*parts.specials } else { &[] };
        let spelled = searched.iter().map(|special| (special, special.content.clone()));
        let specials = Added::new(spelled)
            .map_err(|e| bad(model, format!("an error: {e}"), "searchable special tokens"))?;
        Ok(Tiktoken {
            model: model.to_owned(),
            bpe,
            fingerprint: fingerprint(&tokens, pattern, parts.recognized),
            tokens,
            eod,
            specials,
            arguments: parts.arguments,
        })
    }
}

/// The contents of OpenAI's file: the lines, and which vocabulary they are.
fn openai(model: &str, bytes: &[u8], asked: Option<Pattern>) -> Result<(VocabParts, Pattern)> {
    let text = str::from_utf8(bytes).map_err(|e| {
        bad(model, format!("invalid UTF-8 at byte {}", e.valid_up_to()), "UTF-8 text")
    })?;
    let mut tokens = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.is_empty()) {
        let parsed = line.split_once(' ').and_then(|(token, rank)| {
            Some((rank.parse().ok().filter(|&rank| (rank as usize) < ID_LIMIT)?, token))
        });
        let token = parsed.and_then(|(rank, token)| Some((rank, base64::decode(token)?)));
        tokens.push(token.ok_or_else(|| Error::BadVocab {
            file: model.to_owned(),
            line: Some(number),
            found: format!("'{}'", line.chars().take(80).collect::<String>()),
            expected: format!("a token in base64, a space and its rank below {ID_LIMIT}"),
            hint: None,
        })?);
    }
    let published = PUBLISHED.iter().find(|one| {
        one.token_count == tokens.len() && asked.is_none_or(|pattern| pattern == one.pattern)
    });
    let mut parts = VocabParts { tokens, ..VocabParts::default() };
    if let Some(Published { pattern, specials, eod, .. }) = published {
        parts.eod = Some(*eod);
        parts.specials = specials.iter().map(|(name, id)| AddedToken::special(*id, name)).collect();
        return Ok((parts, *pattern));
    }
    let Some(pattern) = asked else {
        return Err(Error::BadOption {
            name: "tiktoken-pattern",
            found: "none".to_owned(),
            expected: format!(
                "one of {PATTERN_NAMES} for {model}, whose {} tokens are no published vocabulary",
                parts.tokens.len(),
            ),
            hint: None,
        });
    };
    let next = parts.tokens.iter().map(|(id, _)| id + 1).max().unwrap_or(0);
    parts.eod = Some(next);
    parts.specials = vec![AddedToken::special(next, "<|endoftext|>")];
    Ok((parts, pattern))
}

/// The contents of Megatron's list, with the special tokens that Megatron puts before it.
fn megatron(model: &str, bytes: &[u8], spec: &TokenizerSpec) -> Result<VocabParts> {
    let listed: Vec<Listed> = serde_json::from_slice(bytes)
        .map_err(|e| bad(model, parse_error(e), "a list of rank, token_bytes and token_str"))?;
    let special_count = spec.tiktoken_num_special_tokens.unwrap_or(MEGATRON_SPECIAL_COUNT);
    let vocab_size = spec.vocab_size.unwrap_or(MEGATRON_VOCAB_SIZE);
    let names = special_names(spec, special_count, vocab_size)?;
    let count = (vocab_size - special_count) as usize; // checked with the names
    if listed.len() < count {
        let expected = format!("{count} tokens for a vocabulary of {vocab_size}");
        let size = listed.len() + special_count as usize;
        return Err(bad(model, listed.len().to_string(), &expected)
            .with_hint(format!("use --vocab-size {size}")));
    }
    let mut tokens = Vec::with_capacity(count);
    for (place, one) in listed.iter().take(count).enumerate() {
        let token = base64::decode(&one.token_bytes).filter(|token| {
            one.rank == place
                && (place >= 256
                    || usize::from(token.first().copied().unwrap_or(0)) == place
                        && token.len() == 1)
        });
        let token = token.ok_or_else(|| {
            let expected = "tokens in base64 in rank order, the 256 bytes first";
            bad(
                model,
                format!("'{}' with rank {} at index {place}", one.token_bytes, one.rank),
                expected,
            )
        })?;
        tokens.push((special_count + place as u32, token)); // fits: below vocab_size
    }
    let mut arguments = Vec::new();
    if let Some(pattern) = &spec.tiktoken_pattern {
        arguments.push(("pattern", pattern.clone()));
    }
    if let Some(vocab_size) = spec.vocab_size {
        arguments.push(("vocab_size", vocab_size.to_string()));
    }
    arguments.push(("num_special_tokens", special_count.to_string()));
    let given = !spec.special_tokens.is_empty();
    let listed = if given { repr_list(&spec.special_tokens) } else { "None".to_owned() };
    arguments.push(("special_tokens", listed));
    let specials = (0..).zip(&names).map(|(id, name)| AddedToken::special(id, name)).collect();
    let eod = names.iter().position(|name| name == "</s>").map(|id| id as u32); // fits: a special
    Ok(VocabParts { tokens, specials, recognized: true, eod, arguments })
}

/// The names of Megatron's special tokens: given ones, or its own, then numbered ones.
fn special_names(spec: &TokenizerSpec, count: u32, vocab_size: u32) -> Result<Vec<String>> {
    let bad = |name: &'static str, found: String, expected: String| {
        Err(Error::BadOption { name, found, expected, hint: None })
    };
    if vocab_size as usize >= ID_LIMIT {
        return bad("vocab-size", vocab_size.to_string(), format!("less than {ID_LIMIT}"));
    }
    let mut names = spec.special_tokens.clone();
    if names.is_empty() {
        names = MEGATRON_SPECIALS.map(str::to_owned).to_vec();
    }
    if !MEGATRON_SPECIALS.iter().all(|one| names.iter().any(|name| name == one)) {
        let expected = format!("all of {}", MEGATRON_SPECIALS.join(" "));
        return bad("tokenizer-special-tokens", names.join(" "), expected);
    }
    if !(names.len()..vocab_size as usize).contains(&(count as usize)) {
        let expected = format!("at least {} and less than --vocab-size {vocab_size}", names.len());
        return bad("tiktoken-num-special-tokens", count.to_string(), expected);
    }
    names.extend((names.len()..count as usize).map(|id| format!("<SPECIAL_{id}>")));
    let mut seen = std::collections::HashSet::new();
    match names.iter().find(|&name| name.is_empty() || !seen.insert(name)) {
        Some(name) => bad(
            "tokenizer-special-tokens",
            format!("'{name}'"),
            "non-empty tokens, each once".to_owned(),
        ),
        None => Ok(names),
    }
}

const PATTERN_NAMES: &str = "v1, v2, r50k, p50k, cl100k, o200k, llama3, qwen2, deepseek3";

fn pattern_of(name: &str) -> Result<Pattern> {
    Ok(match name {
        "v1" => Pattern::TekkenV1,
        "v2" => Pattern::TekkenV2,
        "r50k" | "p50k" | "r50k_base" | "p50k_base" | "gpt2" => Pattern::Gpt2,
        "cl100k" | "cl100k_base" => Pattern::Cl100k,
        "o200k" | "o200k_base" => Pattern::O200k,
        "llama3" => Pattern::Llama3,
        "qwen2" => Pattern::Qwen2,
        "deepseek3" => Pattern::DeepSeekV3,
        _ => {
            let (found, expected) = (format!("'{name}'"), format!("one of {PATTERN_NAMES}"));
            return Err(Error::BadOption { name: "tiktoken-pattern", found, expected, hint: None });
        }
    })
}

fn fingerprint(tokens: &[Option<Vec<u8>>], pattern: Pattern, recognized: bool) -> String {
    let mut sum = Crc64::new();
    for token in tokens {
        let len = token.as_ref().map_or(u64::MAX, |token| token.len() as u64);
        sum.update(&len.to_le_bytes());
        sum.update(token.as_deref().unwrap_or_default());
    }
    sum.update(format!("{} {recognized}", pattern.identity()).as_bytes());
    format!("{:016x}", sum.value())
}

impl Tokenizer for Tiktoken {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        self.specials.encode(text, ids, |text, ids| self.bpe.encode(text, ids));
    }

    fn encoder(&self) -> Box<dyn Encoder + '_> {
        Box::new(TiktokenEncoder { tiktoken: self, bpe: self.bpe.encoder() })
    }

    fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        let vocab_size = self.vocab_size();
        for &id in ids {
            let token = self.tokens.get(id as usize).and_then(Option::as_deref);
            out.extend_from_slice(token.ok_or(Error::UnknownToken { id, vocab_size })?);
        }
        Ok(())
    }

    fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        let at = self.bpe.cut_after(text, at)?;
        self.specials.may_cut(text, at).then_some(at)
    }

    fn vocab_size(&self) -> u32 {
        self.tokens.len() as u32 // fits: ids are below ID_LIMIT
    }

    fn eod(&self) -> Option<u32> {
        self.eod
    }

    fn name(&self) -> &str {
        "tiktoken"
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }

    /// As Megatron core 0.16 writes it for `--tokenizer-type TikTokenizer`.
    fn identifiers(&self) -> serde_json::Value {
        let mut identifiers = json!({
            "class": "megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText",
            "tokenizer_path": self.model,
        });
        for (name, value) in &self.arguments {
            identifiers[*name] = value.as_str().into();
        }
        identifiers
    }
}

impl Encoder for TiktokenEncoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        let TiktokenEncoder { tiktoken, bpe } = self;
        tiktoken.specials.encode(text, ids, |text, ids| bpe.encode(text, ids));
    }
}
