//! The schedulers of DeepSpeed and of transformers.

use super::{Build, KeyStatus, float, found, get, shown};

/// Parameters of the schedulers of DeepSpeed, by their names in the tables.
const SCHEDULERS: [(&str, &str, &[&str]); 4] = [
    ("WarmupLR", "constant", &["ds_min", "ds_max", "ds_warmup", "ds_shape"]),
    ("WarmupDecayLR", "linear", &["ds_min", "ds_max", "ds_warmup", "ds_shape", "ds_total"]),
    (
        "WarmupCosineLR",
        "cosine",
        &["ds_min_ratio", "ds_cos_ratio", "ds_warmup", "ds_shape", "ds_total"],
    ),
    ("LRRangeTest", "range-test", &["ds_test_min", "ds_test_size", "ds_test_rate"]),
];

/// Keys that transformers fills in for `"auto"` (`HfTrainerDeepSpeedConfig`).
pub(super) const FILLED: [&str; 18] = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "fp16.enabled",
    "bf16.enabled",
    "bfloat16.enabled",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
];

impl Build {
    /// The scheduler of a DeepSpeed config, as its engine runs it. False if there is none.
    pub(super) fn deepspeed_scheduler(&mut self, scripted: bool) -> bool {
        let Some(name) = self.fact("ds_scheduler").map(shown) else {
            self.refuse_facts(&[], "no effect without scheduler.type");
            return false;
        };
        if scripted && !self.training && self.number("peak").is_some() {
            let text = "optim.lr.style: the program has a schedule of its own, and which of the \
                        two runs depends on the version of DeepSpeed (hint: delete one)";
            self.refuse_facts(&[], "no effect: scheduler.type is refused");
            self.correct("ds_scheduler", KeyStatus::Refused, text);
            return false;
        }
        let Some((_, style, parameters)) = SCHEDULERS.iter().find(|row| row.0 == name) else {
            let names = SCHEDULERS.map(|row| row.0).join(" or ");
            let text = format!("optim.lr.style: expected {names}, found '{name}'");
            self.correct("ds_scheduler", KeyStatus::Refused, &text);
            return true;
        };
        self.refuse_facts(parameters, &format!("{name} has no such parameter"));
        self.set("optim.lr.style", *style);
        if self.training {
            let text = "the scheduler of DeepSpeed runs instead";
            for fact in ["hf_schedule", "hf_warmup", "warmup_fraction"] {
                self.correct(fact, KeyStatus::Implied, text);
            }
        }
        match *style {
            "range-test" => self.range_test(),
            "cosine" => self.warmup_cosine(),
            _ => self.warmup(style),
        }
        true
    }

    fn refuse_facts(&mut self, except: &[&str], text: &str) {
        let all = SCHEDULERS.iter().flat_map(|(_, _, names)| names.iter());
        let others: Vec<&str> = all.copied().filter(|name| !except.contains(name)).collect();
        for name in others {
            self.correct(name, KeyStatus::Refused, text);
        }
    }

    /// A parameter, which transformers may fill in.
    fn parameter(&mut self, name: &str) -> Option<f64> {
        if self.fact(name).and_then(toml::Value::as_str) != Some("auto") {
            return self.number(name);
        }
        match name {
            "ds_min" => Some(0.0),
            "ds_max" => self.number("peak"),
            "ds_total" => self.number("steps").filter(|steps| *steps > 0.0),
            "ds_warmup" => {
                let total = self.count("steps").filter(|steps| *steps > 0);
                match (self.number("hf_warmup"), self.number("warmup_fraction"), total) {
                    (Some(steps), _, _) if steps >= 1.0 => Some(steps.trunc()),
                    (Some(part), _, Some(total)) if part > 0.0 => {
                        Some((part * total as f64).ceil())
                    }
                    (_, Some(part), Some(total)) => Some((part * total as f64).ceil().max(1.0)),
                    (Some(0.0) | None, None, _) => Some(1.0),
                    _ => {
                        let text = "the number of warm-up steps needs max_steps".to_owned();
                        self.refuse("optim.lr.warmup", text);
                        None
                    }
                }
            }
            _ => None,
        }
    }

