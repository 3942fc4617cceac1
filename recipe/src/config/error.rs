use std::fmt;

/// Why a config cannot be used. Every variant names the file or `--set`.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file could not be read.
    Read {
        /// The file.
        file: String,
        /// The error of the store.
        source: storage::Error,
    },
    /// The file is not valid TOML.
    Syntax {
        /// The file.
        file: String,
        /// The message of the parser, with line and column.
        message: String,
    },
    /// `extends` cannot be resolved.
    Extends {
        /// The files, from the first to the one that fails.
        chain: Vec<String>,
        /// Why the last file is refused.
        problem: String,
    },
    /// A `--set` that is not `key=value`.
    Set {
        /// The argument as typed.
        argument: String,
        /// Why it is refused.
        problem: String,
    },
    /// A key that is unknown, missing, of the wrong type or out of range.
    Key {
        /// The file that has the key, `--set`, or the file that should have the key.
        file: String,
        /// Its full name, as `optim.lr.peak`.
        key: String,
        /// Why it is refused.
        problem: String,
        /// The likely cause.
        hint: Option<String>,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigError::Read { file, source } => write!(f, "cannot read config {file}: {source}"),
            ConfigError::Syntax { file, message } => {
                write!(f, "cannot read config {file}: {}", message.trim_end())
            }
            ConfigError::Extends { chain, problem } => {
                write!(f, "cannot read config {}: {problem}", chain.join(" -> "))
            }
            ConfigError::Set { argument, problem } => {
                write!(f, "cannot use --set {argument}: {problem}")
            }
            ConfigError::Key { file, key, problem, hint } => {
                let config = if file == "--set" { "" } else { "config " };
                write!(f, "cannot use {config}{file}: {key}: {problem}")?;
                hint.as_ref().map_or(Ok(()), |hint| write!(f, " (hint: {hint})"))
            }
        }
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ConfigError::Read { source, .. } => Some(source),
            _ => None,
        }
    }
}
