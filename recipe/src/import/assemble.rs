//! Our keys that several of theirs make together.

use toml::{Table, Value};

use super::{Build, ConfigFormat, Imported, KeyReport, KeyStatus, float, get, is_off, set, shown};
use crate::config::{Config, ConfigError};

/// Our keys without a default.
const REQUIRED: [&str; 10] = [
    "run.budget",
    "model.layers",
    "model.hidden",
    "model.heads",
    "model.vocab",
    "model.seq_len",
    "data.train",
    "batch.global",
    "batch.micro",
    "optim.lr.peak",
];

impl Build {
    pub(super) fn assemble(
        &mut self,
        source: ConfigFormat,
        program: Option<&str>,
        names: &[String],
    ) {
        self.model(source, program.unwrap_or(""));
        self.precision();
        self.layout();
        self.batch();
        self.told_twice();
        self.lengths();
        self.learning_rate(source, program.is_some());
        self.state();
        for name in ["file", "model_file"].iter().filter_map(|name| self.facts.get(name)) {
            let text = shown(name);
            let last = text.rsplit('/').next().unwrap_or(&text).to_owned();
            if !names.contains(&last) {
                self.notes.push(format!(
                    "{text} is not among the files (hint: add it to the command line)"
                ));
            }
        }
    }

    pub(super) fn fact(&self, name: &str) -> Option<&Value> {
        self.facts.get(name).filter(|value| value.as_str() != Some("null"))
    }

    fn number(&self, name: &str) -> Option<f64> {
        self.fact(name).and_then(float)
    }

    /// A count; what is no whole number is none.
    pub(super) fn count(&self, name: &str) -> Option<i64> {
        self.number(name).filter(|n| n.fract() == 0.0 && n.abs() < 1e15).map(|n| n as i64)
    }

    fn on(&self, name: &str) -> bool {
        self.facts.get(name).is_some_and(|value| !is_off(value))
    }

    fn ours(&self, key: &str) -> Option<i64> {
        get(&self.config, key).and_then(Value::as_integer)
    }

    pub(super) fn set(&mut self, key: &str, value: impl Into<Value>) {
        set(&mut self.config, key, value.into());
    }

    pub(super) fn set_if_absent(&mut self, key: &str, value: impl Into<Value>) {
        if get(&self.config, key).is_none() {
            self.set(key, value);
        }
    }

    fn one(&mut self, key: &str, unit: &str, value: impl Into<Value>) {
        self.set(key, Table::from_iter([(unit.to_owned(), value.into())]));
    }

    /// A refusal that belongs to no single key.
    pub(super) fn refuse(&mut self, ours: &str, text: String) {
        let (file, value) = ("combined".to_owned(), String::new());
        self.fates.push(KeyReport {
            file,
            key: ours.to_owned(),
            value,
            fate: KeyStatus::Refused,
            text,
        });
    }

