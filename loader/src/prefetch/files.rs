//! Data files, opened when the window first needs them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use storage::{Object, Stage};

use crate::{DataFile, Error, Result};

/// Files kept open: half of the 1,024 that a process may have by default. Files that requests in
/// flight need stay open beyond that.
const OPEN_MAX: usize = 512;

/// The files of an order.
#[derive(Debug)]
pub(crate) struct DataFiles {
    /// The object, and the last round that needed it.
    open: Vec<Option<(Arc<dyn Object>, u64)>>,
    count: usize,
}

/// The file being opened, for reports of a stalled loader.
#[derive(Debug, Default)]
pub(crate) struct Opening(Mutex<Option<(String, Instant)>>);

impl Opening {
    fn set(&self, what: Option<String>) {
        let since = what.map(|what| (what, Instant::now()));
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    /// The file being opened, and for how long.
    pub(crate) fn current(&self) -> Option<(String, Duration)> {
        let opening = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        opening.as_ref().map(|(what, since)| (what.clone(), since.elapsed()))
    }
}

impl DataFiles {
    pub(crate) fn new(count: usize) -> Self {
        DataFiles { open: vec![None; count], count: 0 }
    }

    /// Returns a file, and opens it if needed.
    pub(crate) fn get(
        &mut self,
        sources: &[DataFile],
        file: u32,
        round: u64,
        opening: &Opening,
        timeout: Duration,
    ) -> Result<Arc<dyn Object>> {
        let index = file as usize; // fits: 64 bits
        if let Some((object, last)) = &mut self.open[index] {
            *last = round;
            return Ok(Arc::clone(object));
        }
        let object = open(&sources[index], opening, timeout)?;
        if self.count >= OPEN_MAX {
            self.close_one();
        }
        self.open[index] = Some((Arc::clone(&object), round));
        self.count += 1;
        Ok(object)
    }

    /// Closes the least recently used file.
    fn close_one(&mut self) {
        let open = self.open.iter_mut().filter(|slot| slot.is_some());
        if let Some(slot) = open.min_by_key(|slot| slot.as_ref().map(|(_, last)| *last)) {
            *slot = None;
            self.count -= 1;
        }
    }
}

fn open(source: &DataFile, opening: &Opening, timeout: Duration) -> Result<Arc<dyn Object>> {
    let what = source.store.display(&source.key);
    opening.set(Some(what.clone()));
    // Opening a file on a dead server may block forever.
    let (store, key) = (Arc::clone(&source.store), source.key.clone());
    let opened = Stage::begin(format!("open {what}"), timeout).run(move || store.open(&key));
    opening.set(None);
    let object = opened??;
    let (found, expected) = (object.len_bytes(), source.len_bytes);
    if found != expected {
        return Err(Error::FileLength { object: what, found, expected });
    }
    Ok(object)
}
