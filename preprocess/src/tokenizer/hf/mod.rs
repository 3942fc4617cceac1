//! Tokenizers in Hugging Face's format, `tokenizer.json`.
//!
//! A [`HuggingFace`] reads the file ([`mod@file`]) and its neighbours ([`folder`]). The kinds that
//! language models use are encoded by native engines ([`own`]): added tokens are cut out of the
//! text ([`super::added`]), the rest is normalized ([`normalize`]) and encoded by byte-level BPE,
//! by BPE over characters ([`chars`]) or by the [`unigram`] model, and the ids of the [`template`]
//! are put around the result. [`export`] writes such files. All other kinds are encoded by Hugging
//! Face's own library, in a build with the feature `general`.

mod bert;
mod chars;
mod class;
mod export;
mod file;
mod folder;
mod forms;
#[cfg(feature = "general")]
mod general;
mod neighbours;
mod normalize;
mod own;
mod patterns;
mod precompiled;
mod template;
mod tokens;
mod unigram;

use serde_json::json;
use storage::Crc64;

use self::class::{FolderRule, RuleChoice, bad_choice};
pub use self::export::{ExportedTokenizer, ModelTokens};
use self::file::{MergePair, TokenizerJson, Vocab};
use self::folder::Folder;
#[cfg(feature = "general")]
use self::general::LibraryTokenizer;
use self::neighbours::{ClassTokens, NeighbourToken, Neighbours};
use self::own::NativeTokenizer;
use self::template::PostProcessor;
use super::added::AddedToken;
use super::keywords::Keywords;
use super::merge::ID_LIMIT;
use super::python::repr_list;
use super::read::{bad, parse_error};
use super::{EncodeError, Encoder, Tokenizer, TokenizerSpec};
use crate::Result;

/// Its names on the command line and in Megatron.
pub(super) const KINDS: [&str; 2] = ["hf", "HuggingFaceTokenizer"];

/// The file in a folder.
const TOKENIZER: &str = "tokenizer.json";

/// A `tokenizer.json`.
#[derive(Debug)]
pub struct HuggingFace {
    /// As it was named.
    model: String,
    engine: HfEngine,
    vocab_size: u32,
    eod: Option<u32>,
    fingerprint: String,
    special_tokens: Vec<String>,
    keywords: Keywords,
    /// The name of the rule that encodes, if a folder was named.
    rule: Option<String>,
}

#[derive(Debug)]
enum HfEngine {
    Own(Box<NativeTokenizer>),
    #[cfg(feature = "general")]
    General(Box<LibraryTokenizer>),
}

impl HuggingFace {
    /// Reads the file, or the `tokenizer.json` of the folder, that a spec names as its model. Like
    /// Megatron, it recognizes special tokens that are spelled in a text, and puts the ids of the
    /// file's post-processor around every text, unless the spec disables them.
    ///
    /// # Errors
    /// [`crate::Error::BadOption`] for a spec without a model or with an end of document that is no
    /// token, [`crate::Error::BadVocab`] for a file that is no tokenizer,
    /// [`crate::Error::Storage`].
    pub fn open(spec: &TokenizerSpec) -> Result<Self> {
        let choice = RuleChoice::of(spec.tokenizer_rule.as_deref())?;
        let folder = Folder::of(spec)?;
        let (name, text) = folder.read_tokenizer()?;
        let expected = "a tokenizer in Hugging Face's format";
        let mut file: TokenizerJson =
            serde_json::from_str(&text).map_err(|e| bad(&name, parse_error(e), expected))?;
        check_ids(&name, &file)?;
        if let Some(dropout) = file.model.dropout.filter(|&dropout| dropout != 0.0) {
            let expected = "no dropout, because the same text must always get the same ids";
            return Err(bad(&name, format!("dropout {dropout}"), expected));
        }
        let with_specials = !spec.without_special_tokens;
        let neighbours = folder.neighbours()?;
        let mut rule =
            follow(&folder, &neighbours, choice, &mut file, (&name, &text), with_specials)?;
        let special = more_tokens(&file, &spec.special_tokens);
        file.added_tokens.extend_from_slice(&special);
        rule.more.extend(special);
        check_ids(&name, &file)?;
        if with_specials {
            check_around(&name, &file)?;
        }
        let engine = match NativeTokenizer::new(&file, with_specials) {
            Ok(own) => HfEngine::Own(Box::new(own)),
            #[cfg(feature = "general")]
            Err(reason) => {
                log::info!(
                    "{name}: has {reason}, which the fast engines do not support; using the \
                     general engine"
                );
                let text = rule.text.as_ref().unwrap_or(&text);
                let general = LibraryTokenizer::new(&name, text, &file, &rule.more, with_specials)?;
                HfEngine::General(Box::new(general))
            }
            #[cfg(not(feature = "general"))]
            Err(reason) => {
                let expected = "a tokenizer that the fast engines support";
                return Err(bad(&name, reason, expected).with_hint(
                    "build the crate preprocess with the feature `general`, which supports every \
                     tokenizer",
                ));
            }
        };
        let mut tokenizer = HuggingFace {
            model: folder.model().to_owned(),
            vocab_size: size(&file),
            fingerprint: fingerprint(&file, with_specials),
            engine,
            eod: None,
            special_tokens: spec.special_tokens.clone(),
            keywords: Keywords::of(spec),
            rule: rule.name,
        };
        let id_of = |token: &str| match &tokenizer.engine {
            HfEngine::Own(_) => id_of(&file, token),
            #[cfg(feature = "general")]
            HfEngine::General(general) => general.id_of(token),
        };
        let eod = folder.eod(spec.eod_token.as_deref(), &neighbours, id_of)?;
        tokenizer.eod = eod.filter(|&id| id < tokenizer.vocab_size);
        Ok(tokenizer)
    }