    fn model(&mut self, source: ConfigFormat, program: &str) {
        let family = [("gpt", "gpt"), ("t5", "t5"), ("enc_dec", "t5"), ("bert", "bert")];
        if let Some((_, family)) = family.iter().find(|(part, _)| program.contains(part)) {
            self.set_if_absent("model.family", *family);
        }
        if source == ConfigFormat::Hf && self.ours("model.dec_len").is_some() {
            self.set_if_absent("model.family", "t5");
        }
        let family = get(&self.config, "model.family").map_or("gpt".to_owned(), shown);
        let is_cpm2 = source == ConfigFormat::Cpm && program.contains("enc_dec");
        let of_megatron = !program.is_empty() && source != ConfigFormat::Hf && !is_cpm2;
        if source == ConfigFormat::Cpm && of_megatron {
            self.cpm1(&family);
        }
        if self.on("exact_gelu") {
            self.set_if_absent("model.activation", "gelu");
        }
        if of_megatron {
            self.encoders_of_megatron(source, &family);
        }
        if family == "llama" || self.facts.contains_key("kv_heads") {
            let (heads, shared) = (self.ours("model.heads"), self.count("kv_heads"));
            if shared.is_some_and(|shared| Some(shared) != heads) {
                self.refuse("model.heads", "grouped-query attention is not supported".to_owned());
            }
        }
        if get(&self.config, "model.activation").map(shown).as_deref() == Some("swiglu")
            && get(&self.config, "model.family").map(shown).as_deref() == Some("gpt")
            && source == ConfigFormat::Hf
        {
            self.set("model.norm", "rmsnorm");
            self.set("model.positions", "rope");
        }
        if let Some(len) = self.count("seq_len").or_else(|| self.count("positions_max")) {
            self.set("model.seq_len", len);
            if self.count("positions_max").is_some_and(|known| known < len) {
                self.refuse(
                    "model.seq_len",
                    format!("{len} tokens exceed the number of positions"),
                );
            }
        }
        if let Some(embedding) = self.number("dropout_embedding") {
            self.set_if_absent("model.dropout", embedding);
            let blocks = get(&self.config, "model.dropout").and_then(float);
            if blocks != Some(embedding) {
                let text =
                    format!("expected one value for embedding and blocks, found {embedding}");
                self.refuse("model.dropout", text);
            }
        }
        if let (Some(ratio), Some(hidden)) = (self.number("mlp_ratio"), self.ours("model.hidden")) {
            self.set_if_absent("model.ffn", (ratio * hidden as f64) as i64);
        }
        self.builder();
        if let ("bert", Some(types)) = (family.as_str(), self.count("token_types")) {
            self.set("model.token_types", types);
        }
        if source == ConfigFormat::Cpm && family == "t5" {
            self.set("data.objective", "encdec");
        }
        // What its GPT programs take where they are told none.
        if of_megatron && source != ConfigFormat::Cpm && program.contains("pretrain_gpt") {
            self.tokenizer_of_gpt();
        }
        self.tokenizer();
    }

    /// What its two programs make of its flags.
    fn cpm1(&mut self, family: &str) {
        if !self.on("fused_gelu") {
            self.set_if_absent("model.activation", "gelu");
        }
        if family != "gpt" {
            // No biases unless it is told to.
            self.set_if_absent("model.bias", false);
            return;
        }
        let Some(hidden) = self.ours("model.hidden") else { return };
        let width = self.ours("model.heads").filter(|heads| *heads > 0).map(|heads| hidden / heads);
        let made = [("ffn", "ff", Some(4 * hidden)), ("head_dim", "kv", width)];
        for (key, flag, value) in made {
            let (key, Some(value)) = (format!("model.{key}"), value) else { continue };
            if self.ours(&key).is_some_and(|given| given != value) {
                self.set(&key, value);
                self.notes.push(format!(
                    "the GPT-2 of CPM-1 ignores --{flag}-hidden-size: {key} is {value}"
                ));
            }
        }
        self.set("model.bias", true);
    }

    /// Megatron's T5 is its GPT with an encoder, and its BERT has the norms of that.
    fn encoders_of_megatron(&mut self, source: ConfigFormat, family: &str) {
        if family == "bert" {
            let text = "Megatron's BERT has norms before its blocks; here they come after the \
                        blocks, as in the original BERT";
            self.refuse("model.family", text.to_owned());
        }
        if family != "t5" {
            return;
        }
        self.set_if_absent("model.positions", "learned");
        self.set_if_absent("model.norm", "layernorm");
        self.set_if_absent("model.activation", "gelu-tanh");
        self.set_if_absent("model.tie_embeddings", true);
        self.set_if_absent("model.bias", true);
        if get(&self.config, "model.positions").map(shown).as_deref() == Some("relative-bias") {
            self.notes.push(
                "with relative positions attention logits are not scaled here, and logits of a \
                 tied head are, as in the original T5; Megatron does the opposite"
                    .to_owned(),
            );
        }
        if source == ConfigFormat::Cpm {
            self.notes.push(
                "the decoder of CPM-1 has one norm for cross-attention and feed-forward; here each \
                 has its own norm"
                    .to_owned(),
            );
        }
    }

