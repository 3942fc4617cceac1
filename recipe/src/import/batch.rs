//! The batch of a step, and its ranks.

use toml::{Table, Value};

use super::{Build, KeyStatus};

impl Build {
    /// `global = micro x accumulation x dp`, with `dp = ranks / (tp x pp)`.
    pub(super) fn batch(&mut self) {
        let (tp, pp) = (
            self.config_integer("parallel.tp").unwrap_or(1),
            self.config_integer("parallel.pp").unwrap_or(1),
        );
        let world = self
            .count("world")
            .or_else(|| Some(self.count("gpus")? * self.count("nodes").unwrap_or(1)));
        let sharding = self.count("sharding").unwrap_or(1);
        let named = self.count("dp").map(|dp| dp * sharding);
        let dp = named.or_else(|| world.map(|world| world / (tp * pp).max(1)));
        let local = self.count("local");
        // The loader of the program uses the flag.
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
        // The accumulation of Paddle repeats the local batch, in micro-batches.
        let passes = if self.facts.contains_key("sharding") && local.is_some() {
            local.zip(micro).map(|(local, micro)| local / micro.max(1))
        } else {
            passes
        };
        let made = |dp: i64| Some(micro? * passes.unwrap_or(1) * dp);
        let global = self.count("global").or_else(|| made(dp.unwrap_or(1)));
        if let (Some(dp), Some(global), Some(micro)) = (dp, global, micro) {
            self.check_batch(global, micro, passes, dp);
        }
        if let (Some(global), Some(micro)) = (global, micro) {
            self.set("batch.global", global);
            self.set("batch.micro", micro);
        }
        self.reduce(micro.zip(global), dp);
        let is_of_one = self.count("global").is_none() && global.is_some();
        self.check_ranks(world.or_else(|| dp.map(|dp| dp * tp * pp)), sharding, is_of_one);
        match self.fact("rampup").cloned() {
            None => {}
            Some(Value::Array(ramp)) if ramp.len() == 3 => {
                let keys = ["start", "increment", "samples"].map(str::to_owned);
                self.set("batch.rampup", Table::from_iter(keys.into_iter().zip(ramp)));
            }
            Some(other) => {
                let text = format!("batch.rampup: expected three numbers, found {other}");
                self.correct("rampup", KeyStatus::Refused, &text);
            }
        }
    }

    fn check_batch(&mut self, global: i64, micro: i64, passes: Option<i64>, dp: i64) {
        let share = micro * dp;
        let text = match passes {
            Some(passes) if share * passes != global => format!(
                "expected micro {micro} x accumulation {passes} x dp {dp} = {}, found {global}",
                share * passes
            ),
            None if global % share.max(1) != 0 => {
                format!("expected a multiple of micro {micro} x dp {dp} = {share}, found {global}")
            }
            _ => return,
        };
        self.refuse("batch.global", text);
    }

    /// `is_of_one` if the global batch is known for one replica only.
    fn check_ranks(&mut self, ranks: Option<i64>, sharding: i64, is_of_one: bool) {
        let (tp, pp) = (
            self.config_integer("parallel.tp").unwrap_or(1),
            self.config_integer("parallel.pp").unwrap_or(1),
        );
        let divided = (tp * pp).max(1);
        match ranks {
            Some(ranks) if ranks % divided != 0 => {
                let text = format!("expected a multiple of tp {tp} x pp {pp} ranks, found {ranks}");
                self.refuse("parallel", text);
            }
            Some(ranks) if ranks % (divided * sharding).max(1) != 0 => {
                let text = format!(
                    "expected a multiple of tp {tp} x pp {pp} x sharding_degree {sharding} ranks, \
                     found {ranks}"
                );
                self.refuse("parallel", text);
            }
            Some(ranks) => self.notes.push(format!(
                "the run had {ranks} ranks: dp {} x tp {tp} x pp {pp}",
                ranks / divided
            )),
            None if is_of_one => self.notes.push(
                "no file sets the number of ranks: batch.global is that of one replica (hint: \
                 --ranks N)"
                    .to_owned(),
            ),
            None => {}
        }
    }

    /// Selects the ring for gradient sums that are not over powers of two.
    fn reduce(&mut self, batch: Option<(i64, i64)>, dp: Option<i64>) {
        let powers = |count: i64| u64::try_from(count).is_ok_and(u64::is_power_of_two);
        let shares = batch.zip(dp).map(|((micro, global), dp)| global / (micro * dp).max(1));
        // In a batch size ramp some sizes are not powers of two.
        let grows = self.fact("rampup").is_some() && dp.is_some_and(|dp| dp > 1);
        if grows
            || dp.is_some_and(|dp| dp > 1 && !powers(dp))
            || shares.is_some_and(|count| !powers(count))
        {
            self.set("parallel.reduce", "ring");
        }
    }
}
