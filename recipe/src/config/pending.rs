//! Values that a config may have and no code honours yet. Each is refused before a run begins, and
//! `plan` says so; a line goes when its code has come.

use super::{Config, Offload};

/// The key, and whether a config asks for what is not there.
type Pending = (&'static str, fn(&Config) -> bool);

const NOT_YET: [Pending; 1] = [("optim.offload", |c| c.optim.offload != Offload::None)];

impl Config {
    /// What the config asks for and this version cannot do.
    #[must_use]
    pub fn not_yet(&self) -> Vec<String> {
        let asked = NOT_YET.iter().filter(|(_, asks)| asks(self));
        asked.map(|(what, _)| format!("{what} is not there yet")).collect()
    }
}