    fn precision(&mut self) {
        if self.on("amp") {
            let name = self.fact("amp_dtype").map_or("float16".to_owned(), shown);
            let ours = if name == "bfloat16" { "bf16" } else { "fp16" };
            self.set_if_absent("precision.dtype", ours);
        }
        match self.number("loss_scale") {
            Some(scale) if scale > 0.0 => {
                self.set("precision.loss_scale.init", scale);
                self.set("precision.loss_scale.window", 0);
            }
            _ => {
                if let Some(power) =
                    self.count("scale_power").filter(|power| (0..63).contains(power))
                {
                    self.set("precision.loss_scale.init", 1_i64 << power);
                }
            }
        }
        let fp16 = get(&self.config, "precision.dtype").map(shown).as_deref() == Some("fp16");
        if let Some(Value::Table(precision)) = self.config.get_mut("precision")
            && !fp16
        {
            precision.remove("loss_scale");
        }
        if let (Some(a), Some(b)) = (self.number("beta1"), self.number("beta2")) {
            self.set("optim.betas", vec![a, b]);
        }
    }

    fn layout(&mut self) {
        let pp = self.count("pp").unwrap_or(1).max(1);
        self.set("parallel.pp", pp);
        let by_layers =
            self.count("layers_per_virtual").filter(|layers| *layers > 0).and_then(|n| {
                let stages = self.ours("model.layers")? / pp / n;
                Some(stages)
            });
        let stages = self.count("virtual_stages").or(by_layers).filter(|stages| *stages > 1);
        if let Some(stages) = stages {
            self.set("parallel.virtual_stages", stages);
            self.set("parallel.schedule", "interleaved");
        }
        if self.count("sharding").is_some_and(|degree| degree > 1) {
            self.set("parallel.zero", self.count("sharding_stage").unwrap_or(1));
        }
        if let Some(elements) = self.number("bucket_elements").filter(|elements| *elements > 0.0) {
            self.set("parallel.bucket_mib", (elements * 4.0 / 1048576.0).clamp(1.0, 4096.0) as i64);
        }
        let place = self.fact("offload").map(shown).unwrap_or_default();
        let folder = self.fact("nvme_path").map(shown);
        match (place.as_str(), folder) {
            ("nvme", Some(folder)) => self.set("optim.offload", format!("nvme:{folder}")),
            ("cpu", _) => self.set("optim.offload", "cpu"),
            ("nvme", None) => {
                self.refuse("optim.offload", "expected a folder with nvme".to_owned());
            }
            _ => {}
        }
        match self.fact("granularity").map(shown).as_deref() {
            Some("core_attn") => self.set("parallel.recompute.mode", "none"),
            None | Some("full" | "full_attn") => {}
            Some(other) => {
                self.refuse("parallel.recompute", format!("unknown granularity '{other}'"));
            }
        }
        let seconds = self.count("timeout_minutes").map(|minutes| 60 * minutes);
        if let Some(seconds) = seconds.or_else(|| self.count("timeout_seconds")) {
            self.set("parallel.timeout", format!("{seconds}s"));
        }
    }

