//! Input and output of a run: corpora, checkpoints and evaluations.

use toml::{Table, Value};

use super::{Build, ConfigFormat, KeyStatus, float, get, shown};

/// Flags of Megatron in 2019 that it has dropped since.
const ARGUMENTS_OF_2019: [&str; 9] = [
    "train-data",
    "lazy-loader",
    "loose-json",
    "presplit-sentences",
    "tokenizer-model-type",
    "resume-dataloader",
    "max-preds-per-seq",
    "fp32-embedding",
    "cache-dir",
];

impl Build {
    /// Whether the flags are those of Megatron's first release.
    pub(super) fn is_of_2019(&self) -> bool {
        ARGUMENTS_OF_2019.iter().any(|key| self.is_given(key))
    }

    /// Megatron does not evaluate if the number of iterations is below 1, transformers if no
    /// strategy is set.
    pub(super) fn evaluation(&mut self) {
        let strategy = self.fact("eval_strategy").map(shown);
        if let Some(steps) = self.count("eval_steps") {
            self.set("eval.every", steps);
        }
        match strategy.as_deref() {
            Some("no") => {
                self.set("eval.every", 0);
                self.correct("eval_steps", KeyStatus::Implied, "eval_strategy is no");
            }
            Some("steps") if self.config_integer("eval.every").is_none_or(|steps| steps == 0) => {
                let every = self.config_integer("log.every").unwrap_or(500);
                self.set("eval.every", every);
                self.default_of("eval_steps", &every.to_string(), "eval.every");
            }
            None | Some("steps") => {}
            Some(other) => {
                let text = format!("eval.every: expected no or steps, found '{other}'");
                self.correct("eval_strategy", KeyStatus::Refused, &text);
            }
        }
        let none = |key: &str| self.config_integer(key).is_some_and(|count| count < 1);
        if none("eval.iters") || none("eval.every") {
            self.set("eval", Table::from_iter([("every".to_owned(), Value::Integer(0))]));
        }
    }

    /// Steps between checkpoints.
    pub(super) fn saves(&mut self, source: ConfigFormat, sections: &[&str]) {
        const KEY: &str = "checkpoint.every.steps";
        if let Some(steps) = self.count("save_steps") {
            self.set(KEY, steps.max(0));
        }
        match self.fact("save_strategy").map(shown).as_deref() {
            None | Some("steps") => {}
            Some("no") => self.set(KEY, 0),
            Some(other) => {
                let text = format!("{KEY}: expected no or steps, found '{other}'");
                self.correct("save_strategy", KeyStatus::Refused, &text);
            }
        }
        if self.config_integer(KEY).is_none() && source == ConfigFormat::Paddle {
            self.set(KEY, 0);
            self.default_of("Engine.save_load.save_steps", "none", KEY);
        }
        if self.config_integer(KEY).is_some() || !sections.contains(&"megatron") {
            return;
        }
        let is_of_2019 = self.is_of_2019();
        let every = if is_of_2019 { 5000 } else { 0 };
        self.set(KEY, every);
        self.default_of("save-interval", &every.to_string(), KEY);
        let is_old = self.facts.contains_key("micro_v1") && source != ConfigFormat::Cpm;
        if is_old && !is_of_2019 {
            let text = "without --save-interval nothing is saved before the end; Megatron of 2019 \
                        saved every 5000 steps (hint: checkpoint.every.steps = 5000)";
            self.notes.push(text.to_owned());
        }
    }

    /// Datasets that must be converted first, or that are not a share of one dataset.
    pub(super) fn corpus(&mut self, source: ConfigFormat) {
        let data = self.fact("data").map(shown);
        for (eval, train, what) in [
            (self.fact("eval_data").map(shown), data.clone(), "eval_data"),
            (
                self.fact("eval_split").map(shown),
                get(&self.config, "data.split").map(shown),
                "eval_split",
            ),
        ] {
            if eval.is_some() && eval != train {
                let train = train.unwrap_or_else(|| "none".to_owned());
                let text = format!(
                    "data.split: validation data is a share of the training data, expected {train}"
                );
                self.correct(what, KeyStatus::Refused, &text);
            }
        }
        if let (ConfigFormat::Paddle, Some(data)) = (source, data) {
            let prefix = data.trim_end_matches('/');
            let text = format!(
                "data.train: expected token files, found a folder of NAME_ids.npy and NAME_idx.npz \
                 (hint: `feedline convert {prefix}/NAME {prefix}/converted`, then set data.train = \
                 \"{prefix}/converted\")"
            );
            self.remove("data.train");
            self.correct("data", KeyStatus::Refused, &text);
        }
    }

    pub(super) fn state(&mut self) {
        if let Some(data) = self.fact("data").cloned() {
            let corpora = corpora(&data);
            self.set("data.train", corpora);
        }
        if self.fact("load").is_some() {
            let path = self.fact("load").map(shown).unwrap_or_default();
            let own = get(&self.config, "run.dir").map(shown).as_deref() == Some(path.as_str());
            if own {
                self.set("checkpoint.load", "auto");
            } else {
                self.refuse(
                    "checkpoint.load",
                    format!(
                        "not a checkpoint of this program (hint: run `feedline ckpt import {path} \
                         OUT --from ...` and set its folder)"
                    ),
                );
            }
        }
        if self.on("only_weights") {
            self.set("checkpoint.load_parts", vec!["model"]);
        } else if self.on("no_optim") && self.fact("load").is_some() {
            self.set("checkpoint.load_parts", vec!["model"]);
            self.notes
                .push("without optimizer state, a new run starts from the weights".to_owned());
        }
        self.set_if_absent("run.dir", "runs/imported");
    }
}

/// A prefix, prefixes, or alternating weights and prefixes.
fn corpora(data: &Value) -> Value {
    let Value::Array(items) = data else { return data.clone() };
    let weighted =
        items.len() % 2 == 0 && items.iter().step_by(2).all(|weight| float(weight).is_some());
    if !weighted {
        return data.clone();
    }
    let pairs = items.chunks_exact(2).map(|pair| {
        let weight = float(&pair[0]).unwrap_or(1.0);
        Value::Table(Table::from_iter([
            ("path".to_owned(), pair[1].clone()),
            ("weight".to_owned(), Value::Float(weight)),
        ]))
    });
    Value::Array(pairs.collect())
}
