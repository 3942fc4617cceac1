//! Loops, with a bounded number of rounds.

use super::run::{Flow, Shell, Status};
use super::tree::List;
use super::{Outcome, is_unknown};

/// Maximum of rounds of a loop. Launch scripts count layers or nodes.
const ROUNDS_MAX: usize = 10_000;

impl Shell {
    /// Handles the end of the body of a loop: whether the loop ends, and with which result.
    fn after_round(&mut self, flow: Flow) -> Option<Flow> {
        match flow {
            Flow::Next | Flow::Continue(0 | 1) => None,
            Flow::Break(0 | 1) => Some(Flow::Next),
            Flow::Break(levels) => Some(Flow::Break(levels - 1)),
            Flow::Continue(levels) => Some(Flow::Continue(levels - 1)),
            Flow::Return | Flow::Exit => Some(flow),
        }
    }

    fn round(&mut self, body: &List) -> Outcome<Option<Flow>> {
        self.loops += 1;
        let flow = self.run(body)?;
        self.loops = self.loops.saturating_sub(1);
        Ok(self.after_round(flow))
    }

    /// A loop with an unknown number of rounds: it is run once, and variables that it changes
    /// become unknown.
    fn round_unknown(&mut self, body: &List) -> Outcome<Flow> {
        let line = self.line;
        self.limits.spend(self.variables.bytes())?;
        let before = self.variables.clone();
        let flow = self.round(body)?;
        self.variables.forget_changes(&before);
        self.line = line;
        self.note("it is not known how often this loop runs");
        Ok(flow.filter(|flow| *flow == Flow::Return).unwrap_or(Flow::Next))
    }

    pub(super) fn for_each(&mut self, name: &str, words: &[String], body: &List) -> Outcome<Flow> {
        self.status = Status::Known(0);
        if words.len() > ROUNDS_MAX {
            return Err(self.too_many_rounds());
        }
        let line = self.line;
        for word in words {
            let set = self.variables.set(name, None, word.clone());
            if let Err(cause) = set {
                self.note(&cause);
            }
            self.line = line;
            if is_unknown(word) {
                let flow = self.round_unknown(body)?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
            } else if let Some(flow) = self.round(body)? {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    pub(super) fn for_math(
        &mut self,
        [start, condition, step]: [&str; 3],
        body: &List,
    ) -> Outcome<Flow> {
        let line = self.line;
        self.math(start)?;
        for _ in 0..ROUNDS_MAX {
            self.line = line;
            let holds = if condition.trim().is_empty() { Some(1) } else { self.math(condition)? };
            match holds {
                Some(0) => {
                    self.status = Status::Known(0);
                    return Ok(Flow::Next);
                }
                Some(_) => {}
                None => return self.round_unknown(body),
            }
            if let Some(flow) = self.round(body)? {
                return Ok(flow);
            }
            self.math(step)?;
        }
        self.line = line;
        Err(self.too_many_rounds())
    }

    pub(super) fn looped(
        &mut self,
        condition: &List,
        body: &List,
        is_until: bool,
    ) -> Outcome<Flow> {
        let line = self.line;
        let started = self.started.len();
        for _ in 0..ROUNDS_MAX {
            self.line = line;
            let flow = self.condition(condition)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
            let holds = match &self.status {
                Status::Known(code) => (*code == 0) != is_until,
                // `until torchrun ...`: it trains until it succeeds.
                Status::Unknown { .. } if is_until && self.started.len() > started => false,
                Status::Unknown { .. } => return self.round_unknown(body),
            };
            if !holds {
                self.status = Status::Known(0);
                return Ok(Flow::Next);
            }
            if let Some(flow) = self.round(body)? {
                return Ok(flow);
            }
            if self.started.len() > started + 1000 {
                self.line = line;
                self.note("this loop starts programs without end");
                return Ok(Flow::Next);
            }
        }
        self.line = line;
        Err(self.too_many_rounds())
    }

    fn too_many_rounds(&self) -> String {
        format!("line {}: a loop of more than {ROUNDS_MAX} rounds", self.line)
    }
}
