use std::fmt;

/// Why a config cannot be used. Every variant names the file, or `--set`.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file could not be read.
    Read {
        /// The file.
        file: String,
        /// What the store said.
        source: storage::Error,
    },
    /// The file is no TOML.
    Syntax {
        /// The file.
        file: String,
        /// The parser's words, with line and column.
        message: String,
    },
    /// `extends` cannot be followed.
    Extends {
        /// The files, from the one that was asked for to the one that fails.
        chain: Vec<String>,
        /// What is wrong with the last.
        problem: String,
    },
    /// A `--set` that is not `key=value`.
    Set {
        /// As it was given.
        argument: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A key that is unknown, missing, of the wrong type or out of range.
    Key {
        /// The file that has it, `--set`, or the file that should have it.
        file: String,
        /// Its full name, as `optim.lr.peak`.
        key: String,
        /// What is wrong with it.
        problem: String,
        /// The likely cause.
        hint: Option<String>,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigError::Read { file, source } => write!(f, "read config {file}: {source}"),
            ConfigError::Syntax { file, message } => {
                write!(f, "read config {file}: {}", message.trim_end())
            }
            ConfigError::Extends { chain, problem } => {
                write!(f, "read config {}: {problem}", chain.join(" -> "))
            }
            ConfigError::Set { argument, problem } => write!(f, "--set {argument}: {problem}"),
            ConfigError::Key { file, key, problem, hint } => {
                write!(f, "config {file}: {key}: {problem}")?;
                hint.as_ref().map_or(Ok(()), |hint| write!(f, "; hint: {hint}"))
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
