use std::fmt;

/// Things that do not go together: the config, the environment, the data, a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incompatible {
    /// What was being done, and to what.
    pub operation: String,
    /// What came and what was due, one item a line.
    pub details: Vec<String>,
    /// What is likely to help.
    pub hint: &'static str,
}

impl Incompatible {
    /// Of two things.
    #[must_use]
    pub fn new(
        operation: impl Into<String>,
        detail: impl Into<String>,
        hint: &'static str,
    ) -> Self {
        Incompatible { operation: operation.into(), details: vec![detail.into()], hint }
    }
}

impl fmt::Display for Incompatible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.operation)?;
        for detail in &self.details {
            write!(f, "\n  {detail}")?;
        }
        write!(f, "\nhint: {}", self.hint)
    }
}

impl std::error::Error for Incompatible {}
