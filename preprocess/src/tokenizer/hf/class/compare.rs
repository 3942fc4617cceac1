//! What decides ids in two tokenizers with one vocabulary, and where it differs.

use serde_json::{Map, Value};

use super::super::super::added::AddedToken;
use super::super::super::vocab::byte_chars;
use super::super::file::{TokenizerJson, Vocab};
use super::super::normalize::Normalizer;
use super::super::own::short;
use super::super::patterns;
use super::super::template::PostProcessor;

/// Everything in a `tokenizer.json` but the vocabulary and the merges.
#[derive(Debug, Default)]
pub(super) struct Rule {
    pub(super) added_tokens: Vec<AddedToken>,
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) post_processor: Value,
    pub(super) decoder: Value,
    pub(super) model: ModelFields,
}

/// The settings of a model. Absent and empty fields are the defaults of the library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ModelFields {
    pub(super) kind: Option<String>,
    pub(super) unk_token: Option<String>,
    pub(super) unk_id: Option<usize>,
    pub(super) continuing_subword_prefix: Option<String>,
    pub(super) end_of_word_suffix: Option<String>,
    pub(super) fuse_unk: Option<bool>,
    pub(super) byte_fallback: Option<bool>,
    pub(super) ignore_merges: Option<bool>,
    pub(super) max_input_chars_per_word: Option<usize>,
}

impl Rule {
    /// Exchanges this rule for that of a file.
    pub(super) fn swap(&mut self, file: &mut TokenizerJson) {
        use std::mem::swap;
        swap(&mut self.added_tokens, &mut file.added_tokens);
        swap(&mut self.normalizer, &mut file.normalizer);
        swap(&mut self.pre_tokenizer, &mut file.pre_tokenizer);
        swap(&mut self.post_processor, &mut file.post_processor);
        swap(&mut self.decoder, &mut file.decoder);
        let (ours, model) = (&mut self.model, &mut file.model);
        swap(&mut ours.kind, &mut model.kind);
        swap(&mut ours.unk_token, &mut model.unk_token);
        swap(&mut ours.unk_id, &mut model.unk_id);
        swap(&mut ours.continuing_subword_prefix, &mut model.continuing_subword_prefix);
        swap(&mut ours.end_of_word_suffix, &mut model.end_of_word_suffix);
        swap(&mut ours.fuse_unk, &mut model.fuse_unk);
        swap(&mut ours.byte_fallback, &mut model.byte_fallback);
        swap(&mut ours.ignore_merges, &mut model.ignore_merges);
        swap(&mut ours.max_input_chars_per_word, &mut model.max_input_chars_per_word);
    }

    /// What a file has in another way than this rule, in words; empty if the ids are the same.
    pub(super) fn differences(&self, file: &TokenizerJson, with_specials: bool) -> Vec<String> {
        let mut found = Vec::new();
        let mut part = |name: &str, ours: &Value, other: &Value| {
            found.push(format!("{name} {}", instead(ours, other)));
        };
        if !same_steps(&self.normalizer, &file.normalizer) {
            part("normalizer", &self.normalizer, &file.normalizer);
        }
        if !self.splits_as(file) {
            part("pre-tokenizer", &self.pre_tokenizer, &file.pre_tokenizer);
        }
        let around = PostProcessor::new;
        let ours = around(&self.post_processor);
        let same = match &ours {
            Some(_) => ours == around(&file.post_processor),
            None => self.post_processor == file.post_processor,
        };
        if with_specials && !same {
            part("post-processor", &self.post_processor, &file.post_processor);
        }
        if let Some(name) = self.model.difference(file) {
            found.push(format!("another {name}"));
        }
        found.extend(difference_of_tokens(&self.added_tokens, &file.added_tokens));
        found
    }

    fn splits_as(&self, file: &TokenizerJson) -> bool {
        let plan = |normalizer, pre_tokenizer| {
            let normalizer = Normalizer::new(normalizer)?;
            let plan = patterns::plan(pre_tokenizer, &normalizer)?;
            Some((normalizer, plan))
        };
        let ours = plan(&self.normalizer, &self.pre_tokenizer);
        same_steps(&self.pre_tokenizer, &file.pre_tokenizer)
            || ours.is_some() && ours == plan(&file.normalizer, &file.pre_tokenizer)
    }
}

