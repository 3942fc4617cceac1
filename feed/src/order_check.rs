//! Whether the cached sample orders of a run are whole, checked by a thread beside it.
//!
//! A run begins at once when the seals of its orders fit. A seal covers parts of each file, so a
//! bit may have flipped in another: samples would be skipped or read twice, and nobody would see.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, PoisonError};

use indexed::Split;
use recipe::config::Config;
use serde_json::Value;
use storage::Storage;

use crate::orders::Orders;
use crate::{Corpora, Error, Result};

/// The check of a run's orders.
#[derive(Clone, Debug)]
pub(super) struct OrderCheck(Arc<Mutex<Option<Receiver<Result<()>>>>>);

impl OrderCheck {
    /// Starts to check the orders of a run. Without a thread to spare they are not checked.
    pub(super) fn start(
        corpora: &Corpora,
        config: &Config,
        tokenizer: Value,
        store: Arc<dyn Storage>,
    ) -> Self {
        let (corpora, config) = (corpora.clone(), config.clone());
        let (outcome, receiver) = channel();
        let check = move || {
            let (corpora, config, cache) = (&corpora, &config, Some(&*store));
            let orders = Orders { corpora, config, tokenizer, cache, verify: true };
            let mut checked = orders.open(Split::Train, config.samples_total()).map(|_| ());
            if checked.is_ok() && config.eval.every > 0 {
                checked = orders.open(Split::Valid, config.eval_samples()).map(|_| ());
            }
            // A cache that could not be written: the run has its order in memory.
            let is_absent = |error: &Error| match error {
                Error::Indexed(error) => matches!(**error, indexed::Error::NoCache { .. }),
                _ => false,
            };
            let checked = checked.or_else(|e| if is_absent(&e) { Ok(()) } else { Err(e) });
            // The run may have ended.
            let _ = outcome.send(checked);
        };
        let thread = std::thread::Builder::new().name("order-check".to_owned()).spawn(check);
        if let Err(error) = &thread {
            log::warn!("the cached sample order is not checked beside the run: {error}");
        }
        OrderCheck(Arc::new(Mutex::new(thread.is_ok().then_some(receiver))))
    }

    /// The error of the check, if it has ended with one. `wait` waits for its end.
    pub(super) fn look(&self, wait: bool) -> Result<()> {
        let mut receiver = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waiting) = receiver.as_ref() else { return Ok(()) };
        let outcome = match wait {
            // A thread that has panicked has said so.
            true => Some(waiting.recv().unwrap_or(Ok(()))),
            false => waiting.try_recv().ok(),
        };
        let Some(outcome) = outcome else { return Ok(()) };
        *receiver = None;
        outcome
    }
}