    /// The engine that encodes: `own`, or `general`, which is slower.
    #[must_use]
    pub fn engine(&self) -> &'static str {
        match self.engine {
            HfEngine::Own(_) => "own",
            #[cfg(feature = "general")]
            HfEngine::General(_) => "general",
        }
    }
}

impl Tokenizer for HuggingFace {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        match &self.engine {
            HfEngine::Own(own) => own.encode(text, ids),
            #[cfg(feature = "general")]
            HfEngine::General(general) => general.encode(text, ids),
        }
    }

    fn encoder(&self) -> Box<dyn Encoder + '_> {
        match &self.engine {
            HfEngine::Own(own) => Box::new(own.encoder()),
            #[cfg(feature = "general")]
            HfEngine::General(general) => Box::new(&**general),
        }
    }

    fn refused(&self, text: &str) -> Option<EncodeError> {
        match &self.engine {
            HfEngine::Own(own) => own.refused(text),
            #[cfg(feature = "general")]
            HfEngine::General(_) => None,
        }
    }

    fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        match &self.engine {
            HfEngine::Own(own) => own.decode(ids, out),
            #[cfg(feature = "general")]
            HfEngine::General(general) => general.decode(ids, self.vocab_size, out),
        }
    }

    fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        match &self.engine {
            HfEngine::Own(own) => own.cut_after(text, at),
            #[cfg(feature = "general")]
            HfEngine::General(_) => None,
        }
    }

    fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    fn eod(&self) -> Option<u32> {
        self.eod
    }

    fn name(&self) -> &str {
        "hf"
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }

    fn rule(&self) -> Option<&str> {
        self.rule.as_deref()
    }

    /// As Megatron core 0.16 writes it for `--tokenizer-type HuggingFaceTokenizer`.
    fn identifiers(&self) -> serde_json::Value {
        let mut identifiers = json!({
            "class": "megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText",
            "tokenizer_path": self.model,
            "vocab_file": "None",
            "merges_file": "None",
            "additional_special_tokens": repr_list(&self.special_tokens),
        });
        self.keywords.add_to(&mut identifiers);
        identifiers
    }
}

/// Decides the rule and the tokens of a folder. A file that was named without its folder has only
/// its own. The name and the text are those of the file that was read.
fn follow(
    folder: &Folder,
    neighbours: &Neighbours,
    choice: RuleChoice,
    file: &mut TokenizerJson,
    (name, text): (&str, &str),
    with_specials: bool,
) -> Result<FolderRule> {
    let rule = match (folder.is_complete(), name.ends_with(TOKENIZER)) {
        (true, true) => class::follow(folder, neighbours, choice, file, text, with_specials)?,
        // BERT's vocabulary alone, to which the class is a rule already.
        (true, false) => {
            let tokens = neighbours.tokens(folder, &ClassTokens::default())?;
            let more = add_neighbours(file, tokens);
            FolderRule { more, name: Some("class BertTokenizer".to_owned()), text: None }
        }
        (false, _) if choice == RuleChoice::Class => {
            let expected = "a folder as the model, because a file alone has no class";
            return Err(bad_choice("class", expected));
        }
        (false, _) => FolderRule::default(),
    };
    if let Some(name) = &rule.name {
        log::info!("{}: the rule of the tokenizer is that of {name}", folder.model());
    }
    Ok(rule)
}

/// Ids index tables, so that they must have a bound; the largest vocabularies have 2^18.
fn check_ids(name: &str, file: &TokenizerJson) -> Result<()> {
    let expected = format!("1 to {} tokens, and ids below that", ID_LIMIT - 1);
    let of_vocab: Box<dyn Iterator<Item = usize>> = match &file.model.vocab {
        Vocab::Ids(ids) => Box::new(ids.iter().map(|(_, id)| *id as usize)),
        Vocab::Scores(scores) => Box::new(0..scores.len()),
    };
    let of_added = file.added_tokens.iter().map(|token| token.id as usize);
    match of_vocab.chain(of_added).max() {
        Some(id) if id >= ID_LIMIT - 1 => Err(bad(name, format!("id {id}"), &expected)),
        Some(_) => Ok(()),
        None => Err(bad(name, "no tokens", &expected)),
    }
}