impl ModelFields {
    /// The name of a setting that differs, where it can change ids.
    fn difference(&self, file: &TokenizerJson) -> Option<&'static str> {
        let model = &file.model;
        let text = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let is_set = |flag: Option<bool>| flag == Some(true);
        let kind = self.kind.as_deref();
        let prefix = |prefix: &Option<String>| match kind {
            Some("WordPiece") => Some(prefix.clone().unwrap_or_else(|| "##".to_owned())),
            _ => text(prefix),
        };
        let chars_max = |max: Option<usize>| max.unwrap_or(100);
        if model.kind.is_some() && self.kind != model.kind {
            return Some("type of model");
        }
        if prefix(&self.continuing_subword_prefix) != prefix(&model.continuing_subword_prefix) {
            return Some("continuing_subword_prefix");
        }
        if text(&self.end_of_word_suffix) != text(&model.end_of_word_suffix) {
            return Some("end_of_word_suffix");
        }
        if is_set(self.ignore_merges) != is_set(model.ignore_merges) {
            return Some("ignore_merges");
        }
        if kind == Some("WordPiece")
            && chars_max(self.max_input_chars_per_word) != chars_max(model.max_input_chars_per_word)
        {
            return Some("max_input_chars_per_word");
        }
        if self.unk_id != model.unk_id {
            return Some("unk_id");
        }
        if is_set(self.byte_fallback) != is_set(model.byte_fallback) {
            return Some("byte_fallback").filter(|_| !has_all_bytes(file, false));
        }
        let is_never_unknown =
            kind == Some("BPE") && has_all_bytes(file, is_set(self.byte_fallback));
        if is_never_unknown {
            return None;
        }
        if self.unk_token != model.unk_token && kind != Some("Unigram") {
            return Some("unk_token");
        }
        let fuses = is_set(self.fuse_unk) != is_set(model.fuse_unk) && self.unk_token.is_some();
        Some("fuse_unk").filter(|_| fuses && kind == Some("BPE"))
    }
}

/// Whether a vocabulary of BPE has a token for each byte, so that nothing is unknown: as `<0x0A>`
/// where the model writes unknown characters so, otherwise as one character for each byte after
/// the pre-tokenizer has spelled a text so.
fn has_all_bytes(file: &TokenizerJson, spelled: bool) -> bool {
    let Vocab::Ids(ids) = &file.model.vocab else { return false };
    let is_byte_level = file.pre_tokenizer.to_string().contains("\"ByteLevel\"");
    if !spelled && !is_byte_level {
        return false;
    }
    let tokens: std::collections::HashSet<&str> = ids.iter().map(|(token, _)| &**token).collect();
    match spelled {
        true => (0..=255_u8).all(|byte| tokens.contains(&*format!("<0x{byte:02X}>"))),
        false => byte_chars().iter().all(|char| tokens.contains(&*char.to_string())),
    }
}

/// Two values that differ, for a message: of steps of one type the fields that differ.
fn instead(ours: &Value, other: &Value) -> String {
    let pair = |ours: &Value, other: &Value| format!("{} instead of {}", short(ours), short(other));
    let fields = ours.as_object().filter(|_| ours["type"] == other["type"]);
    let fields = fields.into_iter().flatten().filter(|(key, value)| other[key.as_str()] != **value);
    let fields: Vec<String> = fields
        .map(|(key, value)| format!("{key} = {}", pair(value, &other[key.as_str()])))
        .collect();
    if fields.is_empty() { pair(ours, other) } else { fields.join(", ") }
}

/// Names the first token that only one side has, or has in another way.
fn difference_of_tokens(ours: &[AddedToken], other: &[AddedToken]) -> Option<String> {
    let lacks = |tokens: &[AddedToken], token: &&AddedToken| !tokens.contains(token);
    let ours_only = ours.iter().find(|token| lacks(other, token));
    let found = ours_only.or_else(|| other.iter().find(|token| lacks(ours, token)))?;
    Some(format!("another added token '{}'", found.content))
}

fn same_steps(one: &Value, other: &Value) -> bool {
    steps(one) == steps(other)
}

/// The steps of a normalizer or a pre-tokenizer, without nesting and with defaults filled in.
fn steps(given: &Value) -> Vec<Value> {
    let nested = ["normalizers", "pretokenizers"].iter().find_map(|key| given[*key].as_array());
    match (given, nested) {
        (_, Some(nested)) => nested.iter().flat_map(steps).collect(),
        (Value::Object(step), None) => vec![complete(step).into()],
        _ => Vec::new(),
    }
}

fn complete(step: &Map<String, Value>) -> Map<String, Value> {
    let mut step = step.clone();
    let kind = step.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut default = |key: &str, value: bool| {
        step.entry(key.to_owned()).or_insert(value.into());
    };
    match kind.as_str() {
        "ByteLevel" => {
            default("use_regex", true);
            step.shift_remove("trim_offsets");
        }
        "Split" => default("invert", false),
        "Metaspace" => {
            default("split", true);
            step.shift_remove("str_rep");
            // The older flag, which the library refuses where it contradicts the scheme.
            let prefixed = step.shift_remove("add_prefix_space") != Some(false.into());
            let scheme = if prefixed { "always" } else { "never" };
            step.entry("prepend_scheme").or_insert(scheme.into());
        }
        "BertNormalizer" if step.get("strip_accents").is_none_or(Value::is_null) => {
            let lowercase = step.get("lowercase").cloned().unwrap_or_default();
            step.insert("strip_accents".to_owned(), lowercase);
        }
        _ => {}
    }
    step
}