    /// `WarmupLR` and `WarmupDecayLR`. The engine computes a rate after each step, so that all
    /// rates are one step late.
    fn warmup(&mut self, style: &str) {
        let total = self.parameter("ds_total");
        let warmup = self.warmup_steps();
        self.set("optim.lr.lag", "all");
        if style == "linear" {
            self.total_steps(total);
        } else if let Some(steps) = self.count("steps").filter(|steps| *steps < warmup) {
            // The run ends in its warm-up.
            let longer = warmup.max(steps);
            self.one("optim.lr.decay", "steps", longer);
        }
        let from = self.parameter("ds_min").unwrap_or(0.0);
        self.set("optim.lr.start", from);
        if style == "linear" {
            self.set("optim.lr.floor", from);
        }
        let optimizers = self.number("peak_optimizer").or_else(|| self.number("peak"));
        let instead = "scheduler.params.warmup_max_lr is used instead";
        if let Some(peak) = self.parameter("ds_max") {
            self.set("optim.lr.peak", peak);
            if optimizers != Some(peak) {
                self.correct("peak_optimizer", KeyStatus::Implied, instead);
            }
            return;
        }
        match optimizers.filter(|rate| *rate != 1e-3) {
            Some(rate) if style == "constant" => {
                self.set("optim.lr.peak", rate);
                self.refuse(
                    "scheduler.params.warmup_max_lr",
                    format!(
                        "optim.lr.peak: not set, and versions of DeepSpeed differ: earlier ones \
                         use 0.001, later ones the {rate} of the optimizer (hint: set it)"
                    ),
                );
            }
            other => {
                self.set("optim.lr.peak", 1e-3);
                self.default_of("scheduler.params.warmup_max_lr", "0.001", "optim.lr.peak");
                if let Some(rate) = other {
                    let text = format!("the 0.001 of {instead}");
                    let text = text.replace(" is used", ", its default, is used");
                    self.correct("peak_optimizer", KeyStatus::Implied, &text);
                    self.notes.push(format!(
                        "optimizer.params.lr = {rate} has no effect: without warmup_max_lr \
                         WarmupDecayLR rises to 0.001"
                    ));
                }
            }
        }
    }

    /// The steps of a warm-up, and its curve.
    fn warmup_steps(&mut self) -> i64 {
        let given = self.parameter("ds_warmup");
        if given.is_some_and(|steps| steps < 1.0) {
            let text = "optim.lr.warmup: expected a positive integer, found 0 or less";
            self.correct("ds_warmup", KeyStatus::Refused, text);
        }
        if given.is_none() {
            self.default_of("scheduler.params.warmup_num_steps", "1000", "optim.lr.warmup");
        }
        // It has at least two steps.
        let steps = given.unwrap_or(1000.0).max(2.0) as i64;
        if given.is_some() || !self.is_given("scheduler.params.warmup_num_steps") {
            self.one("optim.lr.warmup", "steps", steps);
        }
        let shape = self.fact("ds_shape").map(shown);
        match shape.as_deref() {
            Some(shape @ ("log" | "linear")) => self.set("optim.lr.warmup_shape", shape),
            Some(other) => {
                let text =
                    format!("optim.lr.warmup_shape: expected log or linear, found '{other}'");
                self.correct("ds_shape", KeyStatus::Refused, &text);
            }
            None => {
                self.set("optim.lr.warmup_shape", "log");
                self.default_of("scheduler.params.warmup_type", "log", "optim.lr.warmup_shape");
            }
        }
        steps
    }

    fn total_steps(&mut self, total: Option<f64>) {
        match total.filter(|steps| *steps >= 1.0) {
            Some(steps) => self.one("optim.lr.decay", "steps", steps as i64),
            // transformers fills in the steps of the run.
            None if self.facts.contains_key("ds_total") => {}
            None if self.is_given("scheduler.params.total_num_steps") => {}
            None => self.refuse(
                "scheduler.params.total_num_steps",
                "optim.lr.decay: DeepSpeed requires it".to_owned(),
            ),
        }
    }

    /// The warm-up is one step late, and the cosine counts one step more.
    fn warmup_cosine(&mut self) {
        let total = self.parameter("ds_total");
        self.warmup_steps();
        self.total_steps(total);
        self.set("optim.lr.lag", "warmup");
        let peak = self.number("peak_optimizer").or_else(|| self.number("peak"));
        let peak = peak.unwrap_or_else(|| {
            self.default_of("optimizer.params.lr", "0.001", "optim.lr.peak");
            1e-3
        });
        self.set("optim.lr.peak", peak);
        let ratios = [
            ("ds_min_ratio", "scheduler.params.warmup_min_ratio", "start", 0.0),
            ("ds_cos_ratio", "scheduler.params.cos_min_ratio", "floor", 1e-4),
        ];
        for (fact, key, target, default) in ratios {
            let target = format!("optim.lr.{target}");
            if self.number(fact).is_none() && default > 0.0 {
                self.default_of(key, &default.to_string(), &target);
            }
            self.set(&target, self.number(fact).unwrap_or(default) * peak);
        }
    }

