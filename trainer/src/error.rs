use std::fmt;

use recipe::Incompatible;

use crate::config::ConfigError;

/// Why a run, a generation or a plan failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The config cannot be used.
    Config(ConfigError),
    /// libtorch refused an operation.
    Torch {
        /// Its message, in one line.
        text: String,
    },
    /// The bridge to libtorch refused.
    Bridge(bridge::Error),
    /// A file could not be read or written.
    Storage(Box<storage::Error>),
    /// Samples, a corpus or text could not be read.
    Feed(feed::Error),
    /// A checkpoint could not be read or written.
    Ckpt(ckpt::Error),
    /// The config, the data and the checkpoint do not match.
    Mismatch(Incompatible),
    /// A gradient or a loss is not finite.
    NotFinite {
        /// The step that was being computed; its weights were not changed.
        step: u64,
        /// What was not finite, and its value.
        object: String,
        /// The first sample of the step, as its place in the sample order.
        first_sample: u64,
        /// Samples of the step.
        samples: u64,
    },
    /// The loss had a spike, at which the config stops the run.
    Spike {
        /// The step; nothing of it was saved.
        step: u64,
        /// Its loss.
        loss: f64,
        /// The mean of those before it.
        mean: f64,
        /// The first sample of the step, as its place in the sample order.
        first_sample: u64,
        /// Samples of the step.
        samples: u64,
    },
    /// A file of the run's own folder could not be written.
    Run {
        /// The operation, and its object.
        operation: String,
        /// The error of the system.
        source: std::io::Error,
    },
}

/// `std`'s result, with this [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether the cause is another rank or the connection to it, and not this rank.
    #[must_use]
    pub fn is_peer_lost(&self) -> bool {
        matches!(self, Error::Bridge(error) if error.is_peer_lost())
    }

    /// Whether another process has taken over the folder of checkpoints.
    #[must_use]
    pub fn is_lease_lost(&self) -> bool {
        matches!(self, Error::Ckpt(ckpt::Error::LeaseLost { .. }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Config(e) => write!(f, "{e}"),
            Error::Torch { text } => write!(f, "cannot compute with libtorch: {text}"),
            Error::Bridge(e) => write!(f, "{e}"),
            Error::Storage(e) => write!(f, "{e}"),
            Error::Feed(e) => write!(f, "{e}"),
            Error::Ckpt(e) => write!(f, "{e}"),
            Error::Mismatch(e) => write!(f, "{e}"),
            Error::NotFinite { step, object, first_sample, samples } => write!(
                f,
                "cannot complete step {step}: {object} is not finite, at samples {first_sample} to \
                 {} of the training order; the weights are those of step {} (hint: lower \
                 optim.lr.peak, lengthen optim.lr.warmup, or inspect the samples: \
                 `feedline samples RUN.toml --show --first {first_sample} --samples {samples}`)",
                first_sample + samples - 1,
                step - 1
            ),
            Error::Spike { step, loss, mean, first_sample, samples } => write!(
                f,
                "loss spike at step {step}: loss {loss:.4} after a mean of {mean:.4}, at samples \
                 {first_sample} to {} of the training order (hint: inspect the samples: `feedline \
                 samples RUN.toml --show --first {first_sample} --samples {samples}`, lower \
                 optim.lr.peak, or change run.spike)",
                first_sample + samples - 1
            ),
            Error::Run { operation, source } => write!(f, "cannot {operation}: {source}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Run { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        // The other lines are a stack trace of libtorch.
        let text = error.to_string();
        Error::Torch { text: text.lines().next().unwrap_or_default().to_owned() }
    }
}

/// Errors of the other crates are boxed: a result is as large as its largest error.
macro_rules! from {
    ($($variant:ident: $source:ty),*) => {
        $(impl From<$source> for Error {
            fn from(error: $source) -> Self {
                Error::$variant(error.into())
            }
        })*
    };
}

from!(
    Config: ConfigError,
    Bridge: bridge::Error,
    Storage: storage::Error,
    Feed: indexed::Error,
    Ckpt: ckpt::Error,
    Feed: preprocess::Error,
    Mismatch: Incompatible
);

impl From<feed::Error> for Error {
    fn from(error: feed::Error) -> Self {
        match error {
            feed::Error::Mismatch(mismatch) => Error::Mismatch(mismatch),
            other => Error::Feed(other),
        }
    }
}