    /// `global = micro x accumulation x dp`, with `dp = ranks / (tp x pp)`.
    fn batch(&mut self) {
        let (tp, pp) =
            (self.ours("parallel.tp").unwrap_or(1), self.ours("parallel.pp").unwrap_or(1));
        let world = self
            .count("world")
            .or_else(|| Some(self.count("gpus")? * self.count("nodes").unwrap_or(1)));
        let named = self.count("dp").map(|dp| dp * self.count("sharding").unwrap_or(1));
        let dp = named.or_else(|| world.map(|world| world / (tp * pp).max(1)));
        let local = self.count("local");
        // The program's own loader takes the flag.
        if let (Some(engine), Some(flag)) = (self.count("micro"), self.count("micro_v1"))
            && engine != flag
        {
            let text =
                format!("expected equal values, found {engine} in JSON and --batch-size {flag}");
            self.refuse("batch.micro", text);
        }
        let micro = self
            .count("micro_v1")
            .or_else(|| self.count("micro"))
            .or_else(|| Some(local? / self.count("local_micro_batches").unwrap_or(1).max(1)));
        let passes = match (local, micro) {
            (Some(local), Some(micro)) if micro > 0 => {
                Some(local / micro * self.count("accumulation").unwrap_or(1).max(1))
            }
            _ => self.count("accumulation"),
        };
        // Paddle's accumulation is the local batch in micro-batches, said again.
        let passes = if self.facts.contains_key("sharding") && local.is_some() {
            local.zip(micro).map(|(local, micro)| local / micro.max(1))
        } else {
            passes
        };
        let made = |dp: i64| Some(micro? * passes.unwrap_or(1) * dp);
        let global = self.count("global").or_else(|| made(dp.unwrap_or(1)));
        if let Some(dp) = dp.filter(|_| passes.is_some())
            && made(dp) != global
            && let (Some(global), Some(micro)) = (global, micro)
        {
            let (passes, made) = (passes.unwrap_or(1), made(dp).unwrap_or(0));
            self.refuse(
                "batch.global",
                format!(
                    "expected micro {micro} x accumulation {passes} x dp {dp} = {made}, found \
                     {global}"
                ),
            );
        }
        if let (Some(global), Some(micro)) = (global, micro) {
            self.set("batch.global", global);
            self.set("batch.micro", micro);
        }
        self.reduce(micro.zip(global), dp);
        if let Some(ranks) = world.filter(|ranks| ranks % (tp * pp).max(1) != 0) {
            let text = format!("expected a multiple of tp {tp} x pp {pp} ranks, found {ranks}");
            self.refuse("parallel", text);
        } else if let Some(ranks) = world.or_else(|| dp.map(|dp| dp * tp * pp)) {
            self.notes.push(format!(
                "the run had {ranks} ranks: dp {} x tp {tp} x pp {pp}",
                ranks / (tp * pp).max(1)
            ));
        } else if self.count("global").is_none() && global.is_some() {
            self.notes.push(
                "no file sets the number of ranks: batch.global is that of one replica (hint: \
                 --ranks N)"
                    .to_owned(),
            );
        }
        if let Some(Value::Array(ramp)) = self.fact("rampup").cloned() {
            let keys = ["start", "increment", "samples"].map(str::to_owned);
            self.set("batch.rampup", Table::from_iter(keys.into_iter().zip(ramp)));
        }
    }

    /// Sums over replicas that no tree of powers of two takes.
    fn reduce(&mut self, batch: Option<(i64, i64)>, dp: Option<i64>) {
        let powers = |count: i64| u64::try_from(count).is_ok_and(u64::is_power_of_two);
        let shares = batch.zip(dp).map(|((micro, global), dp)| global / (micro * dp).max(1));
        // Of batches that grow, some are of no power of two.
        let grows = self.fact("rampup").is_some() && dp.is_some_and(|dp| dp > 1);
        if grows
            || dp.is_some_and(|dp| dp > 1 && !powers(dp))
            || shares.is_some_and(|count| !powers(count))
        {
            self.set("parallel.reduce", "ring");
        }
    }

    /// What two programs of one run say each for itself, and what two flags say together.
    fn told_twice(&mut self) {
        if let Some(steps) = self.count("print_steps") {
            self.set_if_absent("log.every", steps);
            if self.ours("log.every") != Some(steps) {
                let theirs = self.fates.iter_mut().filter(|key| key.key == "steps_per_print");
                for key in theirs {
                    key.fate = KeyStatus::Implied;
                    "the log interval of the program is used".clone_into(&mut key.text);
                }
            }
        }
        match (self.on("reset_positions"), self.on("reset_mask")) {
            (true, true) => self.set("data.reset_at_document", true),
            (false, false) => {}
            _ => self.refuse(
                "data.reset_at_document",
                "expected both or neither of --reset-position-ids and --reset-attention-mask"
                    .to_owned(),
            ),
        }
    }