    /// The rate of DeepSpeed rises without end. Here it rises over the decay, to the rate of
    /// DeepSpeed at the end of the run.
    fn range_test(&mut self) {
        let floor = self.number("ds_test_min").unwrap_or(1e-3);
        let size = self.number("ds_test_size").unwrap_or(2000.0);
        let rate = self.number("ds_test_rate").unwrap_or(1.0);
        if size < 1.0 {
            let text = "optim.lr.peak: expected a positive integer, found 0 or less";
            self.correct("ds_test_size", KeyStatus::Refused, text);
        }
        let steps = self.number("steps").filter(|steps| *steps > 0.0).unwrap_or(size.max(1.0));
        self.set("optim.lr.floor", floor);
        self.set("optim.lr.peak", floor * (1.0 + rate * steps / size.max(1.0)));
        self.one("optim.lr.decay", "steps", steps as i64);
        let text = "the scheduler sets the learning rate";
        self.correct("peak_optimizer", KeyStatus::Implied, text);
    }

    /// `get_scheduler` of transformers.
    pub(super) fn transformers_schedule(&mut self) {
        let (optimizers, given) = (self.number("peak_optimizer"), self.number("peak"));
        let Some(peak) = optimizers.or(given) else { return };
        self.set("optim.lr.peak", peak);
        let name = self.fact("hf_schedule").map_or("linear".to_owned(), shown);
        let style = match name.as_str() {
            "linear" | "cosine" | "constant" => name.as_str(),
            "constant_with_warmup" => "constant",
            "cosine_with_min_lr" => "cosine",
            "inverse_sqrt" => "inverse-sqrt",
            "warmup_stable_decay" => "wsd",
            other => {
                let text = format!(
                    "optim.lr.style: expected linear, cosine, cosine_with_min_lr, constant, \
                     constant_with_warmup, inverse_sqrt or warmup_stable_decay, found '{other}'"
                );
                self.correct("hf_schedule", KeyStatus::Refused, &text);
                return;
            }
        };
        self.set("optim.lr.style", style);
        if name == "constant" {
            self.one("optim.lr.warmup", "steps", 0);
            for fact in ["hf_warmup", "warmup_fraction"] {
                if self.number(fact).is_some_and(|length| length > 0.0) {
                    let text = "constant has no warm-up; constant_with_warmup has one";
                    self.correct(fact, KeyStatus::Implied, text);
                }
            }
        } else {
            self.transformers_warmup(style);
        }
        match name.as_str() {
            "cosine_with_min_lr" => self.min_lr(peak),
            "warmup_stable_decay" => {
                self.set_if_absent("optim.lr.anneal_style", "cosine");
                if get(&self.config, "optim.lr.anneal").is_none() {
                    let text = "warmup_stable_decay requires num_decay_steps".to_owned();
                    self.refuse("lr_scheduler_kwargs", text);
                }
            }
            _ => {}
        }
    }

    /// A value below 1 is a fraction of all steps, rounded up.
    fn transformers_warmup(&mut self, style: &str) {
        let (steps, part) = (self.number("hf_warmup"), self.number("warmup_fraction"));
        let steps = steps.filter(|steps| *steps != 0.0);
        if steps.is_some() && part.is_some() {
            let text = "warmup_steps is used instead";
            self.correct("warmup_fraction", KeyStatus::Implied, text);
        }
        let total = self.count("steps").filter(|steps| *steps > 0);
        let length = steps.or(part).unwrap_or(0.0);
        let is_part = length < 1.0 || (steps.is_none() && part.is_some());
        let refused = |value| format!("optim.lr.warmup: expected steps or a part, found {value}");
        if length < 0.0 || (!is_part && length.fract() != 0.0) || (is_part && length > 1.0) {
            let value = found(&toml::Value::Float(length));
            let fact = if steps.is_some() { "hf_warmup" } else { "warmup_fraction" };
            self.correct(fact, KeyStatus::Refused, &refused(value));
            return;
        }
        match total.filter(|_| is_part) {
            _ if !is_part || length == 0.0 => self.one("optim.lr.warmup", "steps", length as i64),
            Some(total) => {
                let steps = (total as f64 * length).ceil() as i64; // fits: at most `total`.
                self.one("optim.lr.warmup", "steps", steps);
            }
            None => self.one("optim.lr.warmup", "fraction", length),
        }
        if style == "inverse-sqrt" && length == 0.0 {
            let text = "optim.lr.warmup: without a warm-up inverse_sqrt decays over 10,000 steps, \
                        which is not supported";
            self.correct("hf_schedule", KeyStatus::Refused, text);
            self.remove("optim.lr.style");
        }
    }

