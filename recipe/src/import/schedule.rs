//! The length of a run, and its learning rate schedule.

use super::{Build, ConfigFormat, KeyStatus, get, shown};

impl Build {
    /// `scripted`: flags of a program give most of it.
    pub(super) fn schedule(&mut self, source: ConfigFormat, scripted: bool) {
        self.budget();
        self.decay_length();
        self.anneal_length();
        if self.deepspeed_scheduler(scripted) {
            return;
        }
        if self.training {
            self.transformers_schedule();
            return;
        }
        self.warmup_length();
        self.learning_rate(source);
    }

    fn budget(&mut self) {
        let given = ["samples", "tokens", "steps"];
        let mut given = given
            .into_iter()
            .filter_map(|unit| Some((unit, self.count(unit).filter(|count| *count > 0)?)));
        let (first, others) = (given.next(), given.map(|(unit, _)| unit).collect::<Vec<_>>());
        if let Some((unit, count)) = first {
            self.one("run.budget", unit, count);
        }
        for unit in others {
            self.correct(unit, KeyStatus::Refused, "run.budget: another key sets it");
        }
        if self.training && self.count("steps").is_some_and(|steps| steps <= 0) {
            self.correct("steps", KeyStatus::Implied, "not set: num_train_epochs ends the run");
        }
        if let Some(minutes) = self.count("wall_minutes") {
            self.set("run.max_wall", format!("{minutes}m"));
        }
    }

    fn decay_length(&mut self) {
        let decay = if self.on("in_samples") { "decay_samples" } else { "decay_steps" };
        if let (Some(value), true) = (self.fact("decay_steps").cloned(), self.on("in_samples")) {
            self.facts.insert("decay_samples", value);
        }
        let mut is_set = false;
        for (fact, unit) in
            [("decay_samples", "samples"), ("decay_tokens", "tokens"), (decay, "steps")]
        {
            let Some(count) = self.count(fact).filter(|count| *count > 0) else { continue };
            if is_set {
                let same = self.on("in_samples") && fact == decay;
                if !same {
                    let text = "optim.lr.decay: another key sets it";
                    self.correct(fact, KeyStatus::Refused, text);
                }
                continue;
            }
            self.one("optim.lr.decay", unit, count);
            is_set = true;
        }
    }

    fn anneal_length(&mut self) {
        for (fact, unit) in [("anneal_samples", "samples"), ("anneal_steps", "steps")] {
            if let Some(count) = self.count(fact) {
                self.one("optim.lr.anneal", unit, count);
            }
        }
    }

    /// Megatron refuses two lengths of a warm-up.
    fn warmup_length(&mut self) {
        let is_first = self.facts.contains_key("micro_v1");
        let lengths = ["warmup_samples", "warmup_steps"]
            .map(|fact| (fact, self.count(fact).filter(|n| *n > 0)));
        let part = self.number("warmup_fraction");
        let mut given = lengths.iter().filter_map(|(fact, count)| Some((*fact, (*count)?)));
        match (given.next(), given.next(), part) {
            (Some((fact, count)), other, part) => {
                self.one("optim.lr.warmup", fact.trim_start_matches("warmup_"), count);
                let twice = "optim.lr.warmup: another key sets it";
                if let Some((other, _)) = other {
                    self.correct(other, KeyStatus::Refused, twice);
                }
                if part.is_some() {
                    let fate = if self.is_default("warmup_fraction") {
                        KeyStatus::Implied
                    } else {
                        KeyStatus::Refused
                    };
                    self.correct("warmup_fraction", fate, twice);
                }
            }
            (None, _, Some(part)) => self.one("optim.lr.warmup", "fraction", part),
            (None, _, None) if self.number("peak").or(self.number("peak_optimizer")).is_none() => {}
            (None, _, None)
                if is_first && lengths.iter().all(|(fact, _)| self.fact(fact).is_none()) =>
            {
                self.one("optim.lr.warmup", "fraction", 0.01);
                self.default_of("warmup", "0.01", "optim.lr.warmup");
            }
            (None, _, None) => self.one("optim.lr.warmup", "steps", 0),
        }
    }