    fn lengths(&mut self) {
        for unit in ["samples", "tokens", "steps"] {
            if let Some(count) = self.count(unit).filter(|count| *count > 0) {
                self.one("run.budget", unit, count);
                break;
            }
        }
        // Megatron evaluates nothing for so long as that.
        if self.ours("eval.iters").is_some_and(|iters| iters < 1) {
            self.set("eval", Table::from_iter([("every".to_owned(), Value::Integer(0))]));
        }
        if let Some(minutes) = self.count("wall_minutes") {
            self.set("run.max_wall", format!("{minutes}m"));
        }
        let decay = if self.on("in_samples") { "decay_samples" } else { "decay_steps" };
        if let (Some(value), true) = (self.fact("decay_steps").cloned(), self.on("in_samples")) {
            self.facts.insert("decay_samples", value);
        }
        for (fact, unit) in
            [("decay_samples", "samples"), ("decay_tokens", "tokens"), (decay, "steps")]
        {
            if let Some(count) = self.count(fact).filter(|count| *count > 0) {
                self.one("optim.lr.decay", unit, count);
                break;
            }
        }
        for (fact, unit) in [("anneal_samples", "samples"), ("anneal_steps", "steps")] {
            if let Some(count) = self.count(fact) {
                self.one("optim.lr.anneal", unit, count);
            }
        }
        let warm = ["warmup_samples", "warmup_steps"].into_iter().find_map(|fact| {
            Some((fact.trim_start_matches("warmup_"), self.count(fact).filter(|n| *n > 0)?))
        });
        match (warm, self.number("warmup_fraction")) {
            (Some((unit, count)), _) => self.one("optim.lr.warmup", unit, count),
            (None, Some(part)) => self.one("optim.lr.warmup", "fraction", part),
            (None, None) if self.number("peak").or(self.number("peak_optimizer")).is_none() => {}
            (None, None) => self.one("optim.lr.warmup", "steps", 0),
        }
    }

