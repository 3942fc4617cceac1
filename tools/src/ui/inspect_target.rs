//! The target that an argument names: token files, one checkpoint, or a folder of checkpoints.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use indexed::{Format, similar_prefixes};
use storage::{Key, Location, Storage};

use crate::ui::job::CancellableJob;
use crate::ui::step_folder::{run_steps, with_last_component};

/// The suffixes of the files of a prefix.
pub(crate) const PAIR_SUFFIXES: [&str; 2] = [".bin", ".idx"];

/// Names of datasets similar to the prefix at `place`, which has none, for a hint.
pub(crate) fn similar_names(place: &Location, store: &dyn Storage, prefix: &Key) -> Vec<String> {
    let name = |dataset: Key| {
        let is_beside = dataset.parent() == prefix.parent();
        let folder = if is_beside { place.parent() } else { place.clone() };
        folder.join(dataset.name()).to_string()
    };
    similar_prefixes(store, prefix).into_iter().map(name).collect()
}

/// Nothing exists under the name of an argument.
#[derive(Debug)]
pub struct NothingFound(String);

impl NothingFound {
    pub(crate) fn error(text: String) -> anyhow::Error {
        anyhow::Error::new(NothingFound(text))
    }
}

impl std::fmt::Display for NothingFound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NothingFound {}

/// The target that exists under a name.
#[derive(Debug)]
pub enum InspectTarget {
    /// `NAME.bin` and `NAME.idx`.
    Tokens {
        /// The store of their folder.
        store: Arc<dyn Storage>,
        /// Their common prefix.
        prefix: Key,
    },
    /// Token files of another program.
    Foreign {
        /// The store of their folder.
        store: Arc<dyn Storage>,
        /// Their common prefix.
        prefix: Key,
        /// Their format.
        format: Format,
    },
    /// One `step-*` folder.
    Checkpoint {
        /// The store of the folder that holds the steps.
        store: Arc<dyn Storage>,
        /// The step.
        step: u64,
    },
    /// A folder with `step-*` folders in it.
    Checkpoints {
        /// A store whose root is that folder.
        store: Arc<dyn Storage>,
    },
}

impl InspectTarget {
    /// The same target, with its store watched by `work`.
    #[must_use]
    pub fn watched(mut self, work: &Arc<CancellableJob>) -> Self {
        let (InspectTarget::Tokens { store, .. }
        | InspectTarget::Foreign { store, .. }
        | InspectTarget::Checkpoint { store, .. }
        | InspectTarget::Checkpoints { store }) = &mut self;
        *store = work.watch(Arc::clone(store));
        self
    }

    /// Name in messages: the prefix, or the folder that holds the steps.
    #[must_use]
    pub fn display(&self) -> String {
        match self {
            InspectTarget::Tokens { store, prefix }
            | InspectTarget::Foreign { store, prefix, .. } => store.display(prefix),
            InspectTarget::Checkpoint { store, .. } | InspectTarget::Checkpoints { store } => {
                store.display(&Key::root())
            }
        }
    }

    /// Finds the target under a name. A trailing `.bin`, `.idx` or `/` is removed first, and so is
    /// a suffix of the files of another format.
    ///
    /// # Errors
    /// If no known target exists; the error names the expected ones.
    pub fn find(name: &str) -> Result<Self> {
        let name = with_last_component(&Location::new(name));
        if let Ok((store, key)) = name.locate() {
            // An invalid .idx is reported when the pair is opened.
            if let Ok(Some((format, prefix))) = Format::detect(&store, &key)
                && format != Format::Mmididx
            {
                return Ok(InspectTarget::Foreign { store, prefix, format });
            }
        }
        let name = name.without_suffix(&PAIR_SUFFIXES);
        let (parent, key) = name.locate().with_context(|| format!("cannot find {name}"))?;
        let beside =
            parent.list_names(&key.parent()).with_context(|| format!("cannot find {name}"))?;
        let has =
            |suffix: &str| beside.iter().any(|other| *other == format!("{}{suffix}", key.name()));
        if has(".idx") || has(".bin") {
            return Ok(InspectTarget::Tokens { store: parent, prefix: key });
        }
        if let Some(step) = ckpt::step_of(key.name())
            && has("")
        {
            return Ok(InspectTarget::Checkpoint { store: parent, step });
        }
        let (inside, index) = (name.open()?, name.with_suffix(".idx"));
        let near = || match similar_names(&name, &*parent, &key).join(", ") {
            near if near.is_empty() => String::new(),
            near => format!(" (hint: there is {near})"),
        };
        if !has("") {
            let near = near();
            return Err(NothingFound::error(format!(
                "cannot find {name}: expected {index}, token files of another format or a \
                 folder, found none{near}"
            )));
        }
        if inside.list_names(&Key::root())?.iter().any(|name| ckpt::step_of(name).is_some()) {
            return Ok(InspectTarget::Checkpoints { store: inside });
        }
        let hint = match run_steps(&name, &*inside)? {
            Some(steps) => format!(" (hint: the steps of this run are in {steps})"),
            None => near(),
        };
        bail!(
            "cannot find {name}: expected {index} or a folder with steps (step-*), found a \
             folder without steps{hint}"
        )
    }
}