    fn learning_rate(&mut self, source: ConfigFormat) {
        let (given, optimizers) = (self.number("peak"), self.number("peak_optimizer"));
        let peak = given.or(optimizers);
        if let Some(peak) = peak {
            self.set("optim.lr.peak", peak);
        }
        if let (Some(given), Some(other)) = (given, optimizers)
            && given != other
        {
            let text = format!("optim.lr.peak: the program sets {given}");
            self.correct("peak_optimizer", KeyStatus::Refused, &text);
        }
        let style = get(&self.config, "optim.lr.style").map(shown).unwrap_or_default();
        let first_megatron = source == ConfigFormat::Cpm || self.facts.contains_key("micro_v1");
        let is_cpm2 = self.facts.contains_key("model_file");
        if first_megatron && ["linear", "cosine"].contains(&style.as_str()) {
            self.first_schedule(is_cpm2);
        }
        if first_megatron && style == "inverse-sqrt" {
            self.noam(peak);
        }
        if is_cpm2 && style == "exponential" {
            self.set("optim.lr.style", "constant");
            self.notes.push(
                "the exponential decay of CPM-2 has no effect: its rate is constant".to_owned(),
            );
        }
        let has_optimizer = get(&self.config, "optim.name").is_some();
        if source == ConfigFormat::Deepspeed
            && style.is_empty()
            && (peak.is_some() || has_optimizer)
        {
            self.set("optim.lr.style", "constant");
            if peak.is_none() {
                self.set("optim.lr.peak", 1e-3);
                self.one("optim.lr.warmup", "steps", 0);
                self.default_of("optimizer.params.lr", "0.001", "optim.lr.peak");
            }
        }
        if source == ConfigFormat::Paddle && style == "cosine" {
            self.notes.push(
                "CosineAnnealingWithWarmupDecay of PaddleFleetX starts at index 1, so its rates \
                 are one step ahead of those here"
                    .to_owned(),
            );
        }
        if source == ConfigFormat::Colossal && peak.is_some() {
            self.notes.push(
                "the schedule of the learning rate is in the Python code, not in this file \
                 (hint: set optim.lr.style, optim.lr.warmup and optim.lr.decay)"
                    .to_owned(),
            );
        }
    }

    /// `AnnealingLR` of the first Megatron, and its variant in CPM-2.
    fn first_schedule(&mut self, is_cpm2: bool) {
        match self.warmup_and_decay().filter(|_| is_cpm2) {
            // The decay has the full length from the end of the warm-up, so the run ends before it
            // does.
            Some((warmup, decay)) => {
                self.one("optim.lr.warmup", "steps", warmup as i64);
                self.one("optim.lr.decay", "steps", (decay + warmup) as i64);
                self.notes.push(format!(
                    "CPM-2 counts the {decay} steps of decay from the end of the warm-up; the \
                     run ends before the last {warmup}"
                ));
            }
            None => self.set("optim.lr.floor_mode", "clamp"),
        }
    }

    /// Steps of warm-up and decay, as the first Megatron counts them.
    fn warmup_and_decay(&self) -> Option<(f64, f64)> {
        let decay = self.number("decay_steps").or_else(|| self.number("steps"))?;
        let by_part = || Some((decay * self.number("warmup_fraction")?).floor());
        Some((self.number("warmup_steps").or_else(by_part)?, decay))
    }

    /// `lr / sqrt(step)`, with the peak at the end of the warm-up.
    fn noam(&mut self, lr: Option<f64>) {
        let warm = self.warmup_and_decay().map(|(warm, _)| warm).filter(|steps| *steps > 0.0);
        match (lr, warm) {
            (Some(lr), Some(warm)) => {
                self.set("optim.lr.peak", lr / warm.sqrt());
                self.notes.push(format!(
                    "--lr {lr} of noam is the rate of step 1; optim.lr.peak is the rate after \
                     {warm} steps of warm-up, lr / sqrt({warm})"
                ));
            }
            _ => self.refuse("optim.lr.peak", "noam needs the number of warm-up steps".to_owned()),
        }
    }

    /// Whether a fact is a default of its system.
    fn is_default(&self, fact: &str) -> bool {
        let keys = self.keys.get(fact).into_iter().flatten();
        keys.map(|at| &self.fates[*at]).all(|key| key.fate == KeyStatus::Default)
    }

    /// Records a default of the other system that is in our config.
    pub(super) fn default_of(&mut self, key: &str, value: &str, target: &str) {
        if self.is_given(key) {
            return;
        }
        let [file, key, value, text] = ["default", key, value, target].map(str::to_owned);
        self.fates.push(super::KeyReport { file, key, value, fate: KeyStatus::Default, text });
    }

    /// Whether the input has a key, which may be refused.
    pub(super) fn is_given(&self, key: &str) -> bool {
        let is_it = |name: &str| name.strip_prefix("--").unwrap_or(name) == key;
        self.fates.iter().any(|given| given.file != "default" && is_it(&given.key))
    }

    /// Corrects the fates of the keys of a fact.
    pub(super) fn correct(&mut self, fact: &str, fate: KeyStatus, text: &str) {
        for at in self.keys.get(fact).into_iter().flatten() {
            self.fates[*at].fate = fate;
            text.clone_into(&mut self.fates[*at].text);
        }
    }

    /// Corrects the reports of the keys that are mapped to the config key `target`.
    pub(super) fn correct_target(&mut self, target: &str, fate: KeyStatus, text: &str) {
        let is_it = |key: &&mut super::KeyReport| {
            key.text == target && matches!(key.fate, KeyStatus::Mapped | KeyStatus::Default)
        };
        for key in self.fates.iter_mut().filter(is_it) {
            key.fate = fate;
            text.clone_into(&mut key.text);
        }
    }

    /// Removes a config key.
    pub(super) fn remove(&mut self, key: &str) {
        let Some((sections, last)) = key.rsplit_once('.') else { return };
        let mut table = Some(&mut self.config);
        for section in sections.split('.') {
            table = table.and_then(|table| table.get_mut(section)?.as_table_mut());
        }
        if let Some(table) = table {
            table.remove(last);
        }
    }
}