    fn min_lr(&mut self, peak: f64) {
        let (lowest, part) = (self.number("min_lr"), self.number("floor_fraction"));
        match (lowest, part) {
            (Some(floor), None) => self.set("optim.lr.floor", floor),
            (None, Some(part)) => self.set("optim.lr.floor", part * peak),
            _ => {
                let text = "cosine_with_min_lr requires either min_lr or min_lr_rate".to_owned();
                self.refuse("lr_scheduler_kwargs", text);
            }
        }
    }

    /// transformers compares the keys of its DeepSpeed config with its own arguments.
    pub(super) fn agree(&mut self, given: &[super::SourceKey]) {
        let pairs = [
            ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", "8"),
            ("gradient_clipping", "max_grad_norm", "1.0"),
            ("optimizer.params.lr", "learning_rate", "5e-5"),
            ("optimizer.params.eps", "adam_epsilon", "1e-8"),
            ("optimizer.params.weight_decay", "weight_decay", "0.0"),
            ("scheduler.params.warmup_max_lr", "learning_rate", "5e-5"),
        ];
        let value = |name: &str| given.iter().find(|given| given.name == name);
        for (deepspeed_key, argument, default) in pairs {
            let Some(key) = value(deepspeed_key) else { continue };
            let own = value(argument).map_or(super::plain(default), |given| given.value.clone());
            if let (Some(found), Some(own)) = (float(&key.value), float(&own))
                && found != own
            {
                let text = format!(
                    "expected {own} as in the training arguments ({argument}), found {found} \
                     (hint: \"auto\" takes the argument)"
                );
                self.refuse(&key.key, text);
            }
        }
        self.agree_on_dtype(given);
        let has = |section: &str| given.iter().any(|given| given.name.starts_with(section));
        if (has("zero_optimization") || has("fp16.") || has("bf16."))
            && value("gradient_clipping").is_none()
        {
            self.set("optim.clip", 0.0);
            let text = "DeepSpeed clips, and its config has no gradient_clipping";
            self.correct_target("optim.clip", KeyStatus::Implied, text);
            self.default_of("gradient_clipping", "0.0", "optim.clip");
        }
    }

    fn agree_on_dtype(&mut self, given: &[super::SourceKey]) {
        for (deepspeed_key, argument) in [("fp16.enabled", "fp16"), ("bf16.enabled", "bf16")] {
            let on = |name: &str, notation| {
                let key = given.iter().find(|given| given.name == name)?;
                super::boolean(&key.value, notation).ok()
            };
            let own = on(argument, super::Notation::Transformers).unwrap_or(false);
            if let Some(is_on) = on(deepspeed_key, super::Notation::Pydantic)
                && is_on != own
            {
                let text = format!(
                    "expected {own} as in the training arguments ({argument}), found {is_on}"
                );
                self.refuse(deepspeed_key, text);
            }
        }
    }

    /// `"auto"` takes the training argument, if there are training arguments.
    pub(super) fn auto(&mut self, row: &super::KeyRow) -> (KeyStatus, String) {
        use super::KeyRule;
        if !self.training {
            let text = "\"auto\" is a training argument of transformers (hint: use --from hf and \
                        add the file with the arguments)";
            return (KeyStatus::Refused, text.to_owned());
        }
        if !FILLED.contains(&row.key) {
            return (KeyStatus::Refused, "transformers has no argument for \"auto\"".to_owned());
        }
        if let KeyRule::As { name, .. } = row.rule
            && (name.starts_with("ds_") || name == "bucket_elements")
        {
            self.facts.insert(name, toml::Value::String("auto".to_owned()));
        }
        (KeyStatus::Implied, "taken from the training arguments".to_owned())
    }
}