    /// `scripted` if flags of a program say most of it.
    fn learning_rate(&mut self, source: ConfigFormat, scripted: bool) {
        let peak = self.number("peak").or_else(|| self.number("peak_optimizer"));
        if let Some(peak) = peak {
            self.set("optim.lr.peak", peak);
        }
        let style = get(&self.config, "optim.lr.style").map(shown).unwrap_or_default();
        let first_megatron = source == ConfigFormat::Cpm || self.facts.contains_key("micro_v1");
        let is_cpm2 = self.facts.contains_key("model_file");
        if first_megatron && ["linear", "cosine"].contains(&style.as_str()) {
            match self.warmup_and_decay().filter(|_| is_cpm2) {
                // The whole way from the end of the warm-up, of which the end is never seen.
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
        if first_megatron && style == "inverse-sqrt" {
            self.noam(peak);
        }
        if is_cpm2 && style == "exponential" {
            self.set("optim.lr.style", "constant");
            self.notes.push(
                "the exponential decay of CPM-2 has no effect: its rate is constant".to_owned(),
            );
        }
        let by_deepspeed = self.fates.iter().any(|key| key.key == "scheduler.type");
        let is_alone =
            source == ConfigFormat::Deepspeed || self.facts.contains_key("peak_optimizer");
        if !by_deepspeed && (scripted || !is_alone) {
            return;
        }
        let scheduled = style != "range-test" && !style.is_empty();
        if style.is_empty() && source == ConfigFormat::Deepspeed {
            self.set("optim.lr.style", "constant");
        }
        if scheduled && self.fact("warm_from").or(self.fact("decay_steps")).is_some()
            || self.fact("start_ratio").is_some()
        {
            self.set_if_absent("optim.lr.warmup_shape", "log");
            if self.fact("warmup_steps").is_none() {
                self.one("optim.lr.warmup", "steps", 1000);
            }
        }
        if let Some(from) = self.number("warm_from") {
            self.set("optim.lr.start", from);
            if style != "constant" {
                self.set("optim.lr.floor", from);
            }
        }
        // DeepSpeed's own ratios where none are given.
        for (fact, key, ratio) in [("start_ratio", "start", 0.0), ("floor_ratio", "floor", 1e-4)] {
            if let (Some(peak), "cosine") = (peak, style.as_str()) {
                let ratio = self.number(fact).unwrap_or(ratio);
                self.set(&format!("optim.lr.{key}"), ratio * peak);
            }
        }
        if style == "range-test" {
            self.range_test();
        }
    }

    /// Steps of both, as the first Megatron counts them.
    fn warmup_and_decay(&self) -> Option<(f64, f64)> {
        let decay = self.number("decay_steps").or_else(|| self.number("steps"))?;
        let by_part = || Some((decay * self.number("warmup_fraction")?).floor());
        Some((self.number("warmup_steps").or_else(by_part)?, decay))
    }

    /// `lr / sqrt(step)`, whose peak is where the warm-up ends.
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

    /// DeepSpeed's rises for ever, ours over its decay: to where it is at the end of the run.
    fn range_test(&mut self) {
        let floor = get(&self.config, "optim.lr.floor").and_then(float).unwrap_or(1e-3);
        let size = self.number("range_steps").unwrap_or(2000.0);
        let rate = self.number("range_rate").unwrap_or(1.0);
        let steps = self.number("steps").unwrap_or(size);
        self.set("optim.lr.floor", floor);
        self.set("optim.lr.peak", floor * (1.0 + rate * steps / size));
        self.one("optim.lr.decay", "steps", steps as i64);
    }

    fn state(&mut self) {
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

    pub(super) fn finish(mut self) -> Imported {
        self.config.retain(|_, value| value.as_table().is_none_or(|table| !table.is_empty()));
        let missing: Vec<_> =
            REQUIRED.into_iter().filter(|key| get(&self.config, key).is_none()).collect();
        self.check(&missing);
        self.fates.sort_by_key(|key| key.fate);
        Imported { config: self.config, fates: self.fates, missing, notes: self.notes }
    }
}

impl Build {
    /// Tells what our own rules would refuse. What is missing is taken for something that fits
    /// most; where that is not known, and for what is missing itself, nothing is said.
    fn check(&mut self, missing: &[&str]) {
        let of_model =
            |key: &&&str| ["layers", "hidden", "heads"].iter().any(|it| key.ends_with(it));
        if ![0, 3].contains(&missing.iter().filter(of_model).count()) {
            return;
        }
        let mut whole = self.config.clone();
        for key in missing {
            let value = match *key {
                "run.budget" => {
                    Value::Table(Table::from_iter([("steps".into(), 1_000_000.into())]))
                }
                "data.train" => "corpus".into(),
                "model.layers" | "model.heads" => 1024.into(),
                "model.hidden" => (1 << 17).into(),
                "optim.lr.peak" => 1000.0.into(),
                "batch.global" | "batch.micro" => 1.into(),
                _ => (1 << 16).into(),
            };
            set(&mut whole, key, value);
        }
        let text = toml::to_string(&whole).unwrap_or_default();
        let given = Config::from_toml("imported", &text);
        match given.and_then(|config| config.refuse_foreign().map(|()| config)) {
            Err(ConfigError::Key { key, .. }) if missing.iter().any(|it| key.starts_with(it)) => {}
            Err(error) => self.refuse("config", error.to_string()),
            Ok(config) => self.notes.extend(config.idle()),
        }
    }
}

/// A prefix, prefixes, or weights and prefixes in turn.
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
