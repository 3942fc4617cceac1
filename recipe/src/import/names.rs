//! What files name and do not spell out: tokenizers, and the models of builders.

use super::{Build, get, shown};

impl Build {
    /// Its kind and its file, which special tokens are known by.
    pub(super) fn tokenizer(&mut self) {
        if let Some(path) = self.fact("tokenizer_path").map(shown) {
            let known = [("bpe_cn", 26_240), ("bpe_cn_en", 51_968)];
            let is_it = |(name, _): &&(&str, i64)| path.ends_with(&format!("/{name}"));
            if let Some((_, vocab)) = known.iter().find(is_it) {
                self.set_if_absent("model.vocab", *vocab);
            }
            self.set_if_absent("data.tokenizer", format!("encdec:{path}"));
        }
        let kind = get(&self.config, "data.tokenizer").map(shown).unwrap_or_default();
        let file = match kind.as_str() {
            "gpt2" => {
                self.set_if_absent("model.vocab", 50_257);
                None
            }
            "wordpiece" | "bert-cased" | "yuan" => self.fact("vocab_file").map(shown),
            "hf" | "sentencepiece" | "tiktoken" => self.fact("tokenizer_model").map(shown),
            "null" => get(&self.config, "model.vocab").map(shown),
            _ => None,
        };
        if let Some(file) = file {
            self.set("data.tokenizer", format!("{kind}:{file}"));
        }
    }

    /// The sizes behind the names of Colossal-AI's builders.
    pub(super) fn builder(&mut self) {
        let Some(builder) = self.fact("builder").map(|name| shown(name).to_ascii_lowercase())
        else {
            return;
        };
        let sizes = [
            ("gpt2_small", [12, 768, 12]),
            ("gpt2_medium", [24, 1024, 16]),
            ("gpt2_large", [36, 1280, 20]),
            ("gpt2_xl", [48, 1600, 25]),
            ("gpt3", [96, 12_288, 96]),
        ];
        // With what divides them behind, as in GPT2_small_pipeline_hybrid.
        match sizes.iter().find(|(name, _)| builder.contains(name)) {
            Some((_, size)) => {
                for (key, value) in ["layers", "hidden", "heads"].iter().zip(size) {
                    self.set_if_absent(&format!("model.{key}"), *value);
                }
                self.set_if_absent("model.vocab", 50_257);
                self.notes.push(format!(
                    "model.type {builder}: the sizes of the published GPT; dropout and the course \
                     of the learning rate are in its Python code and not in this file"
                ));
            }
            None => self.refuse("model", format!("the sizes of '{builder}' are not known here")),
        }
    }
}
