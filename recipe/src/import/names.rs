//! Resolves tokenizers and models that files only name.

use super::{Build, KeyReport, KeyStatus, get, shown};

impl Build {
    /// Its kind and its file, which determine the special tokens.
    pub(super) fn tokenizer(&mut self) {
        if let Some(path) = self.fact("tokenizer_path").map(shown) {
            let known = [("bpe_cn", 26_240), ("bpe_cn_en", 51_968)];
            let is_it = |(name, _): &&(&str, i64)| path.ends_with(&format!("/{name}"));
            if let Some((_, vocab)) = known.iter().find(is_it) {
                self.set_if_absent("model.vocab", *vocab);
            }
            self.set_if_absent("data.tokenizer", format!("encdec:{path}"));
        }
        self.transformers_tokenizer();
        let kind = get(&self.config, "data.tokenizer").map(shown).unwrap_or_default();
        let kind = if kind == "BertWordPieceTokenizer" { self.bert_of_2019() } else { kind };
        self.known_vocabulary();
        let file = match kind.as_str() {
            "gpt2" => self.gpt2_files(),
            "BertWordPieceLowerCase" | "BertWordPieceCase" | "yuan" => {
                self.fact("vocab_file").map(shown)
            }
            "hf" | "sentencepiece" | "tiktoken" => self.fact("tokenizer_model").map(shown),
            "null" => get(&self.config, "model.vocab").map(shown),
            _ => None,
        };
        if let Some(file) = file {
            self.set("data.tokenizer", format!("{kind}:{file}"));
        }
    }

    /// The default tokenizer of Megatron's GPT programs.
    pub(super) fn tokenizer_of_gpt(&mut self) {
        if get(&self.config, "data.tokenizer").is_some() {
            return;
        }
        self.set("data.tokenizer", "gpt2");
        let [file, key, value, text] =
            ["default", "tokenizer-type", "GPT2BPETokenizer", "data.tokenizer"].map(str::to_owned);
        self.fates.push(KeyReport { file, key, value, fate: KeyStatus::Default, text });
    }

    /// The vocabulary of GPT-2 is built in; another is given by its two files.
    fn gpt2_files(&mut self) -> Option<String> {
        let files = self.fact("vocab_file").zip(self.fact("merge_file"));
        let files = files.map(|(vocab, merges)| (shown(vocab), shown(merges)));
        let is_own = |vocab: &str| vocab.rsplit('/').next().is_some_and(|it| it.contains("gpt2"));
        match files.filter(|(vocab, _)| !is_own(vocab)) {
            Some((vocab, merges)) => Some(format!("{vocab},{merges}")),
            None => {
                self.set_if_absent("model.vocab", 50_257);
                None
            }
        }
    }

    /// The tokenizer that Megatron of 2019 downloads, by the name of its vocabulary.
    fn bert_of_2019(&mut self) -> String {
        let name = self.fact("tokenizer_model_type").map(shown);
        let name = name.unwrap_or_else(|| "bert-large-uncased".to_owned());
        let kind = if name.contains("uncased") || name.contains("chinese") {
            "BertWordPieceLowerCase"
        } else {
            "BertWordPieceCase"
        };
        self.set("data.tokenizer", kind);
        let sizes = [
            ("bert-base-uncased", 30_522),
            ("bert-large-uncased", 30_522),
            ("bert-base-cased", 28_996),
            ("bert-large-cased", 28_996),
            ("bert-base-multilingual-uncased", 105_879),
            ("bert-base-multilingual-cased", 119_547),
            ("bert-base-chinese", 21_128),
        ];
        match sizes.iter().find(|(known, _)| *known == name) {
            Some((_, size)) => self.set_if_absent("model.vocab", *size),
            None if self.fact("vocab_file").is_some() => {}
            None => {
                let text = format!("data.tokenizer: the vocabulary of {name} is not known");
                self.correct("tokenizer_model_type", KeyStatus::Refused, &text);
            }
        }
        if self.fact("vocab_file").is_none() {
            self.notes.push(format!(
                "the program fetches the vocabulary of {name}: give its file (hint: \
                 data.tokenizer = \"{kind}:vocab.txt\")"
            ));
        }
        kind.to_owned()
    }

    /// The name of a tokenizer of Hugging Face; only that of GPT-2 is built in.
    pub(super) fn transformers_tokenizer(&mut self) {
        let Some(name) = self.fact("tokenizer_name").map(shown) else { return };
        if name.rsplit('/').next().is_some_and(|last| last.starts_with("gpt2")) {
            self.set("data.tokenizer", "gpt2");
        } else {
            let text = "data.tokenizer: set \"hf:FILE\" with its tokenizer.json";
            self.correct("tokenizer_name", KeyStatus::Refused, text);
        }
    }

    /// The vocabulary size of a tokenizer or a model, by its name.
    fn known_vocabulary(&mut self) {
        let name = self.fact("tokenizer_name").or_else(|| self.fact("tokenizer_model")).map(shown);
        let Some(name) = name else { return };
        let last = name.rsplit('/').next().unwrap_or(&name);
        let known = [
            ("gpt2", 50_257),
            ("gpt2-medium", 50_257),
            ("gpt2-large", 50_257),
            ("gpt2-xl", 50_257),
            ("bert-base-uncased", 30_522),
            ("bert-large-uncased", 30_522),
            ("bert-base-cased", 28_996),
            ("bert-large-cased", 28_996),
        ];
        if let Some((_, size)) = known.iter().find(|(known, _)| *known == last) {
            self.set_if_absent("model.vocab", *size);
        }
    }

    /// The sizes of the models of Colossal-AI's builders.
    pub(super) fn builder(&mut self) {
        let Some(builder) = self.fact("builder").map(|name| shown(name).to_ascii_lowercase())
        else {
            return;
        };
        // The sizes of `titans`. Only the first is that of the published model.
        let sizes = [
            ("gpt2_small", [12, 768, 12]),
            ("gpt2_medium", [24, 1024, 8]),
            ("gpt2_large", [36, 1536, 12]),
            ("gpt2_xl", [48, 1600, 16]),
            ("gpt2_exlarge", [48, 1600, 32]),
            ("gpt2_8b", [72, 3072, 24]),
            ("gpt3", [96, 12_288, 96]),
        ];
        // A suffix names the parallelism, as in GPT2_small_pipeline_hybrid.
        match sizes.iter().find(|(name, _)| builder.contains(name)) {
            Some((_, size)) => {
                for (key, value) in ["layers", "hidden", "heads"].iter().zip(size) {
                    self.set_if_absent(&format!("model.{key}"), *value);
                }
                self.set_if_absent("model.vocab", 50_257);
                self.set_if_absent("model.activation", "gelu");
                // Models of a pipeline have no dropout by default.
                let dropped = if builder.contains("pipeline") { 0.0 } else { 0.1 };
                self.set_if_absent("model.dropout", dropped);
                self.set_if_absent("model.attention_dropout", dropped);
                self.notes.push(format!(
                    "model.type {builder}: sizes, activation and dropout are those of titans; the \
                     learning rate schedule is in the Python code, not in this file"
                ));
            }
            None => self.refuse("model", format!("unknown model '{builder}'")),
        }
    }
}