/// The ids that the post-processor puts around a text must be tokens of the vocabulary.
fn check_around(name: &str, file: &TokenizerJson) -> Result<()> {
    let Some(around) = PostProcessor::new(&file.post_processor) else { return Ok(()) };
    let size = size(file);
    match around.before.iter().chain(&around.after).find(|&&id| id >= size) {
        Some(id) => {
            let found = format!("id {id} in the post-processor");
            Err(bad(name, found, &format!("ids below {size}, the number of tokens")))
        }
        None => Ok(()),
    }
}

/// One more than the highest id.
fn size(file: &TokenizerJson) -> u32 {
    let of_vocab = match &file.model.vocab {
        Vocab::Ids(ids) => ids.iter().map(|(_, id)| id + 1).max().unwrap_or(0),
        Vocab::Scores(scores) => scores.len() as u32, // fits: checked
    };
    let of_added = file.added_tokens.iter().map(|token| token.id + 1).max();
    of_vocab.max(of_added.unwrap_or(0))
}

fn id_of(file: &TokenizerJson, token: &str) -> Option<u32> {
    let added = file.added_tokens.iter().find(|added| added.content == token).map(|one| one.id);
    added.or_else(|| match &file.model.vocab {
        Vocab::Ids(ids) => ids.iter().find(|(one, _)| one == token).map(|(_, id)| *id),
        Vocab::Scores(scores) => {
            let place = scores.iter().position(|(one, _)| one == token);
            place.map(|id| id as u32) // fits: checked
        }
    })
}

/// Adds tokens that the file lacks, with the ids of the vocabulary or the next ones, and sets the
/// flags of those that it has. Returns what was added or changed.
fn add_neighbours(file: &mut TokenizerJson, tokens: Vec<NeighbourToken>) -> Vec<AddedToken> {
    let mut changed = Vec::new();
    for token in tokens {
        let known = file.added_tokens.iter().position(|added| added.content == token.content);
        let id = known.map(|place| file.added_tokens[place].id);
        let id = id.or_else(|| id_of(file, &token.content)).unwrap_or_else(|| size(file));
        let NeighbourToken { content, single_word, lstrip, rstrip, normalized, replaces } = token;
        let added = AddedToken { id, content, single_word, lstrip, rstrip, normalized };
        match known {
            Some(place) if replaces && file.added_tokens[place] != added => {
                file.added_tokens[place] = added.clone();
            }
            Some(_) => continue,
            None => file.added_tokens.push(added.clone()),
        }
        changed.push(added);
    }
    changed
}

/// Special tokens to add to a tokenizer: those that it lacks get the next ids.
fn more_tokens(file: &TokenizerJson, special_tokens: &[String]) -> Vec<AddedToken> {
    let mut next = size(file);
    let mut more: Vec<AddedToken> = Vec::new();
    for content in special_tokens {
        let known = file.added_tokens.iter().chain(&more).any(|added| added.content == *content);
        if known || content.is_empty() {
            continue;
        }
        let id = id_of(file, content).unwrap_or(next);
        next = next.max(id + 1);
        more.push(AddedToken::special(id, content));
    }
    more
}

/// A checksum of everything that ids depend on, but not of the file's order and layout.
fn fingerprint(file: &TokenizerJson, with_specials: bool) -> String {
    let mut sum = Crc64::new();
    let mut add = |text: &str| {
        sum.update(&(text.len() as u64).to_le_bytes());
        sum.update(text.as_bytes());
    };
    match &file.model.vocab {
        Vocab::Ids(ids) => {
            let mut ids: Vec<_> = ids.iter().map(|(token, id)| (*id, token)).collect();
            ids.sort_unstable();
            ids.iter().for_each(|(id, token)| {
                add(token);
                add(&id.to_string());
            });
        }
        Vocab::Scores(scores) => scores.iter().for_each(|(token, score)| {
            add(token);
            add(&score.to_bits().to_string());
        }),
    }
    for MergePair(left, right) in &file.model.merges {
        add(left);
        add(right);
    }
    for AddedToken { id, content, single_word, lstrip, rstrip, normalized, .. } in
        &file.added_tokens
    {
        add(content);
        add(&format!("{id} {single_word} {lstrip} {rstrip} {normalized}"));
    }
    let model = &file.model;
    let absent_if_empty = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    add(&format!(
        "{:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?}",
        model.kind,
        model.unk_token,
        model.unk_id,
        absent_if_empty(&model.continuing_subword_prefix),
        absent_if_empty(&model.end_of_word_suffix),
        model.fuse_unk.unwrap_or(false),
        model.byte_fallback.unwrap_or(false),
        model.ignore_merges.unwrap_or(false),
    ));
    // The library's default is left out, as of tokenizers that have no such limit.
    if let Some(max) = model.max_input_chars_per_word.filter(|&max| max != 100) {
        add(&max.to_string());
    }
    add(&file.normalizer.to_string());
    add(&file.pre_tokenizer.to_string());
    if with_specials {
        add(&file.post_processor.to_string());
    }
    format!("{:016x}", sum.value())
}
